"""What the experiments need and is not about capsules."""

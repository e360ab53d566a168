"""What the experiments use and what is not about capsules."""

"""What the scripts have in common and what is not about capsules."""

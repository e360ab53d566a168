"""Experiments beyond the two papers' first claims, run as ``python -m more.NAME``."""

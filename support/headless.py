"""Imported before matplotlib: draw into memory, whatever backend a notebook names for the commands that it starts."""

import os

os.environ["MPLBACKEND"] = "agg"

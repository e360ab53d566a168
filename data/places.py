"""Where data lie: the paths that a person gives, and the cache."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """A path with the home folder in place of ~; where there is none, the path as it is, which is not found."""
    return Path(os.path.expanduser(path))


def cache_folder() -> Path:
    """The folder of what is downloaded or drawn once: that of the variable CAPSULES_CACHE, or hinton-mnist in that of
    XDG_CACHE_HOME or in ~/.cache. Raises OSError where a process has none of the three."""
    if own := os.environ.get("CAPSULES_CACHE"):
        return expanded(own)
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))  # by its standard, one that is no whole path does not count
    caches = caches if caches.is_absolute() else expanded("~/.cache")
    if not caches.is_absolute():
        raise OSError("there is no home folder for a cache: let the variable CAPSULES_CACHE name a folder")
    return caches / "hinton-mnist"

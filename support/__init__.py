"""What the experiments need and is not about capsules."""

from importlib.util import find_spec
from pathlib import Path

for _name in ("data", "fast", "support"):
    _own, _found = Path(__file__).resolve().parent.parent / _name, find_spec(_name)
    if _found and (not _found.origin or Path(_found.origin).resolve().parent != _own):
        _where = _found.origin or next(iter(_found.submodule_search_locations or ()), None)
        says = f"{_where} is in the way of {_own}: rename it, or start in the project's folder"
        raise ImportError(says, name="more")  # of that name ``python -m more.NAME`` makes one line

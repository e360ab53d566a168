"""Experiments beyond the two papers' first claims, run as ``python -m more.NAME``."""

from importlib.util import find_spec
from pathlib import Path

_own, _found = Path(__file__).resolve().parent.parent / "support", find_spec("support")
if _found is None or not _found.origin or Path(_found.origin).resolve().parent != _own:
    _where = _found and (_found.origin or next(iter(_found.submodule_search_locations or ())))
    raise ImportError(f"{_where} is in the way of {_own}: rename it, or start in the project's folder", name="more")
import support as support  # noqa: E402  says the same of data/ and fast/

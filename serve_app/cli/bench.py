"""`windve bench` runs the benchmarks of the repository that this code is in."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from deployments.errors import WindveError

_ROOT = Path(__file__).parents[2]
_OF_THEIR_OWN = {  # first word -> a module whose `main` takes the words after it
    "paper": "benchmarks.paper",
}


def main(words: Sequence[str]) -> int:
    """Raises WindveError in an installed package, which does not contain the benchmarks."""
    if not (_ROOT / "benchmarks" / "kit" / "registry.py").exists():
        raise WindveError("the installed package contains no benchmarks: clone the repository and run this there")
    sys.path.insert(0, str(_ROOT))  # they are not part of the package, so an editable install does not find them either
    own = _OF_THEIR_OWN.get(words[0]) if words else None
    status: int = importlib.import_module(own or "benchmarks.__main__").main(words[1:] if own else words)
    return status

"""What `make docs` shows: every page at its place in the repository, and each file that a page links to.

mkdocs looks into `docs/` only; the pages link to README.md, SECURITY.md, code and results beside it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_FIRST = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/*.md", "k8s/*.md")
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, *, config: Any) -> Files:
    """The pages of `_FIRST` and all that they link to, in place of what mkdocs has found."""
    theme = [file for file in files if file.abs_src_path is None or not Path(file.abs_src_path).is_relative_to(ROOT)]
    shown: set[Path] = set()
    found = [path for pattern in _FIRST for path in sorted(ROOT.glob(pattern))]
    while found:
        path = found.pop()
        if path in shown or not path.is_file() or not path.is_relative_to(ROOT):
            continue
        shown.add(path)
        if path.suffix == ".md":
            found += [(path.parent / target).resolve() for target in _LINK.findall(path.read_text(encoding="utf-8"))]
    ours = [File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)) for path in sorted(shown)]
    return Files([*theme, *ours])

"""Writes docs/model-files.md: how windve handles each key of a model's folder. `python -m tests.kit.folder_page`."""

import json
from collections import defaultdict
from pathlib import Path

from deployments.models.folder_keys import DONE, FILES, MODULES, REFUSED, Keys

PAGE = Path(__file__).parents[2] / "docs" / "model-files.md"
HEAD = """\
# Model files

Find a key of your model's files here: windve supports it, ignores it because it cannot change the answer, or refuses
the model. These are all that sentence-transformers 6 and transformers 5 read. For what is served see
[Models](models.md). `python -m tests.kit.folder_page` writes this page from the tables that windve
itself obeys (`deployments/models/folder_keys.py`). A test compares them with the installed libraries.

- **Supported**: means the same as in the library that reads it.
- **No effect**: the vectors or scores are the same with any value. The reason is below.
- **Refused**: windve does not start, and names the key. Null is accepted, and so is the value after `=`: it asks for
  what windve does anyway. A key that is not in the table is refused too. In files with a star it is ignored, as in the
  libraries, or belongs to the model's class ([Models](models.md#families)).

`model_kwargs`, `processor_kwargs` and `config_kwargs` may have their older names: `model_args`, `tokenizer_args` and
`config_args`.
"""
TRANSFORMER = "sentence_bert_config.json"


def page():
    """The whole page."""
    keys = {name + " *" * how.is_open: how for name, how in FILES.items() if isinstance(how, Keys)}
    modules = {f"{name}: config.json": how for name, how in MODULES.items() if how is not FILES[TRANSFORMER]}
    reasons = defaultdict(list)
    sections = [HEAD, "\n## Keys\n\n", _row("file", "supported", "no effect", "refused"), "|---|---|---|---|\n"]
    for place, how in (keys | modules).items():
        for key, why in sorted(how.unused.items()):
            reasons[why].append(key)
        refused = [key + "".join(f" = {json.dumps(value)}" for value in same) for key, same in how.refused.items()]
        sections.append(_row(place, *map(_listed, (sorted(how.done), sorted(how.unused), refused))))
    sections += ["\n## Why keys have no effect\n\n", _row("keys", "reason"), "|---|---|\n"]
    sections += [_row(_listed(dict.fromkeys(some)), why) for why, some in sorted(reasons.items())]
    sections += ["\n## Files\n\n", _row("file", "handling"), "|---|---|\n"]
    files = defaultdict(list)
    for name, how in FILES.items():
        files["by its keys, above" if isinstance(how, Keys) else "read" if how == DONE else how].append(name)
    sections += [_row(_listed(sorted(names)), how) for how, names in files.items()]
    sections += ["\n## Modules that are refused\n\n", _row("module", "reason"), "|---|---|\n"]
    others = defaultdict(list)
    for name, why in REFUSED.items():
        others[why or "not implemented"].append(name)
    return "".join([*sections, *(_row(_listed(names), why) for why, names in others.items())])


def _listed(names):
    older = ("model_args.", "tokenizer_args.", "config_args.")
    return ", ".join(f"`{name}`" for name in names if not name.startswith(older)) or "-"


def _row(*cells):
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())

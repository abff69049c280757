"""A small model that is trained on this machine, to see text generated without a model hub.

It is a toy that writes like docstrings and knows nothing. Its id is `small:docstrings`. This process does not import
torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

from deployments.errors import SettingsError
from deployments.generation.text import train_docstrings
from deployments.generation.text.train_docstrings import Recipe
from deployments.models.disk_cache import cache_folder

SMALL_MODEL = "small:docstrings"
Tell = Callable[[int, int, float], None]  # progress: steps done, steps in all, loss in nats per token


@dataclass(frozen=True, slots=True)
class Made:
    """A model that was just trained, in its folder. `unseen`: the loss on held-out texts, in nats per token."""

    folder: Path
    parameters: int
    unseen: float

    def __str__(self) -> str:
        return (
            f"{self.folder}: {self.parameters / 1e6:.1f} million parameters, trained here on Python's documentation "
            f"(loss {self.unseen:.2f} for each token of texts it has not seen). "
            "It is a toy: it writes like docstrings, and knows nothing"
        )


def small_model_folder(recipe: Recipe | None = None) -> Path:
    """The model's folder, beside the hub's cache. The first call trains it, which takes a core about a minute, and
    shows a progress bar on a terminal. Concurrent calls wait. Raises SettingsError if it cannot be trained or stored.
    """
    recipe = recipe or Recipe()
    folder = _kept(recipe)
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.parent.stat().st_uid != os.getuid():
            raise PermissionError("it belongs to another user")
        with FileLock(folder.with_name(f".{folder.name}.lock"), fallback_to_soft=False):
            if not folder.is_dir():
                make_and_show(folder, recipe)
    except OSError as error:
        raise SettingsError("args.model.id", f"{SMALL_MODEL} cannot be kept in {folder.parent}: {error}") from None
    return folder


def make_and_show(folder: Path, recipe: Recipe | None = None) -> None:
    """`make` with a progress bar on a terminal, and a line about the result."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"{SMALL_MODEL} is trained once, on Python's own documentation: about a minute of one core")
    with _bar(console) as tell:
        made = make(folder, recipe or Recipe(), tell)
    console.print(str(made))


@contextmanager
def _bar(console: object) -> Iterator[Tell]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("steps, loss {task.fields[loss]:.2f}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:  # type: ignore[arg-type]
        task = bars.add_task("training", total=None, loss=float("nan"))
        yield lambda step, steps, loss: bars.update(task, completed=step, total=steps, loss=loss)


def make(folder: Path, recipe: Recipe, tell: Tell = lambda *_: None) -> Made:
    """Train the model in its own process, and write it into the new `folder`: all of it or nothing.

    Raises SettingsError if that process fails, and OSError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as beside:
        written = Path(beside) / folder.name
        written.mkdir()
        said = _train(written, recipe, tell)
        written.rename(folder)
    return Made(folder, int(said["parameters"]), said["unseen"])


def _train(folder: Path, recipe: Recipe, tell: Tell) -> dict[str, float]:
    command = [sys.executable, "-P", train_docstrings.__file__]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # see torch_engine.import_torch
    last, said = "without a word", {}
    with subprocess.Popen(  # noqa: S603 - ourselves
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"folder": str(folder), **asdict(recipe)}))
        process.stdin.close()
        for line in process.stdout:
            if not line.startswith("{"):  # a warning or an error
                last = line.strip() or last
            elif "step" in (said := json.loads(line)):
                tell(said["step"], recipe.steps, said["loss"])
    if "unseen" not in said:
        raise SettingsError("args.model.id", f"{SMALL_MODEL} could not be trained, the process ended: {last}")
    return said


def _kept(recipe: Recipe) -> Path:
    """The folder. Its name depends on everything that the model depends on."""
    source = Path(train_docstrings.__file__).read_text(encoding="utf-8")
    about = json.dumps([asdict(recipe), source, platform.python_version()])
    return cache_folder() / "small-models" / f"docstrings-{hashlib.sha256(about.encode()).hexdigest()[:16]}"

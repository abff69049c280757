"""`windve convert` writes a model as a folder of safetensors, for hosts without access to a hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deployments.errors import SettingsError
from deployments.models.model_folder import find_folder
from deployments.models.pickles import make_folder, pickles_of
from deployments.models.weights import count_parameters, find_weights
from deployments.settings import ModelSettings
from serve_app.cli.options import parser_of

_DESCRIPTION = """\
Write a model into a new FOLDER, with its weights as safetensors and without any pickle, so that a host without a model
hub can serve it: copy FOLDER there and set args.model.id to its path.

Weights that exist only as pickles (pytorch_model.bin, bge-m3's sparse_linear.pt and colbert_linear.pt) are read in a
separate process by torch.load(weights_only=True), which runs no code. All other files are copied unchanged."""
_EPILOG = """\
examples:
  windve convert BAAI/bge-m3 models/bge-m3              from the hub (HF_ENDPOINT: from a mirror)
  windve convert ./downloaded/bge-m3 models/bge-m3      from a folder
  windve convert BAAI/bge-m3 models/bge-m3 --revision 5617a9f61b028005a4858fdac845db406aefb181"""


def main(arguments: Sequence[str]) -> None:
    """Raises SettingsError if the model cannot be found or written."""
    parser = parser_of("convert", _DESCRIPTION, _EPILOG)
    parser.add_argument("model", metavar="MODEL", help="a hub name, a folder, or package:NAME/FOLDER")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where to write it; must not exist yet")
    parser.add_argument("--revision", help="commit of a hub model (default: the newest)")
    wanted = parser.parse_args(arguments)
    convert(ModelSettings(id=wanted.model, revision=wanted.revision, trust_remote_code=True), wanted.folder)


def convert(settings: ModelSettings, folder: Path) -> None:
    """Print what was written. Raises SettingsError, and leaves no `folder` then."""
    if folder.exists():
        raise SettingsError("FOLDER", f"{folder} already exists; remove it, or choose another folder")
    source, revision = find_folder(settings)
    pickles = pickles_of(source)
    if not pickles:
        find_weights(source)  # so that missing weights are found before gigabytes are copied
    try:
        make_folder(source, folder, pickles)
    except OSError as error:
        raise SettingsError("FOLDER", f"{folder} cannot be written: {error}") from None
    weights = find_weights(folder)
    at = f" at {revision}" if revision else ""
    made = f"{len(pickles)} files converted from pickles" if pickles else "its weights were already safetensors"
    size = sum(path.stat().st_size for path in weights) / 2**30
    print(
        f"{settings.id}{at} is in {folder}: {sum(map(count_parameters, weights)) / 1e6:.1f} million parameters, "
        f"{size:.2f} GiB, {made}; to serve it, set args.model.id: {folder}"
    )

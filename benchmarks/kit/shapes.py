"""The model that the benchmarks of engines share."""

from pathlib import Path

from benchmarks.kit.serving import ROOT
from calibration.devices.shapes import BERT_LARGE, write_bert

_CACHE = ROOT / "reports" / "bench" / "models"


def bge_large_folder() -> Path:
    """A model with bge-large's shape: 335 million weights, 1.3 GB in float32. Created on first use, in some seconds."""
    folder = _CACHE / "bge-large-own-words"
    if not folder.exists():
        write_bert(BERT_LARGE, folder)
    return folder

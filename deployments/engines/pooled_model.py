"""The transformer with its pooling, as one torch module, and how queries are padded for it. Imports torch.

Shared by the engines: one runs this module, the other exports it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModel
from transformers.utils import logging as transformers_logging

from deployments.engines import TokenBatch, Vectors
from deployments.engines.passes import Lengths
from deployments.errors import SettingsError
from deployments.model_files import ModelCard

logger = logging.getLogger("ray.serve")

AGREEMENT = 0.999  # smallest cosine to float32 that a default may have
_PROBE_LENGTHS = (3, 8, 24, 75, 200)  # tokens; the inputs of the comparison
_TIMED_QUERIES, _TIMED_TOKENS = 16, 75  # what two ways to compute are timed on
_TIMES = 3  # the first pays for what is prepared once

Ids = npt.NDArray[np.int64]  # shape [queries, tokens], padded on the right


class PooledModel(torch.nn.Module):
    """(ids, mask) int64 [queries, tokens], padded on the right -> float32 [queries, dimension], not normalised."""

    def __init__(self, card: ModelCard, attention: str | None = None) -> None:
        """Load float32 weights. Raises SettingsError where the model's files cannot be loaded."""
        super().__init__()
        self._pooling = card.pooling
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call] # one line in the log, not a bar
        logger.info("loading %s from %s", card.name, card.folder)
        try:
            transformer, report = AutoModel.from_pretrained(
                card.folder,
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=card.trust_remote_code,
                output_loading_info=True,
                **({"attn_implementation": attention} if attention else {}),
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise SettingsError("args.model.id", f"{card.folder} cannot be loaded: {error}") from error
        absent = [key for key in (*report["missing_keys"], *report["mismatched_keys"]) if "pooler." not in str(key)]
        if absent:  # transformers fills them with random numbers
            raise SettingsError(
                "args.model.id",
                f"{len(absent)} weights of a {card.model_type} model are missing in {card.folder} ({absent[0]}); if it "
                "comes with code of its own, set args.model.trust_remote_code",
            )
        self.transformer = transformer.eval()
        self._options = {"use_cache": False} if hasattr(transformer.config, "use_cache") else {}

    def hidden(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The vector of each token, [queries, tokens, dimension]."""
        found: torch.Tensor = self.transformer(input_ids=ids, attention_mask=mask, **self._options).last_hidden_state
        return found

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(ids, mask)
        if self._pooling == "cls":
            return hidden[:, 0].float()
        if self._pooling == "last":
            last = (mask.sum(1) - 1).view(-1, 1, 1).expand(-1, 1, hidden.shape[-1])
            return hidden.gather(1, last).squeeze(1).float()
        weights = mask.unsqueeze(-1).float()
        return (hidden.float() * weights).sum(1) / weights.sum(1)


class PaddedModel:
    """Any transformer, in its own code: packed queries are padded for it. The way for models without a packed form."""

    padded = True

    def __init__(self, model: PooledModel, dtype: torch.dtype, device: torch.device) -> None:
        self._model = model.to(device, dtype)
        self._device = device

    def __call__(self, ids: torch.Tensor, lengths: Lengths, *, each_token: bool = False) -> torch.Tensor:
        columns = torch.arange(int(lengths.max()), device=self._device)
        mask = columns < torch.from_numpy(lengths).to(self._device)[:, None]
        padded = torch.zeros(mask.shape, dtype=torch.int64, device=self._device)
        padded[mask] = ids.to(torch.int64)
        if each_token:
            return self._model.hidden(padded, mask.to(torch.int64))[mask].float()
        pooled: torch.Tensor = self._model(padded, mask.to(torch.int64))
        return pooled


def pad(queries: Sequence[npt.NDArray[np.int32]]) -> tuple[Ids, Ids]:
    """(ids, mask) of queries of any length."""
    longest = max(map(len, queries))
    ids = np.zeros((len(queries), longest), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, query in enumerate(queries):
        ids[row, : len(query)] = query
        mask[row, : len(query)] = 1
    return ids, mask


def probe_batch(card: ModelCard) -> TokenBatch:
    """Fixed pseudo-random token ids, several lengths in one batch: what two number formats are compared on."""
    lengths = [min(length, card.max_tokens) for length in _PROBE_LENGTHS]
    return TokenBatch.random(card.vocab_size, lengths, seed=0)


def queries_per_s(embed: Callable[[TokenBatch, threading.Event], Vectors], card: ModelCard) -> float:
    """How quickly `embed` computes a batch of the paper's queries; the quickest of a few times counts."""
    length = min(_TIMED_TOKENS, card.max_tokens)
    batch = TokenBatch.random(card.vocab_size, [length] * _TIMED_QUERIES, seed=1)
    seconds = []
    for _ in range(_TIMES):
        started = time.perf_counter()
        embed(batch, threading.Event())
        seconds.append(time.perf_counter() - started)
    return len(batch) / min(seconds)


def agreement(one: Vectors, other: Vectors) -> float:
    """Smallest cosine between rows; NaN where a vector is not a number."""
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return float(np.min(np.sum(one * other, axis=1) / norms))


def cpu_flags() -> set[str]:
    """Instruction-set names of the first core: x86 `flags`, ARM `Features`."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123 - line by line, stops early
            for line in file:
                if line.startswith(("flags", "Features")):
                    return set(line.split(":", 1)[1].split())
    except OSError:
        logger.info("no /proc/cpuinfo: bfloat16 instructions are not looked for")
    return set()


def quick_cpu_dtype() -> tuple[str, str]:
    """The narrow dtype that this CPU computes quickly, and the reason."""
    if cpu_flags() & {"amx_bf16", "avx512_bf16", "bf16"}:
        return "bfloat16", "the CPU has bfloat16 instructions"
    return "float32", "the CPU has no bfloat16 instructions"


def describe_threads(threads: int) -> str:
    return f"cpu, {threads} thread{'s' if threads > 1 else ''}"

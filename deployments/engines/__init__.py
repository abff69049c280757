"""Engines: token arrays in, pooled vectors out. Each library has its own file; only the chosen one is imported."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deployments.models.model_files import ModelCard
from deployments.models.outputs import TEXT, Output, Outputs, Rows
from deployments.settings import EngineSettings

_PROBE_TOKENS = 8

Vectors = Rows  # shape [queries, dimension] or [tokens, numbers]
Queries = npt.NDArray[np.intp]  # positions of queries in their batch


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Queries of any length, packed. `ids`: int32 [all tokens]; `lengths`: int32 [queries]; `outputs`: what to compute
    for each query.
    """

    ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    outputs: Outputs = TEXT

    def __len__(self) -> int:
        return len(self.lengths)

    def queries(self) -> list[npt.NDArray[np.int32]]:
        """The token ids of each query, as views."""
        return np.split(self.ids, np.cumsum(self.lengths)[:-1])

    def rows(self, queries: Queries, output: Output) -> npt.NDArray[np.intp]:
        """The indices of these queries' rows, in their order, among all rows of this output."""
        return queries if output == "text" else self._tokens(queries)

    def select(self, queries: Queries) -> TokenBatch:
        """A batch of these queries, in their order."""
        return TokenBatch(self.ids[self._tokens(queries)], self.lengths[queries], self.outputs)

    def _tokens(self, queries: Queries) -> npt.NDArray[np.intp]:
        """The indices of these queries' tokens in `ids`, in the queries' order."""
        lengths = self.lengths[queries].astype(np.intp)
        starts = np.cumsum(self.lengths)[queries] - lengths
        shifts = starts - (np.cumsum(lengths) - lengths)
        tokens: npt.NDArray[np.intp] = np.arange(lengths.sum()) + np.repeat(shifts, lengths)
        return tokens

    @classmethod
    def pack(cls, queries: list[npt.NDArray[np.int32]], outputs: Outputs = TEXT) -> TokenBatch:
        return cls(np.concatenate(queries), np.array([len(query) for query in queries], dtype=np.int32), outputs)

    @classmethod
    def random(cls, vocab_size: int, lengths: Sequence[int], seed: int, outputs: Outputs = TEXT) -> TokenBatch:
        """Meaningless queries of these lengths, on which engines are tried. The same seed gives the same queries."""
        random = np.random.default_rng(seed)
        return cls.pack([random.integers(0, vocab_size, length, dtype=np.int32) for length in lengths], outputs)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A description of an engine. `agreement`: with float32 at start, the smallest cosine, or for scores
    `score_agreement`; None if not compared.
    """

    engine: str
    device: str
    dtype: str
    dimension: int
    emulated: bool
    why: str
    agreement: float | None = None


class Stopped(Exception):
    """Raised by `Engine.passes` when `stop` was set between two passes of the model."""


class Engine(Protocol):
    """An engine is used from a single thread, its own, so that core binding and first-touch memory placement work."""

    info: EngineInfo

    @property
    def micro_batch_tokens(self) -> int:
        """Roughly how many tokens the scheduler should count as one pass: those of a window (see `micro_batches.py`).
        The passes of a window run side by side, so inside it a query may leave after one with a later deadline. 0: all
        answers come at the end of the run.
        """
        ...

    def passes(self, batch: TokenBatch, stop: threading.Event) -> Iterator[tuple[Queries, tuple[Vectors, ...]]]:
        """Run the batch, and yield (queries, found) after each pass of the model. Every query is in exactly one pass.

        `queries`: their indices in `batch`. `found`: an array for each of `batch.outputs`. For "text" it is float32
        [queries, dimension], pooled but not normalized, or the answers of another kind of model. For every other output
        it is float32 [tokens, numbers], with a row for each token of these queries.

        The batch is sorted by deadline. The first queries leave first, except that a pass takes queries of similar
        length. Raises Stopped once `stop` is set, and whatever the device raises.
        """
        ...

    def bound_passes(self, tokens: int) -> None:
        """Limit `micro_batch_tokens` to roughly `tokens`, as far as the engine can. On a slow device a full window
        would take too much of the SLO.
        """
        ...

    def probe(self) -> None:
        """Run one short query through the model. Raises whatever the device raises, and RuntimeError if the answer is
        not finite.
        """
        ...


def probe(engine: Engine, card: ModelCard) -> None:
    """Implements `Engine.probe` with a real query, so that whatever breaks queries breaks the probe as well."""
    lengths = [min(_PROBE_TOKENS, card.max_tokens)]
    batch = TokenBatch.random(card.vocab_size, lengths, 0, card.outputs_for(card.kind))
    if not np.all(np.isfinite(embed(engine, batch, threading.Event()))):
        raise RuntimeError(f"{engine.info.device} computes numbers that are not finite")


def embed(engine: Engine, batch: TokenBatch, stop: threading.Event) -> Vectors:
    """Run all passes. Returns the rows of the batch's first output, in the batch's order. Raises Stopped."""
    passes, output = list(engine.passes(batch, stop)), batch.outputs[0]
    count = len(batch) if output == "text" else len(batch.ids)
    rows = np.empty((count, passes[0][1][0].shape[1]), dtype=np.float32)
    for queries, found in passes:
        rows[batch.rows(queries, output)] = found[0]
    return rows


def create_engine(card: ModelCard, settings: EngineSettings, device: str, threads: int) -> Engine:
    """Load the engine that `settings.engine` names on `device` ("cpu", "cuda:0", "npu:0"). Raises SettingsError."""
    if settings.engine == "emulated":
        from deployments.engines.emulated import EmulatedEngine

        assert settings.emulated is not None
        return EmulatedEngine(card, settings.emulated)
    from deployments.engines.torch_engine import TorchEngine

    return TorchEngine(card, settings, device, threads)

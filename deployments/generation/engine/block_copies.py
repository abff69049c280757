"""Copies of blocks between an accelerator's cache and its host's. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from deployments.generation.engine.causal_model import CausalModel
from deployments.generation.scheduler.work import Copy


class BlockCopies:
    """Copies blocks within the caches and between them. On CUDA this runs layer by layer on a separate stream, and a
    layer waits only for its own copies. On other devices it runs at once.
    """

    def __init__(self, model: CausalModel) -> None:
        self._caches = model.cache.tensor, model.host_cache.tensor
        self._stream: torch.cuda.Stream | None = None
        if model.place.device.type == "cuda":
            self._stream = torch.cuda.Stream(model.place.device)  # type: ignore[no-untyped-call]
        self._copied: list[torch.cuda.Event] = []  # for each layer, the end of this step's copies

    def begin(self, copies: Sequence[Copy]) -> None:
        """Begin all copies that precede a step, in order. Those of the step before have ended."""
        self._copied = []
        if self._stream is None:
            self._copy(copies, range(len(self._caches[0])))
            return
        self._stream.synchronize()
        if copies:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for layer in range(len(self._caches[0])):
                    self._copy(copies, [layer])
                    self._copied.append(self._stream.record_event())

    def _copy(self, copies: Sequence[Copy], layers: Iterable[int]) -> None:
        for layer in layers:
            for source, target, from_host, to_host in copies:
                for kind in range(2):  # keys, then values: each is contiguous
                    read, written = self._caches[from_host][layer, kind], self._caches[to_host][layer, kind]
                    written[target].copy_(read[source], non_blocking=self._stream is not None)

    def wait(self, layer: int, *, here: bool) -> None:
        """Make the accelerator wait for the copies of this layer. `here`: make this thread wait, too."""
        if self._copied:
            torch.cuda.current_stream().wait_event(self._copied[layer])
            if here:
                self._copied[layer].synchronize()

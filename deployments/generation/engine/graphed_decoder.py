"""A causal language model whose small steps without prompts run as CUDA graphs: a step costs the host one copy and one
launch, not some hundreds. Imports torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from deployments.engines.cuda_graphs import CudaGraphs, Graph, NoGraph, Recorder, off_by
from deployments.engines.races import is_quicker
from deployments.errors import first_line
from deployments.generation.engine.causal_model import CausalModel
from deployments.generation.engine.decode_sizes import DecodeSize, sizes, smallest
from deployments.generation.engine.packed_step import FixedStep
from deployments.generation.engine.steps import Computed, DeviceLogits
from deployments.generation.scheduler.work import Chunk, Work
from deployments.generation.text.prompt_scores import PromptScores

logger = logging.getLogger("ray.serve")

# The largest RMS error, relative to the logits' size. Half precision sums in another order: some 0.01. Attention to the
# wrong blocks is off by about 1.
_NEAR = 0.05
_MOST_BYTES, _MOST_S = 2**31, 60.0  # of memory, and of a replica's start, for all graphs
_MOST_COPIED = 2**16  # tokens whose keys and values a graph may copy out of their blocks, to limit memory


class GraphedDecoder:
    """Like the `CausalModel`, whose `step` computes what fits no graph."""

    def __init__(
        self, model: CausalModel, context: int, recorder: Recorder, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Record ever larger steps. Where one fails, disagrees with the model's own step, or is slower, larger ones do
        without. Overwrites the cache. Raises NoGraph if that is the first one.
        """
        self.model, self.cache, self._recorder, self._graphs = model, model.cache, recorder, list[Graph[DecodeSize]]()
        reason, most, until = "larger steps need none", 0, clock() + _MOST_S
        self.cache.tensor.normal_()  # among zeros, attention to the wrong blocks would not be noticed
        with torch.inference_mode():
            for size, steps in sizes(context, self.cache.blocks, self.cache.block_size):
                if most and size.rows >= most:
                    continue
                problem = self._problem(size, steps) if clock() < until else f"{_MOST_S:.0f} s are over"
                if problem is not None:
                    reason, most = f"not of {size.rows} rows with {size.blocks} blocks: {problem}", size.rows
        self.cache.tensor.zero_()
        if not self._graphs:
            raise NoGraph(reason)
        rows, held = max(graph.size.rows for graph in self._graphs), recorder.held_bytes() / 2**20
        logger.info("steps of at most %d rows run as CUDA graphs, which hold %.0f MiB; %s", rows, held, reason)

    @torch.inference_mode()
    def step(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """See `CausalModel.step`. The result holds until the next step."""
        at = smallest([graph.size for graph in self._graphs], chunks)
        return self.model.step(chunks) if at is None else _run(self._graphs[at], chunks)

    def scored_step(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, list[PromptScores]]:
        """See `CausalModel.scored_step`. It has no graph."""
        return self.model.scored_step(chunks)

    def _problem(self, size: DecodeSize, steps: Sequence[Sequence[Chunk]]) -> str | None:
        """Record steps of that size. Returns why they run without a graph, or None."""
        if size.tokens > _MOST_COPIED and not self.cache.reads_in_place:
            return f"more than {_MOST_COPIED} tokens would be copied out of their blocks"
        try:
            before = self._recorder.held_bytes()
            graph = self._record(size)
            for chunks in steps:
                error = off_by(_run(graph, chunks).cpu(), self.model.step(chunks).cpu())
                if not error <= _NEAR:  # also for NaN
                    return f"its logits are off by {error:.3g} of their size"
            fewest = steps[-1]
            if not is_quicker(lambda: _run(graph, fewest).cpu(), lambda: self.model.step(fewest).cpu()):
                return "it is not quicker than without"
            if self._recorder.held_bytes() > max(_MOST_BYTES, before):  # the pool keeps what a refused graph took
                return f"the graphs would hold more than {_MOST_BYTES / 2**30:.0f} GiB"
        except Exception as error:  # noqa: BLE001 - whatever it is, steps do without
            return f"{type(error).__name__}: {first_line(error)}"
        self._graphs.append(graph)
        return None

    def _record(self, size: DecodeSize) -> Graph[DecodeSize]:
        place, example = self.model.place, np.empty(sum(size.parts), np.int64)
        size.fill(example, [Chunk(np.zeros(1, np.int32), 0, [0])])

        def compute(inputs: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
            return self.model.compute(FixedStep.of_size(size, inputs, place, held))

        return Graph.record(self._recorder, size, example, place.device, compute)


def _run(graph: Graph[DecodeSize], chunks: Sequence[Chunk]) -> torch.Tensor:
    return graph.run(lambda inputs: graph.size.fill(inputs, chunks))[: len(chunks)]


class ModelSteps:
    """`steps.Steps` with a causal model."""

    def __init__(self, model: CausalModel | GraphedDecoder, logits: Callable[[torch.Tensor], DeviceLogits]) -> None:
        """`logits`: from `device_sampling.logits_of` for its device."""
        self._model, self._logits = model, logits

    def step(self, work: Work) -> Computed:
        """See `steps.Steps`."""
        model = self._model
        for copy in work.copies:
            model.cache.tensor[:, :, copy.target] = model.cache.tensor[:, :, copy.source]
        if all(chunk.scoring is None for chunk in work.chunks):
            return Computed(self._logits(model.step(work.chunks)))
        logits, scores = model.scored_step(work.chunks)
        return Computed(self._logits(logits), scores=scores)


def with_graphs(model: CausalModel, context: int) -> CausalModel | GraphedDecoder:
    """The model, on CUDA with graphs where they pay. Call it before the cache holds anything."""
    if model.place.device.type != "cuda":
        return model
    try:
        return GraphedDecoder(model, context, CudaGraphs(model.place.device))
    except (NoGraph, RuntimeError) as problem:
        logger.info("no step runs as a CUDA graph: %s", first_line(problem))
        return model

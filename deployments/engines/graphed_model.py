"""The packed form with its small passes as CUDA graphs: a pass costs the host one launch, not some hundreds. Imports
torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from deployments.engines.cuda_graphs import CudaGraphs, Graph, NoGraph, Recorder, off_by
from deployments.engines.graph_sizes import GraphSize, sizes, smallest
from deployments.engines.micro_batches import Lengths
from deployments.engines.packed.fixed_layout import FixedLayout
from deployments.engines.packed.model import PackedModel
from deployments.engines.races import is_quicker
from deployments.errors import first_line
from deployments.models.model_files import SCORING, ModelCard
from deployments.models.outputs import TEXT

logger = logging.getLogger("ray.serve")

Way = Callable[[], torch.Tensor]  # to compute a batch, with its result on the host

# The largest RMS error, relative to the numbers' RMS, or to 1 for scores: half precision sums in another order.
_NEAR = 0.03


class GraphedModel:
    """Like the packed model of a card that `has_graphs`, but from ids on the host. Passes that fit no graph run without
    one.
    """

    form, padded = "graphs", False

    def __init__(self, model: PackedModel, card: ModelCard, recorder: Recorder | None = None) -> None:
        """Record ever larger passes, until one fails, disagrees with the packed form, or is slower. Raises NoGraph if
        that is the first one.
        """
        self.model, self._graphs = model, list[Graph[GraphSize]]()
        recorder = CudaGraphs(model.place.device) if recorder is None else recorder
        reason = "larger passes need none"
        with torch.inference_mode():
            for size, lengths in sizes(card.max_tokens):
                try:
                    graph = self._record(recorder, size)
                    problem = self._problem(graph, lengths, card)
                except Exception as error:  # noqa: BLE001 - whatever it is, the packed form does without
                    problem = f"{type(error).__name__}: {first_line(error)}"
                if problem is not None:
                    reason = f"not of {size.tokens}: {problem}"
                    break
                self._graphs.append(graph)
        if not self._graphs:
            raise NoGraph(reason)
        most, held = self._graphs[-1].size.tokens, recorder.held_bytes() / 2**20
        logger.info("passes of at most %d tokens run as CUDA graphs, which hold %.0f MiB; %s", most, held, reason)

    def __call__(self, ids: torch.Tensor, lengths: Lengths, *, each_token: bool = False) -> torch.Tensor:
        at = smallest([graph.size for graph in self._graphs], len(ids), len(lengths))
        if at is None or each_token:
            return self.model(ids.to(self.model.place.device, non_blocking=True), lengths, each_token=each_token)
        return _run(self._graphs[at], ids, lengths)

    def _record(self, recorder: Recorder, size: GraphSize) -> Graph[GraphSize]:
        place, example = self.model.place, np.empty(sum(size.parts), np.int32)
        size.fill(example, np.zeros(1, np.int32), np.ones(1, np.int32))

        def compute(inputs: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
            layout = FixedLayout.of_size(size, inputs, place, held)
            return self.model.compute(layout.ids, layout)

        return Graph.record(recorder, size, example, place.device, compute)

    def _problem(self, graph: Graph[GraphSize], fewest: Lengths, card: ModelCard) -> str | None:
        """Why the graph is not used, or None. It is compared on a full batch, and then on the one on which it is timed:
        what the first leaves behind must not change the second's numbers.
        """
        for lengths in (graph.size.mixed(), fewest):
            ways = self._ways(graph, lengths, card.vocab_size)
            found, wanted = (way() for way in ways)
            error = off_by(found, wanted, least=1.0 if card.kind in SCORING else 0.0)
            if not error <= _NEAR:  # also for NaN
                return f"its numbers are off by {error:.3g} of their size"
        return None if is_quicker(*ways) else "it is not quicker than the packed form"

    def _ways(self, graph: Graph[GraphSize], lengths: Lengths, vocabulary: int) -> tuple[Way, Way]:
        """The graph and the packed form, for one batch of random ids."""
        ids = torch.from_numpy(np.random.default_rng(1).integers(0, vocabulary, lengths.sum(), np.int32))
        on_device = ids.to(self.model.place.device)
        return lambda: _run(graph, ids, lengths).cpu(), lambda: self.model(on_device, lengths).cpu()


def _run(graph: Graph[GraphSize], ids: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    return graph.run(lambda inputs: graph.size.fill(inputs, ids.numpy(), lengths))[: len(lengths)].clone()


def has_graphs(card: ModelCard, device: torch.device) -> bool:
    """Whether the packed form's passes can have fixed shapes there: of each query one row is computed, at once."""
    return device.type == "cuda" and card.kind != "sparse" and card.outputs_for(card.kind) == TEXT

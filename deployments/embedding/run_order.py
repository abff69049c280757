"""The order in which a run's queries go to the engine. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deployments.models.outputs import TEXT, Outputs


def by_output(outputs: Sequence[Outputs], lengths: Sequence[int], window_tokens: int) -> Iterator[list[int]]:
    """Yield groups of queries, by index, that want the same outputs. The engine computes each group together.

    The run is sorted by deadline and cut into windows of at most `window_tokens` (a longer query is a window of its
    own). Only inside a window do plain queries come first. So a query leaves at most `window_tokens` after its turn,
    and admission adds one pass to its prediction for that. A run in which all queries want the same, or a
    `window_tokens` of 0 (all answers leave together), is one window.
    """
    start, tokens = 0, 0
    if window_tokens and len(set(outputs)) > 1:
        for index, length in enumerate(lengths):
            if index > start and tokens + length > window_tokens:
                yield from _groups(range(start, index), outputs)
                start, tokens = index, 0
            tokens += length
    yield from _groups(range(start, len(outputs)), outputs)


def _groups(window: Sequence[int], outputs: Sequence[Outputs]) -> Iterator[list[int]]:
    groups: dict[Outputs, list[int]] = {}
    for index in window:
        groups.setdefault(outputs[index], []).append(index)
    for wanted in sorted(groups, key=lambda wanted: wanted != TEXT):
        yield groups[wanted]

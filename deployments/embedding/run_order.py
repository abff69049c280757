"""In which order a run's queries go to the engine. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deployments.models.outputs import TEXT, Outputs


def by_output(outputs: Sequence[Outputs], lengths: Sequence[int], window_tokens: int) -> Iterator[list[int]]:
    """Queries that the engine computes together, by their indices: they want the same of the model.

    The run is in the order of deadlines. It is cut in this order into windows of `window_tokens`, or of one query that
    is longer, and only inside a window the plain ones come first. So each query leaves with its window, at most
    `window_tokens` after its turn, which is the pass that admission adds to its prediction. A run of one kind of
    output, or `window_tokens` of 0 (all answers leave together), is one window.
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

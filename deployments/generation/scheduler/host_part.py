"""How a host takes part in its accelerator's steps. Without a host, the accelerator computes everything. Pure.

Each generation is on the accelerator or on the host, with all its rows, and may move between two steps
(`hybrid/host_cache`). A host row takes part in the steps in which it yields most (`hybrid/planner`), and in those that
its pace requires. A row of a bulk generation may park in one step and get its token in a later one. It takes part in no
other step meanwhile. Only `move` changes the `queue`: the cache in which a generation lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter

from deployments.generation.scheduler.composer import ComposedStep, StepComposer
from deployments.generation.scheduler.forecast import NO_HOST, HostShare
from deployments.generation.scheduler.queue import StepQueue
from deployments.generation.scheduler.sequences import Generation, Row
from deployments.generation.scheduler.work import Copy

_COPIES = 0.1  # of the longest step: the most time for moves to the accelerator, unless all rows have slack for more

BeginStep = Callable[[Sequence[Row]], StepComposer]
"""Begins a step's composer, with room left for these host rows."""


def shares(queue: StepQueue, generation: Generation) -> Sequence[HostShare]:
    """What a forecast may assume for answers on the host, with this generation running. Promises that hold with any one
    of these are kept.
    """
    host = queue.host
    if host is None or not (generation.on_host or host.room.reserved):
        return (NO_HOST,)
    rows = [(row.generation.on_host, row.length) for row in queue.running]
    rows += [(generation.on_host, generation.prompt_tokens)] * generation.answers
    row_blocks = max(1, generation.row_blocks(host.room.block_size))
    slow = queue.learning.slowdown * (1 + queue.learning.margin)
    within_s = math.inf if generation.pace_s is None else generation.pace_s / slow
    return host.shares(queue.model, rows, row_blocks, _new_prompts(queue, generation), within_s)


def _new_prompts(queue: StepQueue, *more: Generation) -> float:
    """Prompt tokens to compute for each token of the running answers, and of `more` generations, if each answer that
    ends is followed by another like it.
    """
    running = [*(row.generation for row in queue.running), *more]
    prompts = tokens = 0.0
    for lengths, bulk in ((queue.room.lengths, False), (queue.room.bulk_lengths, True)):
        some = [one for one in running if one.bulk is bulk]
        if some:
            prompts += sum((one.prompt_tokens - one.cached) / one.answers for one in some)
            tokens += len(some) * lengths.mean(sum(one.most_tokens for one in some) // len(some))
    return prompts / max(1.0, tokens)


def move(now: float, queue: StepQueue) -> tuple[list[Copy], float]:
    """Move generations that wait for a block to the host. Move others to the accelerator, but only while nobody else
    needs room there: first those whose prompts have not begun, which copies nothing (NEO chooses their side in each
    step). Returns the copies, and the seconds that they take.
    """
    host = queue.host
    if host is None:
        return [], 0.0
    share, longest_s = queue.policy.bulk_share, queue.policy.longest_step_s
    crowded = queue.crowded or any(not row.generation.on_host for row in queue.stalled)
    copies = host.to_host(queue.stalled, queue.room, share)
    if not crowded:
        ordered = sorted(queue.running, key=attrgetter("order"))
        waits = any(not row.generation.bulk for row in queue.uncomputed)
        slack_s = ordered[0].order[1] - now - longest_s if ordered and not waits else 0.0
        within_s = min(longest_s, max(_COPIES * longest_s, slack_s))
        not_begun = [one.rows[0] for one in queue.waiting if not one.rows[0].computed]
        host.to_accelerator(not_begun, queue.room, share, 0.0)
        copies += host.to_accelerator(ordered, queue.room, share, within_s)
    return copies, len(copies) * host.room.block_size * host.time.copy_token_s


def compose(begin: BeginStep, queue: StepQueue) -> ComposedStep:
    """Compose a step, with host rows if there is a host. Changes nothing."""
    host = queue.host
    if host is None:
        return begin(()).alone()
    planner = host.planner(queue.model, _new_prompts(queue))
    composer = begin([row for row in queue.running if row.generation.on_host and row.parked is None])
    composed = composer.with_host(host, planner, queue.uncomputed)
    return begin(()).with_host(host, planner, queue.uncomputed) if composer.was_short_in_vain else composed

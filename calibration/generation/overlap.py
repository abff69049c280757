"""Predicts whether computing part of the attention on the host pays off: APEX's model (arXiv:2506.03296, Section 3.2)
with measured times. Pure.

The model covers a step that continues answers and computes no prompt. `t_gl` and `t_ga` are the accelerator's seconds
for the linear layers and for the attention (T_gl, T_ga in the paper). `n_g` and `n_c` (N_G, N_C) are the answers per
second whose attention the accelerator and the host can compute. Numbers in parentheses are the paper's equations. The
model assumes that the linear layers of a second batch cost as much as those of the first, and that transfers are free.

It judges a device as a whole. What the host does in one step is decided by `planner`, by that step's load.

Section 3.2 says that n_g / n_c "must generally be less than ~7.5" for t_ga / t_gl between 0.5 and 1.5. That is the
largest bound in this range, at 0.5; the smallest is 5.83, at 1.41. Algorithm 1 divides the tokens of a step with
prompts by the time of a step without, which overrates the host; this module does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deployments.generation.scheduler.block_pool import BLOCK, blocks_of
from deployments.generation.scheduler.step_time import HostTime, StepLoad, StepTime


def alone_s(t_gl: float, t_ga: float) -> float:
    """(1): seconds of a step on the accelerator alone."""
    return t_gl + t_ga


def pipelined_s(t_gl: float, t_ga: float) -> float:
    """(2): seconds of a step in which two batches take turns, so that the weights are read twice."""
    return 2 * t_gl + t_ga


def largest_ratio(t_gl: float, t_ga: float) -> float:
    """The right side of (6): two batches pay off if n_g / n_c is less. It is at least 2 sqrt(2) + 3."""
    return 2 * t_gl / t_ga + 3 + t_ga / t_gl


@dataclass(frozen=True, slots=True)
class Overlap:
    """The prediction for a device and its host, with the accelerator's cache full of answers of `context` tokens each.
    `layers`: the language model's.
    """

    context: int
    t_gl: float
    t_ga: float
    n_g: float
    n_c: float
    layers: int

    @classmethod
    def of(
        cls, model: StepTime, host: HostTime, blocks: int, context: int, kv_token_s: float | None = None
    ) -> Overlap | None:
        """For an accelerator's cache of `blocks`. `kv_token_s`: seconds of attention per token, if those of `model`
        include other work. None if there is nothing to compare: no such answer fits, or one of the times is zero.
        """
        rows = blocks // blocks_of(context, BLOCK)
        load = StepLoad(rows, rows * context)
        t_ga = load.kv_tokens * (model.kv_token_s if kv_token_s is None else kv_token_s)
        t_gl, host_s = model.seconds(load) - t_ga, host.seconds(1, context)
        if not min(rows, t_gl, t_ga, host_s) > 0:
            return None
        return cls(context, t_gl, t_ga, rows / t_ga, 1 / host_s, host.layers)

    @property
    def ratio(self) -> float:
        """The left side of (6): the accelerator's attention speed over the host's."""
        return self.n_g / self.n_c

    @property
    def largest_ratio(self) -> float:
        return largest_ratio(self.t_gl, self.t_ga)

    @property
    def pays(self) -> bool:
        """(6): whether two batches that take turns give more tokens than the accelerator alone."""
        return self.ratio < self.largest_ratio

    @property
    def alone_rate(self) -> float:
        """The right side of (5): tokens per second of the accelerator alone."""
        return self.n_g * self.t_ga / alone_s(self.t_gl, self.t_ga)

    @property
    def pipelined_rate(self) -> float:
        """The left side of (5), by (3) and (4): tokens per second of both, if the host never waits."""
        took_s = pipelined_s(self.t_gl, self.t_ga)
        return (self.n_g * self.t_ga + self.n_c * took_s) / took_s

    @property
    def asynchronous_rate(self) -> float:
        """Tokens per second with one batch that the host's answers join when they are ready (Section 3.3; the paper has
        no equation): the accelerator's and all of the host's. Never less than either rate of (5).
        """
        return self.alone_rate + self.n_c

    @property
    def pipelined_blocks(self) -> int:
        """Host cache blocks that keep the host busy if each of its answers gets one token per step."""
        return self._blocks(pipelined_s(self.t_gl, self.t_ga))

    @property
    def asynchronous_blocks(self) -> int:
        """The same for answers that join when they are ready: each passes one layer per step, so a token takes as many
        steps as there are layers.
        """
        return self._blocks(self.layers * alone_s(self.t_gl, self.t_ga))

    def _blocks(self, token_s: float) -> int:
        """Blocks of as many answers as keep the host busy, if each gets a token every `token_s`."""
        return math.ceil(self.n_c * token_s) * blocks_of(self.context, BLOCK)

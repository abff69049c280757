"""Whether it pays that a host computes a part of the attention while the accelerator computes the rest: APEX's model
(arXiv:2506.03296, Section 3.2), on measured times. Pure.

Of a step that continues answers and computes no prompt: `t_gl` and `t_ga` are the accelerator's seconds for the linear
layers and for the attention, T_gl and T_ga of the paper; `n_g` and `n_c` (N_G, N_C) are the answers a second whose
attention the accelerator and the host can compute. Numbers in brackets are the paper's equations. The model takes the
linear layers of a second batch to cost as much as those of the first, and data to go between the two for nothing.

It says of a device whether its host pays. What the host does in one step is decided by `planner`, by that step's
own load.

Section 3.2 says that n_g / n_c "must generally be less than ~7.5" where t_ga / t_gl is between 0.5 and 1.5. That is the
bound's largest value there, at 0.5; it is 5.83 at 1.41, the least of all. Algorithm 1 divides what a step with prompts
gives by the time of one without, so it overrates the host there; nothing here follows it in that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deployments.generation.scheduler.block_pool import blocks_of
from deployments.generation.scheduler.step_time import HostTime, StepLoad, StepTime


def alone_s(t_gl: float, t_ga: float) -> float:
    """(1): of a step of the accelerator alone."""
    return t_gl + t_ga


def pipelined_s(t_gl: float, t_ga: float) -> float:
    """(2): of a step whose two batches take turns: the weights are read twice."""
    return 2 * t_gl + t_ga


def largest_ratio(t_gl: float, t_ga: float) -> float:
    """The right side of (6): two batches that take turns pay where n_g / n_c is less. It is 2 sqrt(2) + 3 or more."""
    return 2 * t_gl / t_ga + 3 + t_ga / t_gl


@dataclass(frozen=True, slots=True)
class Overlap:
    """The model's verdict on a device and its host, while the accelerator's cache is full of answers with `context`
    tokens each. `layers`: of the model.
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
        """With so many blocks of the accelerator's cache. `kv_token_s`: of its attention alone, where the model's has
        more in it. None where there is nothing to compare: not one such answer has room, or one of the four times is
        zero.
        """
        rows = blocks // blocks_of(context)
        load = StepLoad(rows, rows * context)
        t_ga = load.kv_tokens * (model.kv_token_s if kv_token_s is None else kv_token_s)
        t_gl, host_s = model.seconds(load) - t_ga, host.seconds(1, context)
        if not min(rows, t_gl, t_ga, host_s) > 0:
            return None
        return cls(context, t_gl, t_ga, rows / t_ga, 1 / host_s, host.layers)

    @property
    def ratio(self) -> float:
        """How many times as fast as the host the accelerator's attention is: the left side of (6)."""
        return self.n_g / self.n_c

    @property
    def largest_ratio(self) -> float:
        return largest_ratio(self.t_gl, self.t_ga)

    @property
    def pays(self) -> bool:
        """(6): batches that take turns give more tokens than the accelerator alone."""
        return self.ratio < self.largest_ratio

    @property
    def alone_rate(self) -> float:
        """The right side of (5): tokens a second of the accelerator alone."""
        return self.n_g * self.t_ga / alone_s(self.t_gl, self.t_ga)

    @property
    def pipelined_rate(self) -> float:
        """The left side of (5): tokens a second of both, where the host never waits; by (3) and (4)."""
        took_s = pipelined_s(self.t_gl, self.t_ga)
        return (self.n_g * self.t_ga + self.n_c * took_s) / took_s

    @property
    def asynchronous_rate(self) -> float:
        """Of one batch, which the host's answers join when they are ready (Section 3.3; no equation of the paper): the
        accelerator's own, and all that the host computes. It is never less than either rate of (5).
        """
        return self.alone_rate + self.n_c

    @property
    def pipelined_blocks(self) -> int:
        """Of the host, that its answers fill where it never waits: each gets a token a step."""
        return self._blocks(pipelined_s(self.t_gl, self.t_ga))

    @property
    def asynchronous_blocks(self) -> int:
        """The same for answers that join when they are ready: each passes one layer a step, and gets a token in as many
        steps as there are layers.
        """
        return self._blocks(self.layers * alone_s(self.t_gl, self.t_ga))

    def _blocks(self, token_s: float) -> int:
        """Of so many answers that the host is always busy, where each gets a token every `token_s`."""
        return math.ceil(self.n_c * token_s) * blocks_of(self.context)

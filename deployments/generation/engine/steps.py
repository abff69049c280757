"""What an engine is to those that run its steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from deployments.generation.scheduler.work import UNTIMED, ComputeSeconds, Work
from deployments.generation.text.prompt_scores import PromptScores
from deployments.generation.text.sampling import Picked, RowSamplers

Logits = npt.NDArray[np.float32]


class DeviceLogits(Protocol):
    """Logits, float32 [rows, vocabulary], from which the engine draws tokens itself: on an accelerator, where only
    tokens are copied to the host (`engine.device_sampling`), or on a CPU by a kernel (`kernels.draw_kernel`).
    """

    def pick(self, samplers: Sequence[RowSamplers]) -> list[list[Picked] | None]:
        """Draw tokens as `sampling.pick` does, for each row. Raises ValueError unless there is one of `samplers` per
        row.
        """
        ...


class Computed(NamedTuple):
    """The result of a step. `logits`: of the next tokens, [rows, vocabulary], valid until the next step. The rows are
    the wanted ones of `chunks`, then of `second`, then the parked rows that have `arrived`, given by their numbers.
    `scores`: of those of `chunks` that have `scoring`.
    """

    logits: Logits | DeviceLogits
    arrived: Sequence[int] = ()
    compute_s: ComputeSeconds = UNTIMED
    scores: Sequence[PromptScores] = ()


class Steps(Protocol):
    """Computes steps, with a model or as an emulated device. Called in the engine's thread."""

    def step(self, work: Work) -> Computed:
        """Copy blocks, then compute. If there are only parked rows to join, wait until one of them can."""

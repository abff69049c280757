"""The thread in which a host computes attention beside its accelerator. Imports torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from deployments.generation.engine.cache import CachedAttention
from deployments.generation.engine.packed_step import StepLayout
from deployments.hardware.affinity import pin_thread

logger = logging.getLogger("ray.serve")


class HostAttention:
    """A thread that computes attention to the host's cache, in the order of `submit`."""

    def __init__(self, cores: Sequence[int]) -> None:
        """`cores`: see `CausalStages`."""
        self.seconds = 0.0  # its computing time so far
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-attention")
        if cores:
            threads = torch.get_num_threads()
            self._thread.submit(self._bind, cores).result()
            torch.set_num_threads(threads)  # restores the number for threads that start later

    @staticmethod
    def _bind(cores: Sequence[int]) -> None:
        if problem := pin_thread(cores):
            logger.warning("the host's attention is not bound to cores: %s", problem)
        torch.get_num_threads()  # the first call in a thread resets it to the process's number, so make it here
        torch.set_num_threads(len(cores))

    def submit(self, attention: CachedAttention, qkv: torch.Tensor, layout: StepLayout) -> Future[torch.Tensor]:
        """Compute attention. `qkv`: [tokens, heads + 2 groups, size], with its norm and rotation applied. The future's
        result is [tokens, heads * size].
        """
        return self._thread.submit(self._attend, attention, qkv, layout)

    @torch.inference_mode()
    def _attend(self, attention: CachedAttention, qkv: torch.Tensor, layout: StepLayout) -> torch.Tensor:
        began = time.perf_counter()
        try:
            return attention.attend(qkv, layout)
        finally:
            self.seconds += time.perf_counter() - began

"""Accelerators of little memory with the machines around them, by what papers and data sheets say of them. Nothing here
was measured: a device that is emulated by these figures shows what they imply, not how quick the real one is. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.step_time import HostTime, StepTime

_BYTES = 2  # of a weight, a key's or a value's number
# Assumed shares of what data sheets say. Of a host's memory: the least that our own kernels read of what the machine
# streams (docs/generation.md, "On a CPU").
_OF_MEMORY, _OF_ARITHMETIC, _OF_LINK, _OF_HOST_MEMORY = 0.8, 0.5, 0.8, 0.6
_FOR_BLOCKS = 0.85  # of the memory that the weights leave, as at a real device


class _Model(NamedTuple):
    """`weights`: how many numbers. `width`: numbers of a token between two layers; `kv_width`: of its keys in one
    layer, and as many of its values.
    """

    weights: float
    layers: int
    width: int
    kv_width: int

    @property
    def kv_bytes(self) -> int:
        """Of a token, in all layers."""
        return 2 * self.layers * self.kv_width * _BYTES

    @property
    def exchanged_bytes(self) -> int:
        """Of an answer whose attention the host computes: query, key, value and what comes back, in all layers."""
        return 2 * self.layers * (self.width + self.kv_width) * _BYTES


_LLAMA_2_7B = _Model(6.74e9, 32, 4096, 4096)
_LLAMA_3_1_8B = _Model(8.03e9, 32, 4096, 1024)


@dataclass(frozen=True, slots=True)
class EmulatedAccelerator:
    """With one model. `memory_gb`: GB; `gb_s`: GB/s that this memory streams; `tflops`: with numbers of two bytes;
    `link_gb_s`: GB/s to the host's memory, one way; `host_gb_s`: GB/s that the host's memory streams.
    """

    model: _Model
    memory_gb: float
    gb_s: float
    tflops: float
    link_gb_s: float
    host_gb_s: float

    @property
    def step_time(self) -> StepTime:
        """The weights are read or multiplied, whichever takes longer."""
        read_s = _BYTES * self.model.weights / (_OF_MEMORY * self.gb_s * 1e9)
        token_s = 2 * self.model.weights / (_OF_ARITHMETIC * self.tflops * 1e12)
        kv_token_s = self.model.kv_bytes / (_OF_MEMORY * self.gb_s * 1e9)
        pair_s = 4 * self.model.width * self.model.layers / (_OF_ARITHMETIC * self.tflops * 1e12)
        return StepTime(read_s, token_s, kv_token_s, token_s, pair_s, knee=int(read_s / token_s))

    @property
    def host_time(self) -> HostTime:
        """Keys and values are read as quickly as the host's memory gives them."""
        link_s = 1 / (_OF_LINK * self.link_gb_s * 1e9)
        kv_token_s = self.model.kv_bytes / (_OF_HOST_MEMORY * self.host_gb_s * 1e9)
        exchange_s, copy_token_s = self.model.exchanged_bytes * link_s, self.model.kv_bytes * link_s
        return HostTime(exchange_s, kv_token_s, copy_token_s, self.model.layers)

    @property
    def blocks(self) -> int:
        """Of its cache, beside the weights."""
        left = self.memory_gb * 1e9 - _BYTES * self.model.weights
        return int(_FOR_BLOCKS * left / (BLOCK * self.model.kv_bytes))


_PCIE_3, _PCIE_4 = 15.75, 31.5  # GB/s of 16 lanes, one way
EMULATED_ACCELERATORS: Mapping[str, EmulatedAccelerator] = {
    # NEO (arXiv:2411.01142), Table 1: AWS g4dn.4xlarge and g5.4xlarge. T4 by NVIDIA's data sheet, A10G by Section 2.2.
    # A host's memory by its share of cores: 8 of a Xeon's 24 (6 channels DDR4-2933), 8 of an EPYC's 48 (8, DDR4-3200).
    "neo-t4-llama-2-7b": EmulatedAccelerator(_LLAMA_2_7B, 16, 320, 65, _PCIE_3, 140.8 * 8 / 24),
    "neo-a10g-llama-3.1-8b": EmulatedAccelerator(_LLAMA_3_1_8B, 24, 600, 125, _PCIE_4, 204.8 * 8 / 48),
    # APEX (arXiv:2506.03296), Table 1: two Xeon 6130 (6 channels DDR4-2666 each), two Xeon 6342 (8 channels DDR4-3200).
    "apex-t4-llama-2-7b": EmulatedAccelerator(_LLAMA_2_7B, 16, 320, 65, _PCIE_3, 2 * 128.0),
    "apex-a10-llama-3.1-8b": EmulatedAccelerator(_LLAMA_3_1_8B, 24, 600, 125, _PCIE_4, 2 * 204.8),
    # NVIDIA's data sheet of the L4, without sparsity, beside one processor of the A10's machine above.
    "l4-llama-3.1-8b": EmulatedAccelerator(_LLAMA_3_1_8B, 24, 300, 121, _PCIE_4, 204.8),
    # One of the two chips of Huawei's Atlas 300I Duo with 48 GB (408 GB/s, 140 TFLOPS and 16 lanes for both), beside
    # one Kunpeng 920 (8 channels DDR4-2933).
    "atlas-300i-duo-llama-3.1-8b": EmulatedAccelerator(_LLAMA_3_1_8B, 24, 204, 70, _PCIE_4 / 2, 187.7),
}

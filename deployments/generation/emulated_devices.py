"""Accelerators with little memory, and their hosts, from papers and data sheets. Nothing here was measured: a device
that is emulated with these figures shows what they imply, not how fast the real one is. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.step_time import HostTime, StepTime

_BYTES = 2  # bytes per number of a weight, key or value
# Assumed shares of the data sheets' figures. For a host's memory: the smallest share of the machine's bandwidth that
# our own kernels reach (docs/generation.md, "On a CPU").
_OF_MEMORY, _OF_ARITHMETIC, _OF_LINK, _OF_HOST_MEMORY = 0.8, 0.5, 0.8, 0.6
_FOR_BLOCKS = 0.85  # of the memory that the weights leave free, as on a real device


class _Model(NamedTuple):
    """A model's size. `weights`: number of parameters. `width`: numbers of a token between two layers. `kv_width`:
    numbers of a token's keys in one layer; its values have as many.
    """

    weights: float
    layers: int
    width: int
    kv_width: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return 2 * self.layers * self.kv_width * _BYTES

    @property
    def exchanged_bytes(self) -> int:
        """Bytes exchanged per token whose attention the host computes: query, key, value, result, in all layers."""
        return 2 * self.layers * (self.width + self.kv_width) * _BYTES


_LLAMA_2_7B = _Model(6.74e9, 32, 4096, 4096)
_LLAMA_3_1_8B = _Model(8.03e9, 32, 4096, 1024)


@dataclass(frozen=True, slots=True)
class EmulatedAccelerator:
    """An accelerator with one model. `memory_gb`: GB of memory; `gb_s`: its bandwidth, GB/s; `tflops`: TFLOPS with
    2-byte numbers; `link_gb_s`: GB/s to the host's memory, one way; `host_gb_s`: bandwidth of the host's memory, GB/s.
    """

    model: _Model
    memory_gb: float
    gb_s: float
    tflops: float
    link_gb_s: float
    host_gb_s: float

    @property
    def step_time(self) -> StepTime:
        """The time of a step: the weights are read or multiplied, whichever takes longer."""
        read_s = _BYTES * self.model.weights / (_OF_MEMORY * self.gb_s * 1e9)
        token_s = 2 * self.model.weights / (_OF_ARITHMETIC * self.tflops * 1e12)
        kv_token_s = self.model.kv_bytes / (_OF_MEMORY * self.gb_s * 1e9)
        pair_s = 4 * self.model.width * self.model.layers / (_OF_ARITHMETIC * self.tflops * 1e12)
        return StepTime(read_s, token_s, kv_token_s, token_s, pair_s, knee=int(read_s / token_s))

    @property
    def host_time(self) -> HostTime:
        """The time of the host's attention, which is limited by the bandwidth of its memory."""
        link_s = 1 / (_OF_LINK * self.link_gb_s * 1e9)
        kv_token_s = self.model.kv_bytes / (_OF_HOST_MEMORY * self.host_gb_s * 1e9)
        exchange_s, copy_token_s = self.model.exchanged_bytes * link_s, self.model.kv_bytes * link_s
        return HostTime(exchange_s, kv_token_s, copy_token_s, self.model.layers)

    @property
    def blocks(self) -> int:
        """Cache blocks that fit beside the weights."""
        left = self.memory_gb * 1e9 - _BYTES * self.model.weights
        return int(_FOR_BLOCKS * left / (BLOCK * self.model.kv_bytes))


_PCIE_3, _PCIE_4 = 15.75, 31.5  # GB/s of 16 lanes, one way
# APEX's Figure 1b: for the same attention two EPYC 7251 (8 channels DDR4-2400 each) take 3,031 us, a V100 (900 GB/s)
# 170 us. If the V100 reaches the share of its bandwidth above, the hosts reach 0.22 of theirs.
_APEX_HOST = (_OF_MEMORY * 900 * 170 / 3031) / (_OF_HOST_MEMORY * 2 * 153.6)
EMULATED_ACCELERATORS: Mapping[str, EmulatedAccelerator] = {
    # NEO (arXiv:2411.01142), Table 1: AWS g4dn.4xlarge and g5.4xlarge. T4 by NVIDIA's data sheet, A10G by Section 2.2.
    # A host's memory by its share of cores: 8 of a Xeon's 24 (6 channels DDR4-2933), 8 of an EPYC's 48 (8, DDR4-3200).
    "neo-t4-llama-2-7b": EmulatedAccelerator(_LLAMA_2_7B, 16, 320, 65, _PCIE_3, 140.8 * 8 / 24),
    "neo-a10g-llama-3.1-8b": EmulatedAccelerator(_LLAMA_3_1_8B, 24, 600, 125, _PCIE_4, 204.8 * 8 / 48),
    # APEX (arXiv:2506.03296), Table 1: two Xeon 6130 (6 channels DDR4-2666 each), two Xeon 6342 (8 channels DDR4-3200).
    "apex-t4-llama-2-7b": EmulatedAccelerator(_LLAMA_2_7B, 16, 320, 65, _PCIE_3, _APEX_HOST * 2 * 128.0),
    "apex-a10-llama-3.1-8b": EmulatedAccelerator(_LLAMA_3_1_8B, 24, 600, 125, _PCIE_4, _APEX_HOST * 2 * 204.8),
    # NVIDIA's data sheet of the L4, without sparsity, beside one processor of the A10's machine above.
    "l4-llama-3.1-8b": EmulatedAccelerator(_LLAMA_3_1_8B, 24, 300, 121, _PCIE_4, 204.8),
    # One of the two chips of Huawei's Atlas 300I Duo with 48 GB (408 GB/s, 140 TFLOPS and 16 lanes for both), beside
    # one Kunpeng 920 (8 channels DDR4-2933).
    "atlas-300i-duo-llama-3.1-8b": EmulatedAccelerator(_LLAMA_3_1_8B, 24, 204, 70, _PCIE_4 / 2, 187.7),
}

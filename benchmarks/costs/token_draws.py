"""What drawing a token costs a core, in C and in numpy: `python -m benchmarks.costs.token_draws [rows] [words]`.

The least processor time of some runs on one thread. The logits are flat, or 50 tokens stand out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from deployments.generation.kernels.draw_kernel import HostLogits
from deployments.generation.text.logit_rules import rules_of
from deployments.generation.text.sampling import Numbers, RowSamplers, Sampler, Sampling, pick

_RUNS = 10
_ASKED = {
    "greedy": Sampling(0.0),
    "temperature": Sampling(0.8),
    "top_k 20, top_p 0.95": Sampling(0.6, 20, 0.95),
    "top_p 0.9": Sampling(0.8, 0, 0.9),
    "min_p 0.05": Sampling(0.8, min_p=0.05),
    "penalties": Sampling(0.8, repetition_penalty=1.1, presence_penalty=0.5),
    "logit_bias of 100": Sampling(0.8, logit_bias=tuple((token, 1.0) for token in range(100))),
}


def least_ms(run: Callable[[], object], runs: int = _RUNS) -> float:
    """The least processor time of this thread."""
    found = []
    for _ in range(runs):
        began = time.thread_time()
        run()
        found.append(time.thread_time() - began)
    return min(found) * 1000


def main(rows: int = 1, words: int = 152_000) -> None:
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    flat = random.standard_normal(words).astype(np.float32)
    peaked = flat * 3
    peaked[random.integers(0, words, 50)] += 15
    kinds: dict[str, Numbers] = {"flat": flat * np.float32(0.01), "peaked": peaked}
    for name, row in kinds.items():
        logits = np.repeat(row[np.newaxis], rows, axis=0)
        for what, asked in _ASKED.items():
            for logprobs in (None, 5):
                rules = [rules_of(asked, np.arange(500, dtype=np.int32), ()) for _ in range(rows)]
                of = [RowSamplers([Sampler(asked, 0, (), own)], logprobs) for own in rules]
                in_c = least_ms(partial(HostLogits(logits).pick, of)) / rows
                in_numpy = least_ms(partial(pick, row, of[0]), 4)
                print(f"{name}, {what}, logprobs {logprobs}: {in_c:.3f} ms a row in C, {in_numpy:.3f} in numpy")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

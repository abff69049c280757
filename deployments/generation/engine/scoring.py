"""Log probabilities of prompts' tokens, some rows at a time. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from deployments.generation.engine.device_sampling import likeliest
from deployments.generation.engine.packed_step import sent
from deployments.generation.scheduler.work import Chunk
from deployments.generation.text.prompt_scores import PromptScores

_AT_ONCE = 2**24  # logits that are computed at once, to limit memory: 128 rows of 128,000 tokens take 64 MiB
_ROWS = 32  # the rows at once are a multiple, for which torch's products have a kernel


def scored(
    head: Callable[[torch.Tensor], torch.Tensor], vocabulary: int, x: torch.Tensor, chunks: Sequence[Chunk]
) -> tuple[torch.Tensor, list[PromptScores]]:
    """The logits of the wanted chunks, float32 [wanted, vocabulary], and the scores of those with `scoring`.

    `head`: [rows, width] -> logits, float32 [rows, `vocabulary`]. `x`: what the last layer returns, [rows, width]: of
    each chunk the tokens from `first_row` on, then any spare rows.
    """
    rows = [len(chunk.ids) - chunk.first_row for chunk in chunks]
    ends = np.cumsum(rows)
    wanted = torch.tensor([end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.wanted], dtype=torch.int64)
    targets = np.zeros(len(x), np.int64)
    asked = [
        (end - count, chunk.scoring) for end, count, chunk in zip(ends, rows, chunks, strict=True) if chunk.scoring
    ]
    for start, scoring in asked:
        targets[start : start + len(scoring.following)] = scoring.following
    most = max(scoring.alternatives for _, scoring in asked)
    size = max(1, _AT_ONCE // vocabulary // _ROWS) * _ROWS
    parts = []
    for start, own in zip(range(0, len(x), size), torch.split(sent(targets, x.device), size), strict=True):
        logits = head(x[start : start + size])
        here = wanted[(wanted >= start) & (wanted < start + size)] - start
        parts.append((logits[here.to(x.device)], *_scores(logits, own[:, None], most)))
    logits, ids, logprobs, ranks = (torch.cat(each) for each in zip(*parts, strict=True))
    found = PromptScores(ids.int().cpu().numpy(), logprobs.cpu().numpy(), ranks.int().cpu().numpy())
    return logits, [found.part(start, start + len(scoring.following), scoring.alternatives) for start, scoring in asked]


def _scores(logits: torch.Tensor, targets: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, logprobs and ranks as in `PromptScores`, of one of `targets`, [rows, 1], and `most` alternatives a row."""
    own = logits.gather(1, targets)
    best, ids = likeliest(logits, most)
    logprobs = torch.cat([own, best], 1) - logits.logsumexp(1, keepdim=True)
    return torch.cat([targets, ids], 1), logprobs, (logits > own).sum(1) + 1

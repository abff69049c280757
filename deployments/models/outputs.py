"""A query's outputs, one or several from the same run, and how they are sent together. Pure.

- "text": one row per text: the pooled vector, a score for each label, or a weight for each word of the vocabulary
- "tokens": the transformer's vector for each token
- "sparse": a weight for each token (bge-m3)
- "multi_vector": a vector for each token, which are compared one by one (ColBERT, bge-m3)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Output = Literal["text", "tokens", "sparse", "multi_vector"]
Outputs = tuple[Output, ...]
Rows = npt.NDArray[np.float32]  # [rows, numbers]
Numbers = npt.NDArray[np.float32]  # [numbers]: the outputs of one query, concatenated

TEXT: Outputs = ("text",)


def join(found: Sequence[Rows], outputs: Outputs, lengths: npt.ArrayLike) -> Iterable[Numbers]:
    """The numbers of each query. `found`: for each output, the rows of all queries, one per query or one per token."""
    ends = np.cumsum(lengths)[:-1]
    each: list[Iterable[Numbers]] = [
        rows if output == "text" else [one.reshape(-1) for one in np.split(rows, ends)]
        for output, rows in zip(outputs, found, strict=True)
    ]
    return each[0] if len(each) == 1 else [np.concatenate(one) for one in zip(*each, strict=True)]


def split(numbers: Numbers, outputs: Outputs, tokens: int, widths: Mapping[Output, int]) -> dict[Output, Rows]:
    """Split a query's numbers into the rows of each output: one row for "text", else one per token. `widths`: numbers
    in a token's row, by output.
    """
    sizes: dict[Output, int] = {output: tokens * widths[output] for output in outputs if output != "text"}
    sizes["text"] = len(numbers) - sum(sizes.values())
    ends = np.cumsum([sizes[output] for output in outputs])[:-1]
    parts = zip(outputs, np.split(numbers, ends), strict=True)
    return {output: part.reshape(1 if output == "text" else tokens, -1) for output, part in parts}

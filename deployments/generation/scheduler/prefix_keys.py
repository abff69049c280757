"""The keys by which a cache's blocks are found again. Pure.

The key of a full block is a hash of its tokens, of the key before it, and so of all tokens before it. Only those that
know the `secret` can compute keys, and those of different scopes differ. With 128 bits, two different sequences
practically never get equal keys.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from deployments.models.tokenizer import TokenIds

_BYTES = 16


class PrefixKeys(list[bytes]):
    """The keys of a sequence's full blocks, in order. `scope`: who may share them."""

    def __init__(self, secret: bytes, scope: bytes, block_size: int, ids: TokenIds) -> None:
        super().__init__()
        self._secret, self._block_size, self._rest = secret, block_size, list[int]()
        self._last = self._hash(scope)
        full = len(ids) - len(ids) % block_size
        for start in range(0, full, block_size):
            self._fill(ids[start : start + block_size])
        self._rest += ids[full:].tolist()

    def add(self, token: int) -> None:
        """Continue the sequence."""
        self._rest.append(token)
        if len(self._rest) == self._block_size:
            self._fill(np.array(self._rest, np.int32))
            self._rest.clear()

    def _fill(self, ids: TokenIds) -> None:
        self._last = self._hash(self._last + ids.astype(np.int32, copy=False).tobytes())
        self.append(self._last)

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=_BYTES, key=self._secret).digest()

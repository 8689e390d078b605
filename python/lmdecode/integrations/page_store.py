"""Pages of bytes under keys, in a ``KVStore``: what engines move that do not tell of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lmdecode.integrations.block_store import Block, BlockStore, StoreOptions
from lmdecode.store import Fingerprint
from lmdecode.store.kv_store import KV

_MOST_ROW_BYTES = 4096


def bytes_of(page: Tensor) -> Tensor:
    """Return a tensor's elements as [n] uint8: its own memory where they lie side by side."""
    return page.detach().contiguous().view(torch.uint8).reshape(-1)


class PageStore:
    """Pages of one size. Nothing here raises once it is open, see ``BlockStore``.

    Parameters
    ----------
    options
        How the store is opened.
    fields
        Of the fingerprint: model_id, weights_hash, layout, tensor_parallel_rank.
    num_bytes
        Of a page, an even number.
    writes
        Whether pages are saved.

    Raises
    ------
    ValueError
        The pages have an odd size, or an option is none of ``KVStore``'s.
    """

    def __init__(
        self, options: StoreOptions, fields: dict[str, Any], num_bytes: int, writes: bool = True
    ) -> None:
        if num_bytes < 2 or num_bytes % 2:
            raise ValueError(
                f"{options.owner}: pages have {num_bytes} bytes; expected an even number"
            )
        self.num_bytes = num_bytes
        # The halves of a page lie as keys and values; a row is a token to the store.
        row = math.gcd(num_bytes // 2, _MOST_ROW_BYTES)
        self._tokens = (0,) * (num_bytes // 2 // row)
        fingerprint = Fingerprint(
            **fields, dtype="uint8", num_layers=1, num_kv_heads=1, head_size=row
        )
        self._store = BlockStore(options, fingerprint, len(self._tokens), writes)

    def has(self, key: bytes) -> bool:
        """Whether a page is stored; it becomes the most recently used one."""
        return self._store.has(self._block(key))

    def load(self, key: bytes, page: Tensor) -> bool:
        """Read a page into [num_bytes] uint8; False: a miss, and its content is undefined."""
        return self._store.load(self._block(key), self._kv(page))

    def save(self, pages: Sequence[tuple[bytes, Callable[[], Tensor]]]) -> list[bool]:
        """Store what is not stored yet, and say of each page whether it is now.

        Parameters
        ----------
        pages
            Keys, and what gives [num_bytes] uint8, which must not change before this returns. The
            first ones are evicted last.
        """

        def kv(page: Callable[[], Tensor]) -> Callable[[], KV]:
            return lambda: self._kv(page())

        self._store.save((self._block(key), kv(page)) for key, page in reversed(pages))
        return [self.has(key) for key, _ in pages]

    def clear(self) -> None:
        """Erase all pages."""
        self._store.clear()

    def close(self) -> None:
        """Make everything durable; done again it does nothing."""
        self._store.close()

    def _block(self, key: bytes) -> Block:
        return Block(key, self._tokens)

    def _kv(self, page: Tensor) -> KV:
        halves = page.view(2, 1, len(self._tokens), -1)
        return [(halves[0], halves[1])]

"""Blocks of an engine's KV cache in a ``KVStore``: found, loaded, saved, and never an error."""

from __future__ import annotations

import array
import hashlib
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from lmdecode.store import Fingerprint, Hit, KVStore, StoreError
from lmdecode.store.kv_store import KV

_RETRY_SECONDS = 10.0
_Result = TypeVar("_Result")


class Block(NamedTuple):
    """A whole block of a request.

    Attributes
    ----------
    context
        SHA-256 of all tokens before, and of what else the request's keys and values depend on.
    tokens
        The block's own ones, compared one by one with those that are stored.
    """

    context: bytes
    tokens: tuple[int, ...]


def blocks_of(
    tokens: Sequence[int], block_size: int, salt: bytes, known: Sequence[Block] = ()
) -> list[Block]:
    """Return the whole blocks of a text.

    Parameters
    ----------
    tokens
        Of the text, from its beginning.
    block_size
        Tokens of a block.
    salt
        Texts with another one have other blocks.
    known
        The first blocks of this text, from an earlier call.
    """
    blocks = list(known)
    for begin in range(len(blocks) * block_size, len(tokens) - block_size + 1, block_size):
        if blocks:
            last = array.array("Q", blocks[-1].tokens)
            if sys.byteorder == "big":
                last.byteswap()
            context = hashlib.sha256(blocks[-1].context + last.tobytes()).digest()
        else:
            context = hashlib.sha256(b"lmdecode.vllm.blocks.1" + salt).digest()
        blocks.append(Block(context, tuple(tokens[begin : begin + block_size])))
    return blocks


@dataclass(frozen=True)
class StoreOptions:
    """How a store is opened: arguments of ``KVStore``; and who does, for warnings."""

    path: str
    capacity_bytes: int | None = None
    durability: Any = "relaxed"
    salt: str = ""
    directory_bytes: int | None = None
    writers: Any = "one"
    owner: str = "LmdecodeConnector"


class BlockStore:
    """The store of one process, in which each block is an entry of its own.

    So blocks are saved when they are full, whatever became of those before, and loaded from any
    place on. Nothing here raises once it is open: the engine computes what the store does not have.

    Parameters
    ----------
    options
        How the store is opened.
    fingerprint
        Of the model.
    block_size
        Tokens of a block.
    writes
        Whether it saves. Where another process already does, it reads until that one is gone.

    Raises
    ------
    ValueError
        An option is none of ``KVStore``'s, such as a capacity of less than a block.
    """

    def __init__(
        self, options: StoreOptions, fingerprint: Fingerprint, block_size: int, writes: bool
    ) -> None:
        self._options, self._fingerprint = options, fingerprint
        self._block_size, self._writes = block_size, writes
        self._store: KVStore | None = None
        self._next_try = 0.0
        self._told: set[str] = set()
        self._open()

    def has(self, block: Block) -> bool:
        """Whether a block is stored."""
        return bool(self._calling(lambda store: self._find(store, block) is not None))

    def load(self, block: Block, kv: KV) -> bool:
        """Read a block into (K, V) of each layer; False: their content is undefined."""

        def read(store: KVStore) -> bool:
            hit = self._find(store, block)
            if hit is None:
                return False
            try:
                return store.load(hit, out=kv) is not None
            finally:
                hit.release()

        return bool(self._calling(read))

    def save(self, blocks: Iterable[tuple[Block, Callable[[], KV] | None]]) -> int:
        """Store what is not stored yet, and return how many blocks that were.

        Parameters
        ----------
        blocks
            With what gives their keys and values, which must not change before this returns; None:
            they are gone. Each block becomes the most recently used one, so the last ones should
            come first: the store then evicts the ends of texts before their beginnings.
        """

        def write(store: KVStore) -> int:
            coming: list[Future[int]] = []
            seen: list[Block] = []
            try:
                for block, kv in blocks:
                    seen.append(block)
                    if self._find(store, block) is None and kv is not None and not store.readonly:
                        put = store.put(block.tokens, kv(), context=block.context, background=True)
                        coming.append(put)
            finally:
                wait(coming)  # whatever happened: the engine writes to these blocks again
            if len(coming) > 1:  # they were put in any order
                for block in seen:
                    self._find(store, block)
            return sum(put.result() == self._block_size for put in coming)

        return self._calling(write) or 0

    def clear(self) -> None:
        """Erase all blocks."""
        self._calling(lambda store: store.erase(everything=True))

    def close(self) -> None:
        """Make everything durable; done again it does nothing."""
        store, self._store = self._store, None
        self._next_try = float("inf")
        if store is not None:
            self._guarded(store.close)

    def _find(self, store: KVStore, block: Block) -> Hit | None:
        hit = store.lookup(block.tokens, context=block.context)
        if hit.num_tokens == self._block_size:
            return hit
        hit.release()
        return None

    def _calling(self, call: Callable[[KVStore], _Result]) -> _Result | None:
        if self._store is None or (self._writes and self._store.readonly):
            self._open()
        store = self._store
        if store is None:
            return None
        done, result = self._guarded(lambda: call(store))
        if not done:
            self._store = None
            self._guarded(store.close)
        return result

    def _guarded(self, call: Callable[[], _Result]) -> tuple[bool, _Result | None]:
        try:
            return True, call()
        except (StoreError, OSError) as error:
            self._tell(f"goes on without its store for now: {error}")
            return False, None

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warnings.warn(f"{self._options.owner} {what}", RuntimeWarning, stacklevel=2)

    def _open(self) -> None:
        """Open the store, or try again later."""
        if time.monotonic() < self._next_try:
            return
        self._next_try = time.monotonic() + _RETRY_SECONDS
        if self._writes:
            try:
                store = self._new(readonly=False)
            except (StoreError, OSError) as error:
                if self._store is None:
                    self._tell(f"does not write its store: {error}")
            else:
                if self._store is not None:
                    self._guarded(self._store.close)
                self._store = store
                return
        if self._store is None:
            try:
                self._store = self._new(readonly=True)
            except FileNotFoundError:  # nothing has been written yet
                self._next_try = 0.0
            except (StoreError, OSError) as error:
                self._tell(f"goes on without its store for now: {error}")

    def _new(self, readonly: bool) -> KVStore:
        options = self._options
        return KVStore(
            options.path, fingerprint=self._fingerprint, capacity_bytes=options.capacity_bytes,
            directory_bytes=options.directory_bytes, durability=options.durability,
            salt=options.salt, readonly=readonly, v_layout="row", chunk_tokens=self._block_size,
            writers=options.writers,
        )  # fmt: skip

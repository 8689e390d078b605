"""``Session``: one conversation, which can be interrupted at any token and resumed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from ctypes import c_int64
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from lmdecode.store._engine import read_u32, read_u64
from lmdecode.store._library import Bytes, Put, byref
from lmdecode.store._tensors import Planes, Tokens

if TYPE_CHECKING:
    from lmdecode.store.kv_store import KV, KVStore


class Session:
    """A conversation of a ``KVStore``: made by ``KVStore.session``.

    The tokens live in memory and, from ``commit`` on, in the store.
    """

    def __init__(self, store: KVStore, id: str, context: bytes = b"") -> None:
        self.id = id
        self._store = store
        self._engine = store._engine
        self._scope = store._scope(context)
        self._name = Bytes.of(id.encode())
        self._tokens = self._read()

    def _read(self) -> array[int]:
        count, capacity = c_int64(), 0
        while True:
            tokens = array("i", bytes(4 * capacity))
            self._engine.call(
                "read_session", self._scope.reference, self._name, tokens.buffer_info()[0],
                capacity, byref(count),
            )  # fmt: skip
            if count.value <= capacity:
                return tokens[: max(count.value, 0)]
            capacity = count.value

    @property
    def tokens(self) -> list[int]:
        """All tokens of the session so far."""
        return self._tokens.tolist()

    def __len__(self) -> int:
        return len(self._tokens)

    def step(self, tokens: Sequence[int] | Tensor) -> Literal["continue", "query"]:
        """Append tokens, and say how to go on.

        Returns
        -------
        str
            "continue": the session begins, or goes on where the model is: compute these tokens.
            "query": the model was elsewhere meanwhile: ``resume``, then compute what that lacks.
        """
        ids = Tokens(tokens, "step")
        engine = self._engine
        with engine.lock:
            goes_on = not self._tokens or engine.current is self
            self._tokens.extend(ids.tolist())
            engine.current = self
        return "continue" if goes_on else "query"

    def resume(self, max_tokens: int | None = None) -> tuple[int, KV | None]:
        """Load the longest stored prefix of the session's tokens.

        Parameters
        ----------
        max_tokens
            At most so many: a model that is to predict must compute at least the last token.

        Returns
        -------
        (int, list of (K, V) or None)
            How many leading tokens were loaded, and their keys and values as of ``KVStore.load``;
            (0, None): compute all of ``tokens``.
        """
        tokens = self._tokens if max_tokens is None else self._tokens[:max_tokens]
        with self._engine.lock:
            self._engine.current = self
        # A slot that turns out to be damaged is dropped: each turn finds less.
        found = len(tokens) + 1
        while hit := self._store.lookup(tokens, context=self._scope.context):
            kv = self._store.load(hit)
            hit.release()
            if kv is not None:
                return hit.num_tokens, kv
            if hit.num_tokens >= found:  # it cannot be read for a reason of another kind
                break
            found = hit.num_tokens
        return 0, None

    def _commit(self, ids: Tokens, computed: int, planes: Planes, put: Put) -> int:
        stored = read_u64(
            self._engine, "commit_session", self._scope.reference, self._name, ids.address,
            len(ids), computed, planes.array, planes.size, byref(put),
        )  # fmt: skip
        self._store._written(self._scope, ids, stored, stored < computed)
        return stored

    def commit(
        self,
        kv: Sequence[tuple[Tensor, Tensor]],
        *,
        num_tokens: int | None = None,
        ttl: float | None = None,
        pin: bool = False,
        background: bool = False,
    ) -> int | Future[int]:
        """Store the session's tokens and what was computed of them, in one transaction.

        Parameters
        ----------
        kv
            Keys and values of all tokens so far, as for ``KVStore.put``; the last tokens may not
            have been computed yet.
        num_tokens
            How many tokens were computed; None: as many as the longest layer has. Needed where
            every layer has a window.
        ttl, pin, background
            As for ``KVStore.put``.

        Returns
        -------
        int
            How many leading tokens have their keys and values stored; 0 where not even the
            session's tokens could be.
        """
        planes = Planes.checked(kv, self._store.fingerprint, "commit")
        computed = planes.max_tokens if num_tokens is None else num_tokens
        put = self._store._put_options(ttl, pin)
        # A copy: the session may go on while it is written.
        ids = Tokens(array("i", self._tokens), "commit")
        if background:
            return self._engine.submit(self._commit, ids, computed, planes, put)
        return self._commit(ids, computed, planes, put)

    def _write(self) -> bool:
        ids = Tokens(self._tokens, "session")
        return bool(
            read_u32(
                self._engine, "write_session", self._scope.reference, self._name, ids.address,
                len(ids),
            )
        )  # fmt: skip

    def fork(self, id: str) -> Session:
        """Begin another session with the same tokens; it shares what is stored of them.

        Raises
        ------
        ValueError
            There is a session of this name already.
        """
        other = self._store.session(id, context=self._scope.context)
        if len(other):
            raise ValueError(f"fork: there is a session {id!r} already")
        other._tokens.extend(self._tokens)
        other._write()
        return other

    def rewind(self, num_tokens: int) -> None:
        """Keep only the first tokens; stored keys and values stay, for whoever shares them.

        The next ``step`` is a "query".
        """
        if not 0 <= num_tokens <= len(self._tokens):
            raise ValueError(
                f"rewind: num_tokens is {num_tokens}; expected 0 to {len(self._tokens)}"
            )
        with self._engine.lock:
            del self._tokens[num_tokens:]
            if self._engine.current is self:
                self._engine.current = None
        self._write()

    def delete(self) -> None:
        """Forget the session's tokens; keys and values stay until they are evicted."""
        with self._engine.lock:
            del self._tokens[:]
            if self._engine.current is self:
                self._engine.current = None
        read_u32(self._engine, "remove_session", self._scope.reference, self._name)

"""``Session``: one conversation, which can be interrupted at any token and resumed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Literal

from torch import Tensor, tensor

from lmdecode._checks import is_int, type_error
from lmdecode.store._native import PutOptions
from lmdecode.store._tensors import Planes, token_ids
from lmdecode.store.prefixes import KV, Prefixes, checked_bytes


class Session:
    """A conversation of a ``KVStore``: made by ``KVStore.session``.

    The tokens live in memory and, from ``commit`` on, in the store.
    """

    def __init__(self, store: Prefixes, id: str, context: bytes = b"") -> None:
        self.id = id
        self._store = store
        self._handle = store._handle
        self._scope = store._scope(context)
        self._name = id.encode()
        self._tokens = self._read()

    def _read(self) -> array[int]:
        return array("i", self._handle.native.read_session(self._scope, self._name) or b"")

    @property
    def tokens(self) -> list[int]:
        """All tokens of the session so far."""
        return self._tokens.tolist()

    @property
    def input_ids(self) -> Tensor | None:
        """The tokens as models take them, [1, n] int64; None: there are none."""
        return tensor([self.tokens]) if self._tokens else None

    def __repr__(self) -> str:
        return f"Session({self.id!r}, {len(self)} tokens)"

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
        ids = token_ids(tokens, "step").tolist()
        if any(token < 0 for token in ids):
            raise ValueError(f"step: token id {min(ids)}; expected 0 or more")
        handle = self._handle
        with handle.lock:
            goes_on = not self._tokens or handle.current is self
            self._tokens.extend(ids)
            handle.current = self
        return "continue" if goes_on else "query"

    def resume(self, max_tokens: int | None = None) -> tuple[int, KV | None]:
        """Load the longest stored prefix of the session's tokens.

        Parameters
        ----------
        max_tokens
            Most tokens to load: a model that predicts must compute at least the last token.

        Returns
        -------
        (int, list of (K, V) or None)
            How many leading tokens were loaded, and their keys and values as of ``KVStore.load``;
            (0, None): compute all of ``tokens``.
        """
        if max_tokens is not None and max_tokens < 0:
            raise ValueError(f"resume: max_tokens is {max_tokens}; expected 0 or more")
        tokens = self._tokens[:max_tokens]
        with self._handle.lock:
            self._handle.current = self
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

    def _commit(self, ids: memoryview, computed: int, planes: Planes, put: PutOptions) -> int:
        stored = self._handle.native.commit_session(
            self._scope, self._name, ids, computed, planes, put
        )
        self._store._written(self._scope, ids, stored, stored < computed)
        return stored

    def commit(
        self,
        kv: Sequence[tuple[Tensor, ...]],
        *,
        num_tokens: int | None = None,
        ttl: float | None = None,
        pin: bool = False,
        background: bool = False,
    ) -> int | Future[int]:
        """Store the session's tokens with their keys and values, in one transaction.

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
        return self._commit_as(self._tokens, kv, num_tokens, ttl, pin, background)

    def _commit_as(
        self,
        tokens: array[int],
        kv: Sequence[tuple[Tensor, ...]],
        num_tokens: int | None,
        ttl: float | None,
        pin: bool,
        background: bool,
    ) -> int | Future[int]:
        """Commit with the tokens that the keys and values are of, whatever another thread did."""
        planes = Planes.checked(kv, self._store.fingerprint, "commit")
        if num_tokens is not None and not is_int(num_tokens):
            raise type_error("commit", "num_tokens", num_tokens, "an int or None")
        computed = planes.max_tokens if num_tokens is None else int(num_tokens)
        if not 0 <= computed <= len(tokens):
            raise ValueError(
                f"commit: keys and values of {computed} tokens; expected at most the session's "
                f"{len(tokens)}"
            )
        put = self._store._put_options(ttl, pin)
        # A copy: the session may go on while it is written.
        copy = array("i", tokens)
        if tokens is not self._tokens:
            with self._handle.lock:
                self._tokens[:] = copy
        ids = memoryview(copy)
        if background:
            return self._handle.submit(self._commit, ids, computed, planes, put)
        return self._commit(ids, computed, planes, put)

    def _write(self) -> bool:
        copy = array("i", self._tokens)  # which may go on meanwhile
        return self._handle.native.write_session(self._scope, self._name, memoryview(copy))

    def fork(self, id: str) -> Session:
        """Begin another session with the same tokens; it shares their stored keys and values.

        Raises
        ------
        ValueError
            There is a session of this name already.
        """
        other = session_of(self._store, id, self._scope.context)
        if len(other):
            raise ValueError(f"fork: there is a session {id!r} already")
        other._tokens.extend(self._tokens)
        other._write()
        return other

    def rewind(self, num_tokens: int) -> None:
        """Keep only the first tokens; stored keys and values stay for other users.

        The next ``step`` is a "query".
        """
        if not 0 <= num_tokens <= len(self._tokens):
            raise ValueError(
                f"rewind: num_tokens is {num_tokens}; expected 0 to {len(self._tokens)}"
            )
        with self._handle.lock:
            del self._tokens[num_tokens:]
            if self._handle.current is self:
                self._handle.current = None
        self._write()

    def delete(self) -> None:
        """Forget the session's tokens; keys and values stay until they are evicted."""
        with self._handle.lock:
            del self._tokens[:]
            if self._handle.current is self:
                self._handle.current = None
        self._handle.native.remove_session(self._scope, self._name)


def session_of(store: Prefixes, id: str, context: bytes) -> Session:
    """Return the session of this name: the one in use, else a new object."""
    if not isinstance(id, str):
        raise TypeError(f"session: id is {type(id).__name__}; expected a str")
    handle = store._handle
    key = (store._salt, checked_bytes(context, "context"), id)
    with handle.lock:
        known: Session | None = handle.sessions.get(key)
    if known is not None:
        return known
    session = Session(store, id, context)
    with handle.lock:
        return handle.sessions.setdefault(key, session)

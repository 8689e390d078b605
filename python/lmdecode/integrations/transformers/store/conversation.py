"""The session behind one call of a model with a store: its failures are warnings."""

from __future__ import annotations

import warnings
import weakref
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from transformers import Cache, EncoderDecoderCache

from lmdecode.integrations.transformers.caches.kv_layers import length_of
from lmdecode.integrations.transformers.store.cache import cache_to_kv

if TYPE_CHECKING:
    from lmdecode.store import Hit, KVStore, Session

T = TypeVar("T")
# A prompt is computed much faster than its answer: so many tokens of it are kept at a time.
_PROMPT_COMMIT = 2048


class _Live(NamedTuple):
    """The cache that the last call left in memory, and the tokens that it holds."""

    model: weakref.ref[Any]
    cache: Any
    tokens: array[int]


# Of the session that the model is at: a store keeps that one alive, and no other.
_live: weakref.WeakKeyDictionary[Session, _Live] = weakref.WeakKeyDictionary()
_live_lock = Lock()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(n for n in range(length) if one[n] != other[n])


def self_attention(cache: Any) -> Cache:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


class Conversation:
    """Finds the tokens of a call, and stores what is computed of them.

    Whatever the store cannot do is a miss, or is not stored; the first failure of a call is a
    warning, which names ``caller``. Without a session prefixes are found and stored alone.
    """

    def __init__(
        self,
        store: KVStore,
        session_id: str | None,
        tokens: array[int],
        context: bytes,
        *,
        chunk_size: int | None,
        commit_every: int | None,
        ttl: float | None = None,
        pin: bool = False,
        rewind: bool = False,
        caller: str = "generate_with_store",
    ) -> None:
        from lmdecode.store import StoreError

        self._failures = (StoreError, OSError)
        self._store = store
        self._tokens = tokens
        self._context = context
        self._chunk_size = chunk_size
        self._commit_every = commit_every
        self._ttl, self._pin = ttl, pin
        self._stored = 0
        self._pending: Future[int] | None = None
        self._rewinds = rewind
        self._caller, self._has_warned = caller, False
        self._session: Session | None = None
        if session_id is not None:
            self._session = self.attempt(lambda: store.session(session_id, context=context), None)
        # A session that cannot be had is not written to.
        self._writes = not store.readonly and (session_id is None or self._session is not None)
        # Where the session was left: a resumed call goes on from there, like one that never ended.
        self._left_at = 0

    def attempt(self, action: Callable[[], T], default: T) -> T:
        """Do it; where the store fails, warn and return the default."""
        try:
            return action()
        except self._failures as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{self._caller} goes on without the store: {error}", RuntimeWarning,
                    stacklevel=4,
                )  # fmt: skip
            return default

    # --- query

    def left(self, cache: Any) -> bool:
        """Whether the last call of this session left this cache."""
        with _live_lock:
            live = None if self._session is None else _live.get(self._session)
        return live is not None and live.cache is cache

    def begin(self, model: Any, given: Any) -> Any:
        """Enter the tokens into the session; return the cache of a direct continuation.

        ``given`` is the caller's cache or None. None as the result: look the tokens up. Raises
        ValueError where the tokens do not continue the session and it is not to be rewound.
        """
        session = self._session
        if session is None:
            return None
        common = _common(session._tokens, self._tokens)
        if common < len(session) and not self._rewinds:
            raise ValueError(
                f"{self._caller}: the text has the first {common} of the {len(session)} tokens of "
                f"session {session.id!r}; expected all of them and more, new tokens alone with "
                "append=True, or rewind=True to forget the others"
            )
        with _live_lock:
            live = _live.pop(session, None)
            for other in [key for key in _live if key._handle is session._handle]:
                del _live[other]  # the model leaves it
        known = session._tokens
        is_begun = len(known) > 0
        if common < len(known):
            # A store that is only read cannot note that; this call need not care.
            if self._store.readonly:
                with session._handle.lock:
                    del known[common:]
                    session._handle.current = None
            else:
                self.attempt(lambda: session.rewind(common), None)
        self._left_at = common
        answer = self.attempt(lambda: session.step(self._tokens[common:]), "query")
        if not is_begun or answer == "query" or live is None:
            return None
        goes_on = (
            live.model() is model
            and (given is None or given is live.cache)
            and live.tokens == self._tokens[: len(live.tokens)]
            and len(live.tokens) < len(self._tokens)
        )
        if not goes_on:
            return None
        self._stored = len(live.tokens)
        return live.cache

    def _boundary(self, found: int) -> int:
        """Return how much of a hit to use, so that chunks begin where they would without it."""
        if self._chunk_size is None or self._store.fingerprint.windows is not None:
            return found
        ends = (len(self._tokens) - 1, self._left_at - 1)
        below = max((end for end in ends if 0 < end <= found), default=0)
        return max(below, found // self._chunk_size * self._chunk_size)

    def _find(self, limit: int) -> Hit | None:
        if limit == 0:
            return None
        hit = self._store.lookup(self._tokens[:limit], context=self._context)
        used = self._boundary(hit.num_tokens)
        if used < hit.num_tokens:
            hit.release()
            hit = self._store.lookup(self._tokens[:used], context=self._context)
        return hit if hit else None

    def load(self, fill: Callable[[Hit], bool], if_faster: bool = False) -> int:
        """Let an empty cache be filled with the longest stored prefix; return its length.

        At most all tokens but the last one, whose logits are wanted. ``fill`` returns False where
        the hit is a miss after all.
        """
        limit = len(self._tokens) - 1
        # What turns out to be damaged is dropped: each turn finds less.
        before = limit + 1
        while hit := self.attempt(lambda: self._find(limit), None):
            try:
                if if_faster and not self._store.should_load(hit):
                    break
                if self.attempt(partial(fill, hit), False):
                    self._stored = hit.num_tokens
                    return hit.num_tokens
                if hit.num_tokens >= before:  # it cannot be read for a reason of another kind
                    break
                before = hit.num_tokens
            finally:
                hit.release()
        return 0

    # --- export

    def _collect(self) -> None:
        """Wait for what is being written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self.attempt(pending.result, 0)

    def append(self, tokens: Sequence[int]) -> None:
        """Add new tokens of the answer."""
        self._tokens.extend(tokens)
        session = self._session
        if session is not None:
            self.attempt(lambda: session.step(tokens), "query")

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._tokens)

    def commit(self, cache: Any, *, background: bool = False) -> None:
        """Store the session's tokens and what the cache has of them."""
        if not self._writes:
            return
        if background and self._pending is not None and not self._pending.done():
            return  # the disk is slower than the model: the next one has these tokens too
        part = self_attention(cache)
        count = min(map(length_of, part.layers))
        if count > 0:
            self.commit_kv(cache_to_kv(part, count), count, background=background)

    def commit_kv(
        self, kv: Sequence[tuple[torch.Tensor, ...]], num_tokens: int, *, background: bool = False
    ) -> None:
        """Store the session's tokens, and the keys and values of the first of them."""
        self._collect()
        if not self._writes:
            return
        nothing_stored: int | Future[int] = 0
        result = self.attempt(lambda: self._commit(kv, num_tokens, background), nothing_stored)
        self._stored = num_tokens
        if isinstance(result, Future):
            self._pending = result

    def _commit(
        self, kv: Sequence[tuple[torch.Tensor, ...]], num_tokens: int, background: bool
    ) -> int | Future[int]:
        session = self._session
        if session is None and num_tokens == 0:
            return 0
        if session is None:
            return self._store.put(
                self._tokens[:num_tokens], kv, context=self._context, ttl=self._ttl,
                pin=self._pin, background=background,
            )  # fmt: skip
        if num_tokens == 0:  # the tokens alone
            of = self._store.fingerprint
            shape = (of.num_kv_heads, 0, of.head_size)
            nothing = torch.empty(shape, dtype=of.torch_dtype, device="cpu")
            states = [(torch.empty(0, dtype=torch.float32, device="cpu"),)] if of.state_size else []
            kv = [*[(nothing, nothing)] * of.num_layers, *states]
        # Not the session's tokens: another thread may have begun to use the same one.
        return session._commit_as(self._tokens, kv, num_tokens, self._ttl, self._pin, background)

    def commit_tokens(self, *, background: bool = False) -> None:
        """Store the session's tokens alone, beside what is stored of their keys and values."""
        if background and self._pending is not None and not self._pending.done():
            return  # as in commit()
        self.commit_kv([], 0, background=background)
        self._stored = len(self._tokens)

    def keep_prompt(self, cache: Any, num_tokens: int) -> None:
        """Store parts of a long prompt while it is computed."""
        if self._commit_every is not None and num_tokens - self._stored >= _PROMPT_COMMIT:
            self.commit(cache, background=True)

    def is_due(self, num_tokens: int) -> bool:
        """Whether the answer has grown enough to be stored."""
        return self._commit_every is not None and (
            num_tokens - self._stored > self._commit_every and self._session is not None
        )

    def leave(self, model: Any, cache: Any) -> None:
        """Leave the cache to the next call."""
        count = int(self_attention(cache).get_seq_length())
        if self._session is not None and 0 < count <= len(self._tokens):
            with _live_lock:
                _live[self._session] = _Live(weakref.ref(model), cache, self._tokens[:count])

    def interrupted(self, cache: Any) -> None:
        """Store what can be stored of a generation that ended with an exception."""
        # It may have ended within a forward pass, where layers with a window do not agree.
        with suppress(ValueError, TypeError):
            self.commit(cache)
        self._collect()

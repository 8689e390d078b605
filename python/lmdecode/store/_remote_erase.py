"""Erasing from the second tier: every entry there is looked at, for keys tell nothing of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from lmdecode.store._native import Scope, Store
from lmdecode.store.remote_values import FIRST_VALUES, ValueHead, tails_name

T = TypeVar("T")

_SCANNED_AT_ONCE = 256


@dataclass(frozen=True)
class Choice:
    """Target of ``KVStore.erase``, in the form that the compiled store takes.

    Attributes
    ----------
    tokens, session
        At most one is given. Neither: everything of the tenant, in all of its known contexts.
    """

    store: Store
    scope: Scope
    tokens: memoryview | None
    session: bytes | None

    @property
    def _is_everything(self) -> bool:
        return self.tokens is None and self.session is None

    def erase(self, client: Any) -> None:
        """Remove it from a server. Call this before the local store erases its own entries."""
        roots = {self.store.key(self.scope, b"")}
        if self._is_everything:
            roots.update(self.store.roots(self.scope))
        size = ValueHead.size + self.store.header_bytes(self.store.chunk_tokens)
        heads = []
        names = client.scan_iter(match=FIRST_VALUES, count=_SCANNED_AT_ONCE)
        for some in _batches(names, _SCANNED_AT_ONCE):
            with client.pipeline(transaction=False) as pipe:
                for name in some:
                    pipe.getrange(name, 0, size - 1)
                for name, value in zip(some, pipe.execute(), strict=True):
                    head = ValueHead.of(name, value)
                    if head is not None and head.root in roots:
                        heads.append(head)
        images = [head.image for head in heads]
        erased = self.store.erases(self.scope, self.tokens, self.session, images)
        chosen = [head for head, goes in zip(heads, erased, strict=True) if goes]
        for group in _batches(chosen, _SCANNED_AT_ONCE):
            with client.pipeline(transaction=False) as pipe:
                for head in group:
                    for name in head.names:
                        pipe.unlink(name)
                    for by_column in (False, True):
                        pipe.srem(tails_name(head.parent, by_column), head.count)
                pipe.execute()


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some

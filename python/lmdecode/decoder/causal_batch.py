"""Continuous batching of a decoder-only model, for callers that choose tokens themselves."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from lmdecode._checks import check_int, is_int, type_error
from lmdecode.decoder.causal_caches import (
    CHECKPOINT_INTERVAL,
    CausalCaches,
    check_sizes_of_batch,
)
from lmdecode.decoder.causal_weights import PackedCausalModel

__all__ = ["CausalBatch"]

_OP = "CausalBatch"
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _one_at_a_time(
    method: Callable[Concatenate[CausalBatch, _P], _R],
) -> Callable[Concatenate[CausalBatch, _P], _R]:
    """Let calls of several threads wait for each other: they share caches and scratch."""

    @functools.wraps(method)
    def locked(batch: CausalBatch, *arguments: _P.args, **options: _P.kwargs) -> _R:
        with batch._lock:
            return method(batch, *arguments, **options)

    return locked


class _Running:
    """A sequence: its place in the caches, and the tokens of its prompt that are to be read."""

    def __init__(self, place: int, prompt: list[int]) -> None:
        self.place = place
        self.unread = prompt
        self.length = 0  # of what has been read


class CausalBatch:
    """Sequences that come and go between steps: a step takes their tokens, and gives logits.

    Prompts are read in parts beside the tokens of the sequences that are being written: a long one
    does not hold them up. A sequence's logits are the same bits whatever else is in the batch, and
    in whatever parts its prompt is read. Any thread may call: calls are made one after the other.

    Parameters
    ----------
    model : PackedCausalModel
        Of a ``Decoding``, whose ``batch`` makes such an object.
    max_requests, capacity : int
        The most sequences at a time, and the most tokens of one. Memory is taken as they grow.
    max_step_tokens : int
        The most tokens of a step: first those of ``step``, then as many of prompts as there is room
        for.
    cache_dtype : str
        Of keys and values.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.

    Examples
    --------
    Greedy search of prompts that come at any time::

        batch = decoding.batch(max_requests=8, capacity=4096)
        first = batch.add(prompt)
        tokens = {}
        while batch.running:
            logits = batch.step(tokens)
            tokens = {request: int(row.argmax()) for request, row in logits.items()}
            for request in [request for request, token in tokens.items() if token == end]:
                batch.remove(request)
                del tokens[request]
    """

    def __init__(
        self,
        model: PackedCausalModel,
        *,
        max_requests: int,
        capacity: int,
        max_step_tokens: int = 512,
        cache_dtype: str = "float32",
    ) -> None:
        max_requests, capacity, self._max_step_tokens = check_sizes_of_batch(
            _OP, model.max_positions, max_requests, capacity, max_step_tokens
        )
        self._vocab_size, self._capacity = model.config.vocab_size, capacity
        self._caches = CausalCaches(
            model,
            max_requests,
            capacity,
            dtype=cache_dtype,
            max_rows=self._max_step_tokens,
            checkpoint_interval=CHECKPOINT_INTERVAL,
        )
        self._lock = threading.RLock()
        self._running: dict[Hashable, _Running] = {}  # in the order of adding
        self._free = list(range(max_requests - 1, -1, -1))
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        return (
            f"{_OP}({len(self._running)} sequences running, {len(self._free)} free places of "
            f"{self._capacity} tokens)"
        )

    @property
    def running(self) -> tuple[Hashable, ...]:
        """The sequences that have been added and not removed."""
        return tuple(self._running)

    @property
    def free_places(self) -> int:
        """How many sequences can be added."""
        return len(self._free)

    def length(self, request: Hashable) -> int:
        """Return how many tokens of a sequence have been read."""
        return self._of("length", request).length

    def unread(self, request: Hashable) -> int:
        """Return how many tokens of a sequence's prompt are still to be read."""
        return len(self._of("unread", request).unread)

    @_one_at_a_time
    def add(self, prompt_ids: Any, *, request_id: Hashable = None) -> Hashable:
        """Add a sequence; the next steps read its prompt.

        Parameters
        ----------
        prompt_ids : sequence of int or Tensor
            [length] token ids, at least one.
        request_id : Hashable, optional
            Its name; a number by default.

        Returns
        -------
        Hashable
            Its id.

        Raises
        ------
        ValueError, TypeError
            Names what does not fit; nothing has been changed then.
        """
        return self._add("add", prompt_ids, request_id)

    def _add(self, method: str, prompt_ids: Any, request_id: Hashable) -> Hashable:
        prompt = self._tokens(method, prompt_ids, 0)
        if not self._free:
            raise ValueError(
                f"{_OP}.{method}: {len(self._running)} sequences run; expected a free place"
            )
        if request_id is None:
            request_id = next(n for n in self._numbers if n not in self._running)
        elif request_id in self._running:
            raise ValueError(
                f"{_OP}.{method}: request_id {request_id!r} is in use; expected another"
            )
        self._running[request_id] = _Running(self._free.pop(), prompt)
        return request_id

    @_one_at_a_time
    def extend(self, request: Hashable, prompt_ids: Any) -> None:
        """Append tokens to a sequence's prompt, as the next turn of a conversation."""
        running = self._of("extend", request)
        tokens = self._tokens("extend", prompt_ids, running.length + len(running.unread))
        running.unread = running.unread + tokens

    @_one_at_a_time
    def fork(self, request: Hashable, *, request_id: Hashable = None) -> Hashable:
        """Add a sequence that has read what another one has; what they have in common is shared.

        Raises
        ------
        ValueError
            The other one's prompt has not been read to its end, or there is no free place.
        """
        running = self._of("fork", request)
        if running.unread:
            raise ValueError(
                f"{_OP}.fork: {len(running.unread)} tokens of request {request!r} have not been "
                "read; expected a prompt that has been read"
            )
        fork = self._add("fork", [0], request_id)
        child = self._running[fork]
        child.unread, child.length = [], running.length
        parents = torch.arange(self._caches.sequences, device="cpu")
        parents[child.place] = running.place
        self._caches.reorder(parents)
        return fork

    @_one_at_a_time
    def truncate(self, request: Hashable, length: int) -> None:
        """Let a sequence go back to its first tokens, as where drafts were refused.

        Raises
        ------
        ValueError
            The sequence is shorter, or a window or state at this length is no longer kept. The
            error names the nearest length before it that is.
        """
        running = self._of("truncate", request)
        limits = f"0 to {running.length}, its length"
        length = check_int(f"{_OP}.truncate", "length", length, 0, running.length, limits=limits)
        reachable = self._caches.reachable(running.place, length)
        if reachable != length:
            raise ValueError(
                f"{_OP}.truncate: length is {length} for request {request!r}, whose layers keep no "
                f"state there; expected {reachable}, the longest one before, or that of "
                "another checkpoint"
            )
        try:
            self._caches.truncate([running.place], [length])
        except ValueError as error:
            raise ValueError(
                f"{_OP}.truncate: length is {length} for request {request!r}, which has "
                f"{running.length} tokens; expected a length whose window a layer still keeps"
            ) from error
        running.length, running.unread = length, []

    @_one_at_a_time
    def remove(self, request: Hashable) -> None:
        """Remove a sequence; its place and its memory are free."""
        running = self._of("remove", request)
        self._caches.truncate([running.place], [0])
        del self._running[request]
        self._free.append(running.place)

    @_one_at_a_time
    def step(self, tokens: Mapping[Hashable, int] | None = None) -> dict[Hashable, Tensor]:
        """Read a token of each of some sequences, and parts of prompts.

        Parameters
        ----------
        tokens : mapping, optional
            The next token of sequences that have read their prompts. The others wait.

        Returns
        -------
        dict
            The logits, [V] float32, of each sequence whose last token was read in this step, in the
            order of ``tokens``, then of the prompts that have come to their end.

        Raises
        ------
        ValueError, TypeError
            Names what does not fit; nothing has been read then.
        """
        tokens = {} if tokens is None else tokens
        if not isinstance(tokens, Mapping):
            raise type_error(f"{_OP}.step", "tokens", tokens, "a mapping of requests to tokens")
        entries, ids, readers = list[list[int]](), list[int](), list[Hashable]()
        if len(tokens) > self._max_step_tokens:
            raise ValueError(
                f"{_OP}.step: tokens has {len(tokens)} entries; expected at most "
                f"{self._max_step_tokens}, max_step_tokens"
            )
        for request, token in tokens.items():
            running = self._of("step", request)
            if running.unread:
                raise ValueError(
                    f"{_OP}.step: tokens has request {request!r}, {len(running.unread)} tokens of "
                    "whose prompt have not been read; expected one that has been read"
                )
            ids += self._tokens("step", [token], running.length)
            entries.append([running.place, 1, 0, 1])
            readers.append(request)
        parts = list[tuple[_Running, int]]()
        room = self._max_step_tokens - len(ids)
        for request, running in self._running.items():
            count = min(room, len(running.unread))
            if count == 0:
                continue
            room -= count
            ids += running.unread[:count]
            is_end = count == len(running.unread)
            entries.append([running.place, count, 1, int(is_end)])
            parts.append((running, count))
            if is_end:
                readers.append(request)
        if not entries:
            return {}
        logits = self._caches.forward(
            torch.tensor(ids, device="cpu"), torch.tensor(entries, device="cpu"), len(readers)
        )
        for request in tokens:
            self._running[request].length += 1
        for running, count in parts:
            running.length += count
            del running.unread[:count]
        return dict(zip(readers, logits, strict=True))

    def _of(self, method: str, request: Hashable) -> _Running:
        if request not in self._running:
            raise ValueError(
                f"{_OP}.{method}: there is no request {request!r}; expected one that is running: "
                f"{list(self._running)}"
            )
        return self._running[request]

    def _tokens(self, method: str, tokens: Any, length: int) -> list[int]:
        """Return checked tokens that follow ``length`` tokens of a sequence."""
        op = f"{_OP}.{method}"
        if isinstance(tokens, Tensor):
            if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex():
                raise ValueError(
                    f"{op}: tokens are a tensor of shape {list(tokens.shape)} and dtype "
                    f"{tokens.dtype}; expected [length] of integers"
                )
            found = [int(token) for token in tokens.tolist()]
        else:
            if not isinstance(tokens, Sequence) or isinstance(tokens, (str, bytes)):
                raise type_error(op, "prompt_ids", tokens, "a sequence of int, or a tensor")
            for token in tokens:
                if not is_int(token):
                    raise type_error(op, "a token", token, "an int")
            found = [int(token) for token in tokens]
        if not found:
            raise ValueError(f"{op}: there are no tokens; expected at least one")
        for token in found:
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"{op}: a token is {token}; expected 0 to {self._vocab_size - 1}")
        if length + len(found) > self._capacity:
            raise ValueError(
                f"{op}: {len(found)} tokens behind {length}; expected at most {self._capacity} in "
                "all, the capacity of the batch"
            )
        return found

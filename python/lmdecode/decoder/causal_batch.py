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
from lmdecode.decoder.engine.request import DrawnSequence
from lmdecode.decoder.engine.rows import LoopSequence, ReadRows, SearchedRows
from lmdecode.decoder.engine.steps import CausalSteps
from lmdecode.models.packed_causal import PackedCausalModel

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


class CausalBatch:
    """Sequences that come and go between steps: a step takes their tokens, and gives logits.

    Prompts are read in parts beside the tokens of the sequences that are being written: a long one
    does not hold them up. Common prefixes of prompts are read once. A sequence's logits are the
    same bits whatever else is in the batch, and in whatever parts its prompt is read. Any thread
    may call: calls are made one after the other.

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
        caches = self._caches = CausalCaches(
            model,
            max_requests,
            capacity,
            dtype=cache_dtype,
            max_rows=self._max_step_tokens,
            checkpoint_interval=CHECKPOINT_INTERVAL,
        )
        self._steps = CausalSteps(caches, self._max_step_tokens)
        self._rows, self._no_searches = ReadRows(), SearchedRows(caches, self._vocab_size)
        self._lock = threading.RLock()
        self._running: dict[Hashable, LoopSequence] = {}  # in the order of adding
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        return (
            f"{_OP}({len(self._running)} sequences running, {self.free_places} free places of "
            f"{self._capacity} tokens)"
        )

    @property
    def running(self) -> tuple[Hashable, ...]:
        """The sequences that have been added and not removed."""
        return tuple(self._running)

    @property
    def free_places(self) -> int:
        """How many sequences can be added."""
        return self._steps.num_free

    def length(self, request: Hashable) -> int:
        """Return how many tokens of a sequence have been read."""
        return self._length(self._of("length", request))

    def _length(self, sequence: LoopSequence) -> int:
        return int(self._caches.lengths[sequence.places[0]])

    def unread(self, request: Hashable) -> int:
        """Return how many tokens of a sequence's prompt are still to be read."""
        return self._unread(self._of("unread", request))

    def _unread(self, sequence: LoopSequence) -> int:
        if sequence not in self._steps.reading:
            return 0
        return len(sequence.prompt_ids) - sequence.read

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
        prompt = self._tokens("add", prompt_ids, 0)
        request_id = self._new_id("add", request_id)
        self._running[request_id] = sequence = LoopSequence(prompt, 0)
        self._steps.begin(sequence)
        return request_id

    def _new_id(self, method: str, request_id: Hashable) -> Hashable:
        """Return the id of a sequence to be added, for which there is a place."""
        if not self.free_places:
            raise ValueError(
                f"{_OP}.{method}: {len(self._running)} sequences run; expected a free place"
            )
        if request_id is None:
            request_id = next(n for n in self._numbers if n not in self._running)
        elif request_id in self._running:
            raise ValueError(
                f"{_OP}.{method}: request_id {request_id!r} is in use; expected another"
            )
        return request_id

    @_one_at_a_time
    def extend(self, request: Hashable, prompt_ids: Any) -> None:
        """Append tokens to a sequence's prompt, as the next turn of a conversation."""
        sequence = self._of("extend", request)
        length = self._length(sequence)
        tokens = self._tokens("extend", prompt_ids, length + self._unread(sequence))
        self._steps.reader.extend(sequence, length, tuple(tokens))
        order: dict[Any, int] = {of: at for at, of in enumerate(self._running.values())}
        self._steps.reading.sort(key=order.__getitem__)  # the order of adding

    @_one_at_a_time
    def fork(self, request: Hashable, *, request_id: Hashable = None) -> Hashable:
        """Add a sequence that has read what another one has; what they have in common is shared.

        Raises
        ------
        ValueError
            The other one's prompt has not been read to its end, or there is no free place.
        """
        sequence = self._of("fork", request)
        if unread := self._unread(sequence):
            raise ValueError(
                f"{_OP}.fork: {unread} tokens of request {request!r} have not been read; expected "
                "a prompt that has been read"
            )
        request_id = self._new_id("fork", request_id)
        self._running[request_id] = child = LoopSequence((), 0)
        self._steps.places.take(child.places, ())
        parents = torch.arange(self._caches.sequences, device="cpu")
        parents[child.places] = sequence.places[0]
        self._caches.reorder(parents)
        return request_id

    @_one_at_a_time
    def truncate(self, request: Hashable, length: int) -> None:
        """Let a sequence go back to its first tokens, as where drafts were refused.

        Raises
        ------
        ValueError
            The sequence is shorter, or a window or state at this length is no longer kept. The
            error names the nearest length before it that is.
        """
        sequence = self._of("truncate", request)
        place, most = sequence.places[0], self._length(sequence)
        limits = f"0 to {most}, its length"
        length = check_int(f"{_OP}.truncate", "length", length, 0, most, limits=limits)
        reachable = self._caches.reachable(place, length)
        if reachable != length:
            raise ValueError(
                f"{_OP}.truncate: length is {length} for request {request!r}, whose layers keep no "
                f"state there; expected {reachable}, the longest one before, or that of "
                "another checkpoint"
            )
        try:
            self._caches.truncate([place], [length])
        except ValueError as error:
            raise ValueError(
                f"{_OP}.truncate: length is {length} for request {request!r}, which has "
                f"{most} tokens; expected a length whose window a layer still keeps"
            ) from error
        self._steps.places.cut(place, length)
        self._steps.reader.stop(sequence)

    @_one_at_a_time
    def remove(self, request: Hashable) -> None:
        """Remove a sequence; its place and its memory are free."""
        sequence = self._of("remove", request)
        self._steps.reader.stop(sequence)
        self._steps.leave(sequence, is_sound=False)
        del self._running[request]

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
        if len(tokens) > self._max_step_tokens:
            raise ValueError(
                f"{_OP}.step: tokens has {len(tokens)} entries; expected at most "
                f"{self._max_step_tokens}, max_step_tokens"
            )
        running, lengths = list[DrawnSequence](), self._caches.lengths.tolist()
        for request, token in tokens.items():
            sequence = self._of("step", request)
            if unread := self._unread(sequence):
                raise ValueError(
                    f"{_OP}.step: tokens has request {request!r}, {unread} tokens of whose prompt "
                    "have not been read; expected one that has been read"
                )
            (sequence.last,) = self._tokens("step", [token], lengths[sequence.places[0]])
            running.append(sequence)
        is_same = running == self._rows.running
        last = [sequence.last for sequence in running]
        self._rows.running = running
        self._rows.tokens = torch.tensor(last, device="cpu") if is_same and last else None
        step = self._steps.read(self._rows, self._no_searches)
        if step is None:
            return {}
        requests = {sequence: request for request, sequence in self._running.items()}
        begun = [
            requests[sequence] for sequence in step.begun if isinstance(sequence, LoopSequence)
        ]
        return dict(zip([*tokens, *begun], step.logits, strict=True))

    def _of(self, method: str, request: Hashable) -> LoopSequence:
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

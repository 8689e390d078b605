"""Continuous batching of a decoder: requests are added and removed between steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from lmdecode._checks import check_int
from lmdecode.beam.engine.request import (
    BeamRequest,
    BeamResult,
    RequestIds,
    check_tokens_of_request,
    position_of_request,
)
from lmdecode.beam.token_rules import ALWAYS, new_token_rules
from lmdecode.decoder.checks import check_memory
from lmdecode.decoder.search_slots import SearchSlots
from lmdecode.decoder.searches import check_length
from lmdecode.models.packed_stack import PackedDecoder

__all__ = ["DecodingBatch"]

_OP = "DecodingBatch"


def _size(name: str, value: object, least: int = 1) -> int:
    return check_int(_OP, name, value, least, limits=f"at least {least}, an int64")


class DecodingBatch:
    """Continuous batching of searches, with a fixed number of places.

    A request is a ``BeamRequest`` and its memory. It may be added between any two steps, and leaves
    as soon as it has ended. Its keys and values are never moved. Its result is bitwise the same in
    any batch.

    Parameters
    ----------
    decoder : PackedDecoder
        The decoder of a ``Decoding``; ``Decoding.batch`` makes such an object.
    max_requests, num_beams, capacity, source : int
        Number of places; maximum number of beams of a search, of tokens of a sequence, prompt
        included, and of positions of a memory. Memory for all of them is allocated at once.
    max_end_tokens, max_suppressed : int
        Maximum lengths of these lists of a request.
    generation_config : transformers.GenerationConfig, optional
        The config of prompts that are added without one.
    request_of_config : callable, optional
        Makes a request from a prompt and a config; ``Decoding.batch`` passes it.

    Raises
    ------
    ValueError, TypeError
        Names the size, what came and what was expected.
    """

    def __init__(
        self,
        decoder: PackedDecoder,
        *,
        max_requests: int,
        num_beams: int,
        capacity: int,
        source: int,
        max_end_tokens: int = 4,
        max_suppressed: int = 64,
        generation_config: Any = None,
        request_of_config: Callable[[Any, Any], BeamRequest] | None = None,
    ) -> None:
        max_requests = _size("max_requests", max_requests)
        num_beams = _size("num_beams", num_beams)
        capacity = _size("capacity", capacity, 2)
        source = _size("source", source)
        max_end_tokens = _size("max_end_tokens", max_end_tokens, 0)
        max_suppressed = _size("max_suppressed", max_suppressed, 0)
        check_length(_OP, "capacity", capacity, decoder)
        self._decoder = decoder
        self._source = source
        self._max_suppressed = max_suppressed
        self._generation_config, self._request_of_config = generation_config, request_of_config
        self._slots = SearchSlots(
            decoder,
            max_requests,
            source,
            num_beams=num_beams,
            capacity=capacity,
            num_ends=max_end_tokens,
            num_candidates=max(2, 1 + max_end_tokens) * num_beams,
            token_rules=new_token_rules(max_requests, max_end_tokens + max_suppressed, 2),
        )
        # Requests and their ids by slots, in the order of adding.
        self._running: dict[int, tuple[BeamRequest, Hashable]] = {}
        self._free = list(range(max_requests))
        self._finished: list[BeamResult] = []
        self._ids = RequestIds()  # of both

    def __repr__(self) -> str:
        return f"{_OP}({len(self._running)} requests running, {self.free_places} free places)"

    @property
    def running(self) -> tuple[Hashable, ...]:
        """The requests that have not ended."""
        return tuple(request_id for _, request_id in self._running.values())

    @property
    def free_places(self) -> int:
        """Number of requests that can be added."""
        return len(self._free)

    def _check(self, request: BeamRequest, memory: Tensor) -> None:
        self._ids.check(f"{_OP}.add", request)
        searches = self._slots.searches
        state, parameters = searches.state, searches.parameters
        if not self.free_places:
            raise ValueError(f"{_OP}.add: {len(self._running)} requests run; expected a free place")
        for name, value, most in (
            ("num_beams", request.num_beams, state.scores.shape[1]),
            ("num_hypotheses", request.num_hypotheses, state.hypothesis_scores.shape[1]),
            ("the prompt and max_new_tokens", request.max_length, state.sequences.shape[2]),
            ("eos_token_id", len(request.eos_token_id), parameters.end_tokens.shape[1]),
            ("suppress_tokens", len(request.suppress_tokens), self._max_suppressed),
        ):
            if value > most:
                raise ValueError(
                    f"{_OP}.add: {name} of the request: {value}; expected at most {most}, for "
                    "which the batch was made"
                )
        others: tuple[tuple[str, object, object], ...] = (
            ("num_beam_groups", request.num_beam_groups, 1),
            ("coverage_penalty", request.coverage_penalty, 0.0),
            ("logit_bias", dict(request.logit_bias), {}),
            ("dialect", request.dialect, "generate"),
        )
        for name, given, only in others:
            if given != only:
                raise ValueError(f"{_OP}.add: {name} is {given!r}; expected {only!r}")
        check_tokens_of_request(f"{_OP}.add", request, self._decoder.config.vocab_size)
        if request.trie is not None:
            request.trie.check_vocab(f"{_OP}.add", self._decoder.config.vocab_size)
        size = self._decoder.config.memory_size
        check_memory(f"{_OP}.add", memory, size, self._source)

    def add(self, request: Any, memory: Tensor, *, generation_config: Any = None) -> Hashable:
        """Add a request; its search begins with the next step.

        Parameters
        ----------
        request : BeamRequest, or sequence of int, Tensor or None
            Without groups, ``coverage_penalty`` and ``logit_bias``; its dialect is "generate". With
            a ``generation_config``, here or of the batch, the prompt of the decoder alone, [length]
            token ids; None is its start token.
        memory : Tensor
            [source, memory_size]: the encoder's output, without padding.
        generation_config : transformers.GenerationConfig, optional
            For a prompt: it is searched as by ``generate()`` with this config. Values that are None
            come from the config of the ``Decoding``'s model.

        Returns
        -------
        Hashable
            Its ``request_id``, or a number if it has none.

        Raises
        ------
        ValueError, TypeError
            Names what does not fit; nothing has been changed then.
        """
        if generation_config is not None and isinstance(request, BeamRequest):
            raise TypeError(
                f"{_OP}.add: request is a BeamRequest; expected a prompt beside generation_config"
            )
        if generation_config is None:
            generation_config = self._generation_config
        if generation_config is not None and not isinstance(request, BeamRequest):
            if self._request_of_config is None:
                raise ValueError(f"{_OP}: generation_config is given; expected Decoding.batch()")
            request = self._request_of_config(request, generation_config)
        self._check(request, memory)
        slot = min(self._free)
        memory = memory.detach().to(device="cpu", dtype=torch.float32)
        self._slots.begin(slot, request, memory)
        self._free.remove(slot)
        request_id = self._ids.new(request)
        self._ids.add(request_id)
        self._running[slot] = request, request_id
        return request_id

    def cancel(self, request_id: Hashable) -> None:
        """Drop a running request, without a result.

        Raises
        ------
        ValueError
            No such request is running.
        """
        number = position_of_request(f"{_OP}.cancel", request_id, self.running)
        slot = list(self._running)[number]
        self._leave(slot)
        self._ids.discard(request_id)

    def step(self, max_steps: int = 1) -> tuple[Hashable, ...]:
        """Do steps, until ``max_steps`` or until a request has ended.

        Returns
        -------
        tuple
            The requests that have ended; their results are in ``pop_finished``.
        """
        max_steps = _size("max_steps", max_steps)
        self._slots.searches.run(max_steps, stop_when_done=True)
        state, ended = self._slots.searches.state, []
        for slot, (request, request_id) in list(self._running.items()):
            if int(state.done[slot]) or int(state.status[slot]):
                places = torch.tensor([slot], device="cpu")
                self._finished += self._slots.results(request, [request_id], places)
                self._leave(slot)
                ended.append(request_id)
        return tuple(ended)

    def run(self) -> list[BeamResult]:
        """Do steps until all requests have ended; return their results."""
        while self._running:
            self.step(ALWAYS)
        return self.pop_finished()

    def _leave(self, slot: int) -> None:
        del self._running[slot]
        self._slots.leave(slot)
        self._free.append(slot)

    def pop_finished(self) -> list[BeamResult]:
        """Return the results of the requests that have ended since the last call, in order."""
        finished, self._finished = self._finished, []
        for result in finished:
            self._ids.discard(result.request_id)
        return finished

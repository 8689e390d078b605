"""Continuous batching around a decoder: requests come and go between its steps."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

import torch
from torch import Tensor

from lmdecode._checks import check_int
from lmdecode.beam.engine.request import BeamRequest, BeamResult
from lmdecode.beam.ops import beam_finalize
from lmdecode.beam.state import EARLY_STOPPING, beam_parameters, new_beam_state
from lmdecode.decoder.checks import check_floats
from lmdecode.decoder.searches import DecodingSearches
from lmdecode.decoder.state import ALWAYS, new_token_rules
from lmdecode.decoder.weights import PackedDecoder

__all__ = ["DecodingBatch"]

_OP = "DecodingBatch"
_NO_BEAM = -1.0e9  # where transformers starts every beam but the first


def _size(name: str, value: object, least: int = 1) -> int:
    return check_int(_OP, name, value, least, limits=f"at least {least}, an int64")


class DecodingBatch:
    """Searches of any number of requests, as many at a time as there are places.

    A request is a ``BeamRequest`` and its memory. It may be added between any two steps, and leaves
    as soon as it has ended; its keys and values are nowhere moved, and its result is the same, bit
    for bit, whatever else is in the batch.

    Parameters
    ----------
    decoder : PackedDecoder
        Of a ``Decoding``, whose ``batch`` makes such an object.
    max_requests, num_beams, capacity, source : int
        Places; the widest search; tokens of the longest sequence, prompt included; positions of the
        longest memory. Memory for all of them is set aside at once.
    max_end_tokens, max_suppressed : int
        The longest lists that a request may have of these.

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
    ) -> None:
        _size("max_requests", max_requests)
        _size("num_beams", num_beams)
        _size("capacity", capacity, 2)
        _size("source", source)
        _size("max_end_tokens", max_end_tokens, 0)
        _size("max_suppressed", max_suppressed, 0)
        for limit, name in (
            (decoder.num_positions, "positions"),
            (decoder.num_distances, "distances of the relative bias"),
        ):
            if limit is not None and capacity > limit + 1:
                raise ValueError(
                    f"{_OP}: capacity is {capacity}; expected at most {limit + 1}: the model has "
                    f"{limit} {name}"
                )
        self._decoder = decoder
        self._source = source
        self._max_suppressed = max_suppressed
        state = new_beam_state(max_requests, num_beams, capacity, keep_log_probs=True,
                               keep_beam_indices=True)  # fmt: skip
        state.done.fill_(1)  # places without a request
        parameters = beam_parameters(
            max_requests, 1, end_tokens=[[-1] * max_end_tokens] * max_requests
        )
        self._searches = DecodingSearches(
            decoder,
            state,
            parameters,
            new_token_rules(max_requests, max_end_tokens + max_suppressed, 2),
            source,
            num_candidates=max(2, 1 + max_end_tokens) * num_beams,
        )
        self._running: dict[int, BeamRequest] = {}
        self._ids: dict[int, Hashable] = {}
        self._steps: dict[int, int] = {}
        self._finished: list[BeamResult] = []
        self._numbers = itertools.count()

    @property
    def running(self) -> tuple[Hashable, ...]:
        """The requests that have not ended."""
        return tuple(self._ids[slot] for slot in self._running)

    @property
    def free_places(self) -> int:
        """How many requests can be added."""
        return self._searches.state.done.shape[0] - len(self._running)

    def _check(self, request: BeamRequest, memory: Tensor) -> None:
        if not isinstance(request, BeamRequest):
            kind = type(request).__name__
            raise TypeError(f"{_OP}.add: request is of type {kind}; expected a BeamRequest")
        state, parameters = self._searches.state, self._searches.parameters
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
            ("rules", request.rules, "generate"),
        )
        for name, given, only in others:
            if given != only:
                raise ValueError(f"{_OP}.add: {name} is {given!r}; expected {only!r}")
        vocab = self._decoder.config.vocab_size
        forced = (request.forced_bos_token_id, request.forced_eos_token_id)
        for name, tokens in (
            ("prompt_ids", request.prompt_ids),
            ("pad_token_id, by default the first end token,", (request.pad_token,)),
            ("forced_bos_token_id", forced[:1]),
            ("forced_eos_token_id", forced[1:]),
        ):
            if any(token is not None and token >= vocab for token in tokens):
                raise ValueError(
                    f"{_OP}.add: {name} is {list(tokens)}; expected tokens below {vocab}"
                )
        size = self._decoder.config.memory_size
        if not isinstance(memory, Tensor) or memory.dim() != 2 or memory.shape[1] != size:
            shape = list(memory.shape) if isinstance(memory, Tensor) else type(memory).__name__
            raise ValueError(f"{_OP}.add: memory is {shape}; expected a tensor [source, {size}]")
        check_floats(f"{_OP}.add", "memory", memory)
        if memory.shape[0] > self._source:
            raise ValueError(
                f"{_OP}.add: memory has {memory.shape[0]} positions; "
                f"expected at most {self._source}"
            )

    def add(self, request: BeamRequest, memory: Tensor) -> Hashable:
        """Add a request; its search begins with the next step.

        Parameters
        ----------
        request : BeamRequest
            Without groups, ``coverage_penalty`` and ``logit_bias``, with the rules "generate".
        memory : Tensor
            [source, memory_size]: what the encoder gives for it, without padding.

        Returns
        -------
        Hashable
            Its ``request_id``, or a number where it has none.

        Raises
        ------
        ValueError, TypeError
            Names what does not fit; nothing has been changed then.
        """
        self._check(request, memory)
        request_id = request.request_id
        taken = {*self._ids.values(), *(result.request_id for result in self._finished)}
        if request_id is None:
            request_id = next(number for number in self._numbers if number not in taken)
        elif request_id in taken:
            raise ValueError(f"{_OP}.add: request_id {request_id!r} is in use; expected another")
        slot = next(
            slot for slot in range(len(self._searches.state.done)) if slot not in self._running
        )
        memory = memory.detach().to(device="cpu", dtype=torch.float32)
        self._searches.read_memory(memory[None], torch.tensor([len(memory)]), torch.tensor([slot]))
        self._write(slot, request)
        self._running[slot], self._ids[slot], self._steps[slot] = request, request_id, 0
        return request_id

    def _write(self, slot: int, request: BeamRequest) -> None:
        searches, prompt = self._searches, torch.tensor(request.prompt_ids)
        state, parameters, rules = searches.state, searches.parameters, searches.token_rules
        for name, value in (
            ("num_beams", request.num_beams),
            ("num_hypotheses", request.num_hypotheses),
            ("prompt_lengths", len(prompt)),
            ("max_lengths", request.max_length),
            ("length_penalty", request.length_penalty),
            ("early_stopping", EARLY_STOPPING[request.early_stopping]),
            ("pad_tokens", request.pad_token),
        ):
            getattr(parameters, name)[slot] = value
        parameters.end_tokens[slot] = -1
        ends = torch.tensor(request.eos_token_id, dtype=torch.int64)
        parameters.end_tokens[slot, : len(ends)] = ends
        rules.repetition_penalty[slot] = request.repetition_penalty
        rules.no_repeat_ngram_size[slot] = request.no_repeat_ngram_size
        rules.bans[slot] = -1
        shortest = len(prompt) + request.min_new_tokens
        bans = [[token, 0, shortest - 1, 0] for token in request.eos_token_id]
        bans += [[token, 0, ALWAYS, 1] for token in request.suppress_tokens]
        if bans:
            rules.bans[slot, : len(bans)] = torch.tensor(bans)
        rules.forced[slot] = -1
        if request.forced_bos_token_id is not None:
            rules.forced[slot, 0] = torch.tensor([1, request.forced_bos_token_id])
        if request.forced_eos_token_id is not None:
            last = request.max_length - 1
            rules.forced[slot, 1] = torch.tensor([last, request.forced_eos_token_id])
        state.sequences[slot, :, : len(prompt)] = prompt
        state.log_probs[slot] = 0.0
        state.beam_indices[slot] = -1
        state.scores[slot] = _NO_BEAM
        state.scores[slot, 0] = 0.0
        state.lengths[slot] = len(prompt)
        state.hypothesis_numbers[slot] = -1
        state.worst_scores[slot] = 1e9
        state.status[slot] = 0
        state.done[slot] = 0

    def step(self, max_steps: int = 1) -> tuple[Hashable, ...]:
        """Do steps, until ``max_steps`` or until a request has ended.

        Returns
        -------
        tuple
            The requests that have ended; their results are in ``pop_finished``.
        """
        _size("max_steps", max_steps)
        steps = self._searches.run(max_steps, stop_when_done=True)
        state, ended = self._searches.state, []
        for slot in list(self._running):
            self._steps[slot] += steps
            if int(state.done[slot]) or int(state.status[slot]):
                ended.append(self._ids[slot])
                self._finish(slot)
        return tuple(ended)

    def run(self) -> list[BeamResult]:
        """Do steps until all requests have ended; return their results."""
        while self._running:
            self.step(ALWAYS)
        return self.pop_finished()

    def _finish(self, slot: int) -> None:
        request, state = self._running.pop(slot), self._searches.state
        final = beam_finalize(
            state,
            self._searches.parameters,
            request.num_return_sequences,
            slots=torch.tensor([slot]),
        )
        prompt = len(request.prompt_ids)
        found = int((final.places[0] >= 0).sum())
        lengths = final.lengths[0, :found]
        longest = int(lengths.max()) if found else prompt
        self._finished.append(
            BeamResult(
                request_id=self._ids.pop(slot),
                sequences=final.sequences[0, :found, :longest].clone(),
                scores=final.scores[0, :found].clone(),
                lengths=lengths.clone(),
                log_probs=final.log_probs[0, :found, prompt:longest].clone(),
                beam_indices=final.beam_indices[0, :found, prompt:longest].clone(),
                groups=torch.zeros(found, dtype=torch.int64),
                prompt_length=prompt,
                num_steps=self._steps.pop(slot),
                status=int(state.status[slot]),
            )
        )
        state.done[slot] = 1

    def pop_finished(self) -> list[BeamResult]:
        """Return the results of the requests that have ended since the last call, in order."""
        finished, self._finished = self._finished, []
        return finished

"""Searches of a decoder in C++: its state, caches and scratch, and the loop over them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lmdecode._ops import ops
from lmdecode.beam.search_arguments import SearchOfStep, rules_of_step, searches_of_step
from lmdecode.beam.state import SEARCH_DIALECTS, BeamParameters, BeamState, SearchDialect
from lmdecode.beam.token_rules import TokenRules, new_token_rules
from lmdecode.beam.trie import Trie, tensors_of_tries
from lmdecode.decoder.device_loop import DeviceDecoder, DeviceSearches
from lmdecode.decoder.state import DecodingCaches, caches_bytes, new_caches
from lmdecode.models.huge_memory import new_memory
from lmdecode.models.packed_stack import PackedDecoder

__all__ = ["DecodingSearches", "check_length", "length_limits", "new_searches"]

# C++ runs a part of the steps, then Python handles signals, such as Ctrl-C: the target time of a
# part, and the bytes of weights that the first part reads.
_SECONDS_OF_A_PART = 0.1
_BYTES_OF_FIRST_PART = 1 << 28


def length_limits(decoder: PackedDecoder | DeviceDecoder) -> list[tuple[int, str]]:
    """Return (limit, name) of each table that bounds a sequence; it may be one token longer."""
    limits = [
        (decoder.num_positions, "positions"),
        (decoder.num_distances, "distances of the relative bias"),
    ]
    return [(most, name) for most, name in limits if most is not None]


def check_length(op: str, name: str, length: int, decoder: PackedDecoder | DeviceDecoder) -> None:
    """Raise ValueError for sequences that might outgrow the model."""
    for limit, what in length_limits(decoder):
        if length > limit + 1:
            raise ValueError(
                f"{op}: {name} is {length}; expected at most {limit + 1}: the model has {limit} "
                f"{what}"
            )


class DecodingSearches:
    """Searches of a decoder, and everything that they need.

    ``tries``, one for each slot or None, restrict the generated tokens; the list may be changed.
    Searches that need at most ``own_bytes`` have memory of their own (``has_own_memory``), and may
    be kept. Others take the decoder's spare memory, which may be larger. Slot ``r * num_groups +
    g`` of ``state`` and ``parameters`` (see ``lmdecode.beam.state``) is group g of request r.
    """

    def __init__(
        self,
        decoder: PackedDecoder,
        state: BeamState,
        parameters: BeamParameters,
        token_rules: TokenRules,
        source: int,
        *,
        num_groups: int = 1,
        num_candidates: int,
        dialect: SearchDialect = "generate",
        greedy: bool = False,
        caches: DecodingCaches | None = None,
        tries: Sequence[Trie | None] | None = None,
        own_bytes: int = 0,
    ) -> None:
        slots, beams, capacity = state.sequences.shape
        self.decoder, self.state, self.parameters = decoder, state, parameters
        self.token_rules = token_rules
        self.tries: list[Trie | None] = [None] * slots if tries is None else list(tries)
        self._options = [SEARCH_DIALECTS[dialect], int(greedy), num_groups, num_candidates]
        sizes_of_search = [
            slots, beams, capacity, num_groups, num_candidates, token_rules.bans.shape[1],
        ]  # fmt: skip
        workspace_size = int(ops.decoding_workspace_bytes(decoder.memory, sizes_of_search))
        sizes = (slots // num_groups, slots * beams, capacity, source)
        caches_size = 0 if caches is not None else caches_bytes(decoder.config, *sizes)
        size = caches_size + workspace_size
        self.nbytes, self.has_own_memory = size, size <= own_bytes
        self._memory = new_memory(size) if self.has_own_memory else decoder.spare_memory.take(size)
        if caches is None:
            caches = new_caches(decoder.config, *sizes, self._memory)
        self.caches = caches
        self._workspace = self._memory[caches_size : caches_size + workspace_size]
        weights = sum(tensor.nbytes for tensor in decoder.of_model)
        self._first_part = max(1, _BYTES_OF_FIRST_PART // max(1, weights))

    def read_memory(self, memory: Tensor, lengths: Tensor, requests: Tensor) -> None:
        """Compute the keys and values of memories, [n, source, memory_size] float32.

        ``lengths`` and ``requests``, [n] int64, are the valid positions of each, and its request.
        """
        ops.decoding_read_memory_(
            self.decoder.memory,
            list(self.caches),
            memory.contiguous(),
            lengths,
            requests,
        )

    def run(
        self,
        max_steps: int = (1 << 62),
        *,
        stop_when_done: bool = False,
        logits: Tensor | None = None,
    ) -> int:
        """Do steps until all searches have ended, or one has; return the number of steps.

        A signal, such as Ctrl-C, is handled between two steps; the searches can continue
        afterwards. ``logits``, [rows of the caches, V] float32, receives the last logits of each
        row. With [2, rows, V] the second half gets the scores: the logits after the rules, with
        beams the log-probabilities after them.
        """
        part, done = self._first_part, 0
        counts_ended = stop_when_done and max_steps > part
        num_running = self._num_running() if counts_ended else 0
        while True:
            asked, begun = min(part, max_steps - done), time.perf_counter()
            steps = self._run([asked, int(stop_when_done), 1], logits)
            done += steps
            if steps < asked or done == max_steps:
                return done
            if counts_ended and self._num_running() < num_running:
                return done
            of_time = part * _SECONDS_OF_A_PART / (time.perf_counter() - begun)
            part = max(1, min(2 * part, int(of_time)))

    def _num_running(self) -> int:
        return int(self.are_running().sum())

    def are_running(self) -> Tensor:
        """Return [slots] bool: whether each search goes on."""
        state, most = self.state, self.parameters.max_lengths
        capacity = state.sequences.shape[2]
        is_short = state.lengths < torch.where(most > 0, most, capacity).clamp(max=capacity)
        return (state.done == 0) & (state.status == 0) & is_short

    def read_tokens(self, logits: Tensor | None = None) -> Tensor:
        """Read the last token of every beam of the searches that go on; return the logits.

        No token is chosen. ``logits``, new ones by default, is [rows of the caches, V] float32;
        only rows that are read are written, and others of new logits are 0. With [2, rows, V] the
        second half gets the scores: the log-probabilities after the rules.
        """
        if logits is None:
            rows = self.caches.table.shape[0]
            logits = torch.zeros(
                rows, self.decoder.config.vocab_size, dtype=torch.float32, device="cpu"
            )
        self._run([1, 0, 0], logits)
        return logits

    def prompt_logits(self, lengths: Mapping[int, int]) -> Tensor:
        """Return the logits after the first ``lengths[slot]`` tokens of prompts, [rows, V].

        The searches go on from there; other slots are not read.
        """
        state, prompts = self.state, self.parameters.prompt_lengths
        kept = [part.clone() for part in (state.done, state.lengths, prompts)]
        state.done.fill_(1)
        for slot, length in lengths.items():
            state.done[slot] = 0
            state.lengths[slot] = prompts[slot] = length
        logits = self.read_tokens()
        for part, before in zip((state.done, state.lengths, prompts), kept, strict=True):
            part.copy_(before)
        return logits

    def choose_first(self) -> None:
        """Do the first step, with a log-softmax after the token rules."""
        rows, vocab = self.caches.table.shape[0], self.decoder.config.vocab_size
        values = torch.zeros(2, rows, vocab, dtype=torch.float32, device="cpu")
        self.choose(self.read_tokens(values)[1])

    def choose(self, logits: Tensor) -> None:
        """Choose the next beams of the searches that go on, from the caller's logits.

        ``logits``, [rows of the caches, V] float32, are those of ``read_tokens`` after the caller's
        rules, -inf where a token is forbidden. The token rules are not applied. Only for searches
        of one group.
        """
        state, beams = self.state, self.state.scores.shape[1]
        dialect, _, _, num_candidates = self._options
        slots = self.are_running().nonzero()[:, 0].tolist()
        searches, passes = searches_of_step(
            [
                SearchOfStep(slot, 0, dialect, 0, beams, slot * beams, beams, i * beams)
                for i, slot in enumerate(slots)
            ]
        )
        lengths = state.lengths.repeat_interleave(beams)
        _, of_searches, _ = ops.beam_search_step_(
            logits,
            list(state),
            list(self.parameters),
            rules_of_step(new_token_rules(1), "cpu"),
            torch.tensor(searches, device="cpu"),
            torch.zeros(state.scores.shape, dtype=torch.int32, device="cpu"),  # of tries
            passes,
            num_candidates,
            len(slots) * beams,
            None,  # token_bitmask
            None,  # bonus
            True,  # fills_missing
            False,  # greedy
            [],  # trace
        )
        parents = torch.arange(len(lengths), device="cpu")
        parents.view(-1, beams)[slots] = of_searches.view(-1, beams)
        ops.update_beam_indirection_(self.caches.table, parents, 0, lengths)

    def _run(self, options: list[int], logits: Tensor | None) -> int:
        steps = ops.decoding_steps_(
            *self.decoder.of_model,
            list(self.state),
            list(self.parameters),
            [*self.token_rules, *tensors_of_tries(self.tries)],
            list(self.caches),
            self._workspace,
            [*self._options, *options],
            logits,
        )
        return int(steps)

    def release(self) -> None:
        """Leave the memory to searches to come; these, and their caches, are used no more."""
        self.decoder.spare_memory.give(self._memory)


def new_searches(
    decoder: PackedDecoder | DeviceDecoder, *arguments: Any, **options: Any
) -> DecodingSearches | DeviceSearches:
    """Return searches where the decoder is, with the arguments of ``DecodingSearches``."""
    if isinstance(decoder, DeviceDecoder):
        return DeviceSearches(decoder, *arguments, **options)
    return DecodingSearches(decoder, *arguments, **options)

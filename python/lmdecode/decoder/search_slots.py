"""Requests of an encoder-decoder model in slots of searches whose steps run in C++."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from lmdecode.beam.engine.request import BeamRequest, BeamResult, token_rules_of_request
from lmdecode.beam.engine.results import beam_results
from lmdecode.beam.engine.slots import begin_search
from lmdecode.beam.ops import beam_finalize
from lmdecode.beam.state import BeamFinal, BeamState, beam_parameters, new_beam_state
from lmdecode.beam.token_rules import TokenRules, write_token_rules
from lmdecode.decoder.searches import DecodingSearches
from lmdecode.models.huge_memory import gather
from lmdecode.models.packed_stack import PackedDecoder

__all__ = ["SearchSlots"]


class SearchSlots:
    """Slots of ``DecodingSearches``: a request begins in a free slot, is searched, and leaves it.

    A slot has room for ``num_beams`` beams of ``capacity`` tokens, prompt included, a memory of
    ``source`` positions, ``num_hypotheses`` results (by default a result a beam) and ``num_ends``
    end tokens. Keys and values never move, so a request has bitwise the same result in any slot,
    beside any others. The other arguments are those of ``DecodingSearches``.
    """

    def __init__(
        self,
        decoder: PackedDecoder,
        slots: int,
        source: int,
        *,
        num_beams: int,
        capacity: int,
        num_hypotheses: int | None = None,
        num_ends: int = 1,
        num_candidates: int,
        token_rules: TokenRules,
        own_bytes: int = 0,
    ) -> None:
        state = new_beam_state(
            slots,
            num_beams,
            capacity,
            num_hypotheses=num_hypotheses,
            keep_log_probs=True,
            keep_beam_indices=True,
        )
        state.done.fill_(1)
        tensors = list(state)
        self._memory = gather(tensors)
        self._begun: Tensor | None = None
        self.searches = DecodingSearches(
            decoder,
            BeamState._make(tensors),
            beam_parameters(slots, 1, end_tokens=[[-1] * num_ends] * slots),
            token_rules,
            source,
            num_candidates=num_candidates,
            own_bytes=own_bytes,
        )
        self._all = torch.arange(slots, device="cpu")

    def begin(
        self, slot: int, request: BeamRequest, memory: Tensor, rules: TokenRules | None = None
    ) -> None:
        """Begin a request, without groups, in a slot; ``memory`` is [positions, M] float32.

        ``rules``, of one slot, stand in place of the request's.
        """
        searches = self.searches
        if rules is None:
            rules = token_rules_of_request(request, searches.decoder.config.vocab_size)
        lengths, slots = torch.tensor([[len(memory)], [slot]], device="cpu")
        searches.read_memory(memory[None], lengths, slots)
        begin_search(searches.state, searches.parameters, slot, request)
        write_token_rules(searches.token_rules, slot, rules)
        searches.tries[slot] = request.trie

    def begin_alike(self, request: BeamRequest, memories: Tensor, lengths: Tensor) -> None:
        """Begin one request in every slot, with memories [slots, S, M] of these valid positions.

        The slots have its token rules. All calls are of the same request: later ones copy the state
        that the first has written.
        """
        searches = self.searches
        if self._begun is None:
            begin_search(searches.state, searches.parameters, slice(None), request)
            self._begun = self._memory.clone()
            searches.tries = [request.trie] * len(self._all)
        else:
            self._memory.copy_(self._begun)
        searches.read_memory(memories, lengths, self._all)

    def final(self, slots: Tensor | None, num_results: int) -> BeamFinal:
        """Return the best results of slots, all of them by default, as ``beam_finalize`` does."""
        searches = self.searches
        return beam_finalize(searches.state, searches.parameters, num_results, slots=slots)

    def results(
        self, request: BeamRequest, request_ids: Sequence[Hashable], slots: Tensor | None = None
    ) -> list[BeamResult]:
        """Return the results of slots, all of them by default, that have run equal requests."""
        state, prompt = self.searches.state, len(request.prompt_ids)
        lengths, status = state.lengths, state.status
        if slots is not None:
            lengths, status = lengths[slots], status[slots]
        return beam_results(
            request,
            request_ids,
            self.final(slots, request.num_return_sequences),
            status[:, None],
            state.hypothesis_scores.shape[1],
            [length - prompt for length in lengths.tolist()],
        )

    def leave(self, slot: int) -> None:
        """Let a slot be free."""
        self.searches.tries[slot] = None
        self.searches.state.done[slot] = 1

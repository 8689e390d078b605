"""Many searches at once: sources in, results out, batches inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lmdecode.beam.engine.request import BeamRequest, BeamResult, token_rules_of_request
from lmdecode.beam.engine.results import beam_results
from lmdecode.beam.engine.slots import begin_search
from lmdecode.beam.ops import beam_finalize
from lmdecode.beam.state import BeamState, beam_parameters, new_beam_state
from lmdecode.beam.token_rules import repeat_token_rules
from lmdecode.decoder.huge_memory import gather
from lmdecode.decoder.searches import DecodingSearches
from lmdecode.decoder.spares import Spares
from lmdecode.decoder.state import caches_bytes, padded
from lmdecode.decoder.weights import PackedDecoder

__all__ = ["Translator"]

# So many batches of a request are kept, to be used again, and none of more memory than this.
_KEPT_BATCHES, _KEPT_BYTES = 8, 16 << 20
# Most bytes of keys and values of a batch of several searches: they are reserved for the longest
# result, and with huge pages the first step makes the system hand out nearly all of them.
_LARGEST_BATCH = 1 << 30


class _Batch:
    """So many searches by one request; used again and again, by one thread at a time."""

    def __init__(
        self, decoder: PackedDecoder, request: BeamRequest, count: int, source: int
    ) -> None:
        self._request, width = request, request.num_beams
        state = new_beam_state(
            count,
            width,
            request.max_length,
            num_hypotheses=request.num_hypotheses,
            keep_log_probs=True,
            keep_beam_indices=True,
        )
        self._parameters = beam_parameters(
            count, width, end_tokens=[list(request.eos_token_id)] * count
        )
        begin_search(state, self._parameters, slice(None), request)
        tensors = list(state)
        self._memory = gather(tensors)
        self._begun = self._memory.clone()
        self._state = BeamState._make(tensors)
        rules = token_rules_of_request(request, decoder.config.vocab_size)
        self.searches = DecodingSearches(
            decoder,
            self._state,
            self._parameters,
            repeat_token_rules(rules, count),
            source,
            num_candidates=request.num_candidates,
            tries=[request.trie] * count,
            own_bytes=_KEPT_BYTES,
        )
        self._requests = torch.arange(count, device="cpu")

    def run(
        self, memory: Tensor, lengths: Tensor, numbers: Sequence[int], renormalizes: bool
    ) -> list[BeamResult]:
        """Search memories, [count, at most source, M]; the results have these numbers."""
        request, state = self._request, self._state
        self._memory.copy_(self._begun)
        self.searches.read_memory(memory, lengths, self._requests)
        if renormalizes:
            self.searches.choose_first()
        self.searches.run()
        final = beam_finalize(state, self._parameters, request.num_return_sequences)
        prompt = len(request.prompt_ids)
        steps = [length - prompt for length in state.lengths.tolist()]
        status = state.status[:, None]
        return beam_results(request, numbers, final, status, request.num_hypotheses, steps)


def _batches(lengths: Sequence[int], max_tokens: int, most: int) -> Iterator[list[int]]:
    """Yield the numbers of sources that are searched together, long ones first.

    They are ``most`` at most, and with padding have no more tokens than that, or it is one.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) == most or (len(batch) + 1) * lengths[batch[0]] > max_tokens):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


class Translator:
    """Searches any number of sources, all with one request. Thread-safe.

    With ``renormalizes`` the first step is ``DecodingSearches.choose_first``.
    """

    def __init__(
        self, decoder: PackedDecoder, request: BeamRequest, renormalizes: bool = False
    ) -> None:
        self._decoder, self._request, self._renormalizes = decoder, request, renormalizes
        self._spares: Spares[_Batch] = Spares(_KEPT_BATCHES)  # by their sizes

    def translate(
        self,
        encode: Callable[[list[int]], tuple[Tensor, Tensor]],
        lengths: Sequence[int],
        max_tokens: int,
    ) -> list[BeamResult]:
        """Search each source; return the results in the order of the sources (ids: 0, 1, ...).

        ``encode`` takes indices of n sources; it returns their memories, [n, S, M] float32, and the
        valid positions of each, [n] int64. ``lengths`` are the sources' lengths. At most
        ``max_tokens``, padding included, are searched together.
        """
        results: dict[int, BeamResult] = {}
        request = self._request
        bytes_of_one = caches_bytes(
            self._decoder.config, 1, request.num_beams, request.max_length, max(lengths, default=1)
        )
        most = max(1, _LARGEST_BATCH // bytes_of_one)
        for numbers in _batches(lengths, max_tokens, most):
            memory, counts = encode(numbers)
            sizes = (len(numbers), padded(memory.shape[1]))
            batch = self._spares.take(sizes) or _Batch(self._decoder, request, *sizes)
            found = batch.run(memory, counts, numbers, self._renormalizes)
            results |= dict(zip(numbers, found, strict=True))
            if batch.searches.has_own_memory:
                self._spares.give_back(sizes, batch)
            else:
                batch.searches.release()
        return [results[i] for i in range(len(lengths))]

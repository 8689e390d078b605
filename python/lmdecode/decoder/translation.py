"""Many searches at once: sources in, results out, batches inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from lmdecode.beam.engine.request import BeamRequest, BeamResult, token_rules_of_request
from lmdecode.beam.token_rules import repeat_token_rules
from lmdecode.decoder.search_slots import SearchSlots
from lmdecode.decoder.spares import Spares
from lmdecode.decoder.state import caches_bytes, padded
from lmdecode.models.packed_stack import PackedDecoder

__all__ = ["Translator"]

# So many batches of a request are kept, to be used again, and none of more memory than this.
_KEPT_BATCHES, _KEPT_BYTES = 8, 16 << 20
# Most bytes of keys and values of a batch of several searches: they are reserved for the longest
# result, and with huge pages the first step makes the system hand out nearly all of them.
_LARGEST_BATCH = 1 << 30


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
        self._rules = token_rules_of_request(request, decoder.config.vocab_size)
        self._spares: Spares[SearchSlots] = Spares(_KEPT_BATCHES)  # by their sizes

    def _new_slots(self, count: int, source: int) -> SearchSlots:
        """Return slots for so many sources, which one thread at a time uses, again and again."""
        request = self._request
        return SearchSlots(
            self._decoder,
            count,
            source,
            num_beams=request.num_beams,
            capacity=request.max_length,
            num_hypotheses=request.num_hypotheses,
            num_ends=len(request.eos_token_id),
            num_candidates=request.num_candidates,
            token_rules=repeat_token_rules(self._rules, count),
            own_bytes=_KEPT_BYTES,
        )

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
            slots = self._spares.take(sizes) or self._new_slots(*sizes)
            slots.begin_alike(request, memory, counts)
            if self._renormalizes:
                slots.searches.choose_first()
            slots.searches.run()
            results |= dict(zip(numbers, slots.results(request, numbers), strict=True))
            if slots.searches.has_own_memory:
                self._spares.give_back(sizes, slots)
            else:
                slots.searches.release()
        return [results[i] for i in range(len(lengths))]

"""Many searches at once: sources in, results out, batches inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lmdecode.beam.engine.request import BeamRequest, BeamResult
from lmdecode.beam.engine.request_rules import token_rules_of_request
from lmdecode.beam.engine.results import beam_result
from lmdecode.beam.engine.slots import begin_search
from lmdecode.beam.ops import beam_finalize
from lmdecode.beam.state import beam_parameters, new_beam_state
from lmdecode.beam.token_rules import repeat_token_rules
from lmdecode.decoder.searches import DecodingSearches
from lmdecode.decoder.weights import PackedDecoder

__all__ = ["search_all"]


def _batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield the numbers of sources that are searched together, long ones first.

    With padding they have no more tokens than that, or it is one.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def search_all(
    decoder: PackedDecoder,
    encode: Callable[[list[int]], tuple[Tensor, Tensor]],
    request: BeamRequest,
    lengths: Sequence[int],
    max_tokens: int,
) -> list[BeamResult]:
    """Search each source as a request says.

    Parameters
    ----------
    decoder
        That searches.
    encode
        Of the numbers of sources: their memories [n, S, M] float32, and how much of each counts,
        [n] int64.
    request
        How to search. The results' ids are the numbers of sources.
    lengths
        Of the sources.
    max_tokens
        Of those that are searched together, with padding.

    Returns
    -------
    list of BeamResult
        In the order of the sources.
    """
    results: dict[int, BeamResult] = {}
    rules = token_rules_of_request(request, decoder.config.vocab_size)
    width = request.num_beams
    for batch in _batches(lengths, max_tokens):
        count = len(batch)
        state = new_beam_state(
            count,
            width,
            request.max_length,
            num_hypotheses=request.num_hypotheses,
            keep_log_probs=True,
            keep_beam_indices=True,
        )
        parameters = beam_parameters(count, width, end_tokens=[list(request.eos_token_id)] * count)
        begin_search(state, parameters, slice(None), request)
        memory, counts = encode(batch)
        searches = DecodingSearches(
            decoder,
            state,
            parameters,
            repeat_token_rules(rules, count),
            memory.shape[1],
            num_candidates=max(2, 1 + len(request.eos_token_id)) * width,
        )
        searches.read_memory(memory, counts, torch.arange(count))
        steps = searches.run()
        final = beam_finalize(state, parameters, request.num_return_sequences)
        searches.release()
        for place, number in enumerate(batch):
            one = type(final)._make(tensor[place : place + 1] for tensor in final)
            results[number] = beam_result(
                request,
                number,
                one,
                state.status[place : place + 1],
                state.hypothesis_scores.shape[1],
                steps,
            )
    return [results[i] for i in range(len(lengths))]

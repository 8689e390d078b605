"""Draws of a window's text, for windows in which the search found no good one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lmdecode.beam.state import beam_parameters, new_beam_state
from lmdecode.beam.token_rules import TokenRules
from lmdecode.decoder.searches import DecodingSearches
from lmdecode.decoder.state import padded
from lmdecode.sampling.ops import top_k_top_p_sample
from lmdecode.speech.model import SpeechModel
from lmdecode.speech.options import TranscriptionOptions
from lmdecode.speech.rules import ruled

__all__ = ["draw"]


def draw(
    model: SpeechModel,
    memory: Tensor,
    prompt: Sequence[int],
    rules: TokenRules,
    options: TranscriptionOptions,
    *,
    temperature: float,
    new_tokens: int,
    seed: int,
) -> list[tuple[list[int], list[float]]]:
    """Draw ``options.best_of`` texts for a memory, [positions, model_size].

    The rules have one slot. ``prompt`` has the tokens in front of the texts, and ``temperature`` is
    above 0. A text has the same tokens for a seed whatever else is decoded. Returns for each text
    its tokens, with the end token if it came, and their log-probabilities among the allowed tokens,
    before the temperature.
    """
    length, end, rows = len(prompt), model.tokens.end, options.best_of
    state = new_beam_state(1, rows, length + new_tokens + 1)
    state.sequences[0, :, :length] = torch.tensor(prompt, device="cpu")
    state.lengths.fill_(length)
    parameters = beam_parameters(1, rows)
    parameters.prompt_lengths.fill_(length)
    searches = DecodingSearches(
        model.decoder, state, parameters, rules, padded(len(memory)), num_candidates=1
    )
    lengths, slots = torch.tensor([[len(memory)], [0]], device="cpu")
    searches.read_memory(memory[None], lengths, slots)
    values = torch.empty(
        2, rows, model.decoder.config.vocab_size, dtype=torch.float32, device="cpu"
    )
    seeds = [seed % (1 << 62) + (row << 40) for row in range(rows)]
    log_probs = torch.zeros(rows, new_tokens, dtype=torch.float32, device="cpu")
    has_ended = torch.zeros(rows, dtype=torch.bool, device="cpu")
    taken = 0
    while taken < new_tokens and not bool(has_ended.all()):
        searches.read_tokens(values)
        scores = ruled(searches, values, options.repetition_penalty, options.no_repeat_ngram_size)
        if not bool((scores.amax(dim=1) > -torch.inf).all()):
            raise RuntimeError(
                "Transcriber: a window has NaN in its logits, or no token to go on with"
            )
        tokens = top_k_top_p_sample(
            scores, temperature=temperature, seed=seeds, position=taken
        ).index
        tokens[has_ended] = end
        of_tokens = scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(1)
        log_probs[:, taken] = of_tokens.masked_fill(has_ended, 0.0)
        state.sequences[0, :, length + taken] = tokens
        state.lengths.add_(1)
        has_ended |= tokens == end
        taken += 1
    searches.release()
    found = []
    for row in range(rows):
        drawn = state.sequences[0, row, length : length + taken].tolist()
        count = drawn.index(end) + 1 if end in drawn else taken
        found.append((drawn[:count], log_probs[row, :count].tolist()))
    return found

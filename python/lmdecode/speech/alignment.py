"""Times of tokens, from the decoder's cross-attention, and of words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lmdecode._ops import ops
from lmdecode.speech.tokenizer import SpeechTokenizer

__all__ = ["TimedTokens", "TimedWord", "first_positions", "words_of"]


class TimedTokens(NamedTuple):
    """The tokens of a text without times, their log-probabilities, and the frames where they begin.

    ``starts`` has one more entry: the frame where the token after the last one begins.
    """

    tokens: list[int]
    starts: list[int]
    log_probs: list[float]


@dataclass
class TimedWord:
    """A word with the space in front of it, or a mark, and its time in frames.

    ``probability`` is the mean over its tokens.
    """

    text: str
    start: int
    stop: int
    probability: float


def _median(values: Tensor, width: int) -> Tensor:
    """Return values [..., n] filtered by a median along the last dimension; ends are mirrored."""
    half = width // 2
    if half == 0 or values.shape[-1] <= half:
        return values
    padded = torch.nn.functional.pad(values, (half, half), mode="reflect")
    return padded.unfold(-1, width, 1).median(dim=-1).values


def first_positions(attention: Tensor, median_width: int) -> list[int]:
    """Return the position of the memory at which each token begins, never falling.

    ``attention`` is [heads, T, S]; ``median_width`` is the odd width of the filter along positions.
    """
    if attention.shape[1] == 0 or attention.shape[2] == 0:
        return [0] * attention.shape[1]
    mean = attention.mean(dim=1, keepdim=True)
    deviation = attention.std(dim=1, keepdim=True, correction=0)
    even = (attention - mean) / deviation
    found = _median(even.nan_to_num(0.0), median_width).mean(dim=0)
    positions: list[int] = ops.dynamic_time_warping(-found).tolist()
    return positions


def words_of(timed: TimedTokens, texts: SpeechTokenizer, language: str) -> list[TimedWord]:
    """Return words, and punctuation marks apart from them; ``language`` is a code."""
    found: list[TimedWord] = []
    at = 0
    for text, count in texts.words(timed.tokens, language):
        end = at + count
        log_probs = torch.tensor(timed.log_probs[at:end], dtype=torch.float32, device="cpu")
        probability = float(log_probs.exp().mean())
        found.append(TimedWord(text, timed.starts[at], timed.starts[end], probability))
        at = end
    return found

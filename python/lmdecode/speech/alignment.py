"""Times of tokens, by what the decoder attends to, and words of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lmdecode._ops import ops
from lmdecode.speech.segments import Word
from lmdecode.speech.tokenizer import SpeechTokenizer

__all__ = ["TimedTokens", "first_positions", "words_of"]


_MARK_SECONDS = 0.5  # that a punctuation mark lengthens a word at most


class TimedTokens(NamedTuple):
    """Tokens of a text.

    Attributes
    ----------
    tokens : list of int
        Those of text alone.
    starts : list of float
        Seconds at which each begins, and at which what follows the last one does.
    log_probs : list of float
        Of each.
    """

    tokens: list[int]
    starts: list[float]
    log_probs: list[float]


def _median(values: Tensor, width: int) -> Tensor:
    """Return values [..., n] filtered by a median along the last dimension; ends are mirrored."""
    half = width // 2
    if half == 0 or values.shape[-1] <= half:
        return values
    padded = torch.nn.functional.pad(values, (half, half), mode="reflect")
    return padded.unfold(-1, width, 1).median(dim=-1).values


def first_positions(attention: Tensor, median_width: int) -> list[int]:
    """Return the position of the memory at which each token begins, never falling.

    Parameters
    ----------
    attention : Tensor
        [heads, T, S]: what each token attends to.
    median_width : int
        Width of the filter along the positions, odd.
    """
    if attention.shape[1] == 0 or attention.shape[2] == 0:
        return [0] * attention.shape[1]
    mean = attention.mean(dim=1, keepdim=True)
    deviation = attention.std(dim=1, keepdim=True, correction=0)
    even = (attention - mean) / deviation
    found = _median(even.nan_to_num(0.0), median_width).mean(dim=0)
    positions: list[int] = ops.dynamic_time_warping(-found).tolist()
    return positions


def words_of(
    timed: TimedTokens,
    texts: SpeechTokenizer,
    language: str,
    prepended: str,
    appended: str,
) -> list[tuple[Word, int]]:
    """Return words, and the number of tokens of each.

    Parameters
    ----------
    timed : TimedTokens
        The text.
    texts : SpeechTokenizer
        The model's tokenizer.
    language : str
        Code of the text's language.
    prepended, appended : str
        Punctuation that belongs to the word behind it, and before it.
    """
    found: list[tuple[Word, int]] = []
    at = 0
    for text, count in texts.words(timed.tokens, language):
        probabilities = torch.tensor(timed.log_probs[at : at + count]).exp()
        found.append(
            (
                Word(timed.starts[at], timed.starts[at + count], text, float(probabilities.mean())),
                count,
            )
        )
        at += count
    return _with_punctuation(found, prepended, appended)


def _with_punctuation(
    words: Sequence[tuple[Word, int]], prepended: str, appended: str
) -> list[tuple[Word, int]]:
    """Let punctuation that stands alone be part of the words that it belongs to."""
    kept: list[tuple[Word, int]] = []
    for word, count in reversed(words):  # opening ones, which stand before a word
        text = word.word
        if kept and text.startswith(" ") and text.strip() and text.strip() in prepended:
            behind, of_behind = kept[-1]
            kept[-1] = (
                Word(word.start, behind.end, text + behind.word, behind.probability),
                (count + of_behind),
            )
        else:
            kept.append((word, count))
    found: list[tuple[Word, int]] = []
    for word, count in reversed(kept):
        if found and word.word in appended and not found[-1][0].word.endswith(" "):
            before, of_before = found[-1]
            # What the decoder attends to for a mark is the pause behind a word, however long.
            end = min(word.end, round(before.end + _MARK_SECONDS, 2))
            found[-1] = (
                Word(before.start, end, before.word + word.word, before.probability),
                of_before + count,
            )
        else:
            found.append((word, count))
    return found

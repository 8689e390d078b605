"""Times of words and segments by openai-whisper's rules: a pause is no part of a word."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lmdecode.speech.alignment import TimedWord

__all__ = ["TimedPiece", "join_marks", "refine"]

_SENTENCE_ENDS = ".\u3002!\uff01?\uff1f"
_TYPICAL = 70  # most frames of a typical word
_FAR = 50  # frames: a word that reaches further out of its segment's time is too long


@dataclass
class TimedPiece:
    """The words of a segment, and its time in frames: the decoder's, and later the words'.

    Marks are words of their own until they are joined.
    """

    start: int
    stop: int
    words: list[TimedWord]


def refine(
    pieces: Sequence[TimedPiece], spoken: int, end: int, prepended: str, appended: str
) -> int:
    """Cut words short that are too long, and let pieces begin and end with their words.

    The pieces of a window are changed in place. ``spoken`` is the frame at which the last word
    before the window ends. ``end`` is the frame at which the window ends, or the next one begins;
    then the last word may end up to half a second later, before the next window's words.
    ``prepended`` punctuation belongs to the word after it, ``appended`` to the word before it.
    Returns the frame at which the last word ends; ``spoken`` if there are no words.
    """
    words = [word for piece in pieces for word in piece.words]
    for word in words:
        word.start, word.stop = max(word.start, spoken), max(word.stop, spoken)
    lengths = [word.stop - word.start for word in words if word.stop > word.start]
    typical = min(_TYPICAL, int(statistics.median(lengths))) if lengths else 0
    _cut_at_sentences(words, 2 * typical)
    for i, piece in enumerate(pieces):
        piece.words = join_marks(piece.words, prepended, appended)
        if not piece.words:
            continue
        _cut_after_pause(piece.words, spoken, typical)
        first, last = piece.words[0], piece.words[-1]
        # The decoder's time is preferred to a word that is far out of it.
        if first.start + _FAR < piece.start < first.stop:
            first.start = max(first.start, min(first.stop - typical, piece.start))
        if last.start < piece.stop < last.stop - _FAR:
            last.stop = min(last.stop, max(last.start + typical, piece.stop))
        for word in piece.words:
            word.start, word.stop = min(word.start, end + _FAR), min(word.stop, end + _FAR)
        if first.start == last.stop:  # a text lasts some time, if there is room
            behind = [other.words[0].start for other in pieces[i + 1 :] if other.words]
            last.stop = min([max(last.stop, min(piece.stop, end)), *behind[:1]])
        if first.start == last.stop:
            first.start = max(spoken, last.stop - (typical or _TYPICAL))
        piece.start, piece.stop = first.start, last.stop
        spoken = piece.stop
    return spoken


def _cut_at_sentences(words: Sequence[TimedWord], longest: int) -> None:
    """Take the pause between sentences out of the mark before it and the word after it."""
    for before, word in itertools.pairwise(words):
        if word.stop - word.start > longest:
            if word.text in _SENTENCE_ENDS:
                word.stop = word.start + longest
            elif before.text in _SENTENCE_ENDS:
                word.start = word.stop - longest


def _cut_after_pause(words: Sequence[TimedWord], spoken: int, typical: int) -> None:
    """Take a pause before words out of the first two."""
    first, longest = words[0], 2 * typical
    second = words[1] if len(words) > 1 else None
    if first.stop - spoken <= 2 * longest:
        return
    is_long = first.stop - first.start > longest
    if is_long or (second is not None and second.stop - first.start > 2 * longest):
        if second is not None and second.stop - second.start > longest:
            first.stop = second.start = second.stop - longest
        first.start = first.stop - longest


def join_marks(words: Sequence[TimedWord], prepended: str, appended: str) -> list[TimedWord]:
    """Return words with the marks that belong to them; marks do not extend a word's time.

    Words that get a mark are changed in place. For the punctuation see ``refine``.
    """
    kept: list[TimedWord] = []
    for word in reversed(words):  # opening ones, which stand before a word
        mark = word.text.strip()
        if kept and word.text.startswith(" ") and mark and mark in prepended:
            kept[-1].text = word.text + kept[-1].text
        else:
            kept.append(word)
    found: list[TimedWord] = []
    for word in reversed(kept):
        if found and word.text in appended and not found[-1].text.endswith(" "):
            found[-1].text += word.text
        else:
            found.append(word)
    return found

"""Segments and times in the tokens of a window, and where the next window begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Piece", "split_window"]


class Piece(NamedTuple):
    """Tokens between two times.

    ``begin`` and ``end`` are indices into the window's tokens, times among them. ``start`` and
    ``stop`` are frames, possibly after the window's end: a decoder may give any time.
    """

    begin: int
    end: int
    start: int
    stop: int


def split_window(
    tokens: Sequence[int],
    first_time: int,
    frames_of_time: int,
    frames: int,
    *,
    is_cut: bool,
) -> tuple[list[Piece], int]:
    """Return the pieces of a window, and the number of frames to the beginning of the next one.

    ``tokens`` are the text and its times, without the end token; ``first_time`` is the token of
    0.00, and ``frames_of_time`` the frames of a step of time. With ``is_cut`` another window begins
    where the last finished piece ends, and tokens after that piece are left out; otherwise all
    count.
    """

    def is_time(place: int) -> bool:
        return 0 <= place < len(tokens) and tokens[place] >= first_time

    def frame_of(place: int) -> int:
        return (tokens[place] - first_time) * frames_of_time

    ends_in_one_time = is_time(len(tokens) - 1) and not is_time(len(tokens) - 2)
    cuts = [i for i in range(1, len(tokens)) if is_time(i - 1) and is_time(i)]
    if not cuts:
        times = [i for i in range(len(tokens)) if is_time(i)]
        stop = frames
        if times and tokens[times[-1]] != first_time:
            stop = frame_of(times[-1])
        return [Piece(0, len(tokens), 0, stop)], frames
    if ends_in_one_time or (not is_cut and cuts[-1] < len(tokens) - 1):
        cuts.append(len(tokens))
    pieces, begin = [], 0
    for end in cuts:
        start = frame_of(begin) if is_time(begin) else 0
        stop = frame_of(end - 1) if is_time(end - 1) else frames
        pieces.append(Piece(begin, end, start, max(start, stop)))
        begin = end
    if ends_in_one_time or not is_cut:
        return pieces, frames
    # Tokens after the last pair of times are only a beginning: the next window has them again.
    return pieces, frame_of(begin - 1)

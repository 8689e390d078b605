"""Where a long sound may be cut: parts that fit a window, and do not cut words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["cut_at_quiet", "merge_speech"]

_PAUSE = 300  # most frames of silence in a part: after longer ones times begin too early
_SMOOTH = 20  # frames over which loudness is averaged


def merge_speech(speech: Sequence[tuple[int, int]], longest: int) -> list[tuple[int, int]]:
    """Return parts of a sound that hold the speech, several pieces in ``longest`` frames.

    Pieces are (begin, end) in order. A part has no silence of more than three seconds; a piece
    above ``longest`` is a part of its own.
    """
    parts: list[tuple[int, int]] = []
    for begin, end in speech:
        if parts and end - parts[-1][0] <= longest and begin - parts[-1][1] <= _PAUSE:
            parts[-1] = parts[-1][0], end
        else:
            parts.append((begin, end))
    return parts


def cut_at_quiet(
    features: Tensor, frames: int, longest: int, begin: int = 0
) -> list[tuple[int, int]]:
    """Return parts from frame ``begin`` on that cover a sound, cut where it is quietest.

    ``features`` is [channels, at least frames] log-mel values. A part has at most ``longest``
    frames, and is cut in the last third of them.
    """
    if frames - begin <= longest:
        return [(begin, frames)]
    loudness = features[:, :frames].mean(dim=0)
    around = torch.nn.functional.avg_pool1d(
        loudness[None, None], _SMOOTH, 1, _SMOOTH // 2, count_include_pad=False
    )[0, 0]
    parts = []
    while frames - begin > longest:
        first = begin + 2 * longest // 3
        end = first + int(around[first : begin + longest].argmin())
        parts.append((begin, end))
        begin = end
    return [*parts, (begin, frames)]

"""Where a long sound may be cut: parts that fit a window, and do not cut words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["cut_at_quiet", "merge_speech"]

_PAUSE = 300  # frames of silence in a part at most: behind longer ones times begin too early
_SMOOTH = 20  # frames that are as quiet as the quietest of them is loud


def merge_speech(speech: Sequence[tuple[int, int]], longest: int) -> list[tuple[int, int]]:
    """Return parts of a sound that hold the speech, several pieces in ``longest`` frames.

    A part has no silence of more than three seconds.

    Parameters
    ----------
    speech : sequence of (int, int)
        Begin and end of each piece of speech, in order.
    longest : int
        Frames; a longer piece is a part of its own.
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
    """Return parts that cover a sound, cut where it is quietest.

    Parameters
    ----------
    features : Tensor
        [channels, at least frames] log-mel values.
    frames : int
        Of the sound.
    longest : int
        Frames of a part at most; a cut is in the last third of them.
    begin : int
        Frame that the first part begins with.
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

"""Windows to pieces, and long sounds to parts."""

import itertools

import pytest
import torch

from lmdecode.speech.chunks import cut_at_quiet, merge_speech
from lmdecode.speech.windows import split_window

T = 100  # the first time


@pytest.mark.parametrize(
    ("tokens", "is_cut", "pieces", "step"),
    [
        # One piece that has ended: nothing is said behind it.
        ([T, 1, 2, T + 50], True, [(0, 4, 0, 100)], 300),
        # Two, the second of which has ended.
        ([T, 1, T + 5, T + 6, 2, T + 9], True, [(0, 3, 0, 10), (3, 6, 12, 18)], 300),
        # The last pair says where the next window begins.
        ([T, 1, T + 5, T + 6, 2], True, [(0, 3, 0, 10)], 10),
        ([T, 1, T + 5, T + 6, 2], False, [(0, 3, 0, 10), (3, 5, 12, 300)], 300),
        ([T, 1, T + 5, T + 5], True, [(0, 3, 0, 10)], 10),
        ([T, 1, T + 5, T + 5], False, [(0, 3, 0, 10)], 300),
        # No pair: all of the window.
        ([T, 1, 2], True, [(0, 3, 0, 300)], 300),
        ([1, 2, T + 7], True, [(0, 3, 0, 14)], 300),
        ([], True, [(0, 0, 0, 300)], 300),
    ],
)
def test_pieces(tokens: list[int], is_cut: bool, pieces: list[tuple[int, ...]], step: int) -> None:
    assert split_window(tokens, T, 2, 300, is_cut=is_cut) == (pieces, step)


def test_speech_is_merged() -> None:
    speech = [(0, 100), (150, 280), (290, 310), (700, 900), (950, 1001)]
    assert merge_speech(speech, 300) == [(0, 280), (290, 310), (700, 900), (950, 1001)]
    assert merge_speech(speech, 320) == [(0, 310), (700, 1001)]
    assert merge_speech([], 300) == []


def test_a_long_pause_is_in_no_part() -> None:
    """Behind it a model would say that the next words begin where the last ones ended."""
    speech = [(0, 400), (700, 900), (1201, 1500)]
    assert merge_speech(speech, 3000) == [(0, 900), (1201, 1500)]


def test_cuts_are_where_it_is_quiet() -> None:
    features = torch.zeros(4, 1000)
    for place in (250, 520, 790):
        features[:, place - 15 : place + 15] = -1
    parts = cut_at_quiet(features, 1000, 300)
    assert [begin for begin, _ in parts] == pytest.approx([0, 250, 520, 790], abs=6)
    assert parts[-1][1] == 1000
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(parts))
    assert cut_at_quiet(features, 300, 300) == [(0, 300)]
    even = cut_at_quiet(torch.zeros(4, 1000), 1000, 300)
    assert all(0 < end - begin <= 300 for begin, end in even)

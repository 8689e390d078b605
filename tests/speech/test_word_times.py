"""The rules by which words and segments get their times."""

import random

import pytest

from lmdecode.speech.alignment import TimedWord
from lmdecode.speech.word_times import TimedPiece, refine

SOUND = 3000  # frames
PREPENDED, APPENDED = " \"'([", "\"'.,!?)]\u3002"

# Texts and times, as (text, start, stop).
Timed = tuple[str, int, int]


def piece(start: int, stop: int, *words: Timed) -> TimedPiece:
    """Return a segment as the decoder has it, and its words."""
    return TimedPiece(start, stop, [TimedWord(*word, 0.5) for word in words])


def times(of: TimedPiece) -> list[Timed]:
    return [(word.text, word.start, word.stop) for word in of.words]


def refined(*pieces: TimedPiece, spoken: int = 0, end: int = SOUND) -> list[list[Timed]]:
    refine(pieces, spoken, end, PREPENDED, APPENDED)
    for one in pieces:
        if one.words:
            assert (one.start, one.stop) == (one.words[0].start, one.words[-1].stop)
    return [times(one) for one in pieces]


def in_a_row(start: int, *lengths: int) -> list[Timed]:
    """Return words of so many frames, one behind the other."""
    found: list[Timed] = []
    for length in lengths:
        found.append((f" w{len(found)}", start, start + length))
        start += length
    return found


def test_a_segment_begins_and_ends_with_its_words() -> None:
    first = piece(0, 130, *in_a_row(20, 20, 20, 20))
    second = piece(130, 300, *in_a_row(90, 20, 20))
    assert refine([first, second], 0, SOUND, "", "") == 130
    assert (first.start, first.stop) == (20, 80)
    assert (second.start, second.stop) == (90, 130)


def test_a_segment_without_words_keeps_its_times() -> None:
    empty, said = piece(10, 90), piece(90, 200, *in_a_row(100, 20, 20))
    assert refine([empty, said], 7, SOUND, "", "") == 140
    assert (empty.start, empty.stop, empty.words) == (10, 90, [])
    assert refine([piece(10, 90)], 7, SOUND, "", "") == 7
    assert refine([], 7, SOUND, "", "") == 7


def test_a_long_word_behind_a_sentence_loses_the_pause() -> None:
    words = [("One", 0, 20), (".", 20, 40), (" two", 40, 300), (" three", 300, 320)]
    # The median of 20, 20, 260 and 20 frames is 20.
    assert refined(piece(0, 320, *words)) == [
        [("One.", 0, 20), (" two", 260, 300), (" three", 300, 320)]
    ]
    # So does the first one of the next segment.
    assert refined(piece(0, 40, *words[:2]), piece(40, 320, *words[2:])) == [
        [("One.", 0, 20)], [(" two", 260, 300), (" three", 300, 320)]
    ]  # fmt: skip
    comma = [("One", 0, 20), (",", 20, 40), *words[2:]]
    assert refined(piece(0, 320, *comma)) == [
        [("One,", 0, 20), (" two", 40, 300), (" three", 300, 320)]
    ]


def test_a_long_mark_at_the_end_of_a_sentence_loses_the_pause() -> None:
    said = piece(0, 400, ("One", 0, 20), (" ", 20, 40), ("!", 40, 300), (" two", 300, 320))
    assert refined(said) == [[("One", 0, 20), (" ", 20, 40), ("!", 40, 80), (" two", 300, 320)]]
    # Twice the median, of which 0.7 s count at most.
    said = piece(0, 900, *in_a_row(0, 200, 200), (".", 400, 800))
    refine([said], 0, SOUND, "", "")
    assert times(said)[2] == (".", 400, 540)


def test_marks_have_no_time_in_a_word() -> None:
    words = [(' "', 100, 150), ("Well", 150, 170), (",", 170, 190), ('"', 190, 210)]
    assert refined(piece(90, 250, *words), spoken=90) == [[(' "Well,"', 150, 170)]]


def test_the_first_word_after_a_pause_is_short() -> None:
    words = in_a_row(100, 300, 20, 20)
    assert refined(piece(100, 440, *words))[0][0] == (" w0", 360, 400)
    # No pause: four times the median lie between its end and the word before, or less.
    words = in_a_row(100, 80, 20, 20)
    assert refined(piece(100, 220, *words), spoken=100)[0][0] == (" w0", 100, 180)
    assert refined(piece(100, 220, *words), spoken=99)[0][0] == (" w0", 140, 180)


def test_the_first_two_words_after_a_pause_are_short() -> None:
    words = in_a_row(100, 100, 200, 20, 20, 20)
    found = refined(piece(100, 460, *words))[0]
    assert found[:3] == [(" w0", 320, 360), (" w1", 360, 400), (" w2", 400, 420)]
    # The second one alone is long.
    words = in_a_row(100, 20, 200, 20, 20, 20)
    assert refined(piece(100, 360, *words))[0][:2] == [(" w0", 240, 280), (" w1", 280, 320)]
    # Each is, and both together are, as long as may be.
    words = in_a_row(100, 40, 40, 20, 20, 20)
    assert refined(piece(100, 240, *words))[0] == words


def test_the_pause_counts_from_the_segment_before() -> None:
    before, behind = piece(0, 100, *in_a_row(0, 50, 50)), piece(100, 400, *in_a_row(100, 250, 50))
    assert refined(before, behind)[1][0] == (" w0", 250, 350)  # 250 frames on, of 4 x 50
    near = piece(100, 400, *in_a_row(100, 190, 50))
    assert refined(piece(0, 100, *in_a_row(0, 50, 50)), near)[1][0] == (" w0", 100, 290)


@pytest.mark.parametrize(
    ("start", "expected"), [(200, 170), (160, 160), (150, 100), (240, 100), (90, 100)]
)
def test_a_far_start_is_that_of_the_decoder(start: int, expected: int) -> None:
    """Or the median, here 70 frames, before the end of the word."""
    said = piece(start, 520, *in_a_row(100, 140, 140, 140))
    assert refined(said, spoken=100)[0][0] == (" w0", expected, 240)


@pytest.mark.parametrize(
    ("stop", "expected"), [(350, 370), (400, 400), (410, 460), (300, 460), (470, 460)]
)
def test_a_far_end_is_that_of_the_decoder(stop: int, expected: int) -> None:
    """Or the median, here 70 frames, behind the beginning of the word."""
    said = piece(0, stop, *in_a_row(0, 100, 100, 100, 160))
    assert refined(said)[0][-1] == (" w3", 300, expected)


def test_no_word_grows_to_the_median() -> None:
    said = piece(0, 302, *in_a_row(0, 100, 100, 100, 55))
    assert refined(said)[0][-1] == (" w3", 300, 355)
    said = piece(153, 355, *in_a_row(100, 55, 100, 100))
    assert refined(said, spoken=100)[0][0] == (" w0", 100, 155)


def test_words_without_spaces() -> None:
    """Each character is a word, and its full stop is another."""
    you, good, full_stop, yes = "\u4f60", "\u597d", "\u3002", "\u662f"
    words = [(you, 0, 20), (good, 20, 40), (full_stop, 40, 60), (yes, 60, 300)]
    assert refined(piece(0, 300, *words)) == [
        [(you, 0, 20), (good + full_stop, 20, 40), (yes, 260, 300)]
    ]


def test_words_without_a_length_end_by_the_decoder() -> None:
    assert refined(piece(40, 90, (" no", 60, 60)), spoken=50) == [[(" no", 60, 90)]]
    assert refined(piece(40, 90, (" no", 60, 60)), piece(90, 120, (" yes", 70, 120))) == [
        [(" no", 60, 70)], [(" yes", 70, 120)]
    ]  # fmt: skip
    # Where there is no room they begin earlier, as long as a typical word.
    assert refined(piece(40, 60, (" no", 60, 60)), piece(60, 90, (" yes", 60, 80))) == [
        [(" no", 40, 60)], [(" yes", 60, 80)]
    ]  # fmt: skip
    assert refined(piece(40, 60, (" no", 60, 60)), spoken=50) == [[(" no", 50, 60)]]


def test_words_of_a_window_follow_those_before() -> None:
    """The window before may have ended in a word, by half a second at most."""
    assert refined(piece(100, 160, *in_a_row(100, 20, 20, 20)), spoken=130) == [
        [(" w0", 130, 130), (" w1", 130, 140), (" w2", 140, 160)]
    ]
    assert refined(piece(0, 100, *in_a_row(90, 40, 40, 40)), spoken=90, end=100) == [
        [(" w0", 90, 130), (" w1", 130, 150), (" w2", 150, 150)]
    ]
    # A long last word that begins within the window ends with it.
    assert refined(piece(0, 100, *in_a_row(0, 20, 20, 20, 200)), end=100)[0][-1] == (" w3", 60, 100)


@pytest.mark.parametrize("seed", range(20))
def test_words_of_any_times(seed: int) -> None:
    """Segments hold their words, and follow each other."""
    draw = random.Random(seed)
    for _ in range(50):
        spoken = draw.choice([0, 500])
        at = max(0, spoken - draw.choice([0, 40]))
        pieces: list[TimedPiece] = []
        for _ in range(draw.randrange(4)):
            words: list[Timed] = []
            for _ in range(draw.randrange(5)):
                stop = at + draw.choice([0, 2, 20, 50, 120, 400])
                words.append((draw.choice([" a", "b", ".", " (", ",", "!"]), at, stop))
                at = stop
            start = max(0, (words[0][1] if words else at) + draw.randrange(-100, 100))
            pieces.append(piece(start, max(start, at + draw.randrange(-100, 100)), *words))
        before = ["".join(text for text, _, _ in times(one)) for one in pieces]
        last = refine(pieces, spoken, at, PREPENDED, APPENDED)
        assert before == ["".join(text for text, _, _ in times(one)) for one in pieces]
        reached = spoken
        for one in pieces:
            if one.words:
                assert (one.start, one.stop) == (one.words[0].start, one.words[-1].stop)
            for word in one.words:
                assert reached <= word.start <= word.stop <= max(at, spoken)
                reached = word.stop
        assert last == reached

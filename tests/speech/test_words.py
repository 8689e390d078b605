"""Times of tokens as those of transformers, and words."""

import json
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from lmdecode.decoder.cross_attention import CrossAttention
from lmdecode.decoder.searches import DecodingSearches
from lmdecode.speech import file_task
from lmdecode.speech.alignment import TimedTokens, TimedWord, first_positions, words_of
from lmdecode.speech.formats import FORMATS
from lmdecode.speech.tokenizer import SpeechTokenizer
from lmdecode.speech.word_times import TimedPiece, join_marks, refine
from tests.decoder.whisper_models import FIRST_TIMESTAMP, SECONDS, short_audio, whisper_pair
from tests.speech.models import EASY, check_times, sound, transcriber, transcriber_pair


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_weights_are_those_of_the_decoder(dtype: str) -> None:
    """In float32 those of transformers, and near to them in int8."""
    import lmdecode
    from lmdecode.beam.state import beam_parameters, new_beam_state
    from lmdecode.beam.token_rules import new_token_rules

    model, _ = whisper_pair(0)
    decoding = lmdecode.Decoding.from_pretrained(model, dtype)
    features = short_audio(1)["input_features"]
    heads = model.generation_config.alignment_heads
    tokens = [50258, 50259, 50359, 400, 401, 7, 50400]
    memory = model.get_encoder()(features).last_hidden_state
    searches = DecodingSearches(
        decoding.decoder, new_beam_state(2, 1, 20), beam_parameters(2, 1), new_token_rules(2), 112,
        num_candidates=2,
    )  # fmt: skip
    searches.read_memory(memory, torch.tensor([memory.shape[1]]), torch.tensor([1]))
    got = CrossAttention(decoding.decoder, [tuple(pair) for pair in heads]).weights(
        tokens, searches.caches, 1
    )
    model.set_attn_implementation("eager")
    found = model.get_decoder()(
        input_ids=torch.tensor([tokens]), encoder_hidden_states=memory, output_attentions=True
    ).cross_attentions
    expected = torch.stack([found[layer][0, head] for layer, head in heads])
    tolerance = 1e-5 if dtype == "float32" else 0.05
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


def test_heads_that_there_are_not() -> None:
    _, decoding = whisper_pair(0)
    for pair in ((2, 0), (0, 4), (-1, 0)):
        with pytest.raises(ValueError, match="CrossAttention: heads has"):
            CrossAttention(decoding.decoder, [pair])


@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_times_of_tokens(seed: int, beam_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before rules for long words change them.

    These texts are as long as they may be. transformers has then read all tokens but the last one,
    whose attention it leaves out; openai-whisper aligns that of the whole text, as we do.
    """
    monkeypatch.setattr(file_task, "refine", lambda pieces, spoken, *others: spoken)

    def without_last(attention: Tensor, median_width: int) -> list[int]:
        assert attention.shape[1] == EASY["max_new_tokens"]
        found = first_positions(attention[:, :-1], median_width)
        return [*found, found[-1]]

    monkeypatch.setattr(file_task, "first_positions", without_last)
    model, ours = transcriber_pair(seed)
    inputs = short_audio(1, seed)
    expected = model.generate(
        **inputs,
        language="en",
        num_beams=beam_size,
        renormalize_logits=True,
        return_timestamps=True,
        return_token_timestamps=True,
        return_segments=True,
        temperature=0.0,
    )["segments"][0]
    options: dict[str, Any] = {**EASY, "beam_size": beam_size, "prepend_punctuations": ""}
    options |= {"condition_on_previous_text": False, "batched": False}
    segments, _ = ours.transcribe(
        sound(SECONDS, seed), language="en", word_timestamps=True, append_punctuations="", **options
    )
    compared = 0
    # Pieces that have no text, or no length, are not ours.
    expected = [
        other
        for other in expected
        if other["end"] > other["start"] and min(other["tokens"]) < FIRST_TIMESTAMP
    ]
    for segment, other in zip(segments, expected, strict=False):
        assert segment.tokens == other["tokens"].tolist()[: len(segment.tokens)]
        # transformers' pipeline begins a word at the time of the token before it.
        tokens = other["tokens"].tolist()
        starts = [
            float(other["token_timestamps"][i - 1])
            for i, token in enumerate(tokens)
            if token < FIRST_TIMESTAMP
        ]
        text = [token for token in tokens if token < FIRST_TIMESTAMP]
        counts = [count for _, count in ours._model.texts.words(text, "en")]
        first = [sum(counts[:i]) for i in range(len(counts))]
        got = [word.start for word in segment.words or ()]
        assert got == pytest.approx([starts[i] for i in first], abs=0.0201)
        compared += len(got)
    assert compared > 3


class _Pieces:
    """A tokenizer whose tokens are given texts."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def decode(self, tokens: list[int]) -> str:
        return b"".join(self._bytes(token) for token in tokens).decode(errors="replace")

    def _bytes(self, token: int) -> bytes:
        return self._texts[token].encode("latin-1")


def timed(count: int) -> TimedTokens:
    tokens = list(range(count))
    return TimedTokens(tokens, [*tokens, count], [-0.5 * i for i in tokens])


def words(language: str, *texts: str) -> list[TimedWord]:
    found = words_of(timed(len(texts)), SpeechTokenizer(_Pieces(*texts), 1000), language)
    assert found[-1].stop == len(texts)
    return join_marks(found, "\"'([", "\"'.,!?)]")


def test_words_of_several_tokens() -> None:
    found = words("en", " Hel", "lo", " wor", "ld", "!")
    assert [word.text for word in found] == [" Hello", " world!"]
    assert [(word.start, word.stop) for word in found] == [(0, 2), (2, 4)]
    assert found[0].probability == pytest.approx((1 + 2.718281828**-0.5) / 2)


def test_marks_belong_to_words() -> None:
    found = words("en", " (", "yes", " no", ")", ",", ' "', "ok", ".")
    assert [word.text for word in found] == [" (yes", " no),", ' "ok.']
    assert found[0].start == 0
    assert [word.text for word in words("en", ".", ",")] == [".,"]


def test_languages_without_spaces() -> None:
    # Two characters of three bytes each, cut within.
    first, second = ("\u4f60".encode(), "\u597d".encode())
    pieces = [part.decode("latin-1") for part in (first[:2], first[2:], second[:1], second[1:])]
    assert [word.text for word in words("zh", *pieces)] == ["\u4f60", "\u597d"]
    assert [word.text for word in words("en", *pieces)] == ["\u4f60\u597d"]
    half = [first[:2].decode("latin-1")]
    assert [word.text for word in words("zh", *half)] == ["\N{REPLACEMENT CHARACTER}"]


def test_no_positions_or_tokens() -> None:
    assert first_positions(torch.zeros(2, 3, 0), 7) == [0, 0, 0]
    assert first_positions(torch.zeros(2, 0, 5), 7) == []
    assert first_positions(torch.ones(2, 3, 5), 7)[0] == 0  # all alike: no deviation


@pytest.mark.parametrize("beam_size", [1, 5])
@pytest.mark.parametrize(
    "options",
    [{}, {"batched": True}, {"without_timestamps": True}, {"condition_on_previous_text": False}],
    ids=str,
)
def test_words_lie_in_their_segments(options: dict[str, Any], beam_size: int) -> None:
    """And words change no text."""
    ours = transcriber(1)
    asked: dict[str, Any] = {**EASY, "language": "en", "beam_size": beam_size, **options}
    sounds = [sound(5.2), sound(SECONDS, 1), sound(0.7, 2)]
    timed = [list(one) for one, _ in ours.transcribe(sounds, word_timestamps=True, **asked)]
    plain = [list(one) for one, _ in ours.transcribe(sounds, **asked)]
    for segments, others, samples in zip(timed, plain, sounds, strict=True):
        check_times(segments, len(samples) / 16000)
        assert [(one.text, one.tokens) for one in segments] == [
            (one.text, one.tokens) for one in others
        ]
        assert all(one.words is None for one in others)
    assert [(one.start, one.end) for one in timed[0]] != [(one.start, one.end) for one in plain[0]]


def test_times_of_words_are_those_of_every_format() -> None:
    segments, info = transcriber(1).transcribe(sound(5.2), word_timestamps=True, **EASY)
    kept = list(segments)
    found = json.loads(FORMATS["verbose_json"](kept, info))
    words = iter(found["words"])
    for segment, one in zip(found["segments"], kept, strict=True):
        of_segment = [next(words) for _ in one.words or ()]
        assert (segment["start"], segment["end"]) == (
            of_segment[0]["start"], of_segment[-1]["end"]
        )  # fmt: skip
    assert next(words, None) is None
    for name, mark in (("srt", ","), ("vtt", ".")):
        cues = [line for line in FORMATS[name](kept, info).splitlines() if "-->" in line]
        for cue, one in zip(cues, kept, strict=True):
            ends = (one.words[0].start, one.words[-1].end)
            assert cue == " --> ".join(f"00:00:{end:06.3f}".replace(".", mark) for end in ends)


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

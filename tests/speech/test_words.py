"""Times of tokens as those of transformers, and words."""

import json
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
from lmdecode.speech.word_times import join_marks
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

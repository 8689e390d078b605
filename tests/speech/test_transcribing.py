"""``Transcriber`` on random models: the tokens of transformers, windows in any batch, ends."""

from typing import Any

import pytest
import torch

from lmdecode.speech import Transcriber
from lmdecode.speech.window_decoder import WindowDecoder, _compression_ratio
from tests.decoder.whisper_models import FIRST_TIMESTAMP, PREVIOUS, SECONDS, long_audio, short_audio
from tests.speech.models import EASY, sound, transcriber, transcriber_pair


def tokens_of(segments: Any) -> list[int]:
    return [token for segment in segments for token in segment.tokens]


def of_transformers(found: Any) -> list[int]:
    """Return tokens as segments have them: a pair of times that ends the text has its first."""
    tokens: list[int] = []
    for segment in found:
        part = segment["tokens"].tolist()
        if len(part) > 1 and min(part[-2:]) >= FIRST_TIMESTAMP:
            part = part[:-1]
        tokens += part
    return tokens


@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_without_timestamps(seed: int, beam_size: int) -> None:
    model, ours = transcriber_pair(seed)
    times = range(FIRST_TIMESTAMP, model.config.vocab_size)
    expected = model.generate(
        **short_audio(seed=seed),
        language="de",
        task="transcribe",
        num_beams=beam_size,
        renormalize_logits=True,
        suppress_tokens=[*model.generation_config.suppress_tokens, *times],
    )
    for i, row in enumerate(expected.tolist()):
        segments, info = ours.transcribe(
            sound(SECONDS * (1 - 0.2 * i), seed + i),
            language="German",
            beam_size=beam_size,
            without_timestamps=True,
            suppress_tokens=[-1, *times],
            **EASY,
        )
        text = [token for token in row if token not in (50257, 50258, 50261, 50359, 50363)]
        assert tokens_of(segments) == text
        assert (info.language, info.language_probability) == ("de", 1.0)


@pytest.mark.parametrize("condition", [False, True])
@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_long_sounds(seed: int, beam_size: int, condition: bool) -> None:
    model, ours = transcriber_pair(seed)
    expected = model.generate(
        **long_audio(5.2, seed=seed),
        language="en",
        task="transcribe",
        num_beams=beam_size,
        return_timestamps=True,
        return_segments=True,
        condition_on_prev_tokens=condition,
        renormalize_logits=True,
        temperature=0.0,
    )["segments"][0]
    segments, info = ours.transcribe(
        sound(5.2, seed),
        language="en",
        beam_size=beam_size,
        condition_on_previous_text=condition,
        batched=False,
        **EASY,
    )
    got = list(segments)
    texts = [s for s in expected if min(s["tokens"].tolist(), default=0) < FIRST_TIMESTAMP]
    assert tokens_of(got) == of_transformers(texts)
    assert info.duration == pytest.approx(5.2)
    for segment, other in zip(got, texts, strict=True):
        assert segment.start == pytest.approx(float(other["start"]), abs=1e-6)
        if float(other["end"]) <= 5.2:  # these models say anything, and ours stop with the sound
            assert segment.end == pytest.approx(float(other["end"]), abs=1e-6)
        else:
            assert segment.start < segment.end <= float(other["end"])
    assert [segment.id for segment in got] == list(range(1, len(got) + 1))


def test_prompts() -> None:
    model, ours = transcriber_pair(1)
    text = "w300 w301"
    ids = ours._model.texts.encode(text)
    expected = model.generate(
        **long_audio(5.2),
        language="en",
        task="transcribe",
        prompt_ids=torch.tensor([PREVIOUS, *ids]),
        condition_on_prev_tokens=True,
        return_timestamps=True,
        return_segments=True,
        temperature=0.0,
    )["segments"][0]
    options = {"language": "en", "beam_size": 1, **EASY}
    for prompt in (text, ids):
        segments, _ = ours.transcribe(sound(5.2), initial_prompt=prompt, **options)
        texts = [s for s in expected if min(s["tokens"].tolist(), default=0) < FIRST_TIMESTAMP]
        assert tokens_of(segments) == of_transformers(texts)
    plain = tokens_of(ours.transcribe(sound(5.2), **options)[0])
    assert plain != tokens_of(ours.transcribe(sound(5.2), initial_prompt=text, **options)[0])
    assert plain != tokens_of(ours.transcribe(sound(5.2), hotwords=text, **options)[0])


@pytest.mark.parametrize("timed", [False, True])
def test_a_prefix_begins_the_text(timed: bool) -> None:
    ours = transcriber()
    options = {"language": "en", "without_timestamps": not timed, **EASY}
    segments, _ = ours.transcribe(sound(1.5), prefix="w400 w401", **options)
    first = next(segments)
    ids = ours._model.texts.encode("w400 w401")
    assert first.tokens[: len(ids) + timed] == [*[FIRST_TIMESTAMP] * timed, *ids]
    assert first.text.startswith("w400w401")  # this tokenizer knows no spaces


def test_the_language_is_that_of_transformers() -> None:
    for seed in range(3):
        model, ours = transcriber_pair(seed)
        inputs = short_audio(1, seed)
        expected = int(model.detect_language(inputs["input_features"])[0])
        code, probability, every = ours.detect_language(sound(SECONDS, seed))
        assert ours._model.tokens.languages[code] == expected
        assert every[0] == (code, probability) and sum(p for _, p in every) == pytest.approx(1)
        segments, info = ours.transcribe(sound(SECONDS, seed), **EASY)
        assert info.language == code and info.all_language_probs == every
        same, _ = ours.transcribe(sound(SECONDS, seed), language=code, **EASY)
        assert list(segments) == list(same)


def test_an_english_model() -> None:
    ours = transcriber(english=True)
    assert not ours.is_multilingual and ours.supported_languages == ["en"]
    segments, info = ours.transcribe(sound(1.0), **EASY)
    assert list(segments) and info.language == "en" and info.all_language_probs is None
    with pytest.raises(ValueError, match="the model knows English alone"):
        ours.detect_language(sound(1.0))
    with pytest.raises(ValueError, match="task is 'translate'"):
        ours.transcribe(sound(1.0), task="translate")
    with pytest.raises(ValueError, match="language is 'de'"):
        ours.transcribe(sound(1.0), language="de")


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("beam_size", [1, 2])
def test_a_batch_has_the_segments_of_each_alone(beam_size: int, batched: bool) -> None:
    ours = transcriber(1)
    sounds = [sound(seconds, seed) for seed, seconds in enumerate((5.2, 1.1, 0.7, 6.4, 2.0))]
    options = {
        "beam_size": beam_size, "batched": batched, "word_timestamps": True, **EASY
    }  # fmt: skip
    alone = [list(ours.transcribe(one, batch_size=1, **options)[0]) for one in sounds]
    assert all(alone)
    for batch_size in (2, 8):
        together = ours.transcribe(sounds, batch_size=batch_size, **options)
        assert [list(segments) for segments, _ in together] == alone
    # In whatever order they are read.
    pairs = list(ours.transcribe(sounds, batch_size=3, **options))
    for i in (3, 0, 4, 1, 2):
        assert list(pairs[i][0]) == alone[i]


def test_threads_change_nothing() -> None:
    ours, threads = transcriber(1), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(list(ours.transcribe(sound(5.2), word_timestamps=True, **EASY)[0]))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]


def test_parts_that_are_decoded_together_cover_the_sound() -> None:
    ours = transcriber(1)
    segments, _ = ours.transcribe(sound(9.0, 1), batched=True, **EASY)
    found = list(segments)
    seeks = sorted({segment.seek for segment in found})
    assert seeks[0] == 0 and len(seeks) > 4
    for before, behind in zip(seeks, [*seeks[1:], 900], strict=True):
        assert 0 < behind - before <= 100 * SECONDS
    assert all(s.start <= s.end <= 9.0 for s in found)
    starts = [segment.start for segment in found]
    assert starts == sorted(starts)


def test_closing_ends_the_work() -> None:
    ours = transcriber(1)
    first, second = ours.transcribe([sound(9.0), sound(5.2, 1)], batch_size=2, **EASY)
    expected = list(ours.transcribe(sound(5.2, 1), **EASY)[0])
    kept = next(first[0])
    first[0].close()
    assert list(first[0]) == [] and kept.tokens
    assert list(second[0]) == expected
    again, _ = ours.transcribe(sound(5.2, 1), **EASY)
    assert next(again) == expected[0]
    run = again._run
    del again
    assert not run._decoder.has_work and run._decoder._slots is None
    with pytest.raises(KeyError):
        ours.transcribe(sound(1.0), **EASY)[0].throw(KeyError("stop"))


def test_what_is_raised_within_ends_it() -> None:
    def refuse(done: float, total: float) -> None:
        raise InterruptedError("enough")

    ours = transcriber(1)
    segments, _ = ours.transcribe(sound(5.2), progress=refuse, **EASY)
    with pytest.raises(InterruptedError, match="enough"):
        list(segments)
    assert list(segments) == []
    assert list(ours.transcribe(sound(5.2), **EASY)[0])


def test_progress() -> None:
    ours, told = transcriber(1), list[tuple[float, float]]()
    segments, _ = ours.transcribe(
        sound(5.2), progress=lambda done, total: told.append((done, total)), **EASY
    )
    list(segments)
    assert len(told) > 1 and told[-1] == (5.2, 5.2)
    assert [done for done, _ in told] == sorted({done for done, _ in told})


@pytest.mark.parametrize("first", [0.0, 0.3])
def test_higher_temperatures(first: float) -> None:
    """A text that is not good enough is drawn; the same seed draws the same."""
    ours = transcriber(1)
    options: dict[str, Any] = {**EASY, "temperature": (first, 0.7), "log_prob_threshold": 0.0}
    options["compression_ratio_threshold"] = 2.2  # the search repeats itself more often
    found = list(ours.transcribe(sound(5.2), word_timestamps=True, **options)[0])
    assert {segment.temperature for segment in found} == {0.7}
    assert found == list(ours.transcribe(sound(5.2), word_timestamps=True, **options)[0])
    for batched in ([sound(1.0), sound(5.2)], [sound(5.2), sound(0.5)]):
        pairs = list(ours.transcribe(batched, word_timestamps=True, **options))
        assert list(pairs[len(batched[0]) == 16000][0]) == found
    other = list(ours.transcribe(sound(5.2), **{**options, "seed": 1})[0])
    assert tokens_of(other) != tokens_of(found)
    for segment in found:
        times = [token for token in segment.tokens if token >= FIRST_TIMESTAMP]
        assert times == sorted(times)
        assert segment.avg_logprob < 0
        assert segment.tokens and not set(segment.tokens) & set(ours._model.tokens.suppressed)


def test_one_draw_of_little_noise_is_the_search() -> None:
    ours = transcriber(1)
    options = {"beam_size": 1, "language": "en", "best_of": 1}
    searched = list(ours.transcribe(sound(5.2), **options, **EASY)[0])
    drawn = list(ours.transcribe(sound(5.2), **options, **{**EASY, "temperature": 1e-4})[0])
    assert tokens_of(drawn) == tokens_of(searched)
    for one, other in zip(drawn, searched, strict=True):
        assert one.avg_logprob == pytest.approx(other.avg_logprob, abs=1e-4)


def test_silence_has_no_text() -> None:
    ours = transcriber(1)
    options = {**EASY, "no_speech_threshold": -1.0}
    assert list(ours.transcribe(sound(5.2), **options)[0]) == []
    probable = {**options, "log_prob_threshold": -1e9}
    assert list(ours.transcribe(sound(5.2), **probable)[0])


@pytest.mark.parametrize("samples", [0, 1, 159, 160, 400])
def test_short_sounds(samples: int) -> None:
    ours = transcriber()
    for options in ({}, {"batched": True}, {"word_timestamps": True}):
        segments, info = ours.transcribe(torch.zeros(samples), **options, **EASY)
        for segment in segments:
            assert 0 <= segment.start <= segment.end
        assert info.duration == samples / 16000


def test_suppressed_tokens() -> None:
    ours = transcriber(1)
    found = tokens_of(ours.transcribe(sound(5.2), language="en", **EASY)[0])
    text = [token for token in found if token < 50257]
    banned = {text[0], text[1]}
    again = tokens_of(
        ours.transcribe(sound(5.2), language="en", suppress_tokens=[-1, *banned], **EASY)[0]
    )
    assert not banned & set(again) and again


def test_model_arguments(tmp_path: Any) -> None:
    with pytest.raises(TypeError, match="Transcriber: model is of type int"):
        Transcriber(3)
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        Transcriber(tmp_path / "nothing")


def test_an_error_is_that_of_its_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = transcriber(1)
    expected = list(ours.transcribe(sound(5.2), language="en", **EASY)[0])
    encode, count = ours._model.encode, 0

    def fails_once(features: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == 2:  # the first window of the second sound
            raise MemoryError("too large")
        return encode(features)

    monkeypatch.setattr(ours._model, "encode", fails_once)
    pairs = list(ours.transcribe([sound(5.2), sound(3.0, 1)], language="en", **EASY))
    assert list(pairs[0][0]) == expected
    with pytest.raises(MemoryError, match="too large"):
        list(pairs[1][0])


def test_a_sound_that_cannot_be_opened_fails_in_its_turn() -> None:
    ours = transcriber(1)
    pairs = ours.transcribe([sound(1.0), torch.zeros(2, 2), sound(1.0)], language="en", **EASY)
    assert list(next(pairs)[0])
    with pytest.raises(ValueError, match=r"audio is float32 of shape \[2, 2\]"):
        next(pairs)
    assert list(pairs) == []


def test_threads_of_the_caller() -> None:
    """Several calls at a time, and a sound that another thread closes."""
    import concurrent.futures

    ours = transcriber(1)
    sounds = [sound(3.0, seed) for seed in range(4)]
    expected = [list(ours.transcribe(one, **EASY)[0]) for one in sounds]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda one: list(ours.transcribe(one, **EASY)[0]), sounds)
        assert list(found) == expected
        pairs = list(ours.transcribe(sounds, **EASY))
        reads = [pool.submit(list, segments) for segments, _ in pairs[1:]]
        pool.submit(pairs[0][0].close).result()
        assert [read.result() for read in reads] == expected[1:]


@pytest.mark.parametrize("most", [None, 2.2])
def test_the_best_try_is_taken_if_none_is_good(
    most: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As faster-whisper 1.2.1: of those not too repetitive; the temperature is the last one."""
    tries: list[Any] = []

    def watch(name: str) -> None:
        own = getattr(WindowDecoder, name)

        def method(*arguments: Any) -> Any:
            tries.append(own(*arguments))
            return tries[-1]

        monkeypatch.setattr(WindowDecoder, name, method)

    for name in ("_searched", "_drawn"):
        watch(name)
    ours = transcriber(1)
    options = {
        **EASY, "temperature": (0.0, 0.5, 0.9), "log_prob_threshold": 0.0,
        "compression_ratio_threshold": most,
    }  # fmt: skip
    found = list(ours.transcribe(sound(2.0), language="en", batched=True, **options)[0])
    assert len(tries) == 3 and {segment.temperature for segment in found} == {0.9}
    if most is not None:  # the search repeats itself
        assert _compression_ratio(ours._model.texts.decode(tries[0].tokens).strip()) > most
        del tries[0]

    def mean(one: Any) -> float:
        return sum(one.log_probs) / (len(without_end(one.tokens)) + 1)

    best = max(tries, key=mean)
    assert best is tries[0]  # the last one is a worse one
    assert tokens_of(found) == without_end(best.tokens)
    assert {segment.avg_logprob for segment in found} == {mean(best)}


def without_end(tokens: list[int]) -> list[int]:
    return [token for token in tokens if token != 50257]

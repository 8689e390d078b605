"""Times of tokens and words: what Whisper's decoder attends to, by one pass over found tokens."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import pipeline
from transformers.models.whisper.modeling_whisper import WhisperDecoder, WhisperEncoder

import lmdecode
from tests.decoder.test_whisper_long import sure_of_silence
from tests.decoder.whisper_models import (
    END,
    SECONDS,
    audio,
    extractor,
    long_audio,
    make_whisper,
    short_audio,
    whisper_pair,
)
from tests.decoder.whisper_tokenizer import whisper_tokenizer
from tests.support.releases import BEFORE_5_1

OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_beams": 3},
    {"condition_on_prev_tokens": True, "num_beams": 2},
    {"prompt_ids": torch.tensor([50361, 300, 301])},
    {"temperature": (0.0, 1e-4), "logprob_threshold": 0.0},
]


def check(arguments: dict[str, Any], seed: int = 0) -> Any:
    model, decoding = whisper_pair(seed)
    arguments = {
        "language": "en", "return_timestamps": True, "return_token_timestamps": True, **arguments,
    }  # fmt: skip
    expected, got = model.generate(**arguments), decoding.generate(**arguments)
    assert got["sequences"].tolist() == expected["sequences"].tolist()
    assert got["token_timestamps"].dtype == torch.float32
    torch.testing.assert_close(
        got["token_timestamps"], expected["token_timestamps"], atol=1e-6, rtol=0
    )
    times = got["token_timestamps"]
    assert len(times.unique()) > 5 and float(times.min()) >= 0
    return got


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "greedy")
def test_one_window(options: dict[str, Any]) -> None:
    for seed in range(2):
        found = check({**short_audio(seed=seed), **options}, seed)
        assert float(found["token_timestamps"].max()) <= 2 * SECONDS
    one = {name: tensor[:1] for name, tensor in short_audio().items()}
    check({**one, **options})
    one.pop("attention_mask")
    check({**one, **options})


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "greedy")
def test_long_audio(options: dict[str, Any]) -> None:
    model, decoding = whisper_pair(1)
    arguments: dict[str, Any] = dict(
        **long_audio(5.2, 4.3), **options, language="de", return_token_timestamps=True
    )
    arguments |= {"return_timestamps": True, "return_segments": True}
    expected, got = model.generate(**arguments), decoding.generate(**arguments)
    count = 0
    for ours, theirs in zip(got["segments"], expected["segments"], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one["tokens"].tolist() == other["tokens"].tolist()
            if "token_timestamps" in other:
                count += 1
                torch.testing.assert_close(one["token_timestamps"], other["token_timestamps"])
    assert count > 4


def test_without_times_in_the_text() -> None:
    check({**short_audio(), "return_timestamps": False, "force_unique_generate_call": True})


def test_the_decoder_of_torch_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_whisper(0)
    decoding = lmdecode.Decoding.from_pretrained(model)
    shapes: list[tuple[int, ...]] = []
    own = WhisperDecoder.forward

    def count(self: Any, **options: Any) -> Any:
        shapes.append(tuple(options["input_ids"].shape))
        return own(self, **options)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("torch's encoder was called")

    monkeypatch.setattr(WhisperEncoder, "forward", fail)
    monkeypatch.setattr(WhisperDecoder, "forward", count)
    got = decoding.generate(
        **short_audio(),
        language="en",
        num_beams=3,
        return_timestamps=True,
        return_token_timestamps=True,
        force_unique_generate_call=True,
    )
    assert shapes == [(3, got["sequences"].shape[1] - 1)]


def test_what_it_needs() -> None:
    model = make_whisper(0)
    decoding = lmdecode.Decoding.from_pretrained(model)
    arguments: dict[str, Any] = dict(**short_audio(), language="en", return_token_timestamps=True)
    with pytest.raises(ValueError, match="output_attentions: expected False"):
        decoding.generate(**arguments, output_attentions=True)
    with pytest.raises(ValueError, match="output_hidden_states"):
        decoding.generate(**arguments, output_hidden_states=True)
    del model.generation_config.alignment_heads
    with pytest.raises(ValueError, match="alignment_heads"):
        decoding.generate(**arguments)


def test_a_model_without_weights_says_so(tmp_path: Path) -> None:
    """All else works with it."""
    model, _ = whisper_pair(0)
    lmdecode.Decoding.from_pretrained(model).save(tmp_path)
    decoding = lmdecode.Decoding.load(tmp_path)
    arguments: dict[str, Any] = dict(
        **long_audio(5.2, 3.3), return_timestamps=True, no_speech_threshold=0.9,
        logprob_threshold=-9.0, temperature=(0.0, 0.5), condition_on_prev_tokens=True,
    )  # fmt: skip
    expected = model.generate(**arguments)
    assert decoding.generate(**arguments).tolist() == expected.tolist()
    with pytest.raises(ValueError, match=r"^return_token_timestamps: expected None"):
        decoding.generate(**short_audio(), language="en", return_token_timestamps=True)


CHUNKS = {"chunk_length_s": 2, "stride_length_s": 0.4}
CALLS: list[dict[str, Any]] = [
    {"return_timestamps": True},
    {"return_timestamps": "word"},
    CHUNKS,
    CHUNKS | {"return_timestamps": True, "batch_size": 3},
    CHUNKS | {"return_timestamps": "word", "batch_size": 2},
    {"return_timestamps": True, "return_language": True},
    {
        "return_timestamps": True,
        "generate_kwargs": {"num_beams": 3, "language": "de", "task": "translate"},
    },
    {
        "return_timestamps": True,
        "generate_kwargs": {
            "condition_on_prev_tokens": True, "temperature": (0.0, 1e-4), "logprob_threshold": -1.0,
            "no_speech_threshold": 0.6, "compression_ratio_threshold": 1.35,
        },
    },
]  # fmt: skip


PIPELINE = pytest.mark.skipif(
    BEFORE_5_1, reason="the pipeline of transformers 5.0 fails on recordings without chunk_length_s"
)


@functools.cache
def pipes() -> tuple[Any, Any]:
    """Return the pipelines of a model, and of one whose generate() is Decoding's."""
    plain, model = make_whisper(0), make_whisper(0)
    model.generate = lmdecode.Decoding.from_pretrained(model).generate
    ours, theirs = (
        pipeline(
            "automatic-speech-recognition",
            model=each,
            tokenizer=whisper_tokenizer(),
            feature_extractor=extractor(),
            max_new_tokens=24,  # as the model says, whose config transformers 5.0 passes over
        )
        for each in (model, plain)
    )
    return ours, theirs


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, marks=() if "chunk_length_s" in call else PIPELINE, id="+".join(call))
        for call in CALLS
    ],
)
def test_the_text_is_that_of_the_model(call: dict[str, Any]) -> None:
    ours, theirs = pipes()
    sounds = [audio(5.1, 1), audio(1.4, 2), audio(3.3, 3)]
    got = [ours(sound.copy(), **call) for sound in sounds]
    expected = [theirs(sound.copy(), **call) for sound in sounds]
    assert got == expected
    assert all(len(text["text"].split()) > 3 for text in got)
    if "return_timestamps" in call:
        assert all(text["chunks"] for text in got)


@PIPELINE
def test_several_at_once() -> None:
    ours, theirs = pipes()
    sounds = [audio(1.9, 4), audio(1.2, 5), audio(0.7, 6)]
    call: dict[str, Any] = {"return_timestamps": True, "batch_size": 3}
    got = ours([sound.copy() for sound in sounds], **call)
    assert got == theirs([sound.copy() for sound in sounds], **call)


# So cold that the noise changes no draw.
AGAIN: dict[str, Any] = {"return_timestamps": True, "temperature": (0.0, 1e-5)}


def check_alone(decoding: Any, inputs: dict[str, Any], **options: Any) -> list[list[int]]:
    """Compare each sound of a batch with itself alone; return the texts."""
    together = decoding.generate(**inputs, **AGAIN, **options)
    found = []
    for row, frames in enumerate(inputs["attention_mask"].sum(dim=-1).tolist()):
        features = inputs["input_features"][row : row + 1, :, :frames]
        (alone,) = decoding.generate(input_features=features, **AGAIN, **options).tolist()
        found.append([token for token in alone if token != END])
        assert [token for token in together[row].tolist() if token != END] == found[-1]
    return found


@pytest.mark.parametrize(("num_beams", "least"), [(1, -2.9), (3, -2.65)])
def test_silence_is_that_of_its_sound(num_beams: int, least: float) -> None:
    """transformers 5.23.0 takes the row of the batch that is tried again."""
    decoding = lmdecode.Decoding.from_pretrained(sure_of_silence())
    # The first sound begins with a text that is good, though it may be silence; the second with
    # one that is tried again, as the first row.
    found = check_alone(
        decoding, long_audio(5.2, 5.2, 5.2, seed=4), language="en", num_beams=num_beams,
        logprob_threshold=least, no_speech_threshold=0.065,
    )  # fmt: skip
    assert all(found)


@pytest.mark.parametrize("english", [False, True])
def test_beams_are_given_up_for_the_sound_that_was_sampled(english: bool) -> None:
    """transformers 5.23.0 gives them up for all sounds of the call."""
    _, decoding = whisper_pair(1, english=english)
    options: dict[str, Any] = {} if english else {"language": "en"}
    again = check_alone(
        decoding, long_audio(5.3, 7.2), num_beams=3, logprob_threshold=-3.5, **options
    )
    searched = decoding.generate(
        **long_audio(5.3, 7.2), **{**AGAIN, "temperature": (0.0,)}, num_beams=3, **options
    )
    assert again != [[token for token in row if token != END] for row in searched.tolist()]


def test_silence_needs_both_thresholds() -> None:
    """transformers 5.23.0 ends in an UnboundLocalError."""
    _, decoding = whisper_pair(0)
    with pytest.raises(ValueError, match=r"^no_speech_threshold: expected None without a logprob"):
        decoding.generate(**long_audio(4.1), **AGAIN, language="en", no_speech_threshold=0.6)

"""Decoding under transformers' pipeline("automatic-speech-recognition")."""

import functools
from typing import Any

import pytest
from transformers import pipeline

import lmdecode
from tests.decoder.whisper_models import audio, extractor, make_whisper
from tests.decoder.whisper_tokenizer import whisper_tokenizer
from tests.support.releases import BEFORE_5_1

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
            "condition_on_prev_tokens": True,
            "temperature": (0.0, 1e-4),
            "logprob_threshold": -1.0,
            "no_speech_threshold": 0.6,
            "compression_ratio_threshold": 1.35,
        },
    },
]


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

"""Whisper, from real folders of CTranslate2: transformers' texts, and those a format changes."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

import lmdecode
from benchmarks.quality.speech import RATE, WHY_NOT, can_speak, sentences, speak, word_error_rate
from benchmarks.quality.whisper import transcripts
from tests.models.real_models import WHISPER_NAMES, model_file

pytest.importorskip("lmdecode.formats.ctranslate2")
pytestmark = pytest.mark.slow


@functools.cache
def features(count: int) -> Tensor:
    if not can_speak():
        pytest.skip(WHY_NOT)
    sounds = [speak(text).numpy() for text in sentences()[:count]]
    return WhisperFeatureExtractor()(sounds, sampling_rate=RATE, return_tensors="pt").input_features


def loaded(name: str, dtype: str) -> tuple[Any, Any]:
    folder = model_file(name).parent
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return lmdecode.Decoding.from_pretrained(folder, dtype), tokenizer


@functools.cache
def heard(name: str, dtype: str, count: int) -> list[str]:
    decoding, tokenizer = loaded(name, dtype)
    config = decoding.model.generation_config
    return transcripts(decoding.generate, config, tokenizer, features(count), 5)


@pytest.mark.parametrize("name", WHISPER_NAMES)
def test_float32_has_the_texts_of_transformers(name: str) -> None:
    decoding, tokenizer = loaded(name, "float32")
    model = decoding.model
    with torch.no_grad():
        want = transcripts(model.generate, model.generation_config, tokenizer, features(6), 5)
    assert heard(name, "float32", 30)[:6] == want


# Words wrong in 100, above those of float32. Texts are not compared: a synthetic voice is hard to
# hear, and a format changes some for the worse and as many for the better.
@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.5), ("int8", 1.5), ("int4", 3.0)])
@pytest.mark.parametrize("name", WHISPER_NAMES)
def test_few_words_change(name: str, dtype: str, most: float) -> None:
    spoken = sentences()[:30]
    wrong = {kind: word_error_rate(spoken, heard(name, kind, 30)) for kind in (dtype, "float32")}
    assert 100 * (wrong[dtype] - wrong["float32"]) <= most

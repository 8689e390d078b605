"""Whisper on spoken sentences: words wrong, and texts other than transformers' in float32."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

import lmdecode
from benchmarks.quality.speech import RATE, sentences, speak, word_error_rate
from benchmarks.report import markdown_table
from lmdecode.linear.formats import FORMATS

__all__ = ["table", "transcripts"]

_BEAMS = {"greedy": 1, "5 beams": 5}
_NEW_TOKENS = 64


def transcripts(
    generate: Callable[..., Any], config: Any, tokenizer: Any, features: Tensor, num_beams: int
) -> list[str]:
    """Return the text of each of the features, [n, mels, frames], one after the other.

    ``generate`` is that of the model or of ``Decoding``, ``config`` the model's generation config.
    """
    options: dict[str, Any] = {}
    if getattr(config, "is_multilingual", False):
        options = {"language": "en", "task": "transcribe"}
    texts = []
    for one in features:
        ids = generate(
            input_features=one[None],
            num_beams=num_beams,
            do_sample=False,
            max_new_tokens=_NEW_TOKENS,
            **options,
        )
        texts.append(tokenizer.decode(ids[0], skip_special_tokens=True).strip())
    return texts


def table(folder: Path, count: int) -> tuple[str, list[str]]:
    """Return the table of a model in a folder of CTranslate2, and notes.

    Raises
    ------
    ValueError, OSError
        It cannot be loaded.
    """
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    spoken = sentences()[:count]
    extractor = WhisperFeatureExtractor()
    sounds = [speak(text).numpy() for text in spoken]
    inputs = extractor(sounds, sampling_rate=RATE, return_tensors="pt").input_features
    rows: list[list[str]] = []
    first: dict[str, list[str]] = {}

    def add(name: str, generate: Callable[..., Any], config: Any) -> None:
        cells = []
        start = time.process_time()
        for search, num_beams in _BEAMS.items():
            heard = transcripts(generate, config, tokenizer, inputs, num_beams)
            others = sum(
                a != b for a, b in zip(heard, first.setdefault(search, heard), strict=True)
            )
            cells += [f"{100 * word_error_rate(spoken, heard):.1f} %", str(others)]
        rows.append([name, *cells, f"{time.process_time() - start:.1f}"])

    for dtype in FORMATS:
        decoding = lmdecode.Decoding.from_pretrained(folder, dtype)
        config = decoding.model.generation_config
        if not rows:
            with torch.no_grad():
                add("transformers float32", decoding.model.generate, config)
        add(f"lmdecode {dtype}", decoding.generate, config)
        del decoding
    head = ["format"]
    for search in _BEAMS:
        head += [f"{search}: words wrong", "texts other than transformers'"]
    note = f"{len(spoken)} sentences of espeak-ng, one at a time; CPU seconds of both searches."
    return markdown_table([*head, "CPU s"], rows, 1), [note]

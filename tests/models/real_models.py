"""Real models of packages: where they lie, and a skip where they are not installed."""

import functools
from pathlib import Path

import pytest
from torch import Tensor

from benchmarks.quality.language import gguf_tokens, manual
from benchmarks.quality.real_models import GGUF_MODELS, WHISPER_MODELS, find

__all__ = ["GGUF_NAMES", "WHISPER_NAMES", "model_file", "tokens_of"]

_CACHE = Path(__file__).resolve().parents[2] / "build" / "models"
_MODELS = {model.name: model for model in (*GGUF_MODELS, *WHISPER_MODELS)}
GGUF_NAMES = [model.name for model in GGUF_MODELS]
WHISPER_NAMES = [model.name for model in WHISPER_MODELS]


def model_file(name: str) -> Path:
    """Return where a model's file lies; skip the test where it is not installed."""
    found = find(_MODELS[name], _CACHE)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@functools.cache
def tokens_of(path: Path, count: int) -> tuple[Tensor, int | None]:
    """Return tokens of a manual, and what stands in front of each window."""
    return gguf_tokens(path, manual()[: 16 * count], count)

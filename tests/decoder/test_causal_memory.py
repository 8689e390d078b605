"""What a decoder-only model takes at its peak: hardly more than packed weights and caches."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode.demo.peak_memory import peak_memory
from tests.support.anonymous_memory import peak_without_files
from tests.support.tiny_models import seeded_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="/proc as on Linux"),
]

SIZES: dict[str, Any] = {
    "vocab_size": 4000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}  # fmt: skip
PROMPT, NEW, BEAMS = 1500, 20, 4
_FOLDER = "LMDECODE_TEST_MODEL"


@pytest.fixture(scope="module")
def folder() -> Any:
    """Folders of the same model, by the dtype of their files."""
    with tempfile.TemporaryDirectory() as path:
        model = seeded_model("LlamaForCausalLM", **SIZES)
        for dtype in ("float32", "bfloat16"):
            model.to(getattr(torch, dtype)).save_pretrained(Path(path) / dtype)
        yield Path(path)


def _decoding(path: Path) -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(path, "int8")


def loading() -> Callable[[], object]:
    """From a folder of float32 or bfloat16 weights, four times or twice as large."""
    path = Path(os.environ[_FOLDER])
    lmdecode.Decoding.from_pretrained("examples/kjv_mistral/model", "int8")  # what is loaded late
    return lambda: _decoding(path)


def searching() -> Callable[[], object]:
    decoding = _decoding(Path(os.environ[_FOLDER]))
    prompt = torch.randint(3, SIZES["vocab_size"], (1, PROMPT))
    options = {"num_beams": BEAMS, "do_sample": False, "pad_token_id": 0}
    decoding.generate(prompt[:, :40], max_new_tokens=2, **options)
    return lambda: decoding.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_takes_the_packed_weights(
    dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one weight as floats. Pages of the file that is mapped do not count."""
    folder = folder / dtype
    monkeypatch.setenv(_FOLDER, str(folder))
    # What is freed goes back to the system, as it does where weights are larger than 32 MB.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    weights = _decoding(folder).decoder.memory.numel()
    taken = peak_without_files(loading)
    most = 1.15 * weights + 4 * SIZES["vocab_size"] * SIZES["hidden_size"]
    assert 0.95 * weights <= taken <= most  # memory that was freed before serves for some
    file = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert file > most  # a loader that holds all of it takes more


def test_beams_take_one_prompt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of the prompt once, and of each beam's own tokens, in whole blocks."""
    monkeypatch.setenv(_FOLDER, str(folder / "float32"))
    head_size = SIZES["hidden_size"] // SIZES["num_attention_heads"]
    a_token = SIZES["num_hidden_layers"] * 2 * SIZES["num_key_value_heads"] * head_size * 4
    blocks = -(-PROMPT // 32) + BEAMS * 2
    caches = blocks * 32 * a_token
    assert peak_memory(searching) <= 1.15 * caches + (24 << 20)  # scratch of 512 rows

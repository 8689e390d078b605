"""Perplexity of real GGUF models in each format, and the tokens of transformers in float32."""

import functools

import pytest
import torch

import lmdecode
from lmdecode.formats.gguf import load_tokenizer
from lmdecode.quality import perplexity
from tests.models.real_models import GGUF_NAMES, model_file, tokens_of

pytestmark = pytest.mark.slow

TOKENS = 4096
PROMPTS = ["The capital of France is", "def fibonacci(n):", "Water boils when"]


@functools.cache
def measured(name: str, dtype: str | None) -> float:
    path = model_file(name)
    ids, bos = tokens_of(path, TOKENS)
    decoding = lmdecode.Decoding.from_pretrained(path, dtype, keep_model=False)
    return perplexity(decoding, ids, bos=bos).perplexity


# In percent of float32. The values of a file are exact, and inputs are rounded.
@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.2), ("int8", 0.8), (None, 0.8)])
@pytest.mark.parametrize("name", GGUF_NAMES)
def test_a_format_keeps_the_perplexity(name: str, dtype: str | None, most: float) -> None:
    change = 100 * (measured(name, dtype) / measured(name, "float32") - 1)
    assert abs(change) <= most, f"{change:+.2f} %"


@pytest.mark.parametrize("name", GGUF_NAMES)
def test_float32_has_the_tokens_of_transformers(name: str) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")  # transformers reads no GGUF file without it
    from transformers import AutoModelForCausalLM

    path = model_file(name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    tokenizer = load_tokenizer(path)
    decoding = lmdecode.Decoding.from_pretrained(path)
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        call = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
        for num_beams in (1, 4):
            options = {"max_new_tokens": 32, "do_sample": False, "num_beams": num_beams}
            want = model.generate(**call, **options)
            assert decoding.generate(**call, **options).tolist() == want.tolist(), prompt

"""Decoding.generate(prompt_lookup_num_tokens=...): the text, and the bits, of calls without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lmdecode
from lmdecode.decoder.causal_caches import CausalCaches
from tests.support.causal_models import CASES, PAD, POSITIONS, random_tokens
from tests.support.drafts import decoding_of

MODEL = Path(__file__).parents[2] / "examples" / "kjv_mistral" / "model"
FEW = (("gemma3_text", "plain"), ("mistral", "window"), ("gpt2", "plain"))


def repetitive(rows: int = 1) -> dict[str, torch.Tensor]:
    """Prompts of phrases that come again, padded on the left."""
    ids = torch.full((rows, 28), PAD)
    for row, text in enumerate(ids):
        phrase = random_tokens(6 - row % 3, row)
        text[4 * row :] = phrase.repeat(9)[: 28 - 4 * row]
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the tokens of each step from here on."""
    steps: list[int] = []
    forward = CausalCaches.forward

    def count(
        self: CausalCaches, tokens: Any, entries: Any, num_logits: int, **options: Any
    ) -> Any:
        steps.append(len(tokens))
        return forward(self, tokens, entries, num_logits, **options)

    monkeypatch.setattr(CausalCaches, "forward", count)
    return steps


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_greedy_text_and_logits_are_the_same(architecture: str, variant: str) -> None:
    decoding = decoding_of(architecture, variant)
    options: dict[str, Any] = {
        "max_new_tokens": 40, "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    inputs = repetitive(3)
    expected = decoding.generate(**inputs, **options)
    for num_tokens in (1, 7):
        got = decoding.generate(**inputs, **options, prompt_lookup_num_tokens=num_tokens)
        assert got.sequences.equal(expected.sequences)
        for ours, theirs in zip(got.logits, expected.logits, strict=True):
            assert ours.equal(theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize(("architecture", "variant"), FEW)
def test_sampled_text_is_the_same(architecture: str, variant: str, dtype: str) -> None:
    decoding = decoding_of(architecture, variant, dtype=dtype, cache_dtype="int8")
    options: dict[str, Any] = {
        "max_new_tokens": 60, "do_sample": True, "top_k": 3, "temperature": 0.6, "seed": 5,
        "repetition_penalty": 1.1,
    }  # fmt: skip
    inputs = repetitive(2)
    got = decoding.generate(
        **inputs, **options, prompt_lookup_num_tokens=5, max_matching_ngram_size=3
    )
    assert got.equal(decoding.generate(**inputs, **options))


def test_text_that_comes_again_takes_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    decoding = lmdecode.Decoding.from_pretrained(model)
    inputs = tokenizer("And he said. And he said. And he said.", return_tensors="pt")
    expected = decoding.generate(**inputs, max_new_tokens=64, do_sample=False)
    plain = expected.shape[1] - inputs.input_ids.shape[1]  # steps of a token
    steps = counted(monkeypatch)
    got = decoding.generate(
        **inputs, max_new_tokens=64, do_sample=False, prompt_lookup_num_tokens=8
    )
    assert got.equal(expected)
    assert got.equal(model.generate(**inputs, max_new_tokens=64, do_sample=False))
    assert 1 < max(steps[1:]) <= 9 and len(steps) < plain


def test_nothing_is_read_beyond_the_longest_text(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = decoding_of("llama", "plain")
    steps = counted(monkeypatch)
    inputs = repetitive()
    for new in (1, 2, 5):
        expected = decoding.generate(**inputs, max_new_tokens=new)
        steps.clear()
        got = decoding.generate(**inputs, max_new_tokens=new, prompt_lookup_num_tokens=1 << 40)
        assert got.equal(expected)
        assert sum(steps[1:]) < new


def test_all_positions_of_a_model() -> None:
    decoding = decoding_of("gpt2", "plain")
    options = {"max_length": POSITIONS + 1, "min_new_tokens": POSITIONS - 28}
    got = decoding.generate(**repetitive(), **options, prompt_lookup_num_tokens=9)
    assert got.shape[1] == POSITIONS + 1
    assert got.equal(decoding.generate(**repetitive(), **options))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_lookup_num_tokens": 2, "num_beams": 2}, ": expected None with beams, got 2"),
        ({"prompt_lookup_num_tokens": 0}, " is 0; expected an int of 64 bits, at least 1"),
        ({"prompt_lookup_num_tokens": 1.5}, " is of type float"),
    ],
)
def test_bad_input(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"prompt_lookup_num_tokens{message}"):
        decoding_of("llama", "plain").generate(**repetitive(), max_new_tokens=4, **arguments)

"""Decoding.generate() of decoder-only models: what it cannot do is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import lmdecode
from lmdecode.integrations.transformers.generate_call import CACHE
from tests.decoder.decoder_models import make_model
from tests.support.causal_models import PAD, random_model, random_tokens
from tests.support.drafts import decoding_of
from tests.support.op_contract import WrongCall, assert_refused, wrong_calls
from tests.support.releases import BEFORE_5_2

CASE = ("gemma3_text", "plain")
IDS = random_tokens(9)[None]


@wrong_calls(
    [
        (
            r"^past_key_values: expected None, Decoding keeps caches .* store=.* Decoding\.batch",
            {"past_key_values": DynamicCache()},
        ),
        ("^output_attentions: expected False, .* model.generate.. do", {"output_attentions": True}),
        ("^output_hidden_states: expected False", {"output_hidden_states": True}),
        (
            "assistant_model is of type LlamaForCausalLM; expected a lmdecode.Decoding of a deco",
            {"assistant_model": random_model("llama", "plain")},
        ),
        ("custom_generate is given; expected none", {"custom_generate": "here"}),
        ("^low_memory: expected None", {"num_beams": 2, "low_memory": True}),
        ("^num_beam_groups: ", {"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 1.0}),
        ("^seed: expected an int >= 0, got -1", {"do_sample": True, "seed": -1}),
        ("^seed: expected one number, or one for each of 1", {"do_sample": True, "seed": [1, 2]}),
        ("^seed: expected one number, or one for each of 1", {"seed": [1, 2]}),
        ("^seed: expected an int >= 0, got -1", {"seed": -1}),
        ("^seed: expected None with beams, got 7", {"num_beams": 2, "seed": 7}),
        (r"^seed: expected None .*, got \[7\]", {"num_beams": 2, "do_sample": True, "seed": [7]}),
        ("^seed: expected None with beams", {"force_words_ids": [[3]], "num_beams": 2, "seed": 7}),
        ("^do_sample: expected Fal", {"do_sample": True, "num_beams": 2, "force_words_ids": [[3]]}),
        ("^penalty_alpha: expected None", {"penalty_alpha": 0.5, "top_k": 4}),
        ("^tokenizer: expected the model's", {"stop_strings": "w3"}),
        (
            "^attention_mask: .* on the left, .* got 0 for the last token of row 0",
            {"attention_mask": torch.tensor([[1] * 8 + [0]])},
        ),
        ('^att.* left, .* padding_side="left', {"attention_mask": torch.tensor([[1, 1, 0] * 3])}),
        ("^attention_mask: .* one is padding alone", {"attention_mask": torch.zeros(1, 9)}),
        (
            "^attention_mask: .* alone, got 0 behind 1 in row 0: .* windows",
            {"attention_mask": torch.tensor([[0, 1, 0] + [1] * 6])},
        ),
        ("^attention_mask: expected shape", {"attention_mask": torch.tensor([[0] + [1] * 7])}),
        (  # transformers 5.2 makes positions of the mask
            "^attention_mask: expected shape" if BEFORE_5_2 else "^position_ids: expected None, or",
            {"attention_mask": torch.ones(1, 8).long()},
        ),
        (
            r"^position_ids: expected None, .*, got \[1, 2, 3, 4, 5, 6, 7, 8\] and more in row 0",
            {"position_ids": torch.arange(9)[None] + 1},
        ),
    ]
)
def test_what_it_cannot_do(wrong: WrongCall) -> None:
    arguments = {"max_new_tokens": 5, "return_dict_in_generate": True} | wrong[1]
    assert_refused(wrong, lambda: decoding_of(*CASE).generate(IDS, **arguments))


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("seed", ["abc", 1.5, [1.5]], ids=str)
def test_seeds_that_are_none(seed: Any, do_sample: bool) -> None:
    with pytest.raises(TypeError, match=r"seed.* is of type (str|float); expected an int"):
        decoding_of(*CASE).generate(IDS, seed=seed, do_sample=do_sample, max_new_tokens=5)


@pytest.mark.parametrize("kind", [torch.float32, torch.bool], ids=str)
def test_tokens_that_are_none(kind: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"^input_ids: expected integers, got dtype "):
        decoding_of(*CASE).generate(IDS.to(kind), max_new_tokens=5)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ("a text", TypeError, r"is of type str; expected a tensor \[B, S\]"),
        ([1, 2], TypeError, r"is of type list; expected a tensor \[B, S\]"),
        (IDS[0], ValueError, r"has shape \[9\]; expected \[B, S\]"),
        (IDS[None], ValueError, r"has shape \[1, 1, 9\]; expected \[B, S\]"),
    ],
)
def test_inputs_that_are_no_rows_of_tokens(
    tokens: Any, error: type[Exception], message: str
) -> None:
    decoding = decoding_of(*CASE)
    with pytest.raises(error, match=f"^Decoding.generate: inputs {message}"):
        decoding.generate(tokens, max_new_tokens=2)
    with pytest.raises(error, match=f"^Decoding.generate: input_ids {message}"):
        decoding.generate(input_ids=tokens, max_new_tokens=2)


@pytest.mark.parametrize("past", [1, (), "cache"])
@pytest.mark.parametrize("kind", ["causal", "marian"])
def test_keys_and_values_of_any_type_are_refused(kind: str, past: Any) -> None:
    if kind == "causal":
        decoding = decoding_of(*CASE)
    else:
        decoding = lmdecode.Decoding.from_pretrained(make_model(kind))
    for name in {"past_key_values", CACHE}:
        with pytest.raises(ValueError, match=rf"^{name}: expected None, .* caches of its own"):
            decoding.generate(IDS % 60, **{name: past}, max_new_tokens=2)


def test_embeddings() -> None:
    embeddings = random_model(*CASE).get_input_embeddings()(IDS).detach()
    with pytest.raises(ValueError, match=r"^inputs_embeds: expected None|^input_ids: expected"):
        decoding_of(*CASE).generate(inputs_embeds=embeddings, max_new_tokens=5)
    with pytest.raises(ValueError, match="inputs_embeds"):
        decoding_of(*CASE).generate(IDS, inputs_embeds=embeddings, max_new_tokens=5)


def test_token_types_of_text_alone() -> None:
    decoding, options = decoding_of("gemma3", "text part"), {"max_new_tokens": 5}
    want = decoding.generate(IDS, **options)
    for types in (None, torch.zeros_like(IDS)):
        assert torch.equal(decoding.generate(IDS, token_type_ids=types, **options), want)
    with pytest.raises(ValueError, match=r"^token_type_ids: expected None"):
        decoding.generate(IDS, token_type_ids=torch.ones_like(IDS), **options)
    with pytest.raises(ValueError, match=r"^token_type_ids: expected None"):  # GPT-2 embeds them
        decoding_of("gpt2", "plain").generate(IDS, token_type_ids=torch.zeros_like(IDS), **options)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_too_long_for_the_positions_of_a_model(num_beams: int) -> None:
    """The last token is not read: there may be one more than positions."""
    decoding = decoding_of("gpt2", "plain")
    options = {"num_beams": num_beams, "do_sample": False, "eos_token_id": None}
    ids = random_tokens(250)[None]
    with pytest.raises(ValueError, match=r"^max_length: expected at most 257, .* got 258"):
        decoding.generate(ids, max_new_tokens=8, **options)
    assert decoding.generate(ids, max_new_tokens=7, **options).shape == (1, 257)


@pytest.mark.skipif(
    BEFORE_5_2, reason="GPT-2 of transformers before 5.2 counts padding as positions"
)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_padding_does_not_count_as_positions(num_beams: int) -> None:
    ids = torch.cat((torch.full((1, 100), PAD), random_tokens(200)[None]), dim=1)
    options: dict[str, Any] = {"max_new_tokens": 6, "num_beams": num_beams, "do_sample": False}
    mask = (ids != PAD).long()
    expected = random_model("gpt2", "plain").generate(ids, attention_mask=mask, **options)
    got = decoding_of("gpt2", "plain").generate(ids, attention_mask=mask, **options)
    assert got.equal(expected)


def test_options_of_other_decoders() -> None:
    with pytest.raises(ValueError, match="cache_dtype is 'bfloat16'; expected None for the decod"):
        lmdecode.Decoding.from_pretrained(make_model("marian"), cache_dtype="bfloat16")
    model = random_model(*CASE)
    with pytest.raises(ValueError, match="use_cuda_graph is True; expected False for a decoder-on"):
        lmdecode.Decoding.from_pretrained(model, use_cuda_graph=True)
    for name in ("float16", torch.float64):
        with pytest.raises(ValueError, match=r"cache_dtype is .*; expected one of float32, bf"):
            lmdecode.Decoding.from_pretrained(model, cache_dtype=name)
    with pytest.raises(ValueError, match="dtype is 'float16'; expected one of float32, bf"):
        lmdecode.Decoding.from_pretrained(model, "float16")

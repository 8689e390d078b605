"""What an ``Engine`` refuses: the argument is named, and nothing is submitted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import lmdecode
from tests.support.causal_models import random_model


@pytest.fixture(scope="module")
def decoding() -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(random_model("llama", "plain"))


@pytest.mark.parametrize(
    ("message", "kind", "prompt", "options"),
    [
        ("prompt_ids is empty; expected at least one", ValueError, [], {}),
        ("prompt_ids is of type str; expected", TypeError, "text", {}),
        ("a token of prompt_ids is of type float", TypeError, [1.0], {}),
        ("prompt_ids has the token 101; expected 0 to 100", ValueError, [101], {}),
        ("prompt_ids has the token -1; expected 0 to 100", ValueError, [-1], {}),
        (r"shape \[1, 2\] and dtype torch.int64; expected", ValueError,
         torch.ones(1, 2, dtype=torch.int64), {}),
        ("dtype torch.float32; expected", ValueError, torch.ones(2), {}),
        ("prompt_ids has 60 tokens and max_new_tokens is 9; expected at most 65", ValueError,
         [5] * 60, {"max_new_tokens": 9}),
        ("max_new_tokens is 0; expected", ValueError, [5], {"max_new_tokens": 0}),
        ("min_tokens is -1; expected", ValueError, [5], {"min_tokens": -1}),
        ("seed is -1; expected", ValueError, [5], {"seed": -1}),
        ("seed is of type str", TypeError, [5], {"seed": "1"}),
        ("do_sample is of type int", TypeError, [5], {"do_sample": 1}),
        ("eos_token_id has the token 999", ValueError, [5], {"eos_token_id": 999}),
        ("logprobs is 65; expected", ValueError, [5], {"logprobs": 65}),
        ("grammar is of type int; expected an object with fill_bitmask", TypeError, [5],
         {"grammar": 1}),
        ("top_p is 2", ValueError, [5], {"top_p": 2.0}),
        ("temprature is no parameter; expected one of", TypeError, [5], {"temprature": 1.0}),
        (r"max_tokens is no parameter.*; did you mean max_new_tokens\?$", TypeError, [5],
         {"max_tokens": 9, "max_new_tokens": None}),
        (r"temprature is .*; did you mean temperature\?$", TypeError, [5], {"temprature": 1.0}),
        (r"input_id is no .*; did you mean input_ids\?$", TypeError, [5], {"input_id": [1]}),
        (r"num_beam_group is .*; did you mean num_beam_groups\?$", TypeError, [5],
         {"num_beams": 2, "num_beam_group": 2}),
        (r"min_new_tokens is .*; did you mean min_tokens\?$", TypeError, [5],
         {"min_new_tokens": 2}),
        ("seed is -1; expected 0 to .*; None draws one, and do_sample=False", ValueError, [5],
         {"seed": -1}),
        ("logit_bias.* 0 to 100", ValueError, [5], {"logit_bias": {400: 1.0}}),
        ("length_penalty is given; expected none without num_beams", ValueError, [5],
         {"length_penalty": 1.0}),
        ("num_beams is 9; expected at most 4", ValueError, [5], {"num_beams": 9}),
        ("seed is 3; expected None for a search", ValueError, [5], {"num_beams": 2, "seed": 3}),
        ("grammar is given; expected None for a search", ValueError, [5],
         {"num_beams": 2, "grammar": object()}),
        ("num_return_sequences", ValueError, [5], {"num_beams": 2, "num_return_sequences": 5}),
        ("patience is 1000000000.0; expected one with", ValueError, [5],
         {"num_beams": 2, "patience": 1e9}),
        ("patience is 1e.308; expected a number", ValueError, [5],
         {"num_beams": 2, "patience": 1e308}),
        ("temperature is no parameter of a search; expected one of num_beams", TypeError, [5],
         {"num_beams": 2, "temperature": 1.0}),
        ("min_new_tokens is no parameter of a search", TypeError, [5],
         {"num_beams": 2, "min_new_tokens": 2}),
        ("num_beams is of type bool", TypeError, [5], {"num_beams": True}),
        (r"suppress_tokens has \[9999\]; expected tokens below 101", ValueError, [5],
         {"num_beams": 2, "suppress_tokens": [9999]}),
        ("logit_bias has .*; expected tokens below 101", ValueError, [5],
         {"num_beams": 2, "logit_bias": {9999: 1.0}}),
        ("seed is 9223372036854775808; expected", ValueError, [5], {"seed": 1 << 63}),
        ("coverage_penalty is 1.0; expected 0", ValueError, [5],
         {"num_beams": 2, "coverage_penalty": 1.0}),
    ],
)  # fmt: skip
def test_submit(
    decoding: lmdecode.Decoding,
    message: str,
    kind: type[Exception],
    prompt: Any,
    options: dict[str, Any],
) -> None:
    engine = decoding.engine(max_requests=4, capacity=64)
    with pytest.raises(kind, match=message):
        engine.submit(prompt, **{"max_new_tokens": 5, **options})
    assert not engine.has_work


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("max_requests is 0; expected 1 to 65536", {"max_requests": 0}),
        ("capacity is 0; expected 1 to", {"capacity": 0}),
        ("max_step_tokens is 2; expected at least 4, max_requests", {"max_step_tokens": 2}),
        ("dialect is 'other'; expected one of", {"dialect": "other"}),
    ],
)
def test_the_engine(decoding: lmdecode.Decoding, message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        decoding.engine(**{"max_requests": 4, "capacity": 64, **options})


def test_tokens_of_every_kind(decoding: lmdecode.Decoding) -> None:
    engine = decoding.engine(max_requests=4, capacity=64)
    want = engine.submit([5, 7], max_new_tokens=9, eos_token_id=[2, 9]).result()
    for prompt, ends in (
        (torch.tensor([5, 7], dtype=torch.int32), torch.tensor([2, 9])),
        (np.array([5, 7]), {2, 9}),
        ((5, 7), np.array([2, 9])),
    ):
        given = {"num_beams": None, "temperature": None, "length_penalty": None}
        assert engine.submit(prompt, max_new_tokens=9, eos_token_id=ends, **given).result() == want
    with torch.device("meta"):
        assert engine.submit([5, 7], max_new_tokens=9, eos_token_id=[2, 9]).result() == want


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("num_beams is given; expected None for a decoder-only model", {"num_beams": 2}),
        ("source is given; expected None for a decoder-only model", {"source": 2}),
    ],
)
def test_what_is_of_encoder_decoder_models(
    decoding: lmdecode.Decoding, message: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=message):
        decoding.engine(max_requests=4, capacity=64, **options)


@pytest.mark.parametrize("name", ["input_ids", "input_features", "memory", "generation_config"])
def test_inputs_of_encoder_decoder_models(decoding: lmdecode.Decoding, name: str) -> None:
    engine = decoding.engine(max_requests=4, capacity=64)
    with pytest.raises(ValueError, match=f"{name} is given; expected None for a decoder-only"):
        engine.submit([5], max_new_tokens=5, **{name: [5]})


def test_what_must_be_given(decoding: lmdecode.Decoding) -> None:
    engine = decoding.engine(max_requests=4, capacity=64)
    with pytest.raises(TypeError, match="max_new_tokens is of type NoneType"):
        engine.submit([5])
    with pytest.raises(TypeError, match="prompt_ids is of type NoneType"):
        engine.submit(max_new_tokens=5)

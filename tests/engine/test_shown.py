"""What models, engines, requests and batches show of themselves, and types of their calls."""

from __future__ import annotations

import typing

import pytest
import torch

import lmdecode
from tests.decoder.random_decoder import random_decoder
from tests.support.causal_models import random_model


@pytest.fixture(scope="module")
def decoding() -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(random_model("llama", "plain"), "int8")


def test_a_model_shows_its_class_sizes_and_formats(decoding: lmdecode.Decoding) -> None:
    layers = decoding.config.num_layers
    shown = f"LlamaForCausalLM, {layers} layers, 101 tokens, int8 weights, float32 caches"
    assert repr(decoding) == f"Decoding({shown})"


def test_an_engine_and_its_requests_show_how_far_they_are(decoding: lmdecode.Decoding) -> None:
    engine = decoding.engine(max_requests=1, capacity=64)
    room = "room for 1 of 64 tokens, not started"
    assert repr(engine) == f"Engine(0 requests running, 0 waiting, {room})"
    parameters = lmdecode.SamplingParameters(temperature=0.8, top_k=5, logit_bias={3: 1.0})
    first, second = (
        engine.submit([5, 7], max_new_tokens=2, seed=1, eos_token_id=(), **parameters)
        for _ in range(2)
    )
    assert repr(second) == "Request(prompt of 2 tokens, 0 new tokens, waiting)"
    engine.step()
    assert repr(engine) == f"Engine(1 requests running, 1 waiting, {room})"
    assert repr(first) == "Request(prompt of 2 tokens, 1 new tokens, running)"
    assert first.result().tokens == second.result().tokens
    assert repr(first) == "Request(prompt of 2 tokens, 2 new tokens, length)"
    with engine:
        assert repr(engine).endswith(" tokens, started)")


def test_engines_and_generate_take_the_same_parameters(decoding: lmdecode.Decoding) -> None:
    parameters = lmdecode.SamplingParameters(
        temperature=0.8, top_k=9, seed=4, repetition_penalty=1.2, min_tokens=None
    )
    engine = decoding.engine(max_requests=2, capacity=64)
    request = engine.submit([5, 7], max_new_tokens=8, eos_token_id=(), **parameters)
    del parameters["min_tokens"]  # generate() calls it min_new_tokens
    ids = torch.tensor([[5, 7]])
    generated = decoding.generate(ids, max_new_tokens=8, do_sample=True, **parameters)
    tokens = request.result().tokens
    assert generated[0, 2:].tolist() == tokens[: generated.shape[1] - 2]
    assert len(set(tokens)) > 2


def test_batches_show_their_places(decoding: lmdecode.Decoding) -> None:
    batch = decoding.batch(max_requests=3, capacity=16)
    batch.add([5, 7])
    assert repr(batch) == "CausalBatch(1 sequences running, 2 free places of 16 tokens)"
    config, weights = random_decoder("post_norm")
    other = lmdecode.Decoding(config, weights)
    shown = f"{config.num_layers} layers, {config.vocab_size} tokens, float32 weights"
    assert repr(other) == f"Decoding(encoder-decoder, {shown})"
    searches = other.batch(max_requests=3, capacity=8, num_beams=2, source=4)
    assert repr(searches) == "DecodingBatch(0 requests running, 3 free places)"


def test_the_kind_of_a_batch_follows_from_its_arguments() -> None:
    """So a type checker knows the methods of what ``Decoding.batch`` returns."""
    found = {
        frozenset(typing.get_type_hints(function)): typing.get_type_hints(function)["return"]
        for function in typing.get_overloads(lmdecode.Decoding.batch)
    }
    for names, kind in found.items():
        assert kind is (lmdecode.DecodingBatch if "num_beams" in names else lmdecode.CausalBatch)
    assert len(found) == 2


@pytest.mark.parametrize(
    "attention",
    [
        lmdecode.sliding_window_attention,
        lmdecode.sliding_window_decode,
        lmdecode.RingKVCache.attend,
    ],
)
def test_the_result_of_attention_follows_from_return_lse(attention: typing.Any) -> None:
    hints = [typing.get_type_hints(function) for function in typing.get_overloads(attention)]
    tensor = torch.Tensor
    assert {str(h["return_lse"]): h["return"] for h in hints} == {
        "typing.Literal[False]": tensor,
        "typing.Literal[True]": tuple[tensor, tensor],
        "<class 'bool'>": tensor | tuple[tensor, tensor],
    }

"""What an ``Engine`` of an encoder-decoder model refuses: the argument is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lmdecode
from tests.decoder.decoder_models import make_model, pair

pytest.importorskip("transformers")
from transformers import GenerationConfig


@pytest.fixture(scope="module")
def decoding() -> lmdecode.Decoding:
    return pair("bart")[1]


CONFIG = GenerationConfig(num_beams=2)


@pytest.mark.parametrize(
    ("message", "kind", "options"),
    [
        ("nothing is given as input; expected one of input_ids, input_features, memory",
         ValueError, {}),
        ("input_ids and memory is given as input; expected one of", ValueError,
         {"input_ids": [5], "memory": torch.ones(2, 32)}),
        ("input_ids has 0 tokens; expected 1 to 96", ValueError, {"input_ids": []}),
        ("input_ids has 17 tokens; expected at most 16 positions, source of the engine",
         ValueError, {"input_ids": [5] * 17}),
        (r"input_ids: tokens\[1\] is 64; expected 0 to 63", ValueError, {"input_ids": [5, 64]}),
        ("input_ids is of type str", TypeError, {"input_ids": "text"}),
        (r"input_ids has shape \[1, 2\]", ValueError,
         {"input_ids": torch.ones(1, 2, dtype=torch.int64)}),
        ("input_features is given; expected input_ids", ValueError,
         {"input_features": torch.ones(8, 40)}),
        (r"memory is \[2, 5\]; expected a tensor \[source, 32\]", ValueError,
         {"memory": torch.ones(2, 5)}),
        ("memory is list; expected a tensor", ValueError, {"memory": [[1.0] * 32]}),
        ("memory has 17 positions; expected at most 16", ValueError,
         {"memory": torch.ones(17, 32)}),
        ("memory has 0 positions; expected at least 1", ValueError, {"memory": torch.ones(0, 32)}),
        ("memory has dtype int64; expected floats", ValueError,
         {"memory": torch.ones(2, 32, dtype=torch.int64)}),
        ("prompt_ids is empty", ValueError, {"input_ids": [5], "prompt_ids": []}),
        ("prompt_ids has the token 64", ValueError, {"input_ids": [5], "prompt_ids": [64]}),
        ("prompt_ids has 1 tokens and max_new_tokens is 41; expected at most 41", ValueError,
         {"input_ids": [5], "max_new_tokens": 41}),
        ("max_new_tokens is of type NoneType", TypeError,
         {"input_ids": [5], "max_new_tokens": None}),
        ("num_beams is 4; expected at most 3, num_beams of the engine", ValueError,
         {"input_ids": [5], "num_beams": 4}),
        ("temprature is no parameter", TypeError, {"input_ids": [5], "temprature": 1.0}),
        ("length_penalty is given; expected none without num_beams", ValueError,
         {"input_ids": [5], "length_penalty": 1.0}),
        ("seed is 3; expected None beside generation_config", ValueError,
         {"input_ids": [5], "seed": 3, "generation_config": CONFIG}),
        ("top_p is 0.5; expected None beside generation_config", ValueError,
         {"input_ids": [5], "top_p": 0.5, "generation_config": CONFIG}),
        ("generation_config is of type int; expected a GenerationConfig", TypeError,
         {"input_ids": [5], "generation_config": 3, "max_new_tokens": None}),
        ("max_new_tokens is 0; expected", ValueError,
         {"input_ids": [5], "generation_config": CONFIG, "max_new_tokens": 0}),
        ("num_beams is 9; expected at most 3", ValueError,
         {"input_ids": [5], "generation_config": GenerationConfig(num_beams=9)}),
        ("do_sample is True; expected none", ValueError,
         {"input_ids": [5], "generation_config": GenerationConfig(do_sample=True)}),
    ],
)  # fmt: skip
def test_submit(
    decoding: lmdecode.Decoding, message: str, kind: type[Exception], options: dict[str, Any]
) -> None:
    engine = decoding.engine(max_requests=2, capacity=40, source=16, num_beams=3)
    with pytest.raises(kind, match=message):
        engine.submit(**{"max_new_tokens": 5, **options})
    assert not engine.has_work


@pytest.mark.parametrize(
    ("message", "kind", "options"),
    [
        ("capacity is 97; expected 1 to 96", ValueError, {"capacity": 97}),
        ("max_requests is 0; expected 1 to 65536", ValueError, {"max_requests": 0}),
        ("num_beams is 0; expected 1 to 1024", ValueError, {"num_beams": 0}),
        ("source is 0; expected 1 to", ValueError, {"source": 0}),
        ("source is of type str", TypeError, {"source": "8"}),
        ("dialect is 'other'; expected one of", ValueError, {"dialect": "other"}),
        ("store is given; expected none for an encoder-decoder model", ValueError, {"store": 3}),
    ],
)
def test_the_engine(
    decoding: lmdecode.Decoding, message: str, kind: type[Exception], options: dict[str, Any]
) -> None:
    with pytest.raises(kind, match=message):
        decoding.engine(**{"max_requests": 4, "capacity": 64, "source": 16, **options})


def test_drafts(decoding: lmdecode.Decoding) -> None:
    for options in ({"assistant_model": decoding}, {"prompt_lookup_num_tokens": 2}):
        (name,) = options
        with pytest.raises(ValueError, match=f"{name} is given; expected None for an encoder-d"):
            decoding.engine(max_requests=2, capacity=40, source=16, **options)  # type: ignore[arg-type]


def test_features() -> None:
    engine = pair("whisper")[1].engine(max_requests=2, capacity=40)
    for value, message in (
        (torch.ones(8, 39), r"input_features has shape \[8, 39\]; expected \[8, 40\]"),
        (torch.ones(1, 8, 40), r"input_features has shape \[1, 8, 40\]; expected \[8, 40\]"),
        (torch.ones(8, 40).long(), "input_features has dtype int64; expected floats"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit([2], input_features=value, max_new_tokens=4)
    with pytest.raises(TypeError, match="input_features is of type str"):
        engine.submit([2], input_features="sound", max_new_tokens=4)
    with pytest.raises(ValueError, match="input_ids is given; expected input_features"):
        engine.submit([2], input_ids=[5], max_new_tokens=4)


def test_what_a_model_does_not_say() -> None:
    decoding = lmdecode.Decoding.from_pretrained(make_model("t5"))
    with pytest.raises(TypeError, match="source is missing; expected an int"):
        decoding.engine(max_requests=4, capacity=64)
    decoding.model, decoding.encoder = None, None
    engine = decoding.engine(max_requests=4, capacity=64, source=9)
    memory = torch.ones(2, 24)
    with pytest.raises(ValueError, match="input_ids is given; expected memory"):
        engine.submit(input_ids=[5], max_new_tokens=4)
    with pytest.raises(ValueError, match="prompt_ids is None; expected tokens"):
        engine.submit(memory=memory, max_new_tokens=4)
    assert len(engine.submit([1], memory=memory, max_new_tokens=4).result().tokens) == 4

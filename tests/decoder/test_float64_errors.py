"""Errors against float64 are those of torch, for models that make much of the last bits."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import lmdecode
from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.reference.causal import causal_logits
from tests.decoder.decoder_models import make_inputs, pair
from tests.support.causal_models import random_model, random_tokens

pytest.importorskip("transformers")

_SEEDS = 12
_ENCODER_DECODER = ("marian", "mt5", "t5", "t5_gated")


def _distance(values: Tensor, truth: Tensor) -> float:
    return (values.double() - truth.double()).abs().max().item()


def _of_encoder_decoder(kind: str) -> Iterator[tuple[float, float]]:
    """Yield the distances of our logits of a step, and of the model's, for each seed."""
    options: dict[str, Any] = dict(
        max_new_tokens=9, min_new_tokens=9, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    for seed in range(_SEEDS):
        model, decoding = pair(kind, seed)
        inputs = make_inputs(kind, 3, seed + 1)
        memory = model.get_encoder()(**inputs)
        exact_memory = copy.copy(memory)
        exact_memory.last_hidden_state = memory.last_hidden_state.double()
        exactly = copy.deepcopy(model).double()
        ours, theirs, exact = (
            generate(**inputs, **options, encoder_outputs=given)
            for generate, given in (
                (decoding.generate, copy.copy(memory)),
                (model.generate, copy.copy(memory)),
                (exactly.generate, exact_memory),
            )
        )
        assert ours.sequences.tolist() == theirs.sequences.tolist() == exact.sequences.tolist()
        truth = torch.stack(exact.logits)
        yield (
            _distance(torch.stack(ours.logits), truth),
            _distance(torch.stack(theirs.logits), truth),
        )


def _of_decoder_only(kind: str) -> Iterator[tuple[float, float]]:
    """Yield the distances of our logits of a prompt, and of the model's, for each seed."""
    from lmdecode.readers.transformers.models import parts_of

    for seed in range(_SEEDS):
        model = random_model(kind, "plain", seed)
        config, weights = parts_of(model)
        tokens = random_tokens(40, seed)
        truth = causal_logits(config, weights, tokens, dtype=torch.float64)
        packed: Any = lmdecode.Decoding.from_pretrained(model).decoder
        entry = torch.tensor([[0, len(tokens), 1, len(tokens)]])
        ours = CausalCaches(packed, 1, len(tokens)).forward(tokens, entry, len(tokens))
        yield _distance(ours, truth), _distance(model(tokens[None]).logits[0], truth)


@torch.no_grad()
@pytest.mark.parametrize(
    "kind", ["marian", "mt5", "t5", "t5_gated", "granite", "qwen3", "qwen3_5_moe_text"]
)
def test_errors_are_those_of_torch(kind: str) -> None:
    """The mean of the largest, over models and inputs, is at most twice torch's."""
    found = list((_of_encoder_decoder if kind in _ENCODER_DECODER else _of_decoder_only)(kind))
    assert len(found) == _SEEDS and min(min(pair) for pair in found) > 0
    ratio = math.exp(sum(math.log(ours / theirs) for ours, theirs in found) / len(found))
    assert ratio < 2

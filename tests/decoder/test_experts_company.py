"""Experts in every format: a row has the bits that it has alone, in any batch, chunk and thread."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lmdecode.linear.formats import FORMATS
from lmdecode.linear.quantized_weight import KINDS, QuantizedWeight
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.models.weights import ExpertMatrices
from lmdecode.readers.transformers.causal_models import causal_model_of
from lmdecode.reference.causal import causal_logits
from tests.decoder.causal_steps import Entry, new_caches, prompt_logits, step
from tests.support.causal_models import model_of, random_config, random_tokens
from tests.support.op_contract import on_threads

# Experts of several panels, of which threads take parts; blocks of 256 elements.
_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "variant": "few of many", "hidden_size": 256, "moe_intermediate_size": 256,
        "num_experts": 24, "head_dim": 16,
    },
    "gpt_oss": {"variant": "plain", "hidden_size": 256, "intermediate_size": 256, "head_dim": 16},
}  # fmt: skip
LENGTH, NEW = 97, 33
COUNTS = (1, 2, 3)  # of threads
formats = pytest.mark.parametrize("weight_format", [*FORMATS, *KINDS])


def _in_blocks(matrices: Any, kind: str) -> Any:
    from tests.support.gguf_files import quantized

    blocks = [
        QuantizedWeight(torch.from_numpy(quantized(matrix.detach().numpy(), kind, seed)), kind)
        for seed, matrix in enumerate(matrices)
    ]
    return ExpertMatrices(len(blocks), blocks.__getitem__)


@functools.cache
def _model(architecture: str, weight_format: str) -> PackedCausalModel:
    config, weights = causal_model_of(model_of(random_config(architecture, **_SIZES[architecture])))
    if weight_format in FORMATS:
        return PackedCausalModel(config, weights, weight_format)
    layers = [
        layer._replace(
            experts_gate=_in_blocks(layer.experts_gate, weight_format),
            experts_up=_in_blocks(layer.experts_up, weight_format),
            experts_down=_in_blocks(layer.experts_down, weight_format),
        )
        for layer in weights.layers
    ]
    weights = weights._replace(layers=layers)
    model = PackedCausalModel(config, weights, None)
    text = random_tokens(9)
    got = prompt_logits(new_caches(model), text)
    expected = causal_logits(config, weights, text)
    assert (got - expected).norm() < 0.1 * expected.norm()  # inputs are rounded
    return model


def _check(model: PackedCausalModel, in_either_way: bool = True) -> None:
    """Logits of a text are the same on any number of threads and in parts."""
    text, tokens = random_tokens(LENGTH), random_tokens(NEW, 1)

    def alone() -> tuple[Tensor, list[Tensor]]:
        steps = [step(new_caches(model), Entry(0, token, False))[0] for token in tokens.split(1)]
        return prompt_logits(new_caches(model), text), steps

    def in_pieces(size: int) -> None:
        pieces = [min(size, LENGTH - at) for at in range(0, LENGTH, size)]
        assert prompt_logits(new_caches(model), text, *pieces).equal(expected), size

    def in_steps_of(size: int) -> None:
        assert prompt_logits(new_caches(model, max_rows=size), text).equal(expected), size

    def in_a_batch_of(rows: int) -> None:
        caches = new_caches(model, rows, 32)
        entries = [Entry(i, token, False) for i, token in enumerate(tokens[:rows].split(1))]
        assert torch.cat(step(caches, *entries)).equal(torch.cat(each[:rows])), rows

    expected, each = on_threads(alone, COUNTS)
    for at, size in enumerate((1, 2, 7, 31, 64)):
        for way, read in enumerate((in_pieces, in_steps_of)):
            if in_either_way or way == at % 2:
                on_threads(functools.partial(read, size), [COUNTS[(at + way) % 3]])
    for rows in (2, 3, 5, 8, 17, NEW):
        on_threads(functools.partial(in_a_batch_of, rows), COUNTS)


@formats
def test_any_batch_any_chunks_any_threads(weight_format: str) -> None:
    _check(_model("qwen3_moe", weight_format))


@pytest.mark.parametrize("weight_format", [*FORMATS, "MXFP4"])
def test_clamped_experts_with_biases(weight_format: str) -> None:
    _check(_model("gpt_oss", weight_format))


CAPABILITY_SCRIPT = """
from tests.decoder import test_experts_company as tests

for weight_format in (*tests.FORMATS, *tests.KINDS):
    tests._check(tests._model("qwen3_moe", weight_format), in_either_way=False)
for weight_format in (*tests.FORMATS, "MXFP4"):
    tests._check(tests._model("gpt_oss", weight_format), in_either_way=False)
"""


@pytest.mark.slow
def test_cpu_capability(run_at_capability: Callable[[str], list[str]]) -> None:
    assert run_at_capability(CAPABILITY_SCRIPT) == []

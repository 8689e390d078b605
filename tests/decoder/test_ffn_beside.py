"""A feed-forward layer beside attention: the op is the reference, with the same bits anywhere."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from lmdecode.linear.formats import FORMATS
from lmdecode.models.configs import CausalConfig
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.models.weights import CausalWeights
from lmdecode.readers.transformers.causal_models import causal_model_of
from lmdecode.reference.causal import causal_logits
from tests.decoder.causal_steps import (
    WIDE,
    Entry,
    generated_logits,
    new_caches,
    packed,
    parts,
    prompt_logits,
    step,
)
from tests.decoder.test_causal_forward import (
    LENGTH,
    check_company,
    check_format_of_weights,
    check_near,
    error,
)
from tests.support.causal_models import model_of, random_config, random_tokens
from tests.support.op_contract import on_threads
from tests.support.records import with_entries

# No norms behind sublayers, and these; none before; no gate; a mixer, alone and beside attention;
# layers that leave the other rows before their feed-forward layer, and have inputs of their own.
CASES = [
    ("llama", "plain"),
    ("gemma2", "plain"),
    ("olmo2", "groups, biases"),
    ("gpt2", "plain"),
    ("lfm2", "convolutions at the ends"),
    ("falcon_h1", "multipliers"),
    ("gemma4_text", "shared keys, inputs of layers"),
]
EXPERTS = ("qwen3_moe", "plain")
cases = pytest.mark.parametrize("case", CASES, ids=str)


def beside(case: tuple[str, str]) -> tuple[CausalConfig, CausalWeights]:
    """Return a model with the switch alone turned."""
    config, weights = parts(*case)
    return dataclasses.replace(config, ffn_beside=True), weights


@functools.cache
def packed_beside(case: tuple[str, str], weight_format: str = "float32") -> PackedCausalModel:
    return PackedCausalModel(*beside(case), weight_format)


@functools.cache
def reference_logits(case: tuple[str, str]) -> Tensor:
    return causal_logits(*beside(case), random_tokens(LENGTH))


@cases
def test_op_is_the_reference(case: tuple[str, str]) -> None:
    text, expected = random_tokens(LENGTH), reference_logits(case)
    assert error(causal_logits(*parts(*case), text), expected) > 0.1
    for read in (prompt_logits, generated_logits):
        check_near(read(new_caches(packed_beside(case)), text), expected)


@pytest.mark.parametrize("weight_format", ["bfloat16", "int8", "int4"])
@cases
def test_formats_of_weights(
    case: tuple[str, str], weight_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, weights, exact = (
        packed_beside(case, weight_format),
        parts(*case)[1],
        reference_logits(case),
    )
    check_format_of_weights(model, weights, weight_format, exact, monkeypatch)


@cases
def test_a_text_may_be_read_in_any_parts(case: tuple[str, str]) -> None:
    """Of entries, and of the rows that are computed together; with logits of one token, too."""
    model, text = packed_beside(case), random_tokens(LENGTH)
    for read in (prompt_logits, generated_logits):
        expected = read(new_caches(model), text, LENGTH)
        for max_rows, pieces in ((1, [LENGTH]), (7, [20, LENGTH - 20]), (512, [1, 9, LENGTH - 10])):
            assert read(new_caches(model, max_rows=max_rows), text, *pieces).equal(expected)
        last = step(new_caches(model), Entry(0, text, read is prompt_logits, 1))[0]
        assert last.equal(expected[-1:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_alone_and_in_any_company(weight_format: str, dtype: str) -> None:
    for case in CASES:
        check_company(packed_beside(case, weight_format), 3, 29, dtype=dtype)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_any_number_of_threads(weight_format: str) -> None:
    config, weights = causal_model_of(model_of(random_config("gemma2", "plain", **WIDE)))
    config = dataclasses.replace(config, ffn_beside=True)
    model = PackedCausalModel(config, weights, weight_format)

    def logits() -> Tensor:
        caches = new_caches(model, 2, max_rows=128)
        prompt, generated = random_tokens(150), random_tokens(3)
        return torch.cat(step(caches, Entry(0, prompt), Entry(1, generated, False)))

    on_threads(logits, (1, 2, 5))


def test_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="ffn_beside is True; expected False with experts"):
        beside(EXPERTS)
    with pytest.raises(TypeError, match="ffn_beside is of type int"):
        dataclasses.replace(parts(*EXPERTS)[0], ffn_beside=1)


@pytest.mark.parametrize(
    ("case", "value", "message"),
    [(EXPERTS, True, "is 1; expected 0 with experts"), (CASES[0], 2, "is 2; expected 0 to 1")],
)
def test_numbers_of_the_record(case: tuple[str, str], value: Any, message: str) -> None:
    memory = with_entries(packed(*case).memory, {"config.ffn_beside": value})
    with pytest.raises(ValueError, match=f"^causal_workspace_bytes: config.ffn_beside {message}"):
        torch.ops.lmdecode.causal_workspace_bytes(memory, [1, 1, 1])

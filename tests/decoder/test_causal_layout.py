"""Where the ops read what ``PackedCausalModel`` writes: numbers that both sides have."""

import re

import pytest
import torch

from lmdecode.decoder.causal_config import CausalLayerWeights, CausalWeights
from lmdecode.decoder.causal_weights import (
    _EMBEDDING_FORMAT,
    _LOGITS,
    _NORMS_ALL_HEADS,
    _NUM_COLUMNS,
    _NUM_MODEL_PARTS,
    _NUM_NUMBERS,
    IS_BFLOAT16,
    IS_FLOAT32,
    IS_PACKED,
)
from tests.decoder.causal_steps import Entry, forward_arguments, new_caches, packed
from tests.support.causal_models import random_tokens

ops = torch.ops.lmdecode
LAYOUT, CONFIG = 1, 2
MODEL_PARTS = ("embedding", "positions", "rotary", "final_norm_gamma", "final_norm_beta", "logits",
               "logits_bias", "per_layer_embedding", "per_layer_projection",
               "per_layer_norm_gamma", "embedding_norm_gamma", "hidden_norm_gamma",
               "embedding_projection", "hidden_projection")  # fmt: skip
GEMMA4 = ("gemma4_text", "shared keys, inputs of layers")
WITH_NORMS = ("gemma4_text", "all experts")
FAR = 1 << 40  # a multiple of 64, behind every memory


def _error(
    row: int,
    column: int,
    *,
    embedding_format: int | None = None,
    case: tuple[str, str] = ("gemma3_text", "plain"),
) -> str:
    """Return what the op says of a layout that puts a part behind the memory."""
    model = packed(*case, "int8")
    arguments = forward_arguments(new_caches(model, 1, 32), Entry(0, random_tokens(1)))
    arguments[LAYOUT] = arguments[LAYOUT].clone()
    arguments[LAYOUT][row, column] = FAR
    arguments[CONFIG] = list(arguments[CONFIG])
    if embedding_format is not None:
        arguments[CONFIG][_EMBEDDING_FORMAT] = embedding_format
    with pytest.raises(ValueError, match=r"^causal_forward_: ") as error:
        ops.causal_forward_(*arguments)
    return str(error.value).removeprefix("causal_forward_: ")


def test_columns_of_the_model() -> None:
    assert set(MODEL_PARTS) == {*CausalWeights._fields} - {"layers", "mtp"}
    assert len(MODEL_PARTS) == _NUM_MODEL_PARTS and MODEL_PARTS[_LOGITS] == "logits"
    for column, name in enumerate(MODEL_PARTS):
        # The model is tied: its embedding is looked at where it is one of its own.
        own = IS_BFLOAT16 if name == "embedding" else None
        case = GEMMA4 if name.startswith("per_layer") else ("gemma3_text", "plain")
        assert _error(0, column, embedding_format=own, case=case).startswith(
            f"layout has {name} at byte {FAR}; expected"
        )


OF_STATES = ("convolution", "convolution_bias", "decay", "decay_bias", "mixer_norm_gamma",
             "mixer_skip")  # fmt: skip


@pytest.mark.parametrize("row", [1, 3])
def test_columns_of_a_layer(row: int) -> None:
    fields = CausalLayerWeights._fields
    assert _NUM_COLUMNS == _NUM_NUMBERS + len(fields)
    first_of_experts = _NUM_NUMBERS + fields.index("router")
    first_of_norms = _NUM_NUMBERS + fields.index("router_norm_gamma")
    for column, name in enumerate(fields, start=_NUM_NUMBERS):
        if name in OF_STATES:
            continue
        case = ("gemma3_text" if column < first_of_experts else "gpt_oss", "plain")
        if column >= first_of_norms:
            case = GEMMA4 if name.startswith(("per_layer", "layer")) else WITH_NORMS
        error = _error(row, column, case=case)
        assert error.startswith(f"layout has {name} at byte {FAR}; expected")
    assert _error(row, first_of_experts) == f"layout[{row}] has experts; expected none"
    numbers = ("window", "rotary", "cache", "cache_layer", "keys", "ffn_size")
    assert len(numbers) == _NUM_NUMBERS
    for column, name in enumerate(numbers):
        assert _error(row, column).startswith(f"layout[{row}].{name} is {FAR}; expected")


def test_columns_of_a_layer_with_a_state() -> None:
    fields = CausalLayerWeights._fields
    for column, name in enumerate(fields[: fields.index("router")], start=_NUM_NUMBERS):
        error = _error(1, column, case=("qwen3_5_text", "plain"))
        assert error.startswith(f"layout has {name} at byte {FAR}; expected")
    mamba2 = ("granitemoehybrid", "experts, multipliers")
    for name in (*OF_STATES, "experts_up", "ffn_up"):
        error = _error(1, _NUM_NUMBERS + fields.index(name), case=mamba2)
        assert error.startswith(f"layout has {name} at byte {FAR}; expected")
    both = ("falcon_h1", "norm behind the gate, biases")
    for name in ("qkv", "attention_out", *OF_STATES):
        error = _error(2, _NUM_NUMBERS + fields.index(name), case=both)
        assert error.startswith(f"layout has {name} at byte {FAR}; expected")
    assert _error(1, 2, case=both) == f"layout[1].cache is {FAR}; expected 0 to 1"
    assert _error(1, 4, case=both) == f"layout[1].keys is {FAR}; expected 0 to 0"
    error = _error(1, 3, case=("qwen3_5_text", "plain"))
    assert error.startswith(f"layout[1].cache_layer is {FAR}; expected")


def test_formats_of_an_embedding() -> None:
    config = packed("gemma3_text", "plain", "int8").config
    numbers = config.vocab_size * config.model_size
    for embedding_format, size in ((IS_FLOAT32, 4), (IS_BFLOAT16, 2)):
        found = re.search(r"and (\d+) bytes", _error(0, 0, embedding_format=embedding_format))
        assert found is not None and int(found[1]) == size * numbers
    found = re.search(r"and (\d+) bytes", _error(0, 0, embedding_format=IS_PACKED))
    assert found is not None and int(found[1]) == 64  # the header, which says how many there are


def test_numbers_of_the_config() -> None:
    arguments = forward_arguments(
        new_caches(packed("gemma3_text", "plain", "int8"), 1, 32), Entry(0, random_tokens(1))
    )
    names = {_EMBEDDING_FORMAT: "embedding_format", _NORMS_ALL_HEADS: "norms_all_heads"}
    for place, name in names.items():
        arguments[CONFIG] = list(packed("gemma3_text", "plain", "int8").sizes)
        arguments[CONFIG][place] = 9
        with pytest.raises(ValueError, match=f"^causal_forward_: config.{name} is 9; expected 0"):
            ops.causal_forward_(*arguments)

"""Gemma 4: what its layers share, its two sizes of heads, and the inputs of its layers."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lmdecode
from lmdecode.linear.formats import FORMATS
from lmdecode.models.packed_causal import PackedCausalModel
from tests.decoder.causal_steps import (
    Entry,
    generated_logits,
    new_caches,
    packed,
    parts,
    prompt_logits,
    step,
)
from tests.support.causal_models import (
    VOCAB,
    WINDOW,
    model_of,
    random_config,
    random_model,
    random_tokens,
)
from tests.support.op_contract import on_threads
from tests.support.records import with_entries

SHARED = ("gemma4_text", "shared keys, inputs of layers")
DENSE = ("gemma4_text", "values are keys, biases, untied")
EXPERTS = ("gemma4_text", "experts, shared keys, inputs of layers")
CASES = pytest.mark.parametrize("case", [SHARED, DENSE, EXPERTS], ids=str)
NEW: dict[str, Any] = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}


def test_layers_that_share_keys_keep_none() -> None:
    """A cache has the layers alone that have keys of their own, with heads of its kind."""
    model = packed(*SHARED)
    assert model.config.shared_keys == (None, None, None, 2, 1)
    assert model.cache_layers == [1, 2]
    assert [(heads.num_kv_heads, heads.head_size) for heads in model.cache_heads] == [
        (2, 20), (2, 12),
    ]  # fmt: skip
    caches = new_caches(model)
    prompt_logits(caches, random_tokens(9))
    assert len(caches.read(0)) == 4  # parts: two of the wide layer, see CacheParts


def test_keys_that_are_values_are_projected_once() -> None:
    config, weights = parts(*DENSE)
    assert config.keys_are_values == (False, True, False, False, True)
    assert [len(layer.qkv) for layer in weights.layers] == [144, 100, 144, 144, 100]


@CASES
def test_a_prompt_in_chunks_on_any_threads(case: tuple[str, str]) -> None:
    """With logits of its last token: the others leave before the layers that share keys."""
    model, text = packed(*case), random_tokens(120)

    def read(chunk: int) -> Tensor:
        caches, pieces = new_caches(model, max_rows=50), text.split(chunk)
        for piece in pieces[:-1]:
            step(caches, Entry(0, piece, num_logits=0))
        last = step(caches, Entry(0, pieces[-1], num_logits=1))[0]
        return torch.cat((last, generated_logits(caches, random_tokens(12, 1))))

    expected = read(len(text))
    for chunk in (1, 2, 7, 32, 97):
        assert on_threads(functools.partial(read, chunk), (1, 2)).equal(expected), chunk


@CASES
@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16", "int8"])
def test_states_are_written_elsewhere(case: tuple[str, str], cache_dtype: str) -> None:
    """Keys and values of a text go on in other caches, as those of a shared beginning do."""
    model, text = packed(*case), random_tokens(3 * WINDOW)
    caches, others = (new_caches(model, dtype=cache_dtype) for _ in range(2))
    prompt_logits(caches, text)
    others.write(0, len(text), caches.read(0))
    more = random_tokens(9, 1)
    assert generated_logits(others, more).equal(generated_logits(caches, more))


@CASES
@pytest.mark.parametrize("dtype", sorted(FORMATS))
def test_saved_models(case: tuple[str, str], dtype: str, tmp_path: Path) -> None:
    decoding = lmdecode.Decoding.from_pretrained(random_model(*case), dtype)
    decoding.save(tmp_path)
    loaded, ids = lmdecode.Decoding.load(tmp_path, verify=True), random_tokens(12)[None]
    assert loaded.config == decoding.config
    assert loaded.generate(ids, **NEW, num_beams=2).equal(
        decoding.generate(ids, **NEW, num_beams=2)
    )


@CASES
def test_folders(case: tuple[str, str], tmp_path: Path) -> None:
    """Scales of layers are read, which are buffers; a folder without them has ones."""
    from safetensors.torch import load_file, save_file

    model, ids = random_model(*case), random_tokens(12)[None]
    model.save_pretrained(tmp_path)
    decoding = lmdecode.Decoding.from_pretrained(tmp_path)
    assert decoding.generate(ids, **NEW).equal(model.generate(ids, **NEW))
    tensors = load_file(tmp_path / "model.safetensors")
    scales = [name for name in tensors if name.endswith("layer_scalar")]
    assert len(scales) == model.config.num_hidden_layers
    for name in scales:
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    same = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    decoding = lmdecode.Decoding.from_pretrained(tmp_path)
    assert decoding.generate(ids, **NEW).equal(same.generate(ids, **NEW))


@CASES
def test_an_engine_with_a_beginning_in_common(case: tuple[str, str]) -> None:
    decoding = lmdecode.Decoding.from_pretrained(random_model(*case))
    begin = random_tokens(60).tolist()
    prompts = [begin + random_tokens(3 + i, i + 1).tolist() for i in range(4)]
    options: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"seed": 5, "top_k": 20}, {}]

    def submitted(engine: lmdecode.Engine, i: int) -> Any:
        return engine.submit(prompts[i], max_new_tokens=15, **options[i])

    expected = [
        submitted(decoding.engine(max_requests=4, capacity=120), i).result().tokens
        for i in range(4)
    ]
    engine = decoding.engine(max_requests=8, capacity=120)
    first = submitted(engine, 0).result().tokens
    requests = [submitted(engine, i) for i in range(1, 4)]
    assert [first, *(request.result().tokens for request in requests)] == expected


@CASES
def test_drafts_from_the_prompt(case: tuple[str, str]) -> None:
    """Rows of a draft are let go of again, in both kinds of caches."""
    decoding = lmdecode.Decoding.from_pretrained(random_model(*case))
    ids = random_tokens(5).repeat(6)[None]
    options: dict[str, Any] = {
        **NEW, "max_new_tokens": 40, "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    expected = decoding.generate(ids, **options)
    for num_tokens in (1, 7):
        got = decoding.generate(ids, **options, prompt_lookup_num_tokens=num_tokens)
        assert got.sequences.equal(expected.sequences)
        assert all(map(torch.equal, got.logits, expected.logits))


@pytest.mark.parametrize(
    ("case", "cache_dtype", "changes", "parts_of_layers", "shape"),
    [
        (SHARED, "float32", {}, (1, 2, 1), (2, 12)),  # a wide row is cut in two
        (SHARED, "int8", {}, (1, 2, 1), (2, 16)),  # scales are in the first part alone
        (SHARED, "float32", {"global_head_dim": 12}, (1, 1, 1), (2, 12)),
        (DENSE, "bfloat16", {}, (4, 2, 4, 4, 2), (1, 12)),  # 4 heads, and one
    ],
)
def test_layers_are_stored_in_parts_of_one_shape(
    case: tuple[str, str], cache_dtype: str, changes: dict[str, int],
    parts_of_layers: tuple[int, ...], shape: tuple[int, int],
) -> None:  # fmt: skip
    model = model_of(random_config(*case, **changes))
    decoding = lmdecode.Decoding.from_pretrained(model, cache_dtype=cache_dtype)
    fingerprint = decoding.fingerprint()
    assert (fingerprint.num_kv_heads, fingerprint.head_size) == shape
    windows = zip(decoding.decoder.config.windows, parts_of_layers, strict=False)
    assert fingerprint.windows == tuple(w for w, count in windows for _ in range(count))


def test_images_are_refused() -> None:
    decoding = lmdecode.Decoding.from_pretrained(random_model("gemma4", "text part"))
    ids = random_tokens(5)[None]
    for name in ("pixel_values", "pixel_values_videos", "input_features"):
        with pytest.raises(ValueError, match=f"^{name}: expected None, as Decoding takes text al"):
            decoding.generate(ids, **{name: torch.zeros(1, 4, 48)}, **NEW)


def test_layers_of_more_kinds_are_refused() -> None:
    model = model_of(random_config(*SHARED))
    model.model.layers[0].self_attn.num_key_value_groups = 4
    message = "alike in their window have 1 heads of 12, 12 turned and 2 heads of 12, 12 turned"
    with pytest.raises(ValueError, match=message):
        lmdecode.Decoding.from_pretrained(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shared_keys": (None,) * 4}, "shared_keys has 4 entries; expected num_layers, 5, or no"),
        ({"shared_keys": (None, None, None, 3, 1)}, "shared_keys is 3; expected 0 to 2, a layer"),
        ({"shared_keys": (None, None, None, 1, 1)}, r"shared_keys\[3\] is 1; expected a layer"),
        ({"shared_keys": (None, None, None, 2, 3)}, r"shared_keys\[4\] is 3; expected a layer"),
        ({"keys_are_values": (False,) * 4 + (True,)}, r"shared_keys\[4\] is 1; expected"),
        ({"attention_gate": True, "keys_are_values": (True,) * 5}, r"keys_are_values\[0\] is True"),
        ({"ffn_sizes": (44, 44, 44, 88, 89)}, "ffn_sizes is 89; expected 1 to ffn_size"),
        ({"global_head_size": 0}, "global_head_size is 0"),
        ({"global_num_kv_heads": 3}, "global_num_kv_heads is 3; expected a divisor of num_heads"),
        ({"global_rotary_size": 22}, "global_rotary_size is 22; expected 0 to global_head_size"),
        ({"global_rotary_size": 0}, "global_rotary_size is 0; expected an even number above 0"),
        ({"per_layer_size": -1}, "per_layer_size is -1"),
        ({"per_layer_epsilon": -0.5}, "per_layer_epsilon is -0.5; expected .* at least 0"),
        ({"value_norm": 1}, "value_norm is of type int"),
    ],
)
def test_configs_that_make_no_sense(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        dataclasses.replace(parts(*SHARED)[0], **change)


@pytest.mark.parametrize(
    ("case", "field", "message"),
    [
        (SHARED, "per_layer_gate", r"layers\[0\].per_layer_gate is None; expected a tensor"),
        (SHARED, "per_layer_out", r"layers\[0\].per_layer_out is None; expected a tensor"),
        (EXPERTS, "experts_norm_gamma", r"layers\[0\] have some of router_norm_gamma, .* or all"),
        (EXPERTS, "ffn_out_norm_gamma", r"layers\[0\] have some of router_norm_gamma"),
    ],
)
def test_weights_that_are_missing(case: tuple[str, str], field: str, message: str) -> None:
    config, weights = parts(*case)
    layers = [weights.layers[0]._replace(**{field: None}), *weights.layers[1:]]
    with pytest.raises(ValueError, match=f"weights.{message}"):
        PackedCausalModel(config, weights._replace(layers=layers))


def test_a_table_of_other_models() -> None:
    config, weights = parts(*SHARED)
    assert weights.per_layer_embedding is not None
    table = weights.per_layer_embedding[: VOCAB - 1]
    with pytest.raises(ValueError, match=r"per_layer_embedding has shape \[100, 50\]; expected"):
        PackedCausalModel(config, weights._replace(per_layer_embedding=table))
    none = dataclasses.replace(config, per_layer_size=0)
    with pytest.raises(ValueError, match="per_layer_embedding was given; expected none"):
        PackedCausalModel(none, weights)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("config.global_head_size", 0, "is 0"),
        ("config.global_num_kv_heads", 3, "is 3; expected a divisor of num_heads, 4"),
        ("config.global_rotary_size", 22, "is 22; expected an even number up to 20"),
        ("config.value_norm", 2, "is 2; expected 0 to 1"),
        ("config.per_layer_size", -1, "is -1"),
        ("per_layer_format", 0, "is 0; expected 1 to 3"),
        ("config.keys_are_values", [3] * 5, "is 3; expected 0 to 1"),
        ("config.shared_keys", [5] * 5, "is 5; expected 0 to 4"),
        ("config.ffn_sizes", [0] * 5, "is 0; expected 1 to 88"),
    ],
)
def test_numbers_of_the_record(name: str, value: Any, message: str) -> None:
    memory = with_entries(packed(*SHARED).memory, {name: value})
    with pytest.raises(ValueError, match=f"^causal_workspace_bytes: {name} {message}"):
        torch.ops.lmdecode.causal_workspace_bytes(memory, [1, 1, 1])

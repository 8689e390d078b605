"""Mamba-2 layers: every switch against reference and transformers, and the same bits anywhere."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from lmdecode.models.checks import linear_shapes, state_shapes
from lmdecode.models.configs import CausalConfig
from lmdecode.models.mixers import Mamba2
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.models.weights import CausalLayerWeights, CausalWeights
from lmdecode.readers.transformers.causal_models import causal_model_of
from lmdecode.reference.causal import causal_logits
from tests.decoder.causal_steps import (
    Entry,
    forward_arguments,
    generated_logits,
    new_caches,
    parts,
    prompt_logits,
    step,
)
from tests.support.causal_models import model_of, random_config, random_tokens
from tests.support.records import with_entries

CASE = ("granitemoehybrid", "experts, multipliers")
TEXT = random_tokens(75, 3)

# Sizes around what vectors and tasks have, and every switch.
MIXERS = {
    "one column": Mamba2(1, 1, 1, 1, 1),
    "odd": Mamba2(3, 6, 13, 41, 3, norm_first=True),
    "a task and a bit": Mamba2(1, 3, 16, 33, 4, least_step=0.3, most_step=0.9),
    "whole tasks": Mamba2(2, 4, 32, 64, 4, least_step=0.5),
    "wide": Mamba2(5, 5, 130, 96, 16, most_step=0.7),
}


def model_with(mixer: Mamba2, *, norm: bool = True) -> tuple[CausalConfig, CausalWeights]:
    """Return a model that has this mixer in its first and third layer."""
    config, weights = parts(*CASE)
    torch.manual_seed(0)
    size, heads = config.model_size, mixer.num_heads

    def of(layer: CausalLayerWeights) -> CausalLayerWeights:
        if layer.convolution is None:
            return layer
        return layer._replace(
            qkv=torch.randn(mixer.projected, size) * size**-0.5,
            qkv_bias=torch.randn(mixer.projected) * 0.3,
            attention_out=torch.randn(size, mixer.mixed) * mixer.mixed**-0.5,
            attention_out_bias=torch.randn(size) * 0.2,
            convolution=torch.randn(mixer.channels, mixer.taps) * 0.5,
            convolution_bias=torch.randn(mixer.channels) * 0.3,
            decay=-torch.rand(heads) - 0.05,
            decay_bias=torch.randn(heads),
            mixer_skip=torch.randn(heads),
            mixer_norm_gamma=torch.rand(mixer.mixed) + 0.5 if norm else None,
        )

    config = dataclasses.replace(config, mixers=(mixer, None, mixer))
    return config, weights._replace(layers=[of(weights.layers[i]) for i in range(3)])


def check(mixer: Mamba2, *, norm: bool = True) -> None:
    config, weights = model_with(mixer, norm=norm)
    model = PackedCausalModel(config, weights, "float32")
    expected = causal_logits(config, weights, TEXT, dtype=torch.float64).float()
    got = prompt_logits(new_caches(model), TEXT)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    one_by_one = generated_logits(new_caches(model), TEXT)
    torch.testing.assert_close(one_by_one, expected, rtol=0, atol=1e-4)
    for chunk in (1, 2, 3, 4, 5, 32):
        pieces = [chunk] * (75 // chunk) + ([75 % chunk] if 75 % chunk else [])
        assert prompt_logits(new_caches(model), TEXT, *pieces).equal(got), chunk
    kept = new_caches(model, rollback=7, checkpoint_interval=16, max_rows=29)
    assert prompt_logits(kept, TEXT).equal(got)
    kept.truncate([0], [70])
    assert prompt_logits(kept, TEXT[70:]).equal(got[70:])


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no norm"])
def test_op_is_the_reference(name: str, norm: bool) -> None:
    check(MIXERS[name], norm=norm)


@pytest.mark.parametrize("switch", ["norm_first", "least_step", "most_step"])
def test_switches_change_the_result(switch: str) -> None:
    mixer = MIXERS["whole tasks"]
    changed = {"norm_first": True, "least_step": 0.0, "most_step": 0.6}[switch]
    before = causal_logits(*model_with(mixer), TEXT)
    other = dataclasses.replace(mixer, **{switch: changed})
    assert not torch.allclose(causal_logits(*model_with(other), TEXT), before, atol=1e-2)


def test_limits_of_steps_are_those_of_transformers() -> None:
    """Of a whole text: transformers leaves them out of steps of one token."""
    model = model_of(random_config(*CASE, time_step_limit=(0.9, 1.3)))
    config, weights = causal_model_of(model)
    assert {(m.least_step, m.most_step) for m in config.mixers if isinstance(m, Mamba2)} == {
        (0.9, 1.3)
    }
    expected = model(TEXT[None]).logits[0].detach()
    unlimited = model_of(random_config(*CASE))(TEXT[None]).logits[0]
    assert not torch.allclose(unlimited, expected, atol=1e-2)
    packed = PackedCausalModel(config, weights, "float32")
    for read in (prompt_logits, generated_logits):
        got = read(new_caches(packed), TEXT)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_biases_of_projections() -> None:
    """transformers computes them of padding, too: of one text alone there is none."""
    model = model_of(random_config(*CASE, mamba_proj_bias=True))
    config, weights = causal_model_of(model)
    assert weights.layers[0].qkv_bias is not None
    expected = model(TEXT[None]).logits[0].detach()
    packed = PackedCausalModel(config, weights, "float32")
    got = prompt_logits(new_caches(packed), TEXT)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_models_that_are_refused() -> None:
    config = random_config(*CASE, hidden_act="gelu")
    with pytest.raises(ValueError, match="activation of Mamba-2 is 'gelu'; expected silu"):
        causal_model_of(model_of(config))
    config = random_config(*CASE, layer_types=["linear_attention"] * 3)
    with pytest.raises(ValueError, match="no layer with attention; expected one at least"):
        causal_model_of(model_of(config))


def test_sizes_that_are_refused() -> None:
    for arguments, message in (
        ((2, 3, 4, 4, 4), "num_groups is 2; expected a divisor of num_heads = 3"),
        ((1, 2, 4, 1025, 4), "value_size is 1025; expected 1 to 1024"),
        ((1, 2, 4, 4, 17), "taps is 17; expected 1 to 16"),
        ((1, 2, 4, 4, 4, 1), "norm_first is of type int; expected a bool"),
        ((1, 2, 4, 4, 4, False, 2.0, 1.0), "least_step and most_step are 2.0 and 1.0; expected 0"),
        ((1, 2, 4, 4, 4, False, math.nan), "least_step and most_step are nan and inf"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            Mamba2(*arguments)  # type: ignore[arg-type]


def test_weights_that_are_missing() -> None:
    config, weights = model_with(MIXERS["odd"])
    for name in ("decay", "decay_bias", "mixer_skip", "convolution"):
        layers = [weights.layers[0]._replace(**{name: None}), *weights.layers[1:]]
        with pytest.raises(ValueError, match=rf"layers\[0\]\.{name} is None; expected a tensor"):
            PackedCausalModel(config, weights._replace(layers=layers), "float32")
    layers = [weights.layers[0], weights.layers[1]._replace(mixer_skip=torch.ones(6))]
    with pytest.raises(ValueError, match=r"layers\[1\]\.mixer_skip was given; expected none"):
        PackedCausalModel(config, weights._replace(layers=[*layers, layers[0]]), "float32")


def test_attention_beside_it() -> None:
    config, _ = parts("falcon_h1", "multipliers")
    assert config.attention_beside and None not in config.mixers
    assert all(map(config.has_attention, range(config.num_layers)))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"mixers": ()}, "attention_beside is True; expected a Mamba2 in every layer"),
        ({"mixers": (config.mixers[0], None)}, "expected a Mamba2 in every layer"),
        ({"attention_gate": True}, "attention_gate is True; expected False with attention_beside"),
        ({"attention_beside": 1}, "attention_beside is of type int; expected a bool"),
    ]
    for changes, message in wrong:
        with pytest.raises((TypeError, ValueError), match=message):
            dataclasses.replace(config, **changes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("case", [CASE, ("falcon_h1", "multipliers")], ids=str)
def test_logits_of_some_tokens(case: tuple[str, str], dtype: str) -> None:
    """The last layer computes no more than these, whatever its cache holds."""
    model = PackedCausalModel(*parts(*case), "float32")
    expected = prompt_logits(new_caches(model, dtype=dtype), TEXT)
    exact = causal_logits(*parts(*case), TEXT)
    assert (expected - exact).norm() / exact.norm() < (1e-5 if dtype == "float32" else 0.1)
    for is_prompt in (True, False):
        caches = new_caches(model, 3, dtype=dtype)
        entries = (
            Entry(2, TEXT, num_logits=3),
            Entry(0, TEXT[:40], is_prompt, 2),
            Entry(1, TEXT[:9], num_logits=0),
        )
        last, others, none = step(caches, *entries)
        assert last.equal(expected[-3:]) and none.shape[0] == 0
        alone = step(new_caches(model, dtype=dtype), Entry(0, TEXT[:40], is_prompt))[0]
        assert others.equal(alone[-2:])


def test_attention_beside_it_in_ops() -> None:
    """Numbers of the config that a model cannot have."""
    model = PackedCausalModel(*parts(*CASE), "float32")
    arguments = forward_arguments(new_caches(model), Entry(0, TEXT[:1]))
    arguments[0] = with_entries(model.memory, {"config.attention_beside": True})
    with pytest.raises(ValueError, match=r"layers.\d.cache is absent|qkv has shape|qkv is"):
        torch.ops.lmdecode.causal_forward_(*arguments)
    model = PackedCausalModel(*parts("lfm2", "convolutions at the ends"), "float32")
    arguments = forward_arguments(new_caches(model), Entry(0, TEXT[:1]))
    arguments[0] = with_entries(model.memory, {"config.attention_beside": True})
    with pytest.raises(ValueError, match="attention_beside is 1; expected 0 without Mamba-2"):
        torch.ops.lmdecode.causal_forward_(*arguments)


CAPABILITY_SCRIPT = """
from tests.decoder import test_mamba2 as tests

for name, mixer in tests.MIXERS.items():
    tests.check(mixer, norm=name != "odd")
"""


@pytest.mark.slow
def test_cpu_capability_of_mamba2(run_at_capability: Any) -> None:
    assert run_at_capability(CAPABILITY_SCRIPT) == []


def test_windowed_heads_beside_that_are_wider_than_all_else() -> None:
    """Scratch is as wide as both together, whichever heads are the wider ones."""
    config, weights = parts("falcon_h1", "multipliers")
    mixer = Mamba2(1, 2, 3, 4, 2)
    config = dataclasses.replace(
        config, num_heads=8, num_kv_heads=4, head_size=64, rotary_size=0, global_num_kv_heads=1,
        global_head_size=2, global_rotary_size=0, rotary=(None,) * config.num_layers,
        windows=(20,) * config.num_layers, mixers=(mixer,) * config.num_layers,
    )  # fmt: skip
    torch.manual_seed(0)

    def of(number: int, layer: CausalLayerWeights) -> CausalLayerWeights:
        shapes = {**linear_shapes(config, number), **state_shapes(mixer)}
        names = ("qkv", "attention_out", *state_shapes(mixer))
        drawn = {name: torch.randn(shapes[name]) * shapes[name][-1] ** -0.5 for name in names}
        drawn["decay"] = -drawn["decay"].abs()
        return layer._replace(**drawn)

    layers = [of(i, weights.layers[i]) for i in range(config.num_layers)]
    weights = weights._replace(layers=layers)
    expected = causal_logits(config, weights, TEXT, dtype=torch.float64).float()
    model = PackedCausalModel(config, weights, "float32")
    got = prompt_logits(new_caches(model, max_rows=len(TEXT)), TEXT)  # all rows are in use
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)

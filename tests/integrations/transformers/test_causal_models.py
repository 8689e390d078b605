"""Decoder-only models as a config and weights: with the reference they give the models' logits."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.pytorch_utils import Conv1D

import lmdecode
from lmdecode.models.checks import linear_shapes, state_shapes
from lmdecode.models.configs import CausalConfig
from lmdecode.models.mixers import GatedDeltaRule
from lmdecode.models.weights import CausalLayerWeights
from lmdecode.readers.transformers.architectures import CAUSAL_MODEL_TYPES
from lmdecode.readers.transformers.causal_models import causal_model_of
from lmdecode.reference.causal import CausalCache, causal_logits
from tests.support.causal_models import (
    CASES,
    SIZES,
    VARIANTS,
    VOCAB,
    WINDOW,
    model_of,
    random_config,
    random_model,
    random_tokens,
)
from tests.support.releases import BEFORE_5_13
from tests.support.tiny_models import seeded_model

LENGTH = 5 * WINDOW + 3
POINTER = r"; for other models there is lmdecode\.integrations\.transformers\.pack_linears_$"

cases = pytest.mark.parametrize(("architecture", "variant"), CASES)


def expected_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens[None], use_cache=False).logits[0]


def test_every_architecture_has_a_case() -> None:
    assert set(VARIANTS) == set(CAUSAL_MODEL_TYPES)


@cases
def test_logits_are_those_of_transformers(architecture: str, variant: str) -> None:
    model, tokens = random_model(architecture, variant), random_tokens(LENGTH)
    expected = expected_logits(model, tokens)
    assert expected.std() > 0.3
    got = causal_logits(*causal_model_of(model), tokens)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@cases
def test_in_float64(architecture: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes norms, angles and softmax in float32 by name: here that is float64."""
    model = model_of(random_config(architecture, variant)).double()
    model.set_experts_implementation("eager")  # others have no float64
    tokens = random_tokens(LENGTH)
    got = causal_logits(*causal_model_of(model), tokens, dtype=torch.float64)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        expected = expected_logits(model, tokens)
    assert expected.dtype == torch.float64
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


@cases
def test_a_text_may_come_in_pieces(architecture: str, variant: str) -> None:
    config, weights = causal_model_of(random_model(architecture, variant))
    tokens, cache = random_tokens(LENGTH), CausalCache()
    pieces = [
        causal_logits(config, weights, piece, cache=cache, dtype=torch.float64)
        for piece in tokens.split((WINDOW + 2, 1, LENGTH - WINDOW - 4, 1))
    ]
    whole = causal_logits(config, weights, tokens, dtype=torch.float64)
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=1e-9)
    assert len(cache) == config.num_layers
    for number, (pair, mixer) in enumerate(zip(cache, config.mixers, strict=True)):
        if config.has_attention(number):
            heads = config.heads(number)
            shape = (heads.num_kv_heads, LENGTH, heads.head_size)
            assert {tensor.shape for tensor in pair[:2]} == {shape}
            pair = pair[2:]
        if mixer is not None:
            assert pair[0].shape == (mixer.taps - 1, mixer.channels)
            assert sum(tensor.numel() for tensor in pair) == mixer.state_size


@cases
def test_shapes(architecture: str, variant: str) -> None:
    """The weights have the shapes that CausalWeights says."""
    config, weights = causal_model_of(random_model(architecture, variant))
    size = config.model_size
    assert weights.embedding.shape == (config.vocab_size, size)
    assert config.vocab_size == VOCAB and len(weights.layers) == config.num_layers
    assert weights.logits is None or weights.logits.shape == (VOCAB, size)
    assert weights.positions is None or weights.positions.shape[1] == size
    assert len(weights.rotary) == len(config.rotary_scales)
    for number, rotary in enumerate(config.rotary):
        if rotary is not None:
            frequencies = weights.rotary[rotary]
            assert frequencies.shape == (config.heads(number).rotary_size // 2,)
            assert frequencies.dtype == torch.float32
    inputs = config.num_layers * config.per_layer_size
    for name, expected in (
        ("per_layer_embedding", (VOCAB, inputs)),
        ("per_layer_projection", (inputs, size)),
        ("per_layer_norm_gamma", (config.per_layer_size,)),
    ):
        value = getattr(weights, name)
        assert (value is None) == (inputs == 0)
        assert value is None or value.shape == expected
    for number, (layer, mixer) in enumerate(zip(weights.layers, config.mixers, strict=True)):
        heads, ffn, projected = config.heads(number), config.ffn_sizes[number], 0
        if mixer is None:
            keys = 0 if config.shared_keys[number] is not None else 2
            keys -= config.keys_are_values[number]
            gate = heads.query_size if config.attention_gate else 0
            projected = heads.query_size + keys * heads.key_size + gate
        shapes: dict[str, tuple[tuple[int, ...], ...]] = {
            "qkv": ((projected, size),),
            "qkv_bias": ((projected,),),
            "query_norm_gamma": ((heads.head_size,), (heads.query_size,)),
            "key_norm_gamma": ((heads.head_size,), (heads.key_size,)),
            "attention_out": ((size, heads.query_size),),
            "ffn_up": ((ffn, size),),
            "ffn_gate": ((ffn, size),),
            "ffn_up_bias": ((ffn,),),
            "ffn_gate_bias": ((ffn,),),
            "ffn_down": ((size, ffn),),
            "sinks": ((config.num_heads,),),
            "per_layer_gate": ((config.per_layer_size, size),),
            "per_layer_out": ((size, config.per_layer_size),),
            "layer_scale": ((1,),),
        }
        if mixer is not None and config.attention_beside:
            of_layer = {
                name: (shape,)
                for name, shape in (linear_shapes(config, number) | state_shapes(mixer)).items()
            }
            projected += heads.query_size + 2 * heads.key_size + mixer.projected
            assert layer.qkv.shape == (projected, size)
            assert layer.attention_out.shape == (size, heads.query_size + mixer.mixed)
            of_layer["qkv_bias"] = ((projected,),)
        elif mixer is not None:
            of_layer = dict.fromkeys(("query_norm_gamma", "key_norm_gamma", "sinks"), ())
            of_layer |= {name: (shape,) for name, shape in linear_shapes(config, number).items()}
            of_layer |= {name: (shape,) for name, shape in state_shapes(mixer).items()}
        else:
            of_layer = dict.fromkeys(state_shapes(GatedDeltaRule(1, 1, 1, 1, 1)), ())
        of_layer = {**shapes, **of_layer, **_shapes_of_experts(config, number)}
        for name, tensor in zip(CausalLayerWeights._fields, layer, strict=True):
            if name in EXPERTS and tensor is not None:
                assert config.experts is not None and len(tensor) == config.experts.num_experts
                tensor = tensor[len(tensor) - 1]
            if tensor is not None:
                assert tuple(tensor.shape) in of_layer.get(name, ((size,),)), name
        is_there = not config.has_experts(number) or _shared_size(config) > 0
        assert (layer.ffn_gate is not None) == (config.gated and is_there)
        assert (layer.ffn_up is not None) == (layer.ffn_down is not None) == is_there


EXPERTS = ("experts_gate", "experts_up", "experts_down")


def _shared_size(config: CausalConfig) -> int:
    return 0 if config.experts is None else config.experts.shared_size


def _shapes_of_experts(config: CausalConfig, number: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the shapes of what only layers with experts have, or others have in other sizes."""
    if not config.has_experts(number):
        names = (*EXPERTS, *(f"{name}_bias" for name in EXPERTS), "router", "router_bias")
        names += ("router_norm_gamma", "experts_norm_gamma", "experts_out_norm_gamma")
        names += ("shared_out_norm_gamma", "router_scale")
        return dict.fromkeys((*names, "router_choice_bias", "shared_gate"), ())
    assert config.experts is not None
    e, size = config.experts, config.model_size
    shapes: dict[str, tuple[int, ...]] = {
        "router": (e.num_experts, size),
        "router_bias": (e.num_experts,),
        "router_choice_bias": (e.num_experts,),
        "router_scale": (e.num_experts,),
        "experts_gate": (e.size, size),
        "experts_up": (e.size, size),
        "experts_down": (size, e.size),
        "experts_gate_bias": (e.num_experts, e.size),
        "experts_up_bias": (e.num_experts, e.size),
        "experts_down_bias": (e.num_experts, size),
        "ffn_up": (e.shared_size, size),
        "ffn_gate": (e.shared_size, size),
        "ffn_down": (size, e.shared_size),
    }
    return {name: (shape,) for name, shape in shapes.items()}


def test_every_field_of_config_and_weights_is_used_by_a_case() -> None:
    """A switch that no case turns would go untested."""
    models = [causal_model_of(random_model(*case)) for case in CASES]
    for field in CausalLayerWeights._fields:
        given = {getattr(w.layers[0], field) is None for _, w in models}
        if field == "convolution_bias":
            continue  # transformers computes it of padding, too: see test_causal_states
        always = {"qkv", "attention_out"}
        assert given == ({False} if field in always else {False, True}), field
    for name in ("norm", "gated", "activation", "attention_softcap", "logits_softcap",
                 "embedding_scale", "logits_scale", "norm_epsilon", "value_norm", "ffn_beside",
                 "per_layer_size", "per_layer_scale", "per_layer_epsilon"):  # fmt: skip
        assert len({getattr(c, name) for c, _ in models}) > 1, name
    assert {c.activation for c, _ in models} == {"relu", "gelu", "gelu_tanh", "silu"}
    assert {c.num_heads // c.num_kv_heads for c, _ in models} >= {1, 2, 4, 7}
    assert any(c.heads_of(has_window=True).query_size != c.model_size for c, _ in models)
    assert any(c.rotary_size not in (0, c.head_size) for c, _ in models)
    assert any(c.global_head_size != c.head_size for c, _ in models)
    assert any(c.global_num_kv_heads != c.num_kv_heads for c, _ in models)
    assert any(c.global_rotary_size != c.rotary_size for c, _ in models)
    assert any(len(set(c.ffn_sizes)) > 1 for c, _ in models)
    assert {any(c.keys_are_values) for c, _ in models} == {True, False}
    assert {len({*c.shared_keys} - {None}) for c, _ in models} == {0, 1, 2}
    assert any(len(set(c.rotary_scales)) == 1 and c.rotary_scales[0] != 1 for c, _ in models)
    mixed = {None, WINDOW}
    assert {frozenset(c.windows) for c, _ in models} == {
        frozenset(mixed), frozenset({None}), frozenset({WINDOW}),
    }  # fmt: skip
    assert {frozenset(c.rotary) for c, _ in models} == {
        frozenset({None}), frozenset({0}), frozenset({0, 1}), frozenset({0, None}),
    }  # fmt: skip
    assert {w.logits is None for _, w in models} == {True, False}


def test_weights_are_the_tensors_of_the_model() -> None:
    for case in (("llama", "plain"), ("phi3", "plain"), ("gpt2", "plain")):
        model = random_model(*case)
        _, weights = causal_model_of(model)
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        copied = {
            name
            for layer in weights.layers
            for name, tensor in layer._asdict().items()
            if tensor is not None and tensor.untyped_storage().data_ptr() not in own
        }
        assert copied == ({"qkv"} if case[0] == "llama" else set()), case
        assert weights.embedding.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_bfloat16_weights() -> None:
    """Scales of Gemma's embeddings are rounded as transformers does; folded factors are not."""
    model = model_of(random_config("gemma2", "plain")).bfloat16()
    config, weights = causal_model_of(model)
    assert config.embedding_scale == float(torch.tensor(math.sqrt(32)).bfloat16())
    gamma = weights.layers[0].ffn_norm_gamma
    assert gamma is not None and gamma.dtype == torch.float32
    own = model.model.layers[0].pre_feedforward_layernorm.weight
    assert torch.equal(gamma, 1 + own.float())
    assert weights.layers[0].ffn_up.dtype == torch.bfloat16
    model = model_of(random_config("granite", "multipliers, biases")).bfloat16()
    layer, own = causal_model_of(model)[1].layers[1], model.model.layers[1].mlp.down_proj
    assert torch.equal(layer.ffn_down, own.weight.float() * 0.4)
    assert layer.ffn_down_bias is not None
    assert torch.equal(layer.ffn_down_bias, own.bias.float() * 0.4)


def _refused(model: Any, match: str) -> None:
    with pytest.raises(
        ValueError, match=r"^Decoding\.from_pretrained: .*" + match + ".*" + POINTER
    ):
        causal_model_of(model)


@pytest.mark.skipif(not BEFORE_5_13, reason="later releases have the layout of other experts")
@pytest.mark.parametrize("kind", ["granitemoe", "granitemoeshared"])
def test_experts_in_another_layout(kind: str) -> None:
    arguments = next(iter(VARIANTS[kind].values()))
    config = transformers.CONFIG_MAPPING[kind](**{**SIZES, **arguments})
    _refused(transformers.AutoModelForCausalLM.from_config(config), "its experts in another layout")


def test_models_of_other_types() -> None:
    _refused(torch.nn.Linear(2, 2), "model is a Linear of type None; expected .*gemma2, .*smollm3")
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    for name, message, more in (
        ("MixtralForCausalLM", "model is a MixtralForCausalLM of type 'mixtral'",
         {**sizes, "num_local_experts": 2}),
        ("Qwen2MoeForCausalLM", "Qwen2MoeForCausalLM of type 'qwen2_moe'",
         {**sizes, "num_experts": 2, "num_experts_per_tok": 1}),
        ("T5ForConditionalGeneration", "of type 't5'",
         {"vocab_size": VOCAB, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1,
          "num_heads": 2}),
    ):  # fmt: skip
        _refused(seeded_model(name, **more), message)
    wrapped = torch.nn.Module()
    wrapped.config = random_config("llama", "plain")  # as adapters do
    _refused(wrapped, "model is a Module of type 'llama'; expected a causal language model of")
    _refused(random_model("llama", "plain").model, "a LlamaModel, which has no logits")
    classifier = transformers.LlamaForSequenceClassification(random_config("llama", "plain"))
    _refused(classifier, "LlamaForSequenceClassification, which has no logits")


@pytest.mark.parametrize(
    ("architecture", "more", "match"),
    [
        ("llama", {"hidden_act": "quick_gelu"}, "activation function is 'quick_gelu'; .*silu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}},
            "the rope_type is 'dynamic'; expected one of default, linear, llama3",
        ),
        (
            "phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope", "rope_theta": 100.0, "factor": 2.0,
                    "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
                    "original_max_position_embeddings": 32,
                },
            },
            "the rope_type is 'longrope'",
        ),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("llama", {"is_causal": False}, "is_causal is False; expected True"),
        (
            "gemma4_text", {"use_bidirectional_attention": "all"},
            "use_bidirectional_attention is 'all'; expected None or 'vision'",
        ),
        (
            "gemma4_text", {"vocab_size_per_layer_input": VOCAB - 1},
            f"vocab_size_per_layer_input is {VOCAB - 1}; expected {VOCAB}, as vocab_size",
        ),
        (
            "gemma4_text",
            {
                "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2,
                "moe_intermediate_size": 20,
            },
            "feed-forward layers beside experts have 44, 88 inner features; expected the same",
        ),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True; expected False"),
        (
            "qwen2",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types has 'sliding_attention', sliding_window is None; expected a number",
        ),
        (
            "qwen2",
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types has 'chunked_attention'; expected full_attention and sliding_attention",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_switches_that_there_are_not(architecture: str, more: dict[str, Any], match: str) -> None:
    variant = next(iter(VARIANTS[architecture]))
    _refused(model_of(random_config(architecture, variant, **more)), match)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
@pytest.mark.parametrize("rope_type", ["magic", None, 7])
def test_a_folder_whose_config_has_an_unknown_rope_type(
    architecture: str, rope_type: Any, tmp_path: Path
) -> None:
    random_model(architecture, next(iter(VARIANTS[architecture]))).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config["rope_parameters"]
    rope.get("full_attention", rope)["rope_type"] = rope_type
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"the rope_type is {rope_type!r}; expected one of defau"):
        lmdecode.Decoding.from_pretrained(tmp_path)


def _add_sinks(model: Any) -> None:
    model.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))


def _quantize(model: Any) -> None:
    model.is_quantized, model.quantization_method = True, "gptq"


def _replace(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = torch.nn.Sequential(model.model.layers[1].mlp.up_proj)


def _hold_integers(model: Any) -> None:
    up = model.model.layers[0].mlp.up_proj
    up.weight = torch.nn.Parameter(up.weight.to(torch.int8), requires_grad=False)


def _grow_head(model: Any) -> None:
    model.lm_head = torch.nn.Linear(32, VOCAB + 1)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_add_sinks, "1 parameters that its type does not have, layers.1.self_attn.sinks"),
        (_quantize, r"the weights of model are quantized \(gptq\); expected floats"),
        (_replace, r"model.layers.1.mlp.up_proj is a Sequential; expected a torch.nn.Linear"),
        (_hold_integers, "weights of model.layers.0.mlp.up_proj are of torch.int8; expected float"),
        (lambda model: model.to("meta"), "weights of .* are not loaded; expected floats"),
        (_grow_head, "model embeds 101 tokens and has logits of 102; expected equal"),
    ],
    ids=["sinks", "quantized", "replaced", "integers", "meta", "head"],
)
def test_models_that_were_changed(change: Callable[[Any], None], match: str) -> None:
    model = model_of(random_config("llama", "plain"))
    change(model)
    _refused(model, match)


def test_a_norm_of_heads_with_a_bias() -> None:
    model = model_of(random_config("qwen3", "plain"))
    model.model.layers[1].self_attn.k_norm.bias = torch.nn.Parameter(torch.zeros(12))
    _refused(model, "model.layers.1.self_attn.k_norm has a bias; expected none")


def test_a_head_with_a_bias_and_a_convolution_in_place_of_a_linear_layer() -> None:
    """Neither is any architecture's own; both are expressed."""
    model = model_of(random_config("llama", "plain"))
    head, down = model.lm_head, model.model.layers[0].mlp.down_proj
    head.bias = torch.nn.Parameter(torch.randn(VOCAB))
    convolution = Conv1D(down.out_features, down.in_features)
    convolution.weight = torch.nn.Parameter(down.weight.detach().T.clone())
    model.model.layers[0].mlp.down_proj = convolution
    tokens = random_tokens(LENGTH)
    got = causal_logits(*causal_model_of(model), tokens)
    torch.testing.assert_close(got, expected_logits(model, tokens), rtol=0, atol=1e-4)

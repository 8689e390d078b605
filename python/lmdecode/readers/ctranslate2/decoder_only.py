"""Decoder-only models in CTranslate2's layout.

The file describes the computation. The architecture of transformers with this computation is used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmdecode.readers.ctranslate2.encoder_decoder import NO_MATTER, activation_of, is_scaled
from lmdecode.readers.ctranslate2.names import Names

__all__ = ["causal_of"]

_POSITIONS = "decoder/position_encodings/encodings"
_SCALING = {0.0: "linear", 1.0: "longrope", 2.0: "llama3"}
# No file has the maximum length of a model with rotary positions.
_ANY_LENGTH = 131_072
_OFF = ("decoder/alibi", "decoder/start_from_zero_embedding", "decoder/final_logit_softcapping")


def causal_of(names: Names, norm_epsilon: float | None) -> dict[str, Any]:
    """Name the parameters of a decoder-only model; return its config.

    ``norm_epsilon`` is the value of ``config.json``, or None. Raises ValueError for a feature that
    none of these architectures has.
    """
    if names.scalar("decoder/pre_norm|pre_norm", 1.0) != 1.0:
        raise names.refused("has norms behind its layers")
    names.must_be_zero(*_OFF)
    if _POSITIONS in names:
        config = _gpt2(names, norm_epsilon)
    else:
        config = _rotary_model(names, norm_epsilon)
    names.check_all_read(*NO_MATTER)
    return config


def _is_tied(names: Names) -> bool:
    """Name embedding and head; return whether they are tied."""
    return names.file.resolve("decoder/embeddings/weight") == names.file.resolve(
        "decoder/projection/weight"
    )


def _gpt2(names: Names, norm_epsilon: float | None) -> dict[str, Any]:
    vocab, size = names.shape("decoder/embeddings/weight", 2)
    names.add("transformer.wte.weight", "decoder/embeddings/weight")
    names.add("transformer.wpe.weight", _POSITIONS)
    names.norm("transformer.ln_f", "decoder/layer_norm", has_beta=True)
    names.linear("lm_head", "decoder/projection", has_bias=False)
    heads, count = int(names.scalar("decoder/num_heads|num_heads")), names.layers("decoder")
    if heads < 1 or size % heads:
        raise names.refused(f"has {heads} heads for rows of {size}")
    for i in range(count):
        scope, layer = f"decoder/layer_{i}", f"transformer.h.{i}"
        for parameter, variable in (
            ("attn.c_attn", "self_attention/linear_0"), ("attn.c_proj", "self_attention/linear_1"),
            ("mlp.c_fc", "ffn/linear_0"), ("mlp.c_proj", "ffn/linear_1"),
        ):  # fmt: skip
            names.linear(f"{layer}.{parameter}", f"{scope}/{variable}", is_transposed=True)
        names.norm(f"{layer}.ln_1", f"{scope}/self_attention/layer_norm", has_beta=True)
        names.norm(f"{layer}.ln_2", f"{scope}/ffn/layer_norm", has_beta=True)
    if is_scaled(names, "decoder", size):
        raise names.refused("multiplies its embedding")
    return {
        "model_type": "gpt2",
        "vocab_size": vocab,
        "n_embd": size,
        "n_layer": count,
        "n_head": heads,
        "n_inner": names.shape("decoder/layer_0/ffn/linear_0/weight", 2)[0],
        "n_positions": names.shape(_POSITIONS, 2)[0],
        "activation_function": activation_of(names, "decoder/activation|activation"),
        "layer_norm_epsilon": 1e-5 if norm_epsilon is None else norm_epsilon,
        "tie_word_embeddings": _is_tied(names),
    }


def _rotary_model(names: Names, norm_epsilon: float | None) -> dict[str, Any]:
    """Name the parameters of a model of Llama's kind, or of Gemma's."""
    vocab, size = names.shape("decoder/embeddings/weight", 2)
    own = "decoder/layer_0/self_attention"
    heads, count = int(names.scalar("decoder/num_heads|num_heads")), names.layers("decoder")
    attentions = [f"decoder/layer_{i}/self_attention" for i in range(count)]

    def number(name: str, default: float | None = None) -> float:
        return names.same_scalar([f"{scope}/{name}" for scope in attentions], default)

    out = names.shape(f"{own}/linear_1/weight", 2)[1]
    head_size = int(number("head_dim", out // max(heads, 1)))
    kv_heads = int(number("num_heads_kv", heads))
    if heads < 1 or head_size * heads != out or kv_heads < 1 or heads % kv_heads:
        raise names.refused(
            f"has {heads} heads of {head_size}, {kv_heads} of keys, for {out} features"
        )
    if number("rotary_interleave", 1.0) != 0.0:
        raise names.refused("turns neighbouring features, as GPT-J does")
    if number("rotary_dim") not in (0.0, head_size):
        raise names.refused("turns a part of each head")
    has_outer_norms = "decoder/layer_0/post_feedforward_layer_norm/gamma" in names
    has_head_norms = f"{own}/q_norm/gamma" in names
    # Gemma's norms multiply by 1 + weight.
    is_gemma = bool(names.scalar("decoder/layer_norm/layer_norm_use_residual", 0.0))
    has_qkv_bias = f"{own}/linear_0/bias" in names
    has_out_bias = f"{own}/linear_1/bias" in names
    has_ffn_bias = "decoder/layer_0/ffn/linear_1/bias" in names
    windows = [int(names.scalar(f"{scope}/sliding_window", 0.0)) for scope in attentions]
    names.scalar("decoder/sliding_window", 0.0)
    config: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": size,
        "intermediate_size": names.shape("decoder/layer_0/ffn/linear_0/weight", 2)[0],
        "num_hidden_layers": count,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "rms_norm_eps": 1e-6 if norm_epsilon is None else norm_epsilon,
        "max_position_embeddings": _ANY_LENGTH,
        "tie_word_embeddings": _is_tied(names),
    }
    scaled = is_scaled(names, "decoder", size)
    if scaled != is_gemma:
        raise names.refused("multiplies its embedding, or its norms have no 1 + weight, alone")
    act = activation_of(names, "decoder/activation|activation")
    if is_gemma:
        config |= _gemma(names, attentions, windows, has_outer_norms, has_head_norms, act)
        if has_qkv_bias or has_out_bias or has_ffn_bias:
            raise names.refused("has biases")
    else:
        if has_outer_norms:
            raise names.refused("has norms behind its attentions without 1 + weight")
        if len(set(windows)) != 1:
            raise names.refused("has windows in some layers alone")
        config |= {"hidden_act": act, "rope_parameters": _rope(names, attentions)}
        config |= _llama_kind(
            names, windows[0], has_head_norms, has_qkv_bias, has_out_bias, has_ffn_bias
        )
    # Llama has biases of all four or of none.
    is_whole = config["model_type"] == "llama" and has_qkv_bias
    biases = (has_qkv_bias, has_out_bias or is_whole, has_ffn_bias)
    sizes = [heads * head_size, kv_heads * head_size, kv_heads * head_size]
    _layers(names, count, sizes, has_outer_norms, has_head_norms, biases)
    if config["model_type"] == "granite":  # its norms multiply by their weight
        for name, part in names.parts.items():
            if "norm" in name:
                names.parts[name] = replace(part, plus=1.0)
    return config


def _llama_kind(
    names: Names,
    window: int,
    has_head_norms: bool,
    has_qkv_bias: bool,
    has_out_bias: bool,
    has_ffn_bias: bool,
) -> dict[str, Any]:
    """Return the kind (Llama, Mistral, Qwen2 or Qwen3), with its entries of the config."""
    if has_head_norms:
        if window or has_ffn_bias or has_qkv_bias or has_out_bias:
            raise names.refused("has norms of heads and biases or a window")
        return {"model_type": "qwen3", "attention_bias": False, "use_sliding_window": False}
    if has_qkv_bias and not has_out_bias and not has_ffn_bias:
        return {
            "model_type": "qwen2",
            "use_sliding_window": bool(window),
            "sliding_window": window or None,
            "max_window_layers": 0,
        }
    if window:
        if has_qkv_bias or has_out_bias or has_ffn_bias:
            raise names.refused("has a window and biases")
        return {"model_type": "mistral", "sliding_window": window}
    return {
        "model_type": "llama",
        "attention_bias": has_qkv_bias or has_out_bias,
        "mlp_bias": has_ffn_bias,
    }


def _gemma(
    names: Names,
    attentions: list[str],
    windows: list[int],
    has_outer_norms: bool,
    has_head_norms: bool,
    activation: str,
) -> dict[str, Any]:
    """Return the config entries of a Gemma, beside the common sizes."""
    activation = {"gelu_new": "gelu_pytorch_tanh"}.get(activation, activation)
    head_size = int(names.scalar(f"{attentions[0]}/head_dim"))
    config: dict[str, Any] = {
        "hidden_activation": activation,
        "query_pre_attn_scalar": head_size,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    if not has_outer_norms:
        return _gemma1(names, attentions, windows, has_head_norms, activation)
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    if len({window for window in windows if window}) > 1:
        raise names.refused(f"has windows of {sorted(set(windows))}")
    config |= {"layer_types": kinds, "sliding_window": max(windows) or 4096}
    if not has_head_norms:
        return config | {"model_type": "gemma2", "rope_parameters": _rope(names, attentions)}
    ropes = {}
    for kind in ("full_attention", "sliding_attention"):
        of_kind = [scope for scope, other in zip(attentions, kinds, strict=True) if other == kind]
        ropes[kind] = _rope(names, of_kind or attentions[:1])
    return config | {"model_type": "gemma3_text", "rope_parameters": ropes}


def _gemma1(
    names: Names, attentions: list[str], windows: list[int], has_head_norms: bool, activation: str
) -> dict[str, Any]:
    """Return the config of Gemma 1, as a Granite: Decoding has that, and it computes the same."""
    if any(windows) or has_head_norms:
        raise names.refused("has windows or norms of heads, and no norms behind its layers")
    size = names.shape("decoder/embeddings/weight", 2)[1]
    return {
        "model_type": "granite",
        "hidden_act": activation,
        "rope_parameters": _rope(names, attentions),
        "embedding_multiplier": size**0.5,
        "attention_multiplier": names.scalar(f"{attentions[0]}/head_dim") ** -0.5,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    }


def _rope(names: Names, attentions: list[str]) -> dict[str, Any]:
    """Return the config's entries of the rotary embedding."""

    def number(name: str, default: float | None = None) -> float:
        return names.same_scalar([f"{scope}/{name}" for scope in attentions], default)

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": number("rotary_base", 10_000.0)}
    scaling = number("rotary_scaling_type", -1.0)
    original = number("original_max_position_embeddings", 0.0)
    number("max_position_embeddings", 0.0)
    factor = number("rotary_scaling_factor", 0.0)
    kind = _SCALING.get(scaling)
    if scaling == -1.0 or (kind == "linear" and factor == 1.0):
        return rope
    if kind == "linear" and factor > 0.0:
        return rope | {"rope_type": kind, "factor": factor}
    low, high = number("rotary_low_freq_factor", 0.0), number("rotary_high_freq_factor", 0.0)
    if kind == "llama3" and factor > 0.0 and original > 0.0:
        return rope | {
            "rope_type": kind,
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": int(original),
        }
    what = f"has rotary positions of type {kind or scaling!r}"
    if kind == "llama3":
        what += " without their factor and original length"
    raise names.refused(what)


def _layers(
    names: Names,
    count: int,
    sizes: list[int],
    has_outer_norms: bool,
    has_head_norms: bool,
    biases: tuple[bool, bool, bool],
) -> None:
    has_qkv_bias, has_out_bias, has_ffn_bias = biases
    names.add("model.embed_tokens.weight", "decoder/embeddings/weight")
    names.linear("lm_head", "decoder/projection", has_bias=False)
    norms = {"input_layernorm": "self_attention/layer_norm",
             "post_attention_layernorm": "ffn/layer_norm"}  # fmt: skip
    if has_outer_norms:
        norms = {
            "input_layernorm": "input_layer_norm",
            "post_attention_layernorm": "post_attention_layer_norm",
            "pre_feedforward_layernorm": "pre_feedforward_layer_norm",
            "post_feedforward_layernorm": "post_feedforward_layer_norm",
        }
    if has_head_norms:
        norms |= {f"self_attn.{x}_norm": f"self_attention/{x}_norm" for x in "qk"}
    flags = [names.norm_with_flag("model.norm", "decoder/layer_norm")]
    for i in range(count):
        scope, layer = f"decoder/layer_{i}", f"model.layers.{i}"
        own = f"{scope}/self_attention"
        parts = [f"{layer}.self_attn.{part}_proj" for part in "qkv"]
        names.split_rows(parts, f"{own}/linear_0", sizes, has_bias=has_qkv_bias or has_out_bias)
        names.linear(f"{layer}.self_attn.o_proj", f"{own}/linear_1", has_bias=has_out_bias)
        for parameter, linear in (
            ("gate_proj", "linear_0"), ("up_proj", "linear_0_noact"), ("down_proj", "linear_1"),
        ):  # fmt: skip
            name = f"{layer}.mlp.{parameter}"
            names.linear(name, f"{scope}/ffn/{linear}", has_bias=has_ffn_bias)
        for parameter, norm in norms.items():
            flags.append(names.norm_with_flag(f"{layer}.{parameter}", f"{scope}/{norm}"))
    if len(set(flags)) != 1:
        raise names.refused("has norms with 1 + weight and norms without")

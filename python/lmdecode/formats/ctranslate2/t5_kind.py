"""T5, mT5 and UMT5 in CTranslate2's layout."""

from __future__ import annotations

import math
import warnings
from typing import Any

from lmdecode.formats.ctranslate2.bart_kind import (
    NO_MATTER,
    activation_of,
    embedding_scope,
    is_scaled,
)
from lmdecode.formats.ctranslate2.names import Names

__all__ = ["BIAS", "t5_of"]

BIAS = "self_attention/relative_attention_bias"


def _attention(names: Names, parameter: str, scope: str, size: int) -> None:
    parts = [f"{parameter}.{part}" for part in ("q", "k", "v")]
    last = "linear_1" if parameter.endswith("SelfAttention") else "linear_2"
    if last == "linear_1":
        names.split_rows(parts, f"{scope}/linear_0", [size] * 3, has_bias=False)
    else:
        names.split_rows(parts[:1], f"{scope}/linear_0", [size], has_bias=False)
        names.split_rows(parts[1:], f"{scope}/linear_1", [size] * 2, has_bias=False)
    names.linear(f"{parameter}.o", f"{scope}/{last}", has_bias=False)
    names.norm(f"{parameter.rsplit('.', 1)[0]}.layer_norm", f"{scope}/layer_norm", has_beta=False)
    if names.scalar(f"{scope}/queries_scale") != 1.0:
        raise names.refused(f"multiplies queries of {scope!r}")


def _stack(names: Names, stack: str, size: int, is_gated: bool, own_biases: bool) -> int:
    """Name the layers of a stack; return their number."""
    count = names.layers(stack)
    names.add(f"{stack}.embed_tokens.weight", f"{embedding_scope(names, stack)}/weight")
    names.norm(f"{stack}.final_layer_norm", f"{stack}/layer_norm", has_beta=False)
    for i in range(count):
        scope, block = f"{stack}/layer_{i}", f"{stack}.block.{i}.layer"
        attention = f"{block}.0.SelfAttention"
        _attention(names, attention, f"{scope}/self_attention", size)
        bias = f"{attention}.relative_attention_bias.weight"
        names.add(bias, f"{scope}/{BIAS}")
        if not own_biases and i > 0 and names.parts.pop(bias) != names.parts[
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        ]:  # fmt: skip
            raise names.refused(f"has a position bias of its own in {scope!r} alone")
        if stack == "decoder":
            _attention(names, f"{block}.1.EncDecAttention", f"{scope}/attention", size)
        ffn = f"{block}.{1 + (stack == 'decoder')}"
        names.linear(
            f"{ffn}.DenseReluDense.wi{'_0' * is_gated}", f"{scope}/ffn/linear_0", has_bias=False
        )
        if is_gated:
            names.linear(
                f"{ffn}.DenseReluDense.wi_1", f"{scope}/ffn/linear_0_noact", has_bias=False
            )
        names.linear(f"{ffn}.DenseReluDense.wo", f"{scope}/ffn/linear_1", has_bias=False)
        names.norm(f"{ffn}.layer_norm", f"{scope}/ffn/layer_norm", has_beta=False)
    return count


def t5_of(names: Names) -> dict[str, Any]:
    """Name the parameters of a T5, mT5 or UMT5; return its config.

    Raises
    ------
    ValueError
        It has a feature that these do not have.
    """
    vocab, model_size = names.shape("decoder/embeddings/weight", 2)
    is_gated = "decoder/layer_0/ffn/linear_0_noact/weight" in names
    heads = int(names.same_scalar(["encoder/num_heads", "decoder/num_heads"], None))
    rows = names.shape("decoder/layer_0/self_attention/linear_0/weight", 2)[0]
    if heads < 1 or rows % (3 * heads):
        raise names.refused(f"has {heads} heads for {rows} rows of queries, keys and values")
    biases = {
        names.file.resolve(f"{stack}/layer_{i}/{BIAS}")
        for stack in ("encoder", "decoder")
        for i in range(names.layers(stack))
    }
    own_biases = len(biases) > 2
    layers = {
        stack: _stack(names, stack, rows // 3, is_gated, own_biases)
        for stack in ("encoder", "decoder")
    }
    names.add("shared.weight", "decoder/embeddings/weight")
    names.linear("lm_head", "decoder/projection", has_bias=False)
    if is_scaled(names, "encoder", model_size) or is_scaled(names, "decoder", model_size):
        raise names.refused("multiplies its embedding")
    norms_first = names.same_scalar(["encoder/pre_norm", "decoder/pre_norm"], None)
    activations = {activation_of(names, f"{stack}/activation") for stack in layers}
    if not norms_first or len(activations) != 1:
        raise names.refused("has norms behind its layers, or two activations")
    names.must_be_zero(
        "decoder/alibi", "decoder/start_from_zero_embedding", "encoder/multi_query_attention"
    )
    scale = names.scalar("decoder/scale_outputs", 1.0)
    is_output_scaled = math.isclose(scale, model_size**-0.5, rel_tol=1e-3)
    kind = "umt5" if own_biases else "t5"
    heads_of_logits = [f"decoder/{part}/weight" for part in ("embeddings", "projection")]
    if is_output_scaled and kind == "t5" and len(set(map(names.file.resolve, heads_of_logits))) > 1:
        # T5 scales if its head is the embedding; converters scale all that transformers 5 loads.
        warnings.warn(
            f"{names.file.path} divides its logits by the root of {model_size}, which a T5 with a "
            "head of its own (T5 1.1, Flan) does not do; its converter's fault, and not done here",
            UserWarning,
            stacklevel=2,
        )
        is_output_scaled, scale = False, 1.0
    if not is_output_scaled and (scale != 1.0 or kind == "umt5"):
        raise names.refused(f"multiplies the outputs of a {kind} by {scale}")
    distances = [
        f"{stack}/layer_{i}/self_attention/relative_attention_max_distance"
        for stack, count in layers.items()
        for i in range(count)
    ]
    config = {
        "model_type": kind,
        "vocab_size": vocab,
        "d_model": model_size,
        "d_kv": rows // (3 * heads),
        "d_ff": names.shape("decoder/layer_0/ffn/linear_0/weight", 2)[0],
        "num_layers": layers["encoder"],
        "num_decoder_layers": layers["decoder"],
        "num_heads": heads,
        "relative_attention_num_buckets": names.shape(f"decoder/layer_0/{BIAS}", 2)[0],
        "relative_attention_max_distance": int(names.same_scalar(distances, None)),
        "feed_forward_proj": "gated-" * is_gated + activations.pop(),
        "tie_word_embeddings": is_output_scaled,  # T5's sign that outputs are scaled
        "layer_norm_epsilon": 1e-6,
    }
    names.check_all_read(*NO_MATTER)
    return config

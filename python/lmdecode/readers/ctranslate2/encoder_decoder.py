"""Encoder-decoder models in CTranslate2's layout: BART and its kin, Whisper, and T5.

The file does not name the architecture in transformers. It describes the computation, and the
architecture with this computation is used.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from lmdecode.readers.ctranslate2.names import Names

__all__ = ["BIAS", "NO_MATTER", "activation_of", "is_scaled", "seq2seq_of", "t5_of", "whisper_of"]


# CTranslate2's numbers of the supported activations.
_ACTIVATIONS = {0: "relu", 1: "gelu_new", 2: "silu", 3: "gelu"}
# Variables without effect if there is one embedding and no alibi.
NO_MATTER = (
    "/alibi_use_positive_positions", "/alignment_heads", "/alignment_layer", "/embeddings_merge",
    "/scale_alibi",
)  # fmt: skip
_SINE_OF_2 = math.sin(2.0)  # M2M100's first position is 2, others' is 0


def activation_of(names: Names, variable: str, default: int | None = None) -> str:
    """Return the name of an activation, by CTranslate2's number."""
    number = names.scalar(variable, default)
    if number not in _ACTIVATIONS:
        raise names.refused(
            f"has activation {number:g}; of CTranslate2's there are "
            f"{', '.join(_ACTIVATIONS.values())}"
        )
    return _ACTIVATIONS[int(number)]


def embedding_scope(names: Names, stack: str) -> str:
    """Return the scope of a stack's only embedding."""
    if f"{stack}/embeddings_1/weight" in names:
        raise names.refused(f"has several embeddings in {stack!r}, for features of words")
    first = f"{stack}/embeddings_0"
    return first if f"{first}/weight" in names else f"{stack}/embeddings"


def _attention(names: Names, parameter: str, scope: str, size: int) -> None:
    """Name the parts of self-attention or cross-attention, each with its norm."""
    parts = [f"{parameter}.{part}_proj" for part in ("q", "k", "v")]
    if parameter.endswith("self_attn"):
        names.split_rows(parts, f"{scope}/linear_0", [size] * 3)
        names.linear(f"{parameter}.out_proj", f"{scope}/linear_1")
    else:
        names.split_rows(parts[:1], f"{scope}/linear_0", [size])
        names.split_rows(parts[1:], f"{scope}/linear_1", [size] * 2)
        names.linear(f"{parameter}.out_proj", f"{scope}/linear_2")
    names.norm(f"{parameter}_layer_norm", f"{scope}/layer_norm", has_beta=True)


def _layers(names: Names, stack: str, size: int) -> dict[str, int]:
    """Name the layers of a stack; return their entries of the config."""
    count = names.layers(stack)
    heads = int(names.scalar(f"{stack}/num_heads|num_heads"))
    if heads < 1 or size % heads:
        raise names.refused(f"has {heads} heads for rows of {size}")
    widths = set()
    for i in range(count):
        scope, layer = f"{stack}/layer_{i}", f"model.{stack}.layers.{i}"
        _attention(names, f"{layer}.self_attn", f"{scope}/self_attention", size)
        if stack == "decoder":
            _attention(names, f"{layer}.encoder_attn", f"{scope}/attention", size)
        names.linear(f"{layer}.fc1", f"{scope}/ffn/linear_0")
        names.linear(f"{layer}.fc2", f"{scope}/ffn/linear_1")
        names.norm(f"{layer}.final_layer_norm", f"{scope}/ffn/layer_norm", has_beta=True)
        widths.add(names.shape(f"{scope}/ffn/linear_0/weight", 2)[0])
    if len(widths) != 1:
        raise names.refused(f"has layers of widths {sorted(widths)}")
    return {
        f"{stack}_layers": count,
        f"{stack}_attention_heads": heads,
        f"{stack}_ffn_dim": widths.pop(),
    }


def is_scaled(names: Names, stack: str, size: int) -> bool:
    """Whether an embedding is multiplied by the root of its size.

    The file has a flag or the factor, with another name in older files. The default is a factor.
    """
    old = f"{embedding_scope(names, stack)}/multiply_by_sqrt_depth"
    name = f"{stack}/scale_embeddings"
    of_old = names.scalar(old, size**0.5)
    value = names.scalar(name, of_old)
    name = name if name in names else old
    is_flag = name in names and not names.dtype(name).is_floating_point
    if value == (0.0 if is_flag else 1.0):
        return False
    if not is_flag and not math.isclose(value, size**0.5, rel_tol=1e-3):
        raise names.refused(f"multiplies embeddings of {stack!r} by {value}")
    return True


def _kind(names: Names, norm_first: bool, has_embedding_norm: bool) -> str:
    if has_embedding_norm:
        return "mbart" if norm_first else "bart"
    if not norm_first:
        return "marian"
    first = names.file.weights("decoder/position_encodings/encodings")[0, 0].item()
    is_m2m = abs(first - _SINE_OF_2) < 0.01 and "decoder/projection/bias" not in names
    return "m2m_100" if is_m2m else "pegasus"


def seq2seq_of(names: Names) -> dict[str, Any]:
    """Name the parameters of a translating or summarising model; return its config.

    Raises ValueError for a feature that no architecture of BART's kind has.
    """
    scopes = {stack: embedding_scope(names, stack) for stack in ("encoder", "decoder")}
    tables = {stack: f"{scope}/weight" for stack, scope in scopes.items()}
    size = names.shape(tables["decoder"], 2)[1]
    norm_first = bool(names.same_scalar(["encoder/pre_norm", "decoder/pre_norm"], None))
    has_embedding_norm = "decoder/layernorm_embedding/gamma" in names
    kind = _kind(names, norm_first, has_embedding_norm)
    # Marian begins with zeros: transformers has a token for this, after all others.
    more = int(bool(names.scalar("decoder/start_from_zero_embedding", 0.0)))
    if more and kind != "marian":
        raise names.refused("begins with an embedding of zeros and has norms first")
    offset = 2 if kind in ("bart", "mbart", "m2m_100") else 0
    config: dict[str, Any] = {"model_type": kind, "d_model": size}
    for stack, table in tables.items():
        names.add(f"model.{stack}.embed_tokens.weight", table, more=more)
        # M2M100's table is a buffer with another name.
        positions = f"model.{stack}.embed_positions.weight" + "s" * (kind == "m2m_100")
        names.add(positions, f"{stack}/position_encodings/encodings", zeros=offset)
        if has_embedding_norm:
            names.norm(
                f"model.{stack}.layernorm_embedding",
                f"{stack}/layernorm_embedding",
                has_beta=True,
            )
        if norm_first:
            names.norm(f"model.{stack}.layer_norm", f"{stack}/layer_norm", has_beta=True)
        config |= _layers(names, stack, size)
    names.add("lm_head.weight", "decoder/projection/weight", more=more)
    if kind != "m2m_100":
        _final_bias(names, more)
    vocab = names.shape(tables["decoder"], 2)[0] + more
    config |= {
        "vocab_size": vocab,
        "scale_embedding": is_scaled(names, "decoder", size),
        "activation_function": activation_of(names, "decoder/activation"),
        "max_position_embeddings": names.shape("decoder/position_encodings/encodings", 2)[0],
        "forced_bos_token_id": None,
        "forced_eos_token_id": None,
    }
    if activation_of(names, "encoder/activation") != config["activation_function"]:
        raise names.refused("has another activation in its encoder than in its decoder")
    if is_scaled(names, "encoder", size) != config["scale_embedding"]:
        raise names.refused("multiplies the embedding of its encoder or of its decoder alone")
    embeddings = {names.parts[f"model.{stack}.embed_tokens.weight"] for stack in tables}
    is_shared = len(embeddings) == 1
    if kind == "marian":
        sources = names.shape(tables["encoder"], 2)[0] + more
        # transformers has one padding token for both vocabularies: it must be a row of each.
        config |= {"vocab_size": max(sources, vocab), "decoder_vocab_size": vocab}
        config["share_encoder_decoder_embeddings"] = is_shared
    if kind != "marian" or is_shared:
        names.add("model.shared.weight", tables["decoder"], more=more)
    names.must_be_zero("decoder/alibi", "encoder/multi_query_attention")
    names.check_all_read(*NO_MATTER)
    return config


def _final_bias(names: Names, more: int) -> None:
    """Name the bias of the logits; a token that the file lacks is never chosen."""
    bias = "decoder/projection/bias"
    rows = names.shape("decoder/projection/weight", 2)[0]
    if bias in names:
        names.add("final_logits_bias", bias, more=more, fill=-math.inf)
    else:
        names.zeros("final_logits_bias", rows, more=more, fill=-math.inf)


def whisper_of(names: Names) -> dict[str, Any]:
    """Name the parameters of a Whisper; return its config.

    Raises ValueError for a feature that Whisper does not have.
    """
    vocab, size = names.shape("decoder/embeddings/weight", 2)
    names.add("model.decoder.embed_tokens.weight", "decoder/embeddings/weight")
    names.add("proj_out.weight", "decoder/projection/weight")
    config: dict[str, Any] = {"model_type": "whisper", "d_model": size, "vocab_size": vocab}
    for stack, positions in (("encoder", "source"), ("decoder", "target")):
        encodings = f"{stack}/position_encodings/encodings"
        names.add(f"model.{stack}.embed_positions.weight", encodings)
        names.norm(f"model.{stack}.layer_norm", f"{stack}/layer_norm", has_beta=True)
        config |= _layers(names, stack, size)
        config[f"max_{positions}_positions"] = names.shape(encodings, 2)[0]
    # Keys have none: it would add a constant to the scores of a query, which softmax cancels.
    names.parts = {
        name: part for name, part in names.parts.items() if not name.endswith("k_proj.bias")
    }
    for conv in ("conv1", "conv2"):
        names.linear(f"model.encoder.{conv}", f"encoder/{conv}")
    if names.scalar("decoder/pre_norm", 1.0) != 1.0:
        raise names.refused("has norms behind its layers")
    names.must_be_zero("decoder/alibi", "decoder/start_from_zero_embedding")
    if is_scaled(names, "decoder", size):
        raise names.refused("multiplies its embedding")
    config |= {
        "num_mel_bins": names.shape("encoder/conv1/weight", 3)[1],
        "activation_function": activation_of(names, "decoder/activation", 3),
        "scale_embedding": False,
    }
    if config["activation_function"] != "gelu":
        raise names.refused(f"has activation {config['activation_function']!r}")
    names.check_all_read(*NO_MATTER)
    return config


BIAS = "self_attention/relative_attention_bias"


def _t5_attention(names: Names, parameter: str, scope: str, size: int) -> None:
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


def _t5_stack(names: Names, stack: str, size: int, is_gated: bool, own_biases: bool) -> int:
    """Name the layers of a stack; return their number."""
    count = names.layers(stack)
    names.add(f"{stack}.embed_tokens.weight", f"{embedding_scope(names, stack)}/weight")
    names.norm(f"{stack}.final_layer_norm", f"{stack}/layer_norm", has_beta=False)
    for i in range(count):
        scope, block = f"{stack}/layer_{i}", f"{stack}.block.{i}.layer"
        attention = f"{block}.0.SelfAttention"
        _t5_attention(names, attention, f"{scope}/self_attention", size)
        bias = f"{attention}.relative_attention_bias.weight"
        names.add(bias, f"{scope}/{BIAS}")
        if not own_biases and i > 0 and names.parts.pop(bias) != names.parts[
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        ]:  # fmt: skip
            raise names.refused(f"has a position bias of its own in {scope!r} alone")
        if stack == "decoder":
            _t5_attention(names, f"{block}.1.EncDecAttention", f"{scope}/attention", size)
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

    Raises ValueError for a feature that these do not have.
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
        stack: _t5_stack(names, stack, rows // 3, is_gated, own_biases)
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
    if kind == "t5":  # whose config passes over its sign in transformers 5.0
        config["scale_decoder_outputs"] = is_output_scaled
    names.check_all_read(*NO_MATTER)
    return config

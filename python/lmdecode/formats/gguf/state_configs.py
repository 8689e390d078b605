"""The configs of transformers of GGUF files some of whose layers keep a state."""

from __future__ import annotations

from typing import Any

from lmdecode.formats.gguf.facts import Facts, refused

__all__ = ["lfm2", "qwen35"]


def _common(facts: Facts) -> dict[str, Any]:
    vocab_size, size = facts.shape("token_embd.weight")
    return {
        "vocab_size": vocab_size,
        "hidden_size": size,
        "intermediate_size": facts.count("feed_forward_length"),
        "max_position_embeddings": facts.count("context_length"),
        "num_attention_heads": facts.count("attention.head_count"),
        "tie_word_embeddings": "output.weight" not in facts.file.tensors,
    }


def _rope(facts: Facts, theta: float) -> dict[str, Any]:
    if (kind := facts.text("rope.scaling.type", "none")) != "none":
        raise refused(facts.file, f"has a rope.scaling.type {kind!r}; expected none")
    return {"rope_type": "default", "rope_theta": facts.number("rope.freq_base", theta)}


def lfm2(facts: Facts) -> dict[str, Any]:
    """Return the config entries of LFM2; layers without key heads are convolutions."""
    if facts.has("attention.sliding_window"):
        raise refused(facts.file, "has an attention.sliding_window; expected none of 'lfm2'")
    entries = _common(facts)
    layers = facts.count("block_count")
    key_heads = facts.counts("attention.head_count_kv", layers)
    if len(some := {heads for heads in key_heads if heads}) != 1:
        raise refused(
            facts.file,
            f"has {sorted(some)} key heads in layers with attention; expected the same in all",
        )
    return {
        **entries,
        "model_type": "lfm2",
        "num_hidden_layers": layers,
        "num_key_value_heads": some.pop(),
        "layer_types": ["full_attention" if heads else "conv" for heads in key_heads],
        "norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": facts.count("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,  # the file has the size that was adjusted
        "rope_parameters": _rope(facts, 1e6),
    }


def qwen35(facts: Facts) -> dict[str, Any]:
    """Return the config entries of Qwen 3.5's text; its layers that predict further are left."""
    entries, head_size = _common(facts), facts.count("attention.key_length")
    layers = facts.count("block_count") - facts.count("nextn_predict_layers", 0, least=0)
    if facts.has("attention.recurrent_layers"):
        recurrent = facts.counts("attention.recurrent_layers", facts.count("block_count"))[:layers]
    else:
        interval = facts.count("full_attention_interval", 4)
        recurrent = [int((layer + 1) % interval != 0) for layer in range(layers)]
    heads = facts.count("ssm.time_step_rank")
    turned = facts.count("rope.dimension_count", head_size)
    return {
        **entries,
        "model_type": "qwen3_5_text",
        "num_hidden_layers": layers,
        "head_dim": head_size,
        "num_key_value_heads": facts.count("attention.head_count_kv"),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "layer_types": ["linear_attention" if r else "full_attention" for r in recurrent],
        "linear_conv_kernel_dim": facts.count("ssm.conv_kernel"),
        "linear_key_head_dim": facts.count("ssm.state_size"),
        "linear_value_head_dim": facts.count("ssm.inner_size") // heads,
        "linear_num_key_heads": facts.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        # A text alone has one position where an image has three: sections change nothing.
        "rope_parameters": {**_rope(facts, 1e7), "partial_rotary_factor": turned / head_size},
    }

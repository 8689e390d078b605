"""The configs of transformers that a GGUF file's metadata stand for, by its architecture.

Defaults are those of llama.cpp where a file may leave something out: an entry that transformers has
another default for is always given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmdecode.formats.gguf.common_config import (
    common,
    has_query_bias,
    head_size_of,
    layer_types,
    plain_rope,
    rope_of,
)
from lmdecode.formats.gguf.expert_config import (
    expert_counts,
    expert_size,
    layers_without_experts,
)
from lmdecode.formats.gguf.facts import Facts, refused
from lmdecode.formats.gguf.gemma4_config import gemma4
from lmdecode.formats.gguf.mamba2_configs import falcon_h1, granite_scales, granitehybrid
from lmdecode.formats.gguf.state_configs import lfm2, lfm2moe, qwen3next, qwen35, qwen35moe

__all__ = ["CONFIGS", "config_entries"]


def _head_sizes(facts: Facts) -> dict[str, int]:
    """Heads and their size, which must be those of the first layer's queries."""
    size, heads = facts.count("embedding_length"), facts.count("attention.head_count")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": facts.count("attention.head_count_kv", heads),
        "head_dim": head_size_of(facts, max(1, size // heads)),
    }


def _ffn_size(facts: Facts) -> int:
    """Inner features of layers without experts; files of experts need not tell."""
    if not facts.has("feed_forward_length") and facts.has("expert_count"):
        return facts.count("expert_feed_forward_length", 1)
    return facts.count("feed_forward_length")


def _common(facts: Facts) -> dict[str, Any]:
    """Return the config entries that Llama-like models share, except the rotary embedding."""
    heads = _head_sizes(facts)
    if "blk.0.attn_q.weight" in facts.file.tensors:
        rows = facts.shape("blk.0.attn_q.weight")[0]
    else:
        rows = facts.shape("blk.0.attn_qkv.weight")[0]
        rows -= 2 * heads["num_key_value_heads"] * heads["head_dim"]
    if rows != heads["num_attention_heads"] * heads["head_dim"]:
        raise refused(
            facts.file,
            f"has {rows} query features; expected {heads['num_attention_heads']} heads of "
            f"{heads['head_dim']}",
        )
    entries = common(facts)
    return {
        **entries,
        "num_hidden_layers": facts.count("block_count"),
        "intermediate_size": _ffn_size(facts),
        "rms_norm_eps": facts.number(
            "attention.layer_norm_rms_epsilon", 1e-6 if facts.is_ollamas else None
        ),
        **heads,
    }


def _with_rope(facts: Facts) -> dict[str, Any]:
    entries = _common(facts)
    return {**entries, "rope_parameters": rope_of(facts, entries["head_dim"])}


def _biases(facts: Facts) -> dict[str, Any]:
    return {
        "attention_bias": has_query_bias(facts),
        "mlp_bias": "blk.0.ffn_up.bias" in facts.file.tensors,
    }


def _llama(facts: Facts) -> dict[str, Any]:
    entries = {**_with_rope(facts), **_biases(facts)}
    if facts.has("attention.sliding_window"):  # llama.cpp's name of Mistral is llama
        window = facts.count("attention.sliding_window", least=0)
        if window:
            return {**entries, "model_type": "mistral", "sliding_window": window}
    return {**entries, "model_type": "llama"}


def _granite(facts: Facts) -> dict[str, Any]:
    if not facts.flag("rope.scaling.finetuned", True):  # llama.cpp's switch of positions
        raise refused(facts.file, "has False for rope.scaling.finetuned; expected positions")
    entries = {**_with_rope(facts), **_biases(facts)}
    return {**entries, **granite_scales(facts, entries["head_dim"]), "model_type": "granite"}


def _smollm3(facts: Facts) -> dict[str, Any]:
    return {
        **_with_rope(facts),
        **_biases(facts),
        "model_type": "smollm3",
        "use_sliding_window": False,
        "no_rope_layer_interval": 4,  # in llama.cpp, too, whatever the file
    }


def _olmo2(facts: Facts) -> dict[str, Any]:
    if facts.has("attention.sliding_window"):
        raise refused(facts.file, "is of the architecture 'olmo2' with a window, OLMo 3; "
                                  "expected OLMo 2")  # fmt: skip
    return {
        **_with_rope(facts),
        "model_type": "olmo2",
        "attention_bias": has_query_bias(facts),
    }


def _qwen2(facts: Facts) -> dict[str, Any]:
    return {**_with_rope(facts), "model_type": "qwen2", "use_sliding_window": False}


def _qwen3(facts: Facts) -> dict[str, Any]:
    return {**_qwen2(facts), "model_type": "qwen3", "attention_bias": has_query_bias(facts)}


def _phi3(facts: Facts) -> dict[str, Any]:
    entries = _common(facts)
    head_size = entries.pop("head_dim")
    size = facts.count("rope.dimension_count", head_size)
    if size > head_size or size % 2:
        raise refused(facts.file, f"turns {size} of {head_size} features of a head; expected fewer")
    rope = plain_rope(facts)
    return {
        **entries,
        "model_type": "phi3",
        "sliding_window": facts.count("attention.sliding_window", 0, least=0) or None,
        "original_max_position_embeddings": entries["max_position_embeddings"],
        "rope_parameters": {**rope, "partial_rotary_factor": size / head_size},
    }


def _gemma(facts: Facts, layers_of_27b: int, period: int, window: int) -> dict[str, Any]:
    """Return the config entries that Gemma 2 and 3 share; see ``layer_types`` of ``period``.

    A file need not have the scale of the scores. Models of 27 billion weights have a different
    scale from the others; as in llama.cpp, their number of layers identifies them.
    """
    entries = _common(facts)
    layers, heads = entries["num_hidden_layers"], entries["num_attention_heads"]
    scalar = entries["hidden_size"] // heads if layers == layers_of_27b else entries["head_dim"]
    if facts.has("attention.scale"):
        scalar = round(facts.number("attention.scale") ** -2)
    window = facts.count("attention.sliding_window", window, least=0)
    kinds = layer_types(facts, layers, period)
    return {
        **entries,
        "query_pre_attn_scalar": scalar,
        "sliding_window": window or None,
        "layer_types": kinds if window else ["full_attention"] * layers,
        "use_bidirectional_attention": False,
        "final_logit_softcapping": facts.number("final_logit_softcapping")
        if facts.has("final_logit_softcapping")
        else None,
    }


def _gemma2(facts: Facts) -> dict[str, Any]:
    entries = _gemma(facts, 46, 2, 4096)
    return {
        **entries,
        "model_type": "gemma2",
        "final_logit_softcapping": entries["final_logit_softcapping"] or 30.0,
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
        "rope_parameters": rope_of(facts, entries["head_dim"]),
    }


def _gemma3(facts: Facts) -> dict[str, Any]:
    entries = _gemma(facts, 62, 6, 0)
    rope = rope_of(facts, entries["head_dim"])
    local = facts.number("rope.freq_base_swa", 1e4)
    if facts.is_ollamas:  # its names and defaults; and it leaves logits as they are
        local = facts.number("rope.local.freq_base", local)
        known = facts.number("rope.freq_base", 1e6)
        rope["rope_theta"] = facts.number("rope.global.freq_base", known)
        if entries["max_position_embeddings"] >= 131072 and not facts.has("rope.scaling.factor"):
            rope |= {"rope_type": "linear", "factor": 8.0}
        entries["final_logit_softcapping"] = None
    return {
        **entries,
        "model_type": "gemma3_text",
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _gpt2(facts: Facts) -> dict[str, Any]:
    vocab_size, size = facts.shape("token_embd.weight")
    length = facts.shape("position_embd.weight")[0]
    if (stated := facts.count("context_length")) != length:
        raise refused(facts.file, f"has {length} positions; expected its context_length, {stated}")
    return {
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_embd": size,
        "n_positions": length,
        "n_layer": facts.count("block_count"),
        "n_head": facts.count("attention.head_count"),
        "n_inner": facts.count("feed_forward_length"),
        "layer_norm_epsilon": facts.number("attention.layer_norm_epsilon"),
        "tie_word_embeddings": "output.weight" not in facts.file.tensors,
    }


def _qwen3_moe(facts: Facts) -> dict[str, Any]:
    return {
        **_qwen3(facts),
        **expert_counts(facts),
        "model_type": "qwen3_moe",
        "moe_intermediate_size": expert_size(facts),
        "norm_topk_prob": True,  # in llama.cpp, too, whatever the file
        "decoder_sparse_step": 1,
        "mlp_only_layers": layers_without_experts(facts, facts.count("block_count")),
    }


def _olmoe(facts: Facts) -> dict[str, Any]:
    entries = _with_rope(facts)
    entries.pop("head_dim")
    return {
        **entries,
        **expert_counts(facts),
        "model_type": "olmoe",
        "intermediate_size": expert_size(facts),
        "norm_topk_prob": False,  # in llama.cpp, too
        "clip_qkv": None,
        "attention_bias": has_query_bias(facts),
    }


def _granitemoe(facts: Facts) -> dict[str, Any]:
    shared = facts.count("expert_shared_feed_forward_length", 0, least=0)
    more = {"shared_intermediate_size": shared} if shared else {}
    return {
        **_granite(facts),
        **expert_counts(facts, "num_local_experts"),
        **more,
        "model_type": "granitemoeshared" if shared else "granitemoe",
        "intermediate_size": expert_size(facts),
    }


def _gpt_oss(facts: Facts) -> dict[str, Any]:
    entries = _common(facts)
    layers, rope = entries["num_hidden_layers"], rope_of(facts, entries["head_dim"])
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    return {
        **entries,
        **expert_counts(facts, "num_local_experts"),
        "model_type": "gpt_oss",
        "intermediate_size": expert_size(facts),
        "attention_bias": has_query_bias(facts),
        "sliding_window": facts.count("attention.sliding_window"),
        "layer_types": layer_types(facts, layers, 2),
        "rope_parameters": rope,
    }


CONFIGS: dict[str, Callable[[Facts], dict[str, Any]]] = {
    "falcon-h1": falcon_h1,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": gemma4,
    "gpt2": _gpt2,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "granitehybrid": granitehybrid,
    "granitemoe": _granitemoe,
    "lfm2": lfm2,
    "lfm2moe": lfm2moe,
    "llama": _llama,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen35": qwen35,
    "qwen35moe": qwen35moe,
    "qwen3moe": _qwen3_moe,
    "qwen3next": qwen3next,
    "smollm3": _smollm3,
}


def config_entries(facts: Facts) -> dict[str, Any]:
    """Return a config's entries, its ``model_type`` too.

    Raises
    ------
    ValueError
        Another architecture, an entry that is missing or makes no sense, or what there is not.
    """
    file = facts.file
    if facts.architecture not in CONFIGS:
        raise refused(
            file,
            f"is of the architecture {facts.architecture!r}; expected one of {', '.join(CONFIGS)}",
        )
    split = file.metadata.get("split.count", 0)
    if split not in (0, 1):
        raise refused(
            file, f"is one of {split!r} files of a model; expected one file, as "
            "llama-gguf-split --merge makes of them"
        )  # fmt: skip
    layers = facts.count("block_count")
    names = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if names != {str(i) for i in range(min(layers, len(names) + 1))}:
        raise refused(file, f"has tensors of {len(names)} layers; expected {layers}")
    embedding = facts.shape("token_embd.weight")
    if len(embedding) != 2 or embedding[1] != facts.count("embedding_length"):
        raise refused(
            file,
            f"has token_embd.weight of shape {list(embedding)}; expected [tokens, "
            f"{facts.count('embedding_length')}]",
        )
    entries = CONFIGS[facts.architecture](facts)
    facts.check_all_read()
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        entries[f"{name}_token_id"] = facts.token(f"{key}_token_id", embedding[0])
    return entries

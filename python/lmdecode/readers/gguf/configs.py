"""Configs of transformers for GGUF files, by architecture.

Defaults are llama.cpp's where a file may leave an entry out. An entry that transformers has another
default for is always given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lmdecode.readers.gguf.common_config import (
    check_all_turned,
    common,
    expert_counts,
    expert_size,
    has_query_bias,
    head_size_of,
    layer_types,
    layers_without_experts,
    plain_rope,
    rope_of,
)
from lmdecode.readers.gguf.metadata import Facts, refused
from lmdecode.readers.gguf.state_configs import (
    falcon_h1,
    granite_scales,
    granitehybrid,
    lfm2,
    lfm2moe,
    qwen3next,
    qwen35,
    qwen35moe,
)

__all__ = ["config_entries", "unused_tensors"]


_UNTURNED = 1e29  # factors above it stand for pairs that are not turned


def _turned_share(facts: Facts, head_size: int) -> float:
    """Return the share of a head that layers without a window turn: a tensor tells."""
    if "rope_freqs.weight" not in facts.file.tensors:
        return 1.0
    factors = facts.file.tensor("rope_freqs.weight")
    assert isinstance(factors, Tensor)
    turned = int((factors == 1).sum())
    is_cut = bool((factors[turned:] > _UNTURNED).all())
    if factors.shape != (head_size // 2,) or not is_cut or not bool((factors[:turned] == 1).all()):
        raise refused(
            facts.file,
            f"has a rope_freqs.weight of shape {list(factors.shape)} with {turned} factors of 1; "
            f"expected [{head_size // 2}], first those of 1, then those of 1e30",
        )
    return 2 * turned / head_size


def _of_kind(facts: Facts, key: str, slides: list[bool], is_sliding: bool, default: int) -> int:
    """Return what layers of a kind have in common."""
    numbers = facts.counts(key, len(slides))
    found = {n for n, s in zip(numbers, slides, strict=True) if s == is_sliding} or {default}
    if len(found) > 1:
        raise refused(
            facts.file, f"has {sorted(found)} for {key} of layers of a kind; expected one number"
        )
    return found.pop()


def _ffn(facts: Facts, layers: int, shared: int) -> dict[str, Any]:
    sizes = facts.counts("feed_forward_length", layers)
    size = sizes[0]
    for factor in (1, 2):
        if sizes == [size] * (layers - shared) + [factor * size] * shared:
            return {"intermediate_size": size, "use_double_wide_mlp": factor == 2}
    raise refused(
        facts.file,
        f"has {sizes} inner features; expected the same in all layers, or twice of these in those "
        "without keys of their own",
    )


def _experts(facts: Facts) -> dict[str, Any]:
    if not facts.count("expert_count", 0, least=0):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        **expert_counts(facts, chosen_name="top_k_experts"),
        "moe_intermediate_size": facts.count("expert_feed_forward_length"),
    }


def _softcap(facts: Facts) -> float | None:
    """Return what caps logits: 0 stands for nothing, and nothing for 30."""
    key = "final_logit_softcapping"
    is_none = facts.has(key) and facts.file.metadata[f"gemma4.{key}"] == 0
    return None if is_none else facts.number(key, 30.0)


def _shared_layers(facts: Facts, layers: int) -> int:
    """Return how many layers at the end take keys and values of those before them."""
    shared = facts.count("attention.shared_kv_layers", 0, least=0)
    if shared >= layers:
        raise refused(
            facts.file,
            f"has {shared} for gemma4.attention.shared_kv_layers; expected fewer than its "
            f"{layers} layers",
        )
    return shared


def _per_layer_size(facts: Facts, layers: int) -> int:
    """Return what a token gives to each layer: a row of the second table has it for all."""
    size = facts.count("embedding_length_per_layer_input", 0, least=0)
    if size and (columns := facts.shape("per_layer_token_embd.weight")[-1]) != layers * size:
        raise refused(
            facts.file,
            f"has a per_layer_token_embd.weight of {columns} columns; expected {layers} layers "
            f"of {size}",
        )
    return size


def unused_tensors(config: Any) -> set[str]:
    """Return tensors that a file may have: keys and values of layers that use another layer's."""
    layers = range(config.num_hidden_layers)[
        config.num_hidden_layers - config.num_kv_shared_layers :
    ]
    names = ("attn_k", "attn_k_norm", "attn_v")
    return {f"blk.{i}.{name}.weight" for i in layers for name in names}


def gemma4(facts: Facts) -> dict[str, Any]:
    """Return the config entries of Gemma 4's text."""
    vocab_size, size = facts.shape("token_embd.weight")
    tensors, layers = facts.file.tensors, facts.count("block_count")
    shared = _shared_layers(facts, layers)
    slides = [bool(s) for s in facts.counts("attention.sliding_window_pattern", layers)]
    head_size, global_size = head_size_of(facts, suffix="_swa"), head_size_of(facts)
    check_all_turned(facts, "rope.dimension_count_swa", head_size)
    first_full = slides.index(False) if False in slides else 0
    heads = facts.count("attention.head_count")
    kv_heads = _of_kind(facts, "attention.head_count_kv", slides, True, heads)
    global_heads = _of_kind(facts, "attention.head_count_kv", slides, False, kv_heads)
    keys_are_values = False in slides and f"blk.{first_full}.attn_v.weight" not in tensors
    # A count of its own goes with these alone in transformers' config.
    heads_of_full = {"num_key_value_heads": global_heads, "head_dim": global_size}
    return {
        "model_type": "gemma4_text",
        "vocab_size": vocab_size,
        "vocab_size_per_layer_input": vocab_size,
        "hidden_size": size,
        "num_hidden_layers": layers,
        **_ffn(facts, layers, shared),
        **_experts(facts),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "per_layer_config": {i: heads_of_full for i, s in enumerate(slides) if not s},
        "max_position_embeddings": facts.count("context_length"),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_size_per_layer_input": _per_layer_size(facts, layers),
        "attention_k_eq_v": keys_are_values,
        "num_kv_shared_layers": shared,
        "sliding_window": facts.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if s else "full_attention" for s in slides],
        "final_logit_softcapping": _softcap(facts),
        "use_bidirectional_attention": None,
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": facts.number("rope.freq_base_swa", 1e4),
            },
            "full_attention": {
                **plain_rope(facts, global_size),
                "rope_type": "proportional",
                "partial_rotary_factor": _turned_share(facts, global_size),
            },
        },
    }


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
    entries = {**_with_rope(facts), "attention_bias": has_query_bias(facts)}
    window = facts.count("attention.sliding_window", 0, least=0)
    if not window:
        return {**entries, "model_type": "olmo2"}
    rope = entries["rope_parameters"]
    local = facts.number("rope.freq_base_swa", rope["rope_theta"])
    return {
        **entries,
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": layer_types(facts, entries["num_hidden_layers"], 4),
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
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
    """Return a config's entries, with its ``model_type``.

    Raises ValueError for another architecture, a missing or impossible entry, or an unsupported
    feature.
    """
    file = facts.file
    if facts.architecture not in CONFIGS:
        raise refused(
            file,
            f"is of the architecture {facts.architecture!r}; expected one of {', '.join(CONFIGS)}",
        )
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

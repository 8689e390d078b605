"""What the configs of models have in common: sizes, heads, and how these are turned."""

from __future__ import annotations

from typing import Any

from lmdecode.formats.gguf.facts import Facts, refused

__all__ = ["check_all_turned", "common", "head_size_of", "plain_rope", "refuse_scaled_rope"]


def common(facts: Facts) -> dict[str, Any]:
    """Return the config entries that all models have."""
    vocab_size, size = facts.shape("token_embd.weight")
    return {
        "vocab_size": vocab_size,
        "hidden_size": size,
        "max_position_embeddings": facts.count("context_length"),
        "num_attention_heads": facts.size("attention.head_count"),
        "tie_word_embeddings": "output.weight" not in facts.file.tensors,
    }


def head_size_of(facts: Facts, default: int | None = None, suffix: str = "") -> int:
    """Return the features of a head of keys, which are those of values; ``suffix``: of the keys."""
    size = facts.size(f"attention.key_length{suffix}", default)
    if (values := facts.size(f"attention.value_length{suffix}", size)) != size:
        raise refused(facts.file, f"has values of {values} features; expected keys', {size}")
    return size


def check_all_turned(facts: Facts, key: str, head_size: int) -> None:
    """Refuse a file that turns a part of a head alone."""
    if (turned := facts.size(key, head_size)) != head_size:
        raise refused(
            facts.file, f"turns {turned} of {head_size} features of a head; expected all of them"
        )


def refuse_scaled_rope(facts: Facts) -> None:
    """Refuse a rotary embedding with a scaling."""
    if (kind := facts.text("rope.scaling.type", "none")) != "none":
        raise refused(facts.file, f"has a rope.scaling.type {kind!r}; expected none")


def plain_rope(facts: Facts, theta: float) -> dict[str, Any]:
    """Return a rotary embedding without scaling; ``theta`` is the default of its base."""
    refuse_scaled_rope(facts)
    return {"rope_type": "default", "rope_theta": facts.number("rope.freq_base", theta)}

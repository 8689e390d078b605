"""The sizes in a GGUF file of a decoder-only model, as llama.cpp's converter writes them."""

from __future__ import annotations

from typing import Any

__all__ = ["write_sizes"]


def write_sizes(
    writer: Any,
    *,
    model_size: int,
    layers: int,
    heads: int,
    key_heads: int,
    head_size: int,
    ffn_size: int,
    vocab: int,
    epsilon: float,
    rope_base: float,
    turned: int | None = None,
    length: int = 32768,
) -> None:
    """Add what all such files have to a ``gguf.GGUFWriter``; there is no tokenizer.

    ``turned`` features of a head turn by their position: all of them if not given.
    """
    writer.add_context_length(length)
    writer.add_embedding_length(model_size)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ffn_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(epsilon)
    writer.add_rope_freq_base(rope_base)
    writer.add_rope_dimension_count(turned or head_size)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("no_vocab")

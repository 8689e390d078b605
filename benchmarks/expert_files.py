"""GGUF files of mixtures of experts with random weights, written tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gguf_header import write_sizes

__all__ = ["GPT_OSS", "QWEN3_MOE", "Sizes", "bare", "write_model"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, and the types of its matrices: of experts, and of all others."""

    architecture: str
    model_size: int
    num_experts: int
    num_chosen: int
    expert_size: int
    heads: int
    key_heads: int
    head_size: int
    layers: int
    vocab: int
    expert_kind: str
    kind: str

    @property
    def is_gpt_oss(self) -> bool:
        """Whether it has biases, sinks and windows."""
        return self.architecture == "gpt-oss"

    @property
    def expert_weights(self) -> int:
        """Of one expert of one layer."""
        return 3 * self.model_size * self.expert_size


#: Layers of Qwen3-30B-A3B.
QWEN3_MOE = Sizes("qwen3moe", 2048, 128, 8, 768, 32, 4, 128, 4, 8192, "Q4_0", "Q4_0")
#: Layers of gpt-oss-20b.
GPT_OSS = Sizes("gpt-oss", 2880, 32, 4, 2880, 64, 8, 64, 3, 8192, "MXFP4", "Q8_0")


def bare(sizes: Sizes) -> Sizes:
    """Return the sizes with next to nothing but experts."""
    return replace(sizes, heads=1, key_heads=1, head_size=64, vocab=256)


def _blocks(random: Any, kind: str, rows: int, columns: int, spread: float) -> Any:
    """Return blocks [rows, bytes] of numbers whose mean is 0, with a standard deviation."""
    count = rows * columns // 32
    if kind == "MXFP4":
        scales = np.full((count, 1), 127 + round(np.log2(spread / 2.92)), dtype=np.uint8)
        codes = random.integers(0, 256, (count, 16), dtype=np.uint8)
        return np.concatenate((scales, codes), axis=1).reshape(rows, -1)
    if kind == "Q4_0":
        low, high = random.integers(1, 16, (2, count, 16), dtype=np.uint8)
        codes, deviation = low | high << 4, 4.32
    else:
        codes, deviation = random.integers(-127, 128, (count, 32), dtype=np.int8), 73.6
    scale = np.array([spread / deviation], dtype=np.float16).view(np.uint8)
    scales = np.broadcast_to(scale, (count, 2))
    return np.concatenate((scales, codes.view(np.uint8)), axis=1).reshape(rows, -1)


def _values(random: Any, name: str, shape: tuple[int, ...], kind: str) -> Any:
    if kind == "ones":
        return np.ones(shape, dtype=np.float32)
    if kind == "F32":
        return random.standard_normal(shape, dtype=np.float32) * np.float32(shape[-1] ** -0.5)
    # Tokens stay apart in all layers: else their routers would choose the same experts.
    spread = 1.0 if name.startswith("token_embd") else shape[-1] ** -0.5
    return _blocks(random, kind, int(np.prod(shape[:-1])), shape[-1], spread)


def _tensors(sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield names, shapes and types: F32, of ones or of random numbers, or of blocks."""
    size, inner, experts = sizes.model_size, sizes.expert_size, sizes.num_experts
    queries, keys = (heads * sizes.head_size for heads in (sizes.heads, sizes.key_heads))
    for name in ("token_embd", "output"):
        yield f"{name}.weight", (sizes.vocab, size), sizes.kind
    yield "output_norm.weight", (size,), "ones"
    for layer in range(sizes.layers):
        block = f"blk.{layer}."
        yield f"{block}attn_norm.weight", (size,), "ones"
        for name, outputs, inputs in (
            ("attn_q", queries, size),
            ("attn_k", keys, size),
            ("attn_v", keys, size),
            ("attn_output", size, queries),
        ):
            yield f"{block}{name}.weight", (outputs, inputs), sizes.kind
            if sizes.is_gpt_oss:
                yield f"{block}{name}.bias", (outputs,), "F32"
        if sizes.is_gpt_oss:
            yield f"{block}attn_sinks.weight", (sizes.heads,), "F32"
            yield f"{block}post_attention_norm.weight", (size,), "ones"
            yield f"{block}ffn_gate_inp.bias", (experts,), "F32"
        else:
            for name in ("attn_q_norm", "attn_k_norm"):
                yield f"{block}{name}.weight", (sizes.head_size,), "ones"
            yield f"{block}ffn_norm.weight", (size,), "ones"
        yield f"{block}ffn_gate_inp.weight", (experts, size), "F32"
        for name, outputs, inputs in (
            ("gate", inner, size),
            ("up", inner, size),
            ("down", size, inner),
        ):
            yield f"{block}ffn_{name}_exps.weight", (experts, outputs, inputs), sizes.expert_kind
            if sizes.is_gpt_oss:
                yield f"{block}ffn_{name}_exps.bias", (experts, outputs), "F32"


def _write_header(writer: Any, sizes: Sizes) -> None:
    write_sizes(
        writer, model_size=sizes.model_size, layers=sizes.layers, heads=sizes.heads,
        key_heads=sizes.key_heads, head_size=sizes.head_size, ffn_size=sizes.expert_size,
        vocab=sizes.vocab, epsilon=1e-5, rope_base=1e6,
    )  # fmt: skip
    writer.add_expert_feed_forward_length(sizes.expert_size)
    writer.add_expert_count(sizes.num_experts)
    writer.add_expert_used_count(sizes.num_chosen)
    if sizes.is_gpt_oss:
        writer.add_sliding_window(128)


def write_model(path: Path, sizes: Sizes, seed: int = 0) -> None:
    """Write a file as llama.cpp's converter does; a tensor at a time is in memory."""
    import gguf

    writer, random = gguf.GGUFWriter(str(path), sizes.architecture), np.random.default_rng(seed)
    _write_header(writer, sizes)
    tensors = list(_tensors(sizes))
    for name, shape, kind in tensors:
        if kind in ("ones", "F32"):
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
        else:
            type_of = gguf.GGMLQuantizationType[kind]
            elements, size = gguf.GGML_QUANT_SIZES[type_of]
            row = shape[-1] // elements * size
            byte_shape = (*shape[:-1], row)
            writer.add_tensor_info(
                name, byte_shape, np.dtype(np.uint8), int(np.prod(byte_shape)), type_of
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(_values(random, *tensor))
    writer.close()

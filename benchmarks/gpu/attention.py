"""Times of attention and of merging its states, and of torch's own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import scaled_dot_product_attention

import lmdecode
from benchmarks.attention.bench_merge_attention_states import merge_in_torch
from benchmarks.gpu.machine import Machine, header, name_of, row


def _prefill(machine: Machine, dtype: torch.dtype) -> Iterator[str]:
    sizes = machine.size(
        ((4096, None), (4096, 1024), (16384, 1024), (16384, None)), ((64, None), (64, 16))
    )
    for tokens, window in sizes:
        if dtype == torch.float32 and tokens > 4096:
            continue
        q, k, v = (machine.randn(1, heads, tokens, 128, dtype=dtype) for heads in (32, 8, 8))
        ours = machine.microseconds(
            lambda a=(q, k, v), w=window: lmdecode.sliding_window_attention(*a, window=w)
        )
        theirs = machine.microseconds(
            lambda a=(q, k, v): scaled_dot_product_attention(*a, is_causal=True, enable_gqa=True)
        )
        seen = min(window or tokens, tokens)
        pairs = seen * (seen + 1) // 2 + (tokens - seen) * seen
        rate = 4 * 128 * 32 * pairs / ours / 1e6
        name = f"{name_of(dtype)}, {tokens} tokens, window {window}"
        yield row([name, f"({ours:.1f})", f"({theirs:.1f}), causal", f"{rate:.1f} TFLOP/s"])


def _decode(machine: Machine, dtype: torch.dtype) -> Iterator[str]:
    for batch, keys in machine.size(((1, 4096), (32, 4096), (64, 16384), (1, 131072)), ((2, 64),)):
        q = machine.randn(batch, 32, 1, 128, dtype=dtype)
        k, v = (machine.randn(batch, 8, keys, 128, dtype=dtype) for _ in range(2))
        out = torch.empty_like(k)

        def decode(a: tuple[torch.Tensor, ...] = (q, k, v)) -> object:
            return lmdecode.sliding_window_decode(*a)

        graph, eager = machine.graph_microseconds(decode), machine.microseconds(decode)
        theirs = machine.times(
            lambda a=(q, k, v): scaled_dot_product_attention(*a, enable_gqa=True)
        )
        copy = machine.times(lambda o=out, k=k: o.copy_(k))
        rate = 2 * k.numel() * k.element_size() / (graph or eager) / 1e6
        ours = f"({eager:.1f})" if graph is None else f"{graph:.1f} ({eager:.1f})"
        name = f"{name_of(dtype)}, one token, {batch} x {keys} keys"
        yield row([name, ours, theirs, f"{rate:.2f} TB/s; a copy of K {copy}"])


def _merge(machine: Machine, dtype: torch.dtype) -> Iterator[str]:
    for tokens in machine.size((1, 64, 2048, 16384), (3,)):
        outputs, lse = (
            machine.randn(2, 1, 32, tokens, 128, dtype=dtype),
            machine.randn(2, 1, 32, tokens),
        )
        states = (outputs[0], lse[0], outputs[1], lse[1])
        ours = machine.times(lambda a=states: lmdecode.merge_attention_states(*a))
        theirs = machine.times(lambda a=states: merge_in_torch(*a))
        out = torch.empty_like(outputs[0])
        copy = machine.times(lambda o=out, x=outputs: o.copy_(x[0]))
        name = f"{name_of(dtype)}, merge of 32 x {tokens}"
        yield row([name, ours, theirs, f"a copy of one state {copy}"])


def run(machine: Machine) -> Iterator[str]:
    """Time prefill, decode and merge, 32 query heads and 8 of keys, of size 128."""
    yield "32/8 heads of 128. Microseconds, median: in a CUDA graph (and called from Python)."
    yield from header(["what", "ours", "torch", ""])
    for part in (_prefill, _decode, _merge):
        for dtype in (torch.bfloat16, torch.float32):
            yield from part(machine, dtype)

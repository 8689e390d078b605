"""Times of attention and of merging its states, and of torch's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

import lmdecode
from benchmarks.attention.bench_merge_attention_states import merge_in_torch
from benchmarks.gpu.machine import Machine, name_of
from benchmarks.harness import Case, Contestant


def _prefill(
    machine: Machine, dtype: torch.dtype, tokens: int, window: int | None
) -> list[Contestant]:
    q, k, v = (machine.randn(1, heads, tokens, 128, dtype=dtype) for heads in (32, 8, 8))
    return machine.contestants(
        ours=lambda: lmdecode.sliding_window_attention(q, k, v, window=window),
        torch_causal=lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    )


def _decode(machine: Machine, dtype: torch.dtype, batch: int, keys: int) -> list[Contestant]:
    q = machine.randn(batch, 32, 1, 128, dtype=dtype)
    k, v = (machine.randn(batch, 8, keys, 128, dtype=dtype) for _ in range(2))
    out = torch.empty_like(k)
    return machine.contestants(
        ours=lambda: lmdecode.sliding_window_decode(q, k, v),
        torch=lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        limit=lambda: out.copy_(k),  # as many bytes as a read of both
    )


def _merge(machine: Machine, dtype: torch.dtype, tokens: int) -> list[Contestant]:
    outputs, lse = (
        machine.randn(2, 1, 32, tokens, 128, dtype=dtype),
        machine.randn(2, 1, 32, tokens),
    )
    states, out = (outputs[0], lse[0], outputs[1], lse[1]), torch.empty_like(outputs[0])
    return machine.contestants(
        ours=lambda: lmdecode.merge_attention_states(*states),
        torch=lambda: merge_in_torch(*states),
        a_copy_of_one_state=lambda: out.copy_(outputs[0]),
    )


def cases(machine: Machine) -> Iterator[Case]:
    """Yield prefill, decode and merge, 32 query heads and 8 of keys, of size 128."""
    prompts = machine.size(
        ((4096, None), (4096, 1024), (16384, 1024), (16384, None)), ((64, None), (64, 16))
    )
    caches = machine.size(((1, 4096), (32, 4096), (64, 16384), (1, 131072)), ((2, 64),))
    dtypes = (torch.bfloat16, torch.float32)
    for dtype, (tokens, window) in itertools.product(dtypes, prompts):
        if dtype == torch.bfloat16 or tokens <= 4096:
            make, name = partial(_prefill, machine, dtype, tokens, window), name_of(dtype)
            yield machine.case("Prefill", name, make, tokens=tokens, window=window)
    for dtype, (batch, keys) in itertools.product(dtypes, caches):
        make = partial(_decode, machine, dtype, batch, keys)
        yield machine.case("One token", name_of(dtype), make, keys=f"{batch} x {keys}")
    for dtype, tokens in itertools.product(dtypes, machine.size((1, 64, 2048, 16384), (3,))):
        make, name = partial(_merge, machine, dtype, tokens), f"{name_of(dtype)}, merge of states"
        yield machine.case("Merge", name, make, rows=f"32 x {tokens}")

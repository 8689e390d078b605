"""The main kernels, once each at the sizes of their goals: what ncu looks at."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import lmdecode
from benchmarks.gpu.machine import Machine


def run(machine: Machine) -> Iterator[str]:
    """Call them."""
    bfloat16, device = torch.bfloat16, machine.device
    tokens, keys, batch = machine.size((4096, 16384, 64), (64, 64, 2))
    q, k, v = (machine.randn(1, heads, tokens, 128, dtype=bfloat16) for heads in (32, 8, 8))
    lmdecode.sliding_window_attention(q, k, v)
    q = machine.randn(batch, 32, 1, 128, dtype=bfloat16)
    k, v = (machine.randn(batch, 8, keys, 128, dtype=bfloat16) for _ in range(2))
    lmdecode.sliding_window_decode(q, k, v)  # its parts, and what combines them
    lmdecode.reorder_cache_([k, v], torch.arange(batch, device=device).flip(0))
    states = machine.randn(2, 1, 32, tokens, 128, dtype=bfloat16)
    lse = machine.randn(2, 1, 32, tokens)
    lmdecode.merge_attention_states(states[0], lse[0], states[1], lse[1])
    rows, vocab = machine.size((512, 131_072), (2, 500))
    logits = machine.randn(rows, vocab)
    lmdecode.top_k_top_p_sample(logits, 50, 0.9, seed=1, return_logits=True)
    lmdecode.top_k_top_p_sample(logits, top_p=0.95, seed=1)
    rows, vocab = machine.size((32, 32_000), (4, 500))
    best = (machine.randn(rows, vocab), machine.randn(rows))
    lmdecode.log_softmax_top_k(*best, 8, num_beams=4)
    table = lmdecode.BeamIndirection(256, 8192, device=device).table
    parents = torch.arange(256, device=device).flip(0)
    lmdecode.update_beam_indirection_(table, parents, torch.full((256,), 8000, device=device))
    machine.wait()
    yield "called"

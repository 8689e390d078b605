"""Results of CUDA against the CPU bit by bit, and at sizes that no cache holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import lmdecode
from benchmarks.attention.bench_merge_attention_states import merge_in_torch
from benchmarks.gpu.machine import Machine, header, name_of, row
from benchmarks.kv_cache.bench_reorder_cache import parent_map
from tests.support.cases import assert_same_bits
from tests.support.random_cases import (
    LARGE_VOCAB_SIZES,
    MEDIUM_VOCAB_SIZES,
    beam_cases,
    sampling_cases,
)

_SHOWN = 10  # of the cases that differ


def _compare(machine: Machine, op: Any, cases: Iterable[Any], seconds: float) -> tuple[int, list]:
    """Return how many cases were compared in the time, and what differs."""
    end = time.monotonic() + seconds
    count, different = 0, []
    for case in cases:
        if time.monotonic() > end:
            break
        count += 1
        try:
            assert_same_bits(case.to(machine.device).call(op), case.call(op), case)
        except AssertionError as error:
            different.append(str(error))
    return count, different


def run(machine: Machine) -> Iterator[str]:
    """Compare each op on small, medium and large vocabularies."""
    torch.set_num_threads(min(8, torch.get_num_threads()))
    sample, top = lmdecode.top_k_top_p_sample, lmdecode.log_softmax_top_k
    sizes: list[tuple[str, dict[str, Any], int, int]] = [
        ("small", {}, machine.size(3000, 3), 9),
        ("medium", {"vocab_sizes": MEDIUM_VOCAB_SIZES}, machine.size(600, 1), 6),
    ]
    if not machine.is_rehearsal:
        sizes.append(("large", {"vocab_sizes": LARGE_VOCAB_SIZES}, 150, 6))
    yield from header(["op", "vocabularies", "cases compared", "cases that differ"])
    messages: list[str] = []
    for size, options, count, seconds in sizes:
        calls = [
            ("top_k_top_p_sample", sample, sampling_cases(1, count, **options)),
            ("log_softmax_top_k", top, beam_cases(1, count, **options)),
            (
                "log_softmax_top_k, processors",
                top,
                beam_cases(2, count, processors=True, **options),
            ),
        ]
        for name, op, cases in calls:
            compared, different = _compare(machine, op, cases, seconds)
            yield row([name, size, compared, len(different)])
            messages += different
            machine.found_fault |= bool(different) or compared == 0
    if messages:
        yield ""
    yield from (f"- {message}" for message in messages[:_SHOWN])


# Largest error relative to the largest value, of attention on values of a normal distribution.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def _same_bits(on_device: tuple, on_cpu: tuple) -> str:
    try:
        assert_same_bits(on_device, on_cpu)
    except AssertionError as error:
        return f"DIFFERS: {error}"
    return "same bits"


def _equal(got: torch.Tensor, want: torch.Tensor) -> str:
    return "equal" if torch.equal(got, want) else "DIFFERS"


def _near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> str:
    error = float((got.float() - want.float()).abs().max() / want.float().abs().max())
    word = "near" if error <= _TOLERANCE[dtype] else "DIFFERS"
    return f"{word}: error {error:.1e} of the largest"


def _checks(machine: Machine) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield what is checked, and the check."""
    for dtype in (torch.float32, torch.bfloat16):
        for rows, vocab in machine.size(
            ((512, 131072), (64, 1 << 20), (3, (1 << 22) + 3)), ((2, 5003),)
        ):
            text = f"{rows} x {vocab} {name_of(dtype)}"
            for arguments in ({"top_k": 50, "top_p": 0.9}, {"top_p": 0.95}, {}):
                yield (
                    f"top_k_top_p_sample {text}, {arguments or 'no filter'}",
                    lambda r=rows, v=vocab, d=dtype, a=arguments: _sample(machine, r, v, d, a),
                )
            yield (
                f"log_softmax_top_k {text}",
                lambda r=rows, v=vocab, d=dtype: _best(machine, r, v, d),
            )
    shape = machine.size((64, 8, 4096, 128), (8, 2, 16, 8))
    yield f"reorder_cache_ of 2 x {list(shape)} bfloat16", lambda: _reorder(machine, shape)
    states = machine.size((1, 32, 16384, 128), (1, 2, 16, 128))
    for dtype in (torch.float32, torch.bfloat16):
        yield (
            f"merge_attention_states of {list(states)} {name_of(dtype)}",
            lambda d=dtype: _merge(machine, states, d),
        )
    for dtype in (torch.float32, torch.bfloat16):
        for batch, keys in machine.size(((32, 16384), (1, 262144)), ((2, 64),)):
            yield (
                f"sliding_window_decode of {batch} x {keys} keys {name_of(dtype)}",
                lambda b=batch, k=keys, d=dtype: _decode(machine, b, k, d),
            )
        tokens = machine.size(8192, 40)
        yield (
            f"sliding_window_attention of {tokens} tokens {name_of(dtype)}",
            lambda t=tokens, d=dtype: _attend(machine, t, d),
        )


def _sample(machine: Machine, rows: int, vocab: int, dtype: torch.dtype, arguments: dict) -> str:
    x = machine.randn(rows, vocab, dtype=dtype) * 3
    got = lmdecode.top_k_top_p_sample(x, **arguments, seed=5, return_logprob=True)
    want = lmdecode.top_k_top_p_sample(x.cpu(), **arguments, seed=5, return_logprob=True)
    return _same_bits(got, want)


def _best(machine: Machine, rows: int, vocab: int, dtype: torch.dtype) -> str:
    x, scores = machine.randn(rows, vocab, dtype=dtype) * 3, machine.randn(rows)
    got = lmdecode.log_softmax_top_k(x, scores, 8, num_beams=1)
    want = lmdecode.log_softmax_top_k(x.cpu(), scores.cpu(), 8, num_beams=1)
    return _same_bits(got, want)


def _reorder(machine: Machine, shape: tuple[int, ...]) -> str:
    caches = [machine.randn(*shape, dtype=torch.bfloat16) for _ in range(2)]
    parents = parent_map(shape[0], shape[0]).to(machine.device)
    want = [cache.index_select(0, parents) for cache in caches]
    lmdecode.reorder_cache_(caches, parents)
    return _equal(torch.stack(caches), torch.stack(want))


def _merge(machine: Machine, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    outputs, lse = machine.randn(2, *shape, dtype=dtype), machine.randn(2, *shape[:-1])
    states = (outputs[0], lse[0], outputs[1], lse[1])
    got, _ = lmdecode.merge_attention_states(*states)
    want, _ = merge_in_torch(*states)
    return _near(got, want, dtype)


def _decode(machine: Machine, batch: int, keys: int, dtype: torch.dtype) -> str:
    q = machine.randn(batch, 32, 1, 128, dtype=dtype)
    k, v = machine.randn(2, batch, 8, keys, 128, dtype=dtype)
    got = lmdecode.sliding_window_decode(q, k, v)
    return _near(got, _in_torch(q, k, v, None), dtype)


def _attend(machine: Machine, tokens: int, dtype: torch.dtype) -> str:
    q = machine.randn(1, 8, tokens, 128, dtype=dtype)
    k, v = machine.randn(2, 1, 2, tokens, 128, dtype=dtype)
    window = tokens // 4
    i = torch.arange(tokens, device=machine.device)
    seen = (i[:, None] >= i) & (i[:, None] - i < window)
    got = lmdecode.sliding_window_attention(q, k, v, window=window)
    return _near(got, _in_torch(q, k, v, seen), dtype)


def _in_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None
) -> torch.Tensor:
    """Return attention in float64, a head of keys at a time."""
    groups = q.shape[1] // k.shape[1]
    out = []
    for head in range(k.shape[1]):
        ours = q[:, head * groups : (head + 1) * groups].double()
        keys, values = k[:, head : head + 1].double(), v[:, head : head + 1].double()
        scores = ours @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
        if seen is not None:
            scores.masked_fill_(~seen, -torch.inf)
        out.append(scores.softmax(-1) @ values)
    return torch.cat(out, 1)


def large(machine: Machine) -> Iterator[str]:
    """Run each check."""
    yield from header(["what", "result"])
    for name, check in _checks(machine):
        result = check()
        machine.found_fault |= "DIFFERS" in result
        yield row([name, result])

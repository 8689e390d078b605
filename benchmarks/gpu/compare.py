"""Random calls of the ops that are bitwise the same on every device."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

import lmdecode
from benchmarks.gpu.machine import Machine, header, row
from benchmarks.gpu.samples import (
    LARGE_VOCAB_SIZES,
    MEDIUM_VOCAB_SIZES,
    assert_same_bits,
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

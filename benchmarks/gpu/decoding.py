"""Times of Decoding: translation by a transformer-base model with random weights."""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import lmdecode
from benchmarks.gpu.machine import Machine, header, name_of, row

_BEAMS, _SOURCE = 4, 20


def _generate(machine: Machine, model: Any, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    result = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        num_beams=_BEAMS,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
    )
    machine.wait()
    return result


def _step(machine: Machine, model: Any, ids: torch.Tensor) -> str:
    """Return microseconds that a step adds to a call, and those of the longer call."""
    short, long = machine.size((8, 40), (2, 4))
    seconds = {}
    for tokens in (short, long):
        call = partial(_generate, machine, model, ids, tokens)
        call()
        times = []
        for _ in range(machine.size(2, 1)):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        seconds[tokens] = min(times)
    step = (seconds[long] - seconds[short]) / (long - short)
    return f"{step * 1e6:.0f} ({seconds[long] * 1e6:.0f})"


def run(machine: Machine) -> Iterator[str]:
    """Time each dtype and batch, with and without a graph."""
    if importlib.util.find_spec("transformers") is None:
        machine.found_fault = True  # nothing was measured: no pass
        yield "Not run: transformers is not installed."
        return
    from benchmarks.decoder.bench_decoding import make_model

    layers, size, vocab = machine.size((6, 512, 32000), (1, 64, 500))
    model = make_model(layers, size, vocab).to(machine.device)
    yield (
        f"{layers} layers of {size}, V {vocab}, {_BEAMS} beams, {_SOURCE} tokens of source. "
        "Microseconds of a step (and of the whole call)."
    )
    yield from header(["what", "ours", "ours, CUDA graph", "transformers"])
    types = machine.size(("float32", "float16", "bfloat16"), ("float32",))
    for dtype in types:
        peer = copy.deepcopy(model).to(getattr(torch, dtype))
        plain = lmdecode.Decoding.from_pretrained(model, dtype)
        for batch in machine.size((1, 8, 32), (2,)):
            generator = torch.Generator().manual_seed(1)
            ids = torch.randint(1, vocab - 1, (batch, _SOURCE), generator=generator)
            ids = ids.to(machine.device)
            cells = [_step(machine, plain, ids)]
            if machine.is_rehearsal:
                cells.append("-")
            else:
                graph = lmdecode.Decoding.from_pretrained(model, dtype, use_cuda_graph=True)
                cells.append(_step(machine, graph, ids))
                tokens = [_generate(machine, m, ids, 8).tolist() for m in (plain, graph)]
                if tokens[0] != tokens[1]:
                    machine.found_fault = True
                    cells[-1] += " DIFFERS"
            cells.append(_step(machine, peer, ids))
            yield row([f"{name_of(getattr(torch, dtype))}, batch {batch}", *cells])

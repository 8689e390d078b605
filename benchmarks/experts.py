"""Layers of mixtures of experts with random weights: prompts and steps, ours and llama.cpp's.

    python -m benchmarks.experts [--rounds 3] [--model qwen3moe|gpt-oss] [--keep FOLDER]

Layers have the sizes of Qwen3-30B-A3B (Q4_0) and of gpt-oss-20b (MXFP4; other matrices Q8_0); there
are few of them. Both programs read the same GGUF file, ours keeps its blocks, and they take turns.
llama-bench and llama-batched-bench are to be on
the path. Then the steps of models that have next to nothing but
experts are compared with one read of the weights of the experts that they use.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import lmdecode
from benchmarks.expert_files import GPT_OSS, QWEN3_MOE, Sizes, bare, write_model
from benchmarks.limits import streaming_read
from benchmarks.quality.llama_cpp import speeds, step_speed
from benchmarks.report import machine_line
from lmdecode.decoder.causal_caches import CausalCaches

PROMPT, NEW, ROWS = 512, 32, (1, 8)
MODELS = {"qwen3moe": QWEN3_MOE, "gpt-oss": GPT_OSS}


def _tokens(vocab: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (max(PROMPT, NEW * max(ROWS)),), generator=generator)


def prompt_seconds(model: Any, seed: int) -> float:
    """Return the time in which a prompt is read."""
    caches, tokens = CausalCaches(model, 1, PROMPT + 1), _tokens(model.config.vocab_size, seed)
    begin = time.perf_counter()
    caches.forward(tokens[:PROMPT], torch.tensor([[0, PROMPT, 1, 1]]), 1)
    return time.perf_counter() - begin


def step_seconds(model: Any, rows: int, seed: int) -> float:
    """Return the time of a step of some rows, of tokens that do not depend on logits."""
    caches = CausalCaches(model, rows, NEW + 1)
    tokens = _tokens(model.config.vocab_size, seed)[: rows * NEW].view(NEW, rows)
    entries = torch.tensor([[row, 1, 0, 1] for row in range(rows)])
    caches.forward(tokens[0], entries, rows)
    begin = time.perf_counter()
    for step in tokens[1:]:
        caches.forward(step, entries, rows)
    return (time.perf_counter() - begin) / (NEW - 1)


def compared(sizes: Sizes, path: Path, model: Any, rounds: int) -> list[str]:
    """Return the rows of a table: ours against llama.cpp."""
    threads, ours, theirs = torch.get_num_threads(), [], []
    prompt_seconds(model, 0)
    for seed in range(rounds):
        read, written = speeds(path, prompt=PROMPT, new=NEW, threads=threads)
        together = step_speed(path, rows=ROWS[1], new=NEW, threads=threads)
        theirs.append([read, written, together])
        steps = [rows / step_seconds(model, rows, seed) for rows in ROWS]
        ours.append([PROMPT / prompt_seconds(model, seed), *steps])
    names = [f"a prompt of {PROMPT}", *(f"steps of {rows}" for rows in ROWS)]
    table = []
    for name, own, peer in zip(names, _medians(ours), _medians(theirs), strict=True):
        table.append(f"| {sizes.architecture} | {name} | {own:.1f} | {peer:.1f} "
                     f"| {own / peer:.2f}x |")  # fmt: skip
    return table


def _medians(rounds: list[list[float]]) -> list[float]:
    return [statistics.median(values) for values in zip(*rounds, strict=True)]


def against_memory(sizes: Sizes, model: Any, rounds: int) -> list[str]:
    """Return the rows of a table: steps of experts against one read of those that are used."""
    table = []
    for rows in ROWS:
        used = sizes.num_experts * (1 - (1 - sizes.num_chosen / sizes.num_experts) ** rows)
        # Packed, scales of MXFP4 take two bytes, as those of Q4_0 do.
        count = int(sizes.layers * used * sizes.expert_weights * 18 / 32)
        steps, reads = list[float](), list[float]()
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            read = _reader(count, pool)
            for seed in range(rounds):
                steps.append(step_seconds(model, rows, seed))
                reads.append(_read_seconds(read))
        step, limit = statistics.median(steps), statistics.median(reads)
        table.append(
            f"| {sizes.architecture} | {rows} | {used:.1f} | {count / 1e6:.0f} "
            f"| {step * 1e3:.2f} | {limit * 1e3:.2f} | {step / limit:.2f}x |"
        )
    return table


def _reader(count: int, pool: ThreadPoolExecutor) -> Callable[[], object]:
    """Return a function that reads so many bytes, each thread its part."""
    threads = torch.get_num_threads()
    parts = torch.ones(count // 4).chunk(threads)
    torch.set_num_threads(1)  # the readers of one thread are the faster ones
    readers = [streaming_read(part) for part in parts]
    torch.set_num_threads(threads)
    return lambda: list(pool.map(lambda read: read(), readers))


def _read_seconds(read: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(NEW):
        read()
    return (time.perf_counter() - begin) / NEW


def _loaded(path: Path) -> Any:
    return lmdecode.Decoding.from_pretrained(path, None).decoder


def _file(folder: Path, name: str, sizes: Sizes) -> Path:
    path = folder / f"{name}.gguf"
    if not path.exists():
        write_model(path, sizes)
    return path


def main() -> None:
    """Write the models, let both take turns, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, help="default: each of them")
    parser.add_argument("--keep", type=Path, help="the folder of the files, made if need be")
    parser.add_argument("--without-peer", action="store_true", help="the second table alone")
    arguments = parser.parse_args()
    models = {name: MODELS[name] for name in ([arguments.model] if arguments.model else MODELS)}
    table, limits = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        for name, sizes in models.items():
            if not arguments.without_peer:
                path = _file(folder, name, sizes)
                table += compared(sizes, path, _loaded(path), arguments.rounds)
            path = _file(folder, f"{name}.bare", bare(sizes))
            limits += against_memory(bare(sizes), _loaded(path), arguments.rounds)
    print(machine_line(torch.get_num_threads()))
    if table:
        print("\n| layers of | tokens a second | lmdecode | llama.cpp | ratio |")
        print("\n".join(["|---|---|---|---|---|", *table]))
    print("\n| layers of | rows | experts used | MB | a step, ms | a read, ms | ratio |")
    print("\n".join(["|---|---|---|---|---|---|---|", *limits]))


if __name__ == "__main__":
    main()

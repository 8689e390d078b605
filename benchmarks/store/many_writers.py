"""``python -m benchmarks.store.many_writers``: processes that store into one directory.

Prints durable puts a second of one process and of several, in turns. Each put is of another prompt
of 16 tokens, strict, so a put ends with its flush; those that meet share one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from lmdecode.store import Fingerprint, KVStore

_FINGERPRINT = Fingerprint(
    model_id="writers", weights_hash="none", dtype="bfloat16", num_layers=8, num_kv_heads=8,
    head_size=64,
)  # fmt: skip
_TOKENS = 16


def _work(folder: Path, seconds: float, start: Any, counts: Any) -> None:
    torch.set_num_threads(1)
    kv = [(torch.zeros(8, _TOKENS, 64).bfloat16(), torch.zeros(8, _TOKENS, 64).bfloat16())] * 8
    with KVStore(folder, fingerprint=_FINGERPRINT, capacity_bytes=1 << 34, writers="many") as store:
        start.wait()
        begin, count = time.monotonic(), 0
        while time.monotonic() - begin < seconds:
            tokens = [os.getpid() % 30000] + [count % 30000] * (_TOKENS - 1)
            count += store.put(tokens, kv) == _TOKENS
        counts.put(count)


def _run(processes: int, seconds: float) -> float:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=os.environ.get("LMD_BENCH_DIR")) as folder:
        start, counts = context.Barrier(processes), context.Queue()
        workers = [
            context.Process(target=_work, args=(Path(folder), seconds, start, counts))
            for _ in range(processes)
        ]
        for worker in workers:
            worker.start()
        total = sum(counts.get() for _ in workers)
        for worker in workers:
            worker.join()
    return total / seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    alone, together = [], []
    for _ in range(arguments.turns):
        alone.append(_run(1, arguments.seconds))
        together.append(_run(arguments.processes, arguments.seconds))
    ratios = [b / a for a, b in zip(alone, together, strict=True)]
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print("| processes | durable puts a second, median |\n|---|---|")
    print(f"| 1 | {statistics.median(alone):.0f} |")
    print(f"| {arguments.processes} | {statistics.median(together):.0f} |")
    print(f"ratio of pairs: {', '.join(f'{ratio:.2f}' for ratio in sorted(ratios))}")


if __name__ == "__main__":
    main()

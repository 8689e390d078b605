"""Words a second of ``lmdecode.integrations.ray.Generate`` with one actor and with two.

``python -m benchmarks.ray_data`` takes the shipped model, on a cluster of this machine. A turn is a
whole job; the first one of each kind, in which actors start, is left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import ray
import ray.data

from lmdecode.integrations.ray import Generate

SHIPPED = Path(__file__).resolve().parents[1] / "examples/kjv_mistral/model"


def _job(count: int, actors: int, tokens: int) -> tuple[float, float]:
    """Words, and seconds that the actors were at work."""
    rows: list[Any] = [{"id": n, "prompt": f"And {n} the LORD said"} for n in range(count)]
    dataset = ray.data.from_items(rows, override_num_blocks=max(4, count // 16)).map_batches(
        Generate,
        fn_constructor_args=[str(SHIPPED)],
        fn_constructor_kwargs={"max_new_tokens": tokens, "do_sample": True, "seed": 1},
        batch_size=16,
        num_cpus=1,
        compute=ray.data.ActorPoolStrategy(size=actors),
    )
    begin, words = 0.0, 0
    for batch in dataset.iter_batches(batch_size=16):
        if not begin:  # the actors are there
            begin = time.perf_counter()
            continue
        words += sum(len(text.split()) for text in batch["text"])
    return words, time.perf_counter() - begin


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    ray.init(
        num_cpus=4, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": threads},
    )  # fmt: skip
    ray.data.DataContext.get_current().enable_progress_bars = False
    speeds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(arguments.turns):
        for actors, found in speeds.items():
            words, seconds = _job(arguments.rows, actors, arguments.tokens)
            found.append(words / seconds)
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print("| actors of one thread | words a second, median |\n|---|---|")
    for actors, found in speeds.items():
        print(f"| {actors} | {statistics.median(found):.0f} |")
    ratios = sorted(b / a for a, b in zip(speeds[1], speeds[2], strict=True))
    print(f"ratio of pairs: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    ray.shutdown()


if __name__ == "__main__":
    main()

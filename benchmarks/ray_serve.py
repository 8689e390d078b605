"""Requests a second of ``lmdecode.integrations.ray.build_app``, one at a time and many at once.

``python -m benchmarks.ray_serve`` takes the shipped model, one replica of one thread.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray
from ray import serve

from lmdecode.integrations.ray import build_app

SHIPPED = Path(__file__).resolve().parents[1] / "examples/kjv_mistral/model"
_PORT = 18123


def _post(number: int, tokens: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", _PORT, timeout=600)
    body = {"prompt": f"And {number} the LORD", "max_tokens": tokens, "top_p": 0.9, "seed": number}
    connection.request("POST", "/v1/completions", json.dumps(body),
                       {"Content-Type": "application/json"})  # fmt: skip
    response = connection.getresponse()
    content = json.loads(response.read())
    if response.status != 200:
        raise RuntimeError(content)


def _speed(clients: int, requests: int, tokens: int) -> float:
    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(lambda number: _post(number, tokens), range(requests)))
    return requests / (time.perf_counter() - begin)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False,
             runtime_env={"env_vars": variables})  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": _PORT})
    serve.run(build_app(SHIPPED, max_requests=128), name="app", route_prefix="/")
    _speed(8, 16, arguments.tokens)
    speeds: dict[int, list[float]] = {1: [], 16: [], 64: []}
    for _ in range(arguments.turns):
        for clients, found in speeds.items():
            found.append(_speed(clients, max(12, 2 * clients), arguments.tokens))
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print("| clients at once | requests a second, median |\n|---|---|")
    for clients, found in speeds.items():
        print(f"| {clients} | {statistics.median(found):.1f} |")
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()

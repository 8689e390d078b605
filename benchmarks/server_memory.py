"""Memory of a server of OpenAI's API, after each thousand of short requests of every kind.

    python -m benchmarks.server_memory MODEL [--requests 10000]

Eight clients ask for short answers: whole, streamed, given up after their first token, of several
choices, with log-probabilities, stop texts, and grammars, each of which is a new one. The
table has the resident memory that is the process's own, without mapped files.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.report import machine_line, memory_of
from benchmarks.servers import Server, started
from lmdecode._checks import check_int

PORT = 8104
CLIENTS = 8
WORDS = ("light", "water", "beast", "fruit", "stone", "river", "night", "bread", "seed", "heaven")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def schema_of(rng: random.Random, number: int) -> dict[str, Any]:
    """Return a schema that no other number has, which allows short texts alone."""
    kinds: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"type": "integer", "minimum": 0, "maximum": 10 + number},
        {"enum": rng.sample(WORDS, 3)},
        {"type": "string", "pattern": f"^[a-z]{{1,{1 + rng.randrange(6)}}}$"},
    ]
    return {
        "type": "object",
        "properties": {f"{rng.choice(WORDS)}{number}": rng.choice(kinds)},
        "additionalProperties": False,
    }


def body_of(number: int) -> tuple[str, dict[str, Any]]:
    """Return the kind of a request, and its body for completions."""
    rng = random.Random(number)
    prompt = " ".join(rng.choices(WORDS, k=1 + rng.randrange(60)))
    body = {"prompt": prompt, "max_tokens": 1 + rng.randrange(8), "seed": number}
    kind = rng.choices(
        ("whole", "stream", "gone", "schema", "regex", "tools", "choices", "wrong"),
        (30, 20, 10, 15, 5, 10, 6, 4),
    )[0]
    function = {"name": f"f{number}", "parameters": schema_of(rng, number)}
    more: dict[str, dict[str, Any]] = {
        "stream": {"stream": True, "logprobs": 2},
        "gone": {"stream": True, "max_tokens": 400},
        "schema": {"max_tokens": 40, "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema_of(rng, number)}}},
        "regex": {"guided_regex": f"[a-z]{{1,9}} {number}", "stream": True},
        "tools": {"max_tokens": 60, "tool_choice": "required",
                  "tools": [{"type": "function", "function": function}]},
        "choices": {"n": 3, "stop": [rng.choice("aeiou"), f"{number}"], "logprobs": 1},
        "wrong": {f"field{number}": 1, "temperature": -1},
    }  # fmt: skip
    return kind, {**body, **more.get(kind, {})}


def ask(numbers: Sequence[int]) -> None:
    """Send requests one after the other, over a connection that is kept where it can be."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=600)
    for number in numbers:
        kind, body = body_of(number)
        path = "/v1/completions"
        if kind == "tools":
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        if kind == "gone" and response.status == 200:
            response.readline()
            connection.close()
            continue
        data = response.read()
        if response.status != (400 if kind == "wrong" else 200):
            raise RuntimeError(f"{kind}, {number}: status {response.status}: {data[:500]!r}")
    connection.close()


def wait_until_idle() -> None:
    """Wait until no request is left."""
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=600)
        connection.request("GET", "/health")
        health = json.loads(connection.getresponse().read())
        connection.close()
        if not health["answering"]:
            return
        time.sleep(0.05)


def measure(server: Server, requests: int, every: int) -> list[float]:
    """Print a line of the table after so many requests each time; return the memory there."""
    found: list[float] = []
    begin = time.perf_counter()
    for first in range(0, requests, every):
        numbers = range(first, min(first + every, requests))
        with ThreadPoolExecutor(CLIENTS) as threads:
            for done in threads.map(ask, [numbers[i::CLIENTS] for i in range(CLIENTS)]):
                assert done is None
        wait_until_idle()
        own, whole = (size / 1e6 for size in memory_of(server.process))
        found.append(own)
        seconds = time.perf_counter() - begin
        print(
            f"| {numbers[-1] + 1:,} | {own:.1f} | {own / found[0] - 1:+.2%} | {whole:.1f} "
            f"| {seconds:.0f} |",
            flush=True,
        )
    return found


def main() -> int:
    """Print the table; return 1 where memory has grown by more than 5 % after the first line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="one of lmdecode serve")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=1000, help="requests between two lines")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--options", default="", help="further ones of lmdecode serve")
    given = parser.parse_args()
    check_int("server_memory", "--requests", given.requests, 1)
    check_int("server_memory", "--every", given.every, 1)
    with tempfile.TemporaryDirectory() as folder:
        template = os.path.join(folder, "template.jinja")
        Path(template).write_text(TEMPLATE)
        command = [sys.executable, "-m", "lmdecode", "serve", given.model, "--port", str(PORT),
                   "--name", "m", "--threads", str(given.threads), "--context", "512",
                   "--chat-template", template, *given.options.split()]  # fmt: skip
        with started("lmdecode", command, PORT, "m") as server:
            print(machine_line(given.threads))
            print("| requests | own, MB | more than after the first line | all, MB | seconds |")
            print("|---|---|---|---|---|")
            found = measure(server, given.requests, given.every)
    return int(found[-1] > 1.05 * found[0])


if __name__ == "__main__":
    sys.exit(main())

"""Servers of OpenAI's API, side by side: tokens a second and times to the first token.

    python -m benchmarks.servers model.gguf --llama-server PATH [--vllm PROGRAM FOLDER]

Each server is started once; they take turns, case by case and round by round, so that what else the
machine does meets them all. Prompts differ from client to client: nothing is shared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import machine_line
from lmdecode._checks import check_int

CLIENTS = (1, 8, 32)
LENGTHS = (32, 512)
NEW_TOKENS = 48
CONTEXT = 1024
LMDECODE_PORT = 8101
_TEXT = Path(__file__).parents[1].joinpath("docs/guides/generate.md").read_text()
WORDS = re.findall("[a-z]{2,9}", _TEXT)


@dataclass
class Server:
    """A server that runs: its name, its port, the name of its model, and its process's number."""

    name: str
    port: int
    model: str
    process: int


@dataclass
class Answer:
    """What one client saw: tokens, seconds to the first one, and in all."""

    tokens: int
    first: float
    total: float


async def streamed(server: Server, path: str, body: dict[str, Any]) -> tuple[Answer, str, Any]:
    """Stream an answer; return it, its text, and what the server tells of its tokens."""
    told = {"model": server.model, "stream": True, "stream_options": {"include_usage": True}}
    written = json.dumps({**body, **told}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(written)}\r\nConnection: close\r\n\r\n"
    )
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 20)
    writer.write(head.encode() + written)
    first, texts, usage, seen = 0.0, [], {"completion_tokens": 0}, b""
    async for line in reader:
        seen = line.strip() or seen
        if not line.startswith(b"data: {"):
            continue
        piece = json.loads(line[6:])
        for choice in piece.get("choices") or ():
            text = choice["delta"].get("content") if "delta" in choice else choice["text"]
            if text and not first:
                first = time.perf_counter() - begin
            texts.append(text or "")
        usage = piece.get("usage") or usage
    writer.close()
    tokens = usage["completion_tokens"]
    if tokens != body["max_tokens"]:
        raise RuntimeError(
            f"{server.name} wrote {tokens} tokens; expected {body['max_tokens']}: {seen!r}"
        )
    return Answer(tokens, first, time.perf_counter() - begin), "".join(texts), usage


async def ask(server: Server, prompt: str, seed: int) -> Answer:
    """Stream one completion."""
    body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "seed": seed, "temperature": 0.8,
            "ignore_eos": True}  # fmt: skip
    return (await streamed(server, "/v1/completions", body))[0]


def prompt_of(rng: random.Random, length: int) -> str:
    """Return words of as many tokens, counted by lmdecode's server."""
    words = rng.choices(WORDS, k=length)
    while True:
        body = json.dumps({"model": "m", "content": " ".join(words)}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{LMDECODE_PORT}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            too_many = len(json.load(answer)["tokens"]) - length
        if too_many <= 0:
            return " ".join(words)
        words = words[: len(words) - max(1, too_many // 2)]


async def measure(server: Server, clients: int, length: int, number: int) -> tuple[float, float]:
    """Return tokens a second of all clients, and the median time to the first token."""
    rng = random.Random(f"{clients} {length} {number}")
    prompts = [prompt_of(rng, length) for _ in range(clients)]
    begin = time.perf_counter()
    answers = await asyncio.gather(*(ask(server, p, i) for i, p in enumerate(prompts)))
    seconds = time.perf_counter() - begin
    return sum(a.tokens for a in answers) / seconds, statistics.median(a.first for a in answers)


@contextlib.contextmanager
def started(
    name: str, command: list[str], port: int, model: str, **environment: str
) -> Iterator[Server]:
    """Start a server, wait until it is well, and end it."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **environment}
        )
        begin = time.perf_counter()
        try:
            while True:
                with contextlib.suppress(OSError):
                    url = f"http://127.0.0.1:{port}/health"
                    if urllib.request.urlopen(url, timeout=5).status == 200:
                        break
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(f"{name} ended: {log.read().decode()[-2000:]}")
                time.sleep(0.05)
            print(f"{name}: ready after {time.perf_counter() - begin:.2f} s", flush=True)
            try:
                yield Server(name, port, model, process.pid)
            except RuntimeError:
                log.seek(0)
                print(f"{name}: {log.read().decode(errors='replace')[-4000:]}", file=sys.stderr)
                raise
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def arguments(about: str, *, needs_llama: bool = False) -> argparse.ArgumentParser:
    """Return a parser with a model, and how lmdecode and llama-server serve it."""
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    add = parser.add_argument
    add("model", type=Path, help="a GGUF file, or another model of lmdecode serve")
    add("--lmdecode-options", default="", help="further ones, such as '--dtype int8'")
    add("--llama-server", required=needs_llama, help="the program; it gets the same file")
    add("--llama-options", default="", help="further ones, such as --no-repack")
    add("--threads", type=int, default=2)
    return parser


def lmdecode_server(
    given: argparse.Namespace, *options: str
) -> contextlib.AbstractContextManager[Server]:
    """Start lmdecode's server with what the command line says."""
    command = [
        sys.executable, "-m", "lmdecode", "serve", str(given.model), "--port", str(LMDECODE_PORT),
        "--name", "m", "--threads", str(given.threads), *options, *given.lmdecode_options.split(),
    ]  # fmt: skip
    return started("lmdecode", command, LMDECODE_PORT, "m")


def llama_server(
    given: argparse.Namespace, *options: str
) -> contextlib.AbstractContextManager[Server]:
    """Start llama-server with what the command line says."""
    command = [
        given.llama_server, "-m", str(given.model), "--port", "8102", "-t", str(given.threads),
        *options, *given.llama_options.split(),
    ]  # fmt: skip
    return started("llama-server", command, 8102, "m")


def failed_in(
    found: list[tuple[float, float]], server: Server, clients: int, length: int, number: int
) -> bool:
    """Measure one round; tell whether the server failed, and print its error."""
    try:
        found.append(asyncio.run(measure(server, clients, length, number)))
    except (RuntimeError, OSError) as error:
        print(f"{server.name}: {clients} clients, {length} tokens: {error}", file=sys.stderr)
        return True
    return False


def row_of(
    servers: list[Server],
    failed: set[str],
    found: dict[str, list[tuple[float, float]]],
    clients: int,
    length: int,
) -> str:
    """Return a row of the table: medians, and how much faster lmdecode is."""
    cells, ratios, ours = [], [], 0.0
    for server in servers:
        if server.name in failed:
            cells.append("failed")
            ratios.append("-")
            continue
        rate, first = (
            statistics.median(values) for values in zip(*found[server.name], strict=True)
        )
        cells.append(f"{rate:.0f}, {first:.2f} s")
        ours = ours or rate
        ratios.append(f"{ours / rate:.2f}x")
    return f"| {clients} | {length} | {' | '.join(cells)} | {', '.join(ratios[1:])} |"


def main() -> int:
    """Run all cases, and print a table."""
    parser = arguments(__doc__)
    parser.add_argument("--vllm", nargs=2, metavar=("PROGRAM", "FOLDER"), help="vllm, and a model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    given = parser.parse_args()
    check_int("servers", "--rounds", given.rounds, 1)
    most = max(given.clients)
    with contextlib.ExitStack() as stack:
        slots = ("--max-requests", str(most), "--context", str(CONTEXT))
        servers = [stack.enter_context(lmdecode_server(given, *slots))]
        if given.llama_server:
            slots = ("-np", str(most), "-c", str(most * CONTEXT))
            servers.append(stack.enter_context(llama_server(given, *slots)))
        if given.vllm:
            program, folder = given.vllm
            cores = f"0-{given.threads - 1}"
            command = [program, "serve", folder, "--port", "8103", "--max-model-len", str(CONTEXT),
                       "--served-model-name", "m", "--dtype", "bfloat16"]  # fmt: skip
            servers.append(
                stack.enter_context(
                    started(
                        "vLLM",
                        command,
                        8103,
                        "m",
                        VLLM_CPU_OMP_THREADS_BIND=cores,
                        VLLM_CPU_KVCACHE_SPACE="2",  # GiB: 32 sequences of CONTEXT take 0.75
                    )
                )
            )
        print(machine_line(given.threads))
        print("| clients | prompt | " + " | ".join(
            f"{s.name}: tokens/s, first token" for s in servers) + " | ratio |")  # fmt: skip
        print("|---|---|" + "---|" * (len(servers) + 1))
        for server in servers:
            asyncio.run(measure(server, 1, 32, -1))
        failed: set[str] = set()
        for length in given.lengths:
            for clients in given.clients:
                found: dict[str, list[tuple[float, float]]] = {s.name: [] for s in servers}
                for number in range(given.rounds):
                    for server in servers:
                        measured = found[server.name]
                        if server.name not in failed and failed_in(
                            measured, server, clients, length, number
                        ):
                            failed.add(server.name)
                print(row_of(servers, failed, found, clients, length), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

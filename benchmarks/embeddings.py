"""Vectors of many short texts: lmdecode's server, llama-server, and transformers in a process.

    python -m benchmarks.embeddings model.gguf --llama-server PATH

They take turns. A server gets bodies of 64 texts, four at once; transformers gets batches of 64, of
nearly the same lengths.
"""

from __future__ import annotations

import concurrent.futures
import json
import random
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import machine_line
from benchmarks.servers import Server, arguments, llama_server, lmdecode_server, prompt_of

_AT_ONCE, _BODIES = 64, 4


def _posted(server: Server, texts: list[str]) -> Tensor:
    body = json.dumps({"model": server.model, "input": texts}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/embeddings", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return torch.tensor([one["embedding"] for one in json.load(answer)["data"]])


def _batches(texts: list[str]) -> list[list[str]]:
    return [texts[at : at + _AT_ONCE] for at in range(0, len(texts), _AT_ONCE)]


def _by_server(server: Server) -> Callable[[list[str]], Tensor]:
    def run(texts: list[str]) -> Tensor:
        with concurrent.futures.ThreadPoolExecutor(_BODIES) as pool:
            return torch.cat(list(pool.map(lambda part: _posted(server, part), _batches(texts))))

    return run


def _by_transformers(file: Path, dtype: torch.dtype) -> Callable[[list[str]], Tensor]:
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name, padding_side="right", pad_token="<|im_end|>"
    )
    model = AutoModel.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype).eval()

    @torch.no_grad()
    def run(texts: list[str]) -> Tensor:
        found = []
        for part in _batches(texts):
            given = tokenizer(part, padding=True, return_tensors="pt")
            hidden = model(**given, use_cache=False).last_hidden_state
            last = given["attention_mask"].sum(dim=1) - 1
            vectors = hidden[torch.arange(len(part)), last].float()
            found.append(torch.nn.functional.normalize(vectors, dim=-1))
        return torch.cat(found)

    return run


def main() -> int:
    """Run all, and print a table."""
    parser = arguments(__doc__, needs_llama=True)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    many = ("-c", "4096", "-np", "32", "-b", "2048", "-ub", "2048")
    theirs = llama_server(given, "--embeddings", "--pooling", "last", *many)
    rng = random.Random(0)
    with lmdecode_server(given) as one, theirs as other:
        texts = [prompt_of(rng, given.length) for _ in range(given.texts)]
        runs = {
            "lmdecode": _by_server(one),
            "llama-server": _by_server(other),
            "transformers, float32": _by_transformers(given.model, torch.float32),
            "transformers, bfloat16": _by_transformers(given.model, torch.bfloat16),
        }
        vectors = {name: run(texts[:_AT_ONCE]) for name, run in runs.items()}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(given.rounds):
            for name, run in runs.items():
                begin = time.perf_counter()
                run(texts)
                seconds[name].append(time.perf_counter() - begin)
    print(machine_line(given.threads))
    print("| | texts a second | lmdecode's | least cosine with transformers, float32 |")
    print("|---|---|---|---|")
    first = statistics.median(seconds["lmdecode"])
    right = vectors["transformers, float32"]
    for name, found in seconds.items():
        time_of = statistics.median(found)
        cosine = (vectors[name] * right).sum(dim=-1).min()
        print(f"| {name} | {given.texts / time_of:.1f} | {time_of / first:.2f}x | {cosine:.4f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())

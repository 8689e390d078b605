"""gpt-oss-20b's shape with random weights in MXFP4: time and memory of loading, and of 16 tokens.

    python -m benchmarks.loading_experts [--layers 24] [--keep model.gguf]

The file takes 12 GB, and so does the model in memory. Memory is what the process has of its own,
read every 5 ms: pages of the mapped file, which the system takes back, are told apart.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import lmdecode
from benchmarks.expert_files import GPT_OSS, write_model
from benchmarks.report import machine_line, memory_of

VOCAB, NEW = 201088, 16


class PeakMemory:
    """Bytes of its own that this process has at most while the context is open."""

    def __init__(self) -> None:
        self.peak = 0
        self._is_open = True
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while self._is_open:
            self.peak = max(self.peak, memory_of()[0])
            time.sleep(0.005)

    def __enter__(self) -> PeakMemory:
        """Begin to watch."""
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop."""
        self._is_open = False
        self._thread.join()


def main() -> None:
    """Write the model, load it, generate, and print what each took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--keep", type=Path, help="of the file: made where it is not there")
    arguments = parser.parse_args()
    sizes = replace(GPT_OSS, layers=arguments.layers, vocab=VOCAB)
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.keep or Path(folder) / "model.gguf"
        if not path.exists():
            write_model(path, sizes)
        size = path.stat().st_size
        print(machine_line(torch.get_num_threads()))
        before = memory_of()[0]
        begin = time.perf_counter()
        with PeakMemory() as loading:
            decoding = lmdecode.Decoding.from_pretrained(path, None)
        seconds = time.perf_counter() - begin
        model: Any = decoding.decoder
        packed = len(model.memory)
        prompt = torch.arange(64)[None] * 7919 % VOCAB
        begin = time.perf_counter()
        with PeakMemory() as running:
            tokens = decoding.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW,
                                       do_sample=False)  # fmt: skip
        generated = time.perf_counter() - begin
        begin = time.perf_counter()
        decoding.generate(prompt, max_new_tokens=1, min_new_tokens=1, do_sample=False)
        of_prompt = time.perf_counter() - begin
    assert tokens.shape[1] == prompt.shape[1] + NEW
    layer = packed / arguments.layers
    loaded = loading.peak - before
    print(f"""
| {arguments.layers} layers | |
|---|---|
| file | {size / 1e9:.2f} GB |
| packed weights | {packed / 1e9:.2f} GB |
| memory while loading, without {before / 1e9:.2f} GB before | {loaded / 1e9:.2f} GB |
| the same without packed weights, in layers | {(loaded - packed) / layer:.2f} |
| loading | {seconds:.1f} s |
| memory while running | {(running.peak - before) / 1e9:.2f} GB |
| a prompt of 64 and {NEW} tokens | {generated:.2f} s |
| of which steps | {(NEW - 1) / (generated - of_prompt):.1f} tokens/s |""")


if __name__ == "__main__":
    main()

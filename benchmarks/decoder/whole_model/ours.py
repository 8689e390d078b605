"""``lmdecode.Decoding`` as an engine of the benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

import lmdecode
from benchmarks.decoder.whole_model.engine import Engine, seconds
from benchmarks.decoder.whole_model.transformers_engine import generate_arguments, load_model
from lmdecode.decoder.causal_caches import CausalCaches


class LmdecodeEngine(Engine):
    """A model packed once, caches in float32 or, for every other format, in bfloat16."""

    def __init__(self, folder: Path, number_format: str, threads: int, longest: int) -> None:
        super().__init__(folder, number_format, threads, longest)
        torch.set_num_threads(threads)
        model = load_model(folder, torch.float32)
        self._cache_dtype = "float32" if number_format == "float32" else "bfloat16"
        self._decoding = lmdecode.Decoding.from_pretrained(
            model, number_format, cache_dtype=self._cache_dtype
        )
        self._beams: CausalCaches | None = None
        self._read_rows: dict[object, tuple[CausalCaches, torch.Tensor]] = {}
        for module in model.modules():  # packed by now
            if isinstance(module, torch.nn.Linear):
                module.weight.data = torch.empty(0)

    def version(self) -> str:
        return lmdecode.__version__

    def _caches(self, rows: int) -> CausalCaches:
        packed: Any = self._decoding.decoder
        return CausalCaches(packed, rows, self.capacity, dtype=self._cache_dtype)

    @cached_property
    def _single(self) -> CausalCaches:
        return self._caches(1)

    def _read(self, caches: CausalCaches, row: int, tokens: Sequence[int]) -> torch.Tensor:
        entries = torch.tensor([[row, len(tokens), int(len(tokens) > 1), 1]])
        return caches.forward(torch.tensor(tokens), entries, 1)

    def logits(self, tokens: Sequence[int], steps: int) -> Any:
        self._single.truncate([0], [0])
        read, rest = tokens[: len(tokens) - steps], tokens[len(tokens) - steps :]
        logits = self._read(self._single, 0, read)
        for token in rest:
            logits = self._read(self._single, 0, [token])
        return logits[0].numpy()

    def prefill(self, tokens: Sequence[int]) -> None:
        self._single.truncate([0], [0])
        self._read(self._single, 0, tokens)

    def prepare(self, tokens: Sequence[int], rows: int) -> None:
        key = (tuple(tokens), rows)
        if key not in self._read_rows:
            while len(self._read_rows) > 1:  # two are timed in turns: one row, and more
                self._read_rows.pop(next(iter(self._read_rows)))
            caches = self._caches(rows)
            for row in range(rows):
                self._read(caches, row, tokens)
            self._read_rows[key] = caches, torch.tensor([[row, 1, 0, 1] for row in range(rows)])
        self._rows, self._entries = self._read_rows[key]
        self._length = len(tokens)
        self.rewind()

    def rewind(self) -> None:
        rows = self._rows.sequences
        self._rows.truncate(range(rows), [self._length] * rows)

    def step(self, tokens: Sequence[int]) -> None:
        self._rows.forward(torch.tensor(tokens), self._entries, len(tokens))

    def time_beams(self, tokens: Sequence[int], rows: int, count: int, clock: str) -> float:
        """Return the seconds of a step of rows that share one prompt, the middle one."""
        length, entries = len(tokens), torch.tensor([[row, 1, 0, 1] for row in range(rows)])
        if self._beams is None:
            self._beams = self._caches(rows)
            self._read(self._beams, 0, tokens)
            self._beams.reorder(torch.zeros(rows, dtype=torch.int64))
        beams = self._beams
        beams.truncate(range(rows), [length] * rows)
        ids = torch.tensor(list(tokens[:1]) * rows)
        times = [seconds(lambda: beams.forward(ids, entries, rows), clock) for _ in range(count)]
        return statistics.median(times)

    def time_lookup(
        self, tokens: Sequence[int], new_tokens: int, num_tokens: int, clock: str
    ) -> float:
        """Return the seconds of a greedy call that looks so many tokens up."""
        arguments = generate_arguments(tokens, new_tokens, 1)
        call = partial(self._decoding.generate, **arguments, prompt_lookup_num_tokens=num_tokens)
        return seconds(call, clock)

    def generate(self, tokens: Sequence[int], new_tokens: int, beams: int) -> None:
        self._decoding.generate(**generate_arguments(tokens, new_tokens, beams))


ENGINE = LmdecodeEngine

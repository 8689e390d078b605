"""Perplexity of language models in every format, beside llama.cpp's types."""

from __future__ import annotations

import pydoc_data.topics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import lmdecode
from benchmarks.quality import llama_cpp
from benchmarks.report import markdown_table
from lmdecode.formats.gguf import load_tokenizer
from lmdecode.linear.formats import AS_IT_IS, FORMATS
from lmdecode.quality import bits_per_weight, perplexity

__all__ = ["HEAD", "gguf_table", "gguf_tokens", "manual", "shipped_table"]

HEAD = ["format", "bits a weight", "perplexity", "to float32", "tokens a second"]
WINDOW = 512
_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "kjv_mistral"
_TOPICS = ("execmodel", "naming", "objects", "import", "compound", "class", "typesseq")
_LLAMA_KINDS = ("Q8_0", "Q4_K_M", "Q4_0")


def manual() -> str:
    """Return pages of Python's reference, which each Python has."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in _TOPICS if name in topics)


def gguf_tokens(path: Path, text: str, most: int) -> tuple[torch.Tensor, int | None]:
    """Return a text's first tokens by a GGUF file's tokenizer, and the token it puts in front."""
    tokenizer = load_tokenizer(path)
    bos = tokenizer.bos_token_id if tokenizer.add_bos_token else None
    found = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return torch.tensor([*([] if bos is None else [bos]), *found][:most]), bos


def _row(
    name: str, bits: float | None, value: float, base: float, speed: float | None
) -> list[str]:
    return [
        name,
        "-" if bits is None else f"{bits:.2f}",
        f"{value:.3f}",
        f"{100 * (value / base - 1):+.2f} %",
        "-" if speed is None else f"{speed:,.0f}",
    ]


def _our_rows(
    source: Path, ids: torch.Tensor, bos: int | None, kinds: list[str]
) -> tuple[list[list[str]], float]:
    """Return a row a format, and the perplexity of the first."""
    rows, base = [], 0.0
    for kind in kinds:
        dtype: Any = None if kind == AS_IT_IS else kind
        decoding = lmdecode.Decoding.from_pretrained(source, dtype, keep_model=False)
        found = perplexity(decoding, ids, WINDOW, bos=bos)
        base = base or found.perplexity
        name = "lmdecode, the file's values" if kind == AS_IT_IS else f"lmdecode {kind}"
        bits = bits_per_weight(decoding)
        rows.append(_row(name, bits, found.perplexity, base, found.tokens_per_second))
        del decoding
    return rows, base


def _chapters() -> str | None:
    """Return the chapters that the shipped model was not trained on; None: no program has them."""
    code = (
        "from train import HOLD_OUT_EVERY, read_chapters\n"
        "print('\\n'.join(read_chapters()[HOLD_OUT_EVERY - 1 :: HOLD_OUT_EVERY]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=_EXAMPLE, check=False
    )
    return done.stdout if done.returncode == 0 else None


def shipped_table(most_tokens: int) -> tuple[str, list[str]]:
    """Return the table of the shipped model on its held-out chapters, and notes."""
    from transformers import AutoTokenizer

    text = _chapters()
    if text is None:
        return "", ["Not measured: the text is of the program `bible` (Debian: bible-kjv)."]
    tokenizer = AutoTokenizer.from_pretrained(_EXAMPLE / "model")
    bos = tokenizer.bos_token_id
    found = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    ids = torch.tensor([bos, *found])[:most_tokens]
    rows, _ = _our_rows(_EXAMPLE / "model", ids, bos, list(FORMATS))
    return markdown_table(HEAD, rows, 1), [_text_note("held-out chapters", len(ids))]


def _text_note(text: str, tokens: int) -> str:
    return (
        f"Text: {text}, {tokens // WINDOW} windows of {WINDOW} tokens, of each of which the second "
        "half is scored, as llama-perplexity does."
    )


def gguf_table(path: Path, most_tokens: int, threads: int) -> tuple[str, list[str]]:
    """Return the table of a GGUF file on Python's reference, ours and llama.cpp's, and notes."""
    text = manual()
    ids, bos = gguf_tokens(path, text, most_tokens)
    rows, base = _our_rows(path, ids, bos, ["float32", AS_IT_IS, "bfloat16", "int8", "int4"])
    notes = [
        _text_note("Python's reference", len(ids)),
        f"{path.name} has been rounded before: what rounds its values again is not judged by it.",
    ]
    if llama_cpp.program("llama-perplexity") is None:
        return markdown_table(HEAD, rows, 1), [*notes, llama_cpp.WHY_NOT + "."]
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "text.txt"
        written.write_text(text, encoding="utf-8")
        kinds = ["the file"]
        if llama_cpp.program("llama-quantize") is not None:
            kinds += _LLAMA_KINDS
        for kind in kinds:
            try:
                is_own = kind == "the file"
                file = path if is_own else llama_cpp.quantized(path, kind, Path(folder))
                theirs = llama_cpp.perplexity(
                    file, written, window=WINDOW, chunks=len(ids) // WINDOW, threads=threads
                )
            except (RuntimeError, ValueError) as error:
                notes.append(f"llama.cpp, {kind}: not measured: {' '.join(str(error).split())}.")
                continue
            speed = theirs.tokens_per_second
            rows.append(_row(f"llama.cpp, {kind}", None, theirs.perplexity, base, speed))
    return markdown_table(HEAD, rows, 1), notes

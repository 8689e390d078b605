"""The shipped model of pronunciation: words and phonemes wrong in every format."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from benchmarks.report import markdown_table
from lmdecode.demo.cmudict_words import error_rates
from lmdecode.demo.g2p import Engine, encode, held_out_words, our_engine, transformers_engine
from lmdecode.linear.formats import FORMATS

__all__ = ["table"]

_MODEL = Path(__file__).resolve().parents[2] / "examples" / "g2p" / "model"
_BATCH = 64  # words
_BEAMS = 4


def table(most_words: int | None) -> tuple[str, list[str]]:
    """Return the table on held-out words, at most so many of the shipped ones, and notes."""
    words, source = held_out_words(_MODEL, most_words)
    tokenizer = AutoTokenizer.from_pretrained(_MODEL)
    model = AutoModelForSeq2SeqLM.from_pretrained(_MODEL, dtype=torch.float32).eval()
    names = sorted(words, key=len)
    references = [words[name] for name in names]
    rows = []

    def add(name: str, engine: Engine) -> None:
        start, found = time.process_time(), []
        for at in range(0, len(names), _BATCH):
            ids, mask = encode(tokenizer, names[at : at + _BATCH])
            found += [
                tokenizer.convert_ids_to_tokens(row[0].tokens)
                for row in engine(ids, mask, _BEAMS, 1)
            ]
        rates = error_rates(found, references)
        seconds = time.process_time() - start
        rows.append(
            [name, f"{100 * rates.word:.2f} %", f"{100 * rates.phoneme:.2f} %", f"{seconds:.1f}"]
        )

    with torch.no_grad():
        add("transformers float32", transformers_engine(model))
        for dtype in FORMATS:
            add(f"lmdecode {dtype}", our_engine(model, dtype))
    note = f"{len(names)} held-out words of {source}, beams of {_BEAMS}."
    return markdown_table(["format", "words wrong", "phonemes wrong", "CPU s"], rows, 1), [note]

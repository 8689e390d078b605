"""Perplexity of the shipped model on its held-out chapters, by formats of weights and of caches.

Needs the program ``bible`` (Debian package bible-kjv), lmdecode and transformers.

    python examples/kjv_mistral/perplexity.py
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from train import HOLD_OUT_EVERY, encode_chapter, read_chapters
from transformers import AutoTokenizer

import lmdecode
from lmdecode.decoder.causal_caches import CACHE_DTYPES, CausalCaches
from lmdecode.linear.formats import FORMATS

MODEL = Path(__file__).resolve().parent / "model"


def loss_of(decoding: lmdecode.Decoding, cache_dtype: str, chapters: list[list[int]]) -> float:
    """Return the mean loss per token, in nats, over whole chapters."""
    total, count = 0.0, 0
    longest = max(map(len, chapters))
    caches = CausalCaches(decoding.decoder, 1, longest, dtype=cache_dtype)
    for chapter in chapters:
        ids = torch.tensor(chapter)
        size = len(chapter) - 1
        caches.truncate([0], [0])
        logits = caches.forward(ids[:-1], torch.tensor([[0, size, 1, size]]), size)
        total += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum").item()
        count += size
    return total / count


def main() -> None:
    """Print a table."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    chapters = [
        encode_chapter(tokenizer, text)
        for text in read_chapters()[HOLD_OUT_EVERY - 1 :: HOLD_OUT_EVERY]
    ]
    print(f"{sum(map(len, chapters))} held-out tokens\n")
    print("| weights | cache | perplexity |\n|---|---|---|")
    for dtype in FORMATS:
        decoding = lmdecode.Decoding.from_pretrained(MODEL, dtype)
        for cache_dtype in CACHE_DTYPES if dtype == "float32" else ["float32"]:
            loss = loss_of(decoding, cache_dtype, chapters)
            print(f"| {dtype} | {cache_dtype} | {math.exp(loss):.3f} |", flush=True)


if __name__ == "__main__":
    main()

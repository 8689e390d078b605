"""Rows, texts and calls for the comparison of ``Sampler`` with other systems."""

import itertools
from typing import Any

import numpy as np
import torch

from tests.support.random_rows import Array
from tests.support.samplers import SamplerUnderTest

INF = np.inf
# These systems compute in float32.
FLOAT32_MARGIN = 5e-6


def make_rows(random: np.random.Generator, batch: int, vocab: int, masked: bool = True) -> Array:
    """[B, V] float32; many have ties, some -inf."""
    x = random.standard_normal((batch, vocab)).astype(np.float32)
    x *= random.choice([0.3, 1, 3, 6], size=(batch, 1)).astype(np.float32)
    halves = random.random((batch, 1)) < 0.5
    x = np.where(halves, np.round(x * 2) / 2, x)
    if masked:
        hidden = (random.random((batch, 1)) < 0.15) & (random.random((batch, vocab)) < 0.4)
        hidden[:, 0] = False
        x = np.where(hidden, np.float32(-INF), x)
    return x


def row_of(parameters: dict[str, Array], row: int) -> dict[str, Any]:
    return {
        name: int(value[row]) if name == "top_k" else float(np.float32(value[row]))
        for name, value in parameters.items()
    }


def kept_by(
    sampler: SamplerUnderTest, x: Array, parameters: dict[str, Array], dialect: str
) -> tuple[Array, Array]:
    """Return which tokens are kept, [B, V] bool, and kept_logits."""
    tensors = {
        name: torch.from_numpy(value if name == "top_k" else value.astype(np.float32))
        for name, value in parameters.items()
    }
    tested = sampler.make(*x.shape, dialect=dialect, seed=-1, return_logits=True, **tensors)
    kept_logits = tested.sample(torch.from_numpy(x)).kept_logits.numpy()
    return kept_logits > -INF, kept_logits


def single_and_pairs(stages: str) -> list[tuple[str, ...]]:
    names = stages.split()
    return [(name,) for name in names] + list(itertools.combinations(names, 2)) + [tuple(names)]


def make_text(random: np.random.Generator, vocab: int) -> tuple[list[int], list[int]]:
    """A prompt and an output in which much is repeated."""
    words = random.integers(0, min(vocab, 6), random.integers(1, 40)).tolist()
    cut = int(random.integers(1, len(words) + 1))
    return words[:cut], words[cut:]

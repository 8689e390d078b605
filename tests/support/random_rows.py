"""Random rows of logits of every kind: ties, infinities, NaN, tiny and huge numbers."""

from random import Random

import numpy as np
import torch

INF, NAN = np.inf, np.nan
Array = np.ndarray


def pick(random: np.random.Generator, weights: dict[float, float], count: int) -> Array:
    values, odds = np.array(list(weights)), np.array(list(weights.values()))
    return random.choice(values, size=count, p=odds / odds.sum())


def make_values(random: np.random.Generator, batch: int, vocab: int) -> Array:
    """[B, V] f32; each row is of one kind."""
    x = random.standard_normal((batch, vocab), dtype=np.float32)
    x *= random.choice([0.1, 1, 3, 8], size=(batch, 1)).astype(np.float32)
    share = random.choice([1 / vocab, 0.1, 0.5, 0.95], size=(batch, 1))
    hit = random.random((batch, vocab), dtype=np.float32) < share
    kinds = {
        "normal": (6.0, lambda x, hit: x),
        "halves": (4.0, lambda x, hit: np.round(x * 2) / 2),
        "whole numbers": (1.0, lambda x, hit: np.round(x)),
        "equal": (0.4, lambda x, hit: np.broadcast_to(x[:, :1], x.shape)),
        "-inf": (2.0, lambda x, hit: np.where(hit, -INF, x)),
        "NaN": (1.5, lambda x, hit: np.where(hit, NAN, x)),
        "-inf and NaN": (0.5, lambda x, hit: np.where(hit, NAN, np.where(x > 0, -INF, x))),
        "no token": (0.2, lambda x, hit: np.where(hit, NAN, -INF)),
        "+inf": (1.0, lambda x, hit: np.where(hit, INF, x)),
        "+inf and NaN": (0.3, lambda x, hit: np.where(hit, INF, np.where(x > 0, NAN, x))),
        "huge": (1.0, lambda x, hit: x.clip(-3, 3) * 1e38),
        "large": (0.5, lambda x, hit: x * 1e4),
        "tiny": (0.7, lambda x, hit: x * 1e-38),
        "peaked": (1.0, lambda x, hit: np.where(hit, x + 20, x)),
    }
    kind = pick(random, {number: odds for number, (odds, _) in enumerate(kinds.values())}, batch)
    with np.errstate(over="ignore"):
        for number, (_, make) in enumerate(kinds.values()):
            rows = kind == number
            x[rows] = make(x[rows], hit[rows])
    return x


def row_with_ties(
    choice: Random, vocab: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Return [V] f32 logits; many have ties, some -inf."""
    generator = generator or torch.Generator().manual_seed(choice.getrandbits(60))
    row = torch.randn(vocab, generator=generator) * choice.choice((0.3, 1.0, 3.0, 6.0))
    if choice.random() < 0.5:
        row = (row * 2).round() / 2
    if choice.random() < 0.15:
        row[torch.rand(vocab, generator=generator) < 0.4] = -torch.inf
        row[choice.randrange(vocab)] = 1.0
    return row

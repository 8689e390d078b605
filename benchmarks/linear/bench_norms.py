"""``layer_norm`` and ``rms_norm`` against torch's, and one read of the rows."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

import lmdecode
from benchmarks.harness import LIMIT, OURS, Case, Contestant
from benchmarks.limits import streaming_read

GROUP = "norms"
SOURCES = ("linear/norms",)


def _contestants(with_peers: bool, *, norm: str, rows: int, size: int) -> list[Contestant]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, size, generator=generator)
    weight, bias = torch.randn(2, size, generator=generator)
    if norm == "layer_norm":
        ours = partial(lmdecode.layer_norm, x, weight, bias, eps=1e-5)
        peer = partial(F.layer_norm, x, (size,), weight, bias, 1e-5)
    else:
        ours = partial(lmdecode.rms_norm, x, weight, eps=1e-6)
        peer = partial(F.rms_norm, x, (size,), weight, 1e-6)
    if not with_peers:
        return [Contestant(OURS, ours)]
    return [
        Contestant(OURS, ours),
        Contestant(LIMIT, streaming_read(x)),
        Contestant(f"F.{norm}", peer),
    ]


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` a small one of each norm."""
    shapes = [(2, 64)] if quick else [(4, 512), (128, 512), (128, 4096), (4096, 1024)]
    return [
        Case(
            GROUP,
            norm,
            {"rows": rows, "size": size},
            partial(_contestants, norm=norm, rows=rows, size=size),
        )
        for norm in ("layer_norm", "rms_norm")
        for rows, size in shapes
    ]

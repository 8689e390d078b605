"""Random cases for the attention ops, and what is right for them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lmdecode import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    queries: int, keys: int, *, batch: int = 1, heads: int = 4, kv_heads: int = 2, size: int = 32,
    value_size: int | None = None, dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:  # fmt: skip
    """Return queries, keys and values; values are as wide as keys where nothing is said."""
    return [
        normal(batch, heads, queries, size, seed=1, dtype=dtype),
        normal(batch, kv_heads, keys, size, seed=2, dtype=dtype),
        normal(batch, kv_heads, keys, value_size or size, seed=3, dtype=dtype),
    ]


class Paged:
    """Pools, and a table of blocks in no order in which no entry is valid that need not be."""

    def __init__(
        self,
        lengths: list[int],
        *,
        block_size: int = 64,
        size: int = 32,
        value_size: int | None = None,
        kv_heads: int = 2,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        counts = [-(-length // block_size) for length in lengths]
        blocks = sum(counts) + 3
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(7)).int()
        self.table = torch.full((len(lengths), max([*counts, 1]) + 1), -1, dtype=torch.int32)
        for row, count in enumerate(counts):
            self.table[row, :count], order = order[:count], order[count:]
        self.lengths = torch.tensor(lengths)
        self.k = normal(blocks, kv_heads, block_size, size, seed=1, dtype=dtype)
        self.v = normal(blocks, kv_heads, block_size, value_size or size, seed=2, dtype=dtype)
        self.k[order.long()] = self.v[order.long()] = torch.nan
        self.block_size = block_size

    def gathered(self) -> list[torch.Tensor]:
        return [
            pool[self.table.clamp(min=0).long()].transpose(1, 2).flatten(2, 3)
            for pool in (self.k, self.v)
        ]

    def options(self) -> dict[str, Any]:
        return {"block_table": self.table, "kv_lengths": self.lengths}


@dataclass
class AttentionCase:
    """q, k and v, and the options of a call."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def call(self, op: Any, **changes: Any) -> Any:
        return op(self.q, self.k, self.v, **{**self.options, **changes})

    def to(self, device: torch.device) -> AttentionCase:
        def move(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        options = {name: move(value) for name, value in self.options.items()}
        return AttentionCase(self.name, move(self.q), move(self.k), move(self.v), options)

    def exact(self) -> tuple[Tensor, Tensor]:
        """Output and lse in float64."""
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        options = {**self.options, "return_lse": True}
        return reference.sliding_window_attention(q, k, v, **options)

    def __str__(self) -> str:
        options = {
            name: list(value.shape) if isinstance(value, Tensor) else value
            for name, value in self.options.items()
        }
        shapes = [list(x.shape) for x in (self.q, self.k, self.v)]
        return f"{self.name}: {self.q.dtype} {shapes} {options}"


def plain_torch(case: AttentionCase) -> Tensor:
    """The same in plain torch, in the dtype of the case: what rounding is to be expected."""
    q, k, v = case.q, case.k, case.v
    o = case.options
    ragged = o.get("cu_seqlens_q") is not None
    if ragged:
        bounds = [o["cu_seqlens_q"], o.get("cu_seqlens_kv")]
        if bounds[1] is None:
            bounds[1] = bounds[0]
        ends_q, ends_kv = (b.tolist() for b in bounds)
        positions = o.get("q_positions")
        parts = []
        for i in range(len(ends_q) - 1):
            a, b = ends_q[i], ends_q[i + 1]
            c, d = ends_kv[i], ends_kv[i + 1]
            options = {n: x for n, x in o.items() if not n.startswith("cu_")}
            if positions is not None:
                options["q_positions"] = positions[a:b]
            slopes = o.get("alibi_slopes")
            if slopes is not None and slopes.dim() == 2:
                options["alibi_slopes"] = slopes[i]
            one = [x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])]
            parts.append(plain_torch(AttentionCase("", *one, options))[0].transpose(0, 1))
        return torch.cat(parts)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scale = o.get("scale")
    scores = (q @ k.mT).mul(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if o.get("softcap") is not None:
        scores = o["softcap"] * torch.tanh(scores / o["softcap"])
    # Visibility and biases, by the reference, from scores of zero and values that tell keys apart.
    bias = masks_and_biases(case)
    scores = scores + bias.to(scores.dtype)
    if o.get("sinks") is not None:
        sink = o["sinks"].to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = torch.where(bias.isneginf().all(-1, keepdim=True), 0.0, weights)
    return weights.to(q.dtype) @ v


def masks_and_biases(case: AttentionCase) -> Tensor:
    """[B, Hq, S, Skv] float64: what is added to the scores of a dense case, written out."""
    o = case.options
    batch, heads, queries = case.q.shape[:3]
    keys = case.k.shape[2]
    window, right = o.get("window"), o.get("window_right", 0)
    lengths = o.get("kv_lengths")
    positions = o.get("q_positions")
    mask = o.get("attn_mask")
    bias = torch.zeros(batch, heads, queries, keys, dtype=torch.float64)
    key = torch.arange(keys)
    for b in range(batch):
        length = keys if lengths is None else int(lengths[b])
        at = torch.arange(length - queries, length)
        if positions is not None:
            at = positions if positions.dim() == 1 else positions[b]
        distance = at[:, None] - key[None]
        hidden = (key >= length)[None].expand(queries, -1)
        if mask is None:
            if window is not None:
                hidden = hidden | (distance >= window)
            if right is not None:
                hidden = hidden | (-distance > right)
        if o.get("key_padding_mask") is not None:
            hidden = hidden | ~o["key_padding_mask"][b]
        if o.get("alibi_slopes") is not None:
            slopes = o["alibi_slopes"]
            slopes = slopes if slopes.dim() == 1 else slopes[b]
            bias[b] -= slopes.double()[:, None, None] * distance.abs()
        bias[b].masked_fill_(hidden, -torch.inf)
    if mask is not None:
        if mask.dtype == torch.bool:
            shown = mask if o.get("mask_convention") == "visible" else ~mask
            bias = bias.masked_fill(~shown.expand_as(bias), -torch.inf)
        else:
            added = mask.double().masked_fill(mask.double() <= -65536, -torch.inf)
            bias = bias + added.expand_as(bias)
    return bias


def assert_accurate(got: Any, case: AttentionCase, plain: Tensor | None = None) -> None:
    """The error is at most twice that of plain torch in the same dtype, both against float64."""
    got, lse = got
    want, want_lse = case.exact()
    assert got.dtype == case.q.dtype and got.shape == want.shape, str(case)
    assert lse.dtype == torch.float32 and lse.shape == want_lse.shape, str(case)
    if got.numel() == 0:
        return
    got, lse = got.cpu().double(), lse.cpu().double()
    plain = plain_torch(case) if plain is None else plain
    ulp = torch.finfo(case.q.dtype).eps * want.abs().max().item()
    allowed = 2 * (plain.double() - want).abs().max().item() + ulp
    error = (got - want).abs().max().item()
    assert error <= allowed, f"{case}: error {error:.3g}, allowed {allowed:.3g}"
    seen = want_lse.isfinite()
    assert torch.equal(lse[~seen], want_lse[~seen]), str(case)
    if seen.any():
        # Scores are sums in float32: their error is that of the largest of them.
        largest = want_lse[seen].abs().max().item() + score_size(case)
        error = (lse[seen] - want_lse[seen]).abs().max().item()
        assert error <= 4e-7 * (1 + largest), f"{case}: lse error {error:.3g}"


def score_size(case: AttentionCase) -> float:
    """Bound the sum of the absolute products of a score."""
    if case.q.numel() == 0 or case.k.numel() == 0:
        return 0.0
    scale = case.options.get("scale")
    scale = 1 / math.sqrt(case.q.shape[-1]) if scale is None else abs(scale)
    norms = [x.double().norm(dim=-1).max().item() for x in (case.q, case.k)]
    slopes = case.options.get("alibi_slopes")
    far = 0.0 if slopes is None else slopes.max().item() * 4000
    return scale * norms[0] * norms[1] + far


def random_cases(seed: int, count: int, *, decode: bool = False) -> list[AttentionCase]:
    """Every option, alone and together, with sizes around those of blocks."""
    return [_random_case(random.Random(1000 * seed + i), f"case {i}", decode) for i in range(count)]


def _random_case(choice: random.Random, name: str, decode: bool) -> AttentionCase:
    generator = torch.Generator().manual_seed(choice.getrandbits(32))
    dtype = choice.choice((torch.float32, *DTYPES))
    kv_heads, group = choice.choice((1, 2, 3)), choice.choice((1, 2, 4, 7))
    heads = kv_heads * group
    size = choice.choice((1, 16, 32, 33, 64, 80, 128))
    value_size = choice.choice((size, size, 16, 40, 5))
    batch = choice.choice((1, 2, 3))
    queries = choice.choice((1, 1, 2, 3, 5, 9) if decode else (1, 3, 17, 70, 200))
    keys = choice.choice(
        (queries, 1, 40, 63, 64, 65, 130, 700, 1100)
        if decode
        else (queries, queries, queries + 5, max(1, queries - 4), queries + 260)
    )
    options: dict[str, Any] = {}
    ragged = not decode and choice.random() < 0.2

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        values = torch.randint(low, high, shape, generator=generator)
        return values.int() if choice.random() < 0.3 else values

    def tokens(heads: int, length: int, size: int) -> Tensor:
        if ragged:
            return normal(length, heads, size).to(dtype)
        kind = choice.random()
        if kind < 0.3:
            return normal(batch, length, heads, size).to(dtype).transpose(1, 2)
        if kind < 0.4:
            return normal(batch, heads, length, 2 * size).to(dtype)[..., ::2]
        return normal(batch, heads, length, size).to(dtype)

    if ragged:
        lengths = [choice.choice((0, 1, 5, 40, 100)) for _ in range(batch)]
        kv_lengths = lengths
        options["cu_seqlens_q"] = torch.tensor([0, *lengths]).cumsum(0)
        if choice.random() < 0.5:
            kv_lengths = [choice.choice((0, 1, 5, 40, 300)) for _ in range(batch)]
            options["cu_seqlens_kv"] = torch.tensor([0, *kv_lengths]).cumsum(0).int()
        queries, keys = sum(lengths), sum(kv_lengths)
    q, k = tokens(heads, queries, size), tokens(kv_heads, keys, size)
    v = tokens(kv_heads, keys, value_size)
    if choice.random() < 0.5:
        options["window"] = choice.choice((1, 2, 16, 63, 64, 65, 128, 300, 1000))
    if choice.random() < 0.3:
        options["window_right"] = choice.choice((None, 1, 20))
    if choice.random() < 0.3:
        options["scale"] = choice.choice((0.3, -0.2, 0.0, 1.0))
    if choice.random() < 0.2:
        options["softcap"] = choice.choice((1.0, 30.0))
    if choice.random() < 0.3:
        options["sinks"] = normal(heads) * 3
    if choice.random() < 0.2:
        options["alibi_slopes"] = uniform(*choice.choice(((heads,), (batch, heads))))
    if choice.random() < 0.2:
        shape = (queries,) if ragged else choice.choice(((queries,), (batch, queries)))
        options["q_positions"] = integers(-5, keys + 5, *shape)
    if not ragged:
        if choice.random() < 0.3:
            options["kv_lengths"] = integers(0, keys + 1, batch)
        if choice.random() < 0.3:
            options["key_padding_mask"] = uniform(batch, keys) < choice.choice((0.2, 0.9))
        if not decode and choice.random() < 0.25:
            options.pop("window", None)
            options.pop("window_right", None)
            shape = choice.choice(
                (
                    (queries, keys),
                    (batch, 1, queries, keys),
                    (1, heads, queries, keys),
                    (batch, heads, 1, keys),
                )
            )
            mask = uniform(*shape) < choice.choice((0.05, 0.5))
            if choice.random() < 0.4:
                mask_dtype = choice.choice(DTYPES)
                mask = torch.where(mask, -65536.0, normal(*shape)).to(mask_dtype)
            else:
                options["mask_convention"] = choice.choice(("masked", "visible"))
            options["attn_mask"] = mask
    return AttentionCase(name, q, k, v, options)

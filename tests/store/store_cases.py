"""Caches whose every number follows from the tokens."""

import hashlib
from collections.abc import Callable, Sequence

import torch

from lmdecode.store import Fingerprint, KVStore

KV = list[tuple[torch.Tensor, torch.Tensor]]
Layers = Sequence[tuple[torch.Tensor, ...]]
CHUNK = 8


def fingerprint(**changes: object) -> Fingerprint:
    fields: dict[str, object] = dict(
        model_id="model", weights_hash="weights", dtype="float32", num_layers=3, num_kv_heads=2,
        head_size=4,
    )  # fmt: skip
    return Fingerprint(**{**fields, **changes})  # type: ignore[arg-type]


def cache(tokens: Sequence[int], of: Fingerprint | None = None) -> KV:
    """The keys and values of a made-up model: of each token and all before it."""
    of = of or fingerprint()
    state, seeds = b"", []
    for token in tokens:
        state = hashlib.sha256(state + int(token).to_bytes(4, "little")).digest()
        seeds.append(int.from_bytes(state[:4], "little"))
    base = torch.tensor(seeds, dtype=torch.int64).view(1, -1, 1)
    heads = torch.arange(of.num_kv_heads).view(-1, 1, 1)
    elements = torch.arange(of.head_size).view(1, 1, -1)
    pairs = []
    for layer in range(of.num_layers):
        pair = [
            ((base * 31 + heads * 7 + elements * 3 + layer * 11 + which) % 509 - 254) / 2
            for which in (0, 1)
        ]
        pairs.append((pair[0].to(of.torch_dtype), pair[1].to(of.torch_dtype)))
    return pairs


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def same(a: Layers | None, b: Layers) -> bool:
    """Whether something was loaded, and is this to the bit."""
    return a is not None and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y))
        for layer, other in zip(a, b, strict=True)
        for x, y in zip(layer, other, strict=True)
    )


def first(kv: KV, num_tokens: int) -> KV:
    return [(k[:, :num_tokens], v[:, :num_tokens]) for k, v in kv]


Open = Callable[..., KVStore]

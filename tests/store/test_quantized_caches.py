"""Quantised caches: int8 and float8 numbers, with a scale for each key and value of a head."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from store_cases import CHUNK, Open, fingerprint, same
from torch import Tensor

from lmdecode.store import Fingerprint, KVStore
from lmdecode.store.__main__ import main

TOKENS = list(range(3, 3 + 2 * CHUNK + 5))
NUMBERS = ("int8", "float8_e4m3fn", "float8_e5m2")
Layers = list[tuple[Tensor, ...]]


def random_cache(of: Fingerprint, tokens: Sequence[int], seed: int = 0) -> Layers:
    """Random bytes: every number of the dtypes, NaN too."""
    generator = torch.Generator().manual_seed(seed)
    heads, size, count = of.num_kv_heads, of.head_size, len(tokens)
    layers = []
    for _ in range(of.num_layers):
        numbers = torch.randint(0, 256, (2, heads, count, size), generator=generator)
        layer = list(numbers.to(torch.uint8).view(of.torch_dtype))
        if of.scale_torch_dtype is not None:
            layer += list(torch.rand(2, heads, count, generator=generator).to(of.scale_torch_dtype))
        layers.append(tuple(layer))
    return layers


def first(layers: Layers, count: int) -> Layers:
    return [tuple(tensor[:, :count] for tensor in layer) for layer in layers]


@pytest.mark.parametrize("v_layout", ["column", "row"])
@pytest.mark.parametrize("scale", [None, "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_every_bit_comes_back(
    open_store: Open, dtype: str, scale: str | None, v_layout: str
) -> None:
    of = fingerprint(dtype=dtype, scale_dtype=scale)
    store = open_store(fingerprint=of, v_layout=v_layout)
    kv = random_cache(of, TOKENS)
    assert store.put(TOKENS, kv) == len(TOKENS)
    hit = store.lookup([*TOKENS[:-2], 1])
    assert hit.num_tokens == len(TOKENS) - 2
    assert same(store.load(hit), first(kv, hit.num_tokens))
    assert same(list(store.load_layers(hit)), first(kv, hit.num_tokens))
    out = random_cache(of, TOKENS[:-2], seed=1)
    assert store.load(hit, out=out) is out
    assert same(out, first(kv, hit.num_tokens))


def test_any_strides_and_shapes(open_store: Open) -> None:
    of = fingerprint(dtype="int8", scale_dtype="float32", head_size=5)  # rows of 9 bytes
    store = open_store(fingerprint=of)
    kv = random_cache(of, TOKENS)
    strided = [
        (
            k.transpose(1, 2).contiguous().transpose(1, 2)[None],
            torch.stack((v, v), dim=-1)[..., 0],
            ks[..., None],
            vs.t().contiguous().t()[None, ..., None],
        )
        for k, v, ks, vs in kv
    ]
    store.put(TOKENS, strided)
    assert same(store.load(store.lookup(TOKENS)), kv)


def test_windows(open_store: Open) -> None:
    of = fingerprint(dtype="int8", scale_dtype="float16", window=(None, 6, 4))
    store = open_store(fingerprint=of)
    kv = random_cache(of, TOKENS)
    held = [tuple(t[:, -n:] for t in layer) for layer, n in zip(kv, (99, 5, 3), strict=True)]
    store.put(TOKENS, held)
    assert same(store.load(store.lookup(TOKENS)), held)


def test_sessions_exports_and_readers(open_store: Open, tmp_path: Path) -> None:
    of = fingerprint(dtype="int8", scale_dtype="float32")
    store = open_store(fingerprint=of)
    kv = random_cache(of, TOKENS)
    session = store.session("chat")
    session.step(TOKENS)
    assert session.commit(kv) == len(TOKENS)
    session.step([1])
    assert same(session.resume()[1], kv)
    store.export(tmp_path / "file")
    assert main(["verify", str(tmp_path / "store")]) == 0
    reader = open_store(fingerprint=of, readonly=True)
    assert same(reader.load(reader.lookup(TOKENS)), kv)
    other = open_store(fingerprint=of, path=tmp_path / "other")
    assert other.import_(tmp_path / "file") == 3
    assert same(other.load(other.lookup(TOKENS)), kv)


def test_many_writers(open_store: Open) -> None:
    of = fingerprint(dtype="float8_e4m3fn", scale_dtype="float32")
    one = open_store(fingerprint=of, writers="many")
    two = open_store(fingerprint=of, writers="many")
    kv = random_cache(of, TOKENS)
    assert two.put(TOKENS, kv) == len(TOKENS)
    assert same(one.load(one.lookup(TOKENS)), kv)


def test_other_scales_are_another_fingerprint(
    open_store: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fingerprints = [
        fingerprint(dtype="int8", scale_dtype=scale) for scale in (None, "float32", "float16")
    ]
    assert len({of.name for of in fingerprints}) == 3
    for of in fingerprints:
        assert Fingerprint.decoded(of.encoded()) == of
        open_store(fingerprint=of).put(TOKENS, random_cache(of, TOKENS))
    assert main(["why", str(tmp_path / "store")]) == 0
    assert 'scale_dtype           "float32"' in capsys.readouterr().out


def test_stores_of_before_keep_their_names() -> None:
    assert fingerprint().name == "f26bff26e23c6c26d4408f5b"
    with pytest.raises(ValueError, match="not the fields"):
        Fingerprint.decoded(fingerprint().encoded()[:-1] + b',"scale_dtype":null}')


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(dtype="float32"), "scale_dtype is float32 and dtype is float32; expected int8"),
        (dict(scale_dtype="int8"), "scale_dtype is int8; expected one of"),
    ],
)
def test_wrong_fingerprints(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fingerprint(**{**dict(dtype="int8", scale_dtype="float32"), **wrong})


def test_wrong_caches(open_store: Open) -> None:
    of = fingerprint(dtype="int8", scale_dtype="float32")
    store: KVStore = open_store(fingerprint=of)
    kv = random_cache(of, TOKENS)
    k, v, ks, vs = kv[1]

    def refused(layer: tuple[Tensor, ...], message: str) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            store.put(TOKENS, [kv[0], layer, kv[2]])

    refused((k, v), r"kv\[1\] is tuple of 2; expected K, V and the scales of both")
    refused((k, v, ks, vs.half()), "V's scales of layer 1 is torch.float16; expected torch.float32")
    refused((k, v, ks[:, :-1], vs), "K's scales of layer 1 are of 20 tokens; expected 21")
    refused((k, v, ks[:1], vs), r"has shape \[1, 21\]; expected \[2, tokens\] or \[2, tokens, 1\]")
    refused((k, v.float(), ks, vs), "V of layer 1 is torch.float32; expected torch.int8")
    refused((k, v, ks, 1.0), "V's scales of layer 1 is float; expected a tensor")  # type: ignore[arg-type]
    assert store.stats()["entries"] == 0
    store.put(TOKENS, kv)
    hit = store.lookup(TOKENS)
    with pytest.raises(ValueError, match="cannot be written in place"):
        store.load(hit, out=[(k, v, ks[:, :1].expand(2, len(TOKENS)), vs)] * 3)
    with pytest.raises(ValueError, match="of 2; expected K, V and the scales"):
        store.load(hit, out=[(k, v)] * 3)

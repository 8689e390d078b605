"""put, lookup and load: exact prefixes at any length, the longest stored one, never another's."""

import sqlite3
from pathlib import Path

import pytest
import torch
from store_cases import CHUNK, Open, cache, fingerprint, first, same

from lmdecode.store import FingerprintMismatchError, KVStore

TOKENS = [5, 9, 2, 7, 1, 1, 3, 8, 4, 4, 0, 6, 2, 2, 9, 9, 5, 3, 1]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("v_layout", ["column", "row"])
def test_every_bit_comes_back(open_store: Open, dtype: str, v_layout: str) -> None:
    model = fingerprint(dtype=dtype)
    store = open_store(fingerprint=model, v_layout=v_layout)
    generator = torch.Generator().manual_seed(1)
    integers = torch.int32 if dtype == "float32" else torch.int16
    bits = [torch.randint(-(2**15), 2**15, (2, 2, 19, 4), generator=generator).to(integers)
            for _ in range(model.num_layers)]  # fmt: skip
    kv = [(pair[0].view(model.torch_dtype), pair[1].view(model.torch_dtype)) for pair in bits]
    assert store.put(TOKENS, kv) == 19
    loaded = store.load(store.lookup(TOKENS))
    assert loaded is not None
    for pair, (keys, values) in zip(bits, loaded, strict=True):
        assert torch.equal(keys.view(integers), pair[0])
        assert torch.equal(values.contiguous().view(integers), pair[1])
        token_is_fastest = values.stride(1) == 1
        assert token_is_fastest == (v_layout == "column")


@pytest.mark.parametrize("length", range(1, len(TOKENS) + 1))
def test_any_prefix_of_what_is_stored_is_a_hit(open_store: Open, length: int) -> None:
    store = open_store()
    store.put(TOKENS, cache(TOKENS))
    hit = store.lookup(TOKENS[:length])
    assert hit.num_tokens == length
    assert same(store.load(hit), cache(TOKENS[:length]))


@pytest.mark.parametrize("common", range(len(TOKENS)))
def test_the_longest_common_prefix_is_found(open_store: Open, common: int) -> None:
    store = open_store()
    store.put(TOKENS, cache(TOKENS))
    store.put(TOKENS[:3] + [77] * 9, cache(TOKENS[:3] + [77] * 9))
    other = [*TOKENS[:common], 50, 51, 52]
    hit = store.lookup(other)
    assert hit.num_tokens == common
    assert bool(hit) == (common > 0)
    if common:
        assert same(store.load(hit), cache(TOKENS[:common]))


def test_the_key_is_a_hash_of_all_tokens(open_store: Open) -> None:
    store = open_store()
    keys = {store.key(TOKENS[:n]) for n in range(len(TOKENS) + 1)}
    assert len(keys) == len(TOKENS) + 1
    swapped = [TOKENS[1], TOKENS[0], *TOKENS[2:]]
    assert store.key(swapped) != store.key(TOKENS)
    assert store.key(torch.tensor([TOKENS])) == store.key(TOKENS)


def test_only_what_is_new_is_written(open_store: Open) -> None:
    store = open_store()
    store.put(TOKENS[: 2 * CHUNK], cache(TOKENS[: 2 * CHUNK]))
    before = store.stats()
    assert store.put(TOKENS, cache(TOKENS)) == 19
    assert store.put(TOKENS, cache(TOKENS)) == 19
    assert store.put(TOKENS[:5], cache(TOKENS[:5])) == 5
    after = store.stats()
    assert after["puts"] - before["puts"] == 1
    assert after["entries"] == 3


def test_a_tail_that_grows_takes_one_slot(open_store: Open) -> None:
    store = open_store()
    for length in range(1, CHUNK + 1):
        assert store.put(TOKENS[:length], cache(TOKENS[:length])) == length
    assert store.stats()["entries"] == 1
    assert same(store.load(store.lookup(TOKENS[:6])), cache(TOKENS[:6]))


def test_any_strides_and_a_batch_of_one(open_store: Open) -> None:
    store = open_store()
    kv = cache(TOKENS)
    odd = [
        (k.permute(2, 0, 1).contiguous().permute(1, 2, 0)[None], v.transpose(1, 2).contiguous()
         .transpose(1, 2)) for k, v in kv
    ]  # fmt: skip
    assert store.put(torch.tensor(TOKENS), odd) == 19
    assert same(store.load(store.lookup(TOKENS)), kv)


def test_a_staging_buffer_is_used_again(open_store: Open) -> None:
    store = open_store()
    other = [n + 1 for n in TOKENS]
    store.put(TOKENS, cache(TOKENS))
    store.put(other, cache(other))
    staging = [(k.zero_().transpose(1, 2).contiguous().transpose(1, 2), v.zero_())
               for k, v in cache(TOKENS)]  # fmt: skip
    for tokens in (TOKENS, other):
        loaded = store.load(store.lookup(tokens), out=staging)
        assert loaded is staging
        assert same(staging, cache(tokens))
    with pytest.raises(ValueError, match=r"layer 0 has 19 keys; expected 5"):
        store.load(store.lookup(TOKENS[:5]), out=staging)
    overlapping = [(k[:, :1].expand(-1, 19, -1), v) for k, v in staging]
    with pytest.raises(ValueError, match="in place"):
        store.load(store.lookup(TOKENS), out=overlapping)


def test_layers_come_one_by_one(open_store: Open) -> None:
    store = open_store()
    store.put(TOKENS, cache(TOKENS))
    layers = list(store.load_layers(store.lookup(TOKENS[:13]), ahead=1))
    assert same(layers, cache(TOKENS[:13]))


def test_background_save_and_load(open_store: Open) -> None:
    store = open_store()
    saves = [store.put([n, *TOKENS], cache([n, *TOKENS]), background=True) for n in range(6)]
    assert [save.result() for save in saves] == [20] * 6
    loads = [store.load(store.lookup([n, *TOKENS]), background=True) for n in range(6)]
    for n, load in enumerate(loads):
        assert same(load.result(), cache([n, *TOKENS]))


def test_an_empty_prefix(open_store: Open) -> None:
    store = open_store()
    assert store.put([], cache([])) == 0
    assert not store.lookup([])
    assert store.load(store.lookup([])) is None


CHANGES = [
    dict(model_id="another"), dict(weights_hash="revised"), dict(dtype="bfloat16"),
    dict(rope={"theta": 1e6}), dict(window=4), dict(window=(None, 4, None)),
    dict(layout="other"), dict(tensor_parallel_rank=1), dict(tokenizer_hash="t"),
    dict(num_kv_heads=4, head_size=2), dict(num_layers=4),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_another_fingerprint_never_hits(open_store: Open, change: dict[str, object]) -> None:
    with open_store() as store:
        store.put(TOKENS, cache(TOKENS))
    assert not open_store(fingerprint=fingerprint(**change)).lookup(TOKENS)
    assert open_store().lookup(TOKENS).num_tokens == 19


@pytest.mark.parametrize("salt", ["", "b", b"\0", "ab"])
def test_another_tenant_never_hits(open_store: Open, salt: str | bytes) -> None:
    store = open_store(salt="a")
    store.put(TOKENS, cache(TOKENS))
    other = store.for_tenant(salt)
    assert not other.lookup(TOKENS)
    assert other.key(TOKENS) != store.key(TOKENS)
    assert store.for_tenant("a").lookup(TOKENS)


def test_another_context_never_hits(open_store: Open) -> None:
    store = open_store(salt="a")
    store.put(TOKENS, cache(TOKENS), context=b"image 1")
    assert not store.lookup(TOKENS)
    assert not store.lookup(TOKENS, context=b"image 2")
    assert not store.for_tenant("aimage 1").lookup(TOKENS)
    assert store.lookup(TOKENS, context=b"image 1").num_tokens == 19


def test_a_store_of_another_layout_is_refused(open_store: Open) -> None:
    open_store().close()
    with pytest.raises(FingerprintMismatchError, match="v_layout"):
        open_store(v_layout="row")
    with pytest.raises(FingerprintMismatchError, match="chunk_tokens"):
        open_store(chunk_tokens=CHUNK + 1)
    assert open_store(chunk_tokens=None).stats()["chunk_tokens"] == CHUNK


LONG = [(7 * n) % 23 for n in range(60)]


def windowed(tokens: list[int], window: int, kept: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The second layer has only its last tokens."""
    kv = cache(tokens)
    kv[1] = (kv[1][0][:, -kept:], kv[1][1][:, -kept:])
    return kv


def test_a_layer_with_a_window_needs_its_last_tokens_alone(open_store: Open) -> None:
    store = open_store(fingerprint=fingerprint(window=(None, 10, None)))
    assert store.put(LONG, windowed(LONG, 10, 9)) == 60
    loaded = store.load(store.lookup(LONG))
    assert same(loaded, windowed(LONG, 10, 9))
    # Elsewhere than at the stored length, the window's tokens are not there.
    assert not store.lookup(LONG[:59])
    assert not store.lookup([*LONG[:50], 99])
    assert store.lookup([*LONG, 99]).num_tokens == 60


def test_a_later_put_fills_a_window_in(open_store: Open) -> None:
    store = open_store(fingerprint=fingerprint(window=(None, 10, None)))
    store.put(LONG, windowed(LONG, 10, 9))
    assert store.put(LONG[:40], windowed(LONG[:40], 10, 20)) == 40
    for length in (30, 33, 40):
        hit = store.lookup(LONG[:length])
        assert hit.num_tokens == length
        assert same(store.load(hit), windowed(LONG[:length], 10, 9))
    assert same(store.load(store.lookup(LONG)), windowed(LONG, 10, 9))


def test_a_shorter_prefix_is_found_behind_a_longer_one_without_its_window(open_store: Open) -> None:
    store = open_store(fingerprint=fingerprint(window=(None, 4, None)))
    # Both end in the same slot's chunk, and only the shorter one has what its length needs.
    for length in (26, 31):
        assert store.put(LONG[:length], windowed(LONG[:length], 4, 3)) == length
    hit = store.lookup(LONG[:30])
    assert hit.num_tokens == 26
    assert same(store.load(hit), windowed(LONG[:26], 4, 3))
    assert store.lookup([*LONG[:29], 99]).num_tokens == 26
    assert store.lookup(LONG[:31]).num_tokens == 31


def test_every_layer_with_a_window(open_store: Open) -> None:
    model = fingerprint(window=6)
    store = open_store(fingerprint=model)
    store.put(LONG, [(k[:, -5:], v[:, -5:]) for k, v in cache(LONG)])
    loaded = store.load(store.lookup(LONG))
    assert same(loaded, [(k[:, -5:], v[:, -5:]) for k, v in cache(LONG)])


def test_windows_of_several_sizes(open_store: Open) -> None:
    windows = (None, 4, 12)
    store = open_store(fingerprint=fingerprint(window=windows))

    def least(tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's own last window."""
        return [
            (k, v) if w is None else (k[:, -(w - 1) :], v[:, -(w - 1) :])
            for (k, v), w in zip(cache(tokens), windows, strict=True)
        ]

    for length in (3, 20, 30, 60, 26):
        assert store.put(LONG[:length], least(LONG[:length])) == length
    for length in (3, 20, 26, 30, 60):
        hit = store.lookup(LONG[:length])
        assert hit.num_tokens == length
        assert same(store.load(hit), least(LONG[:length]))
    # Where one of the windows would miss a token nothing is found.
    assert store.lookup(LONG[:25]).num_tokens == 20
    assert store.lookup([*LONG[:59], 99]).num_tokens == 30
    # A wider layer that has more than its window does not make up for one that has not.
    other = [5, *LONG]
    kv = least(other)
    assert store.put(other, [kv[0], kv[1], cache(other)[2]]) == 61
    assert not store.lookup(other[:60])
    assert store.put(other, [kv[0], cache(other)[1], cache(other)[2]]) == 61
    assert all(store.lookup(other[:length]).num_tokens == length for length in (1, 13, 60))


def test_an_index_that_promises_more_of_a_window_than_the_slot_has(
    open_store: Open, tmp_path: Path
) -> None:
    model = fingerprint(window=(None, 10, None))
    store = open_store(fingerprint=model)
    store.put(LONG, windowed(LONG, 10, 9))
    store.close()
    for path in tmp_path.rglob("index.sqlite"):
        index = sqlite3.connect(path)
        index.execute("UPDATE areas SET usable_from = 0")
        index.commit()
        index.close()
    store = open_store(fingerprint=model)
    hit = store.lookup(LONG[:59])
    assert not hit or store.load(hit) is None


def test_a_layer_with_a_window_is_loaded_into_just_its_last_tokens(open_store: Open) -> None:
    store = open_store(fingerprint=fingerprint(window=(None, 10, None)))
    store.put(LONG, windowed(LONG, 10, 9))
    hit = store.lookup(LONG)
    out = windowed(LONG, 10, 9)
    assert store.load(hit, out=out) is out
    with pytest.raises(ValueError, match="layer 1 has 10 keys; expected 9"):
        store.load(hit, out=windowed(LONG, 10, 10))


def test_wrong_calls(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    kv = cache(TOKENS)
    with pytest.raises(ValueError, match=r"kv has 2 layers; expected 3"):
        store.put(TOKENS, kv[:2])
    with pytest.raises(ValueError, match=r"layer 0 has 18 keys; expected 19"):
        store.put(TOKENS, first(kv, 18))
    with pytest.raises(ValueError, match=r"float64; expected torch.float32"):
        store.put(TOKENS, [(k.double(), v.double()) for k, v in kv])
    with pytest.raises(ValueError, match=r"expected \[2, tokens, 4\]"):
        store.put(TOKENS, [(k[:1], v[:1]) for k, v in kv])
    with pytest.raises(TypeError, match="K of layer 0 is list"):
        store.put(TOKENS, [([], v) for _, v in kv])  # type: ignore[misc]
    with pytest.raises(ValueError, match="token id"):
        store.put([-1, *TOKENS[1:]], kv)
    with pytest.raises(ValueError, match="token id"):
        store.lookup([2**31])
    with pytest.raises(ValueError, match="token id"):
        store.lookup(torch.tensor([-1]))
    with pytest.raises(TypeError, match="expected token ids"):
        store.lookup(["a"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="load: hit is NoneType; expected a Hit"):
        store.load(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fingerprint is str; expected a Fingerprint"):
        KVStore(tmp_path / "other", fingerprint="x", capacity_bytes=1 << 24)  # type: ignore[arg-type]
    for tokens in (torch.tensor([1j]), torch.ones(3, dtype=torch.int32).to_sparse()):
        with pytest.raises(ValueError, match="lookup: tokens is a"):
            store.lookup(tokens)
    for ttl in (0, float("nan"), float("inf"), 1e16):
        with pytest.raises(ValueError, match="ttl"):
            store.put(TOKENS, kv, ttl=ttl)
    for wrong_kv in (None, 3):
        with pytest.raises(TypeError, match="put: kv is"):
            store.put(TOKENS, wrong_kv)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"kv\[0\] is int"):
        store.put(TOKENS, [1, 2, 3])  # type: ignore[list-item]
    for elsewhere in (kv[0][0].to_sparse(), kv[0][0].to("meta")):
        with pytest.raises(ValueError, match="expected one whose elements lie in memory"):
            store.put(TOKENS, [(elsewhere, v) for _, v in kv])
    for wrong_bytes in (5, None, "x"):
        with pytest.raises(TypeError, match="context is"):
            store.lookup(TOKENS, context=wrong_bytes)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="context is"):
            store.session("s", context=wrong_bytes)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="salt is int; expected bytes"):
        store.for_tenant(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="id is int; expected a str"):
        store.session(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ahead"):
        next(store.load_layers(store.lookup(TOKENS), ahead=0))
    for wrong in (
        dict(durability="none"), dict(v_layout="x"), dict(capacity_bytes=0), dict(chunk_tokens=0),
        dict(capacity_bytes=None), dict(idle_seconds=-1), dict(quota_bytes=-1),
        dict(capacity_bytes=100), dict(capacity_bytes=2**64), dict(chunk_tokens=2**32),
        dict(quota_bytes=2**64),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(wrong))):
            open_store(path=tmp_path / "other", **wrong)
    for wrong in (dict(capacity_bytes=True), dict(chunk_tokens=True), dict(chunk_tokens=8.0)):
        with pytest.raises(TypeError, match=f"KVStore: {next(iter(wrong))} is of type .*an int"):
            open_store(path=tmp_path / "other", **wrong)
    assert store.stats()["entries"] == 0


def test_token_ids_of_half_a_number(open_store: Open) -> None:
    store = open_store()
    native, scope = store._handle.native, store._scope(b"")
    for call in (native.lookup, native.peek, native.key):
        with pytest.raises(ValueError, match="tokens has 5 bytes; expected int32"):
            call(scope, memoryview(b"\0" * 5))


def test_what_is_printed(open_store: Open, tmp_path: Path) -> None:
    store = open_store(path=tmp_path / "store")
    folder = str(tmp_path / "store" / store.fingerprint.name)
    assert repr(store) == f"KVStore({folder!r}, model {store.fingerprint.model_id!r})"
    session = store.session("a")
    session.step(TOKENS)
    assert repr(session) == "Session('a', 19 tokens)"
    store.close()
    assert repr(store).startswith("KVStore(")
    assert repr(open_store(path=tmp_path / "store", readonly=True)).endswith(", readonly)")


def test_negated_views_are_stored_as_they_read(open_store: Open) -> None:
    store = open_store()
    kv = [(torch._neg_view(-k), torch._neg_view(-v)) for k, v in cache(TOKENS)]
    assert kv[0][0].is_neg()
    store.put(TOKENS, kv)
    hit = store.lookup(TOKENS)
    assert same(store.load(hit), cache(TOKENS))
    with pytest.raises(ValueError, match="cannot be written in place"):
        store.load(hit, out=kv)


def test_hits_of_another_store(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    store.put(TOKENS, cache(TOKENS))
    other: KVStore = open_store(path=tmp_path / "other")
    with pytest.raises(ValueError, match="another store"):
        other.load(store.lookup(TOKENS))


@pytest.mark.parametrize(
    "wrong",
    [
        dict(dtype="int4"), dict(num_layers=0), dict(head_size=True), dict(window=(1, 2)),
        dict(window=0), dict(num_kv_heads=1.0), dict(window=True), dict(window=2.5),
        dict(window=(2, True, None)),
    ],
)  # fmt: skip
def test_wrong_fingerprints(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Fingerprint"):
        fingerprint(**wrong)

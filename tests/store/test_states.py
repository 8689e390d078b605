"""States: what layers without keys and values keep, found where a prefix was stored alone."""

import hashlib
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from store_cases import CHUNK, Open, cache, fingerprint, same
from torch import Tensor

from lmdecode.store import Fingerprint, FingerprintMismatchError, KVStore
from lmdecode.store.__main__ import main

SIZE = 37  # of a state, which no alignment divides
OF = fingerprint(state_size=SIZE)
TOKENS = list(range(3, 3 + 3 * CHUNK + 5))
Cache = list[tuple[Tensor, ...]]


def state(tokens: Sequence[int], size: int = SIZE) -> Tensor:
    digest = hashlib.sha256(bytes(tokens)).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
    return torch.randn(size, generator=generator)


def with_state(tokens: Sequence[int], of: Fingerprint = OF) -> Cache:
    return [*cache(tokens, of), (state(tokens, of.state_size),)]


def put(store: KVStore, length: int, tokens: Sequence[int] = TOKENS) -> None:
    assert store.put(tokens[:length], with_state(tokens[:length])) == length


def found(store: KVStore, length: int, tokens: Sequence[int] = TOKENS) -> int:
    """Return the length of a hit, whose bytes are the right ones."""
    hit = store.lookup(tokens[:length])
    if hit:
        assert same(store.load(hit), with_state(tokens[: hit.num_tokens]))
    return hit.num_tokens


@pytest.mark.parametrize("v_layout", ["column", "row"])
@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, len(TOKENS)])
def test_every_bit_comes_back(open_store: Open, length: int, v_layout: str) -> None:
    store = open_store(fingerprint=OF, v_layout=v_layout)
    put(store, length)
    want = with_state(TOKENS[:length])
    hit = store.lookup(TOKENS)
    assert hit.num_tokens == length
    assert same(store.load(hit), want)
    assert same(list(store.load_layers(hit)), want)
    assert same(store.load(hit, background=True).result(), want)
    out = [tuple(torch.full_like(one, 7) for one in layer) for layer in want]
    assert store.load(hit, out=out) is out
    assert same(out, want)


def test_found_where_a_state_is(open_store: Open, tmp_path: Path) -> None:
    """In the middle of a slot, at its end, and at none of the lengths between."""
    lengths = [5, CHUNK, 2 * CHUNK + 3, 2 * CHUNK + 5, len(TOKENS)]
    for order in (lengths, lengths[::-1]):
        store = open_store(fingerprint=OF, path=tmp_path / str(order[0]))
        for length in order:
            put(store, length)
        for length in range(len(TOKENS) + 1):
            assert found(store, length) == max((n for n in lengths if n <= length), default=0)
        assert found(store, 30, [*TOKENS[: CHUNK + 2], 1, *range(40)]) == CHUNK
        assert store.verify().damage == ()


def test_a_state_is_added_to_what_is_stored(open_store: Open) -> None:
    store = open_store(fingerprint=OF)
    put(store, len(TOKENS))
    assert found(store, 2 * CHUNK) == 0
    entries = store.stats()["entries"]
    put(store, 2 * CHUNK)
    assert store.stats()["entries"] == entries  # another slot of the same prefix
    assert found(store, 2 * CHUNK) == 2 * CHUNK and found(store, len(TOKENS)) == len(TOKENS)
    written = store.stats()["bytes_written"]
    put(store, 2 * CHUNK)
    assert store.stats()["bytes_written"] == written


def test_slots_without_a_state_are_smaller(open_store: Open) -> None:
    of = fingerprint(state_size=100_000)
    store = open_store(fingerprint=of, capacity_bytes=1 << 24)
    store.put(TOKENS, with_state(TOKENS, of))
    sizes = [entry["bytes"] for entry in store.entries()]
    assert all(size < 10_000 for size in sizes[:-1]) and sizes[-1] > 400_000
    assert store.slot_bytes > 400_000
    read = store.stats()["bytes_read"]
    assert same(store.load(store.lookup(TOKENS)), with_state(TOKENS, of))
    assert store.stats()["bytes_read"] - read < 420_000


def test_slots_by_default_have_room_for_a_state(open_store: Open) -> None:
    small, large = fingerprint(state_size=SIZE), fingerprint(state_size=1 << 20)
    token = 2 * small.num_layers * small.token_bytes
    for of, least in ((small, 1 << 20), (large, 4 << 20)):
        store = open_store(fingerprint=of, chunk_tokens=None, capacity_bytes=1 << 26)
        assert least <= token * store.chunk_tokens < 2 * least
        assert store.slot_bytes >= token * store.chunk_tokens + of.state_bytes


def test_with_windows_and_scales(open_store: Open) -> None:
    of = fingerprint(state_size=SIZE, window=(None, 6, 4))
    store = open_store(fingerprint=of)
    for length in (CHUNK, 2 * CHUNK + 3):
        kv = with_state(TOKENS[:length], of)
        held = [(k[:, -(w or 99) + 1 :], v[:, -(w or 99) + 1 :]) for w, (k, v) in
                zip(of.windows or (), kv[:-1], strict=True)]  # fmt: skip
        assert store.put(TOKENS[:length], [*held, kv[-1]]) == length
        assert same(store.load(store.lookup(TOKENS)), [*held, kv[-1]])
    of = fingerprint(state_size=SIZE, dtype="int8", scale_dtype="float32")
    store = open_store(fingerprint=of)
    numbers = torch.arange(len(TOKENS)).to(torch.int8).view(1, -1, 1).expand(2, -1, 4)
    layer = (numbers, -numbers, torch.rand(2, len(TOKENS)), torch.rand(2, len(TOKENS)))
    want: Cache = [*[layer] * of.num_layers, (state(TOKENS),)]
    store.put(TOKENS, want)
    hit = store.lookup(TOKENS)
    assert same(store.load(hit), want)
    out = [tuple(torch.zeros_like(one) for one in entry) for entry in want]
    store.load(hit, out=out)
    assert same(out, want)


def test_sessions(open_store: Open) -> None:
    with open_store(fingerprint=OF) as store:
        session = store.session("chat")
        for begin, end in pairwise([0, 5, CHUNK + 1, len(TOKENS)]):
            session.step(TOKENS[begin:end])
            kv = with_state(TOKENS[:end])
            assert session.commit(kv) == end
        nothing = [(k[:, :0], v[:, :0]) for k, v in kv[:-1]]
        session.step([9])
        assert session.commit([*nothing, (torch.empty(0),)], num_tokens=0) == 0
    with open_store(fingerprint=OF) as store:
        session = store.session("chat")
        assert session.tokens == [*TOKENS, 9]
        count, loaded = session.resume()
        assert count == len(TOKENS) and loaded is not None and same(loaded, kv)
        count, loaded = session.resume(max_tokens=len(TOKENS) - 1)
        assert count == CHUNK + 1


def test_several_prefixes_at_once(open_store: Open) -> None:
    store = open_store(fingerprint=OF)
    lengths = [CHUNK, 2 * CHUNK, 2 * CHUNK + 4]
    done = store.put_each([(TOKENS[:n], with_state(TOKENS[:n])) for n in lengths])
    assert done.result() == lengths[-1]
    assert [found(store, n) for n in lengths] == lengths
    assert store.stats()["entries"] == 3 and store.stats()["puts"] == 3


def test_copies_have_the_states(open_store: Open, tmp_path: Path) -> None:
    store = open_store(fingerprint=OF)
    for length in (CHUNK, len(TOKENS)):
        put(store, length)
    store.backup(tmp_path / "copy")
    store.export(tmp_path / "file")
    other = open_store(fingerprint=OF, path=tmp_path / "other")
    assert other.import_(tmp_path / "file") == 4
    for copy in (open_store(fingerprint=OF, path=tmp_path / "copy"), other):
        assert found(copy, len(TOKENS)) == len(TOKENS) and found(copy, CHUNK + 1) == CHUNK
        assert copy.verify().damage == ()


def test_other_processes_find_them(open_store: Open) -> None:
    first = open_store(fingerprint=OF, writers="many")
    second = open_store(fingerprint=OF, writers="many")
    for store, length in ((second, CHUNK), (first, 2 * CHUNK), (second, len(TOKENS))):
        put(store, length)
        for one in (first, second):
            assert found(one, len(TOKENS)) == length
    reader = open_store(fingerprint=OF, readonly=True)
    assert found(reader, len(TOKENS)) == len(TOKENS)


def test_what_is_erased_is_overwritten(open_store: Open) -> None:
    store = open_store(fingerprint=OF)
    put(store, CHUNK)
    put(store, CHUNK + 3)
    needles = [bytes(state(TOKENS[:n]).numpy().tobytes()) for n in (CHUNK, CHUNK + 3)]
    slab = Path(store._handle.directory) / "slab-00000"
    assert all(needle in slab.read_bytes() for needle in needles)
    assert store.erase(TOKENS[: CHUNK + 3]) == 2
    assert not any(needle in slab.read_bytes() for needle in needles)


def test_the_oldest_are_evicted(open_store: Open, tmp_path: Path) -> None:
    slots = 6
    of_slot = open_store(fingerprint=OF).slot_bytes
    store = open_store(fingerprint=OF, path=tmp_path / "full", capacity_bytes=slots * of_slot)
    texts = [[100 + n, *TOKENS[: CHUNK + 2]] for n in range(8)]  # two slots each
    for text in texts:
        put(store, len(text), text)
    assert [found(store, CHUNK + 3, text) for text in texts] == [0] * 5 + [CHUNK + 3] * 3
    assert store.verify().damage == () and store.stats()["evicted"] == 10


def test_one_limit_for_a_directory(open_store: Open) -> None:
    of = fingerprint(state_size=100_000)  # 400 kB
    store = open_store(fingerprint=of, capacity_bytes=None, directory_bytes=12 << 20)
    texts = [[100 + n, *TOKENS] for n in range(40)]
    for text in texts:
        assert store.put(text, with_state(text, of)) == len(text)
    assert store.stats()["directory_bytes"] <= (12 << 20) + (1 << 16)  # the index may grow since
    assert store.lookup(texts[-1]).num_tokens == len(texts[-1])
    assert 8 <= sum(store.lookup(text).num_tokens > 0 for text in texts) < 40


@pytest.mark.parametrize("part", ["header", "keys", "state", "behind it", "end of the file"])
def test_a_damaged_entry_is_a_miss(open_store: Open, part: str) -> None:
    store = open_store(fingerprint=OF)
    for length in (CHUNK, 2 * CHUNK, 2 * CHUNK + 4):
        put(store, length)
    slab = Path(store._handle.directory) / "slab-00000"
    entry = store.entries()[-1]
    begin = entry["area"] * store.slot_bytes
    store.close()
    stored = state(TOKENS[: 2 * CHUNK + 4]).numpy().tobytes()
    at = slab.read_bytes().index(stored)
    assert begin < at < begin + entry["bytes"]
    if part == "end of the file":
        with slab.open("r+b") as file:
            file.truncate(at + 8)
    else:
        places = {"header": begin + 60, "keys": begin + 4096 + 5, "state": at + SIZE * 4 - 1,
                  "behind it": at + SIZE * 4 + 1}  # fmt: skip
        with slab.open("r+b") as file:
            file.seek(places[part])
            byte = file.read(1)
            file.seek(places[part])
            file.write(bytes([byte[0] ^ 4]))
    store = open_store(fingerprint=OF)
    hit = store.lookup(TOKENS)
    is_whole = part == "behind it"  # nobody reads that
    assert hit.num_tokens == 2 * CHUNK + 4
    assert (store.load(hit) is None) is not is_whole
    # What is left is found: the checkpoint before.
    assert found(store, len(TOKENS)) == (2 * CHUNK + 4 if is_whole else 2 * CHUNK)
    assert store.stats()["damaged"] == (0 if is_whole else 1)
    put(store, 2 * CHUNK + 4)
    assert found(store, len(TOKENS)) == 2 * CHUNK + 4


def test_stores_without_states_keep_their_names(open_store: Open) -> None:
    plain = fingerprint()
    assert b"state_size" not in plain.encoded() and b"state_size" in OF.encoded()
    assert plain.name == "f26bff26e23c6c26d4408f5b" and plain.name != OF.name
    for of in (plain, OF):
        assert Fingerprint.decoded(of.encoded()) == of
    assert "state_size" in plain.difference(OF)


def test_another_size_is_another_store(open_store: Open) -> None:
    put(open_store(fingerprint=OF), CHUNK)
    other = open_store(fingerprint=fingerprint(state_size=SIZE + 1))
    assert other.lookup(TOKENS).num_tokens == 0
    plain = open_store()
    assert plain.lookup(TOKENS).num_tokens == 0
    with pytest.raises(ValueError, match=r"kv has 4 layers; expected 3$"):
        plain.put(TOKENS, with_state(TOKENS))


def test_the_command_line_knows_them(
    open_store: Open, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store = open_store(fingerprint=OF)
    put(store, CHUNK + 1)
    store.close()
    folder = str(Path(store._handle.directory).parent)
    for command in (["ls"], ["stat"], ["verify"], ["gc"]):
        assert main([*command, folder]) in (0, None)
    assert main(["export", folder, str(tmp_path / "file")]) in (0, None)
    assert main(["import", str(tmp_path / "new"), str(tmp_path / "file")]) in (0, None)
    capsys.readouterr()
    assert found(open_store(fingerprint=OF, path=tmp_path / "new"), len(TOKENS)) == CHUNK + 1


def test_refused() -> None:
    for size in (-1, 1.5, True):
        with pytest.raises(
            ValueError, match=r"Fingerprint: state_size is .*expected an int, at le"
        ):
            fingerprint(state_size=size)


def test_refused_caches(open_store: Open) -> None:
    store = open_store(fingerprint=OF)
    kv = with_state(TOKENS)
    wrong: list[tuple[Cache, str]] = [
        (kv[:-1], "kv has 3 layers; expected 3, and the state behind them"),
        ([*kv[:-1], (state(TOKENS), torch.empty(0))], r"kv\[-1\] is tuple; expected \(state,\)"),
        ([*kv[:-1], (torch.zeros(SIZE + 1),)], r"of shape \[38\]; expected float32 of shape \[37"),
        ([*kv[:-1], (torch.zeros(SIZE, dtype=torch.float64),)], "the state is torch.float64"),
        ([*kv[:-1], (torch.zeros(2 * SIZE)[::2],)], "elements lie side by side"),
        ([*kv[:-1], (torch.empty(0),)], "layer 3 has 0 states; expected 1"),
    ]
    for given, message in wrong:
        with pytest.raises(ValueError, match=message):
            store.put(TOKENS, given)
    with pytest.raises(TypeError, match="the state is list; expected a tensor"):
        store.put(TOKENS, [*kv[:-1], ([1.0],)])  # type: ignore[list-item]
    assert store.stats()["entries"] == 0


def test_the_index_says_another_size(open_store: Open) -> None:
    """A store whose fingerprint was made by hand: no byte is read in another layout."""
    store = open_store(fingerprint=OF)
    put(store, CHUNK)
    store.close()
    folder = Path(store._handle.directory)
    other = fingerprint(state_size=SIZE + 1)
    folder.rename(folder.parent / other.name)
    with warnings.catch_warnings(), pytest.raises(FingerprintMismatchError):
        open_store(fingerprint=other)


TWO_CHUNKS = list(range(3, 3 + 2 * CHUNK + 5))
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
def test_every_bit_of_numbers_and_scales_comes_back(
    open_store: Open, dtype: str, scale: str | None, v_layout: str
) -> None:
    of = fingerprint(dtype=dtype, scale_dtype=scale)
    store = open_store(fingerprint=of, v_layout=v_layout)
    kv = random_cache(of, TWO_CHUNKS)
    assert store.put(TWO_CHUNKS, kv) == len(TWO_CHUNKS)
    hit = store.lookup([*TWO_CHUNKS[:-2], 1])
    assert hit.num_tokens == len(TWO_CHUNKS) - 2
    assert same(store.load(hit), first(kv, hit.num_tokens))
    assert same(list(store.load_layers(hit)), first(kv, hit.num_tokens))
    out = random_cache(of, TWO_CHUNKS[:-2], seed=1)
    assert store.load(hit, out=out) is out
    assert same(out, first(kv, hit.num_tokens))


def test_any_strides_and_shapes(open_store: Open) -> None:
    of = fingerprint(dtype="int8", scale_dtype="float32", head_size=5)  # rows of 9 bytes
    store = open_store(fingerprint=of)
    kv = random_cache(of, TWO_CHUNKS)
    strided = [
        (
            k.transpose(1, 2).contiguous().transpose(1, 2)[None],
            torch.stack((v, v), dim=-1)[..., 0],
            ks[..., None],
            vs.t().contiguous().t()[None, ..., None],
        )
        for k, v, ks, vs in kv
    ]
    store.put(TWO_CHUNKS, strided)
    assert same(store.load(store.lookup(TWO_CHUNKS)), kv)


def test_windows(open_store: Open) -> None:
    of = fingerprint(dtype="int8", scale_dtype="float16", window=(None, 6, 4))
    store = open_store(fingerprint=of)
    kv = random_cache(of, TWO_CHUNKS)
    held = [tuple(t[:, -n:] for t in layer) for layer, n in zip(kv, (99, 5, 3), strict=True)]
    store.put(TWO_CHUNKS, held)
    assert same(store.load(store.lookup(TWO_CHUNKS)), held)


def test_sessions_exports_and_readers(open_store: Open, tmp_path: Path) -> None:
    of = fingerprint(dtype="int8", scale_dtype="float32")
    store = open_store(fingerprint=of)
    kv = random_cache(of, TWO_CHUNKS)
    session = store.session("chat")
    session.step(TWO_CHUNKS)
    assert session.commit(kv) == len(TWO_CHUNKS)
    session.step([1])
    assert same(session.resume()[1], kv)
    store.export(tmp_path / "file")
    assert main(["verify", str(tmp_path / "store")]) == 0
    reader = open_store(fingerprint=of, readonly=True)
    assert same(reader.load(reader.lookup(TWO_CHUNKS)), kv)
    other = open_store(fingerprint=of, path=tmp_path / "other")
    assert other.import_(tmp_path / "file") == 3
    assert same(other.load(other.lookup(TWO_CHUNKS)), kv)


def test_many_writers(open_store: Open) -> None:
    of = fingerprint(dtype="float8_e4m3fn", scale_dtype="float32")
    one = open_store(fingerprint=of, writers="many")
    two = open_store(fingerprint=of, writers="many")
    kv = random_cache(of, TWO_CHUNKS)
    assert two.put(TWO_CHUNKS, kv) == len(TWO_CHUNKS)
    assert same(one.load(one.lookup(TWO_CHUNKS)), kv)


def test_other_scales_are_another_fingerprint(
    open_store: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fingerprints = [
        fingerprint(dtype="int8", scale_dtype=scale) for scale in (None, "float32", "float16")
    ]
    assert len({of.name for of in fingerprints}) == 3
    for of in fingerprints:
        assert Fingerprint.decoded(of.encoded()) == of
        open_store(fingerprint=of).put(TWO_CHUNKS, random_cache(of, TWO_CHUNKS))
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
    kv = random_cache(of, TWO_CHUNKS)
    k, v, ks, vs = kv[1]

    def refused(layer: tuple[Tensor, ...], message: str) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            store.put(TWO_CHUNKS, [kv[0], layer, kv[2]])

    refused((k, v), r"kv\[1\] is tuple of 2; expected K, V and the scales of both")
    refused((k, v, ks, vs.half()), "V's scales of layer 1 is torch.float16; expected torch.float32")
    refused((k, v, ks[:, :-1], vs), "K's scales of layer 1 are of 20 tokens; expected 21")
    refused((k, v, ks[:1], vs), r"has shape \[1, 21\]; expected \[2, tokens\] or \[2, tokens, 1\]")
    refused((k, v.float(), ks, vs), "V of layer 1 is torch.float32; expected torch.int8")
    refused((k, v, ks, 1.0), "V's scales of layer 1 is float; expected a tensor")  # type: ignore[arg-type]
    assert store.stats()["entries"] == 0
    store.put(TWO_CHUNKS, kv)
    hit = store.lookup(TWO_CHUNKS)
    with pytest.raises(ValueError, match="cannot be written in place"):
        store.load(hit, out=[(k, v, ks[:, :1].expand(2, len(TWO_CHUNKS)), vs)] * 3)
    with pytest.raises(ValueError, match="of 2; expected K, V and the scales"):
        store.load(hit, out=[(k, v)] * 3)

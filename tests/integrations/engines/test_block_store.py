"""Blocks in a store: what they are, what is found, and what happens where the store cannot."""

import errno
import os
import sqlite3
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lmdecode.integrations import block_store
from lmdecode.integrations.block_store import Block, BlockStore, StoreOptions, blocks_of
from lmdecode.store import Fingerprint, KVStore
from lmdecode.store.kv_store import KV

SIZE = 16
FINGERPRINT = Fingerprint(
    model_id="m", weights_hash="1", dtype="float32", num_layers=2, num_kv_heads=2, head_size=8
)
SLOT = 8192  # of one block


def text(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << 17, (length,), generator=generator).tolist()


def kv_of(block: Block) -> KV:
    """Numbers that depend on a block and on all before it."""
    generator = torch.Generator().manual_seed(int.from_bytes(block.context[:6]) + block.tokens[0])
    shape = (2, 2, SIZE, 8)
    return [tuple(torch.randn(shape, generator=generator)) for _ in range(2)]  # type: ignore[misc]


def with_kv(blocks: list[Block]) -> list[tuple[Block, Callable[[], KV]]]:
    return [(block, lambda block=block: kv_of(block)) for block in reversed(blocks)]


def empty() -> KV:
    return [(torch.zeros(2, SIZE, 8), torch.zeros(2, SIZE, 8)) for _ in range(2)]


def holds(store: BlockStore, block: Block) -> bool:
    """Whether a block is loaded, and is what was stored."""
    kv = empty()
    if not store.load(block, kv):
        return False
    for (keys, values), expected in zip(kv, kv_of(block), strict=True):
        assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])
    return True


@pytest.fixture(autouse=True)
def try_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_store, "_RETRY_SECONDS", 0.0)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., BlockStore]]:
    made: list[BlockStore] = []

    def new(writes: bool = True, capacity: int = 1 << 24, **options: str) -> BlockStore:
        at = StoreOptions(str(tmp_path / "store"), capacity, "strict", **options)
        made.append(BlockStore(at, FINGERPRINT, SIZE, writes))
        return made[-1]

    yield new
    for store in made:
        store.close()


def folder(tmp_path: Path) -> Path:
    return tmp_path / "store" / FINGERPRINT.name


def test_blocks_are_whole_and_depend_on_all_before() -> None:
    tokens = text(3 * SIZE + 5)
    blocks = blocks_of(tokens, SIZE, b"")
    assert [list(block.tokens) for block in blocks] == [
        tokens[i : i + SIZE] for i in (0, SIZE, 2 * SIZE)
    ]
    for place in (0, SIZE - 1, SIZE, 2 * SIZE + 1):
        other = [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]
        same = [a == b for a, b in zip(blocks, blocks_of(other, SIZE, b""), strict=True)]
        assert same == [end <= place for end in (SIZE, 2 * SIZE, 3 * SIZE)]
    assert not set(blocks) & set(blocks_of(tokens, SIZE, b"tenant"))
    assert blocks_of(tokens[: SIZE - 1], SIZE, b"") == []


def test_blocks_of_a_text_that_grows_are_those_of_the_whole_text() -> None:
    tokens, known = text(6 * SIZE), []
    for length in range(0, 6 * SIZE + 1, 7):
        known = blocks_of(tokens[:length], SIZE, b"s", known)
        assert known == blocks_of(tokens[:length], SIZE, b"s")


def test_what_is_saved_is_found_by_a_reader_and_after_a_restart(
    make: Callable[..., BlockStore],
) -> None:
    reader = make(writes=False)
    blocks = blocks_of(text(4 * SIZE), SIZE, b"")
    assert not reader.has(blocks[0])
    writer = make()
    assert writer.save(with_kv(blocks)) == 4
    assert writer.save(with_kv(blocks)) == 0
    assert all(reader.has(block) for block in blocks)
    writer.close()
    writer = make()
    assert all(holds(writer, block) for block in blocks)
    assert not writer.has(blocks_of(text(SIZE, 1), SIZE, b"")[0])


def test_another_tenant_does_not_find_it(make: Callable[..., BlockStore]) -> None:
    blocks = blocks_of(text(SIZE), SIZE, b"")
    store = make()
    store.save(with_kv(blocks))
    store.close()
    assert not make(salt="another").has(blocks[0])


def test_a_full_store_keeps_the_beginnings_of_what_was_used_last(
    make: Callable[..., BlockStore],
) -> None:
    store = make(capacity=6 * SLOT)
    old, new = (blocks_of(text(4 * SIZE, seed), SIZE, b"") for seed in (1, 2))
    store.save(with_kv(old))
    store.save(with_kv(new))
    assert [store.has(block) for block in new] == [True] * 4
    assert [store.has(block) for block in old] == [True, True, False, False]


def test_blocks_that_are_saved_again_count_as_used(make: Callable[..., BlockStore]) -> None:
    store = make(capacity=4 * SLOT)
    first, second, third = (blocks_of(text(2 * SIZE, seed), SIZE, b"") for seed in (1, 2, 3))
    store.save(with_kv(first))
    store.save(with_kv(second))
    store.save(with_kv(first))
    store.save(with_kv(third))
    assert all(store.has(block) for block in first + third)
    assert not any(store.has(block) for block in second)


def test_blocks_whose_tensors_are_gone_count_as_used_too(make: Callable[..., BlockStore]) -> None:
    store = make(capacity=4 * SLOT)
    first, second, third = (blocks_of(text(2 * SIZE, seed), SIZE, b"") for seed in (1, 2, 3))
    store.save(with_kv(first))
    store.save(with_kv(second))
    assert store.save([(block, None) for block in first + third]) == 0
    store.save(with_kv(third))
    assert all(store.has(block) for block in first + third)


def test_tensors_may_change_as_soon_as_they_are_saved(make: Callable[..., BlockStore]) -> None:
    store = make()
    blocks = blocks_of(text(8 * SIZE), SIZE, b"")
    cache = {block: kv_of(block) for block in blocks}
    store.save([(block, lambda block=block: cache[block]) for block in blocks])
    for kv in cache.values():
        for keys, values in kv:
            keys.zero_(), values.zero_()
    assert all(holds(store, block) for block in blocks)


def test_a_damaged_block_is_a_miss_and_is_stored_anew(
    make: Callable[..., BlockStore], tmp_path: Path
) -> None:
    store = make()
    blocks = blocks_of(text(4 * SIZE), SIZE, b"")
    store.save(with_kv(blocks))
    store.close()
    slab = folder(tmp_path) / "slab-00000"
    content = bytearray(slab.read_bytes())
    content[2 * SLOT + 5000] ^= 1
    slab.write_bytes(content)
    store = make()
    found = [holds(store, block) for block in blocks]
    assert sorted(found) == [False, True, True, True]
    assert store.save(with_kv(blocks)) == 1
    assert all(holds(store, block) for block in blocks)


def test_the_second_writer_reads_until_the_first_is_gone(make: Callable[..., BlockStore]) -> None:
    first = make()
    with pytest.warns(RuntimeWarning, match="does not write its store"):
        second = make()
    blocks = blocks_of(text(2 * SIZE), SIZE, b"")
    first.save(with_kv(blocks[:1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once
        assert [holds(second, block) for block in blocks] == [True, False]
        assert second.save(with_kv(blocks)) == 0
    first.close()
    assert second.save(with_kv(blocks)) == 1
    assert all(holds(second, block) for block in blocks)


def test_a_folder_that_cannot_be_written_is_read(
    make: Callable[..., BlockStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = blocks_of(text(SIZE), SIZE, b"")
    store = make()
    store.save(with_kv(blocks))
    store.close()

    class ReadOnlyFolder(KVStore):
        def __init__(self, *arguments: object, readonly: bool = False, **named: object) -> None:
            if not readonly:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            super().__init__(*arguments, readonly=readonly, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(block_store, "KVStore", ReadOnlyFolder)
    with pytest.warns(RuntimeWarning, match="does not write its store.*Read-only file system"):
        store = make()
    assert holds(store, blocks[0])
    assert store.save(with_kv(blocks_of(text(SIZE, 1), SIZE, b""))) == 0


def test_a_damaged_index_is_a_store_without_blocks(
    make: Callable[..., BlockStore], tmp_path: Path
) -> None:
    blocks = blocks_of(text(SIZE), SIZE, b"")
    store = make()
    store.save(with_kv(blocks))
    store.close()
    (folder(tmp_path) / "index.sqlite").write_bytes(b"nothing of SQLite" * 1000)
    with pytest.warns(RuntimeWarning, match="LmdecodeConnector"):
        store = make()
    assert not store.has(blocks[0])
    assert not store.load(blocks[0], empty())
    assert store.save(with_kv(blocks)) == 0


def test_a_store_that_fails_later_is_opened_again(
    make: Callable[..., BlockStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = blocks_of(text(2 * SIZE), SIZE, b"")
    store = make()
    store.save(with_kv(blocks[:1]))

    def fail(*arguments: object, **named: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as context:
        context.setattr(KVStore, "lookup", fail)
        with pytest.warns(RuntimeWarning, match="goes on without its store for now.*Input/output"):
            assert not store.has(blocks[0])
        assert store.save(with_kv(blocks)) == 0
        assert not store.load(blocks[0], empty())
    assert store.save(with_kv(blocks)) == 1
    assert all(holds(store, block) for block in blocks)


def test_all_puts_are_done_where_one_cannot_be_begun(
    make: Callable[..., BlockStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that the others read is vLLM's again when ``save`` returns."""
    blocks = blocks_of(text(6 * SIZE), SIZE, b"")
    store = make()
    pending: list[object] = []
    put = KVStore.put

    def counted(self: KVStore, *arguments: object, **named: object) -> object:
        if len(pending) == 5:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        pending.append(put(self, *arguments, **named))  # type: ignore[call-overload]
        return pending[-1]

    monkeypatch.setattr(KVStore, "put", counted)
    with pytest.warns(RuntimeWarning, match="goes on without"):
        assert store.save(with_kv(blocks)) == 0
    assert len(pending) == 5
    assert all(future.done() for future in pending)  # type: ignore[attr-defined]


def test_a_closed_store_stays_closed(make: Callable[..., BlockStore]) -> None:
    blocks = blocks_of(text(SIZE), SIZE, b"")
    store = make()
    store.save(with_kv(blocks))
    store.close()
    store.close()
    assert not store.has(blocks[0])
    assert store.save(with_kv(blocks)) == 0


@pytest.mark.parametrize("writes", [False, True])
def test_a_wrong_option_is_an_error(writes: bool, tmp_path: Path) -> None:
    options = StoreOptions(str(tmp_path), 1 << 24, durability="none")
    with pytest.raises(ValueError, match="durability is 'none'"):
        BlockStore(options, FINGERPRINT, SIZE, writes)
    if writes:
        with pytest.raises(ValueError, match="capacity"):
            BlockStore(StoreOptions(str(tmp_path), 100), FINGERPRINT, SIZE, writes)


def test_each_block_is_an_entry(make: Callable[..., BlockStore], tmp_path: Path) -> None:
    store = make()
    store.save(with_kv(blocks_of(text(5 * SIZE), SIZE, b"")))
    store.close()
    with sqlite3.connect(folder(tmp_path) / "index.sqlite") as index:
        counts = index.execute("SELECT num_tokens, count FROM areas WHERE count > 0").fetchall()
    assert counts == [(SIZE, SIZE)] * 5

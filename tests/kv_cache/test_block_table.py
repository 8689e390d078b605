"""``BlockTable`` against a dense model of the cache: contents, reference counts, free blocks."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lmdecode
from lmdecode import reference
from lmdecode.reference import copy_blocks_ as copy_as_reference
from tests.kv_cache.cache_memory import filled, on_device, raw
from tests.support.op_contract import WrongCall, assert_op_refuses, wrong_calls


class Model:
    """A cache in blocks, two layers of keys and values, and what it should hold."""

    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)
        self.block_size = self.choice.choice((1, 2, 3, 8, 64))
        self.table = lmdecode.BlockTable(
            num_blocks=self.choice.choice((5, 12, 40)),
            max_rows=self.choice.choice((3, 9)),
            max_blocks_per_row=self.choice.choice((3, 10)),
            block_size=self.block_size,
        )
        blocks = len(self.table.ref_counts)
        self.pools = [torch.zeros(blocks, 2, self.block_size, 3) for _ in range(4)]
        self.rows: list[list[int]] = []  # the token of each position
        self.next_token = 1
        self.refused = 0

    def tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def write(self, blocks: torch.Tensor, offsets: torch.Tensor, tokens: list[int]) -> None:
        assert (self.table.ref_counts[blocks.long()] >= 1).all()
        values = torch.tensor(tokens, dtype=torch.float32)[:, None, None]
        for number, pool in enumerate(self.pools):
            pool[blocks.flatten().long(), :, offsets.flatten().long()] = values * (number + 1)

    def step(self) -> None:
        kind = self.choice.choice(("insert", "append", "append", "append", "reorder", "free"))
        before = [t.clone() for t in (*state(self.table), *self.pools)], self.table.num_rows
        try:
            getattr(self, kind)()
        except (lmdecode.OutOfBlocksError, ValueError) as error:
            self.refused += 1
            assert self.is_right_to_refuse(error)
            for got, want in zip((*state(self.table), *self.pools), before[0], strict=True):
                assert torch.equal(got, want)
            assert self.table.num_rows == before[1]

    def insert(self) -> None:
        beams = self.choice.randint(1, 4)
        length = self.choice.randint(0, 3 * self.block_size)
        used = self.used_blocks()
        rows = self.table.insert(length, beams)
        assert rows == range(len(self.rows), len(self.rows) + beams)
        tokens = self.tokens(length)
        blocks, offsets = self.table.slots(rows[0])
        assert not used & set(blocks.tolist())
        self.write(blocks, offsets, tokens)
        self.rows += [list(tokens) for _ in rows]

    def append(self) -> None:
        count = self.choice.choice((1, 1, 1, 0, 2, 5))
        shared = self.shared_full_blocks()
        slots = self.table.append(count)
        # A full block that rows share, such as a prompt's, is neither copied nor written.
        assert not shared & set(slots.copies[:, 0].tolist())
        assert not shared & set(slots.blocks.flatten().tolist())
        lmdecode.copy_blocks_(self.pools, slots.copies)
        assert slots.blocks.shape == slots.offsets.shape == (len(self.rows), count)
        written = list(
            zip(slots.blocks.flatten().tolist(), slots.offsets.flatten().tolist(), strict=True)
        )
        assert len(set(written)) == len(written)
        for row in self.rows:
            row += self.tokens(count)
        tokens = [token for row in self.rows for token in row[len(row) - count :]]
        self.write(slots.blocks, slots.offsets, tokens)

    def reorder(self) -> None:
        if not self.rows:
            return
        rows = len(self.rows)
        count = self.choice.choice((rows, rows, self.choice.randint(0, len(self.table._lengths))))
        parents = [self.choice.randrange(rows) for _ in range(count)]
        given = torch.tensor(parents, dtype=self.choice.choice((torch.int32, torch.int64)))
        pools = [pool.clone() for pool in self.pools]
        self.table.reorder_(given if self.choice.random() < 0.7 else parents)
        assert all(torch.equal(a, b) for a, b in zip(self.pools, pools, strict=True))
        self.rows = [list(self.rows[parent]) for parent in parents]

    def free(self) -> None:
        if self.choice.random() < 0.5:
            removed = [r for r in range(len(self.rows)) if self.choice.random() < 0.4]
            self.table.free(removed)
            self.rows = [row for r, row in enumerate(self.rows) if r not in removed]

    def used_blocks(self) -> set[int]:
        return set(self.table.table[self.table.table >= 0].tolist())

    def shared_full_blocks(self) -> set[int]:
        full = set()
        for row, tokens in enumerate(self.rows):
            full |= set(self.table.table[row, : len(tokens) // self.block_size].tolist())
        return {block for block in full if self.table.ref_counts[block] > 1}

    def is_right_to_refuse(self, error: Exception) -> bool:
        if isinstance(error, lmdecode.OutOfBlocksError):
            return True  # test_out_of_blocks has the exact numbers
        longest = max(map(len, self.rows), default=0) + 5
        return (
            "num_beams is" in str(error) or longest > self.table._table.shape[1] * self.block_size
        )

    def check(self) -> None:
        table = self.table
        assert table.num_rows == len(self.rows) == len(table.table)
        assert table.lengths.tolist() == [len(row) for row in self.rows]
        uses: Counter[int] = Counter()
        for row, tokens in enumerate(self.rows):
            blocks = table.table[row].tolist()
            count = -(-len(tokens) // self.block_size)
            assert min(blocks[:count], default=0) >= 0 and set(blocks[count:]) <= {-1}
            uses.update(blocks[:count])
        assert table.ref_counts.tolist() == [uses[b] for b in range(len(table.ref_counts))]
        free = table._free_blocks[: table.num_free].tolist()
        assert sorted(free + list(uses)) == list(range(len(table.ref_counts)))
        for number, pool in enumerate(self.pools):
            seen = table.gather(pool)
            for row, tokens in enumerate(self.rows):
                got = seen[row, :, : len(tokens)]
                want = torch.tensor(tokens, dtype=torch.float32) * (number + 1)
                assert torch.equal(got, want[None, :, None].expand(2, -1, 3))


def state(table: lmdecode.BlockTable) -> list[torch.Tensor]:
    free = table._free_blocks[: table.num_free]
    return [table._table, table._lengths, table.ref_counts, free, table._counters[:1]]


@pytest.mark.parametrize("seed", range(40))
def test_contents_and_counts_of_any_history(seed: int) -> None:
    model = Model(seed)
    for _ in range(250):
        model.step()
        model.check()
    model.table.free(range(model.table.num_rows))
    assert model.table.num_free == len(model.table.ref_counts)
    assert (model.table._table == -1).all() and not model.table.ref_counts.any()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**9))
def test_contents_and_counts_of_more_histories(seed: int) -> None:
    model = Model(seed)
    for _ in range(40):
        model.step()
    model.check()


def test_a_prompt_is_allocated_once_and_its_full_blocks_stay_shared() -> None:
    table = lmdecode.BlockTable(100, 8, 10)
    assert table.insert(150, 4) == range(4)
    assert table.num_free == 97
    assert table.ref_counts[:3].tolist() == [4, 4, 4]
    slots = table.append()
    # One row keeps the last block, the others each have a copy of its 22 positions.
    assert slots.copies.tolist() == [[2, 3, 22], [2, 4, 22], [2, 5, 22]]
    assert slots.blocks.flatten().tolist() == [3, 4, 5, 2]
    assert slots.offsets.flatten().tolist() == [22] * 4
    for step in range(100):
        table.reorder_([(step + r) % 4 for r in range(4)])
        assert table.append().copies.shape == (0, 3)
    assert table.table[:, :2].tolist() == [[0, 1]] * 4
    assert table.ref_counts[:2].tolist() == [4, 4]


def test_a_prompt_that_fills_its_blocks_is_never_copied() -> None:
    table = lmdecode.BlockTable(100, 8, 10)
    table.insert(128, 5)
    assert table.append().copies.shape == (0, 3)
    assert table.num_free == 100 - 2 - 5


def test_a_beam_step_copies_at_the_next_write_alone() -> None:
    table = lmdecode.BlockTable(20, 4, 4, block_size=4)
    table.insert(4, 3)
    table.append()
    table.reorder_([1, 1, 2])
    table.reorder_([1, 0, 2])  # rows that share a block exchange it for itself
    assert table.num_free == 20 - 3
    copies = table.append().copies
    assert copies.shape == (1, 3) and copies[0, 2] == 1
    assert table.append().copies.shape == (0, 3)


def test_insert_and_free_touch_no_other_rows_blocks() -> None:
    table = lmdecode.BlockTable(20, 8, 4, block_size=4)
    table.insert(6, 2)
    table.insert(5, 1)
    others = table.table[:3].clone()
    rows = table.insert(9, 3)
    assert rows == range(3, 6)
    assert torch.equal(table.table[:3], others)
    kept = table.table[3:].clone()
    table.free([0, 1])
    assert torch.equal(table.table, torch.cat([others[2:], kept]))
    assert table.lengths.tolist() == [5, 9, 9, 9]
    table.free([])
    assert table.num_rows == 4


def test_out_of_blocks() -> None:
    table = lmdecode.BlockTable(4, 8, 4, block_size=4)
    table.insert(10, 2)
    assert table.num_free == 1
    before = [tensor.clone() for tensor in state(table)]
    with pytest.raises(lmdecode.OutOfBlocksError, match=r"insert needs 2 blocks and 1 of 4"):
        table.insert(5, 2)
    table.append()  # a copy for one of the rows
    table.reorder_([0, 1, 1])
    with pytest.raises(lmdecode.OutOfBlocksError, match=r"append needs 1 blocks and 0 of 4"):
        table.append()
    table.reorder_([0, 1])
    table.append()
    for _ in range(2):
        with pytest.raises(lmdecode.OutOfBlocksError, match=r"append needs 2 blocks and 0 of 4"):
            table.append()
    assert table.num_rows == 2 and table.lengths.tolist() == [12, 12]
    assert before[1].tolist()[:2] == [10, 10]


def test_a_table_of_nothing() -> None:
    table = lmdecode.BlockTable(0, 2, 0)
    assert table.insert(0, 2) == range(2)
    assert table.append(0).blocks.shape == (2, 0)
    table.reorder_([1])
    assert table.gather(torch.empty(0, 2, 64, 3)).shape == (1, 2, 0, 3)
    table.free([0])
    assert table.append().blocks.shape == (0, 1)
    assert repr(table) == "BlockTable(0 rows, 0 of 0 blocks of 64 free)"


def op_state(seed: int) -> tuple[list[torch.Tensor], int, int]:
    """A state that some history leads to, its rows and block size."""
    model = Model(seed)
    for _ in range(30):
        model.step()
    table = model.table
    tensors = [table._table, table._lengths, table.ref_counts, table._free_blocks, table._counters]
    return [tensor.clone() for tensor in tensors], table.num_rows, model.block_size


def same_state(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    free = int(want[4][0])
    return (
        all(torch.equal(g, w) for g, w in zip(got[:3], want[:3], strict=True))
        and torch.equal(got[3][:free], want[3][:free])
        and int(got[4][0]) == free
    )


@pytest.mark.parametrize("seed", range(60))
def test_ops_are_those_of_the_reference(seed: int) -> None:
    ours, rows, block_size = op_state(seed)
    theirs = [tensor.clone() for tensor in ours]
    choice = random.Random(seed)
    room = ours[0].shape[1] * block_size - ours[1]
    tokens = torch.tensor([choice.randint(0, min(int(r), 2 * block_size)) for r in room])
    tokens[rows:] = 0
    copies = [torch.full((len(tokens), 3), -7, dtype=torch.int32) for _ in range(2)]
    torch.ops.lmdecode.block_table_append_(*ours, copies[0], tokens.int(), block_size)
    reference.block_table_append_(*theirs, copies[1], tokens, block_size)
    assert same_state(ours, theirs)
    assert torch.equal(ours[4], theirs[4])
    count = int(ours[4][1])
    assert torch.equal(copies[0][:count], copies[1][:count])
    if rows:
        parents = torch.tensor(
            [choice.randrange(rows) for _ in range(choice.randint(0, len(tokens)))]
        )
        parents = parents.long()
        torch.ops.lmdecode.block_table_reorder_(*ours, parents, rows, block_size)
        reference.block_table_reorder_(*theirs, parents, rows, block_size)
        assert same_state(ours, theirs)


def a_table() -> lmdecode.BlockTable:
    table = lmdecode.BlockTable(10, 4, 2, block_size=4)
    table.insert(5, 2)
    return table


CALLS: dict[str, tuple[str, Any]] = {
    "num_blocks": (r"num_blocks is -1", lambda t: lmdecode.BlockTable(-1, 1, 1)),
    "max_rows": (r"max_rows is 1.5", lambda t: lmdecode.BlockTable(1, 1.5, 1)),
    "max_blocks": (r"max_blocks_per_row is True", lambda t: lmdecode.BlockTable(1, 1, True)),
    "block_size": (r"block_size is 0", lambda t: lmdecode.BlockTable(1, 1, 1, block_size=0)),
    "length": (r"length is 9; expected an int, 0 to 8", lambda t: t.insert(9)),
    "num_beams": (r"num_beams is 0", lambda t: t.insert(1, 0)),
    "too many beams": (r"num_beams is 3; expected at most 2", lambda t: t.insert(1, 3)),
    "num_tokens": (r"num_tokens is -1", lambda t: t.append(-1)),
    "too long": (r"num_tokens\[0\] is 4; expected 0 to 3", lambda t: t.append(4)),
    "a row": (r"row is 2", lambda t: t.slots(2)),
    "slots behind": (r"stop is 6", lambda t: t.slots(0, 0, 6)),
    "slots reversed": (r"start is 3", lambda t: t.slots(0, 3, 2)),
    "free": (r"rows is 2; expected an int, 0 to 1", lambda t: t.free([2])),
    "parents: too many": (r"parents has shape \[5\]", lambda t: t.reorder_([0] * 5)),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_wrong_calls_change_nothing(case: str) -> None:
    message, call = CALLS[case]
    table = a_table()
    before = [tensor.clone() for tensor in state(table)]
    with pytest.raises(ValueError, match=message):
        call(table)
    assert all(torch.equal(a, b) for a, b in zip(state(table), before, strict=True))
    assert table.num_rows == 2


# Which argument of block_table_append_, what it becomes, what the message says.
STATES: dict[str, tuple[int, Any, str]] = {
    "table: strides": (0, lambda t: t.t().contiguous().t(), "block_table has strides"),
    "table: no block": (0, lambda t: t.fill_(10), r"block_table\[0, 1\] is 10"),
    "table: none": (0, lambda t: t.fill_(-1), r"block_table\[0, 1\] is -1"),
    "table: not in use": (0, lambda t: t.fill_(9), r"block_table\[0, 1\] is 9"),
    "lengths: negative": (1, lambda t: t.fill_(-1), "row 0 is -1 long"),
    "lengths: too long": (1, lambda t: t.fill_(9), "row 0 is 9 long"),
    "free_blocks: no block": (3, lambda t: t.fill_(10), r"free_blocks\[7\] is 10"),
    "counters: too many": (4, lambda t: t.fill_(11), r"counters\[0\] is 11"),
    "block_size": (7, lambda t: 0, "block_size is 0"),
}


@pytest.mark.parametrize("case", STATES)
def test_a_broken_state_is_an_error(case: str) -> None:
    number, change, message = STATES[case]
    table = a_table()
    arguments: list[Any] = [
        table._table[:2], table._lengths[:2], table.ref_counts, table._free_blocks,
        table._counters, table._copies[:2], torch.ones(2, dtype=torch.int32), 4,
    ]  # fmt: skip
    arguments[number] = change(arguments[number])
    refs = table.ref_counts.clone()
    with pytest.raises(ValueError, match=message) as raised:
        torch.ops.lmdecode.block_table_append_(*arguments)
    assert str(raised.value).startswith("block_table_append_: ")
    assert torch.equal(table.ref_counts, refs)


def test_wrong_rows_of_a_table() -> None:
    table = a_table()
    tensors = (table._table, table._lengths, table.ref_counts, table._free_blocks, table._counters)
    for rows in (-1, 5):
        with pytest.raises(ValueError, match=f"rows is {rows}"):
            torch.ops.lmdecode.block_table_reorder_(*tensors, torch.tensor([0]), rows, 4)
    table._table[1, 0] = 77
    with pytest.raises(ValueError, match=r"block_table\[1, 0\] is 77"):
        table.reorder_([0])


@pytest.mark.parametrize(
    "shape", [(6, 2, 3, 8), (6, 2, 8, 8), (5, 2, 4, 8), (6, 4, 8), (6, 2, 4, 8, 1)]
)
def test_gather_refuses_a_pool_of_other_blocks(shape) -> None:
    table = lmdecode.BlockTable(num_blocks=6, max_rows=2, max_blocks_per_row=3, block_size=4)
    table.insert(5)
    with pytest.raises(ValueError, match=r"BlockTable: pool has shape .*; expected \[6, heads, 4"):
        table.gather(torch.zeros(shape))
    with pytest.raises(ValueError, match="BlockTable: length is 13; expected an int, 0 to 12"):
        table.gather(torch.zeros(6, 2, 4, 8), 13)


DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn,
]  # fmt: skip
BLOCKS = 9


def random_copies(choice: random.Random, block_size: int, blocks: int = BLOCKS) -> torch.Tensor:
    order = choice.sample(range(blocks), blocks)
    targets = order[: choice.randint(0, blocks - 1)]
    sources = order[len(targets) :]
    rows = [[choice.choice(sources), t, choice.randint(0, block_size)] for t in targets]
    return torch.tensor(rows, dtype=torch.int32).view(-1, 3)


def check(pools: list[torch.Tensor], copies: torch.Tensor, device: torch.device) -> None:
    want = [on_device(pool, torch.device("cpu")) for pool in pools]
    got = [on_device(pool, device) for pool in pools]
    copy_as_reference(want, copies)
    assert lmdecode.copy_blocks_(got, copies.to(device)) is None
    for one, other in zip(got, want, strict=True):
        assert torch.equal(raw(one).cpu(), raw(other)), copies


LAYOUTS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "[N, H, P, D]": lambda dtype: filled((BLOCKS, 3, 8, 5), dtype),
    "[N, P, H, D]": lambda dtype: filled((BLOCKS, 8, 3, 5), dtype).transpose(1, 2),
    "[H, N, P, D]": lambda dtype: filled((3, BLOCKS, 8, 5), dtype).transpose(0, 1),
    "gaps": lambda dtype: filled((2 * BLOCKS, 4, 10, 7), dtype)[::2, 1:, 1:9, 1:6],
    "odd bytes": lambda dtype: filled((1 + BLOCKS * 120,), dtype)[1:].view(BLOCKS, 3, 8, 5),
    "one element": lambda dtype: filled((BLOCKS, 3, 8, 1), dtype),
    "no head": lambda dtype: filled((BLOCKS, 0, 8, 5), dtype),
    "no dim": lambda dtype: filled((BLOCKS, 3, 8, 0), dtype),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_dtypes(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    for seed in range(12):
        copies = random_copies(random.Random(seed), 8)
        check([LAYOUTS[layout](dtype), filled((BLOCKS, 1, 9, 16), dtype, seed)], copies, device)


def test_many_pools_and_none(device: torch.device) -> None:
    copies = torch.tensor([[0, 3, 7], [0, 4, 8], [1, 2, 0]], dtype=torch.int32)
    check([filled((BLOCKS, 2, 8, 1 + i % 6), torch.float16, i) for i in range(80)], copies, device)
    check([], copies, device)
    check([filled((BLOCKS, 2, 8, 4), torch.float16)], copies[:0], device)
    check([filled((0, 2, 8, 4), torch.float16)], copies[:0], device)


def pool() -> torch.Tensor:
    return torch.arange(4.0 * 2 * 3 * 5).view(4, 2, 3, 5)


def copies(*rows: tuple[int, int, int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32).view(-1, 3)


SHARED = pool()
INTEGERS = torch.zeros(4, 2, 3, 5, dtype=torch.int32)
ONE = copies((0, 1, 3))
WRONG = [
    (r"pools\[1\] is of type NoneType", {0: [pool(), None]}),
    (r"copies shares memory with pools\[0\]", {0: [INTEGERS], 1: INTEGERS.view(-1)[:3].view(1, 3)}),
    (r"pools\[2\] shares memory with pools\[0\]", {0: [SHARED, pool(), SHARED]}),
    (r"copies\[0\] is \(4, 1, 3\)", {1: copies((4, 1, 3))}),
    (r"copies\[1\] is \(0, -1, 3\); expected blocks 0 to 3", {1: copies((0, 1, 3), (0, -1, 3))}),
    (r"0 to 3 positions", {1: copies((0, 1, 4))}),
    (r"copies\[0\]", {1: copies((0, 1, -1))}),
    (r"those of pools\[1\]", {0: [pool(), pool()[:, :, :2].contiguous()]}),
    (r"copies\[1\] has the target 1", {1: copies((0, 1, 3), (2, 1, 3))}),
    (r"block 1 as a source and as a target", {1: copies((0, 1, 3), (1, 2, 3))}),
    (r"block 1 as a source", {1: copies((1, 1, 3))}),
]


@wrong_calls(WRONG)
def test_errors_name_the_argument_and_nothing_is_written(wrong: WrongCall) -> None:
    assert_op_refuses(lmdecode.copy_blocks_, wrong, [pool()], ONE)

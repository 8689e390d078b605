"""``update_beam_indirection_``: a cache read through the index is the one that was reordered."""

import random

import pytest
import torch

import lmdecode
from lmdecode.reference import gather_indirect as reference_gather
from lmdecode.reference import update_beam_indirection_ as reference
from tests.support.op_contract import WrongCall, assert_op_refuses, assert_refused, wrong_calls


def random_parents(rows: int, seed: int) -> torch.Tensor:
    choice = random.Random(seed)
    kind = seed % 3
    if kind == 0:
        return torch.tensor(choice.sample(range(rows), rows))
    if kind == 1:
        return torch.tensor([choice.choice((r, r, choice.randrange(rows))) for r in range(rows)])
    return torch.tensor([choice.randrange(rows) for _ in range(rows)])


def random_table(rows: int, capacity: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (rows, capacity), generator=generator).int()


def check(
    table: torch.Tensor, parents: torch.Tensor, length: int | torch.Tensor, device: torch.device
) -> None:
    expected, table = table.clone(), table.to(device)
    reference(expected, parents, length)
    moved = length.to(device) if isinstance(length, torch.Tensor) else length
    assert lmdecode.update_beam_indirection_(table, parents.to(device), moved) is None
    assert torch.equal(table.cpu(), expected), (parents, length)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("capacity", [0, 1, 2, 33, 1023, 1024, 1025, 5000])
def test_as_the_reference(capacity: int, dtype: torch.dtype, device: torch.device) -> None:
    for seed in range(30):
        choice = random.Random(seed)
        rows = choice.choice((1, 2, 3, 4, 5, 8, 33))
        table, parents = random_table(rows, capacity, seed), random_parents(rows, seed).to(dtype)
        check(table, parents, choice.choice((0, capacity, choice.randint(0, capacity))), device)
        lengths = torch.tensor([choice.randint(0, capacity) for _ in range(rows)], dtype=dtype)
        check(table, parents, lengths, device)
        strided = torch.stack((parents, parents), dim=1)[:, 0]
        check(table, strided, torch.stack((lengths, lengths), dim=1)[:, 1], device)


def test_no_rows(device: torch.device) -> None:
    check(random_table(0, 5, 0), torch.empty(0, dtype=torch.int64), 3, device)


def test_what_lies_around_the_table_stays(device: torch.device) -> None:
    buffer = random_table(6, 50, 1)
    expected = buffer.clone()
    parents = torch.tensor([2, 0, 1, 1])
    reference(expected[1:5, 7:30], parents, 20)
    buffer = buffer.to(device)
    lmdecode.update_beam_indirection_(buffer[1:5, 7:30], parents.to(device), 20)
    assert torch.equal(buffer.cpu(), expected)


@pytest.mark.parametrize("seed", range(8))
def test_any_history_is_that_of_reordered_rows(seed: int, device: torch.device) -> None:
    """64 steps of random parents, two requests of their own lengths, against index_select."""
    choice = random.Random(seed)
    widths, prompts = (choice.randint(1, 5), choice.randint(1, 5)), (3, 7)
    rows, heads, dim = sum(widths), 2, 3
    capacity = max(prompts) + 65
    generator = torch.Generator().manual_seed(seed)
    cache = torch.randn(rows, heads, capacity, dim, generator=generator).to(device)
    untouched = cache.clone()
    index = lmdecode.BeamIndirection(rows, capacity, device=device)
    histories: list[torch.Tensor] = []
    starts = (0, widths[0])
    for start, width, prompt in zip(starts, widths, prompts, strict=True):
        index.begin(range(start, start + width), start, prompt)
        histories += [cache[start, :, :prompt].clone() for _ in range(width)]
    for step in range(64):
        for row in range(rows):
            new = torch.randn(heads, dim, generator=generator).to(device)
            position = int(index.lengths[row])
            assert index.table[row, position] == row
            cache[row, :, position] = new
            histories[row] = torch.cat([histories[row], new[:, None]], dim=1)
        index.advance()
        parents = torch.cat(
            [
                start + random_parents(width, choice.getrandbits(20))
                for start, width in zip(starts, widths, strict=True)
            ]
        )
        index.reorder_(parents.to(device))
        histories = [histories[parent] for parent in parents.tolist()]
        seen = index.gather(cache)
        for row, history in enumerate(histories):
            assert torch.equal(seen[row, :, : history.shape[1]], history), (step, row)
    # Nothing moved: each row holds its own tokens, and what was there behind them.
    for row, request in enumerate([0] * widths[0] + [1] * widths[1]):
        end = prompts[request] + 64
        assert torch.equal(cache[row, :, end:], untouched[row, :, end:])


def test_a_request_that_begins_touches_no_other() -> None:
    index = lmdecode.BeamIndirection(5, 20)
    index.begin([0, 1], 0, 4)
    index.advance(2)
    index.reorder_(torch.tensor([1, 1, 2, 3, 4]))
    before, lengths = index.table[:2].clone(), index.lengths[:2].clone()
    index.begin([2, 4], 4, 9)
    assert torch.equal(index.table[:2], before) and torch.equal(index.lengths[:2], lengths)
    assert index.table[2].tolist() == [4] * 9 + [2] * 11
    assert index.table[3].tolist() == [3] * 20
    assert index.lengths[2:].tolist() == [9, 2, 9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_gather(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randint(-100, 100, (4, 2, 11, 3), generator=generator).to(dtype)
    table = torch.randint(0, 4, (4, 12), generator=generator).int()
    for length in (None, 0, 1, 11):
        want = reference_gather(states, table[:, :11], length)
        got = lmdecode.gather_indirect(states.to(device), table.to(device), length)
        assert got.dtype == dtype and torch.equal(got.cpu(), want)


def table() -> torch.Tensor:
    return torch.arange(12, dtype=torch.int32).view(3, 4)


SHARED = table()
MAP = torch.tensor([1, 2, 0])
WRONG = [
    (r"indirection has strides", {"indirection": torch.zeros(4, 3, dtype=torch.int32).t()}),
    (r"indirection has strides",
     {"indirection": torch.zeros(1, 4, dtype=torch.int32).expand(3, 4)}),
    (r"parents shares memory", {"indirection": SHARED, "parents": SHARED[:, 0]}),
    (r"length shares memory", {"indirection": SHARED, "length": SHARED[:, 1]}),
]  # fmt: skip


@wrong_calls(WRONG)
def test_errors_name_the_argument_and_nothing_is_written(wrong: WrongCall) -> None:
    given = {"indirection": table(), "parents": MAP, "length": 2}
    assert_op_refuses(lmdecode.update_beam_indirection_, wrong, **given)


STATES = torch.zeros(3, 2, 4, 5)
WRONG_GATHERS = [
    (r"states is of type list", ([1], table())),
    (r"indirection is of type NoneType", (STATES, None)),
    (r"states has shape", (STATES[0], table())),
    (r"indirection is torch.int32 \[2, 4\]", (STATES, table()[:2])),
    (r"indirection is torch.int64", (STATES, table().long())),
    (r"length is 5; expected 0 to 4", (STATES, table(), 5)),
    (r"length is -1; expected 0 to 4", (STATES, table(), -1)),
]


@wrong_calls(WRONG_GATHERS)
def test_wrong_gathers(wrong: WrongCall) -> None:
    message = assert_refused(wrong, lambda: lmdecode.gather_indirect(*wrong[1]))
    assert message.startswith("gather_indirect: ")


def test_wrong_use_of_an_index() -> None:
    for rows, capacity in ((-1, 3), (3, -1), (2.0, 3), (True, 3)):
        with pytest.raises(ValueError, match="expected an int >= 0"):
            lmdecode.BeamIndirection(rows, capacity)
    index = lmdecode.BeamIndirection(3, 10)
    before = index.table.clone()
    for arguments in (([3], 0, 1), ([0], 3, 1), ([], 0, 1), ([0], 0, 11), ([-1], 0, 1)):
        with pytest.raises(ValueError, match="begin: "):
            index.begin(*arguments)
    for count in (-1, 11):
        with pytest.raises(ValueError, match="advance: num_tokens"):
            index.advance(count)
    assert torch.equal(index.table, before) and not index.lengths.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_out_of_range_on_cuda_leaves_the_row() -> None:
    given = table().cuda()
    lengths = torch.tensor([2, 5, 2]).cuda()
    lmdecode.update_beam_indirection_(given, torch.tensor([7, 0, 0]).cuda(), lengths)
    expected = table()
    expected[2, :3] = torch.tensor([0, 1, 2])
    assert torch.equal(given.cpu(), expected)

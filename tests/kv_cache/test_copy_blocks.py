"""``copy_blocks_`` against one copy after the other: all memory behind the pools."""

import random
from collections.abc import Callable

import pytest
import torch

import lmdecode
from lmdecode.reference import copy_blocks_ as reference
from tests.kv_cache.cache_memory import filled, on_device, raw
from tests.support.op_contract import WrongCall, assert_op_refuses, wrong_calls

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
    reference(want, copies)
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
    (r"pools is of type Tensor", {0: pool()}),
    (r"pools\[1\] is of type NoneType", {0: [pool(), None]}),
    (r"copies is of type list", {1: [[0, 1, 3]]}),
    (r"copies has dtype int64", {1: ONE.long()}),
    (r"copies has shape \[1, 2\]", {1: ONE[:, :2]}),
    (r"copies has shape \[3\]", {1: ONE[0]}),
    (r"copies is not contiguous", {1: torch.zeros(3, 2, dtype=torch.int32).t()}),
    (r"pools\[0\]", {1: ONE.to("meta")}),
    (r"copies shares memory with pools\[0\]", {0: [INTEGERS], 1: INTEGERS.view(-1)[:3].view(1, 3)}),
    (r"pools\[0\] has shape", {0: [pool()[0]]}),
    (r"pools\[1\] has strides", {0: [pool(), pool().mT]}),
    (r"pools\[0\] has strides", {0: [torch.zeros(1, 2, 3, 5).expand(4, 2, 3, 5)]}),
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

"""``ring_cache_append_`` against tokens written one by one: all memory behind the tensors."""

import random
from collections.abc import Callable

import pytest
import torch

import lmdecode
from lmdecode.reference import ring_cache_append_ as reference
from tests.kv_cache.cache_memory import filled, on_device, raw
from tests.support.op_contract import WrongCall, assert_op_refuses, wrong_calls

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn,
]  # fmt: skip


def check(
    rings: list[torch.Tensor],
    states: list[torch.Tensor],
    position: int | torch.Tensor,
    num_sink_tokens: int,
    device: torch.device,
) -> None:
    want = [on_device(tensor, torch.device("cpu")) for tensor in rings]
    got = [on_device(tensor, device) for tensor in rings]
    chunk = [on_device(tensor, device) for tensor in states]
    where = position.to(device) if isinstance(position, torch.Tensor) else position
    reference(*want, *states, position, num_sink_tokens=num_sink_tokens)
    result = lmdecode.ring_cache_append_(*got, *chunk, where, num_sink_tokens=num_sink_tokens)
    assert result is None
    for one, other in zip(got, want, strict=True):
        assert torch.equal(raw(one).cpu(), raw(other)), (position, num_sink_tokens)


RINGS: dict[str, Callable[[torch.dtype, int], torch.Tensor]] = {
    "[B, H, S, D]": lambda dtype, size: filled((2, 3, 7, size), dtype),
    "[B, S, H, D]": lambda dtype, size: filled((2, 7, 3, size), dtype).transpose(1, 2),
    "[S, B, H, D]": lambda dtype, size: filled((7, 2, 3, size), dtype).permute(1, 2, 0, 3),
    "gaps": lambda dtype, size: filled((4, 4, 9, size + 3), dtype)[::2, 1:, 1:8, 1 : size + 1],
}
STATES: dict[str, Callable[[int, torch.dtype, int], torch.Tensor]] = {
    "[B, H, n, D]": lambda n, dtype, size: filled((2, 3, n, size), dtype, n),
    "[B, n, H, D]": lambda n, dtype, size: filled((2, n, 3, size), dtype, n).transpose(1, 2),
    "[B, H, D, n]": lambda n, dtype, size: filled((2, 3, size, n), dtype, n).mT,
    "one for all heads": lambda n, dtype, size: filled((2, 1, n, size), dtype, n).expand(
        2, 3, n, size
    ),
    "steps": lambda n, dtype, size: filled((2, 3, 2 * n, 2 * size), dtype, n)[:, :, ::2, ::2],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("states", STATES)
def test_layouts_and_dtypes(
    states: str, ring: str, dtype: torch.dtype, device: torch.device
) -> None:
    choice = random.Random(f"{states} {ring}")
    for size in (1, 5, 16):
        for tokens in (0, 1, 2, 7, 8, 30):
            rings = [RINGS[ring](dtype, size), RINGS[ring](dtype, 2 * size)]
            chunk = [STATES[states](tokens, dtype, size), STATES[states](tokens, dtype, 2 * size)]
            check(rings, chunk, choice.randrange(40), choice.choice((0, 1, 6)), device)


@pytest.mark.parametrize("num_sink_tokens", [0, 1, 3, 6])
@pytest.mark.parametrize("tokens", [1, 3, 4, 7, 8, 20])
def test_every_position(tokens: int, num_sink_tokens: int, device: torch.device) -> None:
    for position in (*range(25), 2**31 - 1, 2**40):
        rings = [filled((1, 2, 7, 3), torch.float32), filled((1, 2, 7, 3), torch.float32, 1)]
        chunk = [filled((1, 2, tokens, 3), torch.float32, seed) for seed in (2, 3)]
        check(rings, chunk, position, num_sink_tokens, device)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_position_for_each_row(dtype: torch.dtype, device: torch.device) -> None:
    for seed in range(20):
        choice = random.Random(seed)
        positions = torch.tensor([choice.randrange(30) for _ in range(5)], dtype=dtype)
        where = positions.repeat_interleave(2)[::2] if seed % 2 else positions
        tokens = choice.choice((1, 2, 5, 12))
        rings = [filled((5, 2, 9, 4), torch.bfloat16, i) for i in range(2)]
        chunk = [filled((5, 2, tokens, 4), torch.bfloat16, i) for i in (2, 3)]
        check(rings, chunk, where, choice.choice((0, 2)), device)


@pytest.mark.parametrize(
    "shape", [(0, 2, 5, 4), (2, 0, 5, 4), (2, 2, 5, 0)], ids=["no row", "no head", "no size"]
)
def test_empty(shape: tuple[int, ...], device: torch.device) -> None:
    chunk = [filled((*shape[:2], 3, shape[3]), torch.float32) for _ in range(2)]
    check([filled(shape, torch.float32), filled(shape, torch.float32)], chunk, 4, 1, device)


def test_keys_and_values_side_by_side_in_one_buffer(device: torch.device) -> None:
    buffer = filled((2, 2, 6, 8), torch.float32).to(device)
    want = buffer.clone()
    chunk = filled((2, 2, 9, 8), torch.float32, 1).to(device)
    for run, both in ((lmdecode.ring_cache_append_, buffer), (reference, want)):
        run(both[..., :4], both[..., 4:], chunk[..., :4], chunk[..., 4:], 3)
    assert torch.equal(buffer, want)


def ring(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape or (2, 3, 5, 4), dtype=dtype)


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape or (2, 3, 2, 4), dtype=dtype)


SHARED = ring()
WRONG = [
    (r"keys is of type NoneType", {0: None}),
    (r"v is of type list", {3: [1]}),
    (r"position is of type float", {4: 1.0}),
    (r"position is of type bool", {4: True}),
    (r"position is -1; expected 0 to 2\^40", {4: -1}),
    (r"position is \d+; expected 0 to 2\^40", {4: 2**40 + 1}),
    (r"position is \d+; expected 0 to 2\^40", {4: 2**64}),
    (r"position has shape \[3\]; expected \[2\]", {4: torch.zeros(3, dtype=torch.int64)}),
    (r"position has dtype float32", {4: torch.zeros(2)}),
    (r"position\[1\] is -3", {4: torch.tensor([0, -3])}),
    (r"keys has shape \[3, 5, 4\]", {0: ring(3, 5, 4)}),
    (r"values has shape \[2, 3, 6, 4\]; expected \[2, 3, 5, head_size\]", {1: ring(2, 3, 6, 4)}),
    (r"values has dtype float16", {1: ring(dtype=torch.float16)}),
    (r"k has shape \[2, 2, 2, 4\]; expected \[2, 3, 2, 4\]", {2: tokens(2, 2, 2, 4)}),
    (r"v has shape \[2, 3, 1, 4\]; expected \[2, 3, 2, 4\]", {3: tokens(2, 3, 1, 4)}),
    (r"v has shape", {3: tokens(2, 3, 2, 5)}),
    (r"k has shape \[1, 3, 2, 4\]", {2: tokens(1, 3, 2, 4)}),
    (r"k has another dtype than keys", {2: tokens(dtype=torch.bfloat16)}),
    (r"k is on meta", {2: tokens().to("meta")}),
    (r"keys has strides that make elements overlap", {0: ring(1, 3, 5, 4).expand(2, 3, 5, 4)}),
    (r"values has stride 5 in its last dimension", {1: ring(2, 3, 4, 5).mT}),
    (r"values shares memory with keys", {0: SHARED, 1: SHARED}),
    (r"k shares memory with keys", {0: SHARED, 2: SHARED[:1, :, 1:3].expand(2, 3, 2, 4)}),
    (r"v shares memory with keys", {0: SHARED, 3: SHARED[:, :, 3:]}),
    (r"num_sink_tokens is -1; expected 0 to 4", {"num_sink_tokens": -1}),
    (r"num_sink_tokens is 5; expected 0 to 4", {"num_sink_tokens": 5}),
]


@wrong_calls(WRONG)
def test_errors_name_the_argument_and_nothing_is_written(wrong: WrongCall) -> None:
    given = (ring(), ring(), tokens(), tokens(), 0)
    assert_op_refuses(lmdecode.ring_cache_append_, wrong, *given)

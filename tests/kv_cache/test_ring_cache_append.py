"""``ring_cache_append_`` against tokens written one by one: all memory behind the tensors."""

import random
from collections.abc import Callable

import pytest
import torch
from cache_memory import filled, on_device, raw

import lmdecode
from lmdecode.reference import ring_cache_append_ as reference

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn,
]  # fmt: skip
CPU = torch.device("cpu")


def check(
    rings: list[torch.Tensor],
    states: list[torch.Tensor],
    position: int | torch.Tensor,
    num_sink_tokens: int,
    device: torch.device,
) -> None:
    want = [on_device(tensor, CPU) for tensor in rings]
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


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [1, 2, 4])
def test_large_chunks_and_thread_count(count: int) -> None:
    torch.set_num_threads(count)
    rings = [filled((4, 8, 300, 64), torch.bfloat16, i) for i in range(2)]
    chunk = [filled((4, 8, 420, 64), torch.bfloat16, i) for i in (2, 3)]
    check(rings, chunk, 77, 4, CPU)


def ring(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape or (2, 3, 5, 4), dtype=dtype)


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape or (2, 3, 2, 4), dtype=dtype)


SHARED = ring()
WRONG: dict[str, tuple[str, type[Exception], list, dict]] = {
    "keys: None": (
        r"keys is of type NoneType", TypeError, [None, ring(), tokens(), tokens(), 0], {},
    ),
    "v: a list": (r"v is of type list", TypeError, [ring(), ring(), tokens(), [1], 0], {}),
    "position: float": (
        r"position is of type float", TypeError, [ring(), ring(), tokens(), tokens(), 1.0], {},
    ),
    "position: bool": (
        r"position is of type bool", TypeError, [ring(), ring(), tokens(), tokens(), True], {},
    ),
    "position: below 0": (
        r"position is -1; expected 0 to 2\^40", ValueError,
        [ring(), ring(), tokens(), tokens(), -1], {},
    ),
    "position: far": (
        r"position is \d+; expected 0 to 2\^40", ValueError,
        [ring(), ring(), tokens(), tokens(), 2**40 + 1], {},
    ),
    "position: no int64": (
        r"position is \d+; expected 0 to 2\^40", ValueError,
        [ring(), ring(), tokens(), tokens(), 2**64], {},
    ),
    "position: rows": (
        r"position has shape \[3\]; expected \[2\]", ValueError,
        [ring(), ring(), tokens(), tokens(), torch.zeros(3, dtype=torch.int64)], {},
    ),
    "position: dtype": (
        r"position has dtype float32", ValueError,
        [ring(), ring(), tokens(), tokens(), torch.zeros(2)], {},
    ),
    "position: one row below 0": (
        r"position\[1\] is -3", ValueError,
        [ring(), ring(), tokens(), tokens(), torch.tensor([0, -3])], {},
    ),
    "keys: three dimensions": (
        r"keys has shape \[3, 5, 4\]", ValueError,
        [ring(3, 5, 4), ring(), tokens(), tokens(), 0], {},
    ),
    "values: other slots": (
        r"values has shape \[2, 3, 6, 4\]; expected \[2, 3, 5, head_size\]", ValueError,
        [ring(), ring(2, 3, 6, 4), tokens(), tokens(), 0], {},
    ),
    "values: other dtype": (
        r"values has dtype float16", ValueError,
        [ring(), ring(dtype=torch.float16), tokens(), tokens(), 0], {},
    ),
    "k: other heads": (
        r"k has shape \[2, 2, 2, 4\]; expected \[2, 3, 2, 4\]", ValueError,
        [ring(), ring(), tokens(2, 2, 2, 4), tokens(), 0], {},
    ),
    "v: other tokens": (
        r"v has shape \[2, 3, 1, 4\]; expected \[2, 3, 2, 4\]", ValueError,
        [ring(), ring(), tokens(), tokens(2, 3, 1, 4), 0], {},
    ),
    "v: other size": (
        r"v has shape", ValueError, [ring(), ring(), tokens(), tokens(2, 3, 2, 5), 0], {},
    ),
    "k: one row for all": (
        r"k has shape \[1, 3, 2, 4\]", ValueError,
        [ring(), ring(), tokens(1, 3, 2, 4), tokens(), 0], {},
    ),
    "k: other dtype": (
        r"k has another dtype than keys", ValueError,
        [ring(), ring(), tokens(dtype=torch.bfloat16), tokens(), 0], {},
    ),
    "k: meta": (
        r"k is on meta", ValueError, [ring(), ring(), tokens().to("meta"), tokens(), 0], {},
    ),
    "keys: expanded": (
        r"keys has strides that make elements overlap", ValueError,
        [ring(1, 3, 5, 4).expand(2, 3, 5, 4), ring(), tokens(), tokens(), 0], {},
    ),
    "values: transposed": (
        r"values has stride 5 in its last dimension", ValueError,
        [ring(), ring(2, 3, 4, 5).mT, tokens(), tokens(), 0], {},
    ),
    "one ring": (
        r"values shares memory with keys", ValueError, [SHARED, SHARED, tokens(), tokens(), 0], {},
    ),
    "k: of the ring, for all rows": (
        r"k shares memory with keys", ValueError,
        [SHARED, ring(), SHARED[:1, :, 1:3].expand(2, 3, 2, 4), tokens(), 0], {},
    ),
    "v: part of the ring": (
        r"v shares memory with keys", ValueError,
        [SHARED, ring(), tokens(), SHARED[:, :, 3:], 0], {},
    ),
    "sinks: below 0": (
        r"num_sink_tokens is -1; expected 0 to 4", ValueError,
        [ring(), ring(), tokens(), tokens(), 0], {"num_sink_tokens": -1},
    ),
    "sinks: all slots": (
        r"num_sink_tokens is 5; expected 0 to 4", ValueError,
        [ring(), ring(), tokens(), tokens(), 0], {"num_sink_tokens": 5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_errors_name_the_argument_and_nothing_is_written(case: str) -> None:
    message, error, arguments, options = WRONG[case]
    tensors = [a for a in arguments if isinstance(a, torch.Tensor) and not a.is_meta]
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(error, match=message) as raised:
        lmdecode.ring_cache_append_(*arguments, **options)
    assert str(raised.value).startswith("ring_cache_append_: ")
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))

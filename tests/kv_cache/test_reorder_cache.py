"""``reorder_cache_`` against index_select: every map, any layout, and nothing else touched."""

import itertools
import random
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lmdecode
from lmdecode.reference import reorder_cache_ as reference
from tests.kv_cache.cache_memory import filled, on_device, raw
from tests.support.op_contract import WrongCall, assert_op_refuses, wrong_calls
from tests.support.processes import run_python

DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int8,
    torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64,
    torch.complex128,
]  # fmt: skip


def random_map(rows: int, seed: int) -> torch.Tensor:
    choice = random.Random(seed)
    kind = seed % 4
    if kind == 0:
        return torch.tensor(choice.sample(range(rows), rows))
    if kind == 1:  # most stay
        return torch.tensor([choice.choice((r, r, choice.randrange(rows))) for r in range(rows)])
    if kind == 2:  # as of a beam search: sorted
        return torch.tensor(sorted(choice.randrange(rows) for _ in range(rows)))
    return torch.tensor([choice.randrange(rows) for _ in range(rows)])


def check(
    tensors: list[torch.Tensor], parents: torch.Tensor, device: torch.device, **options: int | None
) -> None:
    """Compare all memory behind the tensors, so also what must not be touched."""
    tensors = [on_device(tensor, device) for tensor in tensors]
    parents = on_device(parents, device)
    copies = [on_device(tensor, device) for tensor in tensors]
    reference(copies, parents, **options)
    assert lmdecode.reorder_cache_(tensors, parents, **options) is None
    for number, (got, want) in enumerate(zip(tensors, copies, strict=True)):
        assert torch.equal(raw(got), raw(want)), f"tensors[{number}], {parents.tolist()}"


@pytest.mark.parametrize("rows", range(1, 7))
def test_every_map(rows: int) -> None:
    """All rows ** rows of them: each on two small caches of its own, compared together."""
    maps = torch.tensor(list(itertools.product(range(rows), repeat=rows)))
    columns = 3
    dense = torch.arange(len(maps) * rows * columns, dtype=torch.int32)
    dense = dense.view(len(maps), rows, columns)
    rows_last = dense.mT.clone(memory_format=torch.contiguous_format).mT
    index = maps[:, :, None].expand(-1, -1, columns)
    expected = dense.gather(1, index)
    reorder = torch.ops.lmdecode.reorder_cache_.default
    for one, other, parents in zip(dense.unbind(), rows_last.unbind(), maps.unbind(), strict=True):
        reorder([one, other], parents, 0, None, None)
    assert torch.equal(dense, expected)
    assert torch.equal(rows_last, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", range(1, 5))
def test_every_map_on_cuda(rows: int) -> None:
    for parents in itertools.product(range(rows), repeat=rows):
        check([filled((rows, 5), torch.int16)], torch.tensor(parents), torch.device("cuda"))


def test_larger_maps(device: torch.device) -> None:
    for seed in range(200):
        rows = random.Random(seed).choice((7, 8, 9, 16, 31, 32, 33, 100))
        tensors = [filled((rows, 2, 3, 4), torch.bfloat16, seed), filled((rows, 7), torch.int8)]
        check(tensors, random_map(rows, seed), device)


def test_long_chains_and_cycles(device: torch.device) -> None:
    rows = 1000
    row = torch.arange(rows)
    maps = {
        "one cycle": row.roll(1),
        "the other way": row.roll(-1),
        "pairs": row ^ 1,
        "a chain": (row - 1).clamp(min=0),
        "the other way round": (row + 1).clamp(max=rows - 1),
        "one for all": torch.full((rows,), 7),
        "reversed": row.flip(0),
    }
    for parents in maps.values():
        check([filled((rows, 9), torch.float32)], parents, device)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 12).flatmap(lambda n: st.lists(st.integers(0, n - 1), min_size=n, max_size=n))
)
def test_any_map(parents: list[int]) -> None:
    cache = torch.arange(len(parents) * 3).view(-1, 3)
    lmdecode.reorder_cache_([cache], torch.tensor(parents))
    assert (cache[:, 0] // 3).tolist() == parents


@given(st.integers(1, 9), st.integers(0, 10**6))
def test_two_steps_are_one(rows: int, seed: int) -> None:
    first, second = random_map(rows, seed), random_map(rows, seed + 1)
    twice, once = (filled((rows, 5), torch.float16, seed) for _ in range(2))
    lmdecode.reorder_cache_([twice], first)
    lmdecode.reorder_cache_([twice], second)
    lmdecode.reorder_cache_([once], first[second])
    assert torch.equal(raw(twice), raw(once))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_parents_of_either_type_and_any_stride(dtype: torch.dtype, device: torch.device) -> None:
    parents = torch.tensor([[4, 9], [0, 9], [0, 9], [3, 9], [1, 9]], dtype=dtype)
    tensor = filled((5, 6), torch.float32)
    check([tensor], parents[:, 0], device)
    check([tensor], parents[:, 0].contiguous(), device)
    check([tensor], torch.tensor([2], dtype=dtype).expand(5), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype, device: torch.device) -> None:
    for seed in range(8):
        check([filled((6, 2, 5, 3), dtype, seed)], random_map(6, seed), device)
        check([filled((7, 6, 5), dtype, seed)], random_map(6, seed), device, batch_dim=1)
        check([filled((7, 5, 6), dtype, seed)], random_map(6, seed), device, batch_dim=-1)


Layout = tuple[Callable[[], torch.Tensor], int, int | None]
ROWS = 5
LAYOUTS: dict[str, Layout] = {
    "[B, H, S, D]": (lambda: filled((ROWS, 3, 20, 8), torch.bfloat16), 0, 2),
    "[B, S, H, D]": (lambda: filled((ROWS, 20, 3, 8), torch.bfloat16), 0, 1),
    "[S, B, D]": (lambda: filled((20, ROWS, 24), torch.bfloat16), 1, 0),
    "[L, 2, B, H, S, D]": (lambda: filled((2, 2, ROWS, 3, 9, 4), torch.float16), 2, -2),
    "[D, S, B]": (lambda: filled((8, 20, ROWS), torch.float32), 2, 1),
    "[B]": (lambda: filled((ROWS,), torch.float64), 0, None),
    "[B, D]": (lambda: filled((ROWS, 7), torch.int8), 0, 1),
    "transposed": (lambda: filled((8, 20, ROWS), torch.float32).permute(2, 0, 1), 0, 2),
    "a slice of heads": (lambda: filled((ROWS, 6, 20, 8), torch.bfloat16)[:, 2:5], 0, 2),
    "a slice of positions": (lambda: filled((ROWS, 3, 40, 8), torch.bfloat16)[:, :, 7:27], 0, 2),
    "every other position": (lambda: filled((ROWS, 3, 40, 8), torch.bfloat16)[:, :, 1::2], 0, 2),
    "every other element": (lambda: filled((ROWS, 3, 20, 16), torch.bfloat16)[..., 1::2], 0, 2),
    "every other row": (lambda: filled((2 * ROWS, 3, 20, 8), torch.int8)[1::2], 0, 2),
    "gaps everywhere": (
        lambda: filled((2 * ROWS, 6, 30, 9), torch.int16)[::2, ::2, ::3, ::3], 0, 2,
    ),
    "odd bytes": (
        lambda: filled((1 + ROWS * 420,), torch.int8)[1:].view(ROWS, 3, 20, 7), 0, 2,
    ),
    "sizes of one": (lambda: filled((1, ROWS, 1, 20, 1), torch.float32), 1, 3),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_lengths(layout: str, device: torch.device) -> None:
    make, batch_dim, length_dim = LAYOUTS[layout]
    for seed in range(12):
        parents = random_map(ROWS, seed)
        check([make(), make().clone()], parents, device, batch_dim=batch_dim)
        if length_dim is None:
            continue
        for length in {0, 1, make().size(length_dim) // 2, make().size(length_dim)}:
            options = dict(batch_dim=batch_dim, length_dim=length_dim, length=length)
            check([make()], parents, device, **options)


def test_what_lies_behind_the_length_stays(device: torch.device) -> None:
    cache = torch.arange(3 * 2 * 4 * 2, device=device).view(3, 2, 4, 2)
    before = cache.clone()
    parents = torch.tensor([1, 2, 0], device=device)
    lmdecode.reorder_cache_([cache], parents, length_dim=2, length=3)
    assert torch.equal(cache[:, :, 3:], before[:, :, 3:])
    assert torch.equal(cache[:, :, :3], before[parents][:, :, :3])


def test_tensors_of_several_kinds_in_one_call(device: torch.device) -> None:
    tensors = [
        filled((4, 2, 6, 8), torch.bfloat16), filled((4, 2, 6, 5), torch.int8),
        filled((4, 1, 9), torch.float32), filled((4, 0, 6), torch.float32),
        filled((4, 2, 6), torch.complex64),
    ]  # fmt: skip
    for seed in range(8):
        check(tensors, random_map(4, seed), device)
    many = [filled((4, 2, 1 + i % 5), torch.float16, i) for i in range(200)]
    check(many, torch.tensor([3, 0, 0, 2]), device)


def test_views_of_one_buffer(device: torch.device) -> None:
    """Keys beside values, layers beside each other: nothing is shared."""
    for seed in range(8):
        buffer = filled((4, 3, 2, 6, 8), torch.bfloat16, seed).to(device)
        expected = buffer.index_select(0, random_map(4, seed).to(device))
        views = [buffer[:, layer, kind] for layer in range(3) for kind in range(2)]
        lmdecode.reorder_cache_(views, random_map(4, seed).to(device))
        assert torch.equal(raw(buffer), raw(expected))
        fused = filled((4, 6, 24), torch.float16, seed).to(device)
        expected = fused.index_select(0, random_map(4, seed).to(device))
        lmdecode.reorder_cache_([fused[..., :16], fused[..., 16:]], random_map(4, seed).to(device))
        assert torch.equal(raw(fused), raw(expected))


def test_empty(device: torch.device) -> None:
    none = torch.empty(0, dtype=torch.int64, device=device)
    lmdecode.reorder_cache_([], none)
    lmdecode.reorder_cache_([], torch.tensor([1, 0], device=device))
    lmdecode.reorder_cache_([torch.empty(0, 3, device=device)], none)
    two = torch.tensor([1, 0], device=device)
    lmdecode.reorder_cache_([torch.empty(2, 0, 5, device=device)], two)
    lmdecode.reorder_cache_([torch.empty(5, 2, 0, device=device)], two, batch_dim=1)
    check([filled((1, 5), torch.int8)], torch.tensor([0]), device)


# --- Large caches: parts, stores past the caches --------------------------------------------------


def large_cases() -> Iterator[tuple[list[torch.Tensor], dict[str, int]]]:
    yield [filled((6, 2, 700, 128), torch.bfloat16, i) for i in range(4)], {}
    yield [filled((6, 2, 700, 128), torch.bfloat16)], {"length_dim": 2, "length": 333}
    yield [filled((1500, 6, 301), torch.float32)], {"batch_dim": 1}
    flat = filled((6 * 1_500_007 + 3,), torch.int8)
    yield [flat[3:].view(6, -1)], {}  # nothing is aligned
    yield [filled((900_001, 6), torch.int16)], {"batch_dim": 1}
    yield [filled((5000, 6, 75), torch.int32)[..., 1:]], {"batch_dim": 1}


def test_large(device: torch.device) -> None:
    for number, (tensors, options) in enumerate(large_cases()):
        parents = torch.tensor([[1, 2, 0, 3, 3, 4], [5, 5, 2, 1, 3, 0]][number % 2])
        check(tensors, parents, device, **options)


CAPABILITY_SCRIPT = """
import torch
import test_reorder_cache as tests
cpu = torch.device("cpu")
tests.test_large(cpu)
for layout in tests.LAYOUTS:
    tests.test_layouts_and_lengths(layout, cpu)
"""


@pytest.mark.slow
def test_cpu_capability(run_at_capability: Callable[[str], list[str]]) -> None:
    assert run_at_capability(CAPABILITY_SCRIPT) == []


READ_ONLY_SCRIPT = """
import sys, warnings, mmap, numpy, torch, lmdecode
warnings.simplefilter("ignore")
memory = mmap.mmap(-1, 1 << 20, prot=mmap.PROT_READ)
cache = torch.from_numpy(numpy.frombuffer(memory, dtype=numpy.uint8)).view(8, -1)
lmdecode.reorder_cache_([cache], torch.arange(8))
print("not written", flush=True)
lmdecode.reorder_cache_([cache], torch.tensor([0, 1, 2, 3, 4, 5, 6, 6]))
print("written")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mmap as on Linux")
def test_rows_that_stay_are_not_touched() -> None:
    """On memory that may not be written, the identity works and any other map does not."""
    run = run_python("-c", READ_ONLY_SCRIPT)
    assert run.stdout.split("\n")[0] == "not written", run.stderr
    assert run.returncode < 0


def test_conjugate_views_are_refused_by_torch() -> None:
    """Before the op is reached: the bytes of a lazy conjugate are not its values."""
    cache = torch.randn(3, 4, dtype=torch.complex64)
    before = cache.clone()
    with pytest.raises(RuntimeError, match="conjugate"):
        lmdecode.reorder_cache_([cache.conj()], torch.tensor([2, 0, 0]))
    assert torch.equal(cache, before)


def cache(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape or (3, 2, 4)).numel())).view(shape or (3, 2, 4))


MAP = torch.tensor([1, 2, 0])
SHARED = cache()
WRONG = [
    (r"tensors\[1\] is of type NoneType", {"tensors": [cache(), None]}),
    (r"parents shares memory with tensors\[1\]",
     {"tensors": [cache(), (long := torch.zeros(3, 2, dtype=torch.int64))], "parents": long[:, 0]}),
    (r"batch_dim is 0", {"tensors": [torch.tensor(1.0)]}),
    (r"batch_dim is 3", {"batch_dim": 3}),
    (r"batch_dim is -4", {"batch_dim": -4}),
    (r"parents has shape \[3\]; expected \[4\]", {"batch_dim": 2}),
    (r"length_dim is 0", {"length_dim": 0, "length": 1}),
    (r"length_dim is -3", {"length_dim": -3, "length": 1}),
    (r"length_dim is 3", {"length_dim": 3, "length": 1}),
    (r"length is 5; expected 0 to 4", {"length_dim": 2, "length": 5}),
    (r"length is 4; .*tensors\[1\]",
     {"tensors": [cache(), cache(3, 2, 3)], "length_dim": 2, "length": 4}),
    (r"tensors\[0\] has strides", {"tensors": [cache(1, 4).expand(3, 4)]}),
    (r"tensors\[0\] has strides", {"tensors": [cache(3, 1).expand(3, 4)]}),
    (r"tensors\[1\] has strides", {"tensors": [cache(), cache(9).unfold(0, 5, 2)]}),
    (r"tensors\[2\] shares memory with tensors\[0\]", {"tensors": [SHARED, cache(), SHARED]}),
    (r"tensors\[1\] shares memory with tensors\[0\]",
     {"tensors": [SHARED[:, :, :3], SHARED[:, :, 2:]]}),
    (r"tensors\[0\] .* more than 6",
     {"tensors": [torch.zeros(3, *[3] * 7)[:, ::2, ::2, ::2, ::2, ::2, ::2, ::2]]}),
]  # fmt: skip


@wrong_calls(WRONG)
def test_errors_name_the_argument_and_nothing_is_written(wrong: WrongCall) -> None:
    assert_op_refuses(lmdecode.reorder_cache_, wrong, tensors=[cache()], parents=MAP)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_out_of_range_on_cuda_leaves_the_row() -> None:
    tensor = cache().cuda()
    before = tensor.clone()
    lmdecode.reorder_cache_([tensor], torch.tensor([1, 7, -1]).cuda())
    assert torch.equal(tensor, before[[1, 1, 2]])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_two_devices() -> None:
    for tensors, parents in (
        ([cache().cuda()], MAP),
        ([cache()], MAP.cuda()),
        ([cache(), cache().cuda()], MAP),
    ):
        with pytest.raises(ValueError, match=r"tensors\["):
            lmdecode.reorder_cache_(tensors, parents)


def test_meta_tensors_have_nothing_to_reorder() -> None:
    lmdecode.reorder_cache_([cache().to("meta")], MAP.to("meta"))

"""``PackedLinear`` against its reference, and what its results must not depend on."""

import copy
import itertools
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmdecode import PackedLinear
from lmdecode.reference import packed_linear as reference
from lmdecode.reference import quantize_rows, rotate_rows
from tests.linear.linear_cases import assert_same_bits, normal

FORMATS = ["float32", "bfloat16", "int8", "int4"]
EXACT = ("int8", "int4")  # they have the bits of the reference
ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh", "silu"]
INF, NAN = float("inf"), float("nan")


def assert_close(got: torch.Tensor, want: torch.Tensor, x: torch.Tensor, weight: torch.Tensor):
    """Rounding errors of sums: a few units in the last place of the sums of magnitudes."""
    size = x.abs().double() @ weight.abs().double().mT
    error = (got.double() - want.double()).abs()
    assert (error <= 2e-7 * (size * (1 + x.shape[1] / 100) ** 0.5 + want.abs()) + 1e-30).all()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_weight_that_has_been_packed(dtype: str, has_bias: bool) -> None:
    """It is kept as it is, and gives the bits of the layer that packed it."""
    layer = PackedLinear(normal(17, 70), normal(17) if has_bias else None, dtype=dtype)
    sizes = {"in_features": 70, "out_features": 17}
    again = PackedLinear.from_packed(layer.packed, layer.bias, **sizes, dtype=dtype)
    assert again.packed is layer.packed and repr(again) == repr(layer)
    assert_same_bits(again(normal(3, 70, seed=1)), layer(normal(3, 70, seed=1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(70,), (3, 70), (2, 3, 70), (0, 70), (2, 1, 3, 70)])
def test_packed_linear_rows(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The bits of a packed layer, rounded once to the dtype of x, whatever its rank."""
    layer = PackedLinear(normal(17, 70).to(dtype), normal(17).to(dtype))
    x = normal(*shape, seed=2).to(dtype)
    bias = None if layer.bias is None else layer.bias.to(dtype)
    got = torch.ops.lmdecode.packed_linear_rows(x, layer.packed, 17, 0, bias)
    assert got.dtype == dtype
    assert_same_bits(got.float(), layer(x.float()).to(dtype).float())


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("sizes", [(3, 5, 70, 20), (1, 300, 70, 131), (40, 1, 1, 1), (2, 3, 0, 4)])
def test_batched_matmul(number: int, sizes: tuple[int, int, int, int]) -> None:
    """Each item has the bits of a packed layer, whose weight can be had back."""
    batch, rows, inner, columns = sizes
    a, b = normal(batch, rows, inner), normal(batch, inner, columns, seed=1)
    b[:, :1, :1] = -0.0
    if number == 1:
        a, b = a.bfloat16().float(), b.bfloat16().float()
    got = torch.ops.lmdecode.batched_matmul(a, b, number)
    a64, b64 = a.double(), b.double()
    assert ((got - a64 @ b64).abs() <= 1e-6 * (a64.abs() @ b64.abs())).all()
    for item in range(batch):
        layer = PackedLinear(b[item].mT, dtype=("float32", "bfloat16")[number])
        assert_same_bits(got[item], layer(a[item]))
        unpacked = torch.ops.lmdecode.unpack_linear(layer.packed, columns, inner, number)
        assert_same_bits(unpacked, b[item].mT.contiguous())


def check(
    dtype: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    got = PackedLinear(weight, bias, dtype=dtype)(x)
    want = reference(x, weight, bias, dtype=dtype)
    if dtype in EXACT:
        assert_same_bits(got, want)
    else:
        assert_close(got, want, x, weight)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 13, 40, 300])
def test_rows(dtype: str, rows: int) -> None:
    """Every height of tile, several blocks of rows."""
    check(dtype, normal(rows, 70), normal(131, 70, seed=1))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("outputs", [1, 7, 8, 15, 16, 17, 63, 64, 65, 200])
@pytest.mark.parametrize("inputs", [1, 2, 3, 5, 31, 64, 511, 512, 513, 2049, 4100])
def test_sizes(dtype: str, outputs: int, inputs: int) -> None:
    """Parts of panels, of vectors and of chains."""
    check(dtype, normal(3, inputs), normal(outputs, inputs, seed=1), normal(outputs, seed=2))


@pytest.mark.parametrize("inputs", [512, 2048, 8192])
def test_long_sums_of_floats_round_little(inputs: int) -> None:
    """Chains of 64: one sum of 512 rounds 2.3 times as much, which models of states show."""
    x, weight = normal(20, inputs), normal(64, inputs, seed=1)
    exact = x.double() @ weight.double().T
    error = (PackedLinear(weight)(x).double() - exact).square().mean().sqrt() / exact.std()
    assert error < 2.5 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("outputs", [37, 64])
def test_epilogue(dtype: str, activation: str | None, outputs: int) -> None:
    x, weight, bias = normal(5, 40), normal(outputs, 40, seed=1), normal(outputs, seed=2)
    after = {"multiplier": normal(5, outputs, seed=3), "residual": normal(5, outputs, seed=4)}
    layer = PackedLinear(weight, bias, dtype=dtype)
    for chosen in ({}, *({name: value} for name, value in after.items()), after):
        got = layer(x, activation=activation, **chosen)
        want = reference(x, weight, bias, dtype=dtype, activation=activation, **chosen)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_activations_are_accurate(activation: str) -> None:
    """Through a weight of 1: what comes out is the activation of x itself."""
    x = torch.cat([torch.linspace(-30, 30, 200001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 80])])
    got = PackedLinear(torch.ones(1, 1))(x[:, None], activation=activation)[:, 0].double()
    want = reference(x[:, None], torch.ones(1, 1), activation=activation)[:, 0]
    wide = x.double()
    if activation == "gelu_tanh":
        inner = (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
        want = wide * torch.sigmoid(2 * inner)
    elif activation == "silu":
        want = wide * torch.sigmoid(wide)
    want = want.double()
    # The exponent of the tanh form is rounded: the smaller the result, the more it takes.
    rounding = 1 + inner.abs() if activation == "gelu_tanh" else 1.0
    small = want.abs() < 1e-30
    assert (got - want)[small].abs().max() < 1e-30
    error = (got - want).abs() / want.abs() / rounding
    assert error[~small].max() < 1e-6 if activation != "relu" else (got == want).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_inf_and_nan(activation: str | None) -> None:
    got = PackedLinear(torch.ones(1, 1))(torch.tensor([[INF], [NAN]]), activation=activation)
    assert got[0] == INF and got[1].isnan()


@pytest.mark.parametrize("dtype", FORMATS)
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 320), st.sampled_from([1, 33, 64, 512, 600, 1024, 1100]), st.integers(1, 150))
def test_a_row_is_the_same_in_every_batch(dtype: str, rows: int, inputs: int, outputs: int) -> None:
    x, layer = normal(rows, inputs), PackedLinear(normal(outputs, inputs, seed=1), dtype=dtype)
    together = layer(x, activation="gelu")
    for row in {0, rows // 2, rows - 1}:
        assert_same_bits(layer(x[row : row + 1], activation="gelu")[0], together[row])
    assert_same_bits(layer(x.flip(0), activation="gelu").flip(0), together)


@pytest.mark.parametrize("dtype", FORMATS)
def test_strides(dtype: str) -> None:
    x, weight = normal(6, 50), normal(70, 50, seed=1)
    layer = PackedLinear(weight, dtype=dtype)
    want = layer(x)
    kernel = weight.T.contiguous().T
    spread = torch.full((140, 150), NAN)
    spread[::2, ::3] = weight
    for other in (kernel, spread[::2, ::3]):
        assert not other.is_contiguous()
        assert_same_bits(PackedLinear(other, dtype=dtype)(x), want)
    wide = torch.full((6, 151), NAN)
    wide[:, 1::3] = x
    assert_same_bits(layer(x.T.contiguous().T), want)
    assert_same_bits(layer(wide[:, 1::3]), want)
    assert_same_bits(layer(x[:1].expand(6, 50)), want[:1].expand(6, 70))
    across = normal(70, 6, seed=2).T
    assert_same_bits(layer(x, residual=across), want + across)
    assert_same_bits(layer(x, multiplier=across), want * across)


@pytest.mark.parametrize("dtype", FORMATS)
def test_dimensions_and_out(dtype: str) -> None:
    x, layer = normal(2, 3, 40), PackedLinear(normal(20, 40, seed=1), normal(20), dtype=dtype)
    want = layer(x.view(6, 40))
    assert_same_bits(layer(x), want.view(2, 3, 20))
    assert_same_bits(layer(x[0, 0]), want[0])
    out = torch.full((2, 3, 20), NAN)
    assert layer(x, out=out) is out
    assert_same_bits(out, want.view(2, 3, 20))


@pytest.mark.parametrize("dtype", FORMATS)
def test_strides_of_more_dimensions(dtype: str) -> None:
    weight, x, other = normal(20, 40, seed=1), normal(2, 3, 4, 40), normal(2, 3, 4, 20, seed=2)
    layer = PackedLinear(weight, normal(20), dtype=dtype)
    want = layer(x, multiplier=other, residual=other)
    for order in itertools.permutations(range(4)):
        back = sorted(range(4), key=order.__getitem__)
        strided, beside = (t.permute(order).contiguous().permute(back) for t in (x, other))
        assert_same_bits(layer(strided, multiplier=beside, residual=beside), want)
        assert_same_bits(layer(strided), layer(x))
    # Rows that some stride is common to, and that none is.
    for part in (x[:, 1:2, ::2], x[:, ::2], x[..., :1, :], x[:1].expand(3, -1, -1, -1)):
        assert_same_bits(layer(part), layer(part.contiguous()))
    number, op = layer._format, torch.ops.lmdecode.packed_linear.out
    memory = torch.full((2, 3, 6, 25), NAN)
    out = memory[:, :, ::2, :20][:, 0]
    with pytest.raises(ValueError, match="packed_linear: out has rows that have no stride in com"):
        op(x[:, 0, :3], layer.packed, 20, number, layer.bias, 0, None, None, out=out)
    assert memory.isnan().all()
    op(x[0, 0, :3], layer.packed, 20, number, layer.bias, 0, None, None, out=out[0])
    assert_same_bits(out[0], layer(x[0, 0, :3]))
    assert int(memory.isnan().sum()) == memory.numel() - 60


@pytest.mark.parametrize("dtype", FORMATS)
def test_empty(dtype: str) -> None:
    layer = PackedLinear(normal(20, 40), dtype=dtype)
    assert layer(torch.empty(0, 40)).shape == (0, 20)
    for shape in ((2, 0), (0, 2), (2, 0, 3), (3, 2, 0)):
        assert layer(torch.empty(*shape, 40)).shape == (*shape, 20)
    assert layer(torch.empty(3, 0, 2, 40).permute(2, 1, 0, 3)).shape == (2, 0, 3, 20)
    bias = normal(20)
    without_inputs = PackedLinear(torch.empty(20, 0), bias, dtype=dtype)
    for rows in (3, 40):
        assert_same_bits(without_inputs(torch.empty(rows, 0)), bias.expand(rows, 20))
    assert PackedLinear(torch.empty(0, 40), dtype=dtype)(normal(3, 40)).shape == (3, 0)


def test_copies() -> None:
    """The layer keeps nothing of its arguments; copies of it are layers."""
    weight, bias, x = normal(30, 20), normal(30), normal(4, 20)
    layer = PackedLinear(weight, bias)
    want = layer(x)
    weight.zero_()
    bias.zero_()
    assert_same_bits(layer(x), want)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_bits(other(x), want)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_large_weight_lies_on_huge_pages(dtype: str) -> None:
    packed = PackedLinear(torch.zeros(4200, 1024), dtype=dtype).packed
    assert packed.data_ptr() % (2 << 20) == 0
    assert PackedLinear(torch.zeros(3, 5), dtype=dtype).packed.data_ptr() % 64 == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_weights_take_no_more_memory_than_they_have_bytes() -> None:
    """Pages of 2 MB hold no more of them than they fill: what remains lies on small ones."""
    program = textwrap.dedent("""
        import torch
        from lmdecode.linear import PackedLinear

        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096

        weight = torch.zeros(600, 1024)  # 2.3 MB
        PackedLinear(weight)
        before = resident()
        layers = [PackedLinear(weight) for _ in range(24)]
        print((resident() - before) / sum(layer.packed.nbytes for layer in layers))
    """)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert float(done.stdout) < 1.2


@pytest.mark.parametrize("dtype", FORMATS)
def test_many_rows_and_outputs(dtype: str) -> None:
    check(dtype, normal(3000, 24), normal(5000, 24, seed=1))


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.int8, "int8"),
        ("fp32", "float32"),
        ("float", "float32"),
        ("bf16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
    ],
    ids=str,
)
def test_spellings_of_a_format(dtype: str | torch.dtype, name: str) -> None:
    weight = torch.randn(5, 7)
    layer, expected = PackedLinear(weight, dtype=dtype), PackedLinear(weight, dtype=name)
    assert layer.dtype == name and layer.packed.equal(expected.packed)


def test_half_weights() -> None:
    x, weight = normal(3, 40), normal(20, 40, seed=1)
    for half in (weight.half(), weight.bfloat16()):
        assert_same_bits(PackedLinear(half)(x), PackedLinear(half.float())(x))
    assert_same_bits(
        PackedLinear(weight.bfloat16(), dtype="bfloat16")(x),
        PackedLinear(weight, dtype="bfloat16")(x),
    )


def test_bfloat16_rounds_to_nearest_even() -> None:
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, 3.3895e38])
    got = PackedLinear(torch.ones(1, 1), dtype="bfloat16")(ties[:, None])[:, 0]
    assert_same_bits(got, ties.bfloat16().float())
    got = PackedLinear(ties[:, None], dtype="bfloat16")(torch.ones(1, 1))[0]
    assert_same_bits(got, ties.bfloat16().float())


def test_int8_sums_are_exact() -> None:
    """The largest sums that there are, of either sign; neither saturates nor wraps."""
    size = 1 << 17
    x = torch.ones(2, size)
    x[1] = -1
    weight = torch.stack([torch.ones(size), -torch.ones(size), torch.ones(size).index_fill(
        0, torch.arange(1, size, 2), -1.0)])  # fmt: skip
    got = PackedLinear(weight, dtype="int8", rotate=False)(x)
    assert_same_bits(got, reference(x, weight, dtype="int8", rotate=False))
    assert got[0, 0] > 131071 and got[1, 0] == -got[0, 0] and (got[:, 2] == 0).all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_int_formats_quantise_as_the_reference(data: st.DataObject) -> None:
    values = st.floats(-(2.0**127), 2.0**127, width=32) | st.sampled_from(
        [0.0, 1e-38, 1e-31, -7e-31, 1.0]
    )
    size = data.draw(st.integers(1, 40))
    rows = st.lists(values, min_size=size, max_size=size)
    x, weight = torch.tensor([data.draw(rows)]), torch.tensor([data.draw(rows)])
    for dtype in EXACT:
        assert_same_bits(PackedLinear(weight, dtype=dtype)(x), reference(x, weight, dtype=dtype))
    got = PackedLinear(weight, dtype="int8", rotate=False)(x)
    assert_same_bits(got, reference(x, weight, dtype="int8", rotate=False))
    for group_size in (32, 64, 128):
        got = PackedLinear(weight, dtype="int4", group_size=group_size)(x)
        assert_same_bits(got, reference(x, weight, dtype="int4", group_size=group_size))


def test_int8_rounds_half_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, 126.5]])
    assert quantize_rows(x)[0].tolist() == [[127, 0, 2, -2, 126]]
    layer = PackedLinear(torch.eye(5) * 127, dtype="int8", rotate=False)
    assert layer(x).tolist() == [[127 * 127.0, 0, 254, -254, 126 * 127]]


ROTATED_SIZES = (1, 15, 16, 31, 48, 64, 100, 127, 240, 256, 300, 496, 576, 640, 1000)


@pytest.mark.parametrize("size", ROTATED_SIZES)
def test_a_rotation_leaves_products_as_they_are(size: int) -> None:
    x, weight = normal(7, size), normal(9, size, seed=1)
    exact = x.double() @ weight.double().mT
    rotated = rotate_rows(x).double() @ rotate_rows(weight).double().mT
    assert (rotated - exact).abs().max() < 1e-6 * size**0.5 * 16
    assert (rotate_rows(rotate_rows(x)) - x).abs().max() < 1e-5
    if size >= 16:
        assert not torch.equal(rotate_rows(x), x)
    got = PackedLinear(weight, dtype="int8")(x)
    assert_same_bits(got, reference(x, weight, dtype="int8"))
    # A stride within rows takes another way.
    across = x.T.contiguous().T
    assert_same_bits(PackedLinear(weight, dtype="int8")(across), got)


def test_a_rotation_keeps_small_features_beside_large_ones() -> None:
    """As trained models have them: a few features of each row are a hundred times the others."""
    x, weight = normal(20, 576), normal(50, 576, seed=1)
    x[:, ::97] *= 100
    exact = x.double() @ weight.double().mT
    errors = [
        (PackedLinear(weight, dtype="int8", rotate=rotate)(x) - exact).norm() / exact.norm()
        for rotate in (True, False)
    ]
    assert errors[0] < errors[1] / 2 and errors[0] < 0.015


def test_rows_that_are_too_large_to_rotate() -> None:
    """Beyond an eighth of float32's range sums may be inf: the row is NaN, others stay."""
    x, weight = torch.ones(3, 256), normal(5, 256) / 1000
    x[1] = 3e38
    got = PackedLinear(weight, dtype="int8")(x)
    assert got[1].isnan().all() and got[[0, 2]].isfinite().all()
    x[1] = 2e37
    assert PackedLinear(weight, dtype="int8")(x).isfinite().all()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_nan_and_inf(dtype: str, bad: float) -> None:
    """They stay in their row of x, or in their output."""
    x, weight = normal(9, 70).abs() + 0.1, normal(70, 70, seed=1).abs() + 0.1
    want = PackedLinear(weight, dtype=dtype)(x)
    x_bad, weight_bad = x.clone(), weight.clone()
    x_bad[4, 33] = bad
    weight_bad[7, 33] = bad
    became = NAN if dtype in EXACT else bad
    in_x = PackedLinear(weight, dtype=dtype)(x_bad)
    in_weight = PackedLinear(weight_bad, dtype=dtype)(x)
    torch.testing.assert_close(in_x[4], torch.full((70,), became), equal_nan=True)
    torch.testing.assert_close(in_weight[:, 7], torch.full((9,), became), equal_nan=True)
    others = [i for i in range(9) if i != 4]
    assert_same_bits(in_x[others], want[others])
    columns = [i for i in range(70) if i != 7]
    assert_same_bits(in_weight[:, columns], want[:, columns])


def test_rows_of_zeros() -> None:
    x = torch.zeros(2, 30)
    x[1] = 1e-38
    for dtype in FORMATS:
        assert not PackedLinear(normal(20, 30), dtype=dtype)(x)[0].any()
    for dtype in EXACT:
        assert not PackedLinear(normal(20, 30), dtype=dtype)(x).any()


CAPABILITY_SCRIPT = """
import test_packed_linear as tests

for dtype in tests.FORMATS:
    for rows in (1, 4, 6, 13, 300):
        tests.test_rows(dtype, rows)
    for outputs in (1, 17, 65):
        for inputs in (1, 3, 513, 2049):
            tests.test_sizes(dtype, outputs, inputs)
    for activation in tests.ACTIVATIONS:
        tests.test_epilogue(dtype, activation, 37)
    tests.test_strides(dtype)
    tests.test_empty(dtype)
    tests.test_nan_and_inf(dtype, float("nan"))
    tests.test_nan_and_inf(dtype, float("-inf"))
    tests.test_a_row_is_the_same_in_every_batch(dtype)
for activation in tests.ACTIVATIONS:
    tests.test_activations_of_inf_and_nan(activation)
    if activation is not None:
        tests.test_activations_are_accurate(activation)
tests.test_bfloat16_rounds_to_nearest_even()
tests.test_int8_sums_are_exact()
for size in tests.ROTATED_SIZES:
    tests.test_a_rotation_leaves_products_as_they_are(size)
tests.test_int_formats_quantise_as_the_reference()
tests.test_int8_rounds_half_to_even()
tests.test_rows_of_zeros()
"""


@pytest.mark.slow
def test_cpu_capability(run_at_capability: Callable[[str], list[str]]) -> None:
    assert run_at_capability(CAPABILITY_SCRIPT) == []

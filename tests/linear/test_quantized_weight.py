"""Weights in blocks: their values are llama.cpp's, and rows of them are rows of values."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.library import opcheck

from lmdecode import PackedLinear
from lmdecode.linear.quantized_weight import (
    KINDS,
    JoinedWeight,
    QuantizedWeight,
    join_columns,
    join_rows,
)
from lmdecode.reference import packed_linear as reference
from lmdecode.reference import packed_quantized_linear, quantize_groups, quantize_rows
from lmdecode.reference.gguf import dequantize_blocks
from tests.linear.linear_cases import assert_same_bits, normal
from tests.support.op_contract import WrongCall, assert_refused, wrong_calls

gguf = pytest.importorskip("gguf")


def _random(kind: str, rows: int, blocks: int = 2, seed: int = 0) -> QuantizedWeight:
    """Any bytes: scales are of every size, infinite and NaN too."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, blocks * KINDS[kind].block_bytes)
    data = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    return QuantizedWeight(data, kind)


def _bits(values: Any) -> Any:
    """Bits of floats, of NaN those of one."""
    values = np.where(np.isnan(values), np.float32(np.nan), values)
    return values.astype(np.float32).view(np.int32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinite scales
def test_values_are_those_of_llama_cpp(kind: str) -> None:
    weight = _random(kind, 3000)
    number = gguf.GGMLQuantizationType[kind]
    assert (*gguf.GGML_QUANT_SIZES[number], number.value) == KINDS[kind][:3]
    expected = gguf.quants.dequantize(weight.data.numpy(), number)
    assert np.array_equal(_bits(weight.dequantize().numpy()), _bits(expected))
    assert weight.shape == expected.shape


def test_types_end_with_zeros() -> None:
    op = torch.ops.lmdecode.gguf_type.default
    opcheck(op, (3,), test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    assert op(len(KINDS)) == op(-1) == op(1 << 62) == (0,) * 6


def test_the_reference_has_the_same_types() -> None:
    data = torch.zeros(1, 1, dtype=torch.uint8)
    for read in (QuantizedWeight, dequantize_blocks):
        with pytest.raises(ValueError, match=f"expected one of {', '.join(KINDS)}$"):
            read(data, "Q4_9")


def test_blocks_of_any_shape() -> None:
    data = _random("Q6_K", 12).data
    flat = dequantize_blocks(data, "Q6_K")
    assert torch.equal(
        dequantize_blocks(data.view(3, 4, -1), "Q6_K").nan_to_num(),
        flat.view(3, 4, -1).nan_to_num(),
    )
    assert dequantize_blocks(data[:0], "Q6_K").shape == (0, 512)


@pytest.mark.parametrize("kind", ["Q4_0", "Q3_K"])
def test_rows(kind: str) -> None:
    weight = _random(kind, 10)
    values, index = weight.dequantize().nan_to_num(), torch.tensor([9, 0, 4, 4])
    assert torch.equal(weight.index_rows(index).dequantize().nan_to_num(), values[index])
    assert torch.equal(weight.rows(3, 7).dequantize().nan_to_num(), values[3:7])
    assert weight.rows(3, 7).data.data_ptr() == weight.data[3:].data_ptr()


def test_joined_rows() -> None:
    floats = torch.randn(3, 512)
    q4, other = _random("Q4_K", 2), _random("Q6_K", 5)
    same = join_rows([q4, _random("Q4_K", 4, seed=1)])
    assert isinstance(same, QuantizedWeight) and same.shape == (6, 512)
    assert torch.equal(same.data[:2], q4.data)
    assert torch.equal(join_rows([floats, floats[:1]]), torch.cat([floats, floats[:1]]))
    assert join_rows([q4]) is q4
    mixed = join_rows([q4, join_rows([floats, other])])
    assert isinstance(mixed, JoinedWeight) and mixed.shape == (10, 512)
    assert len(mixed.parts) == 3
    expected = torch.cat([q4.dequantize(), floats, other.dequantize()]).nan_to_num()
    assert torch.equal(mixed.dequantize().nan_to_num(), expected)


def test_joined_columns() -> None:
    floats, q4, more = torch.randn(3, 40), _random("Q4_0", 3), _random("Q4_0", 3, 4, seed=1)
    same = join_columns([q4, more])
    assert isinstance(same, QuantizedWeight) and same.shape == (3, 192) and same.kind == "Q4_0"
    expected = torch.cat([q4.dequantize(), more.dequantize()], 1)
    assert torch.equal(same.dequantize().nan_to_num(), expected.nan_to_num())
    other = _random("Q8_0", 3)
    for part in (floats, other, join_rows([q4.rows(0, 1), other.rows(0, 2)])):
        joined = join_columns([part, q4])
        values = part if isinstance(part, torch.Tensor) else part.dequantize()
        expected = torch.cat([values, q4.dequantize()], 1)
        assert isinstance(joined, torch.Tensor)
        assert torch.equal(joined.nan_to_num(), expected.nan_to_num())
    assert torch.equal(join_columns([floats, floats]), torch.cat([floats, floats], 1))
    with pytest.raises(ValueError, match=r"shapes \[\[3, 40\], \[2, 40\]\]; expected one or more"):
        join_columns([floats, floats[:2]])


def test_rows_of_joined_weights() -> None:
    """Neighbours of one kind become one part, in the order of the rows."""
    q4, q5, floats = _random("Q4_0", 6), _random("Q5_0", 4), torch.randn(3, 64)
    joined = join_rows([q4, q5, q4, floats])
    assert isinstance(joined, JoinedWeight)
    index = torch.tensor([11, 2, 0, 9, 6, 7, 18, 16, 1, 5])
    rows = joined.index_rows(index)
    assert isinstance(rows, JoinedWeight)
    assert [part.shape[0] for part in rows.parts] == [3, 3, 2, 2]
    expected = joined.dequantize()[index].nan_to_num()
    assert torch.equal(rows.dequantize().nan_to_num(), expected)
    alike = joined.index_rows(torch.tensor([15, 3, 10]))
    assert isinstance(alike, QuantizedWeight) and alike.kind == "Q4_0"
    assert torch.equal(joined.index_rows(torch.tensor([17])), floats[1:2])


@wrong_calls(
    [
        ("data is torch.float32", lambda: QuantizedWeight(torch.zeros(2, 18), "Q4_0")),
        (r"\[18\] with", lambda: QuantizedWeight(torch.zeros(18, dtype=torch.uint8), "Q4_0")),
        ("strides", lambda: QuantizedWeight(torch.zeros(18, 4, dtype=torch.uint8).T, "Q4_0")),
        (
            "rows of 20 bytes; expected a multiple of 18, as kind is Q4_0",
            lambda: QuantizedWeight(torch.zeros(2, 20, dtype=torch.uint8), "Q4_0"),
        ),
        (
            "kind is 'Q4'; expected one of Q4_0, Q4_1",
            lambda: QuantizedWeight(torch.zeros(2, 18, dtype=torch.uint8), "Q4"),
        ),
        ("data is of type bytes", lambda: QuantizedWeight(b"", "Q4_0")),
        ("rows of 20 bytes", lambda: dequantize_blocks(torch.zeros(20, dtype=torch.uint8), "Q4_0")),
        ("expected uint8", lambda: dequantize_blocks(torch.zeros(18), "Q4_0")),
        ("kind is 'F32'", lambda: dequantize_blocks(torch.zeros(18, dtype=torch.uint8), "F32")),
        ("no weight", lambda: join_rows([])),
        (
            r"shapes \[\[2, 3\], \[2, 4\]\]; expected the same inputs",
            lambda: join_rows([torch.zeros(2, 3), torch.zeros(2, 4)]),
        ),
    ]
)
def test_what_is_refused(wrong: WrongCall) -> None:
    assert_refused(wrong)


def test_kinds_and_devices_are_checked() -> None:
    data = torch.zeros(2, 36, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"kind is \['Q4_0'\]; expected one of Q4_0"):
        QuantizedWeight(data, ["Q4_0"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="data is on meta; expected a tensor on cpu"):
        QuantizedWeight(data.to("meta"), "Q4_0")


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_layer_is_taken_again(kind: str) -> None:
    weight = _random(kind, 20)
    layer, x = PackedLinear.from_gguf(weight), torch.randn(3, weight.shape[1])
    again = PackedLinear.from_packed(
        layer.packed, in_features=layer.in_features, out_features=20, dtype=kind
    )
    assert (again.dtype, again.group_size) == (layer.dtype, layer.group_size)
    assert torch.equal(again(x).nan_to_num(), layer(x).nan_to_num())
    with pytest.raises(ValueError, match="format"):
        PackedLinear.from_packed(
            PackedLinear(torch.ones(20, layer.in_features)).packed,
            in_features=layer.in_features, out_features=20, dtype=kind,
        )  # fmt: skip


GROUPS = [None, 32, 64, 128]  # None is 32
NAN = float("nan")


def quantized(outputs: int, inputs: int, group: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scales = torch.randn(outputs, inputs // group, generator=generator).half() / 16
    zeros = torch.randint(17, scales.shape, generator=generator, dtype=torch.uint8)
    return q, scales, zeros


def weights_of(q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """What they stand for, in float64."""
    group = q.shape[1] // scales.shape[1]
    whole = q.double() - zeros.repeat_interleave(group, 1).double()
    return whole * scales.repeat_interleave(group, 1).double()


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 150])
def test_has_the_bits_of_the_reference(rows: int, group: int | None) -> None:
    for outputs, inputs in ((1, 1), (63, 31), (64, 32), (65, 129), (130, 300), (7, 4200)):
        x, weight, bias = normal(rows, inputs), normal(outputs, inputs, seed=1), normal(outputs)
        got = PackedLinear(weight, bias, dtype="int4", group_size=group)(x)
        assert_same_bits(got, reference(x, weight, bias, dtype="int4", group_size=group))


@pytest.mark.parametrize("group", GROUPS)
def test_the_error_is_that_of_the_quantised_model(group: int | None) -> None:
    """Against float64 of the rounded rows and weights: what is left is rounding of sums."""
    x, weight = normal(5, 700), normal(90, 700, seed=1)
    size = group or 32
    parts = torch.nn.functional.pad(x, (0, -700 % size)).view(-1, size)
    rows, scales = quantize_rows(parts)
    wide = (rows.double() * scales[:, None].double()).view(5, -1)[:, :700]
    q, steps, minimums = (part.double() for part in quantize_groups(weight, size))
    held = q * steps.repeat_interleave(size, 1)[:, :700]
    held += minimums.repeat_interleave(size, 1)[:, :700]
    exact = wide @ held.mT
    got = PackedLinear(weight, dtype="int4", group_size=group, rotate=False)(x)
    assert (got - exact).abs().max() < 2e-6 * exact.abs().max()
    # And the quantised model is near the model.
    model = x.double() @ weight.double().mT
    assert (got - model).norm() < 0.12 * model.norm()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_search_is_better_than_least_and_largest(group: int) -> None:
    """A tenth of the error less; and never worse, but for the rounding of the error."""
    weight = normal(200, 4 * group)
    q, scales, minimums = (part.double() for part in quantize_groups(weight, group))
    groups = weight.double().view(200, 4, group)
    held = q.view(200, 4, group) * scales[:, :, None] + minimums[:, :, None]
    least = groups.amin(2, keepdim=True)
    step = ((groups.amax(2, keepdim=True) - least) / 15).half().double()
    plain = ((groups - least.half()) / step).round().clamp(0, 15) * step + least.half()
    counts = groups.abs().mean(2, keepdim=True) + groups.abs()
    error, of_plain = (((other - groups).square() * counts).sum(2) for other in (held, plain))
    assert (error <= of_plain * 1.0001).all()
    assert error.sum() < 0.9 * of_plain.sum()


def test_groups_of_one_number() -> None:
    """Their minimum alone, and a scale of 0."""
    weight = torch.tensor([[2.5] * 32 + [0.0] * 32 + [-7.0] * 32])
    q, scales, minimums = quantize_groups(weight, 32)
    assert not q.any() and not scales.any() and minimums.tolist() == [[2.5, 0.0, -7.0]]
    x = torch.full((1, 96), 127.0)
    assert PackedLinear(weight, dtype="int4", rotate=False)(x).item() == 127 * 32 * (2.5 - 7.0)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, 96, 128, 256, 384])
def test_quantized_weights_are_taken_as_they_are(group: int, has_zeros: bool) -> None:
    q, scales, zeros = quantized(70, 768, group)
    zeros = zeros if has_zeros else torch.full_like(zeros, 8)
    layer = PackedLinear.from_quantized(q, scales, zeros if has_zeros else None, normal(70))
    assert layer.dtype == "int4" and (layer.in_features, layer.out_features) == (768, 70)
    # A row of one element, in each group: scale * (q - zero), rounded to float32 alone.
    x = torch.zeros(768, 768)
    x.fill_diagonal_(127.0)
    want = (127.0 * weights_of(q, scales, zeros)).float().mT + normal(70)
    assert_same_bits(layer(x), want)
    x = normal(6, 768)
    times = group // layer.group_size
    parts = (scales.repeat_interleave(times, 1), zeros.repeat_interleave(times, 1))
    assert_same_bits(layer(x), packed_quantized_linear(x, q, *parts) + normal(70))


def test_quantizing_and_packing_is_packing() -> None:
    """Groups of 32 are blocks of Q4_1."""
    weight = normal(70, 256)
    q, scales, minimums = quantize_groups(weight, 32)
    halves = torch.stack((scales, minimums), 2).view(torch.uint8).view(70, 8, 4)
    low, high = q.view(70, 8, 2, 16).unbind(2)
    blocks = torch.cat((halves, low | high << 4), 2).view(70, -1)
    layer = PackedLinear.from_gguf(QuantizedWeight(blocks, "Q4_1"))
    assert torch.equal(layer.packed, PackedLinear(weight, dtype="int4", rotate=False).packed)


def test_strides_of_quantized_weights() -> None:
    q, scales, zeros = quantized(20, 128, 64)
    want = PackedLinear.from_quantized(q, scales, zeros)
    across = [tensor.T.contiguous().T for tensor in (q, scales, zeros)]
    assert torch.equal(PackedLinear.from_quantized(*across).packed, want.packed)


def test_input_order() -> None:
    q, scales, zeros = quantized(20, 128, 32)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(3))
    layer = PackedLinear.from_quantized(q, scales, zeros, input_order=order)
    plain = PackedLinear.from_quantized(q, scales, zeros)
    x = normal(4, 128)
    assert_same_bits(layer(x), plain(x[:, order]))
    assert_same_bits(layer(x[0]), plain(x[:, order])[0])
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_bits(other(x), layer(x))


def test_the_layout_takes_what_it_says() -> None:
    """5 bits a weight, or 4.5 and 4.25; with zeros 4.5, 4.75, 4.375 and 4.1875."""
    weight = torch.zeros(640, 1280)
    for group, bits in ((None, 5.0), (32, 5.0), (64, 4.5), (128, 4.25)):
        layer = PackedLinear(weight, dtype="int4", group_size=group)
        assert layer.group_size == (group or 32)
        assert layer.packed.numel() == 64 + 640 * 1280 * bits / 8
    for group, has_zeros, bits in ((32, False, 4.5), (32, True, 4.75), (64, 1, 4.375),
                                   (128, 1, 4.1875)):  # fmt: skip
        q, scales, zeros = quantized(640, 1280, group)
        layer = PackedLinear.from_quantized(q, scales, zeros if has_zeros else None)
        assert layer.packed.numel() == 64 + 640 * 1280 * bits / 8
    assert repr(layer).endswith("dtype='int4', group_size=128)")
    assert repr(PackedLinear(weight)).endswith("dtype='float32')")


def test_largest_sums() -> None:
    """Neither 16 nor 32 bits overflow, whatever the signs."""
    for group in (32, 64, 128):
        for q_of, zero in ((15, 0), (0, 16), (15, 16)):
            q = torch.full((64, 256), q_of, dtype=torch.uint8)
            scales = torch.ones(64, 256 // group).half()
            zeros = torch.full(scales.shape, zero, dtype=torch.uint8)
            layer = PackedLinear.from_quantized(q, scales, zeros)
            for sign in (1.0, -1.0):
                x = torch.full((5, 256), 127.0 * sign)
                want = 127.0 * sign * 256 * (q_of - zero)
                assert_same_bits(layer(x), torch.full((5, 64), want))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf"), 3e38])
def test_what_is_not_finite(group: int | None, bad: float) -> None:
    """NaN in the row of x, or the output, that holds it. So is a scale beyond float16."""
    x, weight = normal(3, 200), normal(70, 200, seed=1)
    want = PackedLinear(weight, dtype="int4", group_size=group)(x)
    bad_x, bad_weight = x.clone(), weight.clone()
    bad_weight[7, 150] = bad
    got = PackedLinear(bad_weight, dtype="int4", group_size=group)(x)
    assert got[:, 7].isnan().all()
    others = [column for column in range(70) if column != 7]
    assert_same_bits(got[:, others], want[:, others])
    if abs(bad) < 1e38:
        return
    bad_x[1, 150] = bad
    got = PackedLinear(weight, dtype="int4", group_size=group)(bad_x)
    assert_same_bits(got[[0, 2]], want[[0, 2]])
    assert got[1].isnan().all() or bad == 3e38


def test_scales_of_nan_and_zero() -> None:
    q, scales, zeros = quantized(20, 64, 32)
    scales[3, 1], scales[4] = NAN, 0.0
    got = PackedLinear.from_quantized(q, scales, zeros)(normal(2, 64))
    assert got[:, 3].isnan().all() and (got[:, 4] == 0).all()
    assert got[:, 5:].isfinite().all()


def test_subnormal_scales() -> None:
    x, weight = normal(3, 64), normal(20, 64, seed=1) * 1e-6
    for group in GROUPS:
        for rotate in (True, False):
            options = {"dtype": "int4", "group_size": group, "rotate": rotate}
            got = PackedLinear(weight, **options)(x)
            assert_same_bits(got, reference(x, weight, **options))
            assert got.any()


SCRIPT = """
import test_quantized_weight as tests

for group in tests.GROUPS:
    for rows in (1, 2, 3, 4, 9):
        tests.test_has_the_bits_of_the_reference(rows, group)
    tests.test_what_is_not_finite(group, tests.NAN)
tests.test_quantizing_and_packing_is_packing()
tests.test_groups_of_one_number()
tests.test_largest_sums()
tests.test_subnormal_scales()
tests.test_scales_of_nan_and_zero()
"""


@pytest.mark.slow
def test_every_capability_has_the_bits_of_the_reference(
    run_at_capability: Callable[[str], list[str]],
) -> None:
    assert run_at_capability(SCRIPT) == []

"""Weights in blocks: their values are llama.cpp's, and rows of them are rows of values."""

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
from lmdecode.reference.gguf import dequantize_blocks
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

"""Wrong calls: each error names the argument, what came, what was expected; nothing is written."""

from typing import Any

import torch

import lmdecode
from lmdecode import PackedLinear
from lmdecode.linear import QuantizedWeight
from tests.support.op_contract import WrongCall, assert_refused, wrong_calls

OPS = torch.ops.lmdecode
W, X, B = torch.ones(20, 30), torch.ones(5, 30), torch.ones(20)
LAYER = PackedLinear(W, B)
PACKED = OPS.pack_linear(W, 0)
OUT = torch.full((5, 20), -7.0)
LONG = torch.ones(1, 1).expand(1, (1 << 17) + 1)


def op(x: torch.Tensor = X, packed: torch.Tensor = PACKED, size: int = 20, number: int = 0,
       bias: Any = None, activation: int = 0, multiplier: Any = None, residual: Any = None,
       out: torch.Tensor = OUT) -> None:  # fmt: skip
    OPS.packed_linear.out(x, packed, size, number, bias, activation, multiplier, residual, out=out)


BLOCKS = QuantizedWeight(torch.zeros(20, 36, dtype=torch.uint8), "Q4_0")
Q, S = torch.zeros(20, 64, dtype=torch.uint8), torch.ones(20, 2).half()


def quantized(weight: Any = Q, scales: Any = S, zeros: Any = None, bias: Any = None,
              input_order: Any = None) -> PackedLinear:  # fmt: skip
    return PackedLinear.from_quantized(weight, scales, zeros, bias, input_order=input_order)


def packed_before(packed: Any = PACKED, bias: Any = None, in_features: Any = 30,
                  out_features: Any = 20, dtype: Any = "float32") -> PackedLinear:  # fmt: skip
    return PackedLinear.from_packed(
        packed, bias, in_features=in_features, out_features=out_features, dtype=dtype
    )


OVERLAPPING = torch.ones(200)
A3, B3 = torch.ones(2, 5, 30), torch.ones(2, 30, 20)
WRONG = [
    (r"x has shape \[\]", lambda: OPS.packed_linear_rows(X[0, 0], PACKED, 20, 0, None)),
    ("x has dtype float64", lambda: OPS.packed_linear_rows(X.double(), PACKED, 20, 0, None)),
    (r"bias has shape \[19\]", lambda: OPS.packed_linear_rows(X, PACKED, 20, 0, B[:19])),
    (r"packed is a weight of shape \[20, 30\]; expected \[20, 29\]",
     lambda: OPS.packed_linear_rows(X[:, 1:], PACKED, 20, 0, None)),
    (r"a has shape \[5, 30\]", lambda: OPS.batched_matmul(X, B3, 0)),
    (r"b has shape \[2, 20, 30\]", lambda: OPS.batched_matmul(A3, B3.mT, 0)),
    (r"b has shape \[1, 30, 20\]", lambda: OPS.batched_matmul(A3, B3[:1], 0)),
    ("b has dtype float64", lambda: OPS.batched_matmul(A3, B3.double(), 0)),
    (r"format is 2; expected 0 \(float32\) or 1 \(bfloat16\)",
     lambda: OPS.batched_matmul(A3, B3, 2)),
    ("format is 99", lambda: OPS.batched_matmul(A3, B3, 99)),
    (r"packed has shape \[20, 30\]", lambda: OPS.unpack_linear(W, 20, 30, 0)),
    (r"packed is a weight of shape \[20, 30\]; expected \[21, 30\], from out_features and",
     lambda: OPS.unpack_linear(PACKED, 21, 30, 0)),
    ("packed has format float32; expected bfloat16",
     lambda: OPS.unpack_linear(PACKED, 20, 30, 1)),
    ("weight is of type list", lambda: PackedLinear([1.0])),
    ("weight has dtype int64", lambda: PackedLinear(W.long())),
    ("weight has dtype float64", lambda: PackedLinear(W.double())),
    (r"weight has shape \[20\]", lambda: PackedLinear(B)),
    ("weight is on meta", lambda: PackedLinear(W.to("meta"))),
    ("131073 input features; expected at most 131072 for int8",
     lambda: PackedLinear(LONG, dtype="int8")),
    ("bias is of type list", lambda: PackedLinear(W, [1.0])),
    (r"bias has shape \[3\]; expected \[20\]", lambda: PackedLinear(W, B[:3])),
    (r"bias has shape \[1, 20\]", lambda: PackedLinear(W, B[None])),
    ("bias has dtype int32", lambda: PackedLinear(W, B.int())),
    ("dtype is torch.float16; expected one of float32",
     lambda: PackedLinear(W, dtype=torch.float16)),
    ("dtype is 'half'; expected one of float32", lambda: PackedLinear(W, dtype="half")),
    ("dtype is of type NoneType", lambda: PackedLinear(W, dtype=None)),
    ("packed is of type list", lambda: packed_before([1.0])),
    ("other bytes than a packed", lambda: packed_before(torch.zeros(99, dtype=torch.uint8))),
    (r"expected \[99, 30\]", lambda: packed_before(out_features=99)),
    ("in_features is of type str", lambda: packed_before(in_features="30")),
    ("out_features is -1; expected at least 0", lambda: packed_before(out_features=-1)),
    ("format float32; expected int8", lambda: packed_before(dtype="int8")),
    (r"bias has shape \[30\]; expected \[20\]", lambda: packed_before(bias=W[0])),
    ("dtype is 'int3'; expected one of float32", lambda: PackedLinear(W, dtype="int3")),
    ("group_size is 48; expected 32, 64 or 128",
     lambda: PackedLinear(W, dtype="int4", group_size=48)),
    ("group_size is of type str", lambda: PackedLinear(W, dtype="int4", group_size="32")),
    ("rotate is True; expected None with float32", lambda: PackedLinear(W, rotate=True)),
    ("rotate is of type int", lambda: PackedLinear(W, dtype="int8", rotate=1)),
    ("format is 15 .Q4_K., of which a weight is packed", lambda: OPS.pack_linear(W, 15)),
    ("out has shape .3.*expected .2624.",
     lambda: OPS.pack_linear(W, 7, out=torch.empty(3, dtype=torch.uint8))),
    ("out has dtype float32; expected uint8", lambda: OPS.pack_linear(W, 7, out=torch.empty(2624))),
    ("out has shape .3.", lambda: OPS.pack_gguf_linear(Q[:, :36], 2, out=torch.empty(3).byte())),
    ("weight is of type Tensor", lambda: PackedLinear.from_gguf(Q)),
    ("bias has shape .3.; expected .20.", lambda: PackedLinear.from_gguf(BLOCKS, torch.ones(3))),
    ("type is 99; expected the number of a quantised type", lambda: OPS.pack_gguf_linear(Q, 99)),
    ("rows of 64 bytes; expected a multiple of 18", lambda: OPS.pack_gguf_linear(Q, 2)),
    ("group_size is 32; expected None with int8",
     lambda: PackedLinear(W, dtype="int8", group_size=32)),
    (r"weight has shape \[64\]", lambda: quantized(weight=Q[0])),
    ("weight holds 16; expected at most 15", lambda: quantized(weight=Q + 16)),
    ("weight is of type list", lambda: quantized(weight=[1])),
    ("64 input features and scales has 3 groups", lambda: quantized(scales=S[:, :1].expand(20, 3))),
    ("groups of a multiple of 32", lambda: quantized(scales=S[:, :1].expand(20, 4))),
    ("zeros holds 17; expected at most 16", lambda: quantized(zeros=Q[:, :2] + 17)),
    (r"bias has shape \[3\]; expected \[20\]", lambda: quantized(bias=B[:3])),
    (r"input_order is int32 \[64\]", lambda: quantized(input_order=torch.arange(64).int())),
    ("input_order is no permutation of 0 to 63",
     lambda: quantized(input_order=torch.zeros(64).long())),
    ("weight is on meta", lambda: quantized(weight=Q.to("meta"))),
    ("x is of type list", lambda: LAYER([1.0])),
    ("x requires a gradient", lambda: LAYER(X.clone().requires_grad_())),
    ("x requires a gradient", lambda: lmdecode.layer_norm(X.clone().requires_grad_())),
    (r"x has shape \[5, 29\]; expected \[..., 30\]", lambda: LAYER(X[:, :29])),
    (r"x has shape \[\]", lambda: LAYER(X[0, 0])),
    ("activation is 'tanh'; expected one of None, 'relu'", lambda: LAYER(X, activation="tanh")),
    ("activation is of type int", lambda: LAYER(X, activation=1)),
    (r"residual has shape \[4, 20\]; expected \[5, 20\]",
     lambda: LAYER(X, residual=torch.ones(4, 20))),
    (r"residual has shape \[5, 30\]; expected \[..., 20\]", lambda: LAYER(X, residual=X)),
    (r"out has strides \[1, 5\]; expected a contiguous", lambda: LAYER(X, out=torch.ones(20, 5).T)),
    ("out is a negated view", lambda: LAYER(X, out=torch._neg_view(torch.zeros(5, 20)))),
    ("out is of type list", lambda: LAYER(X, out=[1.0])),
    ("packed holds other bytes than a packed weight", lambda: op(packed=torch.zeros_like(PACKED))),
    ("packed has 3 bytes", lambda: op(packed=PACKED[:3])),
    ("packed has format float32; expected int8", lambda: op(number=2)),
    (r"packed is a weight of shape \[20, 30\]; expected \[21, 30\]",
     lambda: op(size=21, out=torch.ones(5, 21))),
    ("format is 24; expected 0 to 23", lambda: op(number=24)),
    (r"the weight has shape \[-1, 30\]", lambda: op(size=-1)),
    ("activation is 5; expected 0", lambda: op(activation=5)),
    (r"out has shape \[5, 19\]; expected \[5, 20\]", lambda: op(out=torch.ones(5, 19))),
    ("out has stride 5 within a row", lambda: op(out=torch.ones(20, 5).T)),
    ("out has rows that overlap", lambda: op(out=torch.ones(1, 20).expand(5, 20))),
    ("out shares memory with x",
     lambda: op(OVERLAPPING[:150].view(5, 30), out=OVERLAPPING[100:].view(5, 20))),
    ("out shares memory with residual", lambda: op(residual=OUT, out=OUT)),
    ("eps is -1; expected a finite number", lambda: lmdecode.layer_norm(X, eps=-1.0)),
    (r"x has shape \[\]", lambda: lmdecode.rms_norm(X[0, 0])),
]  # fmt: skip


@wrong_calls(WRONG)
def test_wrong_calls(wrong: WrongCall) -> None:
    assert_refused(wrong)
    assert (OUT == -7).all()

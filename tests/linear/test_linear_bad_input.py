"""Wrong calls: each error names the argument, what came, what was expected; nothing is written."""

from typing import Any

import pytest
import torch

import lmdecode
from lmdecode import PackedLinear
from lmdecode.linear import QuantizedWeight
from tests.support.wrong_calls import WrongCalls, assert_refused

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
WRONG: WrongCalls = {
    "weight: a list": ("weight is of type list", TypeError, lambda: PackedLinear([1.0])),
    "weight: int": ("weight has dtype int64", ValueError, lambda: PackedLinear(W.long())),
    "weight: float64": ("weight has dtype float64", ValueError, lambda: PackedLinear(W.double())),
    "weight: a vector": (r"weight has shape \[20\]", ValueError, lambda: PackedLinear(B)),
    "weight: meta": ("weight is on meta", ValueError, lambda: PackedLinear(W.to("meta"))),
    "weight: long rows": (
        "131073 input features; expected at most 131072 for int8",
        ValueError,
        lambda: PackedLinear(LONG, dtype="int8"),
    ),
    "bias: a list": ("bias is of type list", TypeError, lambda: PackedLinear(W, [1.0])),
    "bias: a shape": (r"bias has shape \[3\]; expected \[20\]", ValueError,
                      lambda: PackedLinear(W, B[:3])),
    "bias: a matrix": (r"bias has shape \[1, 20\]", ValueError, lambda: PackedLinear(W, B[None])),
    "bias: int": ("bias has dtype int32", ValueError, lambda: PackedLinear(W, B.int())),
    "dtype: a torch dtype": ("dtype is torch.float16; expected one of float32", ValueError,
                             lambda: PackedLinear(W, dtype=torch.float16)),
    "dtype: half": ("dtype is 'half'; expected one of float32", ValueError,
                    lambda: PackedLinear(W, dtype="half")),
    "dtype: None": ("dtype is of type NoneType", TypeError, lambda: PackedLinear(W, dtype=None)),
    "from_packed: a list": ("packed is of type list", TypeError, lambda: packed_before([1.0])),
    "from_packed: floats": ("packed has shape", ValueError, lambda: packed_before(W)),
    "from_packed: other bytes": ("other bytes than a packed", ValueError,
                                 lambda: packed_before(torch.zeros(99, dtype=torch.uint8))),
    "from_packed: in_features": (r"expected \[20, 31\]", ValueError,
                                 lambda: packed_before(in_features=31)),
    "from_packed: out_features": (r"expected \[99, 30\]", ValueError,
                                  lambda: packed_before(out_features=99)),
    "from_packed: a str": ("in_features is of type str", TypeError,
                           lambda: packed_before(in_features="30")),
    "from_packed: below 0": ("out_features is -1; expected at least 0", ValueError,
                             lambda: packed_before(out_features=-1)),
    "from_packed: dtype": ("format float32; expected int8", ValueError,
                           lambda: packed_before(dtype="int8")),
    "from_packed: bias": (r"bias has shape \[30\]; expected \[20\]", ValueError,
                          lambda: packed_before(bias=W[0])),
    "dtype: int3": ("dtype is 'int3'; expected one of float32", ValueError,
                    lambda: PackedLinear(W, dtype="int3")),
    "group_size: 48": ("group_size is 48; expected 32, 64 or 128", ValueError,
                       lambda: PackedLinear(W, dtype="int4", group_size=48)),
    "group_size: a str": ("group_size is of type str", TypeError,
                          lambda: PackedLinear(W, dtype="int4", group_size="32")),
    "rotate: float32": ("rotate is True; expected None with float32", ValueError,
                        lambda: PackedLinear(W, rotate=True)),
    "rotate: an int": ("rotate is of type int", TypeError,
                       lambda: PackedLinear(W, dtype="int8", rotate=1)),
    "pack: Q4_K": ("format is 15 .Q4_K., of which a weight is packed", ValueError,
                                      lambda: OPS.pack_linear(W, 15)),
    "pack, out: size": ("out has shape .3.*expected .2624.", ValueError,
                        lambda: OPS.pack_linear(W, 7, out=torch.empty(3, dtype=torch.uint8))),
    "pack, out: dtype": ("out has dtype float32; expected uint8", ValueError,
                         lambda: OPS.pack_linear(W, 7, out=torch.empty(2624))),
    "gguf, out": ("out has shape .3.", ValueError,
                  lambda: OPS.pack_gguf_linear(Q[:, :36], 2, out=torch.empty(3).byte())),
    "gguf: a tensor": ("weight is of type Tensor", TypeError, lambda: PackedLinear.from_gguf(Q)),
    "gguf: bias": ("bias has shape .3.; expected .20.", ValueError,
                   lambda: PackedLinear.from_gguf(BLOCKS, torch.ones(3))),
    "gguf, type": ("type is 99; expected the number of a quantised type", ValueError,
                   lambda: OPS.pack_gguf_linear(Q, 99)),
    "gguf, rows": ("rows of 64 bytes; expected a multiple of 18", ValueError,
                   lambda: OPS.pack_gguf_linear(Q, 2)),
    "gguf, dtype": ("blocks has dtype float32; expected uint8", ValueError,
                    lambda: OPS.dequantize_gguf(W, 2)),
    "gguf, strides": ("strides within a row", ValueError,
                      lambda: OPS.dequantize_gguf(Q[:, ::2], 2)),
    "group_size: int8": ("group_size is 32; expected None with int8", ValueError,
                         lambda: PackedLinear(W, dtype="int8", group_size=32)),
    "quantized, weight: int32": ("weight has dtype int32; expected uint8", ValueError,
                                 lambda: quantized(weight=Q.int())),
    "quantized, weight: a vector": (r"weight has shape \[64\]", ValueError,
                                    lambda: quantized(weight=Q[0])),
    "quantized, weight: 16": ("weight holds 16; expected at most 15", ValueError,
                              lambda: quantized(weight=Q + 16)),
    "quantized, weight: a list": ("weight is of type list", TypeError,
                                  lambda: quantized(weight=[1])),
    "quantized, scales: float32": ("scales has dtype float32; expected float16", ValueError,
                                   lambda: quantized(scales=S.float())),
    "quantized, scales: groups": ("64 input features and scales has 3 groups", ValueError,
                                  lambda: quantized(scales=S[:, :1].expand(20, 3))),
    "quantized, scales: groups of 16": ("groups of a multiple of 32", ValueError,
                                        lambda: quantized(scales=S[:, :1].expand(20, 4))),
    "quantized, scales: outputs": (r"scales has shape \[19, 2\]; expected \[20, 2\]", ValueError,
                                   lambda: quantized(scales=S[:19])),
    "quantized, zeros: 17": ("zeros holds 17; expected at most 16", ValueError,
                             lambda: quantized(zeros=Q[:, :2] + 17)),
    "quantized, zeros: a shape": (r"zeros has shape \[20, 1\]; expected \[20, 2\]", ValueError,
                                  lambda: quantized(zeros=Q[:, :1])),
    "quantized, zeros: float16": ("zeros has dtype float16; expected uint8", ValueError,
                                  lambda: quantized(zeros=S)),
    "quantized, bias": (r"bias has shape \[3\]; expected \[20\]", ValueError,
                        lambda: quantized(bias=B[:3])),
    "quantized, order: int32": (r"input_order is int32 \[64\]", ValueError,
                                lambda: quantized(input_order=torch.arange(64).int())),
    "quantized, order: twice": ("input_order is no permutation of 0 to 63", ValueError,
                                lambda: quantized(input_order=torch.zeros(64).long())),
    "quantized, meta": ("weight is on meta", ValueError, lambda: quantized(weight=Q.to("meta"))),
    "x: a list": ("x is of type list", TypeError, lambda: LAYER([1.0])),
    "x: gradient": ("x requires a gradient", ValueError,
                    lambda: LAYER(X.clone().requires_grad_())),
    "x: sparse": ("x has layout torch.sparse_coo", ValueError, lambda: LAYER(X.to_sparse())),
    "weight: sparse": ("weight has layout", ValueError, lambda: PackedLinear(W.to_sparse())),
    "layer_norm, x: gradient": ("x requires a gradient", ValueError,
                                lambda: lmdecode.layer_norm(X.clone().requires_grad_())),
    "layer_norm, eps: None": ("eps is of type NoneType", TypeError,
                              lambda: lmdecode.layer_norm(X, eps=None)),
    "x: a size": (r"x has shape \[5, 29\]; expected \[..., 30\]", ValueError,
                  lambda: LAYER(X[:, :29])),
    "x: a number": (r"x has shape \[\]", ValueError, lambda: LAYER(X[0, 0])),
    "x: bfloat16": ("x has dtype bfloat16; expected float32", ValueError,
                    lambda: LAYER(X.bfloat16())),
    "activation: tanh": ("activation is 'tanh'; expected one of None, 'relu'", ValueError,
                         lambda: LAYER(X, activation="tanh")),
    "activation: int": ("activation is of type int", TypeError, lambda: LAYER(X, activation=1)),
    "residual: a shape": (r"residual has shape \[4, 20\]; expected \[5, 20\]", ValueError,
                          lambda: LAYER(X, residual=torch.ones(4, 20))),
    "residual: a size": (r"residual has shape \[5, 30\]; expected \[..., 20\]", ValueError,
                         lambda: LAYER(X, residual=X)),
    "multiplier: dtype": ("multiplier has dtype float16", ValueError,
                          lambda: LAYER(X, multiplier=OUT.half())),
    "out: strides": (r"out has strides \[1, 5\]; expected a contiguous", ValueError,
                     lambda: LAYER(X, out=torch.ones(20, 5).T)),
    "out: negated": ("out is a negated view", ValueError,
                     lambda: LAYER(X, out=torch._neg_view(torch.zeros(5, 20)))),
    "out: a list": ("out is of type list", TypeError, lambda: LAYER(X, out=[1.0])),
    "op, x: three dimensions": (r"x has shape \[1, 5, 30\]; expected 2 dimensions", ValueError,
                                lambda: op(X[None])),
    "op, packed: float": ("packed has dtype float32; expected uint8", ValueError,
                          lambda: op(packed=W[0])),
    "op, packed: a matrix": ("packed has shape", ValueError, lambda: op(packed=PACKED[None])),
    "op, packed: other bytes": ("packed holds other bytes than a packed weight", ValueError,
                                lambda: op(packed=torch.zeros_like(PACKED))),
    "op, packed: short": ("packed has 3 bytes", ValueError, lambda: op(packed=PACKED[:3])),
    "op, packed: cut": ("packed was made at another CPU capability", ValueError,
                        lambda: op(packed=PACKED[:-64])),
    "op, packed: unaligned": ("not aligned to 64 bytes", ValueError, lambda: op(packed=PACKED[4:])),
    "op, packed: a format": ("packed has format float32; expected int8", ValueError,
                             lambda: op(number=2)),
    "op, packed: a shape": (
        r"packed is a weight of shape \[20, 30\]; expected \[21, 30\]", ValueError,
        lambda: op(size=21, out=torch.ones(5, 21))),
    "op, format": ("format is 24; expected 0 to 23", ValueError, lambda: op(number=24)),
    "op, out_features": (r"the weight has shape \[-1, 30\]", ValueError, lambda: op(size=-1)),
    "op, activation": ("activation is 5; expected 0", ValueError, lambda: op(activation=5)),
    "op, bias": (r"bias has shape \[19\]; expected \[20\]", ValueError, lambda: op(bias=B[:19])),
    "op, out: a shape": (r"out has shape \[5, 19\]; expected \[5, 20\]", ValueError,
                         lambda: op(out=torch.ones(5, 19))),
    "op, out: columns": ("out has stride 5 within a row", ValueError,
                         lambda: op(out=torch.ones(20, 5).T)),
    "op, out: rows": ("out has rows that overlap", ValueError,
                      lambda: op(out=torch.ones(1, 20).expand(5, 20))),
    "op, out: x": ("out shares memory with x", ValueError,
                   lambda: op(OVERLAPPING[:150].view(5, 30), out=OVERLAPPING[100:].view(5, 20))),
    "op, out: residual": ("out shares memory with residual", ValueError,
                          lambda: op(residual=OUT, out=OUT)),
    "layer_norm, x": ("layer_norm: x is of type list", TypeError, lambda: lmdecode.layer_norm([1])),
    "layer_norm, x: half": ("layer_norm: x has dtype float16", ValueError,
                            lambda: lmdecode.layer_norm(X.half())),
    "layer_norm, weight": (r"weight has shape \[20\]; expected \[30\]", ValueError,
                           lambda: lmdecode.layer_norm(X, B)),
    "layer_norm, bias": ("bias is of type int", TypeError, lambda: lmdecode.layer_norm(X, None, 1)),
    "layer_norm, eps": ("eps is -1; expected a finite number", ValueError,
                        lambda: lmdecode.layer_norm(X, eps=-1.0)),
    "rms_norm, eps": ("rms_norm: eps is nan", ValueError,
                      lambda: lmdecode.rms_norm(X, eps=float("nan"))),
    "rms_norm, x": (r"x has shape \[\]", ValueError, lambda: lmdecode.rms_norm(X[0, 0])),
    "rms_norm, meta": ("weight is on meta", (ValueError), lambda: lmdecode.rms_norm(
        X, X[0].to("meta"))),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name: str) -> None:
    assert_refused(*WRONG[name])
    assert (OUT == -7).all()

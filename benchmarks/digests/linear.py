"""Cases of linear layers: every format of weights, with any rows and what follows a product."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import lmdecode
from benchmarks.digests.kinds import DTYPES, Kinds, Parts, laid_out
from lmdecode.linear.quantized_weight import KINDS as BLOCKS
from lmdecode.linear.quantized_weight import QuantizedWeight
from tests.linear.test_packed_linear import ACTIVATIONS
from tests.linear.test_quantized_weight import quantized
from tests.linear.test_tiles import planted
from tests.support import gguf_files
from tests.support.random_tensors import randn

KINDS = Kinds("linear")
_OUTPUTS = (1, 7, 8, 15, 16, 17, 31, 37, 63, 64, 65, 96, 130, 200, 333)
_ROWS = (1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 33, 40)
# Of floats: what each is rounded to.
_FORMATS: dict[str, dict[str, Any]] = {
    **{name: {"dtype": name} for name in ("float32", "bfloat16")},
    **{
        f"int8, {name}": {"dtype": "int8", "rotate": name == "rotated"}
        for name in ("plain", "rotated")
    },
    **{
        f"int4, {name}, groups of {size}": {
            "dtype": "int4", "rotate": name == "rotated", "group_size": size,
        }
        for name in ("plain", "rotated")
        for size in (32, 64, 128)
    },
}  # fmt: skip


def _applied(choice: random.Random, number: int, layer: lmdecode.PackedLinear) -> Parts:
    """Yield the packed weight, and results for inputs of any rows, values and strides."""
    yield layer.packed
    for seed in range(10 * number, 10 * number + 10):
        rows = choice.choice(_ROWS)
        if choice.random() < 0.03:
            rows = choice.choice((144, 145, 300))  # several blocks of rows
        x = randn(rows, layer.in_features, seed=seed) * choice.choice((1.0, 1.0, 1e-3, 1e4))
        values = choice.random()
        if values < 0.1:
            x = planted(rows, layer.in_features, seed)
        elif values < 0.15:
            x = x.round()  # ties, and rows of zeros
        after = {
            name: laid_out(choice, randn(rows, layer.out_features, seed=seed + place), 0.2)
            for place, name in enumerate(("multiplier", "residual"), start=2)
            if choice.random() < 0.3
        }
        yield layer(laid_out(choice, x, 0.2), activation=choice.choice(ACTIVATIONS), **after)


def _bias(choice: random.Random, number: int, outputs: int) -> Tensor | None:
    return randn(outputs, seed=number + 5) if choice.random() < 0.5 else None


def _add_format(name: str, **options: Any) -> None:
    @KINDS.add(12 if options["dtype"] == "int4" else 40, f"packed_linear, {name}")
    def packed_linear(choice: random.Random, number: int) -> Parts:
        inputs = choice.choice((1, 2, 3, 5, 31, 32, 64, 70, 129, 256, 300))
        if choice.random() < 0.15:
            inputs = choice.choice((511, 512, 513, 1024, 1100, 2049, 2100, 4100))
        outputs = choice.choice(_OUTPUTS)
        weight = randn(outputs, inputs, seed=number + 7) * choice.choice((1.0, 1.0, 1e-6))
        if choice.random() < 0.05:
            weight = planted(outputs, inputs, number)
        weight = laid_out(choice, weight.to(choice.choice(DTYPES)), 0.2)
        bias = _bias(choice, number, outputs)
        yield from _applied(choice, number, lmdecode.PackedLinear(weight, bias, **options))


for _name, _options in _FORMATS.items():
    _add_format(_name, **_options)


@KINDS.add(40)
def from_quantized(choice: random.Random, number: int) -> Parts:
    """Weights of four bits in groups of every size, with zeros and without."""
    group, outputs = choice.choice((32, 64, 96, 128, 256)), choice.choice(_OUTPUTS)
    inputs = group * choice.choice((1, 2, 3, 5, 9))
    q, scales, zeros = quantized(outputs, inputs, group, number)
    layer = lmdecode.PackedLinear.from_quantized(
        q, scales, zeros if choice.random() < 0.6 else None, _bias(choice, number, outputs),
        input_order=torch.randperm(inputs) if choice.random() < 0.2 else None,
    )  # fmt: skip
    yield from _applied(choice, number, layer)


def _add_blocks(kind: str) -> None:
    size = BLOCKS[kind].block_size

    @KINDS.add(12, f"from_gguf, {kind}")
    def from_gguf(choice: random.Random, number: int) -> Parts:
        outputs = choice.choice(_OUTPUTS)
        inputs = size * choice.choice((1, 2, 3, 9) if size > 32 else (1, 2, 3, 5, 8, 17, 70))
        data = gguf_files.quantized(randn(outputs, inputs, seed=number).numpy(), kind, number)
        weight = QuantizedWeight(torch.from_numpy(data), kind)
        yield weight.dequantize()
        layer = lmdecode.PackedLinear.from_gguf(weight, _bias(choice, number, outputs))
        yield from _applied(choice, number, layer)


for _kind in BLOCKS:
    _add_blocks(_kind)


@KINDS.add(30)
def norms(choice: random.Random, number: int) -> Parts:
    rows, size = choice.randint(1, 40), choice.choice((1, 2, 7, 16, 31, 64, 100, 333, 1000))
    x = randn(rows, size, seed=number) * choice.choice((1.0, 1e-20, 1e15))
    if choice.random() < 0.1:
        x = planted(rows, size, number)
    x = laid_out(choice, x, 0.3)
    weight, bias = (randn(size, seed=number + i) if choice.random() < 0.6 else None for i in (1, 2))
    eps = choice.choice((1e-5, 1e-6, 0.02, 0.0))
    yield lmdecode.layer_norm(x, weight, bias, eps=eps)
    yield lmdecode.rms_norm(x, weight, eps=eps)

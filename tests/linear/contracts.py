"""The linear ops, and calls of them (tests/support/contracts.py)."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

import lmdecode
from lmdecode.linear.quantized_weight import KINDS
from tests.support.contracts import Call, Contract
from tests.support.random_tensors import randint, randn

OPS = torch.ops.lmdecode
ROUNDED = (0, 1, 2, 7, 8, 9, 10, 21, 22, 23)  # numbers of formats that floats are rounded to
X, WEIGHT, BIAS, RESIDUAL = randn(5, 30), randn(20, 30, seed=1), randn(20, seed=2), randn(5, 20)
AFTER = {"a product": (None, 0, None, None), "and what follows": (BIAS, 2, RESIDUAL, RESIDUAL)}


def pack(number: int) -> Call:
    return Call(OPS.pack_linear, WEIGHT, number)


def product(number: int, after: tuple[object, ...]) -> Call:
    return Call(OPS.packed_linear, X, pack(number)(), 20, number, *after)


def large_packs() -> Iterator[Call]:
    weight = randn(1500, 700, seed=1)
    yield from (Call(OPS.pack_linear, weight, number) for number in ROUNDED)


def large_products() -> Iterator[Call]:
    for pack in large_packs():
        packed, number = pack(), pack.arguments[1]
        for rows in (1, 7, 400):
            yield Call(
                OPS.packed_linear, randn(rows, 700), packed, 1500, number, *AFTER["a product"]
            )


def quantized(group: int, zeros: int | None) -> Call:
    scales = randn(20, 2).abs().half()
    offsets = None if zeros is None else torch.full((20, 2), zeros, dtype=torch.uint8)
    q = randint(16, 20, 2 * group).to(torch.uint8)
    return Call(OPS.pack_quantized_linear, q, scales, offsets)


def blocks(kind: str, op: Callable[..., object]) -> Call:
    """Of bytes that are small numbers as float16, too."""
    data = randint(60, 5, 3 * KINDS[kind].block_bytes).to(torch.uint8)
    return Call(op, data, KINDS[kind].number)


def repack(make: Callable[[], Call]) -> Call:
    return Call(OPS.repack_linear, make()())


def unpack(number: int) -> Call:
    return Call(OPS.unpack_linear, pack(number)(), *WEIGHT.shape, number)


def rows_of(number: int, dtype: torch.dtype) -> Call:
    x, bias = X.reshape(1, *X.shape).to(dtype), BIAS.to(dtype)
    return Call(OPS.packed_linear_rows, x, pack(number)(), 20, number, bias)


def batched(number: int, batch: int = 3, rows: int = 5, inner: int = 30, columns: int = 20) -> Call:
    a, b = randn(batch, rows, inner), randn(batch, inner, columns, seed=1)
    return Call(OPS.batched_matmul, a, b, number)


def large_batches() -> Iterator[Call]:
    for number in (0, 1):
        yield batched(number, 7, 20, 300, 150)
        yield batched(number, 1, 400, 300, 700)
        yield batched(number, 400, 3, 70, 20)


def of_formats(make: Callable[..., Call]) -> dict[str, Callable[[], Call]]:
    return {
        f"{number}, {name}": partial(make, number, after)
        for number in ROUNDED
        for name, after in AFTER.items()
    }


def of_kinds(make: Callable[..., Call], *arguments: object) -> dict[str, Callable[[], Call]]:
    return {kind: partial(make, kind, *arguments) for kind in KINDS}


PACKS: dict[str, Callable[[], Call]] = {str(number): partial(pack, number) for number in ROUNDED}
GGUF = of_kinds(blocks, OPS.pack_gguf_linear)
ROWS = randn(2000, 333)
CONTRACTS = [
    Contract("pack_linear", PACKS, compiles=False, strided=(0,), many=large_packs),
    Contract(
        "repack_linear",
        {
            **{name: partial(repack, make) for name, make in PACKS.items()},
            **{name: partial(repack, make) for name, make in GGUF.items()},
        },
        compiles=False,
    ),
    Contract(
        "pack_quantized_linear",
        {
            f"groups of {group}{', zeros' * bool(zeros)}": partial(quantized, group, zeros)
            for group in (32, 64, 128)
            for zeros in (None, 3)
        },
        compiles=False, strided=(0, 1, 2),
    ),
    Contract("pack_gguf_linear", GGUF, compiles=False),
    Contract("dequantize_gguf", of_kinds(blocks, OPS.dequantize_gguf), compiles=False),
    Contract(
        "packed_linear", of_formats(product), compiles=False, has_fakes=False, strided=(0,),
        many=large_products, rows=(0, 6, 7),
    ),
    Contract(
        "packed_linear_rows",
        {
            f"{number}, {dtype}": partial(rows_of, number, dtype)
            for number in (0, 1) for dtype in (torch.float32, torch.bfloat16, torch.float16)
        },
        compiles=False, has_fakes=False, strided=(0, 4),
    ),
    Contract("unpack_linear", {str(number): partial(unpack, number) for number in ROUNDED},
             compiles=False),
    Contract(
        "batched_matmul", {str(number): partial(batched, number) for number in (0, 1)},
        strided=(0, 1), many=large_batches, rows=(0, 1),
    ),
    Contract(
        "layer_norm",
        {
            "plain": lambda: Call(lmdecode.layer_norm, X),
            "weight, bias": lambda: Call(lmdecode.layer_norm, X, X[0].clone(), X[1].clone()),
        },
        strided=(0,),
        many=lambda: [Call(lmdecode.layer_norm, ROWS, randn(333), randn(333, seed=2))],
        rows=(0,),
    ),
    Contract(
        "rms_norm",
        {"weight": lambda: Call(lmdecode.rms_norm, X, X[0].clone())},
        strided=(0,),
        many=lambda: [Call(lmdecode.rms_norm, ROWS)],
        rows=(0,),
    ),
]  # fmt: skip

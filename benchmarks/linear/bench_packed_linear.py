"""``PackedLinear`` against torch's and oneDNN's matmuls, and what the machine can do at most."""

from __future__ import annotations

import warnings
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

import lmdecode
from benchmarks.attention.peak import multiply_add
from benchmarks.goals import Goal, GoalOutcome, evaluate
from benchmarks.harness import LIMIT, OURS, Case, Contestant, Result
from benchmarks.limits import slowest, streaming_read

GROUP = "packed_linear"
SOURCES = ("linear/packed_linear",)
LINEAR, ONEDNN, FBGEMM = "F.linear", "oneDNN, packed", "FBGEMM, packed"
ONE_THREAD = "one thread"
FORMATS = {"f32": "float32", "bf16": "bfloat16", "int8": "int8"}
_FEW_ROWS = 6  # up to so many the weight's bytes are the limit, without matrix units


@lru_cache(maxsize=1)
def _weight(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))


def _fbgemm(x: Tensor, weight: Tensor) -> Contestant | None:
    """The dynamically quantised linear layer of torch, its weight with a scale for each output."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return None
    torch.backends.quantized.engine = "fbgemm"
    scales, zeros = weight.abs().amax(1) / 127, torch.zeros(len(weight), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still torch's fastest
        quantised = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(quantised, None)
    # Without VNNI its sums of two products saturate at 16 bits, unless x has 7 bits.
    reduce_range = lmdecode.cpu_capability() in ("default", "avx2")
    return Contestant(FBGEMM, partial(torch.ops.quantized.linear_dynamic, x, packed, reduce_range))


def has_onednn(dtype: str) -> bool:
    """Return whether oneDNN has a packed product of a dtype on this processor."""
    supported = dtype != "bf16" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.backends.mkldnn.is_available() and supported


def _peers(x: Tensor, weight: Tensor, dtype: str) -> list[Contestant]:
    if dtype == "int8":
        fbgemm = _fbgemm(x, weight)
        return [] if fbgemm is None else [fbgemm]
    if dtype == "bf16":  # of rows that are bfloat16 already, and results that are
        x, weight = x.bfloat16(), weight.bfloat16()
    contestants = [Contestant(LINEAR, partial(F.linear, x, weight))]
    if has_onednn(dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, len(x))
        arguments = (x, packed, None, "none", [], "")
        onednn = partial(torch.ops.mkldnn._linear_pointwise, *arguments)
        contestants.append(Contestant(ONEDNN, onednn))
    return contestants


def _contestants(
    with_peers: bool, *, rows: int, inputs: int, outputs: int, dtype: str, threads: int | None
) -> list[Contestant]:
    weight = _weight(outputs, inputs)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1))
    layer = lmdecode.PackedLinear(weight, dtype=FORMATS[dtype])
    contestants = [Contestant(OURS, partial(layer, x))]
    if not with_peers:
        return contestants
    read = streaming_read(layer.packed.view(torch.float32))
    products = multiply_add(2.0 * rows * inputs * outputs, dtype)  # one thread's
    limit = read if threads is not None else slowest([read, products])
    if limit is not None and (threads is None or rows <= _FEW_ROWS):
        contestants.append(Contestant(LIMIT, limit))
    if threads is not None:  # ours, too: no peer
        contestants.append(Contestant(ONE_THREAD, partial(layer, x), complete=False, threads=1))
    return [*contestants, *_peers(x, weight, dtype)]


def _cases_of(
    name: str,
    shapes: list[tuple[int, int, int]],
    *,
    caches: str = "warm",
    threads: int | None = None,
    dtypes: tuple[str, ...] = tuple(FORMATS),
) -> list[Case]:
    return [
        Case(
            GROUP,
            name,
            {"rows": rows, "in": inputs, "out": outputs, "dtype": dtype},
            partial(
                _contestants,
                rows=rows,
                inputs=inputs,
                outputs=outputs,
                dtype=dtype,
                threads=threads,
            ),
            caches=caches,
            threads=threads,
            has_tiles=True,
        )
        for dtype in dtypes
        for rows, inputs, outputs in shapes
    ]


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` a small layer."""
    if quick:
        return _cases_of("vocabulary", [(2, 64, 300), (40, 64, 300)])
    return [
        *_cases_of("vocabulary", [(rows, 512, 32000) for rows in (1, 4, 8, 32, 128)]),
        *_cases_of("layer, from memory", [(4, 512, 2048), (4, 2048, 512)], caches="cold"),
        *_cases_of("many rows", [(rows, 512, 2048) for rows in (32, 128, 512, 1024)]),
        *_cases_of("small", [(4, 128, 512), (4, 512, 512), (32, 128, 512)]),
        *_cases_of(
            "two threads", [(4, 512, 32000), (128, 512, 32000), (512, 512, 2048)], threads=2
        ),
    ]


def _is(*dtypes: str):
    return lambda result: result.case.shape["dtype"] in dtypes


def _rows(lowest: int, highest: int):
    return lambda result: lowest <= int(str(result.case.shape["rows"])) <= highest


GOALS = [
    Goal("vocabulary", "warm", "one read of the weight", "at most", 1.3,
         lambda result: result.times_limit, (_rows(1, _FEW_ROWS), _is("f32", "bf16"))),
    Goal("many rows", "warm", "the FMA peak", "at most", 1 / 0.75,
         lambda result: result.times_limit, (_is("f32"),)),
    Goal("many rows", "warm", "the bfloat16 peak", "at most", 1 / 0.65,
         lambda result: result.times_limit, (_is("bf16"),), with_tiles=False),
    Goal("many rows", "warm", "the int8 peak", "at most", 1 / 0.6,
         lambda result: result.times_limit, (_is("int8"),), with_tiles=False),
    Goal("many rows", "warm", "the bfloat16 peak of tiles", "at most", 1 / 0.55,
         lambda result: result.times_limit, (_rows(512, 512), _is("bf16")), with_tiles=True),
    Goal("many rows", "warm", "the int8 peak of tiles", "at most", 1 / 0.45,
         lambda result: result.times_limit, (_rows(512, 512), _is("int8")), with_tiles=True),
    Goal("many rows", "warm", ONEDNN, "at least", 1.1, lambda result: result.ratio(ONEDNN),
         (_rows(128, 1024), _is("bf16")), with_tiles=True),
    Goal("two threads", "warm", ONE_THREAD, "at least", 1.85,
         lambda result: result.ratio(ONE_THREAD), (_rows(512, 512),)),
    Goal("vocabulary", "warm", LINEAR, "at least", 1.0, lambda result: result.ratio(LINEAR),
         (_rows(1, 32),)),
    Goal("vocabulary", "warm", ONEDNN, "at least", 1.0, lambda result: result.ratio(ONEDNN),
         (_rows(1, 32),)),
    Goal("vocabulary", "warm", FBGEMM, "at least", 1.0, lambda result: result.ratio(FBGEMM),
         (_rows(1, 32),)),
]  # fmt: skip


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goals on the worst of the cases that each speaks of."""
    return evaluate(GOALS, results)

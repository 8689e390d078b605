"""Whole decoder-only models of random weights: prefill, steps and calls, against other engines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.attention.peak import INSTRUCTIONS, multiply_add
from benchmarks.decoder.whole_model import models
from benchmarks.decoder.whole_model.engine import seconds
from benchmarks.decoder.whole_model.engines import (
    CTRANSLATE2,
    DYNAMIC,
    ENGINES,
    LARGEST_DIFFERENCE,
    LEAST_CORRELATION,
    LLAMA,
    LLAMA_HEAD,
    OPENVINO,
    PACKED,
    PEER_FORMATS,
    TORCHAO,
    TRANSFORMERS,
)
from benchmarks.goals import Goal, GoalOutcome, evaluate
from benchmarks.harness import LIMIT, OURS, Case, Contestant, Effort, Result
from benchmarks.limits import streaming_read
from benchmarks.report import markdown_table
from lmdecode.linear.formats import FORMATS
from lmdecode.models.huge_memory import new_memory

GROUP = "whole_model"
SOURCES = ("decoder/causal", "decoder/decoder_layer", "linear/packed", "linear/norms", "attention/")
PREFILL, STEP, ATTENTION = "prefill", "a step", "attention of a step"
ONE_ROW = "one row"
SHARED, OWN = "4 beams of a prompt", "prompts of their own"
GREEDY, BEAMS = "generate, greedy", "generate, 4 beams"
LOOKUP, PLAIN = "generate, prompt lookup", "without lookup"
DTYPES = tuple(dtype for dtype in models.BITS if dtype in FORMATS)
_PROBED = 256 << 20  # bytes, far more than caches hold
_SHARE_OF_PEAK = 16
_LOOKUP_TOKENS, _PHRASES = 10, 8


@dataclass(frozen=True)
class _Work:
    """How much the cases of a run do: tokens of the prompt, steps a turn, new tokens of a call."""

    prompt: int
    steps: int
    new_tokens: int


_WHOLE_CALL = Effort(seconds=0.0, rounds=1, min_calls=1)  # calls of up to a minute
FULL, QUICK = _Work(512, 8, 128), _Work(24, 2, 6)


def _limit_of_step(model: str, dtype: str, rows: int, keys: int, clock: str) -> Callable[[], float]:
    """Return a read of a buffer, at whose speed a step would read what it must."""
    size = models.bytes_of_step(model, dtype, rows, keys)
    probed = min(_PROBED, size)
    buffer = new_memory(probed)  # in large pages, as the weights are
    buffer.fill_(1)
    read = streaming_read(buffer)
    return lambda: seconds(read, clock) * size / probed


def _limit_of_prefill(
    model: str, dtype: str, tokens: int, threads: int, clock: str
) -> Callable[[], float] | None:
    """Return products in registers, at whose speed a prompt's would be done."""
    products = models.products_of_prompt(model, tokens)
    share = multiply_add(2.0 * products / _SHARE_OF_PEAK, INSTRUCTIONS[dtype])
    if share is None:
        return None
    return lambda: seconds(share, clock) * _SHARE_OF_PEAK / threads


def _contestants(
    with_peers: bool,
    *,
    name: str,
    model: str,
    dtype: str,
    rows: int,
    work: _Work,
    peers: tuple[str, ...],
) -> list[Contestant]:
    threads = torch.get_num_threads()
    clock = "process" if threads == 1 else "wall"
    tokens = models.prompt(model, work.prompt)
    wanted = peers if with_peers else ()
    calls = ENGINES.open(model, dtype, work.prompt, threads, wanted)
    limit = None
    if name == PREFILL:
        arguments: tuple[object, ...] = ("time_prefill", tokens, clock)
        limit = _limit_of_prefill(model, dtype, len(tokens), threads, clock)
    elif name == SHARED:
        arguments = ("time_beams", tokens, rows, work.steps, clock)
        own = partial(calls[OURS], "time_step", tokens, rows, work.steps, clock)
        calls = {OURS: calls[OURS], OWN: lambda *_: own()}
    elif name == LOOKUP:
        tokens = tokens[: len(tokens) // _PHRASES] * _PHRASES  # the answer repeats it, and itself
        arguments = ("time_lookup", tokens, work.new_tokens, _LOOKUP_TOKENS, clock)
        plain = partial(calls[OURS], "time_generate", tokens, work.new_tokens, 1, clock)
        calls = {OURS: calls[OURS], PLAIN: lambda *_: plain()}
    elif name in (GREEDY, BEAMS):
        beams = 4 if name == BEAMS else 1
        arguments = ("time_generate", tokens, work.new_tokens, beams, clock)
        calls = {n: call for n, call in calls.items() if n in (OURS, TRANSFORMERS)}
    else:
        arguments = ("time_step", tokens, rows, work.steps, clock)
        limit = _limit_of_step(model, dtype, rows, len(tokens), clock)
        if with_peers and rows > 1:
            one_row = partial(calls[OURS], "time_step", tokens, 1, work.steps, clock)
            calls = {**calls, ONE_ROW: lambda *_: one_row()}
    contestants = [
        # These are ours, too: no peers that ours is to beat.
        Contestant(n, partial(call, *arguments), complete=n not in (PACKED, OWN, PLAIN, ONE_ROW))
        for n, call in calls.items()
    ]
    if with_peers and limit is not None:
        contestants.append(Contestant(LIMIT, limit))
    return contestants


def _case(
    name: str, model: str, dtype: str, rows: int, work: _Work, peers: tuple[str, ...]
) -> Case:
    return Case(
        GROUP,
        name,
        {"model": model, "dtype": dtype, "prompt": work.prompt, "rows": rows},
        partial(
            _contestants, name=name, model=model, dtype=dtype, rows=rows, work=work, peers=peers
        ),
        clock="returned",
        effort=_WHOLE_CALL if name in (GREEDY, BEAMS, LOOKUP) else None,
    )


def _installed(dtype: str) -> tuple[str, ...]:
    """Return the peers of a format, without what this lmdecode does not have."""
    try:
        import lmdecode.integrations.transformers as integration
    except ImportError:  # without transformers cases can be listed
        return tuple(PEER_FORMATS[dtype])
    has_packing = hasattr(integration, "pack_linears_")
    return tuple(name for name in PEER_FORMATS[dtype] if name != PACKED or has_packing)


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` those of a tiny model in two formats."""
    if quick:
        # Most of the time goes to the start of processes that import torch.
        peers = {"float32": (TRANSFORMERS, LLAMA, OPENVINO), "int8": (LLAMA, OPENVINO, CTRANSLATE2)}
        calls = {"float32": ((GREEDY, 1), (BEAMS, 1)), "int8": ((LOOKUP, 1),)}
        return [
            _case(name, "tiny", dtype, rows, QUICK, peers[dtype])
            for dtype in peers
            for name, rows in ((PREFILL, 1), (STEP, 1), (STEP, 4), *calls[dtype])
        ]
    whole = [
        _case(name, model, dtype, rows, FULL, _installed(dtype))
        for model in ("A", "B")
        for dtype in DTYPES
        for name, rows in ((PREFILL, 1), (STEP, 1), (STEP, 4), (STEP, 8), (GREEDY, 1), (BEAMS, 1))
    ]
    long, behind = _Work(8192, 1, 0), _Work(4096, 8, 0)
    formats = ("float32", "bfloat16")
    parts = [_case(PREFILL, "A, window", dtype, 1, long, (TRANSFORMERS,)) for dtype in formats]
    parts += [
        _case(ATTENTION, model, dtype, 1, behind, (TRANSFORMERS, LLAMA))
        for model in ("heads of A", "heads of B")
        for dtype in formats
    ]
    parts += [_case(SHARED, "heads of A", dtype, 4, behind, ()) for dtype in formats]
    parts += [_case(STEP, "A", dtype, rows, FULL, ()) for dtype in DTYPES for rows in (16, 32)]
    parts += [_case(LOOKUP, "A", dtype, 1, FULL, ()) for dtype in ("float32", "int8")]
    return whole + parts


def _of(**wanted: object) -> Callable[[Result], bool]:
    def condition(result: Result) -> bool:
        shape = result.case.shape
        if wanted.get("model") is None and shape["model"] not in ("A", "B"):
            return False
        return all(shape[name] == value for name, value in wanted.items())

    return condition


def _against(column: str, text: str, bounds: tuple[float, ...], **wanted: object) -> list[Goal]:
    """Return goals against a peer: steps of 1, 4 and 8 rows, and prefill, as far as given."""
    places = ((STEP, 1), (STEP, 4), (STEP, 8), (PREFILL, 1))
    return [
        Goal(name, "warm", text, "at least", bound, lambda result: result.ratio(column),
             [_of(rows=rows, **wanted)])
        for (name, rows), bound in zip(places, bounds, strict=False)
    ]  # fmt: skip


def _limit_goal(
    name: str, text: str, bound: float, with_tiles: bool | None = None, **wanted: object
) -> Goal:
    return Goal(name, "warm", text, "at most", bound, lambda r: r.times_limit, [_of(**wanted)],
                with_tiles=with_tiles)  # fmt: skip


def _rows_goal(dtype: str, rows: int, bound: float) -> Goal:
    text = f"one row, ours {rows} in {dtype}"
    return Goal(STEP, "warm", text, "at most", bound, _against_one_row,
                [_of(model="A", dtype=dtype, rows=rows)], with_tiles=True)  # fmt: skip


def _against_one_row(result: Result) -> float | None:
    ratio = result.ratio(ONE_ROW)
    return None if ratio is None else 1 / ratio


def _prefill_goal(peer: str, dtype: str, bound: float, model: str = "A") -> Goal:
    text = f"{peer} {PEER_FORMATS[dtype][peer]}, ours {dtype}, model {model}"
    return Goal(PREFILL, "warm", text, "at least", bound, lambda r: r.ratio(peer),
                [_of(model=model, dtype=dtype)], with_tiles=True)  # fmt: skip


def _packed_against_transformers(result: Result) -> float | None:
    peer, packed = result.ratio(TRANSFORMERS), result.ratio(PACKED)
    return None if peer is None or packed is None else peer / packed


GOALS = [
    *(_limit_goal(STEP, f"one read, {dtype}", bound, dtype=dtype, rows=1)
      for dtype, bound in (("float32", 1.1), ("bfloat16", 1.1), ("int8", 1.2), ("int4", 1.35))),
    *(_limit_goal(PREFILL, f"peak of products, {dtype}", round(1 / share, 2), tiles, dtype=dtype)
      for dtype, share, tiles in (
          ("float32", 0.75, None), ("bfloat16", 0.65, False), ("int8", 0.5, False))),
    *_against(OPENVINO, "OpenVINO int8", (1.35, 1.4, 1.4, 1.6), dtype="int8"),
    *_against(LLAMA, "llama.cpp F32", (1.0, 1.6, 1.7, 1.5), dtype="float32"),
    *_against(LLAMA, "llama.cpp BF16", (1.0, 1.6, 1.7, 1.5), dtype="bfloat16"),
    *_against(LLAMA, "llama.cpp Q8_0", (1.3, 5.0, 4.0, 4.0), dtype="int8"),
    *_against(LLAMA, "llama.cpp Q4_0", (1.3, 1.8, 1.8, 2.0), dtype="int4"),
    *_against(LLAMA_HEAD, "llama.cpp Q4_0, head too", (1.3, 1.8, 1.8, 2.0), dtype="int4"),
    *_against(TRANSFORMERS, "transformers bf16", (3.0,), dtype="bfloat16"),
    *_against(TRANSFORMERS, "transformers bf16", (5.0,), dtype="int8"),
    *_against(DYNAMIC, "quantize_dynamic int8", (1.7,), dtype="int8"),
    Goal(STEP, "warm", "transformers bf16, pack_linears_ int8", "at least", 4.0,
         _packed_against_transformers,
         [_of(dtype="int8", rows=1)]),
    *(_limit_goal(ATTENTION, "one read of keys and values", 1.43, model=model)
      for model in ("heads of A", "heads of B")),
    Goal(SHARED, "warm", "4 rows with prompts of their own", "at least", 1.0,
         lambda r: r.ratio(OWN), [_of(model="heads of A")]),
    Goal(LOOKUP, "warm", "the same call without prompt lookup", "at least", 1.6,
         lambda r: r.ratio(PLAIN), [_of()]),
    Goal(PREFILL, "warm", "transformers, window of 1024", "at least", 3.0,
         lambda r: r.ratio(TRANSFORMERS), [_of(model="A, window")]),
    _prefill_goal(TRANSFORMERS, "bfloat16", 3.0),
    _prefill_goal(TRANSFORMERS, "int8", 3.0),
    _prefill_goal(OPENVINO, "int8", 3.5),
    _prefill_goal(OPENVINO, "int4", 2.0),
    _prefill_goal(TRANSFORMERS, "bfloat16", 4.0, "A, window"),
    *(_rows_goal(dtype, rows, bound)
      for dtype in ("bfloat16", "int8")
      for rows, bound in ((8, 1.15), (16, 1.3), (32, 1.6))),
]  # fmt: skip


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goals on the worst of the cases that each speaks of."""
    return evaluate(GOALS, results)


def summary(results: list[Result]) -> list[str]:
    """Return a table by engine: tokens a second of prefill, milliseconds of a step."""
    rows = sorted({int(str(r.case.shape["rows"])) for r in results if r.case.name == STEP})
    columns = [(PREFILL, 1), *((STEP, n) for n in rows)]
    found: dict[tuple[str, str, str], dict[tuple[str, int], str]] = {}
    for result in results:
        shape = result.case.shape
        place = (result.case.name, int(str(shape["rows"])))
        if place not in columns or shape["model"] not in ("A", "B", "tiny"):
            continue
        dtype = str(shape["dtype"])
        for name in result.timings:
            if name == ONE_ROW:
                continue
            label = name if name in (OURS, LIMIT) else f"{name} {PEER_FORMATS[dtype][name]}"
            if name in (TORCHAO, DYNAMIC, PACKED):
                label = PEER_FORMATS[dtype][name]
            us = result.microseconds(name) or math.nan
            figure = int(str(shape["prompt"])) / us * 1e6 if place[0] == PREFILL else us / 1e3
            cells = found.setdefault((str(shape["model"]), dtype, label), {})
            cells[place] = f"{figure:.0f}" if figure >= 100 else f"{figure:.3g}"
    if not found:
        return []
    head = ["model", "ours in", "engine", "prefill tok/s", *(f"ms, {n} rows" for n in rows)]
    lines = [[*key, *(cells.get(place, "-") for place in columns)] for key, cells in found.items()]
    return ["By engine:", markdown_table(head, lines, 3)]


def notes() -> list[str]:
    """Say what the table leaves open."""
    correlations = ", ".join(f"{bound} in {dtype}" for dtype, bound in LEAST_CORRELATION.items())
    found = [
        "whole_model: each engine computes in a process of its own, ours in the run's, and times "
        "itself: CPU time of its process with one thread, elapsed time with more. They take turns. "
        "A step is the middle one of a few, up to the logits; CTranslate2's has the choice of the "
        "token in it. The limit of a step is one read of the packed weights, and of the keys and "
        "values, at the speed of a read in the same turns; that of prefill is the peak of the "
        'products, behind the last layer\'s attention those of the last token alone. "One row" is '
        "a step of ours of one row. In the lines of int8 and int4, transformers is bfloat16. "
        "On processors with AMX llama.cpp goes without its own layouts of weights, with which "
        "builds by gcc 12 die there. It keeps keys and values in float16, OpenVINO in uint8 or "
        "less, ours in float32 beside float32 weights and in bfloat16 else. An engine takes part "
        "whose logits are those of transformers in float32: differences up to "
        f"{LARGEST_DIFFERENCE:g} in float32, correlations from {correlations}. Weights are random: "
        "speed alone can be compared."
    ]
    if ENGINES.about:
        versions = (f"{name} {version}" for name, version in ENGINES.about.items())
        found.append("Versions: " + ", ".join(versions) + ".")
    found += [f"Without {label}: {reason}." for label, reason in ENGINES.left_out.items()]
    return found

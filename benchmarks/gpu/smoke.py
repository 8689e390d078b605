"""Each op once against the CPU: called, and replayed from a CUDA graph on other values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

import lmdecode
from benchmarks.gpu.machine import Machine, header, name_of, row
from lmdecode.beam.search_arguments import SearchOfStep, rules_of_step, searches_of_step
from lmdecode.beam.token_rules import ALWAYS, one_slot, repeat_token_rules
from tests.support.cases import assert_same_bits

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_VOCABULARIES = (300, 20_000, 131_072, 1 << 20)
# Largest error relative to the largest value, where results are not the same bits.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Check(NamedTuple):
    """A call of an op.

    Attributes
    ----------
    name
        Of the row.
    inputs
        inputs(number): what it takes, on the CPU; other values for each number.
    call
        Of tensors on one device; it leaves them as they are.
    tolerance
        None: the same bits.
    """

    name: str
    inputs: Callable[[int], Sequence[torch.Tensor]]
    call: Callable[..., Any]
    tolerance: float | None = None


def _randn(number: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return (torch.randn(shape, generator=generator) * 3).to(dtype)


def _sampling(vocab: int, dtype: torch.dtype) -> Iterator[Check]:
    name = f"{vocab} {name_of(dtype)}"
    for arguments in ({"top_k": 50, "top_p": 0.9, "temperature": 0.8}, {"top_p": 0.95}, {}):
        options = {**arguments, "seed": 5, "return_logits": True, "return_logprob": True}
        yield Check(
            f"top_k_top_p_sample {name}, {arguments or 'no filter'}",
            lambda number: [_randn(number, 3, vocab, dtype=dtype)],
            lambda logits, o=options: lmdecode.top_k_top_p_sample(logits, **o),
        )
    yield Check(  # where the last token that is kept is one of many alike
        f"top_k_top_p_sample {name}, a flat row, top_p 0.9",
        lambda number: [_randn(number, 3, vocab, dtype=dtype) / 10],
        lambda logits: lmdecode.top_k_top_p_sample(logits, top_p=0.9, seed=5, return_logits=True),
    )
    yield Check(
        f"Sampler.sample {name}",
        lambda number: [_randn(number, 4, vocab, dtype=dtype)],
        _chosen,
    )
    yield Check(
        f"log_softmax_top_k {name}",
        lambda number: [_randn(number, 4, vocab, dtype=dtype), _randn(number + 1, 4)],
        lambda logits, scores: lmdecode.log_softmax_top_k(logits, scores, 8, num_beams=4),
    )


def _attention(dtype: torch.dtype) -> Iterator[Check]:
    name, tolerance = name_of(dtype), _TOLERANCE[dtype]
    for size in (64, 128, 80):
        for tokens, op in ((70, lmdecode.sliding_window_attention),
                           (1, lmdecode.sliding_window_decode)):  # fmt: skip
            shapes = ((2, 8, tokens, size), (2, 2, 1100, size), (2, 2, 1100, size))
            for window in (None, 100):
                yield Check(
                    f"{op.__name__} {tokens} x {size} {name}, window {window}",
                    lambda number, s=shapes: [
                        _randn(number + i, *shape, dtype=dtype) / 3 for i, shape in enumerate(s)
                    ],
                    lambda q, k, v, op=op, w=window: (op(q, k, v, window=w),),
                    tolerance,
                )
    yield Check(
        f"merge_attention_states {name}",
        lambda number: (
            [_randn(number + i, 1, 4, 33, 128, dtype=dtype) for i in range(2)]
            + [_randn(number + i, 1, 4, 33) for i in range(2)]
        ),
        lambda one, two, first, second: lmdecode.merge_attention_states(one, first, two, second),
        tolerance,
    )


def _reordered(cache: torch.Tensor, parents: torch.Tensor) -> tuple[torch.Tensor, ...]:
    caches = (cache.clone(), cache.clone())
    lmdecode.reorder_cache_(caches, parents)
    return caches


def _redirected(
    table: torch.Tensor, parents: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor]:
    table = table.clone()
    lmdecode.update_beam_indirection_(table, parents, lengths)
    return (table,)


def _appended(ring: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rings = ring.clone(), ring.clone()
    lmdecode.ring_cache_append_(*rings, new, new, at)
    return rings


def _caches(dtype: torch.dtype) -> Iterator[Check]:
    def parents(number: int, rows: int) -> torch.Tensor:
        return torch.randint(0, rows, (rows,), generator=torch.Generator().manual_seed(number))

    name = name_of(dtype)
    yield Check(
        f"reorder_cache_ {name}",
        lambda number: [_randn(number, 8, 2, 50, 64, dtype=dtype), parents(number, 8)],
        _reordered,
    )
    yield Check(
        f"update_beam_indirection_ {name}",
        lambda number: [
            parents(number, 40 * 90).view(40, 90).int() % 40, parents(number + 1, 40),
            torch.full((40,), 70, dtype=torch.int32),
        ],
        _redirected,
    )  # fmt: skip
    yield Check(
        f"ring_cache_append_ {name}",
        lambda number: [
            _randn(number, 2, 2, 16, 64, dtype=dtype), _randn(number, 2, 2, 3, 64, dtype=dtype),
            torch.tensor([15, 4 + number]),
        ],
        _appended,
    )  # fmt: skip


@functools.cache
def _sampler(vocab: int, device: torch.device) -> lmdecode.Sampler:
    """One with a text in each row, and with other stages in each."""
    sampler = lmdecode.Sampler(
        4, vocab, device=device, seed=[1, 2, 3, 4], num_logprobs=3, return_logits=True,
        repetition_penalty=1.2, no_repeat_ngram_size=3, top_p=[0.9, 1.0, 0.8, 1.0],
        top_k=[0, 50, 0, 0], min_p=[0.0, 0.0, 0.05, 0.0], typical_p=[1.0, 1.0, 1.0, 0.9],
        top_n_sigma=[0.0, 2.0, 0.0, 0.0], temperature=[1.0, 0.7, 1.3, 1.0],
    )  # fmt: skip
    for sequence in range(4):
        sampler.accept(sequence, [5, 6, 7, 5, 6])
    return sampler


def _chosen(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = _sampler(logits.shape[1], logits.device).sample(logits, accept=False)
    assert out.logprob is not None and out.rank is not None and out.top_ids is not None
    assert out.kept_logits is not None
    return out.index, out.logprob, out.rank, out.top_ids, out.kept_logits


_REQUESTS, _BEAMS = 3, 4


@functools.cache
def _searches(device: torch.device) -> tuple[lmdecode.BeamState, lmdecode.BeamParameters]:
    state = lmdecode.new_beam_state(_REQUESTS, _BEAMS, 20, keep_beam_indices=True, device=device)
    state.lengths.fill_(1)
    parameters = lmdecode.beam_parameters(
        _REQUESTS, _BEAMS, prompt_lengths=1, max_lengths=20, end_tokens=[2], device=device
    )
    return state, parameters


def _searched(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The state of searches after some steps, of [steps, rows, vocab] logits."""
    begin, parameters = _searches(logits.device)
    state = lmdecode.BeamState(*(tensor.clone() for tensor in begin))
    for step in logits:
        best = lmdecode.log_softmax_top_k(
            step, state.scores.flatten(), 2 * _BEAMS, num_beams=_BEAMS
        )
        lmdecode.beam_step(
            state, parameters, best.scores, best.tokens, best.beams, status=best.status
        )
    return tuple(state)


class _Search(NamedTuple):
    """Two requests of two groups, and one that a trie holds: two beams each."""

    state: lmdecode.BeamState
    parameters: lmdecode.BeamParameters
    rules: list[torch.Tensor]
    searches: torch.Tensor
    passes: list[int]


@functools.cache
def _search(vocab: int, device: torch.device) -> _Search:
    slots, beams = 5, 2
    state = lmdecode.new_beam_state(slots, beams, 20, device=device)
    state.lengths.fill_(1)
    parameters = lmdecode.beam_parameters(
        slots, beams, prompt_lengths=1, max_lengths=20, end_tokens=[2], device=device
    )
    rules = repeat_token_rules(
        one_slot(
            repetition_penalty=1.2, no_repeat_ngram_size=2, diversity_penalty=0.5,
            bans=[(7, 0, ALWAYS, 1)], forced=[(3, 9)],
        ),
        slots,
    )  # fmt: skip
    items = torch.randint(vocab, (40, 8), generator=torch.Generator().manual_seed(1))
    tries = [None, None, None, None, lmdecode.Trie(items).to(device)]
    order = ((0, 0), (2, 0), (4, 0), (1, 1), (3, 1))
    searches, passes = searches_of_step(
        [
            SearchOfStep(slot, slot, 0, group, beams, slot * beams, beams, slot * beams)
            for slot, group in order
        ]
    )
    return _Search(
        state,
        parameters,
        rules_of_step(rules, device, tries),
        torch.tensor(searches, device=device),
        passes,
    )


def _stepped(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The state after some steps of the whole op, of [steps, 10, vocab] logits."""
    search = _search(logits.shape[2], logits.device)
    state = [tensor.clone() for tensor in search.state]
    nodes = torch.zeros(state[3].shape, dtype=torch.int32, device=logits.device)
    chosen: list[torch.Tensor] = []
    for step in logits:
        chosen += torch.ops.lmdecode.beam_search_step_(
            step, state, list(search.parameters), search.rules, search.searches, nodes,
            search.passes, 4, 10, None, None, False, False, [],
        )  # fmt: skip
    return (*state, nodes, *chosen)


def _beams() -> Iterator[Check]:
    yield Check(
        f"beam_step, 8 steps of {_REQUESTS} x {_BEAMS} beams",
        lambda number: [_randn(number, 8, _REQUESTS * _BEAMS, 50)],
        _searched,
    )
    for vocab in (300, 32000):
        yield Check(
            f"beam_search_step_, 8 steps of groups, rules and a trie, V = {vocab}",
            lambda number, vocab=vocab: [_randn(number, 8, 10, vocab)],  # type: ignore[misc]
            _stepped,
        )


def checks(vocabularies: Sequence[int]) -> Iterator[Check]:
    """Yield the checks of all ops, in three dtypes."""
    for dtype in _DTYPES:
        for vocab in vocabularies:
            yield from _sampling(vocab, dtype)
        yield from _attention(dtype)
        yield from _caches(dtype)
    yield from _beams()


def _difference(got: Sequence[Any], want: Sequence[Any], tolerance: float | None) -> str:
    """Return what differs; empty: nothing."""
    got = [None if t is None else t.cpu() for t in got]
    if tolerance is None and hasattr(want, "_fields"):
        try:
            assert_same_bits(type(want)(*got), want)
        except AssertionError as error:
            return str(error)
        return ""
    if tolerance is None:
        bits = ([t.contiguous().view(torch.uint8) for t in tensors] for tensors in (got, want))
        return "" if all(map(torch.equal, *bits)) else "other bits"
    for mine, theirs in zip(got, want, strict=True):
        error = float((mine.float() - theirs.float()).abs().max() / theirs.float().abs().max())
        if not error <= tolerance:
            return f"error {error:.1e} of the largest"
    return ""


def _replayed(machine: Machine, check: Check) -> Callable[[Sequence[torch.Tensor]], Any]:
    """Return what copies values into the inputs of a graph, and replays it."""
    inputs = [tensor.to(machine.device) for tensor in check.inputs(0)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        check.call(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = check.call(*inputs)

    def replay(values: Sequence[torch.Tensor]) -> Any:
        for tensor, value in zip(inputs, values, strict=True):
            tensor.copy_(value)
        graph.replay()
        machine.wait()
        return outputs

    return replay


def _cell(machine: Machine, call: Callable[[], str]) -> str:
    """Return what a check says; that it ended with an exception is a difference, too."""
    try:
        said = call()
    except (RuntimeError, ValueError) as error:
        said = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    machine.found_fault |= bool(said)
    return f"DIFFERS: {said}" if said else "equal"


def run(machine: Machine, vocabularies: Sequence[int] = _VOCABULARIES) -> Iterator[str]:
    """Run them; a row each."""
    yield from header(["what", "called", "replayed"])
    for check in checks(machine.size(vocabularies, (300,))):
        one, two = check.inputs(1), check.inputs(2)

        def called(check: Check = check, values: Sequence[torch.Tensor] = one) -> str:
            got = check.call(*(tensor.to(machine.device) for tensor in values))
            return _difference(got, check.call(*values), check.tolerance)

        def replayed(check: Check = check, values: Sequence[torch.Tensor] = two) -> str:
            got = _replayed(machine, check)(values)
            return _difference(got, check.call(*values), check.tolerance)

        second = "-" if machine.is_rehearsal else _cell(machine, replayed)
        yield row([check.name, _cell(machine, called), second])

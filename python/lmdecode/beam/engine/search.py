"""Beam search with continuous batching: requests join and leave between steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from lmdecode._checks import check_int
from lmdecode._upload import uploaded
from lmdecode.beam.engine.request import BeamRequest, BeamResult, RequestIds, position_of_request
from lmdecode.beam.engine.results import beam_result
from lmdecode.beam.engine.slots import BeamSlots
from lmdecode.beam.engine.step import (
    BeamPlan,
    Chooser,
    Coverage,
    RunningSearch,
    StepChoice,
    check_step,
    make_plan,
)
from lmdecode.beam.engine.trace import BeamTrace, trace_searches
from lmdecode.beam.ops import beam_finalize
from lmdecode.beam.state import BeamFinal
from lmdecode.beam.token_rules import TokenRules, check_token_rules

__all__ = ["BeamSearch", "BeamSearchOutput", "BeamSequences"]

_OP = "BeamSearch"


class BeamSearchOutput(NamedTuple):
    """Result of a step of ``BeamSearch``: input of the model's next call, and finished requests.

    A row is a beam of an unfinished request.

    Attributes
    ----------
    tokens : Tensor
        [next rows] int64: the input of the model's next call.
    parents : Tensor
        [next rows] int64: the row of this call that each row of the next continues. Reordering a
        cache by it expands rows of prompts to beams, and drops rows of finished requests.
    finished : tuple
        The requests that ended in this step, in the order of their insertion. ``pop_finished``
        returns their results.
    """

    tokens: Tensor
    parents: Tensor
    finished: tuple[Hashable, ...]


class BeamSequences(NamedTuple):
    """The running sequences of a ``BeamSearch``, one for each row of the next call.

    Attributes
    ----------
    input_ids : Tensor
        [rows, longest] int64, pad tokens after the end.
    lengths : Tensor
        [rows] int64.
    """

    input_ids: Tensor
    lengths: Tensor


class _Finished(NamedTuple):
    search: RunningSearch
    final: BeamFinal
    status: Tensor  # [groups] uint8
    num_hypotheses: int  # of the state: what places count by


class _Step(NamedTuple):
    """How steps are done while the batch is the same."""

    plan: BeamPlan
    chooser: Chooser
    coverage: Coverage | None


class BeamSearch:
    """Beam search of any number of requests, each with its own parameters, in one batch of rows.

    Requests can be inserted at any time. ``step`` takes the logits of all rows and chooses the next
    tokens. A finished request leaves the batch at once. The rows are in the order of insertion of
    their requests: **one row for a request that has just been inserted**, since its prompt runs
    through the model once, then one for each of its beams. ``BeamSearchOutput.parents`` is the row
    of this call that each row of the next continues. So one ``index_select`` of the cache expands
    prompts to beams, reorders beams by their parents, and drops finished requests.

    For the same logits, the result of a request is bitwise the same alone or in any batch,
    whenever it was inserted.

    Parameters
    ----------
    vocab_size : int, optional
        Vocabulary size of the logits; by default that of the first logits.
    device
        Device of the state, the logits and the results.
    on_step : callable, optional
        Called with a ``BeamTrace`` for each request, and each of its groups, after each step. This
        copies candidates and state to the host, for debugging. ``step`` passes on its errors, but
        the step is complete: continue with ``last_output``.
    slots, num_beams, capacity : int
        Initial room for searches (a group of a diverse search is one), beams of each, and tokens
        of a sequence. All grow on demand.

    Attributes
    ----------
    last_output : BeamSearchOutput or None
        What the last step returned, or would have returned if ``on_step`` had not raised.

    Examples
    --------
    >>> engine = BeamSearch()
    >>> engine.insert(BeamRequest([5, 7], max_new_tokens=3, num_beams=2))
    0
    >>> out = engine.step(torch.tensor([[0.1, 0.5, 0.3]]).log())
    >>> out.tokens.tolist(), out.parents.tolist()
    ([1, 2], [0, 0])
    """

    def __init__(
        self,
        vocab_size: int | None = None,
        *,
        device: torch.device | str = "cpu",
        on_step: Callable[[BeamTrace], object] | None = None,
        slots: int = 8,
        num_beams: int = 4,
        capacity: int = 128,
    ) -> None:
        if vocab_size is not None:
            vocab_size = check_int(_OP, "vocab_size", vocab_size, 1)
        slots = check_int(_OP, "slots", slots, 1)
        num_beams = check_int(_OP, "num_beams", num_beams, 1)
        capacity = check_int(_OP, "capacity", capacity, 1)
        self.on_step = on_step
        self.last_output: BeamSearchOutput | None = None
        self._vocab_size = vocab_size
        self._store = BeamSlots(slots, num_beams, capacity, torch.device(device))
        self._running: list[RunningSearch] = []
        self._finished: list[_Finished] = []
        self._ids = RequestIds()  # of both
        self._step: _Step | None = None  # None: the batch has changed

    def __repr__(self) -> str:
        return (
            f"BeamSearch({len(self._running)} requests running, {self.num_rows} rows, "
            f"{len(self._finished)} finished)"
        )

    # ---- requests

    def insert(self, request: BeamRequest, *, token_rules: TokenRules | None = None) -> Hashable:
        """Add a request; the next call has one more row, the last, for the end of its prompt.

        Parameters
        ----------
        request : BeamRequest
            The search.
        token_rules : TokenRules, optional
            Rules of one slot, which replace those of the request's parameters: see
            ``lmdecode.beam.token_rules``.

        Returns
        -------
        Hashable
            Its ``request_id``, or an assigned number.

        Raises
        ------
        TypeError, ValueError
            Not a ``BeamRequest``, its id is in use, or it has a trie that is not on the engine's
            device: ``Trie.to``.
        RuntimeError
            There is not enough memory. The engine is unchanged, and can continue.
        """
        self._ids.check(f"{_OP}.insert", request)
        if request.trie is not None:
            of = "the device of the engine"
            request.trie.check_device(f"{_OP}.insert", self._store.device, of)
        if token_rules is not None and self._vocab_size is not None:
            check_token_rules(f"{_OP}.insert", token_rules, self._vocab_size)
        request_id = self._ids.new(request)
        self._step = None  # even if there is an error, its numbers of beams may be out of date
        slots = self._store.acquire(request)
        self._running.append(RunningSearch(request, request_id, slots, token_rules=token_rules))
        self._ids.add(request_id)
        return request_id

    def cancel(self, request_id: Hashable) -> Tensor:
        """Drop a running request, without a result.

        Returns
        -------
        Tensor
            [rows] int64: the remaining rows of the next call, as numbered before. Reorder the cache
            by it, as by ``BeamSearchOutput.parents``.

        Raises
        ------
        ValueError
            No such request is running.
        """
        number = position_of_request(f"{_OP}.cancel", request_id, self.running)
        counts = [search.num_rows for search in self._running]
        first, last = sum(counts[:number]), sum(counts[: number + 1])
        search = self._running.pop(number)
        self._ids.discard(request_id)
        self._store.release(search.slots)
        self._step = None
        rows = torch.arange(sum(counts), device=self._store.device)
        return torch.cat((rows[:first], rows[last:]))

    # ---- what is running

    @property
    def num_rows(self) -> int:
        """Rows of the logits that the next ``step`` takes."""
        return sum(search.num_rows for search in self._running)

    @property
    def running(self) -> tuple[Hashable, ...]:
        """The unfinished requests, in the order of their rows."""
        return tuple(search.request_id for search in self._running)

    def row_ranges(self) -> dict[Hashable, range]:
        """Return the rows of each running request in the next call."""
        ranges, first = {}, 0
        for search in self._running:
            ranges[search.request_id] = range(first, first + search.num_rows)
            first += search.num_rows
        return ranges

    def input_ids(self) -> BeamSequences:
        """Return the sequences so far of the next call's rows, for a model without a cache."""
        state, device = self._store.state, self._store.device
        rows, lengths, pads = [], [], []
        for search in self._running:
            for slot in search.slots if search.steps else search.slots[:1]:
                rows += [slot * self._store.num_beams + i for i in range(search.row_group_size)]
            lengths += [len(search.request.prompt_ids) + search.steps] * search.num_rows
            pads += [search.request.pad_token] * search.num_rows
        flat = state.sequences.flatten(0, 1)[:, : max(lengths, default=0)]
        ids = flat.index_select(0, uploaded(rows, torch.int64, device))
        length = uploaded(lengths, torch.int64, device)
        pad = uploaded(pads, torch.int64, device)
        behind = torch.arange(ids.shape[1], device=device)[None] >= length[:, None]
        return BeamSequences(torch.where(behind, pad[:, None], ids), length)

    # ---- the step

    def step(
        self,
        logits: Tensor,
        *,
        attention: Tensor | None = None,
        token_bitmask: Tensor | None = None,
    ) -> BeamSearchOutput:
        """Choose the next tokens of every running request.

        Parameters
        ----------
        logits : Tensor
            [num_rows, vocab] float32, float16 or bfloat16: of the last token of each row.
        attention : Tensor, optional
            [num_rows, source] floats: the attention of the last tokens to the source, 0 after the
            end of a source. Required if a request has a ``coverage_penalty``; rows of other
            requests are not read.
        token_bitmask : Tensor, optional
            [num_rows, ceil(vocab / 32)] int32: the allowed next tokens of each row; bit
            ``token % 32`` of ``token // 32``.

        Returns
        -------
        BeamSearchOutput
            Input of the model's next call.

        Raises
        ------
        ValueError, TypeError
            Names the argument, what came and what was expected; nothing has been changed then.
        Exception
            Any error of ``on_step``. The step is complete, and ``last_output`` is its output.
        """
        check_step(
            self._running, self._vocab_size, self._store.device, logits, attention, token_bitmask
        )
        self._vocab_size = logits.shape[1]
        logits = logits.detach()
        if not self._running:
            nothing = torch.zeros(0, dtype=torch.int64, device=logits.device)
            self.last_output = BeamSearchOutput(nothing, nothing.clone(), ())
            return self.last_output
        if self._step is None:
            self._step = self._new_step(self._vocab_size)
        plan, chooser, coverage = self._step
        covered = bonus = None
        if attention is not None:
            self._store.cover(attention.shape[1])
            if coverage is not None:
                covered, bonus = coverage.add(attention)
        choice = chooser.choose(logits, token_bitmask, bonus, self.on_step is not None)
        if coverage is not None and covered is not None:
            coverage.follow(covered, choice.parents)
        traces = [] if self.on_step is None else trace_searches(self._store, plan, choice)
        output = self._leave(plan, choice)
        self.last_output = output
        for trace in traces:
            assert self.on_step is not None
            self.on_step(trace)
        return output

    def _new_step(self, vocab_size: int) -> _Step:
        store, plan = self._store, make_plan(self._running)
        covers = any(search.request.coverage_penalty for search in self._running)
        return _Step(
            plan, Chooser(plan, store, vocab_size), Coverage(plan, store) if covers else None
        )

    def _leave(self, plan: BeamPlan, choice: StepChoice) -> BeamSearchOutput:
        """Remove finished requests from the batch; return the rows of the others."""
        tokens, parents = choice.tokens, choice.parents
        ended: list[list[int]] = [[] for _ in self._running]
        for entry, has_ended in zip(plan.entries, choice.ended, strict=True):
            ended[entry.number].append(has_ended)
        left: list[RunningSearch] = []
        finished: list[RunningSearch] = []
        kept: list[int] = []
        row = 0
        for search, groups in zip(self._running, ended, strict=True):
            search.steps += 1
            rows = range(row, row + search.request.num_beams)
            row = rows.stop
            if min(groups) > 0 or max(groups) > 1 or search.steps == search.request.max_new_tokens:
                finished.append(search)
            else:
                left.append(search)
                kept += rows
        if finished:
            rows_kept = self._store.integers(kept)
            tokens, parents = tokens.index_select(0, rows_kept), parents.index_select(0, rows_kept)
            for search in finished:
                self._finish(search)
        # Rows of prompts become rows of beams: another layout.
        if finished or any(search.steps == 1 for search in left):
            self._running, self._step = left, None
        return BeamSearchOutput(tokens, parents, tuple(search.request_id for search in finished))

    def _finish(self, search: RunningSearch) -> None:
        """Copy the best hypotheses of a search out of the state, and free its slots."""
        request, slots = search.request, self._store.integers(search.slots)
        final = beam_finalize(
            self._store.state,
            self._store.parameters,
            request.num_return_sequences,
            num_groups=request.num_beam_groups,
            slots=slots,
            dialect=request.dialect,
        )
        status = self._store.state.status.index_select(0, slots)
        num_hypotheses = self._store.state.hypothesis_scores.shape[1]
        self._finished.append(_Finished(search, final, status, num_hypotheses))
        self._store.release(search.slots)

    # ---- results

    def pop_finished(self) -> list[BeamResult]:
        """Return the results of the requests that have finished since the last call, in order."""
        finished, self._finished = self._finished, []
        for entry in finished:
            self._ids.discard(entry.search.request_id)
        return [
            beam_result(
                entry.search.request,
                entry.search.request_id,
                entry.final,
                entry.status,
                entry.num_hypotheses,
                entry.search.steps,
            )
            for entry in finished
        ]

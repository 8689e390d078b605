"""Who chooses tokens: rows of a sampler, rows of searches, and rows of a loop in Python."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lmdecode.beam.engine.search import BeamSearch
from lmdecode.decoder.engine.drafts import ReadAhead
from lmdecode.decoder.engine.request import (
    DrawnSequence,
    FinishReason,
    RequestState,
    SearchedSequence,
    TokenLogprob,
    WrittenSequence,
)
from lmdecode.sampling.sampler import CompactSampler, DrawingRows, Results
from lmdecode.sampling.sampler_rows import RowRules

__all__ = [
    "MOST_AHEAD",
    "DrawnRows",
    "Ended",
    "FollowingCaches",
    "LoopRows",
    "LoopSequence",
    "ModelSteps",
    "ReadRows",
    "SearchedRows",
    "StepLogits",
]

MOST_AHEAD = 64  # steps in one op: rows of a sampler have room for the tokens of all
_FAILED = {1: "NaN in its logits", 2: "no logit above -inf", 4: "an invalid score"}


def _no_token(status: int) -> RuntimeError:
    """Return the error of a request in which no token could be chosen; status is a sum of bits."""
    why = " and ".join(text for bit, text in _FAILED.items() if status & bit)
    return RuntimeError(f"Engine: no token can be chosen: the request has {why}")


def _error_of(call: Callable[[], object]) -> BaseException | None:
    """Return the error that a user's code raises, or None. A Rust panic is a BaseException."""
    try:
        call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return error
    return None


class FollowingCaches(Protocol):
    """Caches with ``sequences`` places that follow beams."""

    sequences: int

    def reorder(self, parents: Tensor) -> None:
        """Make place i continue as place ``parents[i]``: [sequences] int64; most stay."""


class ReadRows:
    """Sequences of one row each, as a model's steps read their last tokens.

    ``tokens``, [rows] int64, is the next token of each row, or None if rows have changed since.
    """

    def __init__(self) -> None:
        self.running: list[DrawnSequence] = []
        self.tokens: Tensor | None = None


class StepsAhead(Protocol):
    """Steps of a model in C++: ``CausalCaches.steps`` of its entries."""

    def __call__(
        self, tokens: Tensor, rows: DrawingRows, *, ends: Tensor, chosen: Tensor, seconds: float
    ) -> int: ...


class Ended(NamedTuple):
    """A sequence that has ended, why, and its error."""

    sequence: WrittenSequence
    reason: FinishReason
    error: BaseException | None = None


def _asks(sequence: DrawnSequence) -> bool:
    return sequence.grammar is not None or sequence.num_logprobs >= 0


class DrawnRows(ReadRows):
    """The sampled sequences, by their rows in a ``CompactSampler``.

    ``num_chosen`` counts all tokens so far, ``num_drafted`` the tokens of drafts, and
    ``num_accepted`` the chosen ones among these.
    """

    def __init__(self, rows: int, vocab: int, dialect: str) -> None:
        super().__init__()
        self._sampler, self._vocab = CompactSampler(rows, vocab, dialect), vocab
        self.num_chosen = self.num_drafted = self.num_accepted = 0
        self._asks = False  # whether a row has a grammar or requests log-probabilities
        self._ends: Tensor | None = None  # [rows, ends]; None: rows have changed

    @property
    def count(self) -> int:
        """Number of rows in use."""
        return self._sampler.count

    def begin(self, sequence: DrawnSequence) -> None:
        """Take a sequence after its prompt was read: its logits come last in the next step."""
        prompt = torch.tensor(sequence.request.prompt_ids, device="cpu")
        self._sampler.begin(prompt, sequence.rules)
        if sequence.written:
            self._sampler.accept(self.count - 1, sequence.written)
        self.running.append(sequence)
        self._changed()

    def clear(self) -> None:
        """Remove all sequences."""
        self.running = []
        self._sampler.clear()
        self._changed()

    def end(self, sequence: DrawnSequence) -> None:
        """Remove a sequence."""
        row = self.running.index(sequence)
        self._sampler.end(row)
        self.running[row] = self.running[-1]
        self.running.pop()
        self._changed()

    def _changed(self) -> None:
        self.tokens = self._ends = None
        self._asks = any(map(_asks, self.running))

    def step(self, logits: Tensor, drafts: Sequence[list[int]] = ()) -> list[Ended]:
        """Choose a token for each sequence; return those that end, still in ``running``.

        ``logits``, [n, V] float32, follow each sequence's last token, and each token of its draft.
        ``drafts`` are those of the first sequences; they may be empty. A sequence chooses further
        tokens while they equal its draft, each with the bits of a step of its own.
        """
        if any(drafts):
            return self._step_drafted(logits, drafts)
        results, ended = self._choose(0, logits, self._asks)
        self.tokens = results.index
        self.num_chosen += len(self.running) - sum(end.reason == "error" for end in ended)
        return ended

    @property
    def steps_ahead(self) -> int:
        """Steps of these rows that need nothing of Python, as many as are run at once."""
        if self.tokens is None or self._asks:
            return 0
        left = (s.max_new_tokens - len(s.request.tokens) for s in self.running)
        return min(MOST_AHEAD, *left)

    def run_ahead(self, steps: int, run: StepsAhead, seconds: float) -> tuple[int, list[Ended]]:
        """Have ``run`` do at most so many steps; return their number and the sequences that end."""
        assert self.tokens is not None
        running = self.running
        if self._ends is None:
            most = max(len(sequence.end_tokens) for sequence in running)
            ends = [[*s.end_tokens, *[-1] * (most - len(s.end_tokens))] for s in running]
            kind: Any = {"dtype": torch.int64, "device": "cpu"}
            self._ends = torch.tensor(ends, **kind).view(len(running), most)
        chosen = torch.empty(steps, len(running), dtype=torch.int64, device="cpu")
        call = partial(run, self.tokens, ends=self._ends, chosen=chosen, seconds=seconds)
        taken, results = self._sampler.run(len(running), steps, call)
        self.tokens, ended = results.index, list[Ended]()
        going_on = [0] * len(running)
        for step, tokens in enumerate(chosen[:taken].tolist(), 1):
            status = going_on if step < taken else results.status.tolist()
            for sequence, token, bits in zip(running, tokens, status, strict=True):
                end = self._take(sequence, token, bits)
                if end is not None:
                    ended.append(end)
        self.num_chosen += taken * len(running) - sum(end.reason == "error" for end in ended)
        return taken, ended

    def _step_drafted(self, logits: Tensor, drafts: Sequence[list[int]]) -> list[Ended]:
        """Run a step with drafts: rows that follow each other in one op, if they are alike."""
        self.tokens = None
        lengths = [len(sequence.request.tokens) for sequence in self.running]
        ended: list[Ended] = []
        begin = 0

        def kind(row: int) -> tuple[int, int]:
            size = len(drafts[row]) if row < len(drafts) else 0
            return size, row if size and _asks(self.running[row]) else -1

        for (size, asks), group in itertools.groupby(range(len(self.running)), kind):
            first, *others = group
            count = 1 + len(others)
            end = begin + count * (1 + size)
            part, begin = logits[begin:end], end
            if size == 0:
                ended += self._choose(first, part, self._asks)[1]
            elif asks >= 0:
                ended += self._choose_in_turn(first, part, drafts[first])
            else:
                ended += self._verify(first, part, drafts[first : first + count])
        for sequence, length in zip(self.running, lengths, strict=True):
            count = len(sequence.request.tokens) - length
            self.num_chosen += count
            self.num_accepted += max(0, count - 1)
        self.num_drafted += sum(map(len, drafts))
        return ended

    def _verify(self, first: int, logits: Tensor, drafts: Sequence[list[int]]) -> list[Ended]:
        """Choose the tokens of rows with drafts of one length."""
        ended: list[Ended] = []
        given = torch.tensor(drafts, dtype=torch.int64, device="cpu")
        of_rows = logits.view(len(drafts), -1, logits.shape[-1])
        chosen, status = self._sampler.verify(of_rows, given, first)
        for row, tokens in enumerate(chosen):
            if status[row]:  # which token fails shows one by one
                ended += self._choose_in_turn(first + row, of_rows[row], drafts[row])
            for token in tokens:
                end = self._take(self.running[first + row], token, 0)
                if end is not None:
                    ended.append(end)
                    break
        return ended

    def _choose_in_turn(self, row: int, logits: Tensor, draft: list[int]) -> list[Ended]:
        """Choose the tokens of a row with a draft one by one."""
        for place in range(len(logits)):
            _, ended = self._choose(row, logits[place : place + 1], self._asks)
            if ended or self.running[row].last not in draft[place : place + 1]:
                return ended
        return []

    def _choose(self, first: int, logits: Tensor, asks: bool) -> tuple[Results, list[Ended]]:
        """Choose a token for each sequence from row ``first`` on; logits are [n, V]."""
        if asks:
            return self._choose_asked(first, logits)
        results = self._sampler.step(logits, None, -1, first)
        status = results.status.tolist()
        ended = []
        for row, token in enumerate(results.index.tolist()):
            end = self._take(self.running[first + row], token, status[row])
            if end is not None:
                ended.append(end)
        return results, ended

    def _choose_asked(self, first: int, logits: Tensor) -> tuple[Results, list[Ended]]:
        """Choose tokens with grammars or log-probabilities."""
        running = self.running[first : first + len(logits)]
        bitmask, failed = self._bitmask(running)
        most = max(sequence.num_logprobs for sequence in running)
        results = self._sampler.step(logits, bitmask, most, first)
        tokens, status = results.index.tolist(), results.status.tolist()
        logprobs = _logprobs(results, tokens) if most >= 0 else None
        ended = []
        for row, (sequence, token) in enumerate(zip(running, tokens, strict=True)):
            end = failed.get(row)
            if end is None:
                if logprobs is not None and sequence.num_logprobs >= 0 and not status[row]:
                    of_token = logprobs[row]
                    top = of_token.top[: sequence.num_logprobs]
                    assert sequence.request.logprobs is not None
                    sequence.request.logprobs.append(of_token._replace(top=top))
                end = self._take(sequence, token, status[row])
            if end is None and sequence.grammar is not None:
                error = _error_of(partial(sequence.grammar.accept_token, token))
                if error is not None:
                    end = Ended(sequence, "error", error)
            if end is not None:
                ended.append(end)
        return results, ended

    def _bitmask(self, running: list[DrawnSequence]) -> tuple[Tensor | None, dict[int, Ended]]:
        """Return the bitmask of some sequences, and the sequences with a failed grammar."""
        failed: dict[int, Ended] = {}
        if all(sequence.grammar is None for sequence in running):
            return None, failed
        shape = len(running), -(-self._vocab // 32)
        bitmask = torch.full(shape, -1, dtype=torch.int32, device="cpu")
        for row, sequence in enumerate(running):
            if sequence.grammar is not None:
                error = _error_of(partial(sequence.grammar.fill_bitmask, bitmask[row]))
                if error is not None:
                    bitmask[row] = -1
                    failed[row] = Ended(sequence, "error", error)
        return bitmask, failed

    @staticmethod
    def _take(sequence: DrawnSequence, token: int, status: int) -> Ended | None:
        """Pass a token to its request; return the end of the sequence, or None."""
        if status:
            sequence.request.status = status
            return Ended(sequence, "error", _no_token(status))
        sequence.last = token
        tokens = sequence.request.tokens
        tokens.append(token)
        if len(tokens) == 1:
            sequence.request.put_first()
        if token in sequence.end_tokens:
            return Ended(sequence, "stop")
        return Ended(sequence, "length") if len(tokens) >= sequence.max_new_tokens else None


def _logprobs(results: Results, tokens: list[int]) -> list[TokenLogprob]:
    assert results.logprob is not None
    assert results.top_ids is not None and results.top_logprobs is not None
    of_rows = zip(
        tokens,
        results.logprob.tolist(),
        results.top_ids.tolist(),
        results.top_logprobs.tolist(),
        strict=True,
    )
    return [
        TokenLogprob(token, logprob, tuple(zip(ids, best, strict=True)))
        for token, logprob, ids, best in of_rows
    ]


class SearchedRows:
    """The sequences with searches. Their beams are rows of a ``BeamSearch``, each with a place.

    ``running`` has them by the ids of ``BeamSearch``, in the order of rows. ``places`` is the place
    of each row of the next step; ``tokens``, [rows] int64, the next token of each row, without new
    prompts, which come last.
    """

    def __init__(self, caches: FollowingCaches, vocab: int) -> None:
        self._caches, self._vocab = caches, vocab
        self.running: dict[Hashable, SearchedSequence] = {}
        self.places: list[int] = []
        self.tokens: Tensor = torch.empty(0, dtype=torch.int64, device="cpu")
        self._places = list(range(caches.sequences))  # of all sequences
        self._entries: Tensor | None = None  # None: rows have changed

    @cached_property
    def _search(self) -> BeamSearch:
        return BeamSearch(self._vocab)

    @property
    def entries(self) -> Tensor:
        """[rows, 4] int64, as ``CausalCaches.forward`` takes them: a token of each row."""
        if self._entries is None:
            entries = [(place, 1, 0, 1) for place in self.places]
            kind: Any = {"dtype": torch.int64, "device": "cpu"}
            self._entries = torch.tensor(entries, **kind).view(-1, 4)
        return self._entries

    def begin(self, sequence: SearchedSequence) -> None:
        """Take a sequence after its prompt was read: its logits come last in the next step."""
        sequence.id = self._search.insert(sequence.search, token_rules=sequence.token_rules)
        self.running[sequence.id] = sequence
        self._set_places([*self.places, sequence.places[0]])

    def end(self, sequence: SearchedSequence) -> None:
        """Remove a sequence that has not ended."""
        kept = self._search.cancel(sequence.id)
        self._set_places([self.places[row] for row in kept.tolist()])
        self.tokens = self.tokens[kept]
        del self.running[sequence.id]

    def _set_places(self, places: list[int]) -> None:
        if places != self.places:
            self.places, self._entries = places, None

    def step(self, logits: Tensor) -> list[Ended]:
        """Choose the next beams; return and remove the sequences that have ended."""
        output = self._search.step(logits)
        before, self.tokens = self.places, output.tokens
        self._set_places(
            [
                place
                for id_, rows in self._search.row_ranges().items()
                for place in self.running[id_].places[: len(rows)]
            ]
        )
        sources = [before[parent] for parent in output.parents.tolist()]
        if sources != self.places:
            all_sources = self._places.copy()
            for place, source in zip(self.places, sources, strict=True):
                all_sources[place] = source
            self._caches.reorder(torch.tensor(all_sources, device="cpu"))
        if not output.finished:
            return []
        ended = []
        for result in self._search.pop_finished():
            ended.append(self._ended(self.running[result.request_id], result))
            del self.running[result.request_id]
        return ended

    @staticmethod
    def _ended(sequence: SearchedSequence, result: Any) -> Ended:
        request, has_found = sequence.request, len(result.lengths) > 0
        if result.status & ~2 or (result.status and not has_found):
            request.status = result.status
            return Ended(sequence, "error", _no_token(result.status))
        # A trie may leave no continuation and no finished sequence.
        request.beams, tokens = result, result.new_tokens() if has_found else []
        if has_found and sequence.search.dialect == "scorer":  # lengths without the end token
            end = result.sequences[0, int(result.lengths[0]) :][:1].tolist()
            tokens += [token for token in end if token in sequence.end_tokens]
        request.tokens += tokens
        request.put_first()
        is_whole = bool(tokens) and tokens[-1] in sequence.end_tokens
        trie = sequence.search.trie
        is_item = trie is not None and (not tokens or tokens in trie)
        return Ended(sequence, "stop" if is_whole or is_item else "length")


# --- Steps, as rows read them ---------------------------------------------------------------------


class StepLogits(NamedTuple):
    """Logits of a step, [rows, V] float32: the sampled sequences, then the beams of the searches.

    ``begun`` yields the sequences that finished their prompts in this step; they come last among
    the sampled sequences, or among the beams. Each leaves ``reading`` when it is yielded.
    ``drafts`` are drafts of the first sampled sequences, see ``DrawnRows.step``; such a sequence
    has logits after each token of its draft, too.
    """

    logits: Tensor
    begun: Iterator[WrittenSequence]
    drafts: Sequence[list[int]] = ()


class ModelSteps(Protocol):
    """Places of a model's caches, and its steps."""

    @property
    def prompt_tokens(self) -> int:
        """Number of computed prompt tokens."""

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that were shared or loaded."""

    @property
    def nbytes(self) -> int:
        """Bytes of caches and scratch, used or not."""

    @property
    def caches(self) -> FollowingCaches:
        """The caches; their rows are the places of sequences."""

    @property
    def reading(self) -> list[WrittenSequence]:
        """Sequences with places and unread prompt tokens, in order."""

    @property
    def num_free(self) -> int:
        """Number of free places."""

    @property
    def used_bytes(self) -> int:
        """Bytes of caches that sequences and kept prompts have."""

    def has_room(self, sequence: WrittenSequence) -> bool:
        """Whether enough places are free for a sequence."""

    def check_fits(self, sequence: WrittenSequence) -> None:
        """Raise ValueError if a sequence would need more memory than there is, alone."""

    def has_memory(self, drawn: ReadRows, searched: SearchedRows) -> bool:
        """Whether there is memory for the next step; else a sequence is to leave."""

    def begin(self, sequence: WrittenSequence) -> None:
        """Assign places to a sequence; enough are free."""

    def encode(self) -> list[Ended]:
        """Encode inputs before their sequences can read; return the sequences that failed."""

    def read(self, drawn: ReadRows, searched: SearchedRows) -> StepLogits | None:
        """Read the last token of every row, and as much of prompts as fits.

        None if there was nothing to read.
        """

    def ahead(self, drawn: ReadRows) -> StepsAhead | None:
        """Return the steps in C++ of sampled rows, or None where others, or prompts, are read."""

    def leave(self, sequence: WrittenSequence, *, is_sound: bool) -> None:
        """Free the places of a sequence; others may reuse sound ones."""

    def clear(self) -> None:
        """Forget the prompts being read, after a failed step; places are freed one by one."""

    def flush(self) -> None:
        """Wait until kept prompts are written."""


# --- Rows of a loop in Python ---------------------------------------------------------------------


class LoopSequence(DrawnSequence):
    """A sequence whose tokens Python chooses; no sampler has a row of it.

    ``rules`` choose its drafts. It reads its prompt for ``num_beams`` rows with the same prompt.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        end_tokens: tuple[int, ...] = (),
        rules: RowRules | None = None,
    ) -> None:
        nobody: Any = None  # waits for its tokens
        no_rules: Any = rules
        request = RequestState(tuple(prompt), nobody)
        super().__init__(request, max_new_tokens, end_tokens, no_rules, -1, None)
        self.num_rows = 1
        self.ahead = ReadAhead()
        # [1 + n, V], at the last token and at the n tokens ahead.
        self.logits = torch.empty(0, 0, dtype=torch.float32, device="cpu")

    @property
    def num_beams(self) -> int:
        """Rows that it needs at most."""
        return self.num_rows

    def takes(self, token: int) -> bool:
        """Append a chosen token; return whether its logits are known, as it was read ahead."""
        self.last = token
        self.request.tokens.append(token)
        is_known = self.ahead.takes(token)
        if is_known:
            self.logits = self.logits[1:]
        return is_known


class LoopRows(ReadRows):
    """``StepwiseModel`` of the rows of one call, on the steps of a model.

    Row ``leaders[row]`` reads a row's prompt, which is the same. With drafts each row reads its
    own. ``on_read`` is called with the tokens so far, [rows, S], before each later step. Rows where
    ``has_ended()``, [rows] bool or None for none, have logits of 0 from then on.
    """

    def __init__(
        self,
        steps: ModelSteps,
        rows: Sequence[LoopSequence],
        leaders: Sequence[int],
        *,
        has_drafts: bool = False,
        on_read: Callable[[Tensor], None] | None = None,
        has_ended: Callable[[], Tensor | None] | None = None,
    ) -> None:
        super().__init__()
        self.steps, self._rows, self._has_drafts = steps, list(rows), has_drafts
        self._leaders = list(range(len(rows))) if has_drafts else list(leaders)
        self._on_read, self._has_ended = on_read, has_ended
        self._no_searches = SearchedRows(steps.caches, 1)
        self._of_rows: Tensor | None = None  # places, unless row i has place i
        for leader, count in Counter(self._leaders).items():
            self._rows[leader].num_rows = count
            steps.begin(self._rows[leader])

    def read_prompts(self, input_ids: Tensor) -> Tensor:
        """See ``StepwiseModel``; the prompts are those of the sequences."""
        steps, rows = self.steps, self._rows
        logits, order = [], dict[WrittenSequence, int]()
        while steps.reading:
            step = steps.read(self, self._no_searches)
            assert step is not None
            for sequence in step.begun:
                order[sequence] = len(order)
            logits.append(step.logits)
        self._take_places()
        self.running = list(rows)
        at = [order[rows[leader]] for leader in self._leaders]
        found = logits[0] if len(logits) == 1 else torch.cat(logits)
        if at == list(range(len(found))):
            return found
        return found[torch.tensor(at, device="cpu")]

    def _take_places(self) -> None:
        """Give each row a place of its leader, which continues the leader's prompt."""
        rows, caches = self._rows, self.steps.caches
        left = {leader: iter(rows[leader].places) for leader in self._leaders}
        places = [next(left[leader]) for leader in self._leaders]
        parents = torch.arange(caches.sequences, device="cpu")
        sources = [rows[leader].places[0] for leader in self._leaders]
        if sources != places:
            parents[places] = torch.tensor(sources, device="cpu")
            caches.reorder(parents)
        for row, place in zip(rows, places, strict=True):
            row.places = [place]
        if places != list(range(caches.sequences)):
            self._of_rows = torch.tensor(places, device="cpu")

    def read(self, input_ids: Tensor) -> Tensor:
        """See ``StepwiseModel``. With drafts, the logits of some rows are known already."""
        if self._on_read is not None:
            self._on_read(input_ids)
        last = input_ids[:, -1].contiguous()
        if self._has_ended is not None and (ended := self._has_ended()) is not None:
            return self._read_others(last, ended)
        if not self._has_drafts:
            if self.tokens is None:  # the steps see the rows for the first time
                for row, token in zip(self._rows, last.tolist(), strict=True):
                    row.last = token
            self.tokens = last
            return self._step().logits
        chosen = zip(self._rows, last.tolist(), strict=True)
        running = [row for row, token in chosen if not row.takes(token)]
        if running:
            self.running = list(running)
            step = self._step()
            drafts = step.drafts or [[] for _ in running]
            parts = step.logits.split([1 + len(draft) for draft in drafts])
            for row, draft, part in zip(running, drafts, parts, strict=True):
                row.ahead.begin(draft)
                row.logits = part
        if len(self._rows) == 1:
            return self._rows[0].logits[:1]
        return torch.stack([row.logits[0] for row in self._rows])

    def _read_others(self, last: Tensor, ended: Tensor) -> Tensor:
        """Return the logits at last tokens of rows that have not ended; the others have 0."""
        rows, leaders = self._rows, torch.tensor(self._leaders, device="cpu")
        goes_on = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
        goes_on[leaders[~ended]] = True
        reads = goes_on[leaders]  # with all rows of a place
        running = reads.nonzero()[:, 0].tolist()
        for leader in dict.fromkeys(self._leaders):
            if not reads[leader] and rows[leader].places:
                self.steps.leave(rows[leader], is_sound=False)
        for row in running:
            rows[row].last = int(last[row])
        self.tokens = last[reads] if len(running) == len(self.running) else None
        self.running = [rows[row] for row in running]
        logits: Tensor = self._step().logits
        found = logits.new_zeros(len(rows), logits.shape[1])
        found[reads] = logits
        return found.masked_fill_(ended[:, None], 0.0)

    def _step(self) -> StepLogits:
        step = self.steps.read(self, self._no_searches)
        assert step is not None
        list(step.begun)
        return step

    def reorder(self, parents: Tensor) -> None:
        """See ``StepwiseModel``."""
        caches, places = self.steps.caches, self._of_rows
        if places is not None:
            of_rows, parents = places[parents], torch.arange(caches.sequences, device="cpu")
            parents[places] = of_rows
        caches.reorder(parents)

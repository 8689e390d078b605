"""``Sampler``: from logits to tokens, with continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from lmdecode._checks import (
    MAX_INT,
    check_bool,
    check_choice,
    check_count,
    check_dense_tensor,
    check_int,
    type_error,
)
from lmdecode._ops import ops
from lmdecode.sampling._results import (
    Outputs,
    Results,
    checked_device,
    new_results,
    new_zeros,
)
from lmdecode.sampling.parameters import (
    BatchParameters,
    FloatRows,
    IntRows,
    SamplingParameters,
)
from lmdecode.sampling.sampler_rows import (
    ACCEPT,
    ACTIVE,
    COUNTS,
    KEEPS_TEXT,
    LENGTH,
    OUTPUT_LENGTH,
    RAW,
    SAMPLER_DIALECTS,
    SEED,
    RowRules,
    check_parameters,
    check_saved,
    draw_seeds,
    parameters_of_row,
    rules_of_row,
    shown,
    token_tensor,
    with_seed,
)
from lmdecode.sampling.types import SamplerOutput

__all__ = ["CompactSampler", "DrawingRows", "Results", "Sampler"]

_OP = "Sampler"
_step = ops.sampler_step_.default
_LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
_LEAST_TEXT = 256
_MOST_LOGPROBS = 64
_ALL = slice(None)


class Sampler:
    """Samples a token from each row of logits, in one op per step.

    A row is a sequence. It has its own parameters and state: its text, counts of tokens, and
    position in the noise. So rows can be added, removed and reordered, and a sequence draws
    bitwise the same tokens alone or in any batch. A step edits the logits (bitmask, biases,
    penalties, rules), filters them by the stages of ``dialect``, and draws.
    docs/reference/sampler.md defines each stage. On CPU and CUDA (emulated, not yet run on a GPU).

    Parameters
    ----------
    batch : int
        Number of rows, at least 0. At first each has a sequence without a prompt.
    vocab : int
        Number of logits in a row.
    device : torch.device or str, optional
        "cpu", the default, or a CUDA device: of the logits and of all results of ``sample``.
    dialect : str
        "lmdecode", "transformers", "vllm", "llama.cpp" or "sglang": the system whose order of
        stages, and whose rules at ties and boundaries, apply.
    num_logprobs : int, optional
        0 to 64. ``sample`` then returns ``logprob`` and ``rank`` of the chosen tokens, and
        ``top_ids`` and ``top_logprobs`` of this number of best tokens.
    logprobs_mode : str
        "raw_logprobs": of the input logits; "processed_logprobs": of the sampled distribution.
    return_logits, return_kept_set, return_stages : bool
        Whether ``sample`` returns ``kept_logits``, ``kept_set`` and ``stage_counts``.

    reuse_outputs : bool
        Whether all results but ``index``, ``logprob``, ``rank`` and ``kept_set`` are the sampler's
        own memory, which the next call overwrites: it saves a copy of each. False: all are new.
    **parameters
        Those of ``SamplingParameters``. Any number may be a list or a tensor with one value for
        each row. One int as the seed gives row i the same seed as ``top_k_top_p_sample``; < 0 draws
        the most probable token. If unset, each row draws a seed from torch's generator when its
        sequence begins.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.

    Examples
    --------
    >>> sampler = lmdecode.Sampler(2, 1000, temperature=0.8, top_k=50, repetition_penalty=1.1)
    >>> logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    >>> sampler.sample(logits).index.shape
    torch.Size([2])
    """

    def __init__(
        self,
        batch: int,
        vocab: int,
        *,
        device: torch.device | str | None = None,
        dialect: str = "lmdecode",
        num_logprobs: int | None = None,
        logprobs_mode: str = "raw_logprobs",
        return_logits: bool = False,
        return_kept_set: bool = False,
        return_stages: bool = False,
        reuse_outputs: bool = False,
        **parameters: Unpack[BatchParameters[IntRows, FloatRows]],
    ) -> None:
        self.batch = check_int(_OP, "batch", batch, 0, (1 << 31) - 1, limits="0 to 2^31 - 1")
        self.vocab = check_int(_OP, "vocab", vocab, 1, (1 << 31) - 1, limits="1 to 2^31 - 1")
        self.device = checked_device(_OP, device)
        check_choice(_OP, "dialect", dialect, SAMPLER_DIALECTS)
        check_choice(_OP, "logprobs_mode", logprobs_mode, _LOGPROBS_MODES)
        self.dialect = dialect
        if num_logprobs is not None:
            most = min(_MOST_LOGPROBS, vocab)
            num_logprobs = check_int(_OP, "num_logprobs", num_logprobs, 0, most)
        self.num_logprobs = num_logprobs
        self._num_logprobs = -1 if num_logprobs is None else num_logprobs
        names = ("return_logits", "return_kept_set", "return_stages", "reuse_outputs")
        self._returns = (return_logits, return_kept_set, return_stages, reuse_outputs)
        for name, value in zip(names, self._returns, strict=True):
            check_bool(_OP, name, value)
        self._flags = RAW * (logprobs_mode == "raw_logprobs") | COUNTS * return_stages
        self._new_outputs()
        self._defaults = check_parameters(parameters, self.vocab, self.batch, Sampler.__init__)
        rows: list[RowRules] = []
        before: dict[str, Any] | None = None
        for row in range(self.batch):
            own = parameters_of_row(self._defaults, row)
            seed, is_same = own.pop("seed", 0), own == before  # as where they are numbers
            rows.append(with_seed(rows[-1], seed) if is_same else rules_of_row(own, dialect, seed))
            before = own
        text_capacity = _LEAST_TEXT if any(rules.keeps_text for rules in rows) else 0
        rules_capacity = max((len(rules.rules) for rules in rows), default=0)
        self._sizes = self.vocab, text_capacity, rules_capacity
        state = new_zeros(self.batch, ops.sampler_row_bytes(*self._sizes))
        for row, rules in enumerate(rows):
            self._insert_into(state, row, rules, new_zeros(0, dtype=torch.int64))
        if "seed" not in self._defaults:  # nothing is wrong: torch's generator goes on
            state.view(torch.int64)[:, SEED] = draw_seeds(self.batch)
        self._state = self._on_device(state)
        self._longest = self._longest_text()

    def __repr__(self) -> str:
        given = [f"{name}={shown(value)}" for name, value in self._defaults.items()]
        place = [] if self.device.type == "cpu" else [f"device={str(self.device)!r}"]
        own = [f"{self.batch}, {self.vocab}, dialect={self.dialect!r}", *place]
        return f"Sampler({', '.join([*own, *given])})"

    # ---- sequences

    def insert(
        self, row: int, prompt: Any = None, **parameters: Unpack[SamplingParameters]
    ) -> None:
        """Begin a sequence in a row, and discard the row's former one.

        Parameters
        ----------
        row
            0 to batch - 1.
        prompt
            The prompt's tokens: a list of ints or a tensor [n]. The noise starts at its length.
            Penalties on prompts apply to it.
        **parameters
            As of the constructor, with numbers for this row. The constructor's values are the
            defaults. Without a seed in either, a new one is drawn.

        Raises
        ------
        ValueError, TypeError
            Names the argument, what came and what was expected; nothing has changed.
        """
        row = self._check_row("insert", row)
        tokens = token_tensor("insert", "prompt", () if prompt is None else prompt)
        own = parameters_of_row(self._defaults, row)
        own.update(check_parameters(parameters, self.vocab, of=self.insert))
        for name, value in parameters.items():
            if value is None:
                own.pop(name, None)
        rules = rules_of_row(own, self.dialect, own.get("seed", 0))
        self._begin(row, rules, tokens, draws_seed="seed" not in own)

    def remove(self, row: int) -> None:
        """End the sequence of a row: its index is -1 until another one begins."""
        row = self._check_row("remove", row)
        self._fields()[row, ACTIVE] = 0

    def reorder_(self, rows: Sequence[int] | Tensor) -> None:
        """Set row i to the sequence of row ``rows[i]``, with its seed and parameters.

        Parameters
        ----------
        rows
            [batch] ints, each 0 to batch - 1; a row may occur several times.
        """
        picked = token_tensor("reorder_", "rows", rows)
        if len(picked) != self.batch:
            came = f"rows has {len(picked)} numbers"
            raise ValueError(f"{_OP}.reorder_: {came}; expected {self.batch}")
        for i, row in enumerate(picked.tolist()):
            check_int(f"{_OP}.reorder_", f"rows[{i}]", row, 0, self.batch - 1)
        self._state.copy_(self._state[picked])

    def accept(self, row: int, tokens: int | Sequence[int] | Tensor) -> None:
        """Append tokens that were chosen elsewhere; they count as output.

        Parameters
        ----------
        row
            0 to batch - 1.
        tokens
            One, a list or a tensor [n].
        """
        row = self._check_row("accept", row)
        ids = token_tensor("accept", "tokens", tokens)
        self._find_room(len(ids), slice(row, row + 1))
        with self._row_on_host(row, "accept") as (state, at):
            ops.sampler_accept_(state, *self._sizes, at, ids)

    def rewind(self, row: int, n: int) -> None:
        """Remove the last n accepted tokens, and undo their effect on counts and stages."""
        row = self._check_row("rewind", row)
        n = check_int(f"{_OP}.rewind", "n", n)
        with self._row_on_host(row, "rewind") as (state, at):
            ops.sampler_rewind_(state, *self._sizes, at, n)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sequences, for ``torch.save`` and ``load_state_dict``."""
        return {
            "batch": self.batch,
            "vocab": self.vocab,
            "order": self.dialect,
            "text_capacity": self._sizes[1],
            "rules_capacity": self._sizes[2],
            "state": self._state.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the sequences of a sampler with the same batch, vocabulary and dialect."""
        op = f"{_OP}.load_state_dict"
        if not isinstance(state, Mapping):
            raise type_error(op, "state", state, "a dict of state_dict")
        for name in ("batch", "vocab", "order", "text_capacity", "rules_capacity", "state"):
            if name not in state:
                raise ValueError(f"{op}: state has no {name!r}")
        for name, own in (("batch", self.batch), ("vocab", self.vocab), ("order", self.dialect)):
            if isinstance(state[name], Tensor) or state[name] != own:
                raise ValueError(f"{op}: state has {name} {state[name]}; expected {own}")
        sizes = (
            self.vocab,
            check_count(op, "state['text_capacity']", state["text_capacity"], 0),
            check_count(op, "state['rules_capacity']", state["rules_capacity"], 0),
        )
        saved, shape = state["state"], [self.batch, ops.sampler_row_bytes(*sizes)]
        check_dense_tensor(op, "state['state']", saved)
        # Before memory is taken: sizes that came with the state may ask for any amount of it.
        if list(saved.shape) != shape:
            raise ValueError(
                f"{op}: state['state'] has shape {list(saved.shape)}; expected {shape}, its sizes'"
            )
        memory = new_zeros(*shape)
        saved = saved.cpu().contiguous()
        ops.sampler_copy_(memory, *sizes[1:], saved, *sizes[1:], self.vocab)
        fields = memory.view(torch.int64)
        check_saved(fields[fields[:, ACTIVE] != 0])
        self._state, self._sizes = self._on_device(memory), sizes
        self._longest = self._longest_text()

    @property
    def output_lengths(self) -> Tensor:
        """[batch] int64: number of accepted tokens of each row, -1 without a sequence."""
        fields = self._fields()
        return torch.where(fields[:, ACTIVE] != 0, fields[:, OUTPUT_LENGTH], -1)

    # ---- steps

    def sample(
        self, logits: Tensor, bitmask: Tensor | None = None, accept: bool = True
    ) -> SamplerOutput:
        """Choose a token for every row.

        Parameters
        ----------
        logits
            [batch, vocab] float32, float16 or bfloat16, any strides. NaN counts as -inf.
        bitmask
            [batch, ceil(vocab / 32)] int32: bit t % 32 of word t // 32 is set where token t is
            allowed, as xgrammar and llguidance write it.
        accept
            Whether to append the chosen tokens to the sequences.

        Returns
        -------
        SamplerOutput
            New tensors, unless the sampler was made with ``reuse_outputs=True``.

        Raises
        ------
        ValueError, TypeError
            Names the argument, what came and what was expected; nothing has changed.
        """
        flags = self._flags
        if accept is not True and accept is not False:
            check_bool(f"{_OP}.sample", "accept", accept)
        if accept:
            flags |= ACCEPT
            self._find_room(1)
        if type(logits) is not Tensor or logits.requires_grad:
            logits = _plain_logits(logits)
        if bitmask is not None and not isinstance(bitmask, Tensor):
            raise type_error(f"{_OP}.sample", "bitmask", bitmask, "a tensor or None")
        _step(
            self._state, logits, bitmask, *self._outputs.to_write(), *self._sizes,
            self._num_logprobs, flags,
        )  # fmt: skip
        return self._outputs.of_step()

    def _verify(
        self,
        logits: Tensor,
        bitmask: Tensor | None,
        draft: Tensor,
        parents: Tensor | None,
        num_draft: Tensor | None,
        draft_logits: Tensor | None,
        rejection: bool,
        rows: slice = _ALL,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Call the op of ``verify_draft``; return tokens, path, num_accepted and status."""
        drafts, device = draft.shape[1], self.device
        self._find_room(drafts + 1, rows)  # as if all were accepted
        state = self._state[rows]
        batch = len(state)
        results = new_results(batch, -1, False, device)
        tokens = new_zeros(batch, drafts + 1, dtype=torch.int64, device=device)
        path = new_zeros(batch, drafts, dtype=torch.int64, device=device)
        num_accepted = new_zeros(batch, dtype=torch.int64, device=device)
        ops.sampler_verify_(
            state, logits, bitmask, draft, parents, num_draft, draft_logits, results.memory,
            tokens, path, num_accepted, *self._sizes, rejection,
        )  # fmt: skip
        return tokens, path, num_accepted, results.status

    # ---- the state

    def _new_outputs(self) -> None:
        self._outputs = Outputs(
            self.batch, self.vocab, self._num_logprobs, self._returns, self.device
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_outputs"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._new_outputs()

    def _check_row(self, method: str, row: int) -> int:
        limits = None if self.batch else "a sampler with rows"
        return check_int(f"{_OP}.{method}", "row", row, 0, self.batch - 1, limits=limits)

    def _fields(self) -> Tensor:
        return self._state.view(torch.int64)

    def _longest_text(self, rows: slice = _ALL) -> int:
        """Return the tokens of the longest text of some rows: -MAX_INT without texts."""
        fields = self._fields()[rows]
        lengths = fields[:, LENGTH][fields[:, ACTIVE] * fields[:, KEEPS_TEXT] != 0]
        return max(lengths.tolist(), default=-MAX_INT)

    def _find_room(self, tokens: int, rows: slice = _ALL) -> None:
        """Have room for so many more tokens in each text of some rows.

        An op does not grow rows, and on a device it cannot tell the host in time. No text is longer
        than ``_longest``, which counts on without a look at the rows.
        """
        if self._longest + tokens > self._sizes[1]:
            self._make_room(self._longest_text(rows) + tokens, 0)
            self._longest = self._longest_text()
        self._longest += tokens

    def _make_room(self, text: int, rules: int) -> None:
        """Grow the capacity of texts (tokens) and of rules (numbers), where needed."""
        vocab, *before = self._sizes
        if text <= before[0] and rules <= before[1]:
            return
        if text > before[0]:
            text = max(_LEAST_TEXT, 1 << (text - 1).bit_length())
        sizes = max(text, before[0]), max(rules, before[1])
        state = new_zeros(self.batch, ops.sampler_row_bytes(vocab, *sizes))
        ops.sampler_copy_(state, *sizes, self._state.cpu(), *before, vocab)
        self._state, self._sizes = self._on_device(state), (vocab, *sizes)

    def _begin(
        self, row: int, rules: RowRules, tokens: Tensor, *, draws_seed: bool = False
    ) -> None:
        text = len(tokens) if rules.keeps_text else -MAX_INT
        self._longest = max(self._longest, text)
        self._make_room(text + 1, len(rules.rules))
        with self._row_on_host(row) as (state, at):
            self._insert_into(state, at, rules, tokens)
            if draws_seed:
                state.view(torch.int64)[at, SEED] = draw_seeds(1)[0]

    def _insert_into(self, state: Tensor, row: int, rules: RowRules, prompt: Tensor) -> None:
        ops.sampler_insert_(
            state, *self._sizes, row, rules.integers, rules.numbers, rules.rules, prompt
        )

    def _on_device(self, state: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return state.to(self.device)

    @contextmanager
    def _row_on_host(self, row: int, method: str = "") -> Iterator[tuple[Tensor, int]]:
        """Yield rows on the CPU, for the ops that change them, and the index of this row in them.

        A row on a device is copied to the CPU and back, unless an error is raised. With a method,
        there the row must have a sequence; on the CPU the op looks.
        """
        if self.device.type == "cpu":
            yield self._state, row
            return
        memory = self._state[row : row + 1].clone(memory_format=torch.contiguous_format).cpu()
        if method and memory.view(torch.int64)[0, ACTIVE] == 0:
            expected = "expected one that insert() began"
            raise ValueError(f"{_OP}.{method}: row {row} has no sequence; {expected}")
        yield memory, 0
        self._state[row : row + 1].copy_(memory)


def _plain_logits(logits: Any) -> Tensor:
    if not isinstance(logits, Tensor):
        raise type_error(f"{_OP}.sample", "logits", logits, "a tensor")
    return logits.detach()


class DrawingRows(NamedTuple):
    """Rows of a sampler as ``causal_steps_`` takes them."""

    state: Tensor
    text_capacity: int
    rules_capacity: int
    results: Tensor


class CompactSampler(Sampler):
    """A ``Sampler`` with its sequences in the first rows; a step computes only these.

    Sequences come by ``begin`` and go by ``end`` and ``clear``, which count them.
    """

    def __init__(self, rows: int, vocab: int, dialect: str) -> None:
        super().__init__(rows, vocab, dialect=dialect, temperature=0.0, seed=0)
        self._results: tuple[tuple[int, int], Results] | None = None
        self.count = rows
        self.clear()

    def begin(self, prompt: Tensor, rules: RowRules) -> None:
        """Begin a sequence, [n] int64 tokens, in the row after the others."""
        self._begin(self.count, rules, prompt)
        self.count += 1

    def end(self, row: int) -> None:
        """End the sequence of a row; the last one moves there."""
        last = self.count - 1
        if row < last:
            self._state[row] = self._state[last]
        self.remove(last)
        self.count = last

    def clear(self) -> None:
        """End all sequences."""
        self._fields()[:, ACTIVE] = 0
        self.count = 0

    def step(
        self, logits: Tensor, bitmask: Tensor | None, num_logprobs: int, first: int = 0
    ) -> Results:
        """Choose a token for each of the n sequences from row ``first`` on, and append it.

        ``logits`` are [n, V] float32 with contiguous rows, ``bitmask`` is [n, ceil(V / 32)] int32
        as of ``Sampler.sample``, ``num_logprobs`` is that of ``Sampler``, of the input logits, or
        -1. The next step of as many rows overwrites the results.
        """
        count = len(logits)
        results = self._results_of(count, num_logprobs)
        self._find_room(1)
        _step(
            self._state[first : first + count], logits, bitmask, results.memory, None, None,
            None, *self._sizes, num_logprobs, ACCEPT | RAW,
        )  # fmt: skip
        return results

    def _results_of(self, count: int, num_logprobs: int) -> Results:
        key = count, num_logprobs
        if self._results is None or self._results[0] != key:
            self._results = key, new_results(count, num_logprobs, False, self.device)
        return self._results[1]

    def run(self, count: int, steps: int, run: Callable[[DrawingRows], int]) -> tuple[int, Results]:
        """Let ``run`` choose and append at most ``steps`` tokens of each of the first rows.

        It returns the number of steps, which is returned with the results of the last one.
        """
        results = self._results_of(count, -1)
        self._find_room(steps)
        _, text, rules = self._sizes
        return run(DrawingRows(self._state[:count], text, rules, results.memory)), results

    def verify(
        self, logits: Tensor, draft: Tensor, first: int = 0
    ) -> tuple[list[list[int]], list[int]]:
        """Choose tokens while they equal those of a draft, and one more, as ``verify_draft`` does.

        ``logits`` are [n, D + 1, V] float32, contiguous, and ``draft`` is [n, D] int64, of the n
        rows from ``first`` on. Returns the chosen tokens, which are appended to the sequences, and
        the status of each row. A row with a status other than 0 gets no tokens.
        """
        rows = slice(first, first + len(draft))
        tokens, _, accepted, states = self._verify(
            logits, None, draft, None, None, None, False, rows
        )
        status, chosen = states.tolist(), []
        for row, (line, right) in enumerate(zip(tokens.tolist(), accepted.tolist(), strict=True)):
            if status[row]:
                self.rewind(first + row, right + 1)
            chosen.append([] if status[row] else line[: right + 1])
        return chosen, status

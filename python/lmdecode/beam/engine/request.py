"""A request of ``BeamSearch``, its id and its token rules, and its result."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor

from lmdecode._checks import (
    MAX_INT,
    check_choice,
    check_count,
    check_number,
    dtype_name,
    type_error,
)
from lmdecode.beam.state import EARLY_STOPPING, SEARCH_DIALECTS, EarlyStopping, SearchDialect
from lmdecode.beam.token_rules import ALWAYS, TokenRules, one_slot
from lmdecode.beam.trie import Trie

__all__ = [
    "BeamRequest",
    "BeamResult",
    "RequestIds",
    "check_tokens_of_request",
    "position_of_request",
    "token_rules_of_request",
]

_MAX_FLOAT32 = torch.finfo(torch.float32).max


def _fail(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"BeamRequest: {name} is {value!r}; expected {expected}")


def _integer(name: str, value: Any, at_least: int) -> int:
    return int(check_count("BeamRequest", name, value, at_least))


def _number(name: str, value: object, most: float = sys.float_info.max) -> float:
    expected = f"a finite number of {64 if most > _MAX_FLOAT32 else 32} bits"
    try:
        converted = check_number("BeamRequest", name, value)
    except ValueError:  # an int that no float64 holds
        raise _fail(name, value, expected) from None
    if not abs(converted) <= most:
        raise _fail(name, value, expected)
    return converted


def _tokens(name: str, value: object) -> tuple[int, ...]:
    """Return the tokens of None, an int, or any sequence, 1-D tensor or 1-D array of ints."""
    if value is None:
        return ()
    if isinstance(value, Tensor):
        if value.dim() > 1 or value.is_floating_point() or value.dtype == torch.bool:
            raise ValueError(
                f"BeamRequest: {name} is a {dtype_name(value)} tensor of shape "
                f"{list(value.shape)}; expected integers in one dimension"
            )
        value = value.tolist()
    elif hasattr(value, "__array__") and hasattr(value, "tolist"):
        shape = list(getattr(value, "shape", ()))
        if len(shape) > 1:
            raise ValueError(
                f"BeamRequest: {name} is an array of shape {shape}; expected one dimension"
            )
        value = value.tolist()
    if isinstance(value, int):
        value = (value,)
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise TypeError(
            f"BeamRequest: {name} is of type {type(value).__name__}; expected token ids"
        )
    return tuple(_integer(name, token, 0) for token in value)


@dataclass(frozen=True, eq=False)
class BeamRequest:
    """One beam search: a prompt and how to continue it.

    Names and meanings follow transformers' ``generate()`` where it has them.

    Parameters
    ----------
    prompt_ids : sequence of int, Tensor or array
        ``[length]``, at least one token; for an encoder-decoder model, the decoder's prompt.
    max_new_tokens : int
        Maximum number of new tokens, at least 1.
    num_beams : int
        Number of beams of all groups together.
    num_return_sequences : int
        At most ``num_beams``.
    length_penalty : float
        A finished sequence scores ``sum of log-probs / length ** length_penalty``.
    early_stopping : bool or "never"
        When the search is done, see docs/reference/beam.md.
    eos_token_id : int, sequence of int or None
        End tokens.
    pad_token_id : int, optional
        Fills short results; by default the first end token, or 0.
    num_beam_groups : int
        Groups of a diverse beam search, a divisor of ``num_beams``.
    diversity_penalty : float
        Subtracted from a token's log-probability for each time that an earlier group chose it in
        the same step. It needs more than one group.
    min_new_tokens : int
        Number of new tokens before which end tokens are banned.
    repetition_penalty : float
        Above 0; 1 is off. The prompt counts.
    no_repeat_ngram_size : int
        0 is off.
    suppress_tokens : sequence of int
        Never generated.
    forced_bos_token_id : int, optional
        The second token, if the prompt is one token, as in transformers.
    forced_eos_token_id : int, optional
        The last token, if ``max_new_tokens`` is reached.
    logit_bias : mapping of int to float
        Added to the log-probability of a token.
    patience : float
        Above 0: ``round(patience * num_beams)`` finished sequences are kept
        (CTranslate2), of each group.
    coverage_penalty : float
        ``coverage_penalty * sum(log(min(coverage, 1)))`` over the attended source positions is
        added to the score of a finished sequence (Wu et al. 2016, as in CTranslate2). ``step`` then
        needs the attention. Not with the dialect "scorer".
    trie : Trie, optional
        Constrains the generated tokens to one of its sequences; ``max_new_tokens`` of its
        ``longest`` leave room for all. The search ends when no beam can continue. Not with the
        dialect "scorer".
    dialect : {"generate", "scorer", "fairseq"}
        transformers from 4.50 on; its ``BeamSearchScorer``; fairseq's ``SequenceGenerator``.
    request_id : hashable, optional
        By default a number that the engine assigns.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.
    """

    prompt_ids: Any
    _: KW_ONLY
    max_new_tokens: int
    num_beams: int = 4
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    eos_token_id: Any = None
    pad_token_id: int | None = None
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    suppress_tokens: Any = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    patience: float = 1.0
    coverage_penalty: float = 0.0
    trie: Trie | None = None
    dialect: SearchDialect = "generate"
    request_id: Hashable | None = None

    def __post_init__(self) -> None:
        """Check every argument, and bring tokens into tuples."""

        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name in ("prompt_ids", "eos_token_id", "suppress_tokens"):
            put(name, _tokens(name, getattr(self, name)))
        if not self.prompt_ids:
            raise ValueError("BeamRequest: prompt_ids is empty; expected at least one token")
        for name in ("max_new_tokens", "num_beams", "num_return_sequences", "num_beam_groups"):
            put(name, _integer(name, getattr(self, name), 1))
        for name in ("min_new_tokens", "no_repeat_ngram_size"):
            put(name, _integer(name, getattr(self, name), 0))
        for name in ("pad_token_id", "forced_bos_token_id", "forced_eos_token_id"):
            if getattr(self, name) is not None:
                put(name, _integer(name, getattr(self, name), 0))
        for name in ("length_penalty", "patience", "coverage_penalty"):
            put(name, _number(name, getattr(self, name)))
        for name in ("diversity_penalty", "repetition_penalty"):
            put(name, _number(name, getattr(self, name), _MAX_FLOAT32))
        for name in ("repetition_penalty", "patience"):
            if not getattr(self, name) > 0:
                raise _fail(name, getattr(self, name), "a number above 0")
        if not math.isfinite(self.patience * self.num_beams):
            raise _fail("patience", self.patience, "a number that num_beams does not make infinite")
        if not torch.tensor(self.repetition_penalty, dtype=torch.float32, device="cpu") > 0:
            raise _fail("repetition_penalty", self.repetition_penalty, "above 0 in float32")
        if not isinstance(self.logit_bias, Mapping):
            kind = type(self.logit_bias).__name__
            raise TypeError(
                f"BeamRequest: logit_bias is of type {kind}; expected a mapping of tokens to floats"
            )
        bias = {
            _integer("a token of logit_bias", token, 0): _number(
                "a value of logit_bias", value, _MAX_FLOAT32
            )
            for token, value in self.logit_bias.items()
        }
        put("logit_bias", bias)
        if not isinstance(self.early_stopping, (bool, str)) or (
            self.early_stopping not in EARLY_STOPPING
        ):
            raise _fail("early_stopping", self.early_stopping, 'True, False or "never"')
        check_choice("BeamRequest", "dialect", self.dialect, SEARCH_DIALECTS)
        if self.trie is not None and not isinstance(self.trie, Trie):
            raise type_error("BeamRequest", "trie", self.trie, "a Trie or None")
        try:
            hash(self.request_id)
        except TypeError:
            kind = type(self.request_id).__name__
            raise TypeError(
                f"BeamRequest: request_id is of type {kind}; expected something hashable"
            ) from None
        self._check_together()

    def _check_together(self) -> None:
        for name in ("max_new_tokens", "min_new_tokens"):
            most = MAX_INT - len(self.prompt_ids)
            if getattr(self, name) > most:
                raise _fail(name, getattr(self, name), f"at most {most}: the prompt counts too")
        if self.num_return_sequences > self.num_beams:
            raise _fail(
                "num_return_sequences",
                self.num_return_sequences,
                f"at most num_beams, {self.num_beams}",
            )
        if self.num_beams % self.num_beam_groups:
            raise _fail(
                "num_beam_groups", self.num_beam_groups, f"a divisor of num_beams, {self.num_beams}"
            )
        if self.num_hypotheses * self.num_beam_groups < self.num_return_sequences:
            raise _fail(
                "patience",
                self.patience,
                f"more: {self.num_hypotheses * self.num_beam_groups} finished sequences would be "
                f"kept, fewer than num_return_sequences, {self.num_return_sequences}",
            )
        if self.num_beam_groups == 1 and self.diversity_penalty:
            raise _fail("diversity_penalty", self.diversity_penalty, "0 where num_beam_groups is 1")
        if self.dialect == "scorer" and self.coverage_penalty:
            raise _fail(
                "coverage_penalty",
                self.coverage_penalty,
                '0 with dialect="scorer", which ends with sequences that were never finished',
            )
        if self.dialect == "scorer" and self.trie is not None:
            raise _fail("trie", self.trie, 'None with dialect="scorer", which go on with any token')
        if self.dialect == "fairseq" and self.early_stopping is not False:
            raise _fail(
                "early_stopping",
                self.early_stopping,
                'False with dialect="fairseq", which stops when enough sequences are finished',
            )

    @property
    def group_size(self) -> int:
        """Beams of each group."""
        return self.num_beams // self.num_beam_groups

    @property
    def num_hypotheses(self) -> int:
        """Finished sequences that each group keeps; halves are rounded up, as C does it."""
        return max(1, math.floor(self.group_size * self.patience + 0.5))

    @property
    def num_candidates(self) -> int:
        """Candidates of each group: enough that ``group_size`` of them do not end."""
        return max(2, 1 + len(self.eos_token_id)) * self.group_size

    @property
    def max_length(self) -> int:
        """Maximum length of the sequences, prompt included."""
        return len(self.prompt_ids) + self.max_new_tokens

    @property
    def pad_token(self) -> int:
        """Token that pads short results."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        return int(self.eos_token_id[0]) if self.eos_token_id else 0


@dataclass(frozen=True, eq=False)
class BeamResult:
    """Finished sequences of one request, best first; tensors are on the engine's device.

    Attributes
    ----------
    request_id
        As ``insert`` returned it.
    sequences : Tensor
        [n, longest] int64, prompt included, pad tokens after the end. n is
        ``num_return_sequences``, or less if fewer were finished.
    scores : Tensor
        [n] float64, descending: the ranking scores. The values are float32 ones, as in
        transformers, except with the dialect "scorer".
    lengths : Tensor
        [n] int64, prompt included. With the dialect "scorer", the end token is not counted, though
        ``sequences`` has it if ``max_new_tokens`` has room for it.
    log_probs : Tensor
        [n, longest - prompt] float32: log-probability of each new token, after the processors; 0
        after the end.
    beam_indices : Tensor
        [n, longest - prompt] int32: the beam, counted within the group, that each new token was
        added to; -1 after the end.
    groups : Tensor
        [n] int64: the group of the diverse search that found each sequence.
    prompt_length : int
        Number of tokens of the prompt.
    num_steps : int
        Number of steps of the search.
    status : int
        0, or a sum of: 1, a logit was NaN; 2, no logit above ``-inf``, or no beam left; 4, a score
        was NaN or ``+inf``; 8, fewer candidates continued than there are beams (dialect "scorer").
        If not 0, the search ended early with the sequences found so far.
    """

    request_id: Hashable
    sequences: Tensor
    scores: Tensor
    lengths: Tensor
    log_probs: Tensor
    beam_indices: Tensor
    groups: Tensor
    prompt_length: int
    num_steps: int
    status: int

    def new_tokens(self, rank: int = 0) -> list[int]:
        """Return the tokens that were generated, best sequence first; end token as in lengths."""
        return self.sequences[rank, self.prompt_length : int(self.lengths[rank])].tolist()


class RequestIds:
    """The ids of requests that run or wait for ``pop_finished``."""

    def __init__(self) -> None:
        self._taken: set[Hashable] = set()
        self._numbers = itertools.count()

    def check(self, op: str, request: object) -> None:
        """Raise TypeError unless it is a ``BeamRequest``, ValueError if its id is in use."""
        if not isinstance(request, BeamRequest):
            kind = type(request).__name__
            raise TypeError(f"{op}: request is of type {kind}; expected a BeamRequest")
        request_id = request.request_id
        if request_id is not None and request_id in self._taken:
            raise ValueError(
                f"{op}: request_id {request_id!r} is in use, as request_id {request_id!r} is that "
                "of a request which is running, or waits for pop_finished; expected another"
            )

    def new(self, request: BeamRequest) -> Hashable:
        """Return the id for a checked request."""
        if request.request_id is not None:
            return request.request_id
        return next(number for number in self._numbers if number not in self._taken)

    def add(self, request_id: Hashable) -> None:
        """Take an id."""
        self._taken.add(request_id)

    def discard(self, request_id: Hashable) -> None:
        """Give an id back."""
        self._taken.discard(request_id)


def position_of_request(op: str, request_id: object, running: Sequence[Hashable]) -> int:
    """Return the position of a request among the running ones; raise ValueError if it is none."""
    if request_id not in running:
        raise ValueError(
            f"{op}: request_id is {request_id!r}; expected one that is running: {list(running)}"
        )
    return list(running).index(request_id)


def check_tokens_of_request(op: str, request: BeamRequest, vocab_size: int) -> None:
    """Raise ValueError for a token to be written that is not in the vocabulary."""
    forced = (request.forced_bos_token_id, request.forced_eos_token_id)
    for name, tokens in (
        ("prompt_ids", request.prompt_ids),
        ("pad_token_id, by default the first end token,", (request.pad_token,)),
        ("forced_bos_token_id", forced[:1]),
        ("forced_eos_token_id", forced[1:]),
    ):
        if any(token is not None and token >= vocab_size for token in tokens):
            raise ValueError(f"{op}: {name} is {list(tokens)}; expected tokens below {vocab_size}")


def token_rules_of_request(request: BeamRequest, vocab_size: int) -> TokenRules:
    """Return the rules of one slot. Token ids >= vocab_size are ignored."""
    prompt = len(request.prompt_ids)
    bans = [(token, 0, ALWAYS, 1) for token in request.suppress_tokens]
    if request.min_new_tokens:
        last = prompt + request.min_new_tokens - 1
        bans += [(token, 0, last, 0) for token in request.eos_token_id]
    forced = [
        (length, token)
        for length, token in (
            (1, request.forced_bos_token_id),
            (request.max_length - 1, request.forced_eos_token_id),
        )
        if token is not None and token < vocab_size
    ]
    bias = None
    values = {token: value for token, value in request.logit_bias.items() if token < vocab_size}
    if values:
        bias = torch.zeros(vocab_size, dtype=torch.float32, device="cpu")
        bias[list(values)] = torch.tensor(list(values.values()), dtype=torch.float32, device="cpu")
    return one_slot(
        repetition_penalty=request.repetition_penalty,
        no_repeat_ngram_size=request.no_repeat_ngram_size,
        diversity_penalty=request.diversity_penalty,
        bans=bans,
        forced=forced,
        bias=bias,
    )

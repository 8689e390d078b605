"""``log_softmax_top_k`` in plain torch, a row at a time, and the ops of tries.

A row's log-softmax is ``x - max - log(sum of exp(x - max))`` with the sum taken over integer masses
(see ``arithmetic``), so it does not depend on the order of its terms; the rest is in float64 up to
one rounding to f32. Processors change it in f32, and the beam's score is added in f32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmdecode.beam.types import (
    REAL_BEAM_SCORE_BOUND,
    STATUS_EMPTY,
    STATUS_NAN,
    STATUS_SCORE,
    BeamCandidates,
)
from lmdecode.reference.arithmetic import (
    exponent_factor,
    log_scalar,
    mass_fraction_bits,
    sum_masses,
    token_mass,
)

_INF = math.inf


def log_softmax_row(x: torch.Tensor) -> torch.Tensor:
    """Return the log-softmax of a row [V] float32 without NaN, with an element above -inf."""
    top = x.max().item() + 0.0  # never -0.0
    if top == _INF:
        share = x == _INF
        log_sum = log_scalar(float(share.sum()))
        difference = torch.where(share, 0.0, -_INF).double()
    else:
        bits = mass_fraction_bits(len(x))
        total = sum_masses(token_mass(x, top, exponent_factor(1.0), bits))
        log_sum = log_scalar(float(total) * 2.0**-bits)
        difference = x.double() - top
    return (difference - log_sum).float()


@dataclass(frozen=True)
class RowProcessors:
    """The processors of one row; ``None``, 0 or an empty list where one is off.

    Numbers that are no token of the vocabulary stand for none.
    """

    history: list[int]
    length: int
    repetition_penalty: torch.Tensor
    no_repeat_ngram_size: int
    end_tokens: list[int]
    min_length: int
    suppressed_tokens: list[int]
    forced_token: int
    diversity_tokens: list[int]
    diversity_penalty: torch.Tensor
    bias: torch.Tensor | None
    token_bitmask: torch.Tensor | None
    allowed_tokens: list[int] | None  # of the row's node in a trie

    def __call__(self, log_probs: torch.Tensor) -> torch.Tensor | None:
        """Return [V] processed log-probabilities, or None where one of them came to be NaN."""
        vocab = len(log_probs)
        if self.bias is not None:
            log_probs = log_probs + self.bias
        counts = torch.zeros(vocab)
        for token in self._tokens(self.diversity_tokens, vocab):
            counts[token] += 1.0
        reduced = log_probs - self.diversity_penalty * counts
        log_probs = torch.where(counts > 0, reduced, log_probs)
        repeated = torch.zeros(vocab, dtype=torch.bool)
        repeated[self._tokens(self.history, vocab)] = True
        penalty = self.repetition_penalty
        penalized = torch.where(log_probs < 0, log_probs * penalty, log_probs / penalty)
        log_probs = torch.where(repeated & (penalty != 1.0), penalized, log_probs)
        if self.allowed_tokens is not None:  # others are not looked at
            allowed_tokens = self._tokens(self.allowed_tokens, vocab)
            only = torch.full_like(log_probs, -_INF)
            only[allowed_tokens] = log_probs[allowed_tokens]
            log_probs = only
        if log_probs.isnan().any():
            return None
        log_probs = log_probs + 0.0  # never -0.0
        log_probs[self._tokens(self.banned_by_ngrams(), vocab)] = -_INF
        if self.length < self.min_length:
            log_probs[self._tokens(self.end_tokens, vocab)] = -_INF
        if self.token_bitmask is not None:
            tokens = torch.arange(vocab)
            allowed = self.token_bitmask[tokens // 32] >> (tokens % 32) & 1
            log_probs[allowed == 0] = -_INF
        if 0 <= self.forced_token < vocab:
            log_probs[:] = -_INF
            log_probs[self.forced_token] = 0.0
        log_probs[self._tokens(self.suppressed_tokens, vocab)] = -_INF
        return log_probs

    def banned_by_ngrams(self) -> list[int]:
        """Return the tokens that would end an n-gram that the history has."""
        size, history = self.no_repeat_ngram_size, self.history
        if size < 1 or len(history) + 1 < size:
            return []
        start = history[len(history) + 1 - size :]
        ngrams = [history[i : i + size] for i in range(len(history) + 1 - size)]
        return [ngram[-1] for ngram in ngrams if ngram[:-1] == start]

    def looks_at(self, beam_score: float) -> bool:
        """Whether a row with this beam score takes part."""
        if self.allowed_tokens is None:
            return beam_score > -_INF
        return beam_score > REAL_BEAM_SCORE_BOUND and (
            bool(self.allowed_tokens) or self.forced_token >= 0
        )

    @staticmethod
    def _tokens(numbers: list[int], vocab: int) -> list[int]:
        return [number for number in numbers if 0 <= number < vocab]


def _row_processors(
    row: int, request: int, requests: int, arguments: dict[str, Any]
) -> RowProcessors:
    """Pick what belongs to a row from the arguments of the op, tensors on the CPU."""

    def number(name: str, off: float) -> Any:
        value = arguments.get(name)
        if isinstance(value, torch.Tensor):
            return value[request]
        return off if value is None else value

    def tokens(name: str) -> list[int]:
        lists = arguments.get(name)
        if lists is None:
            return []
        return (lists if lists.dim() == 1 else lists[request]).tolist()

    def matrix(name: str) -> torch.Tensor | None:
        values = arguments.get(name)
        if values is None or values.dim() == 1:
            return values
        return values[request if len(values) == requests else row]

    sequences, lengths = arguments.get("sequences"), arguments.get("lengths")
    capacity = 0 if sequences is None else sequences.shape[1]
    length = capacity if lengths is None else int(lengths[request])
    forced = arguments.get("forced_tokens")
    return RowProcessors(
        history=[] if sequences is None else sequences[row, :length].tolist(),
        length=length,
        repetition_penalty=torch.as_tensor(number("repetition_penalty", 1.0)).float(),
        no_repeat_ngram_size=int(number("no_repeat_ngram_size", 0)),
        end_tokens=tokens("end_tokens"),
        min_length=int(number("min_lengths", 0)),
        suppressed_tokens=tokens("suppressed_tokens"),
        forced_token=-1
        if forced is None
        else int(forced[request if len(forced) == requests else row]),
        diversity_tokens=tokens("diversity_tokens"),
        diversity_penalty=torch.as_tensor(number("diversity_penalty", 0.0)).float(),
        bias=matrix("bias"),
        token_bitmask=matrix("token_bitmask"),
        allowed_tokens=None
        if arguments.get("trie") is None
        else children(arguments["trie"].tensors, int(arguments["nodes"][row])),
    )


def _request(
    logits: torch.Tensor,
    beam_scores: torch.Tensor,
    num_candidates: int,
    processors: list[RowProcessors],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Return the fields of the result for one request: logits [beams, V], beam_scores [beams]."""
    beams, vocab = logits.shape
    scores, log_probs = torch.full((2, beams, vocab), -_INF)
    status = 0
    for beam in range(beams):
        x, beam_score = logits[beam].float(), beam_scores[beam].item()
        if math.isnan(beam_score) or beam_score == _INF:
            status |= STATUS_SCORE
        elif not processors[beam].looks_at(beam_score):
            continue
        elif x.isnan().any():
            status |= STATUS_NAN
        elif (x == -_INF).all():
            status |= STATUS_EMPTY
        else:
            processed = processors[beam](log_softmax_row(x))
            if processed is None:
                status |= STATUS_NAN
                continue
            log_probs[beam] = processed
            scores[beam] = (processed + beam_scores[beam]) + 0.0
    has_trie = any(row.allowed_tokens is not None for row in processors)
    if not status and not has_trie and (scores == -_INF).all():
        status = STATUS_EMPTY
    flat = scores.reshape(-1)
    if status:
        flat = flat[:0]
    # Stable: at ties the lowest flat index first.
    order = flat.sort(descending=True, stable=True).indices[:num_candidates]
    order = order[flat[order] > -_INF]
    missing = num_candidates - len(order)
    filler = torch.zeros(missing, dtype=torch.int64)
    none = torch.full((missing,), -_INF)
    return (
        torch.cat((flat[order], none)),
        torch.cat((order % vocab, filler)),
        torch.cat((order // vocab, filler)),
        status,
        torch.cat((log_probs.reshape(-1)[order], none)),
    )


def log_softmax_top_k(
    logits: torch.Tensor,
    beam_scores: torch.Tensor,
    num_candidates: int,
    *,
    num_beams: int | Sequence[int] | torch.Tensor,
    **processors: Any,
) -> BeamCandidates:
    """Find the best continuations of each request's beams; see ``lmdecode.log_softmax_top_k``."""
    logits, beam_scores = logits.cpu(), beam_scores.reshape(-1).cpu()
    if isinstance(num_beams, int):
        widths = [num_beams] * (len(logits) // num_beams)
    else:
        widths = torch.as_tensor(num_beams, dtype=torch.int64).tolist()
    arguments = {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in processors.items()
    }
    owners = [request for request, width in enumerate(widths) for _ in range(width)]
    rows = [
        _row_processors(row, request, len(widths), arguments) for row, request in enumerate(owners)
    ]
    ends = list(itertools.accumulate(widths, initial=0))
    requests = [
        _request(logits[begin:end], beam_scores[begin:end], num_candidates, rows[begin:end])
        for begin, end in itertools.pairwise(ends)
    ]
    shape = (len(requests), num_candidates)
    fields = zip(*requests, strict=True) if requests else ((),) * 5
    scores, tokens, beams, status, log_probs = fields
    return BeamCandidates(
        torch.stack(scores) if requests else torch.empty(shape),
        torch.stack(tokens) if requests else torch.empty(shape, dtype=torch.int64),
        torch.stack(beams) if requests else torch.empty(shape, dtype=torch.int64),
        torch.tensor(status, dtype=torch.uint8),
        torch.stack(log_probs) if requests else torch.empty(shape),
    )


def trie_build(sequences: Iterable[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a trie in compressed form.

    Nodes are the prefixes of sequences, the short ones first, prefixes of one length in ascending
    order; so the children of a node are neighbours.

    Parameters
    ----------
    sequences
        Each at least one token of 0 or more.

    Returns
    -------
    tuple of Tensor
        tokens [nodes] int32, the last of each beginning and -1 of the empty one; child_begin
        [nodes + 1] int32: node n has the children child_begin[n] to child_begin[n + 1] - 1; ends
        [nodes] uint8: 1 where a sequence ends.
    """
    items = {tuple(sequence) for sequence in sequences}
    beginnings = {item[:length] for item in items for length in range(len(item) + 1)} | {()}
    nodes = sorted(beginnings, key=lambda beginning: (len(beginning), beginning))
    counts = dict.fromkeys(nodes, 0)
    for node in nodes[1:]:
        counts[node[:-1]] += 1
    child_begin = [1]
    for node in nodes:
        child_begin.append(child_begin[-1] + counts[node])
    return (
        torch.tensor([node[-1] if node else -1 for node in nodes], dtype=torch.int32),
        torch.tensor(child_begin, dtype=torch.int32),
        torch.tensor([node in items for node in nodes], dtype=torch.uint8),
    )


def children(trie: tuple[Tensor, Tensor], node: int) -> list[int]:
    """Return the tokens that may follow a node; none may where there is no such node.

    trie: tokens [nodes] and child_begin [nodes + 1].
    """
    tokens, child_begin = trie
    if not 0 <= node < len(tokens):
        return []
    return tokens[int(child_begin[node]) : int(child_begin[node + 1])].tolist()


def trie_step(trie_tokens: Tensor, child_begin: Tensor, nodes: Tensor, tokens: Tensor) -> Tensor:
    """Return the nodes, [n] int32, that tokens [n] lead to from nodes [n]; -1 where none is."""
    following = []
    for node, token in zip(nodes.tolist(), tokens.tolist(), strict=True):
        allowed = children((trie_tokens, child_begin), node)
        found = token in allowed
        following.append(int(child_begin[node]) + allowed.index(token) if found else -1)
    return torch.tensor(following, dtype=torch.int32)

"""Beam search ops: the best continuations of each request's beams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lmdecode._checks import (
    MAX_INT,
    check_bool,
    check_choice,
    check_count,
    check_int,
    check_layout,
    check_number,
    dtype_name,
    type_error,
)
from lmdecode._ops import ops
from lmdecode._upload import uploaded
from lmdecode.beam.state import (
    SEARCH_DIALECTS,
    BeamFinal,
    BeamParameters,
    BeamState,
    BeamStep,
    SearchDialect,
)
from lmdecode.beam.trie import Trie
from lmdecode.beam.types import BeamCandidates

__all__ = ["BeamCandidates", "beam_finalize", "beam_step", "log_softmax_top_k"]

_OP = "log_softmax_top_k"
_log_softmax_top_k = ops.log_softmax_top_k.default
_beam_step = ops.beam_step.default
_beam_finalize = ops.beam_finalize.default
_log_softmax_top_k_processed = ops.log_softmax_top_k.processed
_log_softmax_top_k_trie = ops.log_softmax_top_k.trie
# As the ops take them that run whole steps.
_MOST_CANDIDATES = 1 << 24
# What a call raises, before it begins, for an argument of a type that the schema does not have.
_WRONG_TYPE = (RuntimeError, TypeError, KeyError)


def _check_types(
    op: str,
    state: object,
    parameters: object,
    dialect: object,
    required: dict[str, Tensor],
    optional: dict[str, Tensor | None],
) -> None:
    """Raise an error that names the argument of a wrong type; called only after a failure."""
    tensors: dict[str, object] = {**required}
    for name, value, kind in (
        ("state", state, BeamState),
        ("parameters", parameters, BeamParameters),
    ):
        if not isinstance(value, kind):
            raise type_error(op, name, value, f"a {kind.__name__}") from None
        tensors.update({f"{name}.{field}": part for field, part in value._asdict().items()})
    tensors.update({name: tensor for name, tensor in optional.items() if tensor is not None})
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            expected = "a tensor or None" if name in optional else "a tensor"
            raise type_error(op, name, tensor, expected) from None
    check_choice(op, "dialect", dialect, SEARCH_DIALECTS)


def _row_offsets(num_beams: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """[requests + 1] int64: where the rows of each request begin, and where the last ends."""
    if isinstance(num_beams, Tensor):
        check_layout(_OP, "num_beams", num_beams)
        if num_beams.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"{_OP}: num_beams has dtype {dtype_name(num_beams)}; expected int64 or int32"
            )
        if num_beams.dim() != 1:
            raise ValueError(
                f"{_OP}: num_beams has shape {list(num_beams.shape)}; expected [requests]"
            )
        if num_beams.device != device:
            raise ValueError(
                f"{_OP}: num_beams is on {num_beams.device}; "
                f"expected the device of logits, {device}"
            )
        ends = num_beams.cumsum(0, dtype=torch.int64)
        return torch.cat((ends.new_zeros(1), ends))
    offsets = [0]
    for beams in num_beams:
        offsets.append(offsets[-1] + check_count(_OP, "num_beams", beams))
    if offsets[-1] > MAX_INT:
        raise ValueError(
            f"{_OP}: num_beams has a sum of {offsets[-1]}; expected the rows of logits"
        )
    return uploaded(offsets, torch.int64, device)


def _tensors(**values: object) -> Iterator[Tensor | None]:
    for name, value in values.items():
        if value is not None and not isinstance(value, Tensor):
            raise type_error(_OP, name, value, "a tensor")
        yield value


def _per_request(name: str, value: object, off: float) -> tuple[Any, Tensor | None]:
    """Return a number for all requests and, where that is meant, one for each instead of it."""
    if isinstance(value, Tensor):
        check_layout(_OP, name, value)
    if value is None or isinstance(value, Tensor):
        return off, value
    if isinstance(off, float):
        return check_number(_OP, name, value, kind="a float or a tensor"), None
    limits = "an int of 64 bits, 0 or more"
    return check_int(_OP, name, value, 0, kind="an int or a tensor", limits=limits), None


def _end_tokens(
    end_tokens: Tensor | None, min_lengths: int | Tensor | None
) -> tuple[Tensor | None, int, Tensor | None]:
    tokens = next(_tensors(end_tokens=end_tokens))
    if min_lengths is None:
        if tokens is not None:
            raise ValueError(f"{_OP}: min_lengths is None; expected a length beside end_tokens")
        return None, 0, None
    if tokens is None:
        raise ValueError(f"{_OP}: end_tokens is None; expected the tokens that min_lengths bans")
    return tokens, *_per_request("min_lengths", min_lengths, 0)


def log_softmax_top_k(
    logits: Tensor,
    beam_scores: Tensor,
    num_candidates: int,
    *,
    num_beams: int | Sequence[int] | Tensor,
    sequences: Tensor | None = None,
    lengths: Tensor | None = None,
    repetition_penalty: float | Tensor | None = None,
    no_repeat_ngram_size: int | Tensor | None = None,
    end_tokens: Tensor | None = None,
    min_lengths: int | Tensor | None = None,
    suppressed_tokens: Tensor | None = None,
    forced_tokens: Tensor | None = None,
    diversity_tokens: Tensor | None = None,
    diversity_penalty: float | Tensor | None = None,
    bias: Tensor | None = None,
    token_bitmask: Tensor | None = None,
    trie: Trie | None = None,
    nodes: Tensor | None = None,
) -> BeamCandidates:
    """Return the best continuations of each request's beams, without materialising log-softmax.

    A candidate is a pair of a beam of the request and a token. Its score is
    ``log_softmax(logits[row])[token] + beam_scores[row]``. Candidates are sorted by score
    descending, then beam, then token. This is ``topk`` of the flat [num_beams * vocab] scores, with
    the lowest index first at ties. Scores are a fixed sequence of f32 and f64 operations on an
    exact integer sum. So a result depends only on the request's rows, not on the batch, the thread
    count or the CPU's vector width (CUDA: the same by design, emulated, not yet run on a GPU).

    The processors act on the log-probabilities of the tokens before the beam's score is added, in
    the order and with the arithmetic of transformers' logits processors, without renormalising:
    ``bias``, diversity, repetition penalty, n-grams, ``end_tokens``, ``token_bitmask``,
    ``forced_tokens``, ``suppressed_tokens``. A token with -inf is not a candidate. A processor is
    off if its argument is None. A number applies to all requests; a tensor has one value for each.
    In lists of tokens, a number outside [0, vocab), such as -1, is ignored.

    Parameters
    ----------
    logits : Tensor
        ``[rows, vocab]`` float32, float16 or bfloat16, any strides; rows >= 0, vocab >= 1. A row
        with logits of +inf shares the probability evenly among these.
    beam_scores : Tensor
        ``[rows]``, or ``[requests, num_beams]`` for an int ``num_beams``, float32: the sums of
        log-probabilities so far. A beam of score -inf is ignored, and its logits are not read.
    num_candidates : int
        Candidates of a request, 1 to 2^24. Beam search takes ``max(2, 1 + number of end tokens) *
        num_beams``.
    num_beams : int, sequence of int or Tensor
        Rows of each request, at least 1: for all requests, or one for each, as int64 or int32 where
        it is a tensor, on the device of the logits. The rows of a request are neighbours, in the
        order of the requests. A CUDA tensor is not read before the launch: a request without rows
        then has status 2.
    sequences : Tensor, optional
        ``[rows, capacity]`` int64: the tokens so far of each row's beam, for ``repetition_penalty``
        and ``no_repeat_ngram_size``.
    lengths : Tensor, optional
        ``[requests]`` int64: number of valid leading tokens of the request's sequences, by default
        all. 0 to ``capacity``; on CUDA it is clamped to this range.
    repetition_penalty : float or Tensor, optional
        > 0, 1 is off, ``[requests]`` float32: the log-probability of each token of the sequence is
        multiplied by it, or divided where it is not negative
        (``RepetitionPenaltyLogitsProcessor``).
    no_repeat_ngram_size : int or Tensor, optional
        >= 0, ``[requests]`` int64: no n-gram of this size comes twice in a sequence; 0 is off
        (``NoRepeatNGramLogitsProcessor``).
    end_tokens : Tensor, optional
        ``[tokens]`` or ``[requests, tokens]`` int64: these are banned while the length is below
        ``min_lengths`` (``MinLengthLogitsProcessor``).
    min_lengths : int or Tensor, optional
        ``[requests]`` int64, together with ``end_tokens``; compared with ``lengths``, or with the
        columns of ``sequences``.
    suppressed_tokens : Tensor, optional
        ``[tokens]`` or ``[requests, tokens]`` int64: these are banned, forced ones too.
    forced_tokens : Tensor, optional
        ``[requests]`` or ``[rows]`` int64: this token has log-probability 0, all others are banned
        (``ForcedBOSTokenLogitsProcessor``).
    diversity_tokens : Tensor, optional
        ``[requests, tokens]`` int64: tokens that earlier groups of the request chose.
    diversity_penalty : float or Tensor, optional
        ``[requests]`` float32: subtracted for each time that the token is in ``diversity_tokens``
        (``HammingDiversityLogitsProcessor``).
    bias : Tensor, optional
        ``[vocab]``, ``[requests, vocab]`` or ``[rows, vocab]`` float32: added.
    token_bitmask : Tensor, optional
        ``[requests or rows, ceil(vocab / 32)]`` int32: token t is allowed where bit t % 32 of
        number t // 32 is set, the convention of xgrammar and llguidance.
    trie : Trie, optional
        A trie on the device of the logits (``Trie.to``). Tokens that do not follow a row's node are
        banned as by a bitmask, and not read. Beams of a score of -1e8 or less are placeholders and
        are ignored. A request without a candidate has status 0: no beam continues.
    nodes : Tensor, optional
        [rows] int32, together with ``trie``: the node of each row in it; see ``Trie.step``.

    Returns
    -------
    BeamCandidates
        ``scores`` float32, ``tokens`` int64 and ``beams`` int64, each [requests, num_candidates];
        where a request has fewer candidates above -inf: -inf, 0 and 0. ``status`` [requests]
        uint8: bit 0 a logit was NaN, or became so by a bias or penalty, bit 1 a row had no logit
        above -inf or the request no candidate, bit 2 a beam score was NaN or +inf; a request with a
        status has no candidates. ``log_probs`` float32 [requests, num_candidates]: of the
        tokens alone, after the processors, the scores without those of the beams; -inf where there
        is no candidate.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.
    """
    if not isinstance(logits, Tensor):
        raise type_error(_OP, "logits", logits, "a tensor")
    if not isinstance(beam_scores, Tensor):
        raise type_error(_OP, "beam_scores", beam_scores, "a tensor")
    num_candidates = check_int(
        _OP, "num_candidates", num_candidates, 1, _MOST_CANDIDATES, limits="1 to 2^24"
    )
    offsets = None
    if isinstance(num_beams, (Tensor, Sequence)) and not isinstance(num_beams, (str, bytes)):
        offsets = _row_offsets(num_beams, logits.device)
        num_beams = 1
    else:
        kind = "an int, a sequence of ints or a tensor"
        num_beams = check_count(_OP, "num_beams", num_beams, kind=kind)
        if beam_scores.dim() == 2:
            check_layout(_OP, "beam_scores", beam_scores)
            if beam_scores.shape[1] != num_beams:
                raise ValueError(
                    f"{_OP}: beam_scores has shape {list(beam_scores.shape)}; "
                    f"expected [rows] or [requests, {num_beams}]"
                )
            beam_scores = beam_scores.reshape(-1)
    if (
        sequences is None
        and lengths is None
        and end_tokens is None
        and min_lengths is None
        and suppressed_tokens is None
        and forced_tokens is None
        and diversity_tokens is None
        and bias is None
        and token_bitmask is None
        and trie is None
        and nodes is None
        and repetition_penalty is None
        and no_repeat_ngram_size is None
        and diversity_penalty is None
    ):
        return BeamCandidates(
            *_log_softmax_top_k(logits, beam_scores, num_candidates, num_beams, offsets)
        )
    processors = (
        *_tensors(sequences=sequences, lengths=lengths),
        *_per_request("repetition_penalty", repetition_penalty, 1.0),
        *_per_request("no_repeat_ngram_size", no_repeat_ngram_size, 0),
        *_end_tokens(end_tokens, min_lengths),
        *_tensors(
            suppressed_tokens=suppressed_tokens,
            forced_tokens=forced_tokens,
            diversity_tokens=diversity_tokens,
        ),
        *_per_request("diversity_penalty", diversity_penalty, 0.0),
        *_tensors(bias=bias, token_bitmask=token_bitmask),
    )
    if (diversity_tokens is None) != (diversity_penalty is None):
        missing = "diversity_tokens" if diversity_tokens is None else "diversity_penalty"
        raise ValueError(
            f"{_OP}: {missing} is None; expected diversity_tokens and diversity_penalty together"
        )
    call = (logits, beam_scores, num_candidates, num_beams, offsets, *processors)
    if trie is None and nodes is None:
        return BeamCandidates(*_log_softmax_top_k_processed(*call))
    if not isinstance(trie, Trie):
        raise type_error(_OP, "trie", trie, "a Trie beside nodes")
    if not isinstance(nodes, Tensor):
        raise type_error(_OP, "nodes", nodes, "a tensor beside trie")
    trie.check_device(_OP, logits.device, "the device of logits")
    if logits.dim() == 2:
        trie.check_vocab(_OP, logits.shape[1])
    return BeamCandidates(*_log_softmax_top_k_trie(*call, *trie.tensors, nodes))


def beam_step(
    state: BeamState,
    parameters: BeamParameters,
    scores: Tensor,
    tokens: Tensor,
    beams: Tensor,
    *,
    log_probs: Tensor | None = None,
    status: Tensor | None = None,
    slots: Tensor | None = None,
    row_offsets: Tensor | None = None,
    parent_offsets: Tensor | None = None,
    sequences: Tensor | None = None,
    stopped: Tensor | None = None,
    bonus: Tensor | None = None,
    rows: int | None = None,
    dialect: SearchDialect = "generate",
) -> BeamStep:
    """Turn each request's candidates into its next beams, and close the hypotheses that end.

    Candidates are processed best first. A candidate that ends in an end token (or is ``stopped``,
    or reaches the maximum length) closes a hypothesis if it is among the first ``num_beams`` and
    its score is good enough; ranked lower, it is dropped. The others become the next beams. Then
    the search may be done. ``dialect`` selects the system whose rules apply, see
    docs/reference/beam.md. The state is changed in place, without a host synchronisation.

    Parameters
    ----------
    state : BeamState
        Changed in place.
    parameters : BeamParameters
        Of every slot of the state.
    scores, tokens, beams : Tensor
        [requests, K] float32, int64, int64, as ``log_softmax_top_k`` returns them: best first,
        ``-inf`` for no candidate (with "scorer", a candidate like any other), beams counted within
        the request.
    log_probs : Tensor, optional
        [requests, K] float32, of the tokens alone; 0 where not given.
    status : Tensor, optional
        [requests] uint8: not 0 ends the request's search with this status.
    slots : Tensor, optional
        [requests] int64, all different: the slot of each request in the state; the first slots by
        default.
    row_offsets : Tensor, optional
        [requests + 1] int64: request r's next beams are the rows ``row_offsets[r]`` to
        ``row_offsets[r + 1]``, as many as its ``num_beams``. By default each request has as many
        rows as the state has beams.
    parent_offsets : Tensor, optional
        [requests] int64, or more: the first row of each request's logits, then the end of the last
        request's rows; ``row_offsets`` by default.
    sequences : Tensor, optional
        [requests, beams, length] int64: the running sequences, if the caller keeps them. Then the
        state's sequences, scores and lengths are neither read nor written.
    stopped : Tensor, optional
        [requests, K] bool: candidates that end, whatever their token.
    bonus : Tensor, optional
        [requests, beams] float32: added to the score of a hypothesis closed from this beam (the
        coverage penalty, for one).
    rows : int, optional
        Total number of rows of the next beams: the last element of ``row_offsets``. It is required
        with offsets on CUDA, as reading them would synchronise with the device.
    dialect : {"generate", "scorer", "fairseq"}
        transformers from 4.50 on; its ``BeamSearchScorer``; fairseq's ``SequenceGenerator``.

    Returns
    -------
    BeamStep
        The next beams of all requests. A request whose search had ended emits score 0, its pad
        token and its own rows ("scorer": row 0). With "generate" and "fairseq", a search that is
        done without an error continues in lockstep, and is unchanged once its sequences are full.
        Rows beyond a request's ``num_beams`` have score -inf, its pad token and their own rows as
        parents.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected; nothing has been changed then.
    """
    if rows is not None:
        rows = check_count("beam_step", "rows", rows, 0)
    required = dict(scores=scores, tokens=tokens, beams=beams)
    if scores is None or tokens is None or beams is None:  # the op takes it for an undefined tensor
        _check_types("beam_step", state, parameters, dialect, required, {})
    try:
        step = _beam_step(
            state, parameters, scores, tokens, beams, log_probs, status, slots, row_offsets,
            parent_offsets, sequences, stopped, bonus, SEARCH_DIALECTS[dialect],
            -1 if rows is None else rows,
        )  # fmt: skip
    except _WRONG_TYPE:
        optional = dict(
            log_probs=log_probs, status=status, slots=slots, row_offsets=row_offsets,
            parent_offsets=parent_offsets, sequences=sequences, stopped=stopped, bonus=bonus,
        )  # fmt: skip
        _check_types("beam_step", state, parameters, dialect, required, optional)
        raise
    return BeamStep(*step)


def beam_finalize(
    state: BeamState,
    parameters: BeamParameters,
    num_return_sequences: int,
    *,
    num_groups: int = 1,
    slots: Tensor | None = None,
    sequences: Tensor | None = None,
    scores: Tensor | None = None,
    add_open: bool | None = None,
    dialect: SearchDialect = "generate",
) -> BeamFinal:
    """Return each request's best hypotheses.

    Parameters
    ----------
    state : BeamState
        Changed in place where open beams are added to the hypotheses.
    parameters : BeamParameters
        Of every slot of the state.
    num_return_sequences : int
        Number of hypotheses to return for a request, at least 1.
    num_groups : int
        Number of consecutive ``slots`` of a request: the groups of a diverse search.
    slots : Tensor, optional
        [requests * num_groups] int64; all of the state by default.
    sequences, scores : Tensor, optional
        [requests * num_groups, beams, length] int64 and [requests * num_groups, beams] float32: the
        running beams, if the caller keeps them.
    add_open : bool, optional
        Whether the running beams of searches that are not done become hypotheses first; by default
        with "scorer" only. A beam of score -inf becomes one with "scorer" only.
    dialect : {"generate", "scorer", "fairseq"}
        As in ``beam_step``. With "scorer" the last of equal scores comes first, else the first; and
        the first end token follows each sequence where there is room, not counted in its length.

    Returns
    -------
    BeamFinal
        Best first. A request with fewer hypotheses is filled with padding, score -1e9, place -1.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected; nothing has been changed then.
    """
    op = "beam_finalize"
    limits = "an int of 64 bits, at least 1"  # the op has narrower ones
    num_return_sequences = check_int(
        op, "num_return_sequences", num_return_sequences, limits=limits
    )
    num_groups = check_int(op, "num_groups", num_groups, limits=limits)
    if add_open is None:
        add_open = dialect == "scorer"
    check_bool(op, "add_open", add_open, kind="a bool or None")
    try:
        final = _beam_finalize(
            state, parameters, num_return_sequences, num_groups, slots, sequences, scores, add_open,
            SEARCH_DIALECTS[dialect],
        )  # fmt: skip
    except _WRONG_TYPE:
        optional = dict(slots=slots, sequences=sequences, scores=scores)
        _check_types(op, state, parameters, dialect, {}, optional)
        raise
    return BeamFinal(*final)

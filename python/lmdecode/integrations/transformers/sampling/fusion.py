"""Which logits processors are called, and which become arguments of the fused op."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from lmdecode.generation_options import FUSED
from lmdecode.integrations.transformers.generate_call import prefix_tokens_of
from lmdecode.integrations.transformers.sampling.logits_process import (
    GrammarLogitsProcessor,
    TopKTopPLogitsProcessor,
    is_valid_temperature,
)


class CallRows(NamedTuple):
    """The sequences of a step, which decide whether a ``Sampler`` can express a processor.

    ``length`` counts padding. ``padding`` (int or [B] int64) is the number of padding tokens on the
    left; below 0, the number of tokens that the cache holds in addition. ``kept`` holds converted
    biases by argument and id for the next steps with this vocabulary and padding; None: nothing is
    kept.
    """

    length: int
    vocab: int
    padding: int | torch.Tensor
    kept: dict[tuple[str, int], tuple[Any, dict[str, Any] | None]] | None = None

    @property
    def are_padded(self) -> bool:
        """Tell whether a row has padding, which some processors of transformers read as text."""
        padding = self.padding
        return bool((padding > 0).any()) if isinstance(padding, torch.Tensor) else padding > 0


def _repetition(processor: Any, rows: CallRows) -> dict[str, Any] | None:
    ignored = getattr(processor, "prompt_ignore_length", None)
    padding = rows.padding
    if isinstance(padding, torch.Tensor):
        padding = padding.clamp(min=0).cpu()
    else:
        padding = max(padding, 0)
    if isinstance(ignored, torch.Tensor):
        same = ignored.numel() > 0 and bool((ignored.cpu() == padding).all())
    else:  # one length for all rows, or all tokens
        same = ignored in (None, 0) and not rows.are_padded
    return {"repetition_penalty": processor.penalty} if same else None


def _no_repeat_ngram(processor: Any, rows: CallRows) -> dict[str, Any] | None:
    return None if rows.are_padded else {"no_repeat_ngram_size": processor.ngram_size}


def _sequences(name: str) -> Callable[[Any, CallRows], dict[str, Any] | None]:
    def made_of(biases: Any, rows: CallRows) -> dict[str, Any] | None:
        if any(max(ids) >= rows.vocab for ids in biases):  # transformers raises its own error
            return None
        if rows.are_padded and any(len(ids) > 1 for ids in biases):
            return None
        if any(math.isnan(bias) or bias == math.inf for bias in biases.values()):
            return None
        # transformers adds biases one length of sequence after the other.
        lengths = list(dict.fromkeys(len(ids) for ids in biases))
        return {
            name: {ids: biases[ids] for length in lengths for ids in biases if len(ids) == length}
        }

    def sequence_bias(processor: Any, rows: CallRows) -> dict[str, Any] | None:
        biases = processor.sequence_bias
        if rows.kept is None:
            return made_of(biases, rows)
        # As in transformers, which checks them only in the first step.
        key = name, id(biases)
        if key not in rows.kept:
            rows.kept[key] = biases, made_of(biases, rows)  # keeps their id from being reused
        return rows.kept[key][1]

    return sequence_bias


def _banned(tokens: torch.Tensor, rows: CallRows) -> tuple[int, ...]:
    return tuple(token for token in tokens.tolist() if 0 <= token < rows.vocab)


def _min_length(processor: Any, rows: CallRows) -> dict[str, Any] | None:
    if rows.length >= processor.min_length:
        return {}
    return {"min_length": _banned(processor.eos_token_id, rows)}


def _min_new_tokens(processor: Any, rows: CallRows) -> dict[str, Any] | None:
    if rows.length - processor.prompt_length_to_skip >= processor.min_new_tokens:
        return {}
    return {"min_new_tokens": _banned(processor.eos_token_id, rows)}


def _suppress(processor: Any, rows: CallRows) -> dict[str, Any] | None:
    return {"suppress_tokens": _banned(processor.suppress_tokens, rows)}


def _suppress_at_begin(processor: Any, rows: CallRows) -> dict[str, Any] | None:
    if rows.length != processor.begin_index:
        return {}
    return {"begin_suppress_tokens": _banned(processor.begin_suppress_tokens, rows)}


def _forced_bos(processor: Any, rows: CallRows) -> dict[str, Any] | None:
    return None if rows.length == 1 else {}


def _forced_eos(processor: Any, rows: CallRows) -> dict[str, Any] | None:
    return None if rows.length == processor.max_length - 1 else {}


def _grammar(processor: Any, rows: CallRows) -> dict[str, Any] | None:
    return {"bitmask": processor}


def _prefix_tokens(processor: Any, rows: CallRows) -> dict[str, Any] | None:
    prefix_tokens = prefix_tokens_of(processor)
    return None if prefix_tokens is None else {"bitmask": prefix_tokens}


def _filter(name: str, attribute: str) -> Callable[[Any, CallRows], dict[str, Any] | None]:
    def stage(processor: Any, rows: CallRows) -> dict[str, Any] | None:
        if processor.filter_value != -math.inf or getattr(processor, "min_tokens_to_keep", 1) != 1:
            return None
        return {name: float(getattr(processor, attribute))}

    return stage


def _top_h(processor: Any, rows: CallRows) -> dict[str, Any] | None:
    expressible = processor.filter_value == -math.inf and processor.top_n == 100
    return {"top_h": float(processor.top_h)} if expressible else None


# {}: the processor has no effect at this step. None: it must be called.
SAMPLER_ARGUMENTS: dict[type, Callable[[Any, CallRows], dict[str, Any] | None]] = {
    SequenceBiasLogitsProcessor: _sequences("sequence_bias"),
    RepetitionPenaltyLogitsProcessor: _repetition,
    NoRepeatNGramLogitsProcessor: _no_repeat_ngram,
    NoBadWordsLogitsProcessor: _sequences("bad_words"),
    MinLengthLogitsProcessor: _min_length,
    MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    ForcedBOSTokenLogitsProcessor: _forced_bos,
    ForcedEOSTokenLogitsProcessor: _forced_eos,
    SuppressTokensLogitsProcessor: _suppress,
    SuppressTokensAtBeginLogitsProcessor: _suppress_at_begin,
    GrammarLogitsProcessor: _grammar,
    PrefixConstrainedLogitsProcessor: _prefix_tokens,
    TopHLogitsWarper: _top_h,
    TypicalLogitsWarper: _filter("typical_p", "mass"),
    EpsilonLogitsWarper: _filter("epsilon_cutoff", "epsilon"),
    EtaLogitsWarper: _filter("eta_cutoff", "epsilon"),
}

BANNED = ("min_length", "min_new_tokens", "suppress_tokens", "begin_suppress_tokens")  # tokens
BANS = ("no_repeat_ngram_size", "bad_words", *BANNED, "bitmask")
"""They make logits -inf: among each other, and with what changes finite ones, in any order."""

RANKS = {
    "sequence_bias": 0,
    "repetition_penalty": 1,
    **dict.fromkeys(BANS, 2),
    **{
        name: 3 + place
        for place, name in enumerate(
            ("temperature", "top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff",
             "eta_cutoff")
        )
    },
}  # fmt: skip
"""The place of each argument in the order "transformers" of a ``Sampler``."""


# --- Which processors are replaced ----------------------------------------------------------------


class SamplerFusion(NamedTuple):
    """The processors to call on float32 logits before a ``Sampler``, and its arguments.

    The arguments, named as in ``RANKS``, replace the other processors.
    """

    processors: LogitsProcessorList | None
    arguments: dict[str, Any]


@dataclass(frozen=True)
class SamplingFusion:
    """Split of a list of processors: those that are called, and those that an op replaces.

    ``processors`` are called on the float32 logits before the op. ``stages`` are keyword arguments
    of ``top_k_top_p_sample``. With ``greedy`` the largest processed score is taken instead of a
    draw. ``sampler`` is the split for a ``Sampler``, if it replaces more processors.
    """

    processors: LogitsProcessorList | None
    stages: dict[str, Any] = field(default_factory=dict)
    greedy: bool = False
    sampler: SamplerFusion | None = None


_STAGE_RANKS = {name: place for place, name in enumerate(FUSED)}
_EDIT_RANKS = {name: rank for name, rank in RANKS.items() if rank < RANKS["temperature"]}

WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
_WITHOUT_STATE = {*SAMPLER_ARGUMENTS, *WARPERS, TopKTopPLogitsProcessor} - {
    GrammarLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
}


def keeps_no_state(processor: Any) -> bool:
    """Tell whether a processor is known to depend only on the text of the current call."""
    return type(processor) in _WITHOUT_STATE


def fused_stages(processor: Any, rows: CallRows | None = None) -> dict[str, Any] | None:
    """Return the op's arguments that replace ``processor``, or None if none do.

    With ``rows``, the arguments may be those of a ``Sampler``. They are {} if the processor has no
    effect on these rows.

    Only the classes themselves are recognized, as a subclass may do anything. The op cannot
    express a warper that fills with another value than -inf, or that keeps several tokens after
    top-p or min-p. The minimum of top-k is already part of its ``top_k``.
    """
    kind = type(processor)
    if rows is not None and kind in SAMPLER_ARGUMENTS:
        return SAMPLER_ARGUMENTS[kind](processor, rows)
    if kind is TopKTopPLogitsProcessor:
        return processor.stages()
    if kind is TemperatureLogitsWarper:
        temperature = processor.temperature
        return {"temperature": temperature} if is_valid_temperature(temperature) else None
    if kind not in WARPERS:
        return None
    if processor.filter_value != -math.inf:
        return None
    if kind is TopKLogitsWarper:
        return {"top_k": processor.top_k}
    if processor.min_tokens_to_keep != 1:
        return None
    if kind is TopPLogitsWarper:
        return {"top_p": processor.top_p}
    return {"min_p": processor.min_p}


def _fused_suffix(
    processors: LogitsProcessorList, ranks: Mapping[str, int], rows: CallRows | None = None
) -> tuple[int, dict[str, Any]]:
    """Return how many processors are called before the op, and its arguments.

    The op applies its stages in the order of their ranks, after everything else. So it
    replaces the longest suffix that has each of them at most once and in this order. Only bans may
    stand anywhere before the stages that follow all bans.
    """
    called = len(processors)
    arguments: dict[str, Any] = {}
    first = max(ranks.values()) + 1
    while called:
        found = fused_stages(processors[called - 1], rows)
        if found is None:
            break
        if any(
            name not in ranks or name in arguments or (ranks[name] >= first and name not in BANS)
            for name in found
        ):
            break
        arguments |= found
        first = min([first, *(ranks[name] for name in found)])
        called -= 1
    return called, arguments


def fuse_sampling(
    logits_processor: LogitsProcessorList, do_sample: bool, rows: CallRows | None = None
) -> SamplingFusion:
    """Split a list of processors into a part that is called and a suffix that an op replaces.

    ``top_k_top_p_sample`` applies temperature, top-k, top-p and min-p in this order. A ``Sampler``
    also has penalties, bans and more filters. If it replaces a longer suffix, the result has that
    split too. The tokens have the distribution of the whole list.

    The list is in the order of ``generate()``: the user's processors first, the warpers last.
    Without ``do_sample`` no filter is replaced: filters keep the largest score, but may choose
    among equal ones. ``rows`` are on the CPU; None: no ``Sampler``.
    """
    if type(logits_processor) is not LogitsProcessorList:  # its __call__ may do more
        return SamplingFusion(logits_processor, greedy=not do_sample)

    def first(called: int) -> LogitsProcessorList | None:
        return LogitsProcessorList(logits_processor[:called]) if called else None

    called = len(logits_processor)
    stages: dict[str, Any] = {}
    if do_sample:
        called, stages = _fused_suffix(logits_processor, _STAGE_RANKS)
    sampler = None
    if rows is not None:
        ranks = RANKS if do_sample else _EDIT_RANKS
        before, arguments = _fused_suffix(logits_processor, ranks, rows)
        if before < called:
            sampler = SamplerFusion(first(before), arguments)
    return SamplingFusion(first(called), stages, greedy=not do_sample, sampler=sampler)

"""Which logits processors are called, and which become arguments of the fused op."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lmdecode.generation_options import FUSED
from lmdecode.integrations.transformers.sampling.grammar import GrammarLogitsProcessor
from lmdecode.integrations.transformers.sampling.logits_process import (
    TopKTopPLogitsProcessor,
    is_valid_temperature,
)
from lmdecode.integrations.transformers.sampling.sampler_arguments import (
    BANS,
    RANKS,
    SAMPLER_ARGUMENTS,
    CallRows,
)


class SamplerFusion(NamedTuple):
    """The processors to call on float32 logits before a ``Sampler``, and its arguments.

    The arguments, named as in ``sampler_arguments.RANKS``, replace the other processors.
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

"""Which logits processors are called, and which become arguments of the fused op."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lmdecode.integrations.transformers.sampling.logits_process import (
    STAGES,
    TopKTopPLogitsProcessor,
    is_valid_temperature,
)


@dataclass(frozen=True)
class SamplingPlan:
    """How the logits of a step become tokens.

    Attributes
    ----------
    processors
        What is called on float32 logits before the op, or None.
    stages
        Keyword arguments of ``top_k_top_p_sample``: the processors that the op replaces.
    greedy
        Take the largest processed score instead of drawing.
    """

    processors: LogitsProcessorList | None
    stages: dict[str, Any] = field(default_factory=dict)
    greedy: bool = False


def fused_stages(processor: Any) -> dict[str, Any] | None:
    """Return the op's arguments that do what ``processor`` does, or None if there are none.

    Only the classes themselves are known: a subclass may do anything. A warper that fills with
    something else than -inf, or keeps a minimum of several tokens after top-p or min-p, is not
    expressible by the op (the minimum of top-k is part of its ``top_k`` already).
    """
    kind = type(processor)
    if kind is TopKTopPLogitsProcessor:
        return processor.stages()
    if kind is TemperatureLogitsWarper:
        temperature = processor.temperature
        return {"temperature": temperature} if is_valid_temperature(temperature) else None
    if kind not in (TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper):
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


def plan_sampling(logits_processor: LogitsProcessorList, do_sample: bool) -> SamplingPlan:
    """Split a list of processors into a part that is called and a suffix that the op replaces.

    The op applies temperature, top-k, top-p and min-p in this order, after everything else. So a
    suffix is replaced that holds each of them at most once and in this order; what stands before
    it is called as it is. The tokens have the distribution that the whole list would give.

    Parameters
    ----------
    logits_processor
        As ``generate()`` builds it: the user's processors first, the warpers last.
    do_sample
        False: nothing is replaced, as filters decide nothing about the largest score but may
        choose among equal ones.
    """
    if type(logits_processor) is not LogitsProcessorList:  # its __call__ may do more
        return SamplingPlan(logits_processor, greedy=not do_sample)
    called = len(logits_processor)
    stages: dict[str, Any] = {}
    if do_sample:
        first_stage = len(STAGES)
        while called:
            found = fused_stages(logits_processor[called - 1])
            if found is None or any(STAGES.index(name) >= first_stage for name in found):
                break
            stages |= found
            first_stage = min((STAGES.index(name) for name in found), default=first_stage)
            called -= 1
    processors = LogitsProcessorList(logits_processor[:called]) if called else None
    return SamplingPlan(processors, stages, greedy=not do_sample)

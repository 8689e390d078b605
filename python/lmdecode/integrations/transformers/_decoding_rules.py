"""Logits processors as the token rules of ``Decoding``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from lmdecode.decoder_state import ALWAYS, TokenRules, new_token_rules
from lmdecode.integrations.transformers._processor_plan import ProcessorPlan

__all__ = ["token_rules"]


def _refuse(processors: LogitsProcessorList, vocab_size: int) -> None:
    """Raise ValueError where the rules cannot do what the processors do."""
    if type(processors) is not LogitsProcessorList:
        raise ValueError(
            f"logits_processor: expected a LogitsProcessorList, got {type(processors).__name__}"
        )
    if ProcessorPlan(processors).fits(vocab_size):
        return
    for processor in processors:
        if not ProcessorPlan(LogitsProcessorList([processor])).fits(vocab_size):
            raise ValueError(
                f"logits_processor: {type(processor).__name__} is nothing that Decoding can do "
                "with these arguments; use generate(custom_generate=beam_search) of "
                "lmdecode.integrations.transformers, which calls any processor"
            )
    names = ", ".join(type(processor).__name__ for processor in processors)
    raise ValueError(f"logits_processor: expected them in the order of generate(), got {names}")


def token_rules(
    processors: LogitsProcessorList, vocab_size: int, slots: int, diversity_penalty: float
) -> TokenRules:
    """Return the rules of all slots.

    Raises
    ------
    ValueError
        Names a processor that rules cannot express.
    """
    _refuse(processors, vocab_size)
    bans: list[list[int]] = []
    forced: list[list[int]] = []
    repetition_penalty, ngram_size = 1.0, 0
    bias: Tensor | None = None

    def ban(tokens: Any, first: int, last: int) -> None:
        bans.extend([int(token), first, last, int(bool(forced_before))] for token in tokens)

    forced_before = False
    for processor in processors:
        kind = type(processor)
        if kind is SequenceBiasLogitsProcessor:
            bias = torch.zeros(vocab_size)
            for tokens, value in processor.sequence_bias.items():
                bias[tokens[0]] = value
        elif kind is RepetitionPenaltyLogitsProcessor:
            if processor.prompt_ignore_length:
                raise ValueError(
                    "logits_processor: expected a RepetitionPenaltyLogitsProcessor that ignores no "
                    f"prompt, got prompt_ignore_length={processor.prompt_ignore_length}"
                )
            repetition_penalty = float(processor.penalty)
        elif kind is NoRepeatNGramLogitsProcessor:
            ngram_size = int(processor.ngram_size)
        elif kind is ForcedBOSTokenLogitsProcessor:
            forced.append([1, int(processor.bos_token_id)])
            forced_before = True
        elif kind is ForcedEOSTokenLogitsProcessor:
            forced.append([processor.max_length - 1, int(processor.eos_token_id)])
            forced_before = True
        elif kind is NoBadWordsLogitsProcessor:
            ban((tokens[0] for tokens in processor.sequence_bias), 0, ALWAYS)
        elif kind is SuppressTokensLogitsProcessor:
            ban(processor.suppress_tokens.reshape(-1).tolist(), 0, ALWAYS)
        elif kind is SuppressTokensAtBeginLogitsProcessor:
            begin = int(processor.begin_index)
            ban(processor.begin_suppress_tokens.reshape(-1).tolist(), begin, begin)
        elif kind is MinLengthLogitsProcessor:
            ban(processor.eos_token_id.reshape(-1).tolist(), 0, processor.min_length - 1)
        elif kind is MinNewTokensLengthLogitsProcessor:
            shortest = processor.prompt_length_to_skip + processor.min_new_tokens
            ban(processor.eos_token_id.reshape(-1).tolist(), 0, shortest - 1)
    rules = new_token_rules(slots, len(bans), len(forced))
    rules.repetition_penalty.fill_(repetition_penalty)
    rules.no_repeat_ngram_size.fill_(ngram_size)
    rules.diversity_penalty.fill_(diversity_penalty)
    if bans:
        rules.bans[:] = torch.tensor(bans)
    if forced:
        rules.forced[:] = torch.tensor(forced)
    return rules if bias is None else rules._replace(bias=bias)

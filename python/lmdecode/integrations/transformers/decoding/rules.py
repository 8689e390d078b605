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

from lmdecode.decoder.state import ALWAYS, TokenRules, new_token_rules
from lmdecode.integrations.transformers.beam.processor_plan import ProcessorPlan

__all__ = ["has_token_rules", "token_rules"]


def has_token_rules(processors: LogitsProcessorList, vocab_size: int) -> bool:
    """Tell whether the rules can do what the processors do."""
    return ProcessorPlan(processors).fits(vocab_size) and not any(
        type(processor) is RepetitionPenaltyLogitsProcessor and processor.prompt_ignore_length
        for processor in processors
    )


def _refuse(processors: LogitsProcessorList, vocab_size: int, greedy: bool) -> None:
    """Raise ValueError where the rules cannot do what the processors do."""
    if type(processors) is not LogitsProcessorList:
        raise ValueError(
            f"logits_processor: expected a LogitsProcessorList, got {type(processors).__name__}"
        )
    if ProcessorPlan(processors).fits(vocab_size):
        return
    for processor in processors:
        if not ProcessorPlan(LogitsProcessorList([processor])).fits(vocab_size):
            instead = "model.generate()"
            if not greedy:
                instead += (
                    ", also with custom_generate=beam_search of lmdecode.integrations.transformers"
                )
            raise ValueError(
                f"logits_processor: {type(processor).__name__} is nothing that Decoding can do "
                f"with these arguments; any processor is called by {instead}"
            )
    names = ", ".join(type(processor).__name__ for processor in processors)
    raise ValueError(f"logits_processor: expected them in the order of generate(), got {names}")


def token_rules(
    processors: LogitsProcessorList,
    vocab_size: int,
    slots: int,
    diversity_penalty: float,
    *,
    greedy: bool,
) -> TokenRules:
    """Return the rules of all slots.

    Raises
    ------
    ValueError
        Names a processor that rules cannot express.
    """
    _refuse(processors, vocab_size, greedy)
    bans: list[list[int]] = []
    forced: list[list[int]] = []
    repetition_penalty, ngram_size = 1.0, 0
    bias: Tensor | None = None

    def ban(tokens: Any, first: int, last: int) -> None:
        bans.extend([int(token), first, last, int(bool(forced_before))] for token in tokens)

    def token_to_force(name: str, token: Any) -> int:
        if not 0 <= int(token) < vocab_size:
            raise ValueError(f"{name}: expected a token, 0 to {vocab_size - 1}, got {int(token)}")
        return int(token)

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
            forced.append([1, token_to_force("forced_bos_token_id", processor.bos_token_id)])
            forced_before = True
        elif kind is ForcedEOSTokenLogitsProcessor:
            token = token_to_force("forced_eos_token_id", processor.eos_token_id)
            forced.append([processor.max_length - 1, token])
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

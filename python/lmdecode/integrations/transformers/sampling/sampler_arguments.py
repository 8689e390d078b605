"""Sampler arguments of transformers' logits processors, except the four plain filters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopHLogitsWarper,
    TypicalLogitsWarper,
)

from lmdecode.integrations.transformers._prefix_tries import prefix_tokens_of
from lmdecode.integrations.transformers.sampling.grammar import GrammarLogitsProcessor


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

"""Token rules as arguments of ``log_softmax_top_k``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmdecode.beam.token_rules import ALWAYS, TokenRules

__all__ = ["RuleArguments"]


class RuleArguments:
    """Token rules on the CPU as arguments of each step, on ``device`` if one is given.

    Which rules are on is found once, so that steps read nothing from the device and all do the
    same. A step needs the sequences if ``looks_back``, and their lengths if ``needs_lengths``.
    Raises ValueError where timestamps are on: only the decoder in C++ has them.
    """

    def __init__(self, rules: TokenRules, device: torch.device | None = None) -> None:
        if bool((rules.timestamps[:, 0] >= 0).any()):
            raise ValueError(
                "token_rules: timestamps are on; expected -1, log_softmax_top_k has none"
            )
        self._bans, self._forced = rules.bans.to(device), rules.forced.to(device)
        self._diversity_penalty = rules.diversity_penalty.to(device)
        self._constant: dict[str, Any] = {}
        if bool((rules.repetition_penalty != 1.0).any()):
            self._constant["repetition_penalty"] = rules.repetition_penalty.to(device)
        if bool(rules.no_repeat_ngram_size.any()):
            self._constant["no_repeat_ngram_size"] = rules.no_repeat_ngram_size.to(device)
        self.looks_back = bool(self._constant)
        if rules.bias.numel():
            self._constant["bias"] = rules.bias.to(device)
        self._is_diverse = bool(rules.diversity_penalty.any())
        self._forces = bool((rules.forced[..., 0] >= 0).any())
        token, first, last, with_forced = rules.bans.unbind(-1)
        always = (first <= 0) & (last == ALWAYS) & ((with_forced != 0) | (not self._forces))
        self._bans_change = not bool((always | (token < 0)).all())
        if token.numel() and not self._bans_change:
            self._constant["suppressed_tokens"] = token.to(device)
        self.needs_lengths = self.looks_back or self._forces or self._bans_change

    def of_step(
        self,
        lengths: Tensor | None,
        sequences: Tensor | None,
        diversity_tokens: Tensor | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of a step, one row a slot for each.

        ``lengths`` [slots] and ``sequences`` [rows, capacity] int64 may be None where the
        attributes allow it. ``diversity_tokens`` [slots, n] int64 are the choices of earlier groups
        in this step.
        """
        arguments = dict(self._constant)
        if self.looks_back:
            arguments["sequences"], arguments["lengths"] = sequences, lengths
        forced = None
        if self._forces:
            assert lengths is not None
            forced = torch.full_like(lengths, -1)
            for column in self._forced.unbind(1):
                forced = torch.where(column[:, 0] == lengths, column[:, 1], forced)
            arguments["forced_tokens"] = forced
        if self._bans_change:
            assert lengths is not None
            token, first, last, with_forced = self._bans.unbind(-1)
            holds = (first <= lengths[:, None]) & (lengths[:, None] <= last)
            if forced is not None:
                holds &= (forced[:, None] < 0) | (with_forced != 0)
            arguments["suppressed_tokens"] = token.masked_fill(~holds, -1)
        if self._is_diverse and diversity_tokens is not None and diversity_tokens.shape[1]:
            arguments["diversity_tokens"] = diversity_tokens
            arguments["diversity_penalty"] = self._diversity_penalty
        return arguments

    def of_length(
        self, length: int, sequences: Tensor, diversity_tokens: Tensor | None = None
    ) -> dict[str, Any]:
        """Return the arguments of a step in which the rules of the one slot hold for all rows.

        The host knows the length, so rules without effect in this step are left out. ``sequences``
        are [rows, n] int64 on any device, all of it text, and ``diversity_tokens`` [requests, n]
        int64.
        """
        found = self.of_step(torch.tensor([length], device="cpu"), sequences, diversity_tokens)
        found.pop("lengths", None)
        for name in TokenRules._fields[:3]:  # a number for each slot
            if name in found:
                found[name] = found[name].item()
        forced, banned = found.pop("forced_tokens", None), found.pop("suppressed_tokens", None)
        if forced is not None and int(forced) >= 0:
            # It overrules what comes before it, so only bans are left.
            found = {"forced_tokens": sequences.new_full((len(sequences),), int(forced))}
        if banned is not None:
            banned = banned[banned >= 0]
            if len(banned):
                found["suppressed_tokens"] = banned.to(sequences.device)
        return found

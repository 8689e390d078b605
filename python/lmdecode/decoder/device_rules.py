"""The token rules of ``Decoding`` on a device, without a look at any value from the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmdecode.beam.types import BeamCandidates
from lmdecode.decoder.state import TokenRules

__all__ = ["DeviceRules"]

_NAN, _EMPTY = 1, 2  # bits of BeamCandidates.status


class DeviceRules:
    """Rules as arguments of ``log_softmax_top_k``, or applied to logits where it is greedy.

    Which of them are on is found out here, once, so that a step does the same each time.

    Parameters
    ----------
    rules : TokenRules
        On the CPU.
    device
        Where steps run.
    """

    def __init__(self, rules: TokenRules, device: torch.device) -> None:
        self._rules = TokenRules(*(tensor.to(device) for tensor in rules))
        self._penalises = bool((rules.repetition_penalty != 1.0).any())
        self._ngram_sizes = sorted(set(rules.no_repeat_ngram_size.tolist()) - {0})

    def _forced(self, slots: Tensor, lengths: Tensor) -> Tensor | None:
        """[slots] int64: the token that is forced, -1: none."""
        forced = self._rules.forced[slots]
        if forced.shape[1] == 0:
            return None
        token = torch.full_like(lengths, -1)
        for column in range(forced.shape[1]):
            holds = forced[:, column, 0] == lengths
            token = torch.where(holds, forced[:, column, 1], token)
        return token

    def _banned(self, slots: Tensor, lengths: Tensor, forced: Tensor | None) -> Tensor | None:
        """[slots, bans] int64: the tokens that cannot follow now, -1: none."""
        bans = self._rules.bans[slots]
        if bans.shape[1] == 0:
            return None
        token, first, last, with_forced = bans.unbind(-1)
        holds = (first <= lengths[:, None]) & (lengths[:, None] <= last)
        if forced is not None:
            holds &= (forced[:, None] < 0) | (with_forced != 0)
        return token.masked_fill(~holds, -1)

    def processors(
        self, slots: Tensor, sequences: Tensor, lengths: Tensor, chosen: list[Tensor]
    ) -> dict[str, Any]:
        """Return arguments of ``log_softmax_top_k`` for these slots.

        Parameters
        ----------
        slots, sequences, lengths : Tensor
            [slots] int64, [slots * beams, capacity] and [slots] int64.
        chosen : list of Tensor
            [slots, beams] each: what earlier groups chose in this step.
        """
        rules, arguments = self._rules, dict[str, Any]()
        if self._penalises or self._ngram_sizes:
            arguments |= dict(
                sequences=sequences,
                lengths=lengths,
                repetition_penalty=rules.repetition_penalty[slots],
                no_repeat_ngram_size=rules.no_repeat_ngram_size[slots],
            )
        forced = self._forced(slots, lengths)
        if forced is not None:
            arguments["forced_tokens"] = forced
        banned = self._banned(slots, lengths, forced)
        if banned is not None:
            arguments["suppressed_tokens"] = banned
        if chosen:
            arguments["diversity_tokens"] = torch.cat(chosen, dim=1)
            arguments["diversity_penalty"] = rules.diversity_penalty[slots]
        if rules.bias.numel():
            arguments["bias"] = rules.bias
        return arguments

    def choose_greedily(
        self, logits: Tensor, scores: Tensor, sequences: Tensor, lengths: Tensor
    ) -> BeamCandidates:
        """Return the largest logit of each row after the rules, one row a slot, all of them.

        Parameters
        ----------
        logits, scores, sequences, lengths : Tensor
            [slots, V], [slots] float32, [slots, capacity] and [slots] int64.
        """
        log_probs = logits.float().log_softmax(-1)
        slots = torch.arange(len(lengths), device=lengths.device)
        forced = self._forced(slots, lengths)
        banned = self._banned(slots, lengths, forced)
        ruled = self._ruled(logits.float(), sequences, lengths, banned)
        best, token = ruled.max(-1)
        status = torch.where(best == -torch.inf, _EMPTY, 0)
        if forced is not None:
            allowed = torch.ones_like(forced, dtype=torch.bool)
            if banned is not None:
                allowed = (banned != forced[:, None]).all(-1)
            is_forced = forced >= 0
            token = torch.where(is_forced, forced, token)
            status = torch.where(is_forced, torch.where(allowed, 0, _EMPTY), status)
            best = torch.where(is_forced, 0.0, best)
        is_nan = best.isnan() | logits.isnan().any(-1)
        status = torch.where(is_nan, _NAN, status).to(torch.uint8)
        failed = status != 0
        token = token.masked_fill(failed, 0)
        log_prob = log_probs.gather(1, token[:, None])[:, 0].masked_fill(failed, 0.0)
        total = (scores + log_prob).masked_fill(failed, -torch.inf)
        return BeamCandidates(
            total[:, None], token[:, None], torch.zeros_like(token)[:, None], status,
            log_prob[:, None],
        )  # fmt: skip

    def _ruled(
        self, logits: Tensor, sequences: Tensor, lengths: Tensor, banned: Tensor | None
    ) -> Tensor:
        rules, places = self._rules, torch.arange(sequences.shape[1], device=logits.device)
        if rules.bias.numel():
            logits = logits + rules.bias
        if self._penalises:
            penalty = rules.repetition_penalty[:, None]
            seen = sequences.masked_fill(places >= lengths[:, None], -1)
            is_seen = self._marked(logits, seen)
            penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
            logits = torch.where(is_seen, penalised, logits)
        if banned is not None:
            logits = logits.masked_fill(self._marked(logits, banned), -torch.inf)
        for size in self._ngram_sizes:
            if size > sequences.shape[1]:
                continue
            # The last size - 1 tokens, wherever they stood before, and what followed them there.
            windows = sequences.unfold(1, size, 1)
            tail = lengths[:, None] - size + 1 + places[: size - 1]
            tail = sequences.gather(1, tail.clamp(min=0))
            repeats = (windows[..., : size - 1] == tail[:, None]).all(-1)
            repeats &= places[: windows.shape[1]] + size <= lengths[:, None]
            repeats &= (rules.no_repeat_ngram_size == size)[:, None]
            last = windows[..., size - 1].masked_fill(~repeats, -1)
            logits = logits.masked_fill(self._marked(logits, last), -torch.inf)
        return logits

    @staticmethod
    def _marked(logits: Tensor, tokens: Tensor) -> Tensor:
        """[rows, V] bool: which tokens are among the row's; those below 0 are none."""
        rows, vocab = logits.shape
        marks = torch.zeros(rows, vocab + 1, dtype=torch.bool, device=logits.device)
        inside = (tokens >= 0) & (tokens < vocab)
        marks.scatter_(1, tokens.where(inside, torch.full_like(tokens, vocab)), True)
        return marks[:, :vocab]

"""Drafts in a loop: a step reads draft tokens ahead, before they are chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.decoder.engine.drafts import DraftAsk, Drafts, HiddenRows
from lmdecode.integrations.transformers.sampling.read_ahead import ReadAhead

__all__ = ["Lookahead"]


class Lookahead:
    """The logits at the last tokens of several sequences, some computed ahead.

    A step of a sequence reads its last token and the draft after it. While the chosen tokens equal
    the draft, their logits are already computed, with the bits of steps of one token. Rejected
    tokens are removed from the caches.

    The caches have read prompts of these lengths and can go back by a draft. The drafts have begun.
    """

    def __init__(self, caches: CausalCaches, lengths: list[int], drafts: Drafts) -> None:
        self._caches, self._drafts = caches, drafts
        self._lengths = list(lengths)
        # For each sequence: the tokens read ahead, the logits at the last token and at each token
        # read ahead, and the tokens that the drafts do not know yet.
        self._ahead = [ReadAhead() for _ in lengths]
        self._logits: list[Tensor] = [
            torch.empty(0, 0, dtype=torch.float32, device="cpu") for _ in lengths
        ]
        self._new: list[list[int]] = [[] for _ in lengths]

    def logits(self, last: Tensor) -> Tensor:
        """Return the logits, [rows, V], at the chosen tokens, [rows] int64."""
        to_read = []
        for row, token in enumerate(last.tolist()):
            self._lengths[row] += 1
            self._new[row].append(token)
            if self._ahead[row].takes(token):
                self._logits[row] = self._logits[row][1:]
            else:
                to_read.append(row)
        if to_read:
            self._read(to_read)
        if len(last) == 1:
            return self._logits[0][:1]
        return torch.stack([logits[0] for logits in self._logits])

    def _read(self, rows: list[int]) -> None:
        behind = [self._lengths[row] - 1 for row in rows]  # accepted positions
        self._caches.truncate(rows, behind)
        asks = []
        for row, have in zip(rows, behind, strict=True):
            room = max(0, self._caches.max_length - have - 2)  # the last token is not read
            asks.append(DraftAsk(row, self._new[row], room))
        tokens, entries = [], []
        for row, draft in zip(rows, self._drafts.propose(asks), strict=True):
            self._ahead[row].begin(draft)
            tokens += [self._new[row][-1], *draft]
            self._new[row] = []
            entries.append([row, 1 + len(draft), 0, 1 + len(draft)])
        counts = [entry[1] for entry in entries]
        hidden = self._drafts.new_hidden(len(tokens), self._caches.model.config.model_size)
        logits = self._caches.forward(
            torch.tensor(tokens, device="cpu"),
            torch.tensor(entries, device="cpu"),
            len(tokens),
            hidden_out=hidden,
        )
        if hidden is not None:
            of_rows = zip(rows, hidden.split(counts), strict=True)
            self._drafts.observe([HiddenRows(row, -1, (), part) for row, part in of_rows])
        parts = logits.split(counts)
        for row, part in zip(rows, parts, strict=True):
            self._logits[row] = part

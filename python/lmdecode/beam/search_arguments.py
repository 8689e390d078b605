"""Arguments of ``beam_search_step_``: the searches of a step, and their rules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lmdecode._upload import sent
from lmdecode.beam.token_rules import TokenRules
from lmdecode.beam.trie import Trie, tensors_of_tries

__all__ = ["SearchOfStep", "rules_of_step", "searches_of_step"]


class SearchOfStep(NamedTuple):
    """One search of a step: a request, or a group of one, which follows the groups before it.

    ``dialect`` is its place in ``SEARCH_DIALECTS``. The search reads ``num_rows``
    rows of the logits from ``first_row`` on: one where its beams are alike. Its next beams begin at
    ``next_row``, right after those of the groups before it.
    """

    slot: int
    rule_row: int
    dialect: int
    group: int
    num_beams: int
    first_row: int
    num_rows: int
    next_row: int


def searches_of_step(searches: Sequence[SearchOfStep]) -> tuple[list[list[int]], list[int]]:
    """Return ``searches`` and ``passes``: consecutive searches of one group are a pass."""
    numbers: list[list[int]] = []
    passes: list[int] = []
    for group, members in itertools.groupby(searches, key=lambda search: search.group):
        before, rows, most_earlier = len(numbers), 0, 0
        for s in members:
            end, earlier = s.next_row + s.num_beams, group * s.num_beams
            numbers.append(
                [s.slot, s.rule_row, s.dialect, s.first_row, s.num_rows, rows, s.next_row, end,
                 earlier]
            )  # fmt: skip
            rows += s.num_rows
            most_earlier = max(most_earlier, earlier)
        passes += [len(numbers) - before, rows, most_earlier]
    return numbers, passes


def rules_of_step(
    rules: TokenRules, device: torch.device | str, tries: Sequence[Trie | None] = ()
) -> list[Tensor]:
    """Return ``rules``, on the CPU, on a device; a rule that is off in all rows is an empty tensor.

    So shapes tell which rules are on, without a read from the device. ``tries``, on the device, has
    the trie of each row, or None. Raises ValueError where timestamps are on: only the decoder in
    C++ has them.
    """
    if bool((rules.timestamps[:, 0] >= 0).any()):
        raise ValueError("token_rules: timestamps are on; expected -1, beam_search_step_ has none")
    penalty, ngram, diversity = rules[:3]
    used = rules._replace(
        repetition_penalty=penalty if bool((penalty != 1.0).any()) else penalty[:0],
        no_repeat_ngram_size=ngram if bool(ngram.any()) else ngram[:0],
        diversity_penalty=diversity if bool(diversity.any()) else diversity[:0],
        bans=rules.bans if bool((rules.bans[..., 0] >= 0).any()) else rules.bans[:, :0],
        forced=rules.forced if bool((rules.forced[..., 0] >= 0).any()) else rules.forced[:, :0],
    )
    with torch.inference_mode(False):
        moved = [sent(tensor.contiguous(), device) for tensor in used]
        return moved + tensors_of_tries(tries, device)

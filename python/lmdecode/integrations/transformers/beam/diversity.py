"""The diversity penalty of group beam search."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor

from lmdecode._checks import is_int, is_real


class HammingDiversityLogitsProcessor(LogitsProcessor):
    """Subtract a penalty from tokens that earlier groups of a request have chosen in this step.

    transformers had a class of this name up to version 4.56. ``beam_search`` adds one to the list
    of processors if ``diversity_penalty`` is given.

    Parameters
    ----------
    diversity_penalty
        float > 0: subtracted once for each beam that has chosen the token.
    num_beams
        int >= 2: number of beams of a request.
    num_beam_groups
        int >= 2 that divides ``num_beams``.

    Raises
    ------
    ValueError
        If an argument is of another type or out of its range.
    """

    def __init__(self, diversity_penalty: float, num_beams: int, num_beam_groups: int) -> None:
        if not is_real(diversity_penalty) or not diversity_penalty > 0:
            raise ValueError(f"diversity_penalty: expected a number > 0, got {diversity_penalty!r}")
        if not is_int(num_beams) or num_beams < 2:
            raise ValueError(f"num_beams: expected an int >= 2, got {num_beams!r}")
        if not is_int(num_beam_groups) or num_beam_groups < 2 or num_beams % num_beam_groups:
            raise ValueError(
                f"num_beam_groups: expected an int >= 2 that divides num_beams = {num_beams}, "
                f"got {num_beam_groups!r}"
            )
        self.diversity_penalty: float = float(diversity_penalty)
        self.num_beams: int = int(num_beams)
        self.group_size: int = self.num_beams // int(num_beam_groups)

    def __call__(
        self,
        input_ids: torch.LongTensor | None,
        scores: torch.Tensor,
        current_tokens: torch.LongTensor,
        beam_group_idx: int,
    ) -> torch.Tensor:
        """Return the penalised scores of group ``beam_group_idx``, counted from 0.

        ``scores`` are the group's rows, [batch * group size, V], and are not changed.
        ``current_tokens`` are the tokens of this step, [batch * num_beams] int64, of which the
        earlier groups' count. ``input_ids`` is unused.
        """
        chosen = current_tokens.view(-1, self.num_beams)[:, : beam_group_idx * self.group_size]
        if not chosen.shape[1]:
            return scores
        counts = scores.new_zeros((len(chosen), scores.shape[1]))
        counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=scores.dtype))
        return scores - self.diversity_penalty * counts.repeat_interleave(self.group_size, dim=0)

"""Base of the scorers: their interface, the walk over the candidates, and the final result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lmdecode.beam.scorers.hypotheses import Hypothesis

__all__ = [
    "BeamScorer",
    "assemble_result",
    "beam_index_rows",
    "best_hypotheses",
    "check_candidates",
    "check_padding",
    "check_rows",
    "end_token_list",
    "result_width",
    "split_candidates",
]


class BeamScorer(ABC):
    """Base class of the beam search scorers; see ``BeamSearchScorer``."""

    _done: Tensor

    def __init__(
        self,
        batch_size: int,
        num_beams: int,
        device: torch.device | str,
        length_penalty: float,
        do_early_stopping: bool | str,
        num_beam_hyps_to_keep: int,
        num_beam_groups: int,
    ) -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size is {batch_size!r}; expected an int, at least 1")
        if not isinstance(num_beams, int) or num_beams <= 1:
            raise ValueError(f"num_beams is {num_beams!r}; expected an int, at least 2")
        if (
            not isinstance(num_beam_groups, int)
            or not 1 <= num_beam_groups <= num_beams
            or num_beams % num_beam_groups
        ):
            raise ValueError(
                f"num_beam_groups is {num_beam_groups!r} with num_beams {num_beams}; expected an "
                "int that divides num_beams"
            )
        self.num_beams = num_beams
        self.device = device
        self.length_penalty = length_penalty
        self.do_early_stopping = do_early_stopping
        self.num_beam_hyps_to_keep = num_beam_hyps_to_keep
        self.num_beam_groups = num_beam_groups
        self.group_size = num_beams // num_beam_groups

    @property
    def is_done(self) -> Tensor:
        """[] bool: whether every search has ended."""
        return self._done.all()

    @abstractmethod
    def process(
        self,
        input_ids: Tensor,
        next_scores: Tensor,
        next_tokens: Tensor,
        next_indices: Tensor,
        **kwargs: Any,
    ) -> UserDict[str, Tensor]:
        """Turn the candidates of each search into its next beams."""

    @abstractmethod
    def finalize(
        self,
        input_ids: Tensor,
        final_beam_scores: Tensor,
        final_beam_tokens: Tensor,
        final_beam_indices: Tensor,
        max_length: int | None,
        **kwargs: Any,
    ) -> UserDict[str, Tensor | None]:
        """Return the best hypotheses of each search."""


def check_rows(name: str, tensor: Tensor, searches: int, beams: int) -> None:
    """Refuse a tensor that has not a row for each beam."""
    if tensor.dim() == 0 or tensor.shape[0] != searches * beams:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}; expected {searches * beams} rows, {beams} "
            f"beams of each of {searches} searches"
        )


def check_padding(eos_token_id: object, pad_token_id: object) -> None:
    """Refuse a step without these tokens, where a search is done."""
    if eos_token_id is None or pad_token_id is None:
        raise ValueError(
            f"eos_token_id is {eos_token_id} and pad_token_id {pad_token_id}; expected tokens, "
            "since a search is done and is padded"
        )


def check_candidates(
    next_scores: Tensor, next_tokens: Tensor, next_indices: Tensor, n: int
) -> None:
    """Refuse candidates that are not [n, K], the three of one shape."""
    shapes = [list(tensor.shape) for tensor in (next_scores, next_tokens, next_indices)]
    if any(len(shape) != 2 or shape[0] != n or shape != shapes[0] for shape in shapes):
        raise ValueError(
            "next_scores, next_tokens and next_indices have the shapes "
            f"{shapes[0]}, {shapes[1]} and {shapes[2]}; expected [{n}, candidates] for each"
        )


def end_token_list(eos_token_id: int | Iterable[int] | None) -> list[int]:
    """Return the end tokens as a list, empty for None."""
    if eos_token_id is None:
        return []
    if isinstance(eos_token_id, int):
        return [eos_token_id]
    return [int(token) for token in eos_token_id]


def split_candidates(
    tokens: list[int], end_tokens: Sequence[int], group_size: int
) -> tuple[list[int], list[int]]:
    """Return the ranks of the candidates that close a hypothesis, and of those that continue.

    ``tokens`` are the candidates', best first. One with an end token closes a hypothesis if its
    rank is below ``group_size``, and is dropped otherwise. Candidates after the last next beam are
    not read. Raises ValueError if fewer than ``group_size`` candidates continue.
    """
    closing: list[int] = []
    going: list[int] = []
    for rank, token in enumerate(tokens):
        if token not in end_tokens:
            going.append(rank)
            if len(going) == group_size:
                return closing, going
        elif rank < group_size:
            closing.append(rank)
    raise ValueError(
        f"next_tokens has {len(going)} candidates that are not end tokens in {tokens}, with end "
        f"tokens {list(end_tokens)}; expected at least {group_size}, the beams that go on"
    )


def best_hypotheses(hypotheses: Iterable[Hypothesis], count: int) -> list[Hypothesis]:
    """Return the best `count`, best first; of equal scores the last to come is the first."""
    ranked = sorted(hypotheses, key=lambda hypothesis: hypothesis[0])[::-1]
    if not 1 <= count <= len(ranked):
        raise ValueError(
            f"num_beam_hyps_to_keep is {count}; expected 1 to {len(ranked)}, the hypotheses of a "
            "search"
        )
    return ranked[:count]


def result_width(
    shortest: int,
    longest: int,
    max_length: int | None,
    pad_token_id: int | None,
    end_tokens: Sequence[int],
) -> int:
    """Return the length of the results, with an end token after the longest if there is room.

    Refuses what cannot be put together.
    """
    width = longest + 1 if max_length is None else min(longest + 1, max_length)
    if longest > width:
        raise ValueError(
            f"max_length is {max_length}; expected at least {longest}, the length of the longest "
            "hypothesis"
        )
    if shortest != longest and pad_token_id is None:
        raise ValueError(
            "pad_token_id is None; expected a token, since the hypotheses differ in length"
        )
    if shortest < width and not end_tokens:
        raise ValueError("eos_token_id is None; expected a token, since there is room for one")
    return width


def assemble_result(
    best: Sequence[Hypothesis],
    input_ids: Tensor,
    max_length: int | None,
    pad_token_id: int | None,
    end_tokens: Sequence[int],
    device: torch.device | str,
) -> UserDict[str, Tensor | None]:
    """Put hypotheses into tensors: what ``finalize`` returns.

    The first end token follows each sequence where there is room, then padding. Beam indices are
    returned if the first hypothesis has any; the row of one that has none is -1.
    """
    lengths = [len(tokens) for _, tokens, _ in best]
    width = result_width(min(lengths), max(lengths), max_length, pad_token_id, end_tokens)
    sequences = input_ids.new_full((len(best), width), 0 if pad_token_id is None else pad_token_id)
    for row, (_, tokens, _) in enumerate(best):
        sequences[row, : len(tokens)] = tokens
        if len(tokens) < width:
            sequences[row, len(tokens)] = end_tokens[0]
    return UserDict(
        {
            "sequences": sequences,
            "sequence_scores": torch.tensor(
                [score for score, _, _ in best], dtype=torch.float32, device=device
            ),
            "beam_indices": beam_index_rows([indices for _, _, indices in best], sequences),
        }
    )


def beam_index_rows(rows: Sequence[Any], sequences: Tensor) -> Tensor | None:
    """Return the beam indices [len(rows), width] of the results `sequences`, -1 after the end.

    None if the first hypothesis has none.
    """
    if rows[0] is None:
        return None
    result = torch.full_like(sequences, -1)
    for row, indices in enumerate(rows):
        if indices is None or not len(indices):
            continue
        if len(indices) > result.shape[1]:
            raise ValueError(
                f"beam_indices has {len(indices)} indices of a hypothesis; expected at most "
                f"{result.shape[1]}, the length of the result"
            )
        result[row, : len(indices)] = torch.tensor([int(index) for index in indices], device="cpu")
    return result

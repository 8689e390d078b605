"""Logits processors of a user."""

import math

from transformers import LogitsProcessor


class Forbid(LogitsProcessor):
    """These tokens are never chosen."""

    def __init__(self, *tokens: int) -> None:
        self.tokens, self.seen = list(tokens), []

    def __call__(self, input_ids, scores):
        self.seen.append((input_ids, scores))
        scores = scores.clone()
        scores[:, self.tokens] = -math.inf
        return scores


class Overwrite(LogitsProcessor):
    """Fill the scores of some rows, from a length of the sequence on."""

    def __init__(self, rows: int | slice, value: float, from_length: int = 0) -> None:
        self.rows, self.value, self.from_length = rows, value, from_length

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] < self.from_length:
            return scores
        scores = scores.clone()
        scores[self.rows] = self.value
        return scores

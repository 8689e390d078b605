"""Token rules: the changes of log-probabilities before tokens are chosen, in one form for all.

Requests of ``BeamSearch`` and the logits processors of transformers become ``TokenRules``;
A step of search takes them by ``rules_of_step``, and the decoder in C++ reads them as they are.
``RuleArguments`` makes arguments of ``log_softmax_top_k`` of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "ALWAYS",
    "TokenRules",
    "check_token_rules",
    "join_token_rules",
    "new_token_rules",
    "one_slot",
    "repeat_token_rules",
    "write_token_rules",
]

ALWAYS = (1 << 62) - 1  # a length that no sequence has


class TokenRules(NamedTuple):
    """Rules applied to the log-probabilities before tokens are chosen, by slot.

    Without beams they apply to the logits, as in transformers. A ban is a token (-1: none), the
    first and last length of the sequences that it cannot be added to, and 1 if it overrules a
    forced token. A forced token is a length (-1: none) and the token that follows there; the last
    one of a length holds. Timestamps, for the decoder in C++ alone, are Whisper's rules: the first
    timestamp (-1: off), the end token, the length of a sequence before anything is generated, and
    the last timestamp that it may begin with (-1: any). The bias is [slots, V] where slots differ,
    which the decoder in C++ refuses.
    """

    repetition_penalty: Tensor
    no_repeat_ngram_size: Tensor
    diversity_penalty: Tensor
    bans: Tensor
    forced: Tensor
    timestamps: Tensor
    bias: Tensor

    def of_slots(self, slots: Tensor) -> TokenRules:
        """Return the rules of some slots, [n] int64."""
        bias = self.bias[slots] if self.bias.dim() == 2 else self.bias
        return TokenRules._make([*(tensor[slots] for tensor in self[:6]), bias])


def new_token_rules(slots: int, num_bans: int = 0, num_forced: int = 0) -> TokenRules:
    """Return rules that do nothing."""
    with torch.inference_mode(False):
        return TokenRules(
            torch.ones(slots, dtype=torch.float32, device="cpu"),
            torch.zeros(slots, dtype=torch.int64, device="cpu"),
            torch.zeros(slots, dtype=torch.float32, device="cpu"),
            torch.full((slots, num_bans, 4), -1, dtype=torch.int64, device="cpu"),
            torch.full((slots, num_forced, 2), -1, dtype=torch.int64, device="cpu"),
            torch.full((slots, 4), -1, dtype=torch.int64, device="cpu"),
            torch.empty(0, dtype=torch.float32, device="cpu"),
        )


def one_slot(
    *,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    diversity_penalty: float = 0.0,
    bans: Sequence[Sequence[int]] = (),
    forced: Sequence[Sequence[int]] = (),
    timestamps: Sequence[int] | None = None,
    bias: Tensor | None = None,
) -> TokenRules:
    """Return the rules of one slot, from numbers; see ``TokenRules``."""
    rules = new_token_rules(1, len(bans), len(forced))
    rules.repetition_penalty.fill_(repetition_penalty)
    rules.no_repeat_ngram_size.fill_(no_repeat_ngram_size)
    rules.diversity_penalty.fill_(diversity_penalty)
    if bans:
        rules.bans[0] = torch.tensor(bans, device="cpu")
    if forced:
        rules.forced[0] = torch.tensor(forced, device="cpu")
    if timestamps is not None:
        rules.timestamps[0] = torch.tensor(timestamps, device="cpu")
    return rules if bias is None else rules._replace(bias=bias)


def check_token_rules(op: str, rules: object, vocab_size: int) -> None:
    """Raise TypeError or ValueError for anything but the rules of one slot, without timestamps."""
    if not isinstance(rules, TokenRules):
        kind = type(rules).__name__
        raise TypeError(f"{op}: token_rules is of type {kind}; expected a TokenRules or None")
    for name, one in zip(TokenRules._fields, new_token_rules(1), strict=True):
        given = getattr(rules, name)
        shape = list(one.shape) if name != "bias" else [vocab_size]
        if name in ("bans", "forced"):
            shape[1:2] = given.shape[1:2] if isinstance(given, Tensor) else []
        if isinstance(given, Tensor) and name == "bias" and given.numel() == 0:
            shape = list(given.shape)
        if not isinstance(given, Tensor) or (list(given.shape), given.dtype) != (shape, one.dtype):
            came = f"{list(given.shape)} {given.dtype}" if isinstance(given, Tensor) else given
            raise ValueError(
                f"{op}: token_rules.{name} is {came}; expected {shape} {one.dtype}, of one slot"
            )
    if not bool(rules.repetition_penalty > 0):
        raise ValueError(
            f"{op}: token_rules.repetition_penalty is {rules.repetition_penalty.tolist()}; "
            "expected a number above 0"
        )
    if bool(rules.timestamps[0, 0] >= 0):
        raise ValueError(f"{op}: token_rules.timestamps are on; expected -1, only a decoder's are")


def write_token_rules(rules: TokenRules, slot: int, one: TokenRules) -> None:
    """Write the rules of one slot, without a bias, in place of those that a slot had."""
    for name in (*rules._fields[:3], "timestamps"):
        getattr(rules, name)[slot] = getattr(one, name)[0]
    for name in ("bans", "forced"):
        table, rows = getattr(rules, name)[slot], getattr(one, name)[0]
        table.fill_(-1)
        table[: len(rows)] = rows


def repeat_token_rules(one: TokenRules, slots: int) -> TokenRules:
    """Return the rules of one slot for each of many."""
    repeated = (tensor.repeat(slots, *[1] * (tensor.dim() - 1)) for tensor in one[:6])
    return TokenRules._make([*repeated, one.bias])


def join_token_rules(rules: Sequence[TokenRules]) -> TokenRules:
    """Join rules of one slot each, at least one, in the order of the slots."""
    bias = torch.empty(0, dtype=torch.float32, device="cpu")
    sizes = {one.bias.numel() for one in rules} - {0}
    if sizes:
        (vocab_size,) = sizes
        bias = torch.stack(
            [one.bias if one.bias.numel() else one.bias.new_zeros(vocab_size) for one in rules]
        )

    def padded(tables: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(tables, batch_first=True, padding_value=-1)

    return TokenRules(
        torch.cat([one.repetition_penalty for one in rules]),
        torch.cat([one.no_repeat_ngram_size for one in rules]),
        torch.cat([one.diversity_penalty for one in rules]),
        padded([one.bans[0] for one in rules]),
        padded([one.forced[0] for one in rules]),
        torch.cat([one.timestamps for one in rules]),
        bias,
    )

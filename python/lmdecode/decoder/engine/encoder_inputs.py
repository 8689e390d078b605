"""Input of an ``Engine`` of an encoder-decoder model: tokens, features or a memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lmdecode.decoder.checks import check_floats, check_memory
from lmdecode.decoder.engine.tokens import tokens_of

__all__ = ["Encoder", "EncoderInput", "EncoderInputs"]


class Encoder(Protocol):
    """The encoder of a ``Decoding``."""

    @property
    def takes_tokens(self) -> bool:
        """Whether the input is tokens, not features."""

    @property
    def longest(self) -> int | None:
        """Maximum number of positions of an input, None if unlimited."""

    def whole_source(self, source: Sequence[int]) -> Sequence[int]:
        """Return a source with the tokens that the model always has around it."""

    def check_source(self, name: str, source: Sequence[int]) -> None:
        """Raise ValueError for tokens that the model does not accept."""

    def check_features(self, name: str, features: Tensor) -> None:
        """Raise ValueError for features, [channels, frames], that the model does not accept."""

    def memory_of_tokens(self, source: Sequence[int]) -> Tensor:
        """Return [S, D] float32."""

    def memory_of_features(self, features: Tensor) -> Tensor:
        """Return [S, D] float32."""


class EncoderInput(NamedTuple):
    """A checked input; ``encode`` returns its memory, [positions, memory_size] float32."""

    positions: int
    encode: Callable[[], Tensor]


@dataclass(frozen=True)
class EncoderInputs:
    """The inputs of an engine: at most ``source`` positions of ``memory_size`` each.

    Without an encoder only memories can be given.
    """

    encoder: Encoder | None
    source: int
    memory_size: int

    def take(self, op: str, **given: Any) -> EncoderInput:
        """Check and return the one of ``input_ids``, ``input_features`` and ``memory`` given."""
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            raise ValueError(
                f"{op}: {' and '.join(names) or 'nothing'} is given as input; expected one of "
                f"{', '.join(given)}"
            )
        (name,) = names
        take: dict[str, Callable[[str, Any], EncoderInput]] = {
            "input_ids": self._tokens,
            "input_features": self._features,
            "memory": self._memory,
        }
        return take[name](op, given[name])

    def _check_encoder(self, op: str, name: str, takes_tokens: bool) -> Encoder:
        if self.encoder is None or self.encoder.takes_tokens != takes_tokens:
            other = "input_features" if takes_tokens else "input_ids"
            expected = "memory, without an encoder" if self.encoder is None else other
            raise ValueError(f"{op}: {name} is given; expected {expected}")
        return self.encoder

    def _check_positions(self, op: str, what: str, positions: int) -> None:
        if positions > self.source:
            raise ValueError(
                f"{op}: {what}; expected at most {self.source} positions, source of the engine"
            )

    def _tokens(self, op: str, value: Any) -> EncoderInput:
        encoder = self._check_encoder(op, "input_ids", takes_tokens=True)
        tokens = encoder.whole_source(tokens_of(op, "input_ids", value))
        encoder.check_source(f"{op}: input_ids", tokens)
        self._check_positions(op, f"input_ids has {len(tokens)} tokens", len(tokens))
        return EncoderInput(len(tokens), lambda: encoder.memory_of_tokens(tokens))

    def _features(self, op: str, value: Any) -> EncoderInput:
        encoder = self._check_encoder(op, "input_features", takes_tokens=False)
        features = value
        if not isinstance(value, Tensor) and hasattr(value, "__array__"):
            features = torch.as_tensor(value, device="cpu")
        check_floats(op, "input_features", features)
        encoder.check_features(f"{op}: input_features", features)
        positions = encoder.longest or 0
        self._check_positions(op, f"input_features gives {positions} positions", positions)
        kept = _copy_of(features)
        return EncoderInput(positions, lambda: encoder.memory_of_features(kept))

    def _memory(self, op: str, value: Any) -> EncoderInput:
        check_memory(op, value, self.memory_size, self.source)
        if not len(value):
            raise ValueError(f"{op}: memory has 0 positions; expected at least 1")
        kept = _copy_of(value)
        return EncoderInput(len(kept), lambda: kept)


def _copy_of(tensor: Tensor) -> Tensor:
    """Return a copy, as the caller may change the tensor while the request waits."""
    return tensor.detach().to(device="cpu", dtype=torch.float32, copy=True)

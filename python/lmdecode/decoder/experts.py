"""Feed-forward layers of experts: sizes and switches, and matrices that are read one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from lmdecode._checks import check_bool, check_choice, check_int, check_number
from lmdecode.linear.quantized_weight import LinearWeight

__all__ = ["ExpertMatrices", "ExpertsConfig", "Router"]

Router = Literal["softmax", "softmax_of_chosen", "sigmoid"]
ROUTERS = ("softmax", "softmax_of_chosen", "sigmoid")


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes and switches of feed-forward layers that consist of experts.

    A token's output is ``sum(weight * expert(x))`` over the experts that its router chose, and
    ``shared(x)``, if there is a shared expert. An expert is ``down(activation(gate(x)) * up(x))``
    with the model's activation. ``num_chosen`` is the experts of a token, ``size`` the inner
    features of one; ``layers`` says which layers have experts. Raises ValueError or TypeError that
    names the argument.

    ``router`` says what weights are: the "softmax" of the logits of all experts, the
    "softmax_of_chosen" ones, or the "sigmoid" of each. The largest are chosen, after
    ``router_choice_bias`` is added, which is no part of the weights; ties go to the lower index.
    With ``normalized``, weights are then divided by their sum + ``epsilon`` (for "sigmoid" alone),
    and at last multiplied by ``scale``.

    With ``alpha`` and ``limit``, an expert is ``down(g * sigmoid(alpha * g) * (u + 1))``, where
    ``g`` is ``min(gate(x), limit)`` and ``u`` is ``up(x)`` clamped to ``-limit`` and ``limit``.
    ``shared_size`` is the inner features of the shared expert (its weights are ``ffn_up`` and so
    on); 0: none.
    """

    num_experts: int
    num_chosen: int
    size: int
    layers: tuple[bool, ...]
    router: Router = "softmax"
    normalized: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    alpha: float | None = None
    limit: float | None = None
    shared_size: int = 0

    def __post_init__(self) -> None:
        """Check every argument."""
        op = "ExpertsConfig"
        check_int(op, "num_experts", self.num_experts, 1, 1 << 16, limits="1 to 65536")
        check_int(op, "num_chosen", self.num_chosen, 1, self.num_experts,
                  limits="1 to num_experts")  # fmt: skip
        limits = "0 to 2^31 - 1"
        check_int(op, "size", self.size, 1, (1 << 31) - 1, limits="1 to 2^31 - 1")
        check_int(op, "shared_size", self.shared_size, 0, (1 << 31) - 1, limits=limits)
        object.__setattr__(self, "layers", tuple(self.layers))
        for is_of_experts in self.layers:
            check_bool(op, "layers", is_of_experts)
        check_bool(op, "normalized", self.normalized)
        check_choice(op, "router", self.router, ROUTERS)
        if (self.alpha is None) != (self.limit is None):
            raise ValueError(
                f"{op}: alpha is {self.alpha} and limit is {self.limit}; expected both, or none"
            )
        for name in ("epsilon", "scale", "alpha", "limit"):
            value = getattr(self, name)
            if value is None:
                continue
            number = check_number(op, name, value)
            if not math.isfinite(number) or (name in ("epsilon", "limit") and number < 0):
                expected = " of at least 0" if name in ("epsilon", "limit") else ""
                raise ValueError(f"{op}: {name} is {number}; expected a finite number{expected}")
            object.__setattr__(self, name, number)
        if self.epsilon and self.router != "sigmoid":
            raise ValueError(f"{op}: epsilon is {self.epsilon}; expected 0 with {self.router!r}")


class ExpertMatrices(Sequence[LinearWeight]):
    """The matrices of one kind of a layer's ``count`` experts, each read when it is asked for.

    ``read`` returns the [out, in] matrix of an expert.
    """

    def __init__(self, count: int, read: Callable[[int], LinearWeight]) -> None:
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> LinearWeight: ...
    @overload
    def __getitem__(self, index: slice) -> list[LinearWeight]: ...
    def __getitem__(self, index: int | slice) -> Any:
        places = range(self._count)[index]
        return self._read(places) if isinstance(places, int) else list(map(self._read, places))

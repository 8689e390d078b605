"""The contract of an op (``tests/<area>/contracts.py``): calls, and what holds of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lmdecode.beam.trie import Trie


class Results(NamedTuple):
    """What a call returned, the tensors it was given, then, and all the memory behind them."""

    returned: Any
    tensors: list[Tensor]
    memories: list[Tensor]


class Call:
    """A function of lmdecode, or an op, with its arguments."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        self.function = function
        self.arguments: dict[int | str, Any] = {**dict(enumerate(arguments)), **options}

    def __call__(self, function: Callable[..., Any] | None = None) -> Any:
        """Call the function, or another one with the same arguments."""
        positional = [value for name, value in self.arguments.items() if isinstance(name, int)]
        options = {name: value for name, value in self.arguments.items() if isinstance(name, str)}
        return (function or self.function)(*positional, **options)

    def change(
        self, function: Callable[[Any], Any], names: Iterable[int | str] | None = None
    ) -> Call:
        """Return the call with its tensors, or those of some arguments, changed."""
        changed = Call(self.function)
        for name, value in self.arguments.items():
            is_chosen = names is None or name in names
            changed.arguments[name] = _map_tensors(function, value) if is_chosen else value
        return changed

    def copy(self) -> Call:
        """Return it with tensors of its own: the same strides, and all the memory behind them."""
        copied = Call(self.function)
        copied.arguments = copy.deepcopy(self.arguments)
        return copied

    def run(self, function: Callable[..., Any] | None = None) -> Results:
        """Call it with copies of its tensors."""
        mine = self.copy()
        returned, tensors = mine(function), mine.tensors()
        return Results(returned, tensors, [raw(tensor) for tensor in tensors])

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments."""
        return [leaf for leaf in tree_leaves(self.arguments) if isinstance(leaf, Tensor)]

    def op_calls(self) -> list[tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]]:
        """Return each op of lmdecode that it calls, with arguments as they were before."""
        with _Recorder() as recorder:
            self.copy()()
        return recorder.calls


def _map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    def of_leaf(leaf: Any) -> Any:
        return function(leaf) if isinstance(leaf, (Tensor, Trie)) else leaf

    return tree_map(of_leaf, value)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "lmdecode":
            self.calls.append((func, copy.deepcopy(args), copy.deepcopy(kwargs or {})))
        return func(*args, **(kwargs or {}))


def raw(tensor: Tensor) -> Tensor:
    """All memory behind a tensor, as bytes."""
    storage = tensor.untyped_storage()
    return torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(storage)


# --- Layouts: what lies between the elements is NaN, or the largest integer -----------------------


def _filled(shape: Sequence[int], like: Tensor) -> Tensor:
    if like.dtype is torch.bool:
        return like.new_ones(shape)
    worst = torch.nan if like.is_floating_point() else torch.iinfo(like.dtype).max
    return like.new_full(shape, worst)


def _steps(x: Tensor) -> Tensor:
    """Every third element of its last dimension."""
    if x.dim() == 0:
        return x
    wide = _filled((*x.shape, 3), x)
    wide[..., 1] = x
    return wide[..., 1]


def _apart(x: Tensor) -> Tensor:
    """Rows with something behind them."""
    if x.dim() == 0:
        return x
    wide = _filled((*x.shape[:-1], x.shape[-1] + 5), x)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def _columns(x: Tensor) -> Tensor:
    """The first dimension innermost."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0) if x.dim() > 1 else x


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "steps": _steps, "rows apart": _apart, "columns": _columns,
}  # fmt: skip


# --- Contracts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contract:
    """What holds of an op.

    Attributes
    ----------
    op
        Its name, with its overload, such as ``log_softmax_top_k.trie``.
    calls
        Names of small calls of the op, or of functions that call it, and what builds each. All are
        checked by opcheck.
    compiles
        Whether they are also compiled in one graph; opcheck does so with ops themselves.
    has_fakes
        False where the function reads values of tensors, which meta tensors do not have.
    strided
        Arguments that may have any strides: they are not in the bits of the results.
    many
        Calls large enough for several threads: the same bits on any number of them.
    everywhere
        Calls that have the same bits at each CPU capability.
    rows
        Arguments whose tensors have a row for each row of the results, the first one always: the
        bits of a row are the same in any batch.
    without_rows
        Names, or their beginnings, of the calls of which that is not said.
    reference
        Has the same bits, and writes the same, where it is given.
    is_slow
        Whether its tests are left out of the developer's loop.
    """

    op: str
    calls: dict[str, Callable[[], Call]]
    compiles: bool = True
    has_fakes: bool = True
    strided: tuple[int | str, ...] = ()
    many: Callable[[], Iterable[Call]] | None = None
    everywhere: Callable[[], Iterable[Call]] | None = None
    rows: tuple[int | str, ...] = ()
    without_rows: tuple[str, ...] = ()
    is_slow: bool = False
    reference: Callable[..., Any] | None = field(default=None)


def rows_of(results: Any, rows: Sequence[int]) -> Any:
    """Return some rows of every tensor among results."""
    return _map_tensors(lambda tensor: tensor[list(rows)], results)

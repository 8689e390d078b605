"""Kinds of cases: what an area's module makes, and the calls that every area has."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.support.contracts import LAYOUTS, Call, Contract, raw

__all__ = ["AREAS", "DTYPES", "FORMATS", "Kinds", "Parts", "kinds_of", "laid_out"]

AREAS = ("sampling", "beam", "kv_cache", "attention", "linear", "decoder", "texts")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = ("float32", "bfloat16", "int8", "int4")

# What a case gives, part by part: anything made of tensors, numbers and text. A part is digested
# before the next one is computed: some results are overwritten by the next call.
Parts = Iterator[Any]
# A kind is given a source of choices, and the case's number for seeds.
Kind = Callable[[random.Random, int], Parts]
# What an op writes there is no result: memory that it computes in, and the end of a list.
_NO_RESULTS = ("workspace", "copies")


class Kinds(dict[str, tuple[int, Kind]]):
    """The kinds of an area by name, and how often each is drawn."""

    def __init__(self, area: str, *, has_ops: bool = True) -> None:
        """Begin with the calls of the contracts of an area's ops."""
        super().__init__()
        if not has_ops:
            return
        contracts: list[Contract] = importlib.import_module(f"tests.{area}.contracts").CONTRACTS
        small = [(contract, make) for contract in contracts for make in contract.calls.values()]

        @functools.cache
        def large() -> list[Call]:
            return [call for contract in contracts if contract.many for call in contract.many()]

        @self.add(20)
        def contract(choice: random.Random, number: int) -> Parts:
            of_op, make = choice.choice(small)
            call = make()
            if of_op.strided and choice.random() < 0.5:
                call = call.change(choice.choice(list(LAYOUTS.values())), of_op.strided)
            yield from _of_call(call)

        if any(contract.many for contract in contracts):

            @self.add(3)
            def many_rows(choice: random.Random, number: int) -> Parts:
                yield from _of_call(choice.choice(large()))

    def add(self, often: int, name: str | None = None) -> Callable[[Kind], Kind]:
        """Add a function as a kind, by its own name or another one."""

        def add(make: Kind) -> Kind:
            self[name or make.__name__] = (often, make)
            return make

        return add


def _of_call(call: Call) -> Parts:
    """Yield what a call returns, and the memory that it may have written."""
    mine = call.copy()
    yield mine()
    schema = getattr(getattr(mine.function, "default", mine.function), "_schema", None)
    for name in mine.arguments:
        if schema is not None and isinstance(name, int):
            argument = schema.arguments[name]
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if not writes or argument.name in _NO_RESULTS:
                mine.arguments[name] = None
    yield [raw(tensor) for tensor in mine.tensors()]


def laid_out(choice: random.Random, tensor: torch.Tensor, share: float) -> torch.Tensor:
    """Return a share of tensors with other strides."""
    return choice.choice(list(LAYOUTS.values()))(tensor) if choice.random() < share else tensor


def kinds_of(area: str) -> Kinds:
    """Return the kinds of an area."""
    kinds: Kinds = importlib.import_module(f"benchmarks.digests.{area}").KINDS
    return kinds

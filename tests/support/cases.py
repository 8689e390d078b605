"""One call of an op, and the comparison of two results bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lmdecode.beam.trie import Trie
from lmdecode.beam.types import BeamCandidates
from lmdecode.sampling.types import SampleOutput


@dataclass(frozen=True)
class SamplingCase:
    """One call of ``top_k_top_p_sample``; its name tells how to get it again."""

    name: str
    logits: torch.Tensor
    arguments: dict[str, Any] = field(default_factory=dict)

    def call(self, sample: Callable[..., SampleOutput], **changes: Any) -> SampleOutput:
        """Call ``sample`` with some arguments changed; a case without noise is ``greedy``."""
        arguments = {**self.arguments, **changes}
        noise = ("q", "seed", "generator", "greedy")
        if all(arguments.get(name) is None for name in noise):
            arguments["greedy"] = True
        return sample(self.logits, **arguments)

    def to(self, device: torch.device | str) -> SamplingCase:
        """Return the case with its tensors on another device (strides are kept for dense ones)."""

        def move(value: Any) -> Any:
            return value.to(device) if isinstance(value, torch.Tensor) else value

        arguments = {name: move(value) for name, value in self.arguments.items()}
        return replace(self, logits=move(self.logits), arguments=arguments)

    def rows(self, rows: Sequence[int]) -> SamplingCase:
        """Return the case with some of its rows, in this order; an int seed becomes one a row."""
        batch = len(self.logits)

        def cut(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dim() and len(value) == batch:
                return value[list(rows)]
            return value

        arguments = {name: cut(value) for name, value in self.arguments.items()}
        return replace(self, logits=self.logits[list(rows)], arguments=arguments)

    def __str__(self) -> str:
        def text(value: Any) -> str:
            if not isinstance(value, torch.Tensor):
                return str(value)
            short = value.dim() == 1 and len(value) <= 8
            return str(value.tolist()) if short else f"{value.dtype} {tuple(value.shape)}"

        arguments = ", ".join(f"{name}={text(value)}" for name, value in self.arguments.items())
        shape, strides = tuple(self.logits.shape), self.logits.stride()
        return f"{self.name}: {self.logits.dtype} {shape} strides {strides}, {arguments}"


@dataclass(frozen=True)
class BeamCase:
    """One call of ``log_softmax_top_k``: its arguments, and how to get it again."""

    name: str
    logits: torch.Tensor
    beam_scores: torch.Tensor
    num_candidates: int
    num_beams: int | list[int] | torch.Tensor
    processors: dict[str, Any] = field(default_factory=dict)

    def call(self, op: Callable[..., BeamCandidates]) -> BeamCandidates:
        """Call ``op`` with the arguments of the case."""
        arguments = (self.logits, self.beam_scores, self.num_candidates)
        return op(*arguments, num_beams=self.num_beams, **self.processors)

    def to(self, device: torch.device | str) -> BeamCase:
        """Return the case with its tensors on another device."""
        beams = self.num_beams
        return replace(
            self,
            logits=self.logits.to(device),
            beam_scores=self.beam_scores.to(device),
            num_beams=beams.to(device) if isinstance(beams, torch.Tensor) else beams,
            processors={
                name: value.to(device) if isinstance(value, (torch.Tensor, Trie)) else value
                for name, value in self.processors.items()
            },
        )

    def __str__(self) -> str:
        shape, strides = tuple(self.logits.shape), self.logits.stride()
        return (
            f"{self.name}: {self.logits.dtype} {shape} strides {strides}, beam_scores "
            f"{self.beam_scores.tolist()}, {self.num_candidates} of {self.num_beams} beams, "
            f"processors {list(self.processors)}"
        )


def assert_same_bits(actual: Any, expected: Any, case: object = "") -> None:
    """Raise AssertionError where two results of one type differ in any bit, dtype or shape."""
    for name, got, want in zip(expected._fields, actual, expected, strict=True):
        if got is None or want is None:
            assert got is None and want is None, f"{name}: {got} instead of {want}, {case}"
            continue
        got, want = got.cpu(), want.cpu()
        assert got.dtype == want.dtype, f"{name}: {got.dtype} instead of {want.dtype}, {case}"
        assert got.shape == want.shape, f"{name}: {got.shape} instead of {want.shape}, {case}"
        if not torch.equal(bits(got), bits(want)):
            places = (bits(got) != bits(want)).nonzero()
            first = tuple(places[0].tolist())
            row = f"; this row: {case.rows([first[0]])}" if isinstance(case, SamplingCase) else ""
            raise AssertionError(
                f"{name}{list(first)}: {got[first].item()!r} instead of {want[first].item()!r}, "
                f"{len(places)} elements differ, {case}{row}"
            )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bit patterns of a float tensor as integers, other tensors as they are."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()]) if tensor.is_floating_point() else tensor

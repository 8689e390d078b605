"""The checks of ``lmdecode verify``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

import lmdecode
from lmdecode.cli.verify_ops import OPS, bits_of_ops
from lmdecode.cli.verify_process import Plan
from lmdecode.cli.verify_store import AfterKill, ProcessError, after_kill, process_facts
from lmdecode.cli.verify_texts import (
    BATCH,
    Bits,
    Texts,
    Written,
    write_alone,
    write_in_a_batch,
)
from lmdecode.decoding import Decoding

__all__ = ["Checks", "Found", "NotChecked", "levels_here"]

_LOOKUP = {"prompt_lookup_num_tokens": 8}


def levels_here() -> tuple[str, ...]:
    """The CPU levels that this machine and this build have, that of this process last."""
    own = lmdecode.cpu_capability()
    return (*(level for level in lmdecode.cpu_capabilities() if level != own), own)


class NotChecked(Exception):
    """Why something could not be checked."""


@dataclass(frozen=True)
class Found:
    """What a check found.

    Attributes
    ----------
    bits, expected
        Digests; None: these are what others are compared with.
    kinds
        What each digest is of.
    note
        What else is told.
    fault
        What is wrong though the bits may be the same.
    """

    bits: Bits
    expected: Bits | None
    kinds: Sequence[str]
    note: str = ""
    fault: str = ""

    @property
    def differing(self) -> list[str]:
        """What has other bits."""
        pairs = zip(self.kinds, self.bits, self.expected or self.bits, strict=True)
        return [kind for kind, bits, expected in pairs if bits != expected]


class Checks:
    """The checks of a model; what several lines need is computed once.

    Parameters
    ----------
    decoding
        The model.
    texts
        What it writes.
    folder
        For what processes read and write.
    saved
        The model's folder, where ``Decoding.load`` takes it.
    """

    def __init__(self, decoding: Decoding, texts: Texts, folder: Path, saved: Path | None) -> None:
        self._decoding, self._texts, self._folder, self._saved = decoding, texts, folder, saved
        self._kinds = [asked.kind for asked in texts.compared]

    def lines(self) -> Iterator[tuple[str, Callable[[], Found]]]:
        """Yield the name of each line, and what finds it."""
        yield "alone", lambda: self._found(None, self._alone)
        yield f"in a batch of {BATCH}", lambda: self._found(self._alone.bits, self._batch())
        yield "on one thread", partial(self._on_threads, 1)
        yield "on two threads", partial(self._on_threads, 2)
        yield "with drafts", self._with_drafts
        own, *others = reversed(levels_here())
        yield f"ops at {own}", lambda: Found(self._ops, None, list(OPS))
        for level in others:
            facts = _once(partial(self._at_level, level))
            yield f"ops at {level}", partial(self._ops_at, facts)
            yield f"alone = in a batch at {level}", partial(self._texts_at, facts)
        around = _once(self._around_a_kill)
        yield "from the store after kill -9", partial(self._after_kill, around)
        yield "with a byte of the store flipped", partial(self._with_a_flip, around)

    def _found(self, expected: Bits | None, *several: Written, **more: str) -> Found:
        """Return the first bits that are not the expected ones, else those."""
        other = next((each for each in several if each.bits != expected), several[0])
        return Found(other.bits, expected, self._kinds, **more)

    # ---- in this process

    @cached_property
    def _alone(self) -> Written:
        return self._write_alone()

    @cached_property
    def _ops(self) -> Bits:
        return bits_of_ops()

    def _write_alone(self, **options: Any) -> Written:
        return write_alone(self._decoding, self._texts.compared, **options)

    def _batch(self, **options: Any) -> Written:
        return write_in_a_batch(self._decoding, self._texts, **options)

    def _on_threads(self, count: int) -> Found:
        expected, expected_ops = self._alone.bits, self._ops
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            ops = Found(bits_of_ops(), expected_ops, list(OPS))
            fault = f"ops differ: {'; '.join(ops.differing)}" if ops.differing else ""
            return self._found(expected, self._write_alone(), self._batch(), fault=fault)
        finally:
            torch.set_num_threads(before)

    def _with_drafts(self) -> Found:
        """By prompt lookup in a batch; alone by the model itself, whose drafts are right."""
        batch = self._batch(**_LOOKUP)
        alone = self._write_alone(
            assistant_model=self._decoding, assistant_confidence_threshold=0.0
        )
        note = (
            f"accepted: {batch.accepted} of {batch.drafted} by lookup, "
            f"{alone.accepted} of {alone.drafted} own"
        )
        fault = "" if alone.accepted else "a model's own drafts were not accepted"
        return self._found(self._alone.bits, batch, alone, note=note, fault=fault)

    # ---- in processes

    @cached_property
    def _plan(self) -> Path:
        """The file of what processes are to write; with it, the model that they load."""
        model = self._saved
        if model is None:
            model = self._folder / "model"
            try:
                self._decoding.save(model)
            except OSError as error:
                raise NotChecked(f"other processes cannot have the model: {error}") from error
        path = self._folder / "plan.json"
        plan = Plan(
            str(model.absolute()), self._decoding.cache_dtype,
            self._texts.tokens, self._texts.context,
        )  # fmt: skip
        plan.write(path)
        return path

    def _at_level(self, level: str) -> dict[str, Bits]:
        (facts,) = process_facts("level", self._plan, LMDECODE_CPU_CAPABILITY=level)
        return {name: tuple(facts[name]) for name in ("ops", "alone", "batch")}

    def _ops_at(self, facts: Callable[[], dict[str, Bits]]) -> Found:
        return Found(facts()["ops"], self._ops, list(OPS))

    def _texts_at(self, facts: Callable[[], dict[str, Bits]]) -> Found:
        return Found(facts()["batch"], facts()["alone"], self._kinds)

    def _around_a_kill(self) -> AfterKill:
        try:
            import lmdecode.store  # noqa: F401  # it is built where SQLite is
        except ImportError as error:
            raise NotChecked(str(error)) from error
        fingerprint = self._decoding.fingerprint()
        key_bytes = fingerprint.head_size * fingerprint.torch_dtype.itemsize
        prompts = [asked.prompt for asked in self._texts.compared]
        token_bytes = fingerprint.num_kv_heads * key_bytes
        found = after_kill(self._plan, prompts, token_bytes, self._folder)
        if found is None:
            raise NotChecked("no prompt was stored before the kill")
        return found

    def _after_kill(self, around: Callable[[], AfterKill]) -> Found:
        found = around()
        whole = _checked(found.whole)
        tokens = sum(len(asked.prompt) for asked in self._texts.compared)
        lost = sum(max(0, n - m) for n, m in zip(found.stored, whole.cached, strict=True))
        return self._found(
            self._alone.bits,
            whole,
            note=f"{sum(whole.cached)} of {tokens} prompt tokens loaded",
            fault=f"{lost} tokens are lost whose write was acknowledged" if lost else "",
        )

    def _with_a_flip(self, around: Callable[[], AfterKill]) -> Found:
        found = around()
        of = found.damaged
        whole, broken = _checked(found.whole), _checked(found.broken)
        stored, served = found.stored[of], broken.cached[of]
        if whole.cached[of] < stored:
            raise NotChecked("its keys were not found before they were damaged either")
        if served >= stored:
            return self._found(self._alone.bits, broken, fault="damaged keys were loaded")
        note = f"refused: {served} of {stored} prompt tokens loaded"
        return self._found(self._alone.bits, broken, note=note)


def _checked(written: Written | ProcessError) -> Written:
    if isinstance(written, ProcessError):
        raise written
    return written


def _once(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that calls another one once; it raises that one's error each time."""
    outcome: list[Any] = []

    def call() -> Any:
        if not outcome:
            try:
                outcome.append(function())
            except Exception as error:
                outcome.append(error)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    return call

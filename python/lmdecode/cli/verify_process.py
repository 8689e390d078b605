"""Processes of ``lmdecode verify``: at another CPU level, and around a store that is killed.

``python -m lmdecode.cli.verify_process TASK PLAN ...``, which prints lines of JSON.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from lmdecode.cli.errors import one_line
from lmdecode.cli.verify_texts import (
    Asked,
    Texts,
    Written,
    bits_of_ops,
    write_alone,
    write_in_a_batch,
)
from lmdecode.decoding import Decoding

__all__ = ["AfterKill", "ProcessError", "VerifyPlan", "after_kill", "main", "process_facts"]

_CAPACITY_BYTES = 1 << 36  # far more than is written


@dataclass(frozen=True)
class VerifyPlan:
    """A model in a folder of ``Decoding.save``, and arguments of ``Texts``, for another process."""

    model: str
    cache_dtype: str
    tokens: list[int]
    context: int

    def write(self, path: Path) -> None:
        """Write it to a file."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: str) -> VerifyPlan:
        """Read it from a file."""
        return VerifyPlan(**json.loads(Path(path).read_text()))

    def load(self) -> tuple[Decoding, Texts]:
        """Return the model and the texts."""
        decoding = Decoding.load(self.model, cache_dtype=self.cache_dtype)
        return decoding, Texts(self.tokens, self.context)


def _tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def _level(plan: VerifyPlan) -> None:
    """Tell the bits at the CPU level of this process."""
    decoding, texts = plan.load()
    alone = write_alone(decoding, texts.compared)
    batch = write_in_a_batch(decoding, texts)
    _tell(ops=bits_of_ops(), alone=alone.bits, batch=batch.bits)


def _until_killed(texts: Texts) -> Iterator[tuple[int, Asked]]:
    """The compared requests with their numbers; then others, so that there is work to be killed."""
    yield from enumerate(texts.compared)
    for begin in texts.tokens:
        for asked in texts.compared:
            yield -1, asked._replace(prompt=[begin, *asked.prompt[1:]])


def _write(plan: VerifyPlan, store_folder: str) -> None:
    """Store prompts while texts are written, and tell how much of each is stored."""
    from lmdecode.store import KVStore

    decoding, texts = plan.load()
    with KVStore(
        store_folder, fingerprint=decoding.fingerprint(), capacity_bytes=_CAPACITY_BYTES
    ) as store:
        for number, asked in _until_killed(texts):
            write_alone(decoding, [asked], store=store)  # returns when the store has acknowledged
            hit = store.lookup(array("i", asked.prompt[:-1]))
            hit.release()
            _tell(number=number, stored=hit.num_tokens)


def _read(plan: VerifyPlan, *store_folders: str) -> None:
    """Write the texts with each store; tell their bits and the tokens from the store."""
    from lmdecode.store import KVStore

    decoding, texts = plan.load()
    for folder in store_folders:
        try:
            with KVStore(
                folder, fingerprint=decoding.fingerprint(), capacity_bytes=_CAPACITY_BYTES
            ) as store:
                written = write_alone(decoding, texts.compared, store=store)
        except (OSError, RuntimeError, ValueError) as error:
            _tell(failure=one_line(error))
        else:
            _tell(bits=written.bits, cached=written.cached)


_TASKS: dict[str, Callable[..., None]] = {"level": _level, "write": _write, "read": _read}


def main(task: str, plan: str, *arguments: str) -> None:
    """Do a task, and print what was found."""
    _TASKS[task](VerifyPlan.read(plan), *arguments)


_ACKNOWLEDGED = 8  # prompts, when the writer is killed
# A slot: see docs/reference/store_format.md.
_MAGIC, _ALIGNED = b"LMDKVSLT", 4096
_HEADER = struct.Struct("<8sIIQQIIII")  # magic, version, size, area, num_tokens, count, ..., planes
_CHECKSUMS, _CHECKSUM_BYTES, _TOKEN_BYTES = 120, 4, 4
# In the second last byte of the last key, a float's highest bit of the mantissa.
_FLIPPED, _FROM_END = 0x40, 2


class ProcessError(Exception):
    """A process ended otherwise than it should."""


@contextmanager
def _started(
    task: str, plan: Path, *arguments: object, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Start a process, which is killed at the end; the file has its stderr."""
    command = [sys.executable, "-m", __name__, task, str(plan), *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True,
            env={**os.environ, **environment},
        ) as process:  # fmt: skip
            try:
                yield process, errors
            finally:
                process.kill()


def _facts(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    yield from map(json.loads, process.stdout)


def _failure(process: subprocess.Popen[str], errors: IO[str]) -> ProcessError:
    errors.seek(0)
    said = [line.strip() for line in errors if line.strip()]
    return ProcessError(": ".join([f"a process ended with status {process.wait()}", *said[-1:]]))


def process_facts(
    task: str, plan: Path, *arguments: object, **environment: str
) -> list[dict[str, Any]]:
    """Run a task of this module, and return its facts; raise ProcessError if it failed."""
    with _started(task, plan, *arguments, **environment) as (process, errors):
        found = list(_facts(process))
        if process.wait() != 0 or not found:
            raise _failure(process, errors)
        return found


class AfterKill(NamedTuple):
    """Results of a new process with the store of one that was killed.

    ``stored`` has how many tokens of each prompt the writer knew to be stored, 0 where it did not
    come so far. ``whole`` and ``broken`` are the texts written with the store, and with a copy in
    which a byte of the keys of prompt ``damaged`` is flipped; or the error.
    """

    stored: tuple[int, ...]
    whole: Written | ProcessError
    broken: Written | ProcessError
    damaged: int


def _kill_a_writer(plan: Path, folder: Path, number: int) -> tuple[int, ...]:
    """Kill a process that stores prompts; return how much of each it knew to be stored."""
    stored = [0] * number
    with _started("write", plan, folder) as (process, errors):
        for fact in _facts(process):
            is_compared = fact["number"] >= 0
            if is_compared:
                stored[fact["number"]] = fact["stored"]
            if not is_compared or sum(map(bool, stored)) >= _ACKNOWLEDGED:
                process.send_signal(signal.SIGKILL)
                break
        if process.wait() != -signal.SIGKILL:
            raise _failure(process, errors)
    return tuple(stored)


def _slots(memory: mmap.mmap) -> Iterator[tuple[int, int, tuple[int, ...], int]]:
    """Yield each slot's place, the tokens before its own, its own, and the size of its header."""
    place = memory.find(_MAGIC)
    while place >= 0:
        if place % _ALIGNED == 0:
            _, _, size, _, num_tokens, count, _, planes, _ = _HEADER.unpack_from(memory, place)
            begin = place + _CHECKSUMS + _CHECKSUM_BYTES * planes
            yield place, num_tokens - count, struct.unpack_from(f"<{count}i", memory, begin), size
        place = memory.find(_MAGIC, place + 1)


def _flip_a_byte(folder: Path, prompt: Sequence[int], token_bytes: int) -> None:
    """Flip a bit in the last key of the first layer of a prompt, as far as it is stored.

    ``token_bytes`` is the size of a token's keys in a layer.
    """
    for path in sorted(folder.glob("*/slab-*")):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            for place, before, tokens, header in _slots(memory):
                if tokens and list(tokens) == list(prompt[before:]):
                    memory[place + header + len(tokens) * token_bytes - _FROM_END] ^= _FLIPPED
                    return
    raise ProcessError(f"the {len(prompt)} stored tokens of a prompt are in no slot")


def _written(facts: dict[str, Any]) -> Written | ProcessError:
    if "failure" in facts:
        return ProcessError(facts["failure"])
    return Written(tuple(facts["bits"]), tuple(facts["cached"]))


def after_kill(
    plan: Path, prompts: Sequence[Sequence[int]], token_bytes: int, folder: Path
) -> AfterKill | None:
    """Kill a process that stores prompts, and let another one go on, also with a flipped byte.

    ``plan`` is the file of a ``VerifyPlan``, ``folder`` is for the stores, ``token_bytes`` is the
    size of a token's keys in a layer. Returns None if no prompt was stored; raises ProcessError if
    a process failed.
    """
    killed, damaged = folder / "killed", folder / "damaged"
    stored = _kill_a_writer(plan, killed, len(prompts))
    longest = max(range(len(prompts)), key=stored.__getitem__)
    if not stored[longest]:
        return None
    shutil.copytree(killed, damaged, ignore=shutil.ignore_patterns("socket"))
    _flip_a_byte(damaged, prompts[longest][: stored[longest]], token_bytes)
    whole, broken = map(_written, process_facts("read", plan, killed, damaged))
    return AfterKill(stored, whole, broken, longest)


if __name__ == "__main__":
    main(*sys.argv[1:])

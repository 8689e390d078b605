"""Processes of ``lmdecode verify``: at another CPU level, and around a store.

``python -m lmdecode.cli.verify_process TASK PLAN ...``, of which each line that is printed is JSON.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmdecode.cli.errors import one_line
from lmdecode.cli.verify_ops import bits_of_ops
from lmdecode.cli.verify_texts import Asked, Texts, write_alone, write_in_a_batch
from lmdecode.decoding import Decoding

__all__ = ["Plan", "main"]

_CAPACITY_BYTES = 1 << 36  # what is written is far less


@dataclass(frozen=True)
class Plan:
    """What a process needs to write the same texts.

    Attributes
    ----------
    model
        A folder of ``Decoding.save``.
    cache_dtype
        As of ``Decoding``.
    tokens, context
        As of ``Texts``.
    """

    model: str
    cache_dtype: str
    tokens: list[int]
    context: int

    def write(self, path: Path) -> None:
        """Write it to a file."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: str) -> Plan:
        """Read it from a file."""
        return Plan(**json.loads(Path(path).read_text()))

    def load(self) -> tuple[Decoding, Texts]:
        """Return the model and the texts."""
        decoding = Decoding.load(self.model, cache_dtype=self.cache_dtype)
        return decoding, Texts(self.tokens, self.context)


def _tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def _level(plan: Plan) -> None:
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


def _write(plan: Plan, store_folder: str) -> None:
    """Store prompts while texts are written, and tell of each how much of it is stored."""
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


def _read(plan: Plan, *store_folders: str) -> None:
    """Write the texts with each store, and tell their bits and what came from the store."""
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
    _TASKS[task](Plan.read(plan), *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What processes that share a store ask the one that has its lock: one table for both sides.

An argument is JSON where JSON can hold it. Of others the header says what they are, and their bytes
are parts of the message. Planes lie in memory that goes with the message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from lmdecode.store._messages import Message
from lmdecode.store._native import PutOptions, Scope, Store
from lmdecode.store._shared_planes import TakenMemory
from lmdecode.store._tensors import Planes

#: Methods of ``Store`` that change something, or tell of what does.
CALLS = (
    "put", "commit_session", "write_session", "remove_session", "erase", "erases", "insert_image",
    "pin", "flush", "failure", "stats", "collect", "import_from",
)  # fmt: skip
#: What they store is durable when they return, unless the caller's store is relaxed.
DURABLE_CALLS = ("put", "commit_session", "write_session")
LONG_CALLS = ("erase", "erases", "collect", "import_from")


def run(store: Store, call: str, arguments: Sequence[Any]) -> Any:
    """Run a call, of which ``pin`` has a scope and tokens in the place of a hit."""
    if call != "pin":
        return getattr(store, call)(*arguments)
    scope, ids, pinned = arguments
    if (hit := store.peek(scope, ids)) is not None:
        store.pin(hit, pinned)
        hit.release()
    return None


def question(call: str, arguments: Sequence[Any], relaxed: bool) -> Message:
    """Return the message that asks for a call."""
    said: list[Any] = []
    parts: list[bytes | bytearray | memoryview] = []
    for argument in arguments:
        match argument:
            case Scope():
                said.append({"scope": 2})
                parts += (argument.salt, argument.context)
            case PutOptions():
                said.append({"options": [argument.ttl_ms, argument.quota_bytes, argument.pin]})
            case Planes():
                said.append({"planes": argument.counts})
            case bytes():
                said.append({"bytes": 1})
                parts.append(argument)
            case bytearray() | memoryview():
                said.append({"buffer": 1})
                parts.append(argument)
            case list():
                said.append({"list": len(argument)})
                parts += argument
            case _:
                said.append(None if callable(argument) else argument)  # nobody hears of progress
    return Message({"call": call, "arguments": said, "relaxed": relaxed}, parts)


def arguments_of(message: Message, memory: TakenMemory | None) -> Iterator[Any]:
    """Yield the arguments of a question; raise ValueError for planes without their memory."""
    parts = iter(message.parts)
    for said in message.fields["arguments"]:
        match said:
            case {"scope": _}:
                yield Scope(bytes(next(parts)), bytes(next(parts)))
            case {"options": options}:
                yield PutOptions(*options)
            case {"planes": counts}:
                if memory is None:
                    raise ValueError("planes without memory")
                yield memory.planes(counts)
            case {"bytes": _}:
                yield bytes(next(parts))
            case {"buffer": _}:
                yield next(parts)
            case {"list": count}:
                yield list(islice(parts, count))
            case _:
                yield said

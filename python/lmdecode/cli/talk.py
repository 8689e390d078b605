"""A talk that goes on: its messages in a file, its prompts by the model's chat template."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lmdecode.serving.text_model import TextModel

__all__ = ["Talk", "TalkFile", "prompt_of"]

_VERSION = 1
Message = dict[str, Any]


def prompt_of(model: TextModel, messages: Sequence[Message], *, asks: bool = True) -> list[int]:
    """Return the tokens of messages: those that the chat template gives for the whole talk.

    Without a template, a talk is one plain text, in which the user's lines follow the answers.
    """
    if model.template is not None:
        text = model.template.render(messages, add_generation_prompt=asks)
        return model.tokenizer.encode(text, add_special_tokens=False)
    text = ""
    for message in messages:
        is_line = message["role"] == "user" and text
        text += f"\n{message['content']}" if is_line else message["content"]
    return model.tokenizer.encode(text)


class TalkFile:
    """Where the messages of a talk are kept. One process has it; others read it.

    Parameters
    ----------
    folder : path
        Of all talks.
    name : str
        Of the talk.
    key : str
        Of the model: talks of one name with several models are several.
    title : str
        Of the model, for people.
    """

    def __init__(self, folder: Path, name: str, key: str, title: str) -> None:
        self.folder, self.name, self._key, self._title = folder, name, key, title
        self.path = folder / f"{self._safe(name)}.{key}.json"
        self._lock: int | None = None

    @staticmethod
    def _safe(name: str) -> str:
        """Return a name that a file can have: of a long one a part, and its hash."""
        safe = quote(name, safe=" ").replace(".", "%2E")
        if len(safe) <= 120:
            return safe
        return f"{safe[:80]}%{hashlib.sha256(name.encode()).hexdigest()[:16]}"

    def take(self) -> bool:
        """Have the talk for this process; return whether no other one has it."""
        try:
            import fcntl
        except ImportError:  # where there are no such locks, the last one to write stays
            return True
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def leave(self) -> None:
        """Let others have the talk."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def read(self) -> list[Message]:
        """Return the messages, none where there is no such talk.

        Raises
        ------
        ValueError
            The file is damaged, or of a later version.
        """
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        try:
            found = json.loads(text)
            version, messages = found["version"], found["messages"]
            is_known = version == _VERSION and all(
                isinstance(message["role"], str) and isinstance(message["content"], str)
                for message in messages
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the talk in {self.path} is damaged ({error!r})") from None
        if not is_known:
            raise ValueError(
                f"the talk in {self.path} is of version {version!r}; expected {_VERSION}, with "
                "messages of text"
            )
        return list(messages)

    def write(self, messages: Sequence[Message]) -> None:
        """Keep the messages; all of them or those before."""
        content = {
            "version": _VERSION,
            "name": self.name,
            "model": self._title,
            "messages": list(messages),
        }
        temporary = self.path.with_suffix(f".{os.getpid()}")
        try:
            with open(temporary, "w", encoding="utf-8", opener=_private) as file:
                json.dump(content, file, ensure_ascii=False, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def of_others(self) -> list[str]:
        """Return which other models have a talk of this name."""
        return [str(found.get("model")) for found in self._others()]

    def _others(self) -> Iterator[Mapping[str, Any]]:
        if not self.folder.is_dir():
            return
        start = f"{self._safe(self.name)}."
        for path in sorted(self.folder.glob("*.json")):
            if path.name.startswith(start) and path != self.path:
                with contextlib.suppress(OSError, ValueError):  # it is of no account here
                    found = json.loads(path.read_text(encoding="utf-8"))
                    if isinstance(found, dict) and found.get("name") == self.name:
                        yield found


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class Talk:
    """Messages of a talk, in order, and where they are kept.

    Parameters
    ----------
    messages
        That were said before.
    file
        None: they are not kept.
    """

    def __init__(self, messages: Sequence[Message] = (), file: TalkFile | None = None) -> None:
        self.messages = list(messages)
        self._file = file

    def _keep(self) -> None:
        if self._file is not None:
            self._file.write(self.messages)

    @property
    def system(self) -> str | None:
        """The system message."""
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    @property
    def num_turns(self) -> int:
        """How many answers there are."""
        return sum(message["role"] == "assistant" for message in self.messages)

    def set_system(self, text: str) -> None:
        """Replace the system message; an empty one is none."""
        if self.system is not None:
            del self.messages[0]
        if text:
            self.messages.insert(0, {"role": "system", "content": text})
        self._keep()

    def with_line(self, line: str) -> list[Message]:
        """Return the messages and what the user says next."""
        return [*self.messages, {"role": "user", "content": line}]

    def add(self, line: str, said: Message) -> None:
        """Add what the user said, and the answer."""
        self.messages = [*self.with_line(line), said]
        self._keep()

    def clear(self) -> None:
        """Forget all but the system message."""
        self.messages = self.messages[:1] if self.system is not None else []
        self._keep()

    def undo(self) -> str | None:
        """Forget the last answer and what it answered, which is returned; None: there is none."""
        if self.num_turns == 0:
            return None
        *self.messages, line, _ = self.messages
        self._keep()
        text: str = line["content"]
        return text

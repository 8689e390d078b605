"""``lmdecode chat``: a talk with a model, streamed, which goes on in another process."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lmdecode.cli import COMMANDS
from lmdecode.cli.answering import Reply, answer
from lmdecode.cli.errors import CommandError, one_line
from lmdecode.cli.options import (
    add_draft_option,
    add_model_options,
    add_sampling_options,
    capacity_of,
    check_at_least_1,
    drafts_of,
    load_chat_model,
    sampling_of,
)
from lmdecode.cli.terminal import dimmed
from lmdecode.serving.reasoning import ReasoningFormat
from lmdecode.serving.text_model import TextModel

__all__ = ["add_command", "default_store", "talk"]

_VERSION = 1
Message = dict[str, Any]


def prompt_of(model: TextModel, messages: Sequence[Message], *, asks: bool = True) -> list[int]:
    """Return the tokens of the whole talk, by the chat template.

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
    """The file with the messages of a talk. One process has it; others read it.

    ``key`` is the model's: talks of one name with several models are several. ``title`` names the
    model for people.
    """

    def __init__(self, folder: Path, name: str, key: str, title: str) -> None:
        self.folder, self.name, self._key, self._title = folder, name, key, title
        self.path = folder / f"{self._safe(name)}.{key}.json"
        self._lock: int | None = None

    @staticmethod
    def _safe(name: str) -> str:
        """Return a name for a file: a long one is cut, with its hash."""
        safe = quote(name, safe=" ").replace(".", "%2E")
        if len(safe) <= 120:
            return safe
        return f"{safe[:80]}%{hashlib.sha256(name.encode()).hexdigest()[:16]}"

    def take(self) -> bool:
        """Take the talk for this process; return False if another one has it."""
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
        """Return the messages, none if there is no such talk.

        Raises ValueError if the file is damaged, or of a later version.
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
    """Messages of a talk, in order, and the file that keeps them, if any does."""

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
        """Forget the last line and its answer; return the line, None if there is none."""
        if self.num_turns == 0:
            return None
        *self.messages, line, _ = self.messages
        self._keep()
        text: str = line["content"]
        return text


_CAPACITY_BYTES = 1 << 30
_MAX_TOKENS = 1024
_HELP = """\
/clear                 forget what was said
/regenerate            answer the last line again
/undo                  forget the last line and its answer
/system [TEXT]         set the system message, or take it away
/set [NAME VALUE]      temperature, top-p, top-k, min-p, repetition-penalty, seed, max-tokens;
                       without a name: show them
/stats                 tokens and times of the last answer
/exit                  end, as Ctrl-D does; the talk is kept
Ctrl-C stops an answer. A line that ends with \\ goes on."""
_SETTINGS: dict[str, Callable[[str], float]] = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float,
    "repetition_penalty": float, "seed": int, "max_new_tokens": int,
}  # fmt: skip


def default_store() -> Path:
    """Return the folder of talks where none is given: in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "lmdecode" / "chat"


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "chat",
        help=COMMANDS["chat"],
        usage="lmdecode chat MODEL [options]",
        description="Talk with a model. The talk is kept, and goes on the next time. "
        "/help, in the talk, says what else there is.",
    )
    add_model_options(parser)
    add_draft_option(parser)
    add_sampling_options(parser, _MAX_TOKENS)
    parser.add_argument("--session", default="chat", metavar="NAME", help="of the talk (chat)")
    parser.add_argument(
        "--store", type=Path, metavar="DIR", help="keeps talks (default: in the user's cache)"
    )
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    check_at_least_1(given, "max_tokens")
    model = load_chat_model(given)
    talk(
        model,
        given.model,
        given.store or default_store(),
        given.session,
        {**sampling_of(given, model), "max_new_tokens": given.max_tokens},
        capacity=capacity_of(given, model),
        system=given.system,
        stops=given.stop,
        drafts=drafts_of(given, model),
    )
    return 0


def _opened(path: Path, fingerprint: Any, closing: contextlib.ExitStack) -> tuple[Any, str | None]:
    """Return the store of keys and values, None if there cannot be one, and a note or None."""
    try:
        from lmdecode.store import KVStore, StoreError, StoreLockedError
    except ImportError as error:
        return None, f"Prompts are not kept: {one_line(error)}"
    note = None
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            store = KVStore(
                path, fingerprint=fingerprint, capacity_bytes=_CAPACITY_BYTES, writers="many"
            )
        except StoreLockedError:
            store = KVStore(path, fingerprint=fingerprint, readonly=True)
            note = "Another program writes the store: what is read here is not kept in it."
    except (OSError, StoreError) as error:
        raise CommandError(f"--store {path}: {one_line(error)}") from error
    closing.callback(store.close)
    return store, note


def talk(
    model: TextModel,
    title: object,
    path: Path,
    session: str,
    arguments: dict[str, Any],
    *,
    capacity: int,
    system: str | None = None,
    stops: list[str] | None = None,
    drafts: dict[str, Any] | None = None,
) -> None:
    """Talk until the end of the input; raise CommandError if the store cannot be used.

    The model is a decoder-only one, named ``title`` here. The folder ``path`` of talks is made;
    ``session`` is the talk's name. ``arguments`` are for ``Engine.submit``, ``drafts`` for
    ``Decoding.engine``; ``capacity`` is the most tokens of the talk, and ``system`` replaces its
    system message. ``stops`` are texts that end an answer.
    """
    fingerprint = model.decoding.fingerprint(model.tokenizer)
    about = ", ".join([fingerprint.model_id, *fingerprint.layout.split("/")[1:]])
    with contextlib.ExitStack() as closing:
        store, note = _opened(path, fingerprint, closing)
        notes = [] if note is None else [note]
        file = TalkFile(path / "talks", session, fingerprint.name, about)
        is_ours = file.take()
        closing.callback(file.leave)
        if not is_ours:
            notes.append(f"The talk {session!r} goes on elsewhere: this one is not kept.")
        said = Talk(file.read(), file if is_ours else None)
        print(f"Model: {title}. Talk {session!r} in {path}.")
        if said.messages:
            tokens = len(prompt_of(model, said.messages, asks=False))
            print(f"It goes on behind {tokens} tokens.")
        elif others := file.of_others():
            print(f"It begins anew: the talk {session!r} there is of {'; '.join(others)}.")
        for line in notes:
            print(line)
        if system is not None:
            said.set_system(system)
        engine = model.decoding.engine(
            max_requests=1, capacity=capacity, store=store, **(drafts or {})
        )
        closing.enter_context(engine)
        kept = None if store is None or store.readonly or not is_ours else store.session(session)
        chat = _Chat(model, engine, said, dict(arguments), capacity, stops or [], kept)
        chat.run()


class _Chat:
    """The loop of lines and answers."""

    def __init__(
        self,
        model: TextModel,
        engine: Any,
        said: Talk,
        arguments: dict[str, Any],
        capacity: int,
        stops: list[str],
        kept: Any,
    ) -> None:
        self._model, self._engine, self._talk = model, engine, said
        self._arguments, self._capacity, self._stops = arguments, capacity, stops
        self._kept = kept  # the session of the store, which has the tokens
        self._is_terminal = sys.stdin.isatty()
        self._shows_dim = sys.stdout.isatty()
        self._last: Reply | None = None
        self._again = 0  # times that the last line was answered again
        template = model.template
        source = None if template is None else template.text()
        self._reasoning = ReasoningFormat.of_template(source, model.tokenizer)

    # ---- lines

    def run(self) -> None:
        """Read lines and answer them."""
        if self._is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  lets input() edit lines
            print("Write a line; /help tells more, Ctrl-D ends the talk.", flush=True)
        else:
            print("Write a line; an empty one ends the talk.", flush=True)
        for line in self._lines():
            try:
                if line.startswith("/"):
                    if self._command(line):
                        return
                else:
                    self._again = 0
                    self._answer(line)
            except (CommandError, OSError, RuntimeError, ValueError) as error:
                print(f"lmdecode chat: {one_line(error)}", file=sys.stderr, flush=True)
                if not self._is_terminal:
                    raise CommandError(one_line(error)) from error

    def _lines(self) -> Iterator[str]:
        was_interrupted = False
        while True:
            try:
                line = self._line("> ")
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                if was_interrupted:
                    return
                was_interrupted = True
                print("Ctrl-C once more, or Ctrl-D, ends the talk.")
                continue
            was_interrupted = False
            if line.strip():
                yield line.strip()
            elif not self._is_terminal:
                print()
                return

    def _line(self, prompt: str) -> str:
        """Return the user's line; one that ends with a backslash goes on in the next."""
        if self._is_terminal:
            line = input(prompt)
        else:
            print(prompt, end="", flush=True)
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            line = line.removesuffix("\n")
        line = line.encode(errors="replace").decode()  # bytes that are no UTF-8 come as surrogates
        if line.endswith("\\"):
            return f"{line[:-1]}\n{self._line('. ')}"
        return line

    # ---- answers

    def _answer(self, line: str) -> None:
        messages = self._talk.with_line(line)
        prompt = prompt_of(self._model, messages)
        left = self._capacity - len(prompt)
        if left < 1:
            raise CommandError(
                f"the talk has {len(prompt)} tokens; expected at most {self._capacity - 1}: /clear "
                "or /undo makes room"
            )
        arguments = dict(self._arguments)
        arguments["max_new_tokens"] = min(arguments["max_new_tokens"], left)
        if self._again and "seed" in arguments:
            arguments["seed"] += self._again
        reasoning = self._reasoning
        starts_inside = reasoning is not None and self._starts_inside(messages)
        writer = _Writer(reasoning, starts_inside) if self._shows_dim else _Plain()
        kept = () if reasoning is None else tuple(reasoning.kept_special_ids)
        found = answer(self._engine, self._model, prompt, arguments, writer.write,
                       stops=self._stops, kept_special_ids=kept)  # fmt: skip
        writer.finish()
        if found.finish_reason == "length" and self._is_terminal:
            note = f"[cut at {len(found.tokens)} tokens: /set max-tokens N]"
            print(dimmed(note) if self._shows_dim else note)
        self._last = found
        if not found.tokens:
            return  # it was stopped before there was any
        message: dict[str, Any] = {"role": "assistant", "content": found.text}
        if reasoning is not None:
            thoughts, content = reasoning.parse(found.text, starts_inside)
            message["content"] = content
            if thoughts:
                message["reasoning_content"] = thoughts
        self._talk.add(line, message)
        self._keep_tokens([*prompt, *found.tokens])

    def _starts_inside(self, messages: list[dict[str, Any]]) -> bool:
        assert self._model.template is not None and self._reasoning is not None
        return self._reasoning.starts_inside(self._model.template.render(messages))

    def _keep_tokens(self, tokens: list[int]) -> None:
        """Write the talk's tokens to the store's session, rewound to where they differ."""
        if self._kept is None:
            return
        known = self._kept.tokens
        same = next(
            (i for i, (a, b) in enumerate(zip(known, tokens, strict=False)) if a != b),
            min(len(known), len(tokens)),
        )
        if same < len(known):
            self._kept.rewind(same)
        self._kept.step(tokens[same:])
        self._kept.rewind(len(tokens))  # which writes them

    # ---- commands

    def _command(self, line: str) -> bool:
        """Run a line that begins with a slash; return whether the talk ends."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/exit", "/quit", "/bye"):
            return True
        if name == "/help":
            print(_HELP)
        elif name == "/clear":
            self._talk.clear()
            self._keep_tokens([])
            print("What was said is forgotten.")
        elif name == "/system":
            self._talk.set_system(rest)
            print("The system message is set." if rest else "There is no system message.")
        elif name == "/undo":
            gone = self._talk.undo()
            print("There is nothing to undo." if gone is None else f"Forgotten: {gone}")
        elif name == "/regenerate":
            gone = self._talk.undo()
            if gone is None:
                print("There is no answer yet.")
            else:
                self._again += 1
                self._answer(gone)
        elif name == "/set":
            self._set(rest)
        elif name == "/stats":
            self._stats()
        else:
            print(f"There is no {name}; /help lists what there is.")
        return False

    def _set(self, rest: str) -> None:
        if not rest:
            for name in _SETTINGS:
                value = self._arguments.get(name, "not set")
                print(f"{_shown(name):<20} {value}")
            return
        word, _, value = rest.partition(" ")
        name = word.replace("-", "_").replace("max_tokens", "max_new_tokens")
        if name not in _SETTINGS:
            names = ", ".join(map(_shown, _SETTINGS))
            print(f"There is no {word}; expected one of {names}.")
            return
        try:
            number = _SETTINGS[name](value.strip())
        except ValueError:
            print(f"{word} is {value.strip()!r}; expected a number.")
            return
        changed = {**self._arguments, name: number}
        try:  # the engine knows what a value may be
            tried = self._engine.submit([0], eos_token_id=(), **{**changed, "max_new_tokens": 1})
            tried.cancel()
            if name == "max_new_tokens" and number < 1:
                raise ValueError(f"max-tokens is {number}; expected at least 1")
        except (TypeError, ValueError) as error:
            print(one_line(error))
            return
        self._arguments = changed
        print(f"{_shown(name)} is {number}.")

    def _stats(self) -> None:
        if self._last is None:
            print("There is no answer yet.")
            return
        stats = self._last.stats
        print(f"prompt           {stats.prompt_tokens} tokens, {stats.cached_tokens} of them kept")
        print(f"answer           {stats.new_tokens} tokens")
        if stats.first_token is not None and stats.total is not None:
            print(f"first token      {stats.first_token:.2f} s")
            seconds = stats.total - stats.first_token
            if stats.new_tokens > 1 and seconds > 0:
                print(f"then             {(stats.new_tokens - 1) / seconds:.1f} tokens a second")
        used = stats.prompt_tokens + stats.new_tokens
        print(f"the talk         {used} of {self._capacity} tokens")


def _shown(name: str) -> str:
    return name.replace("max_new_tokens", "max_tokens").replace("_", "-")


class _Plain:
    """Writes an answer as it is."""

    def __init__(self) -> None:
        self._ends_line = True

    def write(self, text: str) -> None:
        """Write a piece."""
        sys.stdout.write(text)
        sys.stdout.flush()
        self._ends_line = text.endswith("\n")

    def finish(self) -> None:
        """End the answer's line."""
        if not self._ends_line:
            print(flush=True)


class _Writer(_Plain):
    """Writes an answer to a terminal, the model's thoughts dimmed."""

    def __init__(self, reasoning: ReasoningFormat | None, starts_inside: bool) -> None:
        super().__init__()
        self._parser = None if reasoning is None else reasoning.stream(starts_inside)
        self._was: str | None = None

    def write(self, text: str) -> None:
        """Write a piece."""
        if self._parser is None:
            super().write(text)
        else:
            self._show(self._parser.push(text))

    def _show(self, deltas: Any) -> None:
        for kind, text in deltas:
            if self._was == "reasoning" and kind != "reasoning":
                super().write("\n\n")
            super().write(dimmed(text) if kind == "reasoning" else text)
            self._was = kind

    def finish(self) -> None:
        """End the answer's line."""
        if self._parser is not None:
            self._show(self._parser.finish())
        super().finish()

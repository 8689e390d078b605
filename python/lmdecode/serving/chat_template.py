"""Chat templates: messages to the text of a prompt, as transformers has it, by jinja2 alone.

A template comes with a model and is not trusted: it runs in a sandbox, and sees plain JSON values.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from lmdecode._checks import install_hint, type_error

__all__ = ["ChatTemplate"]

_OP = "ChatTemplate"
# What the text of a message's thoughts is called; templates read the first, or thinking.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# A loop over the parts of a content; or a part of it: ``for x in message['content'][1:]``.
_OVER_PARTS = re.compile(
    r"{%[-+]?\s*for\s+\w+\s+in\s+(?:[\w.\[\]'\"]*[.'\"])?content(?:['\"]\])?\s*(?:[|\[]|if\b|[-+]?%})"
)
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def _plain(value: Any) -> Any:
    """Return a value made of what JSON has; of anything else the name of its type."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, tuple):
        return tuple(_plain(entry) for entry in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"


@functools.cache
def _environment() -> Any:
    """Return what compiles templates: the functions and tags that transformers gives them."""
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError as error:
        raise ImportError(f"chat templates need the package jinja2: {install_hint('serve')}") from (
            error
        )

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` around an assistant's text, which is left as it is."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_same")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _same(self, caller: Any) -> Any:
            return caller()

    class Namespace(jinja2.utils.Namespace):
        """A namespace without names that Python gives a meaning."""

        def __init__(*args: Any, **entries: Any) -> None:
            self, first = args[0], args[1:]
            given = dict(*first, **entries)
            for name in given:
                _check_name(name)
            jinja2.utils.Namespace.__init__(self, given)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            super().__setitem__(name, value)

    class Dict:
        """``dict`` of a template: it makes dicts and gives no way to the class."""

        def __call__(self, *args: Any, **entries: Any) -> dict[Any, Any]:
            return dict(*args, **entries)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    def _check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no {name!r}")

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
            sort_keys=sort_keys,
        )  # fmt: skip

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "dict": Dict(),
        "namespace": Namespace,
    }
    return environment


class ChatTemplate:
    """The template of a model's conversations, or several by name.

    Parameters
    ----------
    source : str or dict of str to str
        In jinja2. Of several, "tool_use" is taken where there are tools, "default" elsewhere.
    special_tokens : dict of str to str
        What ``bos_token`` and so on are, which a template may write.

    Attributes
    ----------
    source
        As given.

    Raises
    ------
    ValueError, TypeError
        A template cannot be read, or is no str.
    ImportError
        The package ``jinja2`` is missing.
    """

    def __init__(
        self, source: str | Mapping[str, str], *, special_tokens: Mapping[str, str]
    ) -> None:
        self.source = source
        named = {"default": source} if isinstance(source, str) else source
        if not isinstance(named, Mapping) or not named:
            raise type_error(_OP, "source", source, "str, or a dict of one by its name")
        self._special_tokens = dict(special_tokens)
        self._sources = dict(named)
        self._compiled = {name: self._compile(name, text) for name, text in named.items()}

    def _compile(self, name: str, text: object) -> Any:
        if not isinstance(text, str):
            raise type_error(_OP, name, text, "str")
        try:
            return _environment().from_string(text)
        except Exception as error:  # a template may hit any limit of its compiler
            raise ValueError(f"{_OP}: the template {name!r} cannot be read: {error}") from error

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the templates."""
        return tuple(self._sources)

    def text(self, *, has_tools: bool = False) -> str:
        """Return the template that is taken with tools, or without."""
        return self._sources[self._name(has_tools)]

    def reads_parts(self, *, has_tools: bool = False) -> bool:
        """Whether the template that is taken writes the parts of a content, and not one text."""
        return _OVER_PARTS.search(self.text(has_tools=has_tools)) is not None

    def _name(self, has_tools: bool) -> str:
        if has_tools and "tool_use" in self._sources and not isinstance(self.source, str):
            return "tool_use"
        if "default" in self._sources:
            return "default"
        raise ValueError(
            f"{_OP}: there are templates {', '.join(self._sources)}; expected one named 'default'"
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        joins_systems: bool = False,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation, as transformers' ``apply_chat_template`` does.

        A failure of the template names the message that the template was at, where it shows.

        Parameters
        ----------
        messages : sequence of dict
            Each with ``role`` and ``content``, as a rule.
        tools, documents : sequence of dict, optional
            Schemas of functions, and texts, for templates that have a place for them.
        add_generation_prompt : bool
            Whether the text ends with the beginning of an answer.
        continue_final_message : bool
            Whether the text ends with the last message's, without what ends a message.
        joins_systems : bool
            Whether several system messages at the beginning are one, with empty lines between their
            texts, if the template refuses several or does not write each.
        **variables
            More that the template may read.

        Raises
        ------
        ValueError
            The template refuses the messages, or fails; the two switches are both set; or the last
            message is not what the text ends with.
        TypeError
            ``messages`` are no dicts.
        """
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
            raise type_error(f"{_OP}.render", "messages", messages, "a sequence of dicts")
        if not messages:
            raise ValueError(f"{_OP}.render: messages are empty; expected at least one")
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                f"{_OP}.render: continue_final_message and add_generation_prompt are both True; "
                "expected one of them"
            )
        template_name = self._name(tools is not None)
        for message in messages:
            if not isinstance(message, Mapping):
                raise type_error(f"{_OP}.render", "a message", message, "a dict")
        variables |= {
            "tools": None if tools is None else list(tools),
            "documents": None if documents is None else list(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        systems = list(itertools.takewhile(_is_system, messages)) if joins_systems else []
        num_joined = 0
        if len(systems) > 1:
            texts = [system["content"] for system in systems]
            try:
                text = self._text(messages, template_name, continue_final_message, variables)
                if all(system.strip() in text for system in texts):
                    return text
            except ValueError:
                pass  # what does not come of the number of systems fails again
            joined = {**systems[0], "content": "\n\n".join(texts)}
            messages, num_joined = [joined, *messages[len(texts) :]], len(texts) - 1
        return self._text(messages, template_name, continue_final_message, variables, num_joined)

    def _text(
        self,
        messages: Sequence[Mapping[str, Any]],
        name: str,
        goes_on: bool,
        variables: Mapping[str, Any],
        num_joined: int = 0,
    ) -> str:
        """Return the text of messages; the first may be several that were joined."""
        chat: list[dict[str, Any]] = []
        try:
            chat += [_with_reasoning(_plain(message)) for message in messages]
            final = self._tag(chat, name) if goes_on else ""
            render = functools.partial(
                self._compiled[name].render, **{**self._special_tokens, **_plain(variables)}
            )
            text: str = render(messages=chat)
            if goes_on and text.count(_TAG.strip()) > 1:
                plain = render(messages=[_with_reasoning(_plain(message)) for message in messages])
                text = _with_last_mark(text, plain)
        except (MemoryError, _TemplateMessageError):
            raise
        except Exception as error:  # it is the model's program
            what, where = str(error) or type(error).__name__, ""
            if (at := _place_of(error, chat)) is not None:
                where = f" at messages[{at + num_joined if at else 0}] ({chat[at].get('role')})"
            raise ValueError(f"{_OP}.render: the chat template failed{where}: {what}") from error
        return _cut(text, final) if goes_on else text

    def _tag(self, chat: list[dict[str, Any]], name: str) -> str:
        """Put a mark after the last message; return its text."""
        message = chat[-1]
        content = message.get("content")
        if content is None:
            raise _TemplateMessageError(
                f"{_OP}.render: continue_final_message is True and the last message has no "
                "content; expected one"
            )
        if "content" not in self._sources[name]:
            raise _TemplateMessageError(
                f"{_OP}.render: continue_final_message is True and the template reads no content"
            )
        if isinstance(content, str):
            message["content"] = content + _TAG
            return content
        for block in reversed(content):
            if "text" in block:
                text: str = block["text"]
                block["text"] = text + _TAG
                return text
        raise _TemplateMessageError(
            f"{_OP}.render: continue_final_message is True and the last message has no text"
        )


class _TemplateMessageError(ValueError):
    """What is wrong with messages, and not with the template."""


def _is_system(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "system" and isinstance(message.get("content"), str)


def _place_of(error: BaseException, chat: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the place of the message that a template was at, None where that does not show.

    Jinja's frames have the variables of the template: within a loop over messages, one of them.
    """
    places = {id(message): place for place, message in enumerate(chat)}
    found: set[int] = set()
    trace = error.__traceback__
    while trace is not None:  # the innermost frame that has any comes last
        of_frame = {places[id(v)] for v in trace.tb_frame.f_locals.values() if id(v) in places}
        found, trace = of_frame or found, trace.tb_next
    return found.pop() if len(found) == 1 else None


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without entries of None, its thoughts by the names that templates read."""
    message = {name: value for name, value in message.items() if value is not None}
    thoughts = next((message[name] for name in _REASONING if name in message), None)
    if thoughts is not None:
        message = {"thinking": thoughts, **message, "reasoning_content": thoughts}
    return message


def _with_last_mark(text: str, plain: str) -> str:
    """Return a text without its marks but the last; ``plain`` is the text that never had any."""
    mark = _TAG.strip()
    found, *parts = text.split(mark)
    for part in parts[:-1]:
        kept = found + part.removeprefix(" ")
        found = kept if plain.startswith(kept) else found.rstrip() + part
    return f"{found}{mark}{parts[-1]}"


def _cut(text: str, final: str) -> str:
    """Return the text up to the mark; blanks that the template took away before it stay away."""
    mark = _TAG.strip()
    if mark not in text or final.strip() not in text:
        raise ValueError(
            f"{_OP}.render: continue_final_message is True and the template does not write the "
            "last message as it is; expected one that does"
        )
    at = text.rindex(mark)
    is_kept = text[at : at + len(_TAG)] == _TAG
    return text[:at] if is_kept else text[:at].rstrip()

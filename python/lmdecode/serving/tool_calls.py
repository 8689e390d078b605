"""Calls of tools in a model's answer: found in its text as it comes, and forced by a grammar.

A chat template tells a model how to write a call, and each family has its own way. ``ToolFormat``
finds the way by what the template writes.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lmdecode.serving.grammar_source import GrammarSource
from lmdecode.serving.text_stream import held
from lmdecode.serving.tool_readers import (
    FoundCalls,
    NoCall,
    Output,
    Reading,
    fenced_calls,
    json_calls,
    key_value_calls,
    named_calls,
    python_calls,
    tagged_calls,
)
from lmdecode.serving.tools import (
    CallForm,
    check_tools,
    chosen_tools,
    is_named,
    lark_of_calls,
    tokens_of_words,
)

__all__ = ["FORMATS", "CallDelta", "ContentDelta", "StreamingToolParser", "ToolCall", "ToolFormat"]

_MOST_BEGIN = 1000  # characters of a text that show whether it begins as a call
_NAME_KEYS = ('"name":', '"function":', '"function":{"name":', '"type":"function","name":',
              '"type":"function","function":{"name":')  # fmt: skip
_Schemas = Mapping[str, Mapping[str, Any]]
Reader = Callable[[Output, int, _Schemas, Collection[str] | None], Reading]


class ContentDelta(NamedTuple):
    """A piece of the answer's text."""

    text: str


class CallDelta(NamedTuple):
    """A piece of call ``index``, from 0: ``id`` and ``name`` in its first piece alone, and JSON."""

    index: int  # type: ignore[assignment]  # of a tuple it is a method
    id: str | None
    name: str | None
    arguments: str


class StreamingToolParser:
    """Text and calls of an answer as it comes. All pieces together are the result of ``parse``.

    Text is returned as soon as it cannot be a call's first word; a call when it is complete, in one
    piece. ``tools`` are the request's, with their names and types; None: any name is one.
    """

    def __init__(
        self, format: ToolFormat, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self._format = format
        known = None if tools is None else check_tools(tools)
        self._schemas = {tool.name: tool.parameters for tool in known or ()}
        self._names = None if known is None else frozenset(self._schemas)
        self._text = ""
        self._reading: Reading | None = None
        self._written = Output()
        self._at = 0  # where it begins
        self._marker = 0  # the end of what began it
        self._is_marked = False  # what began it is part of no usual text
        self._can_be_bare = True
        self._space = ""  # before what may follow
        self._has_content = False
        self._calls = 0
        words = sorted(format.markers, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, words))) if words else None

    def push(self, text: str) -> list[ContentDelta | CallDelta]:
        """Take the next piece of text; return the certain part."""
        self._text += text
        return self._run(False)

    def finish(self, is_cut: bool = False) -> list[ContentDelta | CallDelta]:
        """Return the rest, when there is no more text.

        ``is_cut``: the model had not ended its answer. A call that it had begun is no text then.
        """
        return self._run(True, is_cut)

    def _run(self, is_last: bool, is_cut: bool = False) -> list[ContentDelta | CallDelta]:
        deltas: list[ContentDelta | CallDelta] = []
        while True:
            if self._reading is None and not self._begin(deltas, is_last, is_cut):
                return deltas
            try:
                found = self._read(self._text, is_last and not is_cut)
                if found is None and is_cut:
                    found = self._cut()
            except NoCall:
                self._reading, self._can_be_bare = None, False
                self._put(deltas, self._marker)
                continue
            if found is None:
                return deltas
            for name, arguments in found.calls:
                deltas.append(CallDelta(self._calls, self._format.new_id(), name, arguments))
                self._calls += 1
            self._text, self._reading = self._text[found.end :], None
            self._written.taken += found.end
            self._written.scans.clear()
            self._can_be_bare = True

    def _read(self, text: str, is_last: bool) -> FoundCalls | None:
        """Return the calls of the text, None where it needs more."""
        assert self._reading is not None
        self._written.text, self._written.is_last = text, is_last
        try:
            next(self._reading)
        except StopIteration as end:
            found: FoundCalls = end.value
            return found
        return None

    def _cut(self) -> FoundCalls:
        """Return the complete calls of a text that ends within calls; the text is used up."""
        try:
            calls = self._read(f"{self._text}\0", True)  # something follows, but no end
            assert calls is not None
            found = calls.calls
        except NoCall:
            if not self._is_marked and not self._may_become_call():
                raise
            found = []
        self._space = ""
        return FoundCalls(found, len(self._text))

    def _may_become_call(self) -> bool:
        """Whether a text that no marker tells from others begins as a call of a tool."""
        text = "".join(self._text[self._at : self._at + _MOST_BEGIN].split()).removeprefix("[")
        begins = [f'{{{key}"' for key in _NAME_KEYS]
        if self._names is not None:
            begins = [f'{begin}{name}"' for begin in begins for name in self._names]
            begins += [f"{name}(" for name in self._names]
        return any(text.startswith(one) or one.startswith(text) for one in begins)

    def _begin(self, deltas: list[ContentDelta | CallDelta], is_last: bool, is_cut: bool) -> bool:
        """Put out the text before the next call; return whether there is one."""
        if self._can_be_bare and self._format.bare:
            start = re.match(r"[\s;]*" if self._calls else r"\s*", self._text)
            assert start is not None
            rest = self._text[start.end() :]
            if not rest and (not is_last or (is_cut and self._calls)):
                return False
            reader = self._format.bare.get(rest[:1])
            if reader is not None:
                self._at, self._marker = start.end(), start.end() + 1
                self._reading = reader(self._written, self._at, self._schemas, self._names)
                self._is_marked = False
                return True
            self._can_be_bare = False
        found = None if self._pattern is None else self._pattern.search(self._text)
        if found is not None:
            self._put(deltas, found.start())
            self._at = self._marker = len(found[0])
            self._is_marked = found[0][0] in "<["
            reader = self._format.markers[found[0]]
            self._reading = reader(self._written, self._marker, self._schemas, self._names)
            return True
        end = len(self._text) - held(self._text, self._format.markers)
        if is_last and (not is_cut or (self._text[end:].isalpha() and (end or self._has_content))):
            end = len(self._text)  # of words, "f" may begin "functools"
        self._put(deltas, end)
        if is_last and self._space and not self._calls:
            deltas.append(ContentDelta(self._space))
            self._space = ""
        return False

    def _put(self, deltas: list[ContentDelta | CallDelta], count: int) -> None:
        """Put ``count`` characters out as text; space at the end waits for more."""
        text, self._text = self._space + self._text[:count], self._text[count:]
        self._written.taken += count
        end = len(text.rstrip())
        self._space = text[end:]
        text = text[:end]
        if not text:
            return
        if self._calls and not self._has_content:
            text = text.lstrip()
        self._has_content = True
        deltas.append(ContentDelta(text))


class ToolCall(NamedTuple):
    """A call of a tool: an id, drawn at random, the tool's name, and arguments, a JSON object."""

    id: str
    name: str
    arguments: str


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:  # Mistral's templates take no other
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls of tools; ``form`` is for grammars.

    ``markers`` maps the words that begin a call to its readers, and ``bare`` those that begin
    one at the beginning of the answer alone. ``words`` may be tokens of their own, and
    ``token_ids`` has those that are; the special tokens ``kept_special_ids`` have to stay in the
    text that is parsed.
    """

    name: str
    form: CallForm
    markers: Mapping[str, Reader]
    bare: Mapping[str, Reader]
    words: tuple[str, ...] = ()
    token_ids: Mapping[str, int] = field(default_factory=dict)
    kept_special_ids: frozenset[int] = frozenset()
    new_id: Callable[[], str] = _long_id

    @staticmethod
    def of_template(template_source: str | None, tokenizer: Any = None) -> ToolFormat:
        """Return the format of a chat template: ``"generic"``, JSON, if it writes no calls.

        The tokenizer tells which words are tokens.
        """
        source = template_source or ""
        name = next((name for name, is_it in _SIGNS if is_it(source)), "generic")
        found = FORMATS[name]
        if name == "mistral_list" and "[TOOL_CALLS] [" in source:
            found = replace(found, form=found.form._replace(begin="[TOOL_CALLS] ["))
        return found if tokenizer is None else found.with_tokenizer(tokenizer)

    def with_tokenizer(self, tokenizer: Any) -> ToolFormat:
        """Return the format with the tokens of its words."""
        token_ids, kept = tokens_of_words(self.words, tokenizer)
        return replace(self, token_ids=token_ids, kept_special_ids=kept)

    def grammar(
        self,
        tools: Sequence[Mapping[str, Any]],
        tool_choice: str | Mapping[str, Any] | None = "auto",
        parallel: bool = True,
    ) -> GrammarSource | None:
        """Return the grammar of an answer, None if the answer is free.

        ``tools`` are a request's: ``{"type": "function", "function": {"name", "parameters",
        "strict"}}``. With a ``tool_choice`` of ``"required"`` or a named function the answer is
        calls; with ``"auto"`` it is text, and calls follow the grammar from their first word on, if
        a tool is ``strict``. ``parallel`` allows several calls, but not of a named function. Raises
        ValueError, which names the field.
        """
        chosen, is_forced = chosen_tools(check_tools(tools), tool_choice)
        if not chosen or not (is_forced or any(tool.strict for tool in chosen)):
            return None
        text = lark_of_calls(
            self.form, chosen, self.token_ids, markers=self.markers, is_forced=is_forced,
            is_parallel=parallel and not is_named(tool_choice),
        )  # fmt: skip
        return GrammarSource("calls", text)

    def stream(self, tools: Sequence[Mapping[str, Any]] | None = None) -> StreamingToolParser:
        """Return a ``StreamingToolParser`` for one answer."""
        return StreamingToolParser(self, tools)

    def parse(
        self, text: str, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str | None, list[ToolCall]]:
        """Return the answer's text, None if there are only calls, and its calls; never fails."""
        parser = self.stream(tools)
        content, calls = [], []
        for delta in [*parser.push(text), *parser.finish()]:
            if isinstance(delta, ContentDelta):
                content.append(delta.text)
            else:
                calls.append(ToolCall(delta.id or "", delta.name or "", delta.arguments))
        joined = "".join(content)
        return (joined if joined or not calls else None), calls


# ---- the formats


def _json(*closes: str, is_bare: bool = False) -> Reader:
    return lambda text, at, schemas, names: json_calls(text, at, closes, names, is_bare)


def _tagged(*closes: str, begun: str = "") -> Reader:
    """Return a reader whose calls begin with ``begun``, the end of the marker."""
    return lambda text, at, schemas, _: tagged_calls(text, at - len(begun), schemas, closes)


def _named(header: str, *closes: str) -> Reader:
    pattern = re.compile(header, re.DOTALL)
    return lambda text, at, schemas, names: named_calls(text, at, pattern, closes)


def _pythonic(*closes: str, until: str = "", is_bare: bool = False) -> Reader:
    return lambda text, at, schemas, names: python_calls(
        text, at, closes, until, names if is_bare else None
    )


def _either(first: Reader, second: Reader) -> Reader:
    """Return a reader that reads the second way where the first finds no call."""

    def read(text: Output, at: int, schemas: _Schemas, names: Collection[str] | None) -> Reading:
        try:
            return (yield from first(text, at, schemas, names))
        except NoCall:
            return (yield from second(text, at, schemas, names))

    return read


def _fenced(text: Output, at: int, schemas: _Schemas, names: Collection[str] | None) -> Reading:
    return fenced_calls(text, at, names)


_NAME = r"(?P<name>[\w.\-]+)"
_BAR, _GAP = "\uff5c", "\u2581"  # of DeepSeek's tokens


def _wide(name: str) -> str:
    return f"<{_BAR}tool{_GAP}{name.replace(' ', _GAP)}{_BAR}>"


_WIDE = {
    name: _wide(name) for name in ("calls begin", "call begin", "sep", "call end", "calls end")
}
_BODY_END = (_WIDE["call end"], _WIDE["calls end"])
_DEEPSEEK = _named(
    rf"\s*(?:function{_WIDE['sep']})?{_NAME}(?:{_WIDE['sep']})?\s*(?:```json)?\s*",
    "```", *_BODY_END,
)  # fmt: skip
_TOOL_CALL = {
    "<tool_call>": _tagged("</tool_call>"),
    "<function=": _tagged("</tool_call>", begun="<function="),
}
_MISTRAL = {
    "[TOOL_CALLS]": _either(
        _json(), _named(rf"\s*{_NAME}(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*")
    )
}  # fmt: skip
_BARE_JSON = _json(is_bare=True)
_BARE_LIST = _either(_BARE_JSON, _pythonic(is_bare=True))
_OBJECT = CallForm(open='{"name": "', middle='", "arguments": ', close="}")
_PHI4 = {"<|tool_call|>": _json("<|/tool_call|>")}
_FUNCTOOLS = {"functools": _json(is_bare=True)}
_NEMOTRON = {"<TOOLCALL>": _json("</TOOLCALL>")}
_LFM2 = {"<|tool_call_start|>": _either(
    _pythonic("<|tool_call_end|>"), _json("<|tool_call_end|>"))}  # fmt: skip
_OLMO = {"<function_calls>": _pythonic(until="</function_calls>")}
_HARMONY = {
    word: _named(rf"{_NAME}[^{{]*", "<|call|>")
    for word in ("<|channel|>commentary to=functions.", "<|channel|>analysis to=functions.",
                 "<|start|>assistant to=functions.")
}  # fmt: skip
_GENERIC = {
    **_TOOL_CALL, **_PHI4, **_MISTRAL, **_LFM2, **_OLMO,
    "```json": _fenced, "```tool_code": _fenced, "```tool_call": _fenced, "```python": _fenced,
}  # fmt: skip


def _key_values(start: str, close: str, quote: str) -> ToolFormat:
    return ToolFormat(
        "key_values",
        CallForm(open=f"{start}call:", middle="{", close="}" + close, arguments="key_values",
                 quote=quote),
        {start: lambda text, at, schemas, names: key_value_calls(text, at, quote, (close,))},
        {},
        (start, close, quote),
    )  # fmt: skip


FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(
        "hermes",
        CallForm(open='<tool_call>\n{"name": "', middle='", "arguments": ',
                 close="}\n</tool_call>", between="\n"),
        _TOOL_CALL,
        {},
        ("<tool_call>", "</tool_call>"),
    ),
    "qwen3_coder": ToolFormat(
        "qwen3_coder",
        CallForm(open="<tool_call>\n<function=", middle=">\n", close="\n</tool_call>",
                 between="\n", arguments="tags"),
        _TOOL_CALL,
        {},
        ("<tool_call>", "</tool_call>"),
    ),
    "llama3_json": ToolFormat(
        "llama3_json",
        CallForm(open='{"name": "', middle='", "parameters": ', close="}", between="; "),
        {"<|python_tag|>": _either(_json(), _pythonic())},
        {"{": _BARE_JSON, "[": _BARE_LIST},
        ("<|python_tag|>",),
    ),
    "pythonic": ToolFormat(
        "pythonic",
        CallForm(begin="[", open="", middle="(", close=")", between=", ", end="]",
                 arguments="keywords"),
        {"<|python_start|>": _pythonic("<|python_end|>")},
        {"[": _BARE_LIST, "{": _BARE_JSON},
        ("<|python_start|>", "<|python_end|>"),
    ),
    "mistral_list": ToolFormat(
        "mistral_list",
        _OBJECT._replace(begin="[TOOL_CALLS][", between=", ", end="]"),
        _MISTRAL,
        {},
        ("[TOOL_CALLS]",),
        new_id=_short_id,
    ),
    "mistral": ToolFormat(
        "mistral",
        CallForm(open="[TOOL_CALLS]", middle="[ARGS]", close=""),
        _MISTRAL,
        {},
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        new_id=_short_id,
    ),
    "phi4": ToolFormat(
        "phi4",
        _OBJECT._replace(begin="<|tool_call|>[", between=", ", end="]<|/tool_call|>"),
        _PHI4,
        {},
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    "functools": ToolFormat(
        "functools",
        _OBJECT._replace(begin="functools[", between=", ", end="]"),
        {**_PHI4, **_FUNCTOOLS},
        {},
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    "nemotron": ToolFormat(
        "nemotron",
        _OBJECT._replace(begin="<TOOLCALL>[", between=", ", end="]</TOOLCALL>"),
        _NEMOTRON,
        {},
        ("<TOOLCALL>", "</TOOLCALL>"),
    ),
    "granite": ToolFormat(
        "granite",
        _OBJECT._replace(begin="<|tool_call|>[", between=", ", end="]"),
        {**_PHI4, "<tool_call>": _tagged("</tool_call>")},
        {},
        ("<|tool_call|>",),
    ),
    "deepseek": ToolFormat(
        "deepseek",
        CallForm(begin=_WIDE["calls begin"], open=f"{_WIDE['call begin']}function{_WIDE['sep']}",
                 middle="\n```json\n", close=f"\n```{_WIDE['call end']}", between="\n",
                 end=_WIDE["calls end"]),
        {f"{_WIDE['calls begin']}{_WIDE['call begin']}": _DEEPSEEK,
         _WIDE["call begin"]: _DEEPSEEK},
        {},
        tuple(_WIDE.values()),
    ),
    "deepseek_v31": ToolFormat(
        "deepseek_v31",
        CallForm(begin=_WIDE["calls begin"], open=_WIDE["call begin"], middle=_WIDE["sep"],
                 close=_WIDE["call end"], end=_WIDE["calls end"]),
        {f"{_WIDE['calls begin']}{_WIDE['call begin']}": _DEEPSEEK,
         _WIDE["call begin"]: _DEEPSEEK},
        {},
        tuple(_WIDE.values()),
    ),
    "lfm2": ToolFormat(
        "lfm2",
        CallForm(begin="<|tool_call_start|>[", open="", middle="(", close=")", between=", ",
                 end="]<|tool_call_end|>", arguments="keywords"),
        _LFM2,
        {},
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "olmo3": ToolFormat(
        "olmo3",
        CallForm(begin="<function_calls>\n", open="", middle="(", close=")", between="\n",
                 end="\n</function_calls>", arguments="keywords"),
        _OLMO,
        {},
        ("<function_calls>", "</function_calls>"),
    ),
    "functiongemma": replace(
        _key_values("<start_function_call>", "<end_function_call>", "<escape>"),
        name="functiongemma",
    ),
    "gemma4": replace(_key_values("<|tool_call>", "<tool_call|>", '<|"|>'), name="gemma4"),
    "harmony": ToolFormat(
        "harmony",
        CallForm(open="<|channel|>commentary to=functions.",
                 middle=" <|constrain|>json<|message|>", close="", is_single=True),
        _HARMONY,
        {},
        ("<|channel|>", "<|constrain|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"),
    ),
    "generic": ToolFormat(
        "generic",
        _OBJECT._replace(between="\n"),
        _GENERIC,
        {"{": _BARE_JSON, "[": _BARE_LIST},
        tuple(word for word in _GENERIC if word[0] in "<["),
    ),
}  # fmt: skip

# How to tell a format by a template's text, in the order in which they are tried.
_SIGNS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("harmony", lambda s: "<|channel|>" in s and "<|message|>" in s),
    ("gemma4", lambda s: "<|tool_call>" in s),
    ("functiongemma", lambda s: "<start_function_call>" in s),
    ("mistral", lambda s: "[TOOL_CALLS]" in s and "[ARGS]" in s),
    ("mistral_list", lambda s: "[TOOL_CALLS]" in s),
    ("lfm2", lambda s: "<|tool_call_start|>" in s or "<|tool_list_start|>" in s),
    ("functools", lambda s: "functools[" in s),
    ("nemotron", lambda s: "<TOOLCALL>" in s),
    ("phi4", lambda s: "<|/tool_call|>" in s or "<|tool|>" in s),
    ("granite", lambda s: "<|tool_call|>" in s),
    ("deepseek", lambda s: _WIDE["call begin"] in s and "```json" in s),
    ("deepseek_v31", lambda s: _WIDE["call begin"] in s),
    ("qwen3_coder", lambda s: "<function=" in s),
    ("olmo3", lambda s: "<function_calls>" in s),
    ("hermes", lambda s: "<tool_call>" in s),
    ("pythonic", lambda s: "func_name1(" in s or "<|python_start|>" in s),
    ("llama3_json", lambda s: "<|python_tag|>" in s or '"parameters": dictionary' in s),
)

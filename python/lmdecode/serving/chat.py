"""``/v1/chat/completions``: bodies to jobs, and answers to bodies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmdecode.serving.answers import Envelope, chat_logprobs
from lmdecode.serving.errors import BadRequest
from lmdecode.serving.fields import Fields
from lmdecode.serving.grammar_source import GrammarSource
from lmdecode.serving.messages import read_messages
from lmdecode.serving.parameters import COMMON_FIELDS, MOST_LOGPROBS, check_names, read_parameters
from lmdecode.serving.reasoning import ReasoningDelta, ReasoningParser
from lmdecode.serving.service import Service
from lmdecode.serving.tool_calls import CallDelta, ContentDelta, StreamingToolParser
from lmdecode.serving.tools import check_tools, chosen_tools, is_named
from lmdecode.serving.work import Answer, Job, Work
from lmdecode.serving.writing import AnswerPart

__all__ = ["CHAT_PROMPT_FIELDS", "Chat", "prompt_of"]

CHAT_PROMPT_FIELDS = frozenset(
    ("messages", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort",
     "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents")
)  # fmt: skip
"""Fields that make the prompt of a chat."""
_FIELDS = COMMON_FIELDS | CHAT_PROMPT_FIELDS | {
    "max_completion_tokens", "logprobs", "top_logprobs", "modalities",
}  # fmt: skip
_REFUSED = {
    "audio": "the model writes text",
    "prediction": "there is no predicted output",
    "moderation": "the server judges no text",
    "functions": "expected tools",
    "function_call": "expected tool_choice",
    "web_search_options": "the server does not search",
}


@dataclass
class _Message:
    """What is written of one message: its text, what the model thinks, its calls of tools."""

    thoughts: ReasoningParser | None
    calls: StreamingToolParser | None
    has_calls: bool = False
    is_parallel: bool = True

    def push(self, text: str, is_last: bool, is_cut: bool = False) -> list[dict[str, Any]]:
        """Take text, and return what the message gets of it, in order."""
        pieces = [ReasoningDelta("content", text)] if text else []
        if self.thoughts is not None:
            pieces = self.thoughts.push(text)
            if is_last:
                pieces = [*pieces, *self.thoughts.finish()]
        deltas: list[dict[str, Any]] = []
        for piece in pieces:
            if piece.kind == "reasoning":
                deltas.append({"reasoning_content": piece.text})
            elif self.calls is None:
                deltas.append({"content": piece.text})
            else:
                deltas += map(self._delta, self._kept(self.calls.push(piece.text)))
        if self.calls is not None and is_last:
            deltas += map(self._delta, self._kept(self.calls.finish(is_cut)))
        return deltas

    def _kept(
        self, parts: Sequence[ContentDelta | CallDelta]
    ) -> Iterator[ContentDelta | CallDelta]:
        """Yield all but second calls where there may be one only."""
        for part in parts:
            if self.is_parallel or isinstance(part, ContentDelta) or part.index == 0:
                yield part

    def _delta(self, part: ContentDelta | CallDelta) -> dict[str, Any]:
        if isinstance(part, ContentDelta):
            return {"content": part.text}
        self.has_calls = True
        function = {"arguments": part.arguments}
        call: dict[str, Any] = {"index": part.index}
        if part.name is not None:
            call |= {"id": part.id, "type": "function"}
            function = {"name": part.name, **function}
        return {"tool_calls": [{**call, "function": function}]}


@dataclass
class Chat:
    """A checked request of a chat.

    With ``tools`` of None calls are not looked for. ``is_parallel`` allows several calls;
    ``is_named``: the request names the tool, so its call is no choice of the model.
    """

    service: Service
    job: Job
    prompt: str
    tools: list[dict[str, Any]] | None
    envelope: Envelope
    is_parallel: bool
    is_named: bool
    _messages: dict[int, _Message] = field(default_factory=dict)

    @classmethod
    async def of(cls, fields: Fields, service: Service) -> Chat:
        """Check a body; raise ``BadRequest``, which names the field."""
        check_names(fields, _FIELDS, _REFUSED)
        if fields.get("modalities") not in (None, ["text"]):
            raise fields.error("modalities", "['text']")
        model = service.model
        parameters = read_parameters(
            fields, model.tokenizer, model.generation_defaults, model.eos_token_ids, service.vocab
        )
        prompt, tools, calls = await prompt_of(fields, service)
        (tokens,) = await service.tokens_of("messages", [prompt], add_special_tokens=False)
        if not tokens:
            raise BadRequest("messages", "messages render to no token; expected a text")
        name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
        asked = fields.integer(name, 1, (1 << 31) - 1)
        most = service.max_tokens_of("messages", [tokens], asked, None, name)
        logprobs = fields.integer("top_logprobs", 0, MOST_LOGPROBS)
        if not fields.boolean("logprobs"):
            if logprobs is not None:
                raise BadRequest("top_logprobs", "top_logprobs is given; expected logprobs true")
        else:
            logprobs = logprobs or 0
        prefix, kept = "", frozenset[int]()
        if service.reasoning is not None:
            kept |= service.reasoning.kept_special_ids
            prefix = service.reasoning.grammar_prefix(service.reasoning.starts_inside(prompt))
        if tools:
            kept |= service.tool_format.kept_special_ids
        grammar = await service.grammar_of(fields, calls, prefix)
        goes_on = fields.boolean("continue_final_message")
        is_parallel = fields.boolean("parallel_tool_calls", True)
        job = Job([tokens], most, parameters, logprobs, grammar, kept, goes_on)
        kind = "chat.completion.chunk" if parameters.stream else "chat.completion"
        envelope = Envelope(kind, "chatcmpl", service.name, service.fingerprint)
        named = is_named(fields.get("tool_choice"))
        return cls(service, job, prompt, tools, envelope, is_parallel, named)

    def _message(self, answer: Answer) -> _Message:
        if answer.index not in self._messages:
            thoughts, tools = self.service.reasoning, self.tools
            self._messages[answer.index] = _Message(
                None if thoughts is None else thoughts.stream(thoughts.starts_inside(self.prompt)),
                None if tools is None else self.service.tool_format.stream(tools),
                is_parallel=self.is_parallel,
            )
        return self._messages[answer.index]

    def _reason(self, piece: AnswerPart, message: _Message) -> str | None:
        is_call = message.has_calls and piece.finish_reason == "stop" and not self.is_named
        return "tool_calls" if is_call else piece.finish_reason

    def _logprobs(self, piece: AnswerPart) -> dict[str, Any] | None:
        if self.job.logprobs is None:
            return None
        return chat_logprobs(self.service.model.tokenizer, piece.logprobs)

    async def whole(self, work: Work) -> dict[str, Any]:
        """Return the body of all answers, when they have ended."""
        choices = []
        for answer, piece in zip(work.answers, await work.wholes(), strict=True):
            message = self._message(answer)
            is_cut = piece.finish_reason == "length"
            body = _joined(message.push(piece.text, is_last=True, is_cut=is_cut))
            choices.append(
                {
                    "index": answer.index,
                    "message": body,
                    "logprobs": self._logprobs(piece),
                    "finish_reason": self._reason(piece, message),
                    "stop_reason": answer.stop_reason,
                }
            )
        return self.envelope.body(choices, work.usage)

    async def stream(self, work: Work) -> AsyncIterator[dict[str, Any]]:
        """Yield the bodies of pieces, as they come."""
        for answer in work.answers:
            delta = {"role": "assistant", "content": ""}
            yield self.envelope.body([_piece(answer, delta)], work.usage_of_piece)
        async for answer, piece in work.pieces():
            message, is_last = self._message(answer), piece.finish_reason is not None
            is_cut = piece.finish_reason == "length"
            deltas = message.push(piece.text, is_last, is_cut) or [{}]
            if deltas == [{}] and not is_last and not piece.logprobs:
                continue
            logprobs = self._logprobs(piece)
            for delta in deltas:
                choice = _piece(answer, delta, logprobs)
                if is_last and delta is deltas[-1]:
                    choice["finish_reason"] = self._reason(piece, message)
                    choice["stop_reason"] = answer.stop_reason
                yield self.envelope.body([choice], work.usage_of_piece)
                logprobs = None
        if self.job.parameters.includes_usage:
            yield self.envelope.body([], work.usage)


def _piece(answer: Answer, delta: Mapping[str, Any], logprobs: Any = None) -> dict[str, Any]:
    return {"index": answer.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _joined(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a message of its parts."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for part in delta.get("tool_calls", ()):
            function = {"name": "", "arguments": ""}
            new = {"id": part["id"], "type": "function", "function": function}
            call = calls.setdefault(part["index"], new)
            for name, text in part.get("function", {}).items():
                call["function"][name] += text
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
        message["content"] = message["content"] or None
    return message


def _tools(
    fields: Fields, service: Service
) -> tuple[list[dict[str, Any]] | None, GrammarSource | None]:
    """Return the tools that the model may call, and the grammar of its answer."""
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    is_parallel = fields.boolean("parallel_tool_calls", True)
    try:
        known = check_tools([] if tools is None else tools)
        chosen, _ = chosen_tools(known, choice)
        grammar = service.tool_format.grammar(tools, choice, is_parallel) if chosen else None
    except (RecursionError, ValueError) as error:
        name = "tool_choice" if str(error).startswith("tool_choice") else "tools"
        raise BadRequest(name, str(error)) from error
    names = {tool.name for tool in chosen}
    given = [tool for tool in tools or () if tool.get("function", tool).get("name") in names]
    return given or None, grammar


async def prompt_of(
    fields: Fields, service: Service
) -> tuple[str, list[dict[str, Any]] | None, GrammarSource | None]:
    """Return the rendered messages of a body, its tools, and the grammar of calls.

    Raises ``BadRequest``, which names the field.
    """
    messages = read_messages(fields)
    tools, calls = _tools(fields, service)
    prompt = await service.rendered(messages, tools=tools, **_template_variables(fields))
    return prompt, tools, calls


def _template_variables(fields: Fields) -> dict[str, Any]:
    variables = dict(fields.object("chat_template_kwargs") or {})
    reserved = {"self", "messages", "tools", "add_generation_prompt", "continue_final_message",
                "joins_systems"}  # fmt: skip
    for name in variables:
        if name in reserved or not name.isidentifier():
            raise BadRequest(
                "chat_template_kwargs", f"chat_template_kwargs has {name[:80]!r}, which is reserved"
            )
    if (effort := fields.text("reasoning_effort", 64)) is not None:
        variables["reasoning_effort"] = effort
    if (documents := fields.get("documents")) is not None:
        if not isinstance(documents, list):
            raise fields.error("documents", "a list")
        variables["documents"] = documents
    continues = fields.boolean("continue_final_message")
    variables["continue_final_message"] = continues
    variables["add_generation_prompt"] = fields.boolean("add_generation_prompt", not continues)
    if continues and variables["add_generation_prompt"]:
        raise BadRequest(
            "continue_final_message",
            "continue_final_message and add_generation_prompt are true; expected one of both",
        )
    return variables

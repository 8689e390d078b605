"""A chat: a checked request to a job, and its answers to text, thoughts and calls of tools."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lmdecode.decoder.engine.request import TokenLogprob
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

__all__ = ["CHAT_PROMPT_FIELDS", "Chat", "ChatDelta", "ChatPart", "prompt_of"]

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
ChatDelta = ReasoningDelta | ContentDelta | CallDelta


@dataclass
class _Message:
    """What is written of one message: its text, what the model thinks, its calls of tools."""

    thoughts: ReasoningParser | None
    calls: StreamingToolParser | None
    has_calls: bool = False
    is_parallel: bool = True

    def push(self, text: str, is_last: bool, is_cut: bool = False) -> list[ChatDelta]:
        """Take text, and return what the message gets of it, in order."""
        pieces = [ReasoningDelta("content", text)] if text else []
        if self.thoughts is not None:
            pieces = self.thoughts.push(text)
            if is_last:
                pieces = [*pieces, *self.thoughts.finish()]
        deltas: list[ChatDelta] = []
        for piece in pieces:
            if piece.kind == "reasoning":
                deltas.append(piece)
            elif self.calls is None:
                deltas.append(ContentDelta(piece.text))
            else:
                deltas += self._kept(self.calls.push(piece.text))
        if self.calls is not None and is_last:
            deltas += self._kept(self.calls.finish(is_cut))
        return deltas

    def _kept(
        self, parts: Sequence[ContentDelta | CallDelta]
    ) -> Iterator[ContentDelta | CallDelta]:
        """Yield all but second calls where there may be one only."""
        for part in parts:
            if isinstance(part, ContentDelta):
                yield part
            elif self.is_parallel or part.index == 0:
                self.has_calls = True
                yield part


class ChatPart(NamedTuple):
    """What an answer gets at a time; the last part has the reason of the end."""

    answer: Answer
    deltas: list[ChatDelta]
    logprobs: list[TokenLogprob]
    finish_reason: str | None


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
    is_parallel: bool
    is_named: bool
    _messages: dict[int, _Message] = field(default_factory=dict)

    @classmethod
    async def of(cls, fields: Fields, service: Service, *, may_ask_more: bool = False) -> Chat:
        """Check a body; raise ``BadRequest``, which names the field.

        ``may_ask_more``: of more tokens than there is room for, those that there is are written.
        """
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
        most = service.max_tokens_of("messages", [tokens], asked, None, name, may_ask_more)
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
        named = is_named(fields.get("tool_choice"))
        return cls(service, job, prompt, tools, is_parallel, named)

    def _message(self, answer: Answer) -> _Message:
        if answer.index not in self._messages:
            thoughts, tools = self.service.reasoning, self.tools
            self._messages[answer.index] = _Message(
                None if thoughts is None else thoughts.stream(thoughts.starts_inside(self.prompt)),
                None if tools is None else self.service.tool_format.stream(tools),
                is_parallel=self.is_parallel,
            )
        return self._messages[answer.index]

    def _part(self, answer: Answer, piece: AnswerPart) -> ChatPart:
        message, reason = self._message(answer), piece.finish_reason
        deltas = message.push(piece.text, reason is not None, is_cut=reason == "length")
        if message.has_calls and reason == "stop" and not self.is_named:
            reason = "tool_calls"
        return ChatPart(answer, deltas, piece.logprobs, reason)

    async def wholes(self, work: Work) -> list[ChatPart]:
        """Return all answers, each as one part, when they have ended."""
        pieces = await work.wholes()
        return [self._part(*of_one) for of_one in zip(work.answers, pieces, strict=True)]

    async def parts(self, work: Work) -> AsyncIterator[ChatPart]:
        """Yield the parts of all answers, as they come."""
        async for answer, piece in work.pieces():
            part = self._part(answer, piece)
            if part.deltas or part.logprobs or part.finish_reason is not None:
                yield part


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

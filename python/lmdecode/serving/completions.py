"""``/v1/completions``: bodies to jobs, and answers to bodies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmdecode._checks import is_int
from lmdecode.serving.answers import Envelope, Usage, completion_logprobs
from lmdecode.serving.errors import BadRequest
from lmdecode.serving.fields import Fields
from lmdecode.serving.parameters import COMMON_FIELDS, MOST_LOGPROBS, check_names, read_parameters
from lmdecode.serving.service import Service
from lmdecode.serving.work import Job, Work
from lmdecode.serving.writing import AnswerPart, AnswerWriter

__all__ = ["Completion", "prompts_of"]

_FIELDS = COMMON_FIELDS | {"prompt", "echo", "best_of", "logprobs", "add_special_tokens"}
_REFUSED = {"suffix": "the model writes behind the prompt only"}
_MOST_PROMPTS = 1024
_DEFAULT_TOKENS = 16  # OpenAI's


@dataclass
class Completion:
    """A checked request of completions.

    ``echoes`` has the text of each prompt that is to be part of its answers. ``is_scored``:
    log-probabilities of the prompts are asked for, see ``score``; ``is_empty``: no token is.
    """

    service: Service
    job: Job
    echoes: list[AnswerPart]
    is_scored: bool
    is_empty: bool
    envelope: Envelope

    @classmethod
    async def of(cls, fields: Fields, service: Service) -> Completion:
        """Check a body; raise ``BadRequest``, which names the field."""
        check_names(fields, _FIELDS, _REFUSED)
        model = service.model
        parameters = read_parameters(
            fields, model.tokenizer, model.generation_defaults, model.eos_token_ids, service.vocab
        )
        if (best_of := fields.integer("best_of", 1, 128)) not in (None, parameters.n):
            raise BadRequest("best_of", f"best_of is {best_of}; expected n, {parameters.n}")
        logprobs = fields.integer("logprobs", 0, MOST_LOGPROBS)
        does_echo = fields.boolean("echo")
        is_scored = does_echo and logprobs is not None
        if is_scored and not service.is_causal:
            raise BadRequest("echo", "echo is true; expected false with logprobs: the model reads "
                             "prompts by an encoder, which foretells no tokens")  # fmt: skip
        given = fields.get("prompt")
        count = len(given) if _are_several(given) else 1
        service.check_room(parameters.n * count, "prompt" if count > 1 else "n")
        prompts = await prompts_of(fields, service)
        asked = fields.integer("max_tokens", 0, (1 << 31) - 1)
        is_empty = asked == 0
        if is_empty and not does_echo:
            raise BadRequest("max_tokens", "max_tokens is 0; expected at least 1, or echo with it")
        most = service.max_tokens_of("prompt", prompts, asked or None, _DEFAULT_TOKENS)
        echoes = [AnswerPart() for _ in prompts]
        if does_echo:
            texts = given if isinstance(given, list) and len(given) == len(prompts) else [given]
            echoes = [
                AnswerPart(text if isinstance(text, str) else model.tokenizer.decode(prompt))
                for text, prompt in zip(texts, prompts, strict=False)
            ]
        grammar = await service.grammar_of(fields)
        job = Job(prompts, most, parameters, logprobs, grammar, goes_on=service.is_causal)
        envelope = Envelope("text_completion", "cmpl", service.name, service.fingerprint)
        return cls(service, job, echoes, is_scored, is_empty, envelope)

    async def score(self) -> None:
        """Add log-probabilities to the echoes; raises as ``Service.scores_of`` does."""
        scores = await self.service.scores_of(self.job.prompts, self.job.logprobs or 0)
        for echo, items in zip(self.echoes, scores, strict=True):
            writer = AnswerWriter(self.service.model.tokenizer)
            echo.logprobs = items
            echo.offsets = writer.push(items).offsets + writer.finish().offsets

    def _choice(
        self, index: int, piece: AnswerPart, stop: str | int | None = None, *, begins: bool = True
    ) -> dict[str, Any]:
        """Return a piece of an answer, or all of it; ``begins``: its echo is in front.

        Log-probabilities are there, if asked for, of the tokens of both.
        """
        echo, logprobs = self.echoes[index // self.job.parameters.n], None
        before = echo if begins else AnswerPart()
        if self.job.logprobs is not None:
            logprobs = completion_logprobs(
                self.service.model.tokenizer,
                before.logprobs + piece.logprobs,
                before.offsets + [len(echo.text) + offset for offset in piece.offsets],
            )
        choice: dict[str, Any] = {
            "index": index,
            "text": before.text + piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None:
            choice["stop_reason"] = stop
        return choice

    def empty_body(self) -> dict[str, Any]:
        """Return the answer to a request of no token."""
        count = self.job.parameters.n * len(self.job.prompts)
        choices = [self._choice(i, AnswerPart(finish_reason="length")) for i in range(count)]
        return self.envelope.body(choices, Usage(sum(map(len, self.job.prompts))))

    async def whole(self, work: Work) -> dict[str, Any]:
        """Return the body of all answers, when they have ended."""
        pieces = await work.wholes()
        choices = [
            self._choice(answer.index, piece, answer.stop_reason)
            for answer, piece in zip(work.answers, pieces, strict=True)
        ]
        return self.envelope.body(choices, work.usage)

    async def stream(self, work: Work) -> AsyncIterator[dict[str, Any]]:
        """Yield the bodies of pieces, as they come."""
        begun: set[int] = set()
        async for answer, piece in work.pieces():
            begins = answer.index not in begun
            begun.add(answer.index)
            choice = self._choice(answer.index, piece, answer.stop_reason, begins=begins)
            yield self.envelope.body([choice], work.usage_of_piece)
        if self.job.parameters.includes_usage:
            yield self.envelope.body([], work.usage)


def _are_several(given: Any) -> bool:
    """Whether a prompt is a list of prompts, and not one of tokens."""
    return isinstance(given, list) and not (given and is_int(given[0]))


async def prompts_of(
    fields: Fields, service: Service, name: str = "prompt", most: int = _MOST_PROMPTS
) -> list[list[int]]:
    """Return the tokens of a field: a text, several, a list of tokens, or several."""
    given: Any = fields.get(name)
    expected = "a text, a list of tokens, or a list of either"
    is_list = _are_several(given)
    if not is_list:
        given = [given]
    if not isinstance(given, list) or not given or len(given) > most:
        raise fields.error(name, f"{expected}, up to {most}")
    adds = fields.boolean("add_special_tokens", True)
    texts = [one for one in given if isinstance(one, str)]
    read: list[list[int]] = []
    if texts:
        read = await service.tokens_of(name, texts, add_special_tokens=adds)
    of_texts = iter(read)
    prompts = []
    for i, one in enumerate(given):
        if isinstance(one, str):
            tokens = next(of_texts)
        elif isinstance(one, list):
            tokens = _token_ids(fields, name, one, service.vocab)
        else:
            raise fields.error(name, expected)
        if not tokens:
            which = f"{name}[{i}]" if is_list else name
            raise BadRequest(name, f"{which} is empty; expected at least one token")
        prompts.append(tokens)
    return prompts


def _token_ids(fields: Fields, name: str, tokens: Sequence[Any], vocab: int) -> list[int]:
    for token in tokens:
        if not is_int(token) or not 0 <= token < vocab:
            raise fields.error(name, f"texts, or token ids, 0 to {vocab - 1}")
    return list(tokens)

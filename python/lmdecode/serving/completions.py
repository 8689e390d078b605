"""``/v1/completions``: bodies to jobs, and answers to bodies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmdecode._checks import is_int
from lmdecode.serving.answers import Envelope, completion_logprobs
from lmdecode.serving.errors import BadRequest
from lmdecode.serving.fields import Fields
from lmdecode.serving.parameters import COMMON_FIELDS, check_names, read_parameters
from lmdecode.serving.service import Service
from lmdecode.serving.work import Answer, Job, Work
from lmdecode.serving.writing import Piece

__all__ = ["Completion"]

_FIELDS = COMMON_FIELDS | {"prompt", "echo", "best_of", "logprobs", "add_special_tokens"}
_REFUSED = {"suffix": "the model writes behind the prompt only"}
_MOST_PROMPTS = 1024
_MOST_LOGPROBS = 20
_DEFAULT_TOKENS = 16  # OpenAI's


@dataclass
class Completion:
    """A checked request of completions.

    Attributes
    ----------
    job : Job
        For the service.
    echoes : list of str or None
        Texts of the prompts, if they are part of the answers.
    is_empty : bool
        Whether no token is asked for: the prompts are the answers.
    """

    service: Service
    job: Job
    echoes: list[str] | None
    is_empty: bool
    envelope: Envelope
    _offsets: dict[int, int] = field(default_factory=dict)

    @classmethod
    async def of(cls, fields: Fields, service: Service) -> Completion:
        """Check a body.

        Raises
        ------
        BadRequest
            Names the field, what came and what was expected.
        """
        check_names(fields, _FIELDS, _REFUSED)
        model = service.model
        parameters = read_parameters(
            fields, model.tokenizer, model.generation_defaults, model.eos_token_ids, service.vocab
        )
        if (best_of := fields.integer("best_of", 1, 128)) not in (None, parameters.n):
            raise BadRequest("best_of", f"best_of is {best_of}; expected n, {parameters.n}")
        logprobs = fields.integer("logprobs", 0, _MOST_LOGPROBS)
        does_echo = fields.boolean("echo")
        if does_echo and logprobs is not None:
            raise BadRequest("echo", "echo is true; expected false with logprobs")
        prompts = await _prompts(fields, service)
        asked = fields.integer("max_tokens", 0, (1 << 31) - 1)
        is_empty = asked == 0
        if is_empty and not does_echo:
            raise BadRequest("max_tokens", "max_tokens is 0; expected at least 1, or echo with it")
        most = service.max_tokens_of("prompt", prompts, asked or None, _DEFAULT_TOKENS)
        echoes = None
        if does_echo:
            given = fields.get("prompt")
            texts = [given] if isinstance(given, str) else given
            if not isinstance(texts[0], str):
                texts = [model.tokenizer.decode(prompt) for prompt in prompts]
            echoes = list(texts)
        grammar = await service.grammar_of(fields)
        job = Job(prompts, most, parameters, logprobs, grammar)
        envelope = Envelope("text_completion", "cmpl", service.name, service.fingerprint)
        return cls(service, job, echoes, is_empty, envelope)

    def _choice(self, answer: Answer, text: str, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self.job.logprobs is not None:
            logprobs, self._offsets[answer.index] = completion_logprobs(
                self.service.model.tokenizer, piece.logprobs, self._offsets.get(answer.index, 0)
            )
        choice: dict[str, Any] = {
            "index": answer.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None and answer.writer.stop is not None:
            choice["stop_reason"] = answer.writer.stop
        return choice

    def _echo(self, index: int) -> str:
        per_prompt = self.job.parameters.n
        return "" if self.echoes is None else self.echoes[index // per_prompt]

    def empty_body(self) -> dict[str, Any]:
        """Return the answer to a request of no token."""
        n = self.job.parameters.n
        choices = [
            {"index": i, "text": self._echo(i), "logprobs": None, "finish_reason": "length"}
            for i in range(n * len(self.job.prompts))
        ]
        body = self.envelope.body(choices, None)
        count = sum(map(len, self.job.prompts))
        body["usage"] = {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count}
        return body

    async def whole(self, work: Work) -> dict[str, Any]:
        """Return the body of all answers, when they have ended."""
        pieces = await work.wholes()
        choices = [
            self._choice(answer, self._echo(answer.index) + piece.text, piece)
            for answer, piece in zip(work.answers, pieces, strict=True)
        ]
        return self.envelope.body(choices, work.usage)

    async def stream(self, work: Work) -> AsyncIterator[dict[str, Any]]:
        """Yield the bodies of pieces, as they come."""
        begun: set[int] = set()
        async for answer, piece in work.pieces():
            text = piece.text
            if answer.index not in begun:
                begun.add(answer.index)
                text = self._echo(answer.index) + text
            choice = self._choice(answer, text, piece)
            yield self.envelope.body([choice], None)
        if self.job.parameters.includes_usage:
            yield self.envelope.body([], work.usage)


async def _prompts(fields: Fields, service: Service) -> list[list[int]]:
    """Return the tokens of a text, of several, of a list of tokens, or of several."""
    given: Any = fields.get("prompt")
    expected = "a text, a list of tokens, or a list of either"
    if isinstance(given, str) or (isinstance(given, list) and given and is_int(given[0])):
        given = [given]
    if not isinstance(given, list) or not given or len(given) > _MOST_PROMPTS:
        raise fields.error("prompt", f"{expected}, up to {_MOST_PROMPTS}")
    adds = fields.boolean("add_special_tokens", True)
    prompts = []
    for one in given:
        if isinstance(one, str):
            tokens = await service.tokens_of("prompt", one, add_special_tokens=adds)
        elif isinstance(one, list):
            tokens = _token_ids(fields, one, service.vocab)
        else:
            raise fields.error("prompt", expected)
        if not tokens:
            raise BadRequest("prompt", "prompt is empty; expected at least one token")
        prompts.append(tokens)
    return prompts


def _token_ids(fields: Fields, tokens: Sequence[Any], vocab: int) -> list[int]:
    for token in tokens:
        if not is_int(token) or not 0 <= token < vocab:
            raise fields.error("prompt", f"texts, or token ids, 0 to {vocab - 1}")
    return list(tokens)

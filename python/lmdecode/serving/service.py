"""A model that is served: its ``Engine``, the requests in it, and their limits."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lmdecode.decoder.engine.engine import Engine
from lmdecode.decoder.engine.request import Request, TokenLogprob
from lmdecode.decoder.worker_threads import release_worker_threads
from lmdecode.quality import token_logprobs
from lmdecode.serving.errors import BadRequest, RequestError, error_of_engine, reason_of
from lmdecode.serving.fields import Fields
from lmdecode.serving.grammar import CompiledGrammar, GrammarCompiler
from lmdecode.serving.grammar_source import (
    GRAMMAR_FIELDS,
    FieldError,
    GrammarSource,
    grammar_field,
    grammar_of_body,
)
from lmdecode.serving.messages import joined_parts
from lmdecode.serving.parameters import NAMES
from lmdecode.serving.reasoning import ReasoningFormat
from lmdecode.serving.text_model import TextModel, is_causal, vocab_of
from lmdecode.serving.tool_calls import ToolFormat
from lmdecode.serving.work import Answer, Job, Tally, Work
from lmdecode.serving.writing import AnswerWriter

__all__ = ["Service"]

_T = TypeVar("_T")
_R = TypeVar("_R")
_LONG_TEXT = 1 << 14  # characters: longer ones are tokenized beside the event loop


@dataclass
class Service:
    """A model and its engine, which has been started. ``store``, the engine's, is for its counts.

    Of requests that wait for a slot, those above ``max_waiting`` are refused.
    """

    model: TextModel
    engine: Engine
    name: str
    max_waiting: int = 256
    store: Any = None
    tally: Tally = field(default_factory=Tally)
    _num_coming: int = 0  # answers that have room and are not submitted yet
    _scoring: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        decoder: Any = self.model.decoding.decoder
        kind = getattr(decoder, "weight_format", "")
        facts = f"{self.name} {kind} {self.vocab} {self.engine.capacity}"
        self.fingerprint = f"lmdecode-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"

    @property
    def is_causal(self) -> bool:
        """Whether the model is decoder-only."""
        return is_causal(self.model.decoding)

    @property
    def vocab(self) -> int:
        """Number of logits."""
        return vocab_of(self.model.decoding)

    @property
    def context(self) -> int:
        """Maximum number of tokens of prompt and answer."""
        return min(self.engine.capacity + 1, self.model.context_length or self.engine.capacity + 1)

    @functools.cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.model.tokenizer, self.vocab, self.model.eos_token_ids)

    @functools.cached_property
    def tool_format(self) -> ToolFormat:
        """How the model writes calls of tools."""
        return ToolFormat.of_template(self._template_source, self.model.tokenizer)

    @functools.cached_property
    def reasoning(self) -> ReasoningFormat | None:
        """How the model marks its thoughts; None: it does not."""
        return ReasoningFormat.of_template(self._template_source, self.model.tokenizer)

    @property
    def _template_source(self) -> str | None:
        template = self.model.template
        return None if template is None else template.text(has_tools=True)

    async def grammar_of(
        self, fields: Fields, forced: GrammarSource | None = None, prefix: str = ""
    ) -> CompiledGrammar | None:
        """Return the grammar that a body asks for, compiled beside the event loop.

        ``forced`` is the grammar of calls of tools, which leaves no room for another; ``prefix`` is
        as in ``GrammarCompiler.compile``. Raises ``BadRequest`` if the grammar is wrong, too large,
        or one of two.
        """
        body = {name: fields.get(name) for name in GRAMMAR_FIELDS}
        try:
            source = grammar_of_body(body)
        except FieldError as error:
            raise BadRequest(error.param, error.sentence) from error
        if forced is not None and source is not None:
            name = grammar_field(body)
            raise BadRequest(name, f"{name} is given; expected none beside calls of tools")
        chosen = forced or source
        if chosen is None:
            return None
        try:
            return await asyncio.to_thread(lambda: self._grammars.compile(chosen, prefix=prefix))
        except (ImportError, TypeError, ValueError) as error:
            name = grammar_field(body) or "tools"
            raise BadRequest(name, f"{name}: {error}") from error

    async def rendered(self, messages: Sequence[dict[str, Any]], **variables: Any) -> str:
        """Return messages as the text of a prompt.

        Raises ``BadRequest`` if the model has no chat template, its template does not take them, or
        they are longer than any that the model could read.
        """
        template = self.model.template
        if template is None:
            raise BadRequest(
                "messages", "the model has no chat template; expected a prompt of /v1/completions"
            )
        joined = [joined_parts(message) for message in messages]
        if not template.reads_parts(has_tools=variables.get("tools") is not None):
            messages = joined
        size = sum(len(message["content"]) for message in joined)
        if size > self.context * self.model.tokenizer.longest_token:
            raise self._too_long("messages", f"{size} characters", self.context)

        def render() -> str:
            return template.render(messages, joins_systems=True, **variables)

        try:
            return render() if size < _LONG_TEXT else await asyncio.to_thread(render)
        except (RecursionError, TypeError, ValueError) as error:
            raise BadRequest("messages", f"messages: {reason_of(error)}") from error

    async def tokens_of(
        self, name: str, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the tokens of texts; long ones do not hold up the others.

        Raises ``BadRequest`` if a text is longer than any that the model could read, or is none.
        """
        most = self.context * self.model.tokenizer.longest_token
        if max(map(len, texts)) > most:
            raise self._too_long(name, f"more than {most} characters", self.context)

        def encode() -> list[list[int]]:
            tokenizer = self.model.tokenizer
            return [tokenizer.encode(t, add_special_tokens=add_special_tokens) for t in texts]

        is_long = sum(map(len, texts)) >= _LONG_TEXT
        try:
            return await asyncio.to_thread(encode) if is_long else encode()
        except (TypeError, ValueError) as error:
            raise BadRequest(name, f"{name} is no text: {reason_of(error)}") from error

    def _too_long(self, name: str, what: str, most: int) -> BadRequest:
        return BadRequest(
            name,
            f"{name} has {what}; expected at most {most} tokens, the model's context, with at "
            "least one of them for the answer",
            "context_length_exceeded",
        )

    def max_tokens_of(
        self,
        name: str,
        prompts: Sequence[Sequence[int]],
        asked: int | None,
        otherwise: int | None,
        asked_name: str = "max_tokens",
    ) -> int:
        """Return the maximum number of new tokens for the prompts, which the field ``name`` holds.

        ``asked`` is the request's number, of the field ``asked_name``. Without it, the maximum is
        the generation config's, ``otherwise``, or all that there is room for.
        """
        longest = max(map(len, prompts)) if self.is_causal else 1
        room = self.context - longest
        if room < 1:
            raise self._too_long(name, f"{longest} tokens", self.context)
        if asked is None:
            known = self.model.generation_defaults
            most = known.get("max_length")
            if "max_new_tokens" in known:
                otherwise = known["max_new_tokens"]
            elif most is not None:
                if longest >= most:
                    raise BadRequest(
                        name,
                        f"{name} has {longest} tokens; expected fewer than {most}, the max_length "
                        f"of the model's generation config, or {asked_name}",
                        "context_length_exceeded",
                    )
                otherwise = most - longest
            return room if otherwise is None else min(otherwise, room)
        if asked > room:
            raise BadRequest(
                asked_name,
                f"{asked_name} is {asked} and {name} has {longest} tokens; expected at most "
                f"{self.context} together, the model's context",
                "context_length_exceeded",
            )
        return asked

    async def submit(self, job: Job) -> Work:
        """Submit a job's requests, with a turn for others between two; the caller closes it.

        The ``Work`` has ``n`` answers for each prompt, in order. Raises ``BadRequest`` if the
        engine refuses an argument, and ``RequestError`` with status 429 if too many requests wait.
        """
        parameters = job.parameters
        count = 1 if parameters.is_search else parameters.n
        total = count * len(job.prompts)
        self.check_room(total, waits=True)
        requests: list[Request] = []
        self._num_coming += total
        try:
            for i in range(total):
                if i > 0:  # the engine checks all arguments of each
                    await asyncio.sleep(0)
                prompt = job.prompts[i // count]
                requests.append(self._submit_one(job, prompt, i % count))
                self._num_coming -= 1
        except BaseException:
            self._num_coming -= total - len(requests)
            for request in requests:
                request.cancel()
            raise
        ends = frozenset(parameters.arguments["eos_token_id"])
        beams: list[int | None] = list(range(parameters.n)) if parameters.is_search else [None]
        answers: list[Answer] = []
        for request in requests:
            length = len(request.prompt_ids)
            least = parameters.arguments_of(length, job.max_tokens)["min_tokens"]
            for beam in beams:
                writer = AnswerWriter(
                    self.model.tokenizer,
                    stops=parameters.stops,
                    keeps_stop=parameters.keeps_stop,
                    skips_special=parameters.skips_special,
                    kept_special_ids=job.kept_special_ids,
                    min_tokens=least,
                    behind=request.prompt_ids[-1:] if job.goes_on else (),
                )
                answers.append(
                    Answer(len(answers), request, writer, beam, ends, parameters, job.max_tokens)
                )
        return Work(self.tally, job, requests, answers)

    async def scores_of(
        self, prompts: Sequence[Sequence[int]], num_top: int
    ) -> list[list[TokenLogprob]]:
        """Return the log-probabilities of prompts' tokens and of their ``num_top`` best ones.

        The engine does not keep the logits of prompts: a thread computes them, one prompt at a
        time. Raises ``BadRequest`` for a token that the model does not have, and ``RequestError``
        with status 429 if too many requests wait.
        """

        def score(prompt: Sequence[int]) -> list[TokenLogprob]:
            return token_logprobs(self.model.decoding, prompt, num_top)

        try:
            return await self.computed_beside(prompts, score, len(prompts))
        except ValueError as error:
            raise error_of_engine(error, {"ids": "prompt"}) from error

    async def computed_beside(
        self, parts: Sequence[_T], compute: Callable[[_T], _R], count: int = 1
    ) -> list[_R]:
        """Return what is computed of parts by a thread beside the engine, one part at a time.

        It counts as ``count`` requests: raises ``RequestError`` with status 429 if too many wait.
        """

        def run(part: _T) -> _R:
            try:
                return compute(part)
            finally:
                release_worker_threads()  # they would slow the engine's

        async def run_next(part: _T) -> _R:
            async with self._scoring:
                return await asyncio.to_thread(run, part)

        self.check_room(count, waits=True)
        self._num_coming += count
        try:
            # If the client goes, this ends after the current part, which nothing can stop.
            return [await asyncio.shield(run_next(part)) for part in parts]
        finally:
            self._num_coming -= count

    def check_room(self, count: int, name: str = "n", *, waits: bool = False) -> None:
        """Raise an error if ``count`` answers are more than there may be at once.

        With ``waits``, those that run and wait count too. ``name`` is the field that asks for them.
        """
        most = self.engine.max_requests + self.max_waiting
        if count > most:
            raise BadRequest(name, f"{name} asks for {count} answers; expected at most {most}")
        stats = self.engine.stats
        taken = stats.running + stats.waiting + self._num_coming
        if waits and taken + count > most:
            raise RequestError(
                429,
                f"{taken} requests are running or wait; expected at most {most}",
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )

    def _submit_one(self, job: Job, prompt: list[int], index: int) -> Request:
        length = len(prompt) if self.is_causal else 1
        arguments = job.parameters.arguments_of(length, job.max_tokens)
        if (seed := job.parameters.seed_of(index)) is not None:
            arguments["seed"] = seed
        if job.logprobs is not None:
            arguments["logprobs"] = job.logprobs
        if job.grammar is not None:
            arguments["grammar"] = job.grammar.start()
            arguments.pop("forced_tokens", None)  # which a grammar may not allow
        if not self.is_causal:
            arguments["input_ids"] = prompt
        try:
            return self.engine.submit(prompt if self.is_causal else None, **arguments)
        except (TypeError, ValueError) as error:
            raise error_of_engine(error, NAMES) from error

    def metrics_text(self) -> str:
        """Return all counts and times, in the text format of Prometheus."""
        stats = self.engine.stats
        gauges: list[tuple[str, str, str, float]] = [
            ("requests_running", "gauge", "Requests with a slot.", stats.running),
            ("requests_waiting", "gauge", "Requests that wait for a slot.", stats.waiting),
            ("slots_free", "gauge", "Free slots.", stats.free_places),
            ("steps_total", "counter", "Steps of the model.", stats.steps),
            ("prompt_tokens_total", "counter", "Computed tokens of prompts.", stats.prompt_tokens),
            (
                "cached_prompt_tokens_total",
                "counter",
                "Tokens of prompts that were not computed, as their keys and values were there.",
                stats.cached_tokens,
            ),
            ("generated_tokens_total", "counter", "Generated tokens.", stats.new_tokens),
            ("drafted_tokens_total", "counter", "Tokens of drafts.", stats.drafted_tokens),
            ("accepted_tokens_total", "counter", "Accepted ones of these.", stats.accepted_tokens),
        ]
        return self.tally.metrics.text(gauges)

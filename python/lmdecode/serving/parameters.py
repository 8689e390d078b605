"""Parameters of chats and completions: fields of a body to arguments of ``Engine.submit``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lmdecode._checks import MAX_INT
from lmdecode.decoder.engine.submission import Submission
from lmdecode.generation_options import OPTIONS, option_names
from lmdecode.serving.errors import BadRequest, RequestError, error_of_engine, reason_of
from lmdecode.serving.fields import Fields, shown
from lmdecode.serving.grammar_source import GRAMMAR_FIELDS
from lmdecode.serving.tokenizer import Tokenizer

__all__ = [
    "COMMON_FIELDS", "MOST_LOGPROBS", "NAMES", "Parameters", "check_model", "check_names",
    "read_default", "read_parameters",
]  # fmt: skip

MOST_LOGPROBS = 20
_MOST_CHOICES = 128
_MOST_STOPS, _LONGEST_STOP = 16, 1024
_MOST_TOKENS = 4096  # of a list of tokens: each answer of ``n`` checks it again
_MOST_WORDS, _LONGEST_WORD = 256, 128
_MOST_BEAMS = 1 << 16
_MIROSTAT_TAU = 5.0  # of llama.cpp

# Passed to the engine as they are, which checks them. The names are those of ``Sampler``.
_SAMPLING = option_names("draws", "drawn", "both", field="passed")
_SEARCH = option_names("search", "searches", field="passed")
_OF_CONFIG_IN_SEARCHES = (
    *option_names("both", field="passed"), *_SEARCH, *option_names("searches", field="default")
)  # fmt: skip
_ALIASES = {option.alias: option.name for option in OPTIONS if option.alias}
NAMES: Mapping[str, str] = {"eos_token_id": "stop_token_ids", "max_new_tokens": "max_tokens",
                            "prompt_ids": "prompt", "input_ids": "prompt"}  # fmt: skip
"""Arguments of the engine to the fields that they come from, where those differ."""
# About the caller, or advice to a service: without effect.
_WITHOUT_EFFECT = (
    "user", "metadata", "service_tier", "store", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "cache_prompt", "verbosity",
)  # fmt: skip
COMMON_FIELDS = frozenset(
    ("model", "n", "stop", "stream", "stream_options", "max_tokens", "stop_token_ids",
     "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "bad_words",
     "dry_sequence_breakers", "mirostat", *option_names(field="converted"), *_SAMPLING, *_SEARCH,
     *_ALIASES, *_WITHOUT_EFFECT, *GRAMMAR_FIELDS)
)  # fmt: skip
"""The fields that both endpoints accept."""


@dataclass(frozen=True)
class Parameters:
    """Parameters of a request, without its prompt.

    ``arguments`` are for ``Engine.submit``, see ``arguments_of``. ``n`` is the number of answers,
    ``seed`` the first one's, and ``is_search`` whether a beam search finds them. ``min_length``,
    of prompt and answer, and the tokens that are forced at an answer's beginning and at its end are
    the model's generation config's. ``stops`` are texts that end an answer;
    ``stop_tokens`` are end tokens that an answer names if one ended it. ``keeps_stop``: that text
    or token is part of the answer. ``stream``: the answer comes in pieces; with ``includes_usage``
    the last one has the usage, with ``repeats_usage`` each has the usage so far.
    """

    arguments: dict[str, Any]
    n: int
    seed: int | None
    is_search: bool
    stops: tuple[str, ...]
    stop_tokens: frozenset[int]
    keeps_stop: bool
    skips_special: bool
    stream: bool
    includes_usage: bool
    repeats_usage: bool
    min_length: int = 0
    first_token: int | None = None
    last_token: int | None = None

    def arguments_of(self, length: int, new: int) -> dict[str, Any]:
        """Return the arguments of an answer of at most ``new`` tokens behind a prompt.

        ``Engine.submit`` also takes ``seed``, ``grammar`` and ``logprobs``.
        """
        least = max(self.arguments["min_tokens"], self.min_length - length)
        forced: dict[int, int | None] = {}
        if length == 1 and self.first_token is not None:
            forced[0] = self.first_token
        if self.last_token in self.arguments["eos_token_id"]:
            forced[new - 1] = self.last_token
        found = {"forced_tokens": forced} if forced else {}
        return {**self.arguments, **found, "min_tokens": least, "max_new_tokens": new}

    def seed_of(self, index: int) -> int | None:
        """Return the seed of an answer."""
        return None if self.seed is None else (self.seed + index) & MAX_INT


def check_names(fields: Fields, known: Iterable[str], refused: Mapping[str, str]) -> None:
    """Raise BadRequest for fields that the server does not know or does not support."""
    for name in fields.names():
        if name in refused:
            raise BadRequest(name, f"{name} is not supported: {refused[name]}")
        if name not in known:
            name = name[:80]
            raise BadRequest(name, f"{name} is no field of this request", "unknown_parameter")


def check_model(fields: Fields, name: str) -> None:
    """Raise RequestError, status 404, for a request to another model."""
    given = fields.text("model")
    if given and given != name:
        message = f"model is {shown(given)}; expected {name!r}"
        raise RequestError(404, message, "model", "model_not_found")


def _words(fields: Fields, name: str, tokenizer: Tokenizer, both: bool = False) -> list[list[int]]:
    """Return the tokens of the words of a field, with ``both`` also after a space."""
    words: list[list[int]] = []
    for text in fields.texts(name, _MOST_WORDS, _LONGEST_WORD):
        word = text.lstrip() if both else text
        try:
            tokens = tokenizer.encode(word, add_special_tokens=False)
            spaced = tokenizer.encode(f" {word}", add_special_tokens=False) if both else []
        except (TypeError, ValueError) as error:
            raise BadRequest(name, f"{name} has {shown(text)}: {reason_of(error)}") from error
        if not tokens:
            raise BadRequest(name, f"{name} has {shown(text)}, which has no token")
        words.append(tokens)
        if len(spaced) == len(tokens) and spaced[0] != tokens[0]:  # as vLLM has it
            words.append(spaced)
    return words


def _check_size(name: str, value: Any) -> None:
    """Raise BadRequest for a list of more tokens than are checked in a moment."""
    inner = value if isinstance(value, list) else []
    count = sum(len(item) if isinstance(item, list) else 1 for item in inner)
    if count > _MOST_TOKENS:
        raise BadRequest(name, f"{name} has {count} tokens; expected at most {_MOST_TOKENS}")


def _stops(fields: Fields, name: str = "stop") -> tuple[str, ...]:
    return tuple(fields.texts(name, _MOST_STOPS, _LONGEST_STOP))


def _least(fields: Fields, name: str = "min_tokens") -> int | None:
    return fields.integer(name, 0, MAX_INT)


def _ends(fields: Fields, name: str, vocab: int) -> list[int]:
    value = fields.get(name)
    several = fields if isinstance(value, list) else Fields({name: [value]})
    return several.integers(name, _MOST_TOKENS, 0, vocab - 1)


def _sequence_biases(fields: Fields, name: str) -> dict[int | tuple[int, ...], Any]:
    """Return biases by their tokens, of pairs, or of an object as transformers saves a dict."""
    value, biases = fields.get(name), dict[int | tuple[int, ...], Any]()
    try:
        for ids, bias in value.items() if isinstance(value, Mapping) else value:
            if isinstance(ids, str):  # such as "(14, 2)" and "(14,)"
                ids = [int(token) for token in ids.strip("()").removesuffix(",").split(",")]
            biases[ids[0] if len(ids) == 1 else tuple(ids)] = bias
    except (TypeError, ValueError) as error:
        raise fields.error(name, "pairs of a list of tokens and a bias") from error
    return biases


# How entries of a generation config are read that no field passes to the engine as it is.
_OF_CONFIG: Mapping[str, Callable[[Fields, str, int], Any]] = {
    "eos_token_id": lambda fields, name, vocab: _ends(fields, name, vocab),
    "sequence_bias": lambda fields, name, _: _sequence_biases(fields, name),
    "max_new_tokens": lambda fields, name, _: fields.integer(name, 1, MAX_INT),
    "max_length": lambda fields, name, _: fields.integer(name, 2, MAX_INT),  # prompt and answer
    "min_new_tokens": lambda fields, name, _: _least(fields, name),
    "min_length": lambda fields, name, _: _least(fields, name),
    "num_beam_groups": lambda fields, name, _: fields.integer(name, 1, _MOST_BEAMS),
    "forced_bos_token_id": lambda fields, name, vocab: fields.integer(name, 0, vocab - 1),
    "forced_eos_token_id": lambda fields, name, vocab: fields.integer(name, 0, vocab - 1),
    "stop_strings": lambda fields, name, _: _stops(fields, name),
    "do_sample": lambda fields, name, _: fields.boolean(name),
}
# Requests that meet all checks of entries: a text, and a search of several groups.
_TRIALS: tuple[dict[str, Any], ...] = ({}, {"num_beams": 2, "num_beam_groups": 2})


def read_default(
    name: str, value: Any, others: Mapping[str, Any], tokenizer: Tokenizer, vocab: int
) -> Any:
    """Return an entry of a generation config as ``read_parameters`` takes it, beside ``others``.

    It meets the checks of a request's fields and of the engine: raises ``BadRequest``.
    """
    fields = Fields({name: value})
    if name in _SAMPLING:
        value = _sampling_of(fields, tokenizer, vocab, {})[name]
    elif name in _OF_CONFIG:
        value = _OF_CONFIG[name](fields, name, vocab)
    submission: Any = Submission(vocab, MAX_INT, (_MOST_BEAMS, ""), "transformers", ())
    of_engine = dict.fromkeys(("do_sample", "logprobs", "grammar", "generation_config"))
    for body in _TRIALS:
        try:
            parameters = read_parameters(
                Fields(body), tokenizer, {**others, name: value}, (), vocab
            )
            arguments = {**of_engine, **parameters.arguments_of(1, 1)}
            seed = None if parameters.is_search else 0
            submission.sequence_of(None, [0], seed=seed, encoder_inputs={}, **arguments)
        except BadRequest:
            raise
        except (OverflowError, TypeError, ValueError) as error:
            raise error_of_engine(error, {"logit_bias": name, "min_tokens": name}) from error
    return value


def _of_model(
    defaults: Mapping[str, Any], ends: Collection[int], is_search: bool
) -> dict[str, Any]:
    """Return the arguments that come from the model's generation config.

    A search bans single tokens, and adds to them: longer words are left out.
    """
    names = _OF_CONFIG_IN_SEARCHES if is_search else _SAMPLING
    found = {name: defaults[name] for name in names if name in defaults}
    biases = dict(defaults.get("sequence_bias", ()))
    if is_search:
        words = found.pop("bad_words_ids", ())
        banned = [word[0] for word in words if len(word) == 1 and word[0] not in ends]
        if banned:
            found["suppress_tokens"] = [*found.get("suppress_tokens", ()), *banned]
        biases = {token: bias for token, bias in biases.items() if isinstance(token, int)}
    return {**found, "logit_bias": biases} if biases else found


def _sampling_of(
    fields: Fields, tokenizer: Tokenizer, vocab: int, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments that come from fields, one by one."""
    arguments: dict[str, Any] = {}
    for name in (*_SAMPLING, *_ALIASES):
        if name not in fields:
            continue
        argument = _ALIASES.get(name, name)
        if argument in arguments:
            raise BadRequest(name, f"{name} and {argument} are given; expected one of both")
        value = fields.get(name)
        if isinstance(value, float) and argument in ("top_k", "no_repeat_ngram_size"):
            value = fields.integer(name, -MAX_INT, MAX_INT)
        arguments[argument] = value
    if (mode := fields.integer("mirostat", 0, 2)) is not None:
        if mode == 1:
            raise fields.error("mirostat", "0 or 2")
        if mode == 2:
            arguments.setdefault("mirostat_tau", _MIROSTAT_TAU)
        else:
            arguments.pop("mirostat_tau", None)
            arguments.pop("mirostat_eta", None)
    for name, low, high in (("presence_penalty", -2.0, 2.0), ("frequency_penalty", -2.0, 2.0),
                            ("temperature", 0.0, 100.0)):  # fmt: skip
        if name in arguments:
            fields.number(name, low, high)
    if words := _words(fields, "bad_words", tokenizer, both=True):
        others = arguments.get("bad_words_ids", defaults.get("bad_words_ids", []))
        if not isinstance(others, list):
            raise fields.error("bad_words_ids", "a list of lists of ints")
        arguments["bad_words_ids"] = [*others, *words]
    if breakers := _words(fields, "dry_sequence_breakers", tokenizer):
        arguments["dry_breakers"] = sorted({tokens[-1] for tokens in breakers})
    bias = fields.object("logit_bias")
    if bias:
        arguments["logit_bias"] = _biases(bias, vocab)
    return arguments


def _biases(bias: Mapping[str, Any], vocab: int) -> dict[int, float]:
    biases = {}
    if len(bias) > _MOST_TOKENS:
        raise BadRequest(
            "logit_bias", f"logit_bias has {len(bias)} tokens; expected at most {_MOST_TOKENS}"
        )
    of_tokens = Fields(bias)
    for token in of_tokens.names():
        is_id = token.isascii() and token.isdecimal() and len(token) < 10
        if not is_id or int(token) >= vocab:
            raise BadRequest(
                "logit_bias", f"logit_bias has {token[:80]!r}; expected token ids below {vocab}"
            )
        try:
            number = of_tokens.number(token, -100.0, 100.0)
        except BadRequest as error:
            raise BadRequest("logit_bias", f"logit_bias: token {error}") from error
        assert number is not None
        biases[int(token)] = number
    return biases


def read_parameters(
    fields: Fields,
    tokenizer: Tokenizer,
    defaults: Mapping[str, Any],
    eos_token_ids: Iterable[int],
    vocab: int,
) -> Parameters:
    """Check fields that chats and completions share; raise ``BadRequest``, which names the field.

    ``defaults`` are the entries of the model's generation config that ``read_default`` has read,
    for absent fields, and ``vocab`` is the number of logits.
    """
    for name in (*_SAMPLING, *_ALIASES):
        _check_size(name, fields.get(name))
    arguments = _sampling_of(fields, tokenizer, vocab, defaults)
    num_beams = fields.integer("num_beams", 1, _MOST_BEAMS) or 1
    is_search = num_beams > 1
    if is_search:
        if "stop" in fields:
            raise BadRequest("stop", "stop is given; expected none with num_beams above 1: the "
                             "tokens of stop_token_ids end a search")  # fmt: skip
        arguments |= {name: fields.get(name) for name in _SEARCH if name in fields}
    else:
        for name in _SEARCH[1:]:
            if name in fields:
                raise BadRequest(name, f"{name} is given; expected num_beams above 1 with it")
    ends = [] if fields.boolean("ignore_eos") else list(eos_token_ids)
    stop_tokens = fields.integers("stop_token_ids", _MOST_TOKENS, 0, vocab - 1)
    own_end = ends[:1]  # the tokenizer's, which is never named
    ends += stop_tokens
    of_model = _of_model(defaults, ends, is_search)
    if "logit_bias" in of_model and "logit_bias" in arguments:
        of_model["logit_bias"] |= arguments.pop("logit_bias")
    if is_search and "num_beam_groups" not in arguments:
        if num_beams % of_model.get("num_beam_groups", 1):  # the config's own num_beams had them
            del of_model["num_beam_groups"]
    if {**of_model, **arguments}.get("num_beam_groups", 1) == 1:
        of_model.pop("diversity_penalty", None)
    arguments = {**of_model, **arguments, "eos_token_id": list(dict.fromkeys(ends))}
    of_texts: dict[str, Any] = {}
    if not is_search:
        is_greedy = defaults.get("do_sample") is False and "temperature" not in fields
        arguments["do_sample"] = not is_greedy and arguments.get("temperature", 1.0) > 0
        of_texts["first_token"] = defaults.get("forced_bos_token_id")
        of_texts["last_token"] = defaults.get("forced_eos_token_id")
    least = _least(fields)
    if least is None and (least := defaults.get("min_new_tokens")) is None:
        of_texts["min_length"] = defaults.get("min_length", 0)
    arguments["min_tokens"] = least or 0
    n = fields.integer("n", 1, _MOST_CHOICES) or 1
    if is_search:
        if n > num_beams:
            raise BadRequest("n", f"n is {n}; expected at most num_beams, {num_beams}")
        arguments["num_return_sequences"] = n
    seed = fields.integer("seed", -MAX_INT - 1, MAX_INT)
    if seed == -1:  # llama.cpp's "any"
        seed = None
    stream = fields.boolean("stream")
    options = fields.object("stream_options")
    includes_usage = repeats_usage = False
    if options is not None:
        if not stream:
            raise BadRequest("stream_options", "stream_options is given; expected stream with it")
        of_stream = Fields(options)
        check_names(
            of_stream, ("include_usage", "include_obfuscation", "continuous_usage_stats"), {}
        )
        includes_usage = of_stream.boolean("include_usage")
        repeats_usage = of_stream.boolean("continuous_usage_stats")
    stops = _stops(fields)
    if "stop" not in fields and not is_search:
        stops = defaults.get("stop_strings", ())
    return Parameters(
        arguments,
        n,
        None if seed is None else seed & MAX_INT,
        is_search,
        stops,
        frozenset(stop_tokens) - frozenset(own_end),
        fields.boolean("include_stop_str_in_output"),
        fields.boolean("skip_special_tokens", True),
        stream,
        includes_usage,
        repeats_usage,
        **of_texts,
    )

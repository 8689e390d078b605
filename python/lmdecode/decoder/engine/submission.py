"""Checks the arguments and inputs of ``Engine.submit`` and makes a sequence of them."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lmdecode._checks import MAX_INT, check_bool, check_int, is_int, type_error, unknown_parameter
from lmdecode.beam.engine.request import BeamRequest, check_tokens_of_request
from lmdecode.beam.state import EarlyStopping, SearchDialect
from lmdecode.beam.token_rules import TokenRules, check_token_rules
from lmdecode.beam.trie import Trie
from lmdecode.decoder.checks import check_memory
from lmdecode.decoder.engine.request import (
    DrawnSequence,
    Driver,
    EncoderInput,
    Grammar,
    RequestState,
    SearchedSequence,
    WrittenSequence,
)
from lmdecode.generation_options import option_names
from lmdecode.models.checks import check_floats
from lmdecode.sampling.parameters import FilterParameters
from lmdecode.sampling.sampler_rows import SAMPLER_PARAMETERS, check_parameters, rules_of_row

__all__ = ["Encoder", "EncoderInputs", "RequestParameters", "Submission", "tokens_of"]

_OP = "Engine.submit"
_SEARCHES, _OF_SEARCHES = option_names("search"), frozenset(option_names("searches"))
_DRAWS = frozenset(option_names("draws"))
_MOST_LOGPROBS = 64
_MOST_HYPOTHESES = 1 << 16  # of a search
# submit() has its own names for the tokens, for where a text ends, and for the request.
_BEAM_PARAMETERS = tuple(
    field.name
    for field in dataclasses.fields(BeamRequest)
    if field.name in option_names("both", "search", "searches", "request")
)


class RequestParameters(FilterParameters[int, float], total=False):
    """What ``Engine.submit`` takes as ``**parameters``: those of samplers, and of searches."""

    num_beams: int | None
    num_return_sequences: int | None
    length_penalty: float | None
    early_stopping: EarlyStopping | None
    pad_token_id: int | None
    num_beam_groups: int | None
    diversity_penalty: float | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | None
    patience: float | None
    coverage_penalty: float | None
    trie: Trie | None
    dialect: SearchDialect | None


class _Asked(NamedTuple):
    """Checked arguments that every request has; ``least`` is ``min_tokens``."""

    request: RequestState
    new: int
    least: int
    ends: tuple[int, ...]
    do_sample: bool | None
    seed: int | None
    logprobs: int | None
    grammar: Grammar | None


@dataclasses.dataclass(frozen=True)
class Submission:
    """Checks requests of an engine. Attributes not listed here are the ``Engine``'s.

    ``most_beams`` is the largest number of beams of a search, and the name of that limit.
    ``inputs`` checks the inputs of an encoder-decoder model.
    """

    vocab: int
    capacity: int
    most_beams: tuple[int, str]
    dialect: str
    eos_token_id: tuple[int, ...]
    inputs: EncoderInputs | None = None
    decoder_start_token_id: int | None = None
    request_of_config: Callable[[Any, Any], BeamRequest] | None = None

    def sequence_of(
        self,
        driver: Driver,
        prompt_ids: Any,
        *,
        max_new_tokens: int | None,
        min_tokens: int | None,
        eos_token_id: Any,
        do_sample: bool | None,
        seed: int | None,
        logprobs: int | None,
        grammar: Grammar | None,
        encoder_inputs: dict[str, Any],
        generation_config: Any,
        **parameters: Any,
    ) -> WrittenSequence:
        """Return the sequence of a request; arguments are those of ``submit``."""
        if generation_config is not None:
            others = {
                "min_tokens": min_tokens or None, "eos_token_id": eos_token_id,
                "do_sample": do_sample, "seed": seed, "logprobs": logprobs, "grammar": grammar,
                **parameters,
            }  # fmt: skip
            search = self._search_of_config(prompt_ids, max_new_tokens, generation_config, others)
            return self.search_of(driver, search, None, encoder_inputs)
        read = self._input(encoder_inputs)
        prompt = self._prompt(prompt_ids)
        num_beams = parameters.get("num_beams")
        if num_beams is not None:
            num_beams = check_int(_OP, "num_beams", num_beams, 1)
        is_search = (num_beams or 1) > 1 or parameters.get("trie") is not None
        self._check_names(parameters, encoder_inputs, is_search)
        new = check_int(_OP, "max_new_tokens", max_new_tokens, 1)
        least = 0 if min_tokens is None else check_int(_OP, "min_tokens", min_tokens, 0)
        self._check_length(prompt, new)
        ends = self.eos_token_id
        if eos_token_id is not None:
            ends = tokens_of(_OP, "eos_token_id", eos_token_id, self.vocab)
        asked = _Asked(
            RequestState(prompt, driver), new, least, ends, do_sample, seed, logprobs, grammar
        )
        if is_search:
            return self._searched(asked, parameters).with_input(read)
        return self._drawn(asked, parameters).with_input(read)

    def _check_names(
        self, parameters: dict[str, Any], encoder_inputs: dict[str, Any], is_search: bool
    ) -> None:
        """Raise TypeError for a parameter that a text, or a search, does not have."""
        known, kind = SAMPLER_PARAMETERS, "parameter"
        if is_search:
            known, kind = _BEAM_PARAMETERS, "parameter of a search"
        for name, value in parameters.items():
            of_searches = name in _SEARCHES or name in _OF_SEARCHES
            if value is not None and name not in known and (is_search or not of_searches):
                others = (*inspect.signature(self.sequence_of).parameters, *encoder_inputs)
                raise unknown_parameter(_OP, name, known, others, kind)

    def _input(self, given: dict[str, Any]) -> EncoderInput | None:
        if self.inputs is not None:
            return self.inputs.take(_OP, **given)
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{_OP}: {name} is given; expected None for a decoder-only model")
        return None

    def _search_of_config(
        self,
        prompt_ids: Any,
        max_new_tokens: int | None,
        generation_config: Any,
        others: dict[str, Any],
    ) -> BeamRequest:
        """Return the search of ``generate()`` with a config."""
        if self.request_of_config is None:
            raise ValueError(
                f"{_OP}: generation_config is given; expected None for a decoder-only model, or "
                "without Decoding.engine"
            )
        for name, value in others.items():
            if value is not None:
                raise ValueError(
                    f"{_OP}: {name} is {value!r}; expected None beside generation_config"
                )
        if max_new_tokens is not None:
            generation_config = copy.copy(generation_config)
            generation_config.max_new_tokens = check_int(_OP, "max_new_tokens", max_new_tokens, 1)
        if prompt_ids is not None:
            prompt_ids = self._prompt(prompt_ids)
        return self.request_of_config(prompt_ids, generation_config)

    def _check_length(self, prompt: Sequence[int], new: int) -> None:
        if len(prompt) + new > self.capacity + 1:  # the last token is never read
            raise ValueError(
                f"{_OP}: prompt_ids has {len(prompt)} tokens and max_new_tokens is {new}; expected "
                f"at most {self.capacity + 1} together, the capacity and the last token"
            )

    def _prompt(self, prompt_ids: Any) -> tuple[int, ...]:
        if prompt_ids is None and self.inputs is not None:
            prompt_ids = self.decoder_start_token_id
            if prompt_ids is None:
                raise ValueError(
                    f"{_OP}: prompt_ids is None; expected tokens, as the model has no "
                    "decoder_start_token_id"
                )
        prompt = tokens_of(_OP, "prompt_ids", prompt_ids, self.vocab)
        if not prompt:
            raise ValueError(f"{_OP}: prompt_ids is empty; expected at least one token")
        return prompt

    def _searched(self, asked: _Asked, parameters: dict[str, Any]) -> SearchedSequence:
        of_draws = {
            "do_sample": asked.do_sample or None, "seed": asked.seed, "logprobs": asked.logprobs,
            "grammar": asked.grammar,
        }  # fmt: skip
        for name, value in of_draws.items():
            if value is not None:
                what = "given" if name == "grammar" else repr(value)
                raise ValueError(f"{_OP}: {name} is {what}; expected None for a search")
        given = {name: value for name, value in parameters.items() if value is not None}
        search = BeamRequest(
            asked.request.prompt_ids,
            max_new_tokens=asked.new,
            eos_token_id=asked.ends,
            min_new_tokens=asked.least,
            **given,
        )
        self._check_search(search)
        return SearchedSequence(asked.request, search)

    def search_of(
        self,
        driver: Driver,
        search: BeamRequest,
        token_rules: TokenRules | None,
        encoder_inputs: dict[str, Any],
    ) -> SearchedSequence:
        """Return the sequence of a search; arguments are those of ``Engine.submit_search``."""
        read = self._input(encoder_inputs)
        if not isinstance(search, BeamRequest):
            raise type_error(_OP, "search", search, "a BeamRequest")
        self._check_length(search.prompt_ids, search.max_new_tokens)
        self._check_search(search)
        if token_rules is not None:
            check_token_rules(_OP, token_rules, self.vocab)
        sequence = SearchedSequence(
            RequestState(tuple(search.prompt_ids), driver),
            dataclasses.replace(search, request_id=None),
            token_rules,
        )
        sequence.input = read
        return sequence

    def _check_search(self, search: BeamRequest) -> None:
        most, what = self.most_beams
        if search.num_beams > most:
            raise ValueError(
                f"{_OP}: num_beams is {search.num_beams}; expected at most {most}, {what} of the "
                "engine"
            )
        if search.num_hypotheses > _MOST_HYPOTHESES:
            raise ValueError(
                f"{_OP}: patience is {search.patience}; expected one with which a group keeps at "
                f"most {_MOST_HYPOTHESES} sequences, not {search.num_hypotheses}"
            )
        if search.coverage_penalty:
            raise ValueError(
                f"{_OP}: coverage_penalty is {search.coverage_penalty}; expected 0, as the engine "
                "gives no attention"
            )
        check_tokens_of_request(_OP, search, self.vocab)
        for name, tokens in (
            ("suppress_tokens", search.suppress_tokens),
            ("logit_bias", search.logit_bias),
        ):
            if any(token >= self.vocab for token in tokens):
                raise ValueError(
                    f"{_OP}: {name} has {list(tokens)}; expected tokens below {self.vocab}"
                )
        if search.trie is not None:
            search.trie.check_vocab(_OP, self.vocab)

    def _drawn(self, asked: _Asked, parameters: dict[str, Any]) -> DrawnSequence:
        seed, grammar = asked.seed, asked.grammar
        given = {
            name: value
            for name, value in parameters.items()
            if value is not None and name not in _SEARCHES
        }
        of_searches = sorted(_OF_SEARCHES & given.keys())
        if of_searches:
            raise ValueError(
                f"{_OP}: {of_searches[0]} is given; expected none without num_beams above 1"
            )
        draws = seed is not None or bool(_DRAWS & given.keys())
        if asked.do_sample is not None:
            draws = check_bool(_OP, "do_sample", asked.do_sample, kind="a bool or None")
        if seed is not None:
            limits = "0 to 2^63 - 1; None draws one, and do_sample=False needs none"
            seed = check_int(_OP, "seed", seed, 0, MAX_INT, limits=limits)
        if not draws:
            given = {name: value for name, value in given.items() if name not in _DRAWS}
            given["temperature"], seed = 0.0, 0
        elif seed is None:
            seed = int(torch.randint(0, 2**63 - 1, (), device="cpu"))
        given = {"temperature": 1.0, **given, "seed": seed}
        if asked.ends:
            given.update(min_tokens=asked.least, eos_token_id=list(asked.ends))
        rules = rules_of_row(check_parameters(given, self.vocab), self.dialect, seed)
        most = -1
        if asked.logprobs is not None:
            most = check_int(_OP, "logprobs", asked.logprobs, 0, min(_MOST_LOGPROBS, self.vocab))
        for name in ("fill_bitmask", "accept_token"):
            if grammar is not None and not callable(getattr(grammar, name, None)):
                raise type_error(_OP, "grammar", grammar, f"an object with {name}()")
        return DrawnSequence(asked.request, asked.new, asked.ends, rules, most, grammar)


# --- Inputs ---------------------------------------------------------------------------------------


def tokens_of(op: str, name: str, tokens: Any, vocab: int | None = None) -> tuple[int, ...]:
    """Return the tokens of an int, a sequence, a set, or a tensor or array of one dimension."""
    if isinstance(tokens, Tensor) or (hasattr(tokens, "__array__") and hasattr(tokens, "tolist")):
        if len(tokens.shape) > 1 or "int" not in str(tokens.dtype):
            raise ValueError(
                f"{op}: {name} has shape {list(tokens.shape)} and dtype {tokens.dtype}; expected "
                "[length] of integers"
            )
        tokens = tokens.tolist()
    if is_int(tokens):
        tokens = (tokens,)
    is_text = isinstance(tokens, (str, bytes, bytearray, memoryview))
    if is_text or not isinstance(tokens, (Sequence, Set)):
        raise type_error(op, name, tokens, "a sequence of int, or a tensor")
    for token in tokens:
        if not is_int(token):
            raise type_error(op, f"a token of {name}", token, "an int")
        if vocab is not None and not 0 <= token < vocab:
            raise ValueError(f"{op}: {name} has the token {token}; expected 0 to {vocab - 1}")
    return tuple(int(token) for token in tokens)


class Encoder(Protocol):
    """The encoder of a ``Decoding``."""

    @property
    def takes_tokens(self) -> bool:
        """Whether the input is tokens, not features."""

    @property
    def longest(self) -> int | None:
        """Maximum number of positions of an input, None if unlimited."""

    def whole_source(self, source: Sequence[int]) -> Sequence[int]:
        """Return a source with the tokens that the model always has around it."""

    def check_source(self, name: str, source: Sequence[int]) -> None:
        """Raise ValueError for tokens that the model does not accept."""

    def check_features(self, name: str, features: Tensor) -> None:
        """Raise ValueError for features, [channels, frames], that the model does not accept."""

    def memory_of_tokens(self, source: Sequence[int]) -> Tensor:
        """Return [S, D] float32."""

    def memory_of_features(self, features: Tensor) -> Tensor:
        """Return [S, D] float32."""


@dataclass(frozen=True)
class EncoderInputs:
    """The inputs of an engine: at most ``source`` positions of ``memory_size`` each.

    Without an encoder only memories can be given.
    """

    encoder: Encoder | None
    source: int
    memory_size: int

    def take(self, op: str, **given: Any) -> EncoderInput:
        """Check and return the one of ``input_ids``, ``input_features`` and ``memory`` given."""
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            raise ValueError(
                f"{op}: {' and '.join(names) or 'nothing'} is given as input; expected one of "
                f"{', '.join(given)}"
            )
        (name,) = names
        take: dict[str, Callable[[str, Any], EncoderInput]] = {
            "input_ids": self._tokens,
            "input_features": self._features,
            "memory": self._memory,
        }
        return take[name](op, given[name])

    def _check_encoder(self, op: str, name: str, takes_tokens: bool) -> Encoder:
        if self.encoder is None or self.encoder.takes_tokens != takes_tokens:
            other = "input_features" if takes_tokens else "input_ids"
            expected = "memory, without an encoder" if self.encoder is None else other
            raise ValueError(f"{op}: {name} is given; expected {expected}")
        return self.encoder

    def _check_positions(self, op: str, what: str, positions: int) -> None:
        if positions > self.source:
            raise ValueError(
                f"{op}: {what}; expected at most {self.source} positions, source of the engine"
            )

    def _tokens(self, op: str, value: Any) -> EncoderInput:
        encoder = self._check_encoder(op, "input_ids", takes_tokens=True)
        tokens = encoder.whole_source(tokens_of(op, "input_ids", value))
        encoder.check_source(f"{op}: input_ids", tokens)
        self._check_positions(op, f"input_ids has {len(tokens)} tokens", len(tokens))
        return EncoderInput(len(tokens), lambda: encoder.memory_of_tokens(tokens))

    def _features(self, op: str, value: Any) -> EncoderInput:
        encoder = self._check_encoder(op, "input_features", takes_tokens=False)
        features = value
        if not isinstance(value, Tensor) and hasattr(value, "__array__"):
            features = torch.as_tensor(value, device="cpu")
        check_floats(op, "input_features", features)
        encoder.check_features(f"{op}: input_features", features)
        positions = encoder.longest or 0
        self._check_positions(op, f"input_features gives {positions} positions", positions)
        kept = _copy_of(features)
        return EncoderInput(positions, lambda: encoder.memory_of_features(kept))

    def _memory(self, op: str, value: Any) -> EncoderInput:
        check_memory(op, value, self.memory_size, self.source)
        if not len(value):
            raise ValueError(f"{op}: memory has 0 positions; expected at least 1")
        kept = _copy_of(value)
        return EncoderInput(len(kept), lambda: kept)


def _copy_of(tensor: Tensor) -> Tensor:
    """Return a copy, as the caller may change the tensor while the request waits."""
    return tensor.detach().to(device="cpu", dtype=torch.float32, copy=True)

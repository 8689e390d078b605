"""What ``Engine.submit`` takes: checked, and made a sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmdecode._checks import MAX_INT, check_bool, check_int, is_int, type_error
from lmdecode.beam.engine.request import BeamRequest
from lmdecode.beam.engine.request_rules import check_tokens_of_request
from lmdecode.beam.token_rules import TokenRules
from lmdecode.decoder.engine.request import Driver, Request
from lmdecode.decoder.engine.rows import DrawnSequence, Grammar, SearchedSequence, WrittenSequence
from lmdecode.sampling.sampler_rows import check_parameters, rules_of_row

__all__ = ["Submission"]

_OP = "Engine.submit"
_SEARCHES = ("num_beams", "trie")  # either of them makes a search
_OF_SEARCHES = frozenset(
    ("num_return_sequences", "length_penalty", "early_stopping", "num_beam_groups",
     "diversity_penalty", "patience", "forced_bos_token_id", "forced_eos_token_id", "pad_token_id")
)  # fmt: skip
# Any of these asks for tokens that are drawn; where none are drawn they have no meaning.
_DRAWS = frozenset(
    ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
     "top_n_sigma", "top_h", "xtc_probability", "mirostat_tau", "adaptive_target",
     "dynamic_temperature_range")
)  # fmt: skip
_MOST_LOGPROBS = 64
# submit() has names of its own for the others.
_BEAM_PARAMETERS = tuple(
    field.name
    for field in dataclasses.fields(BeamRequest)
    if field.name
    not in ("prompt_ids", "max_new_tokens", "min_new_tokens", "eos_token_id", "request_id")
)


def _tokens(name: str, tokens: Any, vocab: int) -> tuple[int, ...]:
    """Return the tokens of an int, a sequence, a set, or a tensor or array of one dimension."""
    if isinstance(tokens, Tensor) or (hasattr(tokens, "__array__") and hasattr(tokens, "tolist")):
        if len(tokens.shape) > 1 or "int" not in str(tokens.dtype):
            raise ValueError(
                f"{_OP}: {name} has shape {list(tokens.shape)} and dtype {tokens.dtype}; expected "
                "[length] of integers"
            )
        tokens = tokens.tolist()
    if is_int(tokens):
        tokens = (tokens,)
    is_text = isinstance(tokens, (str, bytes, bytearray, memoryview))
    if is_text or not isinstance(tokens, (Sequence, Set)):
        raise type_error(_OP, name, tokens, "a sequence of int, or a tensor")
    for token in tokens:
        if not is_int(token):
            raise type_error(_OP, f"a token of {name}", token, "an int")
        if not 0 <= token < vocab:
            raise ValueError(f"{_OP}: {name} has the token {token}; expected 0 to {vocab - 1}")
    return tuple(int(token) for token in tokens)


class _Asked(NamedTuple):
    """What every request is asked; ``least`` is its ``min_tokens``."""

    request: Request
    new: int
    least: int
    ends: tuple[int, ...]
    do_sample: bool | None
    seed: int | None
    logprobs: int | None
    grammar: Grammar | None


@dataclasses.dataclass(frozen=True)
class Submission:
    """What an engine's requests are checked by; attributes are those of the ``Engine``."""

    vocab: int
    capacity: int
    max_requests: int
    order: str
    eos_token_id: tuple[int, ...]

    def sequence_of(
        self,
        driver: Driver,
        prompt_ids: Any,
        *,
        max_new_tokens: int,
        min_tokens: int,
        eos_token_id: Any,
        do_sample: bool | None,
        seed: int | None,
        logprobs: int | None,
        grammar: Grammar | None,
        **parameters: Any,
    ) -> WrittenSequence:
        """Return the sequence that is to be written; arguments are those of ``submit``."""
        prompt = self._prompt(prompt_ids)
        new = check_int(_OP, "max_new_tokens", max_new_tokens, 1)
        least = check_int(_OP, "min_tokens", min_tokens, 0)
        self._check_length(prompt, new)
        ends = self.eos_token_id
        if eos_token_id is not None:
            ends = _tokens("eos_token_id", eos_token_id, self.vocab)
        asked = _Asked(
            Request(prompt, driver), new, least, ends, do_sample, seed, logprobs, grammar
        )
        num_beams = parameters.get("num_beams")
        if num_beams is not None:
            num_beams = check_int(_OP, "num_beams", num_beams, 1)
        if (num_beams or 1) > 1 or parameters.get("trie") is not None:
            return self._searched(asked, parameters)
        return self._drawn(asked, parameters)

    def _check_length(self, prompt: Sequence[int], new: int) -> None:
        if len(prompt) + new > self.capacity + 1:  # the last token is never read
            raise ValueError(
                f"{_OP}: prompt_ids has {len(prompt)} tokens and max_new_tokens is {new}; expected "
                f"at most {self.capacity + 1} together, the capacity and the last token"
            )

    def _prompt(self, prompt_ids: Any) -> tuple[int, ...]:
        prompt = _tokens("prompt_ids", prompt_ids, self.vocab)
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
                raise ValueError(f"{_OP}: {name} is {value!r}; expected None for a search")
        given = {name: value for name, value in parameters.items() if value is not None}
        others = [name for name in given if name not in _BEAM_PARAMETERS]
        if others:
            raise TypeError(
                f"{_OP}: {others[0]} is no parameter of a search; expected one of "
                f"{', '.join(_BEAM_PARAMETERS)}"
            )
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
        self, driver: Driver, search: BeamRequest, token_rules: TokenRules | None
    ) -> SearchedSequence:
        """Return the sequence of a search; arguments are those of ``Engine.submit_search``."""
        if not isinstance(search, BeamRequest):
            raise type_error(_OP, "search", search, "a BeamRequest")
        self._check_length(search.prompt_ids, search.max_new_tokens)
        self._check_search(search)
        return SearchedSequence(
            Request(tuple(search.prompt_ids), driver),
            dataclasses.replace(search, request_id=None),
            token_rules,
        )

    def _check_search(self, search: BeamRequest) -> None:
        if search.num_beams > self.max_requests:
            raise ValueError(
                f"{_OP}: num_beams is {search.num_beams}; expected at most {self.max_requests}, "
                "max_requests of the engine"
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
            seed = check_int(_OP, "seed", seed, 0, MAX_INT)
        if not draws:
            given = {name: value for name, value in given.items() if name not in _DRAWS}
            given["temperature"], seed = 0.0, 0
        elif seed is None:
            seed = int(torch.randint(0, 2**63 - 1, (), device="cpu"))
        given = {"temperature": 1.0, **given, "seed": seed}
        if asked.ends:
            given.update(min_tokens=asked.least, eos_token_id=list(asked.ends))
        rules = rules_of_row(check_parameters(given, self.vocab), self.order, seed)
        most = -1
        if asked.logprobs is not None:
            most = check_int(_OP, "logprobs", asked.logprobs, 0, min(_MOST_LOGPROBS, self.vocab))
        for name in ("fill_bitmask", "accept_token"):
            if grammar is not None and not callable(getattr(grammar, name, None)):
                raise type_error(_OP, "grammar", grammar, f"an object with {name}()")
        return DrawnSequence(asked.request, asked.new, asked.ends, rules, most, grammar)

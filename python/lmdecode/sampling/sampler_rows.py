"""Parameters of a row of a ``Sampler``: checked, and converted to numbers for the op."""

from __future__ import annotations

import inspect
import math
import reprlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lmdecode._checks import (
    MAX_INT,
    check_dense_tensor,
    check_int,
    check_number,
    dtype_name,
    is_int,
    is_list,
    type_error,
    unknown_parameter,
)
from lmdecode._ops import ops
from lmdecode.generation_options import NEUTRAL, OPTIONS, option_names
from lmdecode.sampling.ops import row_seed

__all__ = [
    "ACCEPT",
    "ACTIVE",
    "COUNTS",
    "KEEPS_TEXT",
    "LENGTH",
    "OUTPUT_LENGTH",
    "RAW",
    "SAMPLER_DIALECTS",
    "SAMPLER_PARAMETERS",
    "SEED",
    "STAGES",
    "RowRules",
    "check_parameters",
    "check_saved",
    "draw_seeds",
    "parameters_of_row",
    "rules_of_row",
    "shown",
    "token_tensor",
    "with_seed",
]

_OP = "Sampler"

SAMPLER_DIALECTS = ("lmdecode", "transformers", "vllm", "llama.cpp", "sglang")
"""Systems whose order of stages, and whose rules at boundaries, a ``Sampler`` can follow."""

STAGES = (
    "temperature", "top_k", "top_p", "min_p", "top_n_sigma", "epsilon_cutoff", "eta_cutoff",
    "top_h", "typical_p", "xtc", "mirostat",
)  # fmt: skip
"""The columns of ``SamplerOutput.stage_counts``."""

_INF = math.inf
# The least and the largest number, None where any finite one is allowed. In the order of
# SamplerIntegers and SamplerNumbers, without order, seed, keeps_text.
_LIMITS: dict[str, tuple[Any, Any]] = {
    each.name: each.sampler for each in OPTIONS if isinstance(each.sampler, tuple)
}
_INTEGERS = tuple(name for name in _LIMITS if isinstance(NEUTRAL[name], int))
_NUMBERS = tuple(name for name in _LIMITS if name not in _INTEGERS)
# Places among the 64-bit numbers of SamplerRow (csrc/sampling/sampler_state.h), the first of its
# integers and of its numbers among them, then the flags of a step.
(
    ACTIVE, LENGTH, OUTPUT_LENGTH, _LEARNED, _FIRST_INTEGER, SEED, KEEPS_TEXT, _FIRST_NUMBER,
    ACCEPT, RAW, COUNTS,
) = ops.sampler_layout()  # fmt: skip

_TOKEN_RULES = option_names(sampler="tokens")
SAMPLER_PARAMETERS: tuple[str, ...] = ("seed", *_INTEGERS, *_NUMBERS, *_TOKEN_RULES)
"""The names of all parameters of a row."""


def _f32(value: float) -> float:
    if abs(value) < 2.0**-126:  # subnormal: the processor flushes them where torch tells it to
        return math.ldexp(round(math.ldexp(value, 149)), -149)
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(_INF, value)
    return rounded


def _check_scalar(name: str, value: Any, where: str) -> int | float:
    if name == "seed":
        return check_int(_OP, where, value, limits="an int of 64 bits")
    least, most = _LIMITS[name]
    if name in _INTEGERS:
        return check_int(_OP, where, value, least, most)
    number = check_number(_OP, where, value)
    # Check the float32 that is computed with: a finite float64 may be infinite there.
    rounded = _f32(number)
    if math.isinf(rounded) and not {-_INF, _INF} & {least, most}:
        raise ValueError(f"{_OP}: {where} is {number}; expected a finite number of float32")
    low, high = -_INF if least is None else least, _INF if most is None else most
    if name == "repetition_penalty" and rounded <= 0.0:
        raise ValueError(f"{_OP}: {where} is {number}; expected a number > 0")
    if not low <= number <= high:  # NaN too
        limits = "a number"
        if math.isfinite(low):
            limits = f"{low:g} to {high:g}" if math.isfinite(high) else f"a number >= {low:g}"
        elif math.isfinite(high):
            limits = f"a number <= {high:g}"
        raise ValueError(f"{_OP}: {where} is {number}; expected {limits}")
    return rounded


def _check_token(value: Any, vocab: int, where: str) -> int:
    return check_int(_OP, where, value, 0, vocab - 1)


def _check_tokens(value: Any, vocab: int, where: str) -> tuple[int, ...]:
    if isinstance(value, Tensor):
        value = value.tolist()
    if is_int(value):
        return (_check_token(value, vocab, where),)
    if not isinstance(value, (Sequence, set, frozenset)) or isinstance(value, (str, bytes)):
        raise type_error(_OP, where, value, "an int or a list of ints")
    return tuple(_check_token(token, vocab, f"{where}[{i}]") for i, token in enumerate(value))


def _check_rule(name: str, value: Any, vocab: int) -> Any:
    """Return a token rule in its plain form: tuples of ints, and dicts of them."""
    if name == "logit_bias":
        if not isinstance(value, Mapping):
            raise type_error(_OP, name, value, "a dict of token, or tuple of tokens, to bias")
        biases: dict[tuple[int, ...], float] = {}
        for tokens, number in value.items():
            ids = _check_tokens(tokens, vocab, f"a key of {name}")
            if not ids:
                raise ValueError(f"{_OP}: a key of {name} is empty; expected one token or more")
            number = check_number(_OP, f"{name}[{tokens}]", number)
            bias = _f32(number)
            if math.isnan(bias) or (math.isinf(bias) and number != -_INF):
                raise ValueError(
                    f"{_OP}: {name}[{tokens}] is {number}; expected a finite number of float32, "
                    f"or -inf"
                )
            if ids in biases:  # by a token and by a tuple of it
                bias = _f32(biases[ids] + bias)
            biases[ids] = bias
        return biases
    if name == "bad_words_ids":
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            raise type_error(_OP, name, value, "a list of lists of ints")
        for i, word in enumerate(value):
            if is_int(word):
                raise type_error(_OP, f"{name}[{i}]", word, "a list of ints")
        words = [_check_tokens(word, vocab, f"{name}[{i}]") for i, word in enumerate(value)]
        for i, word in enumerate(words):
            if not word:
                raise ValueError(f"{_OP}: {name}[{i}] is empty; expected one token or more")
        return tuple(words)
    if name == "forced_tokens":
        if not isinstance(value, Mapping):
            raise type_error(_OP, name, value, "a dict of output length to token")
        return {
            check_int(_OP, f"a key of {name}", count, 0, (1 << 31) - 1): _check_token(
                token, vocab, f"{name}[{count}]"
            )
            for count, token in value.items()
        }
    return _check_tokens(value, vocab, name)


def token_tensor(method: str, name: str, value: Any) -> Tensor:
    """Return [n] int64 of one token, several, or a tensor of them."""
    if not isinstance(value, Tensor):
        if is_int(value):
            value = [value]
        if not isinstance(value, Iterable) or isinstance(value, (str, bytes, set, Mapping)):
            expected = "an int, a list of ints or a tensor"
            raise type_error(f"{_OP}.{method}", name, value, expected)
        ids = [check_int(f"{_OP}.{method}", f"{name}[{i}]", t) for i, t in enumerate(value)]
        return torch.tensor(ids, dtype=torch.int64, device="cpu")
    if value.dtype not in (torch.int64, torch.int32) or value.dim() > 1:
        raise ValueError(
            f"{_OP}.{method}: {name} has dtype {dtype_name(value)} and shape {list(value.shape)}; "
            f"expected int64 or int32, [n]"
        )
    check_dense_tensor(f"{_OP}.{method}", name, value)
    if value.is_meta:
        raise ValueError(f"{_OP}.{method}: {name} is on meta; expected a tensor with data")
    return value.reshape(-1).to("cpu", torch.int64).contiguous()


def check_parameters(
    parameters: Mapping[str, Any],
    vocab: int,
    batch: int | None = None,
    of: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Return parameters in plain form, without those that are None.

    With a ``batch``, a parameter may be a list or tensor with a number for each row. A wrong name
    may have meant another argument of the function ``of``: the error then says so.
    """
    checked: dict[str, Any] = {}
    for name, value in parameters.items():
        if name in _TOKEN_RULES:
            if value is not None:
                checked[name] = _check_rule(name, value, vocab)
            continue
        if name not in SAMPLER_PARAMETERS:
            others = () if of is None else inspect.signature(of).parameters
            raise unknown_parameter(_OP, name, SAMPLER_PARAMETERS, others)
        if value is None:
            continue
        if isinstance(value, Tensor) and value.dim() > 0 and batch is not None:
            value = value.tolist()
        elif isinstance(value, Tensor) and value.dim() == 0:
            value = value.item()
        if batch is not None and is_list(value):
            if len(value) != batch:
                raise ValueError(
                    f"{_OP}: {name} has {len(value)} numbers; expected {batch}, one for each row"
                )
            checked[name] = [
                _check_scalar(name, number, f"{name}[{i}]") for i, number in enumerate(value)
            ]
        else:
            checked[name] = _check_scalar(name, value, name)
    return checked


def _check_steering(tau: float, target: float) -> None:
    if tau > 0.0 and target >= 0.0:
        raise ValueError(
            f"{_OP}: mirostat_tau is {tau:g} and adaptive_target is {target:g}; expected one of "
            "both: each steers the draw by itself"
        )


def check_saved(rows: Tensor) -> None:
    """Raise ValueError for invalid parameters in saved rows, [n, 64-bit numbers] int64."""
    places = [_LEARNED, *range(_FIRST_NUMBER, _FIRST_NUMBER + len(_NUMBERS))]
    for row, fields in enumerate(rows):
        integers = fields[SEED + 1 : KEEPS_TEXT].tolist()
        learned, *numbers = fields[places].view(torch.float64).tolist()
        for name, value in zip((*_INTEGERS, *_NUMBERS), (*integers, *numbers), strict=True):
            if _check_scalar(name, value, f"{name} of sequence {row}") != value:
                raise ValueError(
                    f"{_OP}: {name} of sequence {row} is {value}; expected a number of float32"
                )
        named = dict(zip(_NUMBERS, numbers, strict=True))
        _check_steering(named["mirostat_tau"], named["adaptive_target"])
        if not math.isfinite(learned):
            raise ValueError(
                f"{_OP}: the state of mirostat or adaptive-p of sequence {row} is {learned}; "
                "expected a finite number"
            )


def parameters_of_row(checked: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return one row of the checked parameters. An int seed belongs to row 0, others derive."""
    own = {}
    for name, value in checked.items():
        if name == "seed" and isinstance(value, int):
            value = value if value < 0 else row_seed(value, row)
        elif isinstance(value, list):
            value = value[row]
        own[name] = value
    return own


def shown(value: Any) -> str:
    """Return a checked parameter, or a number for each row, as short text."""
    if isinstance(value, list):
        more = [", ..."] * (len(value) > 4)
        return f"[{', '.join(map(shown, value[:4]))}{''.join(more)}]"
    return f"{value:g}" if isinstance(value, float) else reprlib.repr(value)


@dataclass(frozen=True)
class RowRules:
    """A row's parameters as the op takes them.

    ``integers`` [7] int64, ``numbers`` [21] float64 and ``rules`` [n] int32 are SamplerIntegers,
    SamplerNumbers and SamplerRules of csrc/sampling/sampler_state.h.
    """

    integers: Tensor
    numbers: Tensor
    rules: Tensor
    keeps_text: bool


def with_seed(rules: RowRules, seed: int) -> RowRules:
    """Return the rules of a row of the same parameters with another seed."""
    integers = rules.integers.clone()
    integers[SEED - _FIRST_INTEGER] = seed
    return replace(rules, integers=integers)


def _bits(values: list[float]) -> list[int]:
    return torch.tensor(values, dtype=torch.float32, device="cpu").view(torch.int32).tolist()


def draw_seeds(count: int) -> Tensor:
    """Draw [count] int64 seeds from torch's generator."""
    return torch.randint(0, MAX_INT, (count,), device="cpu")


def _of_llama_cpp(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters by which the stages choose as llama.cpp's samplers do.

    Its temperature is a stage: 0 chooses the largest logit that typical and XTC left.
    """
    get = parameters.get
    if get("mirostat_tau", 0.0) > 0.0:
        replaced = option_names(is_replaced=True)
        return {name: of for name, of in parameters.items() if name not in replaced}
    if get("temperature", 1.0) == 0.0 and (spread := get("dynamic_temperature_range", 0.0)) > 0.0:
        half = spread / 2  # from 0 to the range, as from half of it by half of it
        return {**parameters, "temperature": half, "dynamic_temperature_range": half}
    drops = get("typical_p", 1.0) < 1.0 or get("xtc_probability", 0.0) > 0.0
    if get("temperature", 1.0) == 0.0 and drops:
        # After both, epsilon leaves the first, or two equal ones, and top-h the first of these.
        return {**parameters, "temperature": 1.0, "epsilon_cutoff": 0.5, "top_h": 2.0**-100}
    return parameters


def rules_of_row(parameters: Mapping[str, Any], dialect: str, seed: int) -> RowRules:
    """Translate one row's checked parameters."""
    get = (_of_llama_cpp(parameters) if dialect == "llama.cpp" else parameters).get
    end_tokens = get("eos_token_id", ())
    if get("min_tokens", 0) > 0 and not end_tokens:
        raise ValueError(
            f"{_OP}: min_tokens is {get('min_tokens')} without eos_token_id; expected both, as end "
            "tokens are what it bans"
        )
    biases: dict[tuple[int, ...], float] = {}
    biases.update(get("logit_bias", {}))
    sequences = [(ids, bias) for ids, bias in biases.items() if len(ids) > 1]
    single = [(ids[0], bias) for ids, bias in biases.items() if len(ids) == 1]
    single += [(token, -_INF) for token in get("suppress_tokens", ())]
    for word in get("bad_words_ids", ()):
        if len(word) > 1:
            sequences.append((word, -_INF))
        elif dialect != "transformers" or word[0] not in end_tokens:
            single.append((word[0], -_INF))
    numbers = [_f32(get(name, NEUTRAL[name])) for name in _NUMBERS]
    named = dict(zip(_NUMBERS, numbers, strict=True))
    _check_steering(named["mirostat_tau"], named["adaptive_target"])
    keeps_text = (
        named["repetition_penalty"] != 1.0
        or named["presence_penalty"] != 0.0
        or named["frequency_penalty"] != 0.0
        or named["dry_multiplier"] > 0.0
        or named["mirostat_tau"] > 0.0
        or named["adaptive_target"] >= 0.0
        or get("no_repeat_ngram_size", 0) > 0
        or bool(sequences)
    )
    integers = [SAMPLER_DIALECTS.index(dialect), seed]
    integers += [get(name, NEUTRAL[name]) for name in _INTEGERS]
    forced = get("forced_tokens", {})
    breakers = get("dry_breakers", ())
    rules: list[int] = []
    if single or end_tokens or forced or breakers or sequences:
        rules = [len(single), len(end_tokens), len(forced), len(breakers), len(sequences)]
        for (token, _), bias in zip(single, _bits([bias for _, bias in single]), strict=True):
            rules += [token, bias]
        rules += end_tokens
        for count, token in forced.items():
            rules += [count, token]
        rules += breakers
        for (ids, _), bias in zip(sequences, _bits([bias for _, bias in sequences]), strict=True):
            rules += [len(ids), *ids, bias]
    return RowRules(
        torch.tensor([*integers, int(keeps_text)], dtype=torch.int64, device="cpu"),
        torch.tensor(numbers, dtype=torch.float64, device="cpu"),
        torch.tensor(rules, dtype=torch.int32, device="cpu"),
        keeps_text,
    )

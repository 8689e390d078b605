"""The parameters of sampling by name, for type checkers and editors; ``sampler_rows`` checks them.

They have two forms: numbers of one text, and numbers of several rows at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeAlias, TypedDict, TypeVar

from torch import Tensor

__all__ = ["BatchParameters", "FilterParameters", "FloatRows", "IntRows", "SamplingParameters"]

_Int = TypeVar("_Int")
_Float = TypeVar("_Float")
IntRows: TypeAlias = int | Sequence[int] | Tensor
FloatRows: TypeAlias = float | Sequence[float] | Tensor
_Tokens: TypeAlias = int | Sequence[int] | Tensor
_Biases: TypeAlias = (
    Mapping[int, float] | Mapping[tuple[int, ...], float] | Mapping[int | tuple[int, ...], float]
)


class FilterParameters(TypedDict, Generic[_Int, _Float], total=False):
    """``SamplingParameters`` without the three that an ``Engine`` has itself."""

    temperature: _Float | None
    top_k: _Int | None
    top_p: _Float | None
    min_p: _Float | None
    typical_p: _Float | None
    epsilon_cutoff: _Float | None
    eta_cutoff: _Float | None
    top_n_sigma: _Float | None
    top_h: _Float | None
    xtc_probability: _Float | None
    xtc_threshold: _Float | None
    repetition_penalty: _Float | None
    presence_penalty: _Float | None
    frequency_penalty: _Float | None
    no_repeat_ngram_size: _Int | None
    dry_multiplier: _Float | None
    dry_base: _Float | None
    dry_allowed_length: _Int | None
    dry_breakers: _Tokens | None
    mirostat_tau: _Float | None
    mirostat_eta: _Float | None
    adaptive_target: _Float | None
    adaptive_decay: _Float | None
    dynamic_temperature_range: _Float | None
    dynamic_temperature_exponent: _Float | None
    logit_bias: _Biases | None
    bad_words_ids: Sequence[Sequence[int]] | None
    suppress_tokens: _Tokens | None
    forced_tokens: Mapping[int, int] | None


class BatchParameters(FilterParameters[_Int, _Float], total=False):
    """All parameters, of numbers of either form."""

    min_tokens: _Int | None
    eos_token_id: _Tokens | None
    seed: _Int | None


class SamplingParameters(BatchParameters[int, float], total=False):
    """How the tokens of a text are chosen: a dict of the parameters that are set.

    ``Sampler``, ``Sampler.insert`` and ``Engine.submit`` take it as ``**parameters``. It can be
    used again, changed by ``{**parameters, "seed": 2}``, compared and pickled.
    docs/reference/sampler.md defines each parameter. None, or no entry, is off.

    Attributes
    ----------
    temperature, top_p, min_p, typical_p, epsilon_cutoff, eta_cutoff, top_n_sigma, top_h : float
        Filters. Temperature 0 takes the largest logit.
    top_k : int
        Number of tokens to keep; <= 0 is off.
    xtc_probability, xtc_threshold : float
        Probability of dropping all tokens of probability at least ``xtc_threshold`` (0.1), except
        the least likely of them.
    repetition_penalty, presence_penalty, frequency_penalty : float
        Repetition penalty: on prompt and output, by division. The others: on the output, by
        subtraction.
    no_repeat_ngram_size : int
        No n-gram of this size occurs twice in the text.
    dry_multiplier, dry_base, dry_allowed_length, dry_breakers : float, float, int, list of int
        DRY: ``multiplier * base ** (length - allowed)`` is subtracted from the logit of a token
        that continues a repetition of ``length`` tokens, ``dry_allowed_length`` (2) at least.
        Repetitions end at breakers, a list of tokens.
    mirostat_tau, mirostat_eta : float
        Mirostat 2: the target surprise in bits, and the learning rate (0.1).
    adaptive_target, adaptive_decay : float
        Adaptive-p: the target mean probability of drawn tokens, 0 to 1, and the decay of that mean
        (0.9). A target below 0 is off. Not together with mirostat.
    dynamic_temperature_range, dynamic_temperature_exponent : float
        The temperature grows with the entropy, from ``temperature - range`` to
        ``temperature + range``.
    logit_bias : dict
        Token to the bias of its logit. The key may be a tuple of tokens: the bias of the last one
        applies if the text ends with the others. -inf bans.
    bad_words_ids : list of list of int
        Sequences that are never generated.
    suppress_tokens : list of int
        Tokens that are never generated.
    forced_tokens : dict
        Length of the output to the token that is forced there.
    min_tokens, eos_token_id : int, int or list of int
        No end token before this number of output tokens.
    seed : int
        Seed of the noise. Without one it is drawn from torch's generator when the sequence begins.

    Examples
    --------
    >>> parameters = lmdecode.SamplingParameters(temperature=0.8, min_p=0.05, seed=1)
    >>> sampler = lmdecode.Sampler(2, 1000, **parameters)
    """

"""Options that several commands have: of the model, and of the tokens that are drawn."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

from lmdecode._checks import MAX_INT
from lmdecode.cli.errors import CommandError
from lmdecode.cli.terminal import busy
from lmdecode.decoder.engine.model_drafts import is_padding
from lmdecode.generation_options import FUSED
from lmdecode.sampling.parameters import SamplingParameters
from lmdecode.serving.text_model import TextModel, is_causal

__all__ = [
    "MODEL_HELP", "add_draft_option", "add_format_options", "add_model_options",
    "add_sampling_options", "be_quiet", "capacity_of", "check_at_least_1", "drafts_of",
    "load_chat_model", "load_model", "sampling_of", "set_threads",
]  # fmt: skip

MODEL_HELP = "folder, hub id, GGUF file, or a folder of convert"
# Where a model's generation config has none of them.
_SAMPLING = SamplingParameters(temperature=0.7, top_k=50, top_p=0.9)
_OF_CONFIG = (*FUSED, "typical_p", "repetition_penalty")
_MTP = "mtp"  # multi-token prediction, instead of a model that drafts
_CAPACITY = 32768  # tokens of a text, where the model has no fewer


def check_at_least_1(given: argparse.Namespace, *names: str) -> None:
    """Raise CommandError where an option is given and is below 1."""
    for name in names:
        value = getattr(given, name)
        if value is not None and value < 1:
            raise CommandError(f"--{name.replace('_', '-')} is {value}; expected at least 1")


def add_format_options(parser: argparse.ArgumentParser) -> None:
    """Add the formats of a model."""
    add = parser.add_argument
    add("--dtype", metavar="FORMAT", help="of weights: float32, bfloat16, int8 (default), int4")
    add("--cache-dtype", metavar="FORMAT", help="of keys and values: float32, bfloat16, int8")


def add_model_options(parser: argparse.ArgumentParser, is_needed: bool = True) -> None:
    """Add the model, and how it is loaded."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP, nargs=None if is_needed else "?")
    add_format_options(parser)
    add = parser.add_argument
    add("--context", type=int, metavar="N", help="the most tokens of a text")
    add("--threads", type=int, metavar="N", help="of the computation")
    add("--chat-template", metavar="FILE", help="instead of the model's")


def add_draft_option(parser: argparse.ArgumentParser) -> None:
    """Add the model that drafts."""
    parser.add_argument(
        "--draft",
        metavar="MODEL",
        help=f"smaller, to draft; {_MTP}: the model's own layer",
    )


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add how tokens are drawn, and what ends an answer."""
    add = parser.add_argument
    add("--max-tokens", type=int, default=max_tokens, metavar="N",
        help=f"of an answer (default {max_tokens})")  # fmt: skip
    add("--temperature", type=float, metavar="X", help="0: the most probable token, always")
    add("--top-p", type=float, metavar="X", help="draw from this probability mass")
    add("--top-k", type=int, metavar="N", help="draw from so many tokens")
    add("--min-p", type=float, metavar="X", help="and of this part of the best probability")
    add("--seed", type=int, metavar="N", help="the same answer every time")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends an answer; may repeat")
    add("--system", metavar="TEXT", help="the system message")


def set_threads(given: argparse.Namespace) -> None:
    """Let torch have the threads that are asked for."""
    check_at_least_1(given, "threads")
    if given.threads is not None:
        torch.set_num_threads(given.threads)


def be_quiet() -> None:
    """Keep transformers' warnings and bars away; they are read when it is imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    transformers = sys.modules.get("transformers")
    if transformers is not None:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()


def load_model(given: argparse.Namespace) -> TextModel:
    """Load the model of the options; an error names the option."""
    set_threads(given)
    check_at_least_1(given, "context")
    template = given.chat_template or "{"
    if "{" not in template and not Path(template).expanduser().is_file():
        raise CommandError(f"--chat-template is {template!r}; expected a file")
    be_quiet()
    try:
        with busy(f"Loading {given.model}"):
            return TextModel.load(
                given.model,
                dtype=given.dtype,
                cache_dtype=given.cache_dtype,
                chat_template=given.chat_template,
                mtp=getattr(given, "draft", None) == _MTP,
            )
    except ValueError as error:
        for name in ("dtype", "cache_dtype"):
            for op in ("TextModel.load", "Decoding"):
                error_of = f"{op}: {name} is "
                if str(error).startswith(error_of):
                    option = f"--{name.replace('_', '-')} is "
                    raise CommandError(str(error).replace(error_of, option)) from error
        raise


def load_chat_model(given: argparse.Namespace) -> TextModel:
    """Load a model that goes on with texts."""
    model = load_model(given)
    if not is_causal(model.decoding):
        raise CommandError(
            f"{given.model} is an encoder-decoder model; expected a decoder-only one, or "
            "lmdecode translate"
        )
    return model


def drafts_of(given: argparse.Namespace, model: TextModel) -> dict[str, Any]:
    """Return the arguments of ``Decoding.engine`` of a model that drafts for another; or none."""
    if given.draft is None:
        return {}
    if not is_causal(model.decoding):
        raise CommandError("--draft is given; expected a decoder-only model with it")
    if given.draft == _MTP:
        if model.decoding.decoder.mtp is None:  # type: ignore[union-attr]
            raise CommandError(
                f"--draft is {_MTP}, and {given.model} was saved without these weights; expected a "
                f"model of lmdecode convert --{_MTP}"
            )
        return {"assistant_model": _MTP}
    with busy(f"Loading {given.draft}"):
        draft = TextModel.load(given.draft, cache_dtype=given.cache_dtype)
    if not is_causal(draft.decoding):
        raise CommandError(f"--draft is {given.draft}; expected a decoder-only model")
    vocabularies = [each.tokenizer.inner.get_vocab() for each in (draft, model)]
    sizes = [each.decoding.config.vocab_size for each in (draft, model)]
    if vocabularies[0] != vocabularies[1] or not is_padding(*sizes):
        raise CommandError(
            f"--draft is {given.draft}, with {sizes[0]} tokens; expected a model with the "
            f"{sizes[1]} tokens of {given.model}"
        )
    return {"assistant_model": draft.decoding}


def capacity_of(given: argparse.Namespace, model: TextModel, most: int | None = _CAPACITY) -> int:
    """Return the most tokens of a text: what is given, or the model's, at most ``most``."""
    context: int | None = given.context
    if context is not None and model.context_length is not None:
        if context > model.context_length:
            raise CommandError(
                f"--context is {context}; expected at most {model.context_length}, for which the "
                "model was made"
            )
        return context
    longest = model.context_length or _CAPACITY
    return context or min(longest, most or longest)


def sampling_of(given: argparse.Namespace, model: TextModel) -> dict[str, Any]:
    """Return the arguments of ``Engine.submit`` that say how tokens are drawn.

    What is not given is as the model's generation config has it.
    """
    if "" in given.stop:
        raise CommandError("--stop is empty; expected a text")
    if given.seed is not None and not 0 <= given.seed <= MAX_INT:
        raise CommandError(f"--seed is {given.seed}; expected 0 to {MAX_INT}")
    known = model.generation_defaults
    found: dict[str, Any] = {name: known[name] for name in _OF_CONFIG if name in known}
    if not found.keys() - {"repetition_penalty"}:
        found |= _SAMPLING
    for name in FUSED:
        value = getattr(given, name)
        if value is not None:
            found[name] = value
    if given.seed is not None:
        found["seed"] = given.seed
    return found

"""A model that texts go into and come out of: weights, tokenizer and chat template."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lmdecode._checks import check_format, install_hint, is_int
from lmdecode.decoding import Decoding
from lmdecode.generation_options import OPTIONS
from lmdecode.linear.formats import AS_IT_IS, FORMATS
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.models.saved import MANIFEST
from lmdecode.readers.gguf.hub import cached_gguf
from lmdecode.readers.gguf.reader import GgufFile, is_gguf
from lmdecode.serving.chat_template import ChatTemplate
from lmdecode.serving.errors import BadRequest
from lmdecode.serving.parameters import read_default
from lmdecode.serving.tokenizer import Tokenizer, read_json

__all__ = ["TextModel", "defaults_of", "is_causal", "local_path", "name_of", "vocab_of"]

_OP = "TextModel.load"
DEFAULT_DTYPE = "int8"
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length",
            "max_target_positions")  # fmt: skip
_FILES = ("*.json", "*.jinja", "*.model", "*.spm", "*.txt", "*.gguf",
          "additional_chat_templates/*")  # fmt: skip


def local_path(model: str | os.PathLike[str]) -> Path:
    """Return the path of a model, which is fetched if it is named by its place on Hugging Face.

    "owner/model:Q4_K_M" is a GGUF file of the hub's cache.

    Raises FileNotFoundError if there is no such file or folder, nor such a model in the cache or on
    the hub.
    """
    path = Path(cached_gguf(_OP, model)).expanduser()
    if path.exists():
        return path
    name = os.fspath(model)
    if isinstance(model, os.PathLike) or name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise FileNotFoundError(f"{_OP}: there is no file or folder {name!r}")
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            f"{_OP}: {name!r} is no file or folder, and models of the hub need the package "
            f"huggingface_hub: {install_hint('serve')}"
        ) from error
    if "/" not in name or name.endswith(".gguf"):
        raise FileNotFoundError(f"{_OP}: there is no file or folder {name!r}")

    def fetched(*patterns: str) -> Path:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))

    try:
        folder = fetched(*_FILES[:-2], _FILES[-1], "*.safetensors")
        if not any(folder.glob("*.safetensors")):
            folder = fetched("*.bin")
    except Exception as error:  # of the network, of the hub, or of a name that cannot be one
        raise FileNotFoundError(
            f"{_OP}: there is no file or folder {name!r}, nor a model of this name in the cache or "
            f"on the hub ({' '.join(str(error).split())[:200]})"
        ) from error
    return folder


@dataclass
class TextModel:
    """A model with its tokenizer and its chat template.

    Attributes
    ----------
    decoding : Decoding
        The packed model.
    tokenizer : Tokenizer
        Text to tokens and back.
    template : ChatTemplate or None
        Messages to prompts; None where the model has no template.
    name : str
        What the model is called.
    context_length : int or None
        The most tokens of a text that the model was made for.
    eos_token_ids : tuple of int
        Every token that ends an answer: those of the generation config, of the tokenizer, and the
        one by which the template ends a turn.
    generation_defaults : dict
        What the generation config says of answers and they can follow: temperature,
        suppress_tokens, max_length and so on; ``eos_token_ids`` has its ends.
    """

    decoding: Decoding
    tokenizer: Tokenizer
    template: ChatTemplate | None
    name: str
    context_length: int | None
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def load(
        model: str | os.PathLike[str],
        *,
        dtype: str | torch.dtype | None = None,
        cache_dtype: str | torch.dtype | None = None,
        name: str | None = None,
        tokenizer: str | os.PathLike[str] | Tokenizer | None = None,
        chat_template: str | os.PathLike[str] | ChatTemplate | None = None,
        progress: Callable[[str], None] | None = None,
        mtp: bool = False,
    ) -> TextModel:
        """Load a model and what turns texts into its tokens.

        Parameters
        ----------
        model : str or path
            A folder that ``Decoding.save`` wrote, which needs no transformers; the folder of a
            model of transformers, or its name on Hugging Face; a GGUF file; a folder of
            CTranslate2.
        dtype : str, optional
            Format of the weights. None: that of a saved model, a GGUF file's own values, and
            "int8" of others. "file" is a GGUF file's own values, too.
        cache_dtype : str, optional
            Format of keys and values: see ``Decoding``.
        name : str, optional
            What the model is called; by default what its file or folder is.
        tokenizer : path or Tokenizer, optional
            Instead of the model's own.
        chat_template : str, path or ChatTemplate, optional
            Instead of the model's own: a template, or the path of a file that has one.
        progress : callable, optional
            Is given a line of text when something begins that takes time.
        mtp : bool
            See ``Decoding.from_pretrained``. A saved model has these weights, or it has not.

        Raises
        ------
        FileNotFoundError, OSError
            There is no such model, or it has no tokenizer.
        ValueError
            The model is damaged or of a kind that there is not, or ``dtype`` is unsupported, or not
            that of a saved model.
        ImportError
            A package is missing that the kind of model needs.
        """
        path = local_path(model)
        found = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer or path)
        template = _template(chat_template, found)
        decoding = _decoding(path, dtype, cache_dtype, progress, mtp=mtp)
        config = {} if is_gguf(path) else read_json(path / "generation_config.json")
        length = _context_length(path, decoding)
        vocab = vocab_of(decoding)
        ends: list[Any] = [*found.eos_token_ids]
        of_model = decoding._generation_default("eos_token_id")
        ends += of_model if isinstance(of_model, list) else [of_model]
        ends = [end for end in ends if is_int(end) and 0 <= end < vocab]
        if template is not None:
            ends.append(end_of_turn(template, found))
        known = name
        if known is None:
            known = name_of(model)
        return TextModel(
            decoding=decoding,
            tokenizer=found,
            template=template,
            name=known,
            context_length=length,
            eos_token_ids=tuple(dict.fromkeys(end for end in ends if isinstance(end, int))),
            generation_defaults=defaults_of(config, known, found, vocab),
        )


def defaults_of(
    config: Mapping[str, Any], name: str, tokenizer: Tokenizer, vocab: int
) -> dict[str, Any]:
    """Return what a generation config says of answers; warn of what they cannot follow."""
    found, left_out, reasons = dict[str, Any](), list[str](), list[str]()
    for option in OPTIONS:
        value = config.get(option.name)
        if value is None or option.continuous is None:
            continue
        if option.field is not None and option.effect != "search":
            try:
                found[option.name] = read_default(option.name, value, found, tokenizer, vocab)
            except BadRequest as error:
                left_out.append(option.name)
                reasons.append(str(error))
        elif value and value != option.neutral:
            if option.batch != "ignores" and option.continuous != "ignored":
                left_out.append(option.name)
    if left_out:
        message = f"the generation config of {name} has {', '.join(left_out)}, which answers do not"
        why = f" ({'; '.join(reasons)})" if reasons else ""
        warnings.warn(f"{message} follow{why}", stacklevel=3)
    found.pop("eos_token_id", None)
    return found


def name_of(model: str | os.PathLike[str]) -> str:
    """Return a model's name: its file's without a part's number, its folder's, or the hub's."""
    path = Path(model).expanduser()
    if path.is_file():
        return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
    return path.resolve().name if path.exists() else os.fspath(model)


def _decoding(
    path: Path,
    dtype: str | torch.dtype | None,
    cache_dtype: str | torch.dtype | None,
    progress: Callable[[str], None] | None,
    *,
    mtp: bool,
) -> Decoding:
    if (path / MANIFEST).is_file():
        decoding = Decoding.load(path, cache_dtype=cache_dtype)
        saved = decoding.decoder.weight_format
        if dtype is not None and check_format(_OP, dtype, FORMATS) != saved:
            raise ValueError(
                f"{_OP}: dtype is {dtype}; expected {saved}, in which {path} was saved, or None"
            )
        return decoding
    kind: Any = dtype
    if dtype is None:
        kind = AS_IT_IS if is_gguf(path) else DEFAULT_DTYPE
    if progress is not None:
        progress(f"Packing the weights of {path.name} as {kind}")
    return Decoding.from_pretrained(
        path,
        None if kind == AS_IT_IS else kind,
        cache_dtype=cache_dtype,
        keep_model=False,
        mtp=mtp,
    )


def _context_length(path: Path, decoding: Decoding) -> int | None:
    if is_gguf(path):
        metadata = GgufFile(path).metadata
        found = metadata.get(f"{metadata.get('general.architecture')}.context_length")
        return found if isinstance(found, int) else None
    config = read_json(path / "config.json")
    if "model_type" not in config and decoding.model is not None:  # such as CTranslate2's
        config = decoding.model.config.to_dict()
    inner = config.get("text_config")
    entries = {**config, **inner} if isinstance(inner, dict) else config
    lengths = [entries[name] for name in _LENGTHS if isinstance(entries.get(name), int)]
    return lengths[0] if lengths else None


def _template(
    given: str | os.PathLike[str] | ChatTemplate | None, tokenizer: Tokenizer
) -> ChatTemplate | None:
    if isinstance(given, ChatTemplate):
        return given
    source: Any = tokenizer.chat_template
    if given is not None:
        is_source = isinstance(given, str) and "{" in given
        source = given if is_source else Path(given).expanduser().read_text(encoding="utf-8")
    if source is None:
        return None
    return ChatTemplate(source, special_tokens=tokenizer.special_tokens)


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Return the token by which a template ends what an assistant said, None where it has none."""
    said = "lmdecode"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
    try:
        text = template.render(messages, add_generation_prompt=False)
    except ValueError:
        return None
    _, is_there, behind = text.rpartition(said)
    added = {token for token in tokenizer.inner.get_added_tokens_decoder()}
    behind_ids = tokenizer.encode(behind.lstrip(), add_special_tokens=False) if is_there else []
    return behind_ids[0] if behind_ids and behind_ids[0] in added else None


def vocab_of(decoding: Decoding) -> int:
    """Return a model's number of logits."""
    decoder: Any = decoding.decoder
    return int(decoder.config.vocab_size)


def is_causal(decoding: Decoding) -> bool:
    """Whether a model is a decoder-only one, which chats, and is served."""
    return isinstance(decoding.decoder, PackedCausalModel)

"""A packed Whisper model, and its special tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmdecode._checks import type_error
from lmdecode.decoder.encoder import CONVOLUTIONS, AudioEncoder
from lmdecode.decoder.engine.steps import memory_rows
from lmdecode.decoding import Decoding
from lmdecode.models.packed_stack import PackedDecoder
from lmdecode.models.saved import MANIFEST, PackedEncoderDecoder, check_unchanged, load_packed
from lmdecode.speech.features import LogMel
from lmdecode.speech.languages import LANGUAGES, code_of_language
from lmdecode.speech.tokenizer import SpeechTokenizer, load_tokenizer

__all__ = ["SpecialTokens", "SpeechModel", "load_model"]

_OP = "Transcriber"


class SpecialTokens(NamedTuple):
    """Tokens that are no text.

    ``start`` is the first token of a prompt, ``end`` the last one of a text, and ``no_timestamps``
    says that no times follow; the next number is the first time, 0.00. ``previous`` stands before
    earlier text, and the model gives ``no_speech`` instead of text in silence. ``tasks`` and
    ``languages`` map names and codes to tokens; they are empty for an English-only model.
    ``suppressed`` tokens are never generated, ``suppressed_first`` never as the first.
    """

    start: int
    end: int
    no_timestamps: int
    previous: int
    no_speech: int
    tasks: dict[str, int]
    languages: dict[str, int]
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]

    @property
    def first_time(self) -> int:
        """Return the token of 0.00 seconds."""
        return self.no_timestamps + 1


def _special_tokens(tokenizer: Any, generation: Mapping[str, Any]) -> SpecialTokens:
    """Return the tokens that a generation config names, or else the tokenizer."""

    def token(name: str, *texts: str) -> int:
        value = generation.get(name)
        if isinstance(value, list):
            value = value[0] if value else None
        for text in texts:
            if value is None:
                value = tokenizer.token_to_id(text)
        if not isinstance(value, int):
            raise ValueError(
                f"{_OP}: the model has no {texts[0]}, nor a {name} in its generation config; "
                "expected a Whisper model"
            )
        return value

    no_timestamps = token("no_timestamps_token_id", "<|notimestamps|>")
    languages: dict[str, int] = {
        name.strip("<|>"): number for name, number in (generation.get("lang_to_id") or {}).items()
    }
    tasks: dict[str, int] = dict(generation.get("task_to_id") or {})
    if generation.get("is_multilingual") is True and not languages:
        found = {code: tokenizer.token_to_id(f"<|{code}|>") for code in LANGUAGES}
        languages = {code: number for code, number in found.items() if number is not None}
    if languages and not tasks:
        named = {name: tokenizer.token_to_id(f"<|{name}|>") for name in ("transcribe", "translate")}
        tasks = {name: number for name, number in named.items() if number is not None}
    return SpecialTokens(
        start=token("decoder_start_token_id", "<|startoftranscript|>"),
        end=token("eos_token_id", "<|endoftext|>"),
        no_timestamps=no_timestamps,
        previous=token("prev_sot_token_id", "<|startofprev|>"),
        no_speech=no_timestamps - 1,
        tasks=tasks,
        languages=languages,
        suppressed=tuple(generation.get("suppress_tokens") or ()),
        suppressed_first=tuple(generation.get("begin_suppress_tokens") or ()),
    )


class SpeechModel:
    """A Whisper model that is ready to run; ``config`` and ``generation`` are its JSON files.

    ``frames`` are the frames of a window, ``frames_of_time`` the frames of a step of time (2), and
    ``capacity`` is the maximum length of a sequence. ``alignment_heads`` are (layer, head) of the
    cross-attention that follows the sound, empty if unknown; ``median_width`` is the width of the
    filter of their weights.
    """

    def __init__(
        self,
        decoder: PackedDecoder,
        encoder: AudioEncoder,
        tokenizer: Any,
        config: Mapping[str, Any],
        generation: Mapping[str, Any],
    ) -> None:
        self.decoder, self.encoder = decoder, encoder
        self.tokens = _special_tokens(tokenizer, generation)
        self.texts = SpeechTokenizer(tokenizer, self.tokens.end)
        self.features = LogMel(encoder.channels)
        self.frames = encoder.frames
        self.frames_of_time = self.frames // encoder.positions
        self.capacity = decoder.num_positions or 0
        heads = generation.get("alignment_heads") or ()
        self.alignment_heads = [(int(layer), int(head)) for layer, head in heads]
        self.median_width = int(config.get("median_filter_width", 7))

    @property
    def is_multilingual(self) -> bool:
        """Whether the model knows languages and tasks."""
        return bool(self.tokens.languages)

    def encode(self, features: Tensor) -> Tensor:
        """Return the memory of a window, [positions, model_size], of [channels, frames]."""
        return self.encoder.forward(features[None])[0]

    def code_of(self, language: object) -> str:
        """Return the code of a language; raise for one that the model does not know."""
        if not isinstance(language, str):
            raise type_error(f"{_OP}.transcribe", "language", language, "a str or None")
        code = code_of_language(language)
        known = self.tokens.languages or {"en": 0}
        if code not in known:
            raise ValueError(
                f"{_OP}.transcribe: language is {language!r}; expected one of "
                f"{', '.join(known)}, or its name"
            )
        return code

    def language_probabilities(self, memory: Tensor) -> list[tuple[str, float]]:
        """Return the probability of each language of a memory, the largest first."""
        logits = self.first_logits(memory)
        codes, numbers = zip(*self.tokens.languages.items(), strict=True)
        found = logits[list(numbers)].double().softmax(dim=0).tolist()
        return sorted(zip(codes, found, strict=True), key=lambda pair: -pair[1])

    def first_logits(self, memory: Tensor) -> Tensor:
        """Return the logits after the start token, [V]."""
        start = [[self.tokens.start]]
        length, prompt = torch.tensor([[len(memory)], start[0]], device="cpu")
        rows = memory_rows(self.decoder, memory[None], length, start, 2)
        logits = rows.read_prompts(prompt[None])[0]
        rows.release()
        return logits


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{_OP}: {path} is damaged ({error}); expected JSON") from error
    return found if isinstance(found, dict) else {}


def _tokenizer_of(given: Any, folder: Path | None) -> Any:
    """Return the given tokenizer, or a folder's."""
    if given is not None and not isinstance(given, (str, os.PathLike)):
        if not callable(getattr(given, "token_to_id", None)):
            raise type_error(_OP, "tokenizer", given, "a tokenizers.Tokenizer, a folder or None")
        return given
    if given is not None:
        folder = Path(given)
    found = None if folder is None else load_tokenizer(folder)
    if found is None:
        where = "the model" if folder is None else str(folder)
        raise ValueError(
            f"{_OP}: {where} has no tokenizer.json; expected one beside the model, or tokenizer="
        )
    return found


def _of_saved(folder: Path, tokenizer: Any) -> SpeechModel:
    """Return the model of a folder that ``Decoding.save`` wrote, without transformers."""
    packed, manifest = load_packed(folder)
    parts = packed.parts if isinstance(packed, PackedEncoderDecoder) else {}
    if not {"decoder", "encoder", *CONVOLUTIONS} <= parts.keys():
        raise ValueError(f"{_OP}: {folder} has no Whisper model; expected one of Decoding.save")
    config = _json(folder / "config.json")
    generation = _json(folder / "generation_config.json")
    check_unchanged(folder, manifest)
    decoder: Any = parts["decoder"]
    tokenizer = _tokenizer_of(tokenizer, folder)
    return SpeechModel(decoder, AudioEncoder(parts), tokenizer, config, generation)


def _of_decoding(decoding: Decoding, tokenizer: Any, folder: Path | None) -> SpeechModel:
    kind = getattr(getattr(decoding.model, "config", None), "model_type", None)
    if not isinstance(decoding.decoder, PackedDecoder):
        if kind == "whisper":
            raise ValueError(
                f"{_OP}: model is on {decoding.decoder.device}; expected a Decoding on cpu"  # type: ignore[union-attr]
            )
        raise ValueError(f"{_OP}: model is of type {kind!r}; expected a Whisper model")
    parts = {} if decoding.encoder is None else decoding.encoder.parts
    if kind != "whisper" or not {"encoder", *CONVOLUTIONS} <= parts.keys():
        raise ValueError(f"{_OP}: model is of type {kind!r}; expected a Whisper model")
    config = decoding.model.config.to_dict()
    if folder is None:
        source = Path(getattr(decoding.model.config, "_name_or_path", "") or "")
        folder = source if source.name and source.is_dir() else None
    tokenizer = _tokenizer_of(tokenizer, folder)
    generation = decoding.model.generation_config.to_dict()
    return SpeechModel(decoding.decoder, AudioEncoder(parts), tokenizer, config, generation)


def load_model(model: Any, dtype: Any, tokenizer: Any) -> SpeechModel:
    """Return the model for the arguments of ``Transcriber``."""
    if isinstance(model, Decoding):
        return _of_decoding(model, tokenizer, None)
    if not isinstance(model, (str, os.PathLike)):
        raise type_error(_OP, "model", model, "a folder, a name or a Decoding")
    if (Path(model) / MANIFEST).is_file():
        return _of_saved(Path(model), tokenizer)
    decoding = Decoding.from_pretrained(model, dtype, keep_model=False)
    folder = Path(model) if Path(model).is_dir() else None
    if folder is None and tokenizer is None:
        from lmdecode.readers.loading import folder_of_file

        folder = folder_of_file(os.fspath(model), "tokenizer.json")
    return _of_decoding(decoding, tokenizer, folder)

"""Text to tokens and back, without transformers: by the package ``tokenizers``."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from lmdecode._checks import install_hint, type_error
from lmdecode.readers.gguf.tokenizer import read_tokenizer, tokenizer_path
from lmdecode.serving.text_stream import CLEAN_UP, Stage, TextReplace, added_words, stages_of

__all__ = ["TextStream", "Tokenizer"]

# What transformers gives its templates by name.
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
          "mask_token")  # fmt: skip
_EVEN_FOR_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
_OLD_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model",
              "source.spm", "vocab.json", "vocab.txt")  # fmt: skip


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            f"lmdecode.serving needs the package tokenizers: {install_hint('serve')}"
        ) from error
    return tokenizers


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's entries, none if it does not exist; ValueError if it is no JSON object."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} has a {type(found).__name__}; expected a dict")
    return found


class TextStream:
    """The text of tokens as they come. What has been given does not change any more.

    All of it, joined, is what ``decode`` gives of all tokens.

    Parameters
    ----------
    tokenizer : Tokenizer
        Whose tokens they are.
    skip_special_tokens : bool
        As for ``decode``.
    kept_special_ids : collection of int
        Special tokens that are not skipped, such as those around calls of tools.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        kept_special_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset[int]()
        if skip_special_tokens:
            self._skipped = tokenizer.special_ids - frozenset(kept_special_ids)
        self._stages = tokenizer._stages()

    def push(self, token_ids: Iterable[int]) -> str:
        """Take tokens, in order; return the text that is certain by now, which may be empty."""
        words: Sequence[str] = self._tokenizer._words(token_ids, self._skipped)
        for stage in self._stages:
            words = stage.push(words)
        return "".join(words)

    def finish(self) -> str:
        """Return what was held back, when there are no more tokens."""
        words: list[str] = []
        for stage in self._stages:
            words = [*stage.push(words), *stage.finish()]
        return "".join(words)


class Tokenizer:
    """Text to tokens and back. Made by ``load``, or of a tokenizer of the package ``tokenizers``.

    It may be used by any number of threads.

    Parameters
    ----------
    inner : tokenizers.Tokenizer
        It is not changed later.
    special_tokens : dict
        What ``bos_token``, ``eos_token`` and so on are.
    cleans_up : bool
        Whether spaces before punctuation are removed from a text.
    chat_template : str, dict or None
        The template of conversations, or several by name.
    eos_token_ids : sequence of int
        What ends a text beside ``eos_token``.

    Attributes
    ----------
    inner, special_tokens, chat_template
        As given.
    special_ids : frozenset of int
        Tokens that are left out of a text: the special ones.
    eos_token_ids : tuple of int
        Tokens that end a text.
    bos_token_id : int or None
        The token that begins a text.
    """

    def __init__(
        self,
        inner: Any,
        *,
        special_tokens: dict[str, str] | None = None,
        cleans_up: bool = False,
        chat_template: str | dict[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.inner = inner
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self._cleans_up = cleans_up
        self.special_ids = frozenset(
            token for token, added in inner.get_added_tokens_decoder().items() if added.special
        )
        self.bos_token_id = self._named("bos_token")
        ends = [self._named("eos_token"), *eos_token_ids]
        self.eos_token_ids = tuple(dict.fromkeys(end for end in ends if end is not None))
        self._makers, self._bytes_of = stages_of(inner.decoder)
        self._word_of = added_words(inner)
        self._around: tuple[list[int], list[int]] | None = None

    def _named(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        found: int | None = None if token is None else self.inner.token_to_id(token)
        return found

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Tokenizer:
        """Load the tokenizer of a model.

        Parameters
        ----------
        path : str or path
            A folder with ``tokenizer.json``, of transformers, of ``Decoding.save`` or of
            CTranslate2; or a GGUF file. Of a folder with an older form of a tokenizer, such as
            sentencepiece, transformers makes one; rules are those of the sentencepiece file.

        Raises
        ------
        FileNotFoundError
            There is no such folder, or no ``tokenizer.json`` in it.
        ValueError
            A file is damaged, or has rules that cannot be kept.
        ImportError
            The package ``tokenizers`` is missing; for an older form transformers, or what it needs.
        """
        _tokenizers()
        if (file := tokenizer_path(path)) is not None:
            return _of_gguf(file)
        folder = Path(path)
        if not folder.is_dir():
            raise FileNotFoundError(f"Tokenizer.load: there is no file or folder {folder}")
        return _of_folder(folder)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        size: int = self.inner.get_vocab_size(with_added_tokens=True)
        return size

    def get_vocab(self) -> dict[str, int]:
        """Return the number of each token."""
        found: dict[str, int] = self.inner.get_vocab(with_added_tokens=True)
        return found

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the tokens of a text.

        Parameters
        ----------
        text : str
            Any text.
        add_special_tokens : bool
            Whether the tokens are put around it that begin and end a text.
        parse_special : bool
            Whether special tokens that are written in the text become these tokens. False: they
            are text as any other.

        Raises
        ------
        TypeError, ValueError
            ``text`` is no str, or has surrogates that are no character.
        """
        if not isinstance(text, str):
            raise type_error("Tokenizer.encode", "text", text, "str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"Tokenizer.encode: text has {text[error.start]!r} at character {error.start}; "
                "expected no surrogates"
            ) from None
        if parse_special:
            ids: list[int] = self.inner.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        ids = self._encode_plain(text)
        if not add_special_tokens:
            return ids
        before, behind = self._put_around()
        return [*before, *ids, *behind]

    def _encode_plain(self, text: str) -> list[int]:
        inner = self.inner
        if inner.normalizer is not None:
            text = inner.normalizer.normalize_str(text)
        parts = [text]
        if inner.pre_tokenizer is not None:
            parts = [part for part, _ in inner.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for part in parts for token in inner.model.tokenize(part)]

    def _put_around(self) -> tuple[list[int], list[int]]:
        """Return the tokens that are put before and after a text."""
        if self._around is None:
            encoded = self.inner.encode("a", add_special_tokens=True)
            mask = encoded.special_tokens_mask
            first = mask.index(0) if 0 in mask else len(mask)
            last = len(mask) - mask[::-1].index(0) if 0 in mask else first
            self._around = (encoded.ids[:first], encoded.ids[last:])
        return self._around

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens.

        Parameters
        ----------
        ids : sequence of int
            Tokens; a number that is no token has no text.
        skip_special_tokens : bool
            Whether special tokens are left out.
        """
        try:
            words = self._words(
                map(int, ids), self.special_ids if skip_special_tokens else frozenset()
            )
        except OverflowError:
            raise ValueError(
                "Tokenizer.decode: ids has a number that no token has; expected 0 to 2^32 - 1"
            ) from None
        decoder = self.inner.decoder
        text: str = " ".join(words) if decoder is None else decoder.decode(words)
        if self._cleans_up:
            for old, new in CLEAN_UP:
                text = text.replace(old, new)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token within a text; none of a number that is no token.

        A token may be a part of a character. A special token is its name.
        """
        return b"".join(map(self._bytes_of, self._words([token_id], frozenset())))

    def stream(
        self, *, skip_special_tokens: bool = True, kept_special_ids: Collection[int] = ()
    ) -> TextStream:
        """Return a ``TextStream``, which turns tokens into text as they come."""
        return TextStream(
            self, skip_special_tokens=skip_special_tokens, kept_special_ids=kept_special_ids
        )

    @functools.cached_property
    def longest_token(self) -> int:
        """The number of characters of the longest token: no text has more a token."""
        return max(map(len, self.inner.get_vocab(with_added_tokens=True)), default=1)

    def _words(self, token_ids: Iterable[int], skipped: frozenset[int]) -> list[str]:
        words, known = [], self._word_of
        for token in token_ids:
            if token in skipped:
                continue
            word = known.get(token)
            if word is None:
                word = self.inner.id_to_token(token)
                if word is None:
                    continue
                known[token] = word
            words.append(word)
        return words

    def _stages(self) -> list[Stage]:
        stages = [make() for make in self._makers]
        if self._cleans_up:
            stages += [TextReplace(old, new) for old, new in CLEAN_UP]
        return stages


def _content(token: Any) -> str | None:
    """Return the text of a token, which files have as a string or as a dict."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _add_tokens(inner: Any, settings: dict[str, Any], named: dict[str, str]) -> None:
    """Add the tokens of a ``tokenizer_config.json`` that are not in ``tokenizer.json``."""
    added_token = _tokenizers().AddedToken
    added = {token.content: token for token in inner.get_added_tokens_decoder().values()}
    more: dict[str, Any] = {}
    decoder = settings.get("added_tokens_decoder")
    listed = decoder.items() if isinstance(decoder, dict) else ()
    for _, token in sorted(listed, key=lambda entry: int(entry[0])):
        flags = dict(token)
        more[flags.pop("content")] = flags
    new = [added_token(content, **flags) for content, flags in more.items() if content not in added]
    inner.add_tokens(new)
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    extra = extra.values() if isinstance(extra, dict) else extra
    extras = filter(None, map(_content, extra))
    of_model = [
        content
        for name, token in settings.items()
        if name.endswith("_token") and name not in _NAMED and (content := _content(token))
    ]
    known = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
    for content in dict.fromkeys([*named.values(), *of_model, *extras]):
        if content not in known:
            inner.add_special_tokens([added_token(content, special=True, normalized=False)])


def _templates(folder: Path, settings: dict[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template of a folder, or several by name."""
    files = {}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    more = folder / "additional_chat_templates"
    files |= {path.stem: path for path in sorted(more.glob("*.jinja"))}
    found = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    if found:
        return found["default"] if list(found) == ["default"] else found
    template = settings.get("chat_template")
    if template is None:  # of a processor
        template = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        template = {one["name"]: one["template"] for one in template}
    if template is None or isinstance(template, (str, dict)):
        return template
    raise ValueError(f"{folder} has a chat_template of type {type(template).__name__}")


def _of_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        if not any((folder / name).is_file() for name in _OLD_FILES):
            raise FileNotFoundError(f"Tokenizer.load: {folder} has no tokenizer.json; expected one")
        from lmdecode.readers.tokenizer_files import converted_tokenizer

        files = converted_tokenizer(folder)
        if (folder / "generation_config.json").is_file():
            files["generation_config.json"] = (folder / "generation_config.json").read_bytes()
        with tempfile.TemporaryDirectory() as own:
            for name, data in files.items():
                (Path(own) / name).write_bytes(data)
            return _of_folder(Path(own))
    try:
        inner = _tokenizers().Tokenizer.from_file(str(file))
    except Exception as error:  # of no type of its own
        raise ValueError(f"Tokenizer.load: {file} is no tokenizer ({error})") from None
    inner.no_truncation()
    inner.no_padding()
    settings = read_json(folder / "tokenizer_config.json")
    if not settings:  # CTranslate2 has them there
        settings = {
            name: token
            for name, token in read_json(folder / "config.json").items()
            if name in _NAMED
        }
    if "added_tokens_decoder" not in settings:
        settings = {**settings, **read_json(folder / "special_tokens_map.json")}
    named = {name: text for name in _NAMED if (text := _content(settings.get(name)))}
    try:
        _add_tokens(inner, settings, named)
        templates = _templates(folder, settings)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"Tokenizer.load: {folder} has a damaged tokenizer_config.json ({error!r})"
        ) from error
    is_bpe = type(inner.model).__name__ == "BPE"
    cleans_up = bool(settings.get("clean_up_tokenization_spaces", False))
    return Tokenizer(
        inner,
        special_tokens=named,
        cleans_up=cleans_up and (not is_bpe or bool(settings.get(_EVEN_FOR_BPE))),
        chat_template=templates,
        eos_token_ids=_ends(read_json(folder / "generation_config.json")),
    )


def _ends(config: dict[str, Any]) -> list[int]:
    """Return the tokens that end a text by a generation config."""
    ends = config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    return [end for end in ends if isinstance(end, int) and not isinstance(end, bool)]


def _of_gguf(path: str | os.PathLike[str]) -> Tokenizer:
    found = read_tokenizer(path)
    return Tokenizer(
        found.tokenizer,
        special_tokens=found.special_tokens,
        chat_template=found.chat_template,
        eos_token_ids=found.eos_token_ids,
    )

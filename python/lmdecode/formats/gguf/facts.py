"""The metadata of a GGUF file as typed facts: each is checked where it is asked for."""

from __future__ import annotations

from array import array
from functools import cached_property
from typing import Any

from lmdecode.formats.gguf.keys import unread
from lmdecode.formats.gguf.reader import GgufFile

__all__ = ["Facts", "refused"]

_MAX_COUNT = (1 << 31) - 1
_OF_OLLAMA = ("rope.global.freq_base", "rope.local.freq_base", "mm.tokens_per_image")


def refused(file: GgufFile, what: str) -> ValueError:
    """Return the error of a file that is read, but is no model that there is."""
    return ValueError(f"Decoding.from_pretrained: {file.path} {what}")


def _is_list(value: object) -> bool:
    return isinstance(value, (array, bytes, list, tuple))


class Facts:
    """Metadata of a file's model; a key is what follows the architecture's name.

    Attributes
    ----------
    architecture : str
        The file's ``general.architecture``.
    asked : set of str
        Keys that something has been read by, or looked for.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.asked = set[str]()
        self.architecture: str = self._whole("general.architecture", str, "a name")

    def _whole(self, key: str, kind: type, expected: str) -> Any:
        value = self.file.metadata.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise refused(self.file, f"has {value!r} for {key}; expected {expected}")
        return value

    def _name(self, key: str) -> str:
        self.asked.add(key)
        return f"{self.architecture}.{key}"

    def has(self, key: str) -> bool:
        """Whether there is an entry."""
        return self._name(key) in self.file.metadata

    @cached_property
    def is_ollamas(self) -> bool:
        """Whether it is a Gemma with a mark of Ollama's converter, which leaves out much."""
        marks = {f"{self.architecture}.{key}" for key in _OF_OLLAMA}
        marks |= {f"tokenizer.ggml.add_{name}_token" for name in ("padding", "unknown")}
        of_images = any(name.startswith(("v.", "mm.")) for name in self.file.tensors)
        is_gemma = self.architecture in ("gemma2", "gemma3")
        return is_gemma and (of_images or not marks.isdisjoint(self.file.metadata))

    def is_list(self, key: str) -> bool:
        """Whether there is an entry that is a list."""
        return _is_list(self.file.metadata.get(self._name(key)))

    def check_all_read(self) -> None:
        """Refuse an entry that nobody has asked for, unless it is known to have no effect."""
        prefix = f"{self.architecture}."
        for name, value in self.file.metadata.items():
            key = name.removeprefix(prefix)
            if name.startswith(prefix) and key not in self.asked and (why := unread(key, value)):
                raise refused(self.file, f"has {_shown(value)} for {name}, {why}")

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Return an int; a list of one for each layer must have the same for all."""
        name = self._name(key)
        value = self.file.metadata.get(name, default)
        if isinstance(value, array) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _MAX_COUNT:
            raise refused(
                self.file, f"has {_shown(value)} for {name}; expected one int of at least {least}"
            )
        return value

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a count of features, heads or layers: what a tensor of the file is as large as.

        So nothing is made of a size that a damaged file claims.
        """
        value = self.count(key, default, least=least)
        if value > self._largest_size:
            raise refused(
                self.file,
                f"has {value} for {self.architecture}.{key}; expected at most "
                f"{self._largest_size}, the largest size of its tensors",
            )
        return value

    @cached_property
    def _largest_size(self) -> int:
        tensors = self.file.tensors
        return max(len(tensors), *(max(tensor.shape, default=0) for tensor in tensors.values()), 0)

    def counts(self, key: str, length: int) -> list[int]:
        """Return a list of as many ints or flags, each at least 0; one int stands for all."""
        name = self._name(key)
        value: Any = self.file.metadata.get(name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        numbers = [value] * length if whole else list(value) if _is_list(value) else []
        if len(numbers) != length or not all(
            isinstance(n, int) and 0 <= n < _MAX_COUNT for n in numbers
        ):
            raise refused(
                self.file, f"has {_shown(value)} for {name}; expected {length} ints of at least 0"
            )
        return [int(n) for n in numbers]

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0, neither tiny nor huge."""
        name = self._name(key)
        value: Any = self.file.metadata.get(name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 1e-30 <= value <= 1e30:
            raise refused(self.file, f"has {_shown(value)} for {name}; expected a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a flag."""
        name = self._name(key)
        value = self.file.metadata.get(name, default)
        if not isinstance(value, bool):
            raise refused(self.file, f"has {_shown(value)} for {name}; expected True or False")
        return value

    def text(self, key: str, default: str) -> str:
        """Return a string."""
        name = self._name(key)
        value = self.file.metadata.get(name, default)
        if not isinstance(value, str):
            raise refused(self.file, f"has {_shown(value)} for {name}; expected a name")
        return value

    def token(self, key: str, vocab_size: int) -> int | None:
        """Return the token of ``tokenizer.ggml``'s entry, None where there is none."""
        name = f"tokenizer.ggml.{key}"
        value = self.file.metadata.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
            raise refused(
                self.file, f"has {_shown(value)} for {name}; expected a token below {vocab_size}"
            )
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        if name not in self.file.tensors:
            raise refused(self.file, f"has no tensor {name!r}; expected one")
        return self.file.tensors[name].shape

    def of_first_layer(self, ending: str) -> str:
        """Return the name of the tensor of the first layer that has one with this ending."""
        names = (f"blk.{i}.{ending}" for i in range(self.count("block_count")))
        return next((name for name in names if name in self.file.tensors), f"blk.0.{ending}")


def _shown(value: object) -> str:
    """Return a value as an error shows it: the beginning of a long one."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

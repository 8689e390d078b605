"""The mapping from variables of CTranslate2 to parameters of a transformers model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lmdecode.readers.ctranslate2.model_file import ModelFile

__all__ = ["Names", "Part"]


@dataclass(frozen=True)
class Part:
    """A parameter, made from a variable. Parameters with equal parts are one tensor.

    It has ``zeros`` rows of zeros, then rows ``begin`` to ``end`` of the variable (not an alias;
    None: the parameter is zeros), then ``more`` rows of the value ``fill``. If it
    ``is_transposed``, the parameter is [in, out]. ``plus`` is added to all elements, in float32.
    """

    variable: str | None
    begin: int = 0
    end: int | None = None
    zeros: int = 0
    more: int = 0
    fill: float = 0.0
    is_transposed: bool = False
    plus: float = 0.0

    def read(self, file: ModelFile) -> Tensor:
        """Return the parameter, in the dtype of the file's floats, or float32 of its integers."""
        if self.variable is None:
            values = torch.zeros(self.zeros + self.more, dtype=torch.float32, device="cpu")
            values[self.zeros :] = self.fill
            return values
        rows = file.weights(self.variable)[self.begin : self.end]
        parts = [rows]
        if self.zeros:
            parts.insert(0, rows.new_zeros(self.zeros, *rows.shape[1:]))
        if self.more:
            parts.append(rows.new_full((self.more, *rows.shape[1:]), self.fill))
        whole = torch.cat(parts) if len(parts) > 1 else rows
        whole = whole.float() + self.plus if self.plus else whole
        return whole.T.contiguous() if self.is_transposed else whole

    def empty(self, file: ModelFile) -> Tensor:
        """Return a meta tensor of the shape that ``read`` returns."""
        if self.variable is None:
            return torch.empty(self.zeros + self.more, device="meta", dtype=torch.float32)
        rows, *others = file.shape(self.variable)
        count = (rows if self.end is None else self.end) - self.begin + self.zeros + self.more
        empty = torch.empty(count, *others, device="meta", dtype=torch.float32)
        return empty.T if self.is_transposed else empty


class Names:
    """The parameters of a model, collected while a file is read by its kind's layout.

    ``check_all_read`` refuses variables that were not read, as they would change the model.
    ``what`` is the kind of model, for errors.
    """

    def __init__(self, file: ModelFile, what: str) -> None:
        self.file, self.what = file, what
        self.parts: dict[str, Part] = {}
        self._read: set[str] = set()

    def refused(self, what: str) -> ValueError:
        """Return the error of a file with a feature that this kind of model does not have."""
        return ValueError(f"{self.file.path} {what}; expected {self.what}")

    def __contains__(self, name: str) -> bool:
        return name in self.file

    def layers(self, scope: str) -> int:
        """Return the number of layers, which must be numbered without gaps."""
        prefix = f"{scope}/layer_"
        names = [*self.file.variables, *self.file.aliases]
        found = {name[len(prefix) :].split("/")[0] for name in names if name.startswith(prefix)}
        found.discard("norm")  # layer_norm is none of them
        if not found or found != {str(i) for i in range(len(found))}:
            raise self.refused(f"has layers {sorted(found)} in {scope!r}")
        return len(found)

    def scalar(self, name: str, default: float | None = None) -> float:
        """Return a number of the file, by one of several names separated by ``|``."""
        for each in name.split("|"):
            if each in self:
                self._read.add(each)
                if math.prod(self.file.shape(each)) != 1:
                    raise self.refused(f"has {each!r} of shape {list(self.file.shape(each))}")
                value = self.file.read(each).item()
                if not math.isfinite(value):
                    raise self.refused(f"has {value} for {each!r}")
                return value
        if default is None:
            raise self.refused(f"has no variable {name!r}")
        return default

    def same_scalar(self, names: list[str], default: float | None = None) -> float:
        """Return the common value of several numbers."""
        values = {self.scalar(name, default) for name in names}
        if len(values) != 1:
            raise self.refused(f"has {sorted(values)} for {names[0]!r} and its like")
        return values.pop()

    def must_be_zero(self, *names: str) -> None:
        """Raise ValueError if one of these numbers exists and is not 0."""
        for name in names:
            if self.scalar(name, 0.0) != 0.0:
                raise self.refused(f"has {self.scalar(name):g} for {name!r}, which is not computed")

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a variable."""
        return self.file.variables[self.file.resolve(name)].dtype

    def shape(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the shape of a variable with ``axes`` axes."""
        shape = self.file.shape(name)
        if len(shape) != rank:
            raise self.refused(f"has {name!r} of shape {list(shape)} with other than {rank} axes")
        return shape

    def add(
        self,
        parameter: str,
        variable: str,
        begin: int = 0,
        end: int | None = None,
        *,
        zeros: int = 0,
        more: int = 0,
        fill: float = 0.0,
        is_transposed: bool = False,
    ) -> None:
        """Make a parameter of rows of a variable."""
        size = self.file.shape(variable)[:1]
        if not size or not 0 <= begin < (size[0] if end is None else end) <= size[0]:
            raise self.refused(f"has {variable!r} of {[*size]} rows, not {begin} to {end}")
        self._read.add(variable)
        name = self.file.resolve(variable)
        end = None if end == size[0] else end
        self.parts[parameter] = Part(name, begin, end, zeros, more, fill, is_transposed)

    def zeros(self, parameter: str, size: int, *, more: int = 0, fill: float = 0.0) -> None:
        """Make a parameter of zeros, followed by other values."""
        self.parts[parameter] = Part(None, zeros=size, more=more, fill=fill)

    def linear(
        self,
        parameter: str,
        scope: str,
        begin: int = 0,
        end: int | None = None,
        *,
        has_bias: bool = True,
        is_transposed: bool = False,
    ) -> None:
        """Name the weight of a linear layer, or of one of several in one, and its bias.

        With ``has_bias`` the bias is a parameter; it is zeros if the file has none.
        """
        weight, bias = f"{scope}/weight", f"{scope}/bias"
        self.add(f"{parameter}.weight", weight, begin, end, is_transposed=is_transposed)
        if not has_bias:
            return
        if bias in self:
            self.add(f"{parameter}.bias", bias, begin, end)
        else:
            rows = self.file.shape(weight)[0] if end is None else end
            self.zeros(f"{parameter}.bias", rows - begin)

    def split_rows(
        self, parameters: list[str], scope: str, sizes: list[int], *, has_bias: bool = True
    ) -> None:
        """Name linear layers that together have all rows of a variable, one after the other."""
        rows = self.shape(f"{scope}/weight", 2)[0]
        if rows != sum(sizes) or min(sizes) < 1:
            raise self.refused(f"has {scope + '/weight'!r} of {rows} rows, not {sizes} together")
        begin = 0
        for parameter, size in zip(parameters, sizes, strict=True):
            self.linear(parameter, scope, begin, begin + size, has_bias=has_bias)
            begin += size

    def norm(self, parameter: str, scope: str, *, has_beta: bool) -> None:
        """Name the weight of a norm, and its bias if it has one."""
        self.add(f"{parameter}.weight", f"{scope}/gamma")
        if has_beta:
            self.add(f"{parameter}.bias", f"{scope}/beta")

    def norm_with_flag(self, parameter: str, scope: str) -> bool:
        """Name the weight of an RMS norm; return whether it multiplies by 1 + weight."""
        self.norm(parameter, scope, has_beta=False)
        return bool(self.scalar(f"{scope}/layer_norm_use_residual", 0.0))

    def check_all_read(self, *no_matter: str) -> None:
        """Raise ValueError for a variable that was not read.

        Names with the suffixes ``no_matter`` may exist and have no effect.
        """
        named = [*self.file.variables, *self.file.aliases]
        scales = {f"{name}_scale" for name in self._read}
        read = self._read | scales | {self.file.resolve(name) for name in self._read}
        read |= {f"{name}_scale" for name in read}
        for name in named:
            if name not in read and not name.endswith(no_matter):
                raise self.refused(f"has a variable {name!r}, which is not read")

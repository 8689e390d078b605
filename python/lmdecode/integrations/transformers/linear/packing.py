"""``pack_linears_``: every linear layer of a model on packed weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lmdecode._checks import type_error
from lmdecode._ops import ops
from lmdecode.integrations.transformers.linear.modules import PackedLinearModule
from lmdecode.integrations.transformers.linear.weight_readers import names_of_read_layers
from lmdecode.linear import PackedLinear, check_linear_format
from lmdecode.linear.formats import format_of_head
from lmdecode.readers.transformers.foreign_code import foreign_code
from lmdecode.readers.transformers.stand_in import refuse_stand_in

__all__ = [
    "LinearFormat",
    "check_skip_of_model",
    "checked_skip",
    "is_linear",
    "is_skipped",
    "pack_linears_",
    "pack_rest_",
    "pack_weight",
    "untie",
]

_OP = "pack_linears_"
Model = TypeVar("Model", bound=nn.Module)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is packed. Subclasses are not: others may compute with their weight."""
    return type(module) in (nn.Linear, Conv1D)


def checked_skip(op: str, skip: object) -> tuple[str, ...]:
    """Return the names; raise TypeError for what is none."""
    if isinstance(skip, str) or not isinstance(skip, Iterable):
        raise type_error(op, "skip", skip, "a sequence of str")
    names = tuple(skip)
    for name in names:
        if not isinstance(name, str):
            raise type_error(op, "skip", name, "a sequence of str")
    return names


def is_skipped(name: str, skip: Sequence[str]) -> bool:
    """Whether the parts of one of the names stand side by side in the name of a module."""
    return any(f".{part}." in f".{name}." for part in skip)


def check_skip_of_model(op: str, model: nn.Module, skip: Sequence[str]) -> None:
    """Raise ValueError for a name that no module of the model has."""
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for part in skip:
        if not any(is_skipped(name, [part]) for name in modules):
            raise ValueError(
                f"{op}: skip has {part!r}, which is in the name of no module of the model; "
                "expected names as in named_modules()"
            )


class LinearFormat(NamedTuple):
    """Weight format of linear layers: arguments of ``PackedLinear``."""

    dtype: str
    group_size: int | None = None
    rotate: bool | None = None

    def of_layer(self, model: nn.Module, layer: nn.Module) -> LinearFormat:
        """Return the format of one layer of a model; the output layer's may differ."""
        head = getattr(model, "get_output_embeddings", lambda: None)()
        dtype = format_of_head(self.dtype) if layer is head else self.dtype
        return self if dtype == self.dtype else LinearFormat(dtype, None, self.rotate)


def pack_weight(
    name: str, module: nn.Module, weight: Tensor, format_: LinearFormat
) -> PackedLinearModule:
    """Return the packed replacement of a linear layer with this weight; it shares the bias."""
    rows = weight.T if isinstance(module, Conv1D) else weight
    layer = PackedLinear(rows, **format_._asdict())
    packed = PackedLinearModule(layer, weight.dtype, name)
    packed.train(module.training)
    # Those of transformers: others are refused. The dicts are shared with what removes hooks.
    packed.__dict__.update({k: v for k, v in vars(module).items() if k.startswith("_forward_")})
    bias = module.bias
    if bias is not None:
        assert isinstance(bias, Tensor)
        packed.register_parameter("bias", nn.Parameter(bias, requires_grad=False))
    return packed


def untie(model: nn.Module) -> None:
    """Forget that weights which are packed were tied to others."""
    for module in model.modules():
        tied = getattr(module, "all_tied_weights_keys", None)
        if not isinstance(tied, dict):
            continue
        for key in list(tied):
            if isinstance(module.get_submodule(key.rpartition(".")[0]), PackedLinearModule):
                del tied[key]


@torch.no_grad()
def pack_linears_(
    model: Model,
    dtype: str | torch.dtype = "int8",
    *,
    skip: Sequence[str] = (),
    group_size: int | None = None,
    rotate: bool | None = None,
) -> Model:
    """Put a packed weight in the place of every linear layer of a model, in place.

    Every ``nn.Linear``, and the ``Conv1D`` of GPT-2, becomes a ``PackedLinearModule``. So does an
    output layer that is tied to the embedding; the embedding stays as it is. Layers stay as they
    are whose ``weight`` the source of the model's classes reads beside calling them, such as the
    ``dt_proj`` of Mamba. Layers are packed one after another, and the old weight of each is
    released before the next. The model is for inference then: none of its parameters requires a
    gradient.

    Parameters
    ----------
    model : nn.Module
        On the CPU, in float32, bfloat16 or float16. Outputs of layers keep that dtype.
    dtype : {"float32", "bfloat16", "int8", "int4"}
        What weights are held in, as for ``lmdecode.PackedLinear``. The output layer of a model in
        "int4" is int8, as four bits would cost there as much as in all other layers.
    skip : sequence of str
        Names of modules that stay as they are, with all that is in them: whole names, or
        neighbouring parts of one, such as ``"lm_head"`` or ``"mlp.gate"``.
    group_size : {32, 64, 128}, optional
        Of ``"int4"``, as for ``lmdecode.PackedLinear``.
    rotate : bool, optional
        Of ``"int8"`` and ``"int4"``, as for ``lmdecode.PackedLinear``: True by default.

    Returns
    -------
    nn.Module
        ``model``.

    Raises
    ------
    TypeError
        An argument of another type.
    ValueError
        An argument of another value than expected, a layer on another device, or of another dtype,
        or with a hook or a ``forward`` of its own; or there is no layer to pack. Nothing is packed
        then.
    """
    if not isinstance(model, nn.Module):
        raise type_error(_OP, "model", model, "an nn.Module")
    refuse_stand_in(_OP, model)
    name_of_dtype, _, _ = check_linear_format(_OP, dtype, group_size, rotate)
    format_ = LinearFormat(name_of_dtype, group_size, rotate)
    names = checked_skip(_OP, skip)
    check_skip_of_model(_OP, model, names)
    places = _places(model, format_, names)
    if not places:
        raise ValueError(
            f"{_OP}: model is a {type(model).__name__} without a layer to pack; expected a "
            "torch.nn.Linear or Conv1D that skip does not name and whose weight is not read"
        )
    _pack_places(model, format_, places)
    return model


def pack_rest_(model: nn.Module, format_: LinearFormat, skip: Sequence[str]) -> None:
    """Pack what layers of a model are left, if there are any, and make it one for inference."""
    _pack_places(model, format_, _places(model, format_, skip))


def _places(model: nn.Module, format_: LinearFormat, skip: Sequence[str]) -> dict[int, list[str]]:
    """Return the layers to pack, checked: of each all of its names."""
    places: dict[int, list[str]] = {}
    named = list(model.named_modules(remove_duplicate=False))
    read = names_of_read_layers(model)
    left = {id(module) for name, module in named if name in read}
    for name, module in named:
        if is_linear(module) and id(module) not in left and not is_skipped(name, skip):
            _check_layer(name, module, format_.of_layer(model, module))
            places.setdefault(id(module), []).append(name)
    return places


def _pack_places(
    model: nn.Module, format_: LinearFormat, places: Mapping[int, Sequence[str]]
) -> None:
    for where in places.values():
        module = model.get_submodule(where[0])
        weight = module.weight
        assert isinstance(weight, Tensor)
        packed = pack_weight(where[0], module, weight, format_.of_layer(model, module))
        packed.take_bias()
        for name in where:
            model.set_submodule(name, packed)
        del module, weight  # before the next
    untie(model)
    model.requires_grad_(False)


def _check_layer(name: str, module: nn.Module, format_: LinearFormat) -> None:
    if name == "":
        raise ValueError(f"{_OP}: model is a linear layer itself; expected a module that holds it")
    foreign = foreign_code(module)
    if foreign is not None:
        raise ValueError(f"{_OP}: {name} is {foreign}; expected none, or {name} in skip")
    weight = module.weight
    assert isinstance(weight, Tensor)
    if weight.device.type != "cpu":
        raise ValueError(f"{_OP}: {name} is on {weight.device}; expected a model on cpu")
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"{_OP}: {name} has dtype {str(weight.dtype).removeprefix('torch.')}; expected "
            "float32, bfloat16 or float16"
        )
    try:  # whether this format takes so many inputs, without an output
        _, number, _ = check_linear_format(_OP, *format_)
        inputs = weight.shape[0 if isinstance(module, Conv1D) else 1]
        ops.pack_linear(torch.empty(0, inputs, dtype=torch.float32, device="cpu"), number)
    except ValueError as error:
        raise ValueError(f"{_OP}: {name}: {str(error).partition(': ')[2]}") from error

"""The block of a GGUF file that predicts further tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lmdecode.decoder.causal_config import CausalConfig, CausalWeights
from lmdecode.formats.gguf.facts import Facts, refused
from lmdecode.formats.gguf.weights import Weights, is_of_block

__all__ = ["mtp_of_file"]

_LAYER = "model.layers.0."
# Parameters that are beside the layer: names of what they are in the file.
_BESIDE = {
    "fc.weight": "eh_proj.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "model.norm.weight": "shared_head_norm.weight",
}
_PREFIX = "nextn."


class _Weights(Weights):
    """The tensors of a block by the names of a model of one layer, and of what is before it.

    The embedding and the head are the model's.
    """

    def __init__(self, facts: Facts, layer: Any, block: int, keeps_blocks: bool) -> None:
        self._block = block
        super().__init__(facts.file, facts, layer, keeps_blocks)

    def _in_file(self, parameter: str) -> str:
        if parameter in _BESIDE:
            return _PREFIX + _BESIDE[parameter]
        return parameter.replace(_LAYER, f"model.layers.{self._block}.", 1)

    def _name(self, parameter: str) -> str:
        if not parameter.startswith(_PREFIX):
            return super()._name(parameter)
        name = f"blk.{self._block}.{parameter}"
        is_last = name.endswith("shared_head_norm.weight")
        return "output_norm.weight" if is_last and name not in self._file.tensors else name

    def _parameters(self, model: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
        for parameter, shape in super()._parameters(model):
            if parameter in _BESIDE or parameter.startswith(_LAYER):
                yield self._in_file(parameter), shape
        size = model.config.hidden_size
        yield self._in_file("fc.weight"), (size, 2 * size)
        for parameter in ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"):
            yield self._in_file(parameter), (size,)

    def _tensors(self, model: Any) -> set[str]:
        return {name for name in self._file.tensors if is_of_block(name, self._block)}

    def read(self, parameter: str) -> Any:
        """Return a parameter's values; the projection is floats, as its columns are cut."""
        found = super().read(self._in_file(parameter))
        is_cut = parameter == "fc.weight" and not isinstance(found, Tensor)
        return found.dequantize() if is_cut else found


def mtp_of_file(
    facts: Facts, model: Any, weights: CausalWeights, *, keeps_blocks: bool
) -> tuple[CausalConfig, CausalWeights]:
    """Return the config and the weights of what predicts further tokens.

    Parameters
    ----------
    facts
        Of the file.
    model, weights
        The model of the file, whose parameters have no values, and its weights.
    keeps_blocks : bool
        Whether matrices in blocks stay what they are.

    Raises
    ------
    ValueError
        The file has none, or other tensors than expected.
    """
    from lmdecode.integrations.transformers.decoding.mtp import mtp_layer, mtp_of

    layer = mtp_layer(model)
    if (count := facts.count("nextn_predict_layers", 0, least=0)) != 1:
        raise refused(
            facts.file,
            f"has {count} for {facts.architecture}.nextn_predict_layers; expected 1 with mtp=True",
        )
    of_block = _Weights(facts, layer, model.config.num_hidden_layers, keeps_blocks)
    return mtp_of(layer, weights, of_block.read)

"""Folders of models with weights that predict further tokens, and these in plain torch."""

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.causal_models import model_of, random_config, random_model

__all__ = ["MtpModel", "agreeing_model", "mtp_model", "write_folder"]

# What gives what a layer adds to a row.
_ADDED = ("o_proj.weight", "o_proj.bias", "out_proj.weight", "down_proj.weight", "down_proj")


class MtpModel(NamedTuple):
    """A model, and what predicts further tokens: a one-layer model, fc [D, 2 D] and two norms."""

    model: Any
    layer: Any
    fc: Tensor
    norms: tuple[Tensor, Tensor]

    @property
    def trunk(self) -> Any:
        """The model without its head."""
        inner = self.model.model
        return getattr(inner, "language_model", inner)

    @torch.no_grad()
    def hidden(self, tokens: Tensor) -> Tensor:
        """Return [T, D]: what the model has behind its final norm."""
        hidden: Tensor = self.trunk(input_ids=tokens[None]).last_hidden_state[0]
        return hidden

    @torch.no_grad()
    def read(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [T, V] and hidden rows [T, D] of tokens and the hidden rows before them."""
        norm = copy.deepcopy(self.layer.model.norm)
        rows = []
        for weight, given in zip(
            self.norms, (self.trunk.embed_tokens(tokens), hidden), strict=True
        ):
            norm.weight.copy_(weight)
            rows.append(norm(given))
        x = F.linear(torch.cat(rows, dim=-1), self.fc)
        # Of one layer with attention, qwen3_next has no cache before transformers 5.5.
        of_layer = self.layer.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
        return self.model.get_output_embeddings()(of_layer), of_layer


def _one_layer(model: Any) -> Any:
    config = copy.deepcopy(model.config.get_text_config())
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    if getattr(config, "mlp_only_layers", None) and len(config.mlp_only_layers) < 4:
        config.mlp_only_layers = []
    return model_of(config, seed=5)


def mtp_model(architecture: str, variant: str, **more: Any) -> MtpModel:
    """Return a random model of ``CASES``, with ``more`` in its config, and weights that predict."""
    model = random_model(architecture, variant)
    if more:
        model = model_of(random_config(architecture, variant, **more))
    layer = _one_layer(model)
    size = layer.config.hidden_size
    generator = torch.Generator().manual_seed(6)
    fc = torch.randn(size, 2 * size, generator=generator) * (2 * size) ** -0.5
    norms = torch.randn(2, size, generator=generator) * 0.3
    return MtpModel(model, layer, fc, (norms[0], norms[1]))


@torch.no_grad()
def agreeing_model(architecture: str, variant: str, size: float = 0.0) -> MtpModel:
    """Return a model whose tokens are nearly always predicted; ``size`` scales its layers."""
    model = copy.deepcopy(random_model(architecture, variant))
    found = MtpModel(model, _one_layer(model), torch.empty(0), (torch.empty(0), torch.empty(0)))
    for part, factor in ((found.trunk, size), (found.layer.model, 0.0)):
        for name, parameter in part.named_parameters():
            if name.endswith(_ADDED):
                parameter.mul_(factor)
    found.layer.model.norm.weight.copy_(found.trunk.norm.weight)
    width = found.layer.config.hidden_size
    fc = torch.cat((torch.eye(width), torch.zeros(width, width)), dim=1)
    return found._replace(fc=fc, norms=(torch.zeros(width), torch.zeros(width)))


def write_folder(model: MtpModel, folder: Path, *, one_by_one: bool = False) -> None:
    """Write a folder as publishers do; ``one_by_one``: each expert has tensors of its own."""
    model.model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    state = {k: v for k, v in model.layer.model.state_dict().items() if "embed_tokens" not in k}
    if one_by_one:
        for name in [name for name in state if ".experts." in name]:
            prefix, kind = name.rsplit(".", 1)
            for expert, matrix in enumerate(state.pop(name)):
                parts = {"down_proj": matrix}
                if kind == "gate_up_proj":
                    parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
                for part, value in parts.items():
                    state[f"{prefix}.{expert}.{part}.weight"] = value
    tensors |= {f"mtp.{name}": value.clone().contiguous() for name, value in state.items()}
    tensors["mtp.fc.weight"] = model.fc
    tensors["mtp.pre_fc_norm_embedding.weight"] = model.norms[0]
    tensors["mtp.pre_fc_norm_hidden.weight"] = model.norms[1]
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))

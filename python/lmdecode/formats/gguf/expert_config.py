"""What configs of experts have in common: how many there are, how many a token has, their size."""

from __future__ import annotations

from lmdecode.formats.gguf.facts import Facts, refused

__all__ = ["expert_counts", "expert_size", "layers_without_experts"]


def expert_counts(
    facts: Facts, name: str = "num_experts", chosen_name: str = "num_experts_per_tok"
) -> dict[str, int]:
    """Return the config entries of a layer's experts and of a token's, by these names."""
    count = facts.count("expert_count")
    chosen = facts.count("expert_used_count")
    if chosen > count:
        raise refused(facts.file, f"has {chosen} experts of a token; expected at most {count}")
    return {name: count, chosen_name: chosen}


def expert_size(facts: Facts, kind: str = "exps") -> int:
    """Return the inner features of an expert, or of a shared one: files need not tell."""
    return facts.shape(facts.of_first_layer(f"ffn_down_{kind}.weight"))[-1]


def layers_without_experts(facts: Facts, layers: int) -> list[int]:
    """Return the indices of the layers that have no router."""
    tensors = facts.file.tensors
    return [i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" not in tensors]

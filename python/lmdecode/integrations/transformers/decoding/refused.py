"""Features of ``generate()`` that no loop of ``Decoding`` supports."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lmdecode.integrations.transformers.generate_call import given_cache

__all__ = ["refuse_handed_on", "refuse_inner_outputs", "refuse_past", "refuse_seed_of_beams"]


# Arguments that generate() passes on and that have no effect here.
_IGNORED = ("attention_mask", "cache_position", "next_sequence_length", "position_ids", "use_cache")


def refuse_inner_outputs(config: Any) -> None:
    """Raise ValueError if attributes of the config request outputs of a model's layers."""
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise ValueError(
                f"{name}: expected False, Decoding keeps none of them; model.generate() does"
            )


def refuse_past(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if arguments of ``generate()`` have keys and values."""
    name, cache = given_cache(arguments)
    if cache is not None:
        raise ValueError(
            f"{name}: expected None, Decoding keeps caches of its own; those of a prompt "
            "are there for a later call with store=, and between steps with Decoding.batch()"
        )


def refuse_handed_on(model_kwargs: dict[str, Any], ignored: Collection[str], what: str) -> None:
    """Raise ValueError for arguments of a forward pass that are not ``ignored``, or always are."""
    for name, value in model_kwargs.items():
        if name not in (*_IGNORED, *ignored) and value is not None and value is not False:
            raise ValueError(f"{name}: expected None, Decoding hands nothing on to a {what}")


def refuse_seed_of_beams(seed: Any) -> None:
    """Raise ValueError for a seed with beams."""
    if seed is not None:
        raise ValueError(
            f"seed: expected None with beams, got {seed!r}: beam sampling draws from torch's "
            "default generator, for torch.manual_seed"
        )

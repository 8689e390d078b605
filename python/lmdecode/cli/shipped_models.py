"""Models that the source tree ships, which an installed package is without."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CAUSAL_MODEL", "shipped_model"]

#: The folder of the causal language model, from the root of the source tree.
CAUSAL_MODEL = Path("examples", "kjv_mistral", "model")


def shipped_model(ships: Path = CAUSAL_MODEL) -> Path | None:
    """Return the folder of a model that the source tree ships; None: there is no source tree."""
    folder = Path(__file__).resolve().parents[3] / ships
    return folder if (folder / "config.json").is_file() else None

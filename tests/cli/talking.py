"""Models that commands talk with, in folders."""

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import lmdecode
from lmdecode.__main__ import main
from tests.support.causal_models import model_of, random_config

__all__ = ["KJV", "TEMPLATES", "chat", "model_with_states", "saved_model", "talk_of"]

ROOT = Path(__file__).resolve().parents[2]
KJV = ROOT / "examples" / "kjv_mistral" / "model"
TEMPLATES = {path.stem: path for path in sorted((ROOT / "tests/serving/chat_templates").glob("*"))}


def saved_model(folder: Path, template: str | None = None, dtype: str = "int8") -> Path:
    """Save the small model, with a chat template; return its folder."""
    source = folder / "source"
    shutil.copytree(KJV, source)
    if template is not None:
        (source / "chat_template.jinja").write_text(TEMPLATES[template].read_text())
    lmdecode.Decoding.from_pretrained(source, dtype, keep_model=False).save(folder / "saved")
    shutil.rmtree(source)
    return folder / "saved"


def model_with_states(folder: Path) -> Path:
    """Write a model of transformers whose layers keep states, with random weights."""
    shutil.copytree(KJV, folder, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    config = random_config(
        "lfm2", "convolutions at the ends", vocab_size=4096, max_position_embeddings=4096,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model_of(config).save_pretrained(folder)
    shutil.copy(KJV / "generation_config.json", folder)
    return folder


def chat(
    monkeypatch: pytest.MonkeyPatch, lines: list[str], *arguments: object, status: int = 0
) -> list[list[int]]:
    """Run ``lmdecode chat`` in this process; return the prompts that the engine was given."""
    prompts: list[list[int]] = []
    submit = lmdecode.Engine.submit

    def noted(self: Any, prompt: Any, **options: Any) -> Any:
        prompts.append(list(prompt))
        return submit(self, prompt, **options)

    with monkeypatch.context() as patch:
        patch.setattr(lmdecode.Engine, "submit", noted)
        patch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert main(["chat", *map(str, arguments)]) == status
    return prompts


def talk_of(store: Path, session: str = "chat") -> list[dict[str, Any]]:
    """Return the messages of the one talk of this name."""
    (path,) = (store / "talks").glob(f"{session}.*.json")
    found: list[dict[str, Any]] = json.loads(path.read_text())["messages"]
    return found

"""What to type in programs that talk to a server: coding agents, and pages to chat."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["CONFIGS", "Client", "first_lines"]


class Client(NamedTuple):
    """A server as its clients see it; ``context``, where it is known, is in tokens."""

    address: str
    name: str
    has_key: bool = False
    context: int | None = None
    key_variable: str = "LMDECODE_API_KEY"

    @property
    def key(self) -> str:
        """The key, as a shell has it: clients want any, where the server wants none."""
        return f'"${self.key_variable}"' if self.has_key else "none"


def _codex(client: Client) -> str:
    lines = [
        "# ~/.codex/config.toml",
        f"model = {json.dumps(client.name)}",
        'model_provider = "lmdecode"',
        *([] if client.context is None else [f"model_context_window = {client.context}"]),
        "",
        "[model_providers.lmdecode]",
        'name = "lmdecode"',
        f'base_url = "{client.address}/v1"',
        'wire_api = "responses"',
        *([f'env_key = "{client.key_variable}"'] if client.has_key else []),
    ]
    return "\n".join(lines)


def _claude_code(client: Client) -> str:
    names = ["ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{kind}_MODEL"
                                  for kind in ("OPUS", "SONNET", "HAIKU"))]  # fmt: skip
    values = {
        "ANTHROPIC_BASE_URL": client.address,
        "ANTHROPIC_AUTH_TOKEN": client.key,
        **dict.fromkeys(names, shlex.quote(client.name)),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return "\n".join([*(f"export {name}={value}" for name, value in values.items()), "claude"])


def _opencode(client: Client) -> str:
    key = f"{{env:{client.key_variable}}}" if client.has_key else client.key
    limit = {} if client.context is None else {
        "limit": {"context": client.context, "output": client.context}}  # fmt: skip
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "lmdecode",
        "options": {"baseURL": f"{client.address}/v1", "apiKey": key},
        "models": {client.name: {"name": client.name, **limit}},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"lmdecode": provider},
        "model": f"lmdecode/{client.name}",
    }
    return json.dumps(config, indent=2)


def _open_webui(client: Client) -> str:
    return (
        f"export OPENAI_API_BASE_URL={client.address}/v1\n"
        f"export OPENAI_API_KEY={client.key}\n"
        "open-webui serve --port 8080"
    )


CONFIGS: dict[str, Callable[[Client], str]] = {
    "codex": _codex,
    "claude-code": _claude_code,
    "opencode": _opencode,
    "open-webui": _open_webui,
}
"""Texts of configurations, by the programs that read them."""


def first_lines(client: Client, port: int) -> str:
    """Return what a server says at its start of how to use it."""
    name = shlex.quote(client.name)
    said = f"lmdecode serve --name {name} --port {port} --print-config"
    return (
        f"  Claude Code: ANTHROPIC_BASE_URL={client.address} ANTHROPIC_AUTH_TOKEN={client.key} "
        f"ANTHROPIC_MODEL={name} claude\n"
        f"  Codex: {said} codex, for ~/.codex/config.toml\n"
        f"  opencode: {said} opencode > opencode.json\n"
        f"  Open WebUI and others: {client.address}/v1 is the address of OpenAI's API"
    )

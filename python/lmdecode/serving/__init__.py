"""What serves a model: texts to tokens and back, chat templates, and the HTTP application."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmdecode.serving.app import create_app
    from lmdecode.serving.chat_template import ChatTemplate
    from lmdecode.serving.text_model import TextModel
    from lmdecode.serving.tokenizer import TextStream, Tokenizer

__all__ = ["ChatTemplate", "TextModel", "TextStream", "Tokenizer", "create_app"]

_HOMES = {
    "ChatTemplate": "chat_template",
    "TextModel": "text_model",
    "TextStream": "tokenizer",
    "Tokenizer": "tokenizer",
    "create_app": "app",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"lmdecode.serving.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

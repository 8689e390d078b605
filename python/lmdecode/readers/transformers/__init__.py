"""Models of transformers as configs and weights, by a table of architectures."""

from lmdecode._checks import install_hint

try:
    import transformers as _transformers  # noqa: F401  before the modules that need it
except ImportError as error:
    raise ImportError(
        f"lmdecode.readers.transformers needs transformers 5: {install_hint('transformers')}"
    ) from error

"""GGUF files, as llama.cpp has them: read, and taken as a model."""

from lmdecode.readers.gguf.reader import GgufFile, TensorInfo, is_gguf
from lmdecode.readers.gguf.tokenizer import (
    GgufTokenizer,
    load_tokenizer,
    read_tokenizer,
    tokenizer_files,
    tokenizer_path,
)

__all__ = [
    "GgufFile", "GgufTokenizer", "TensorInfo", "is_gguf", "load_tokenizer", "read_tokenizer",
    "tokenizer_files", "tokenizer_path",
]  # fmt: skip

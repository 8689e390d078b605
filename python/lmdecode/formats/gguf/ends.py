"""What ends a text of a GGUF file's model."""

from __future__ import annotations

from array import array

from lmdecode.formats.gguf.facts import Facts
from lmdecode.formats.gguf.reader import Strings

__all__ = ["end_tokens"]

# What ends a text beside the file's own end, as llama.cpp has it.
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
         "<EOT>", "<|end_of_text|>", "<|return|>", "<|call|>", "<turn|>",
         "<|tool_response>")  # fmt: skip
# Where these are, "<|end|>" ends a message, and more of them follow.
_OF_MESSAGES = ("<|return|>", "<|call|>")
_SPECIAL = (3, 4)  # of tokenizer.ggml.token_type: control, and the user's


def end_tokens(facts: Facts, vocab_size: int) -> list[int]:
    """Return the tokens that end a text: those of the file's entries, and those known by name."""
    ends = [facts.token(f"{key}_token_id", vocab_size) for key in ("eos", "eot", "eom")]
    tokens = facts.file.metadata.get("tokenizer.ggml.tokens")
    kinds = facts.file.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, Strings) and isinstance(kinds, array):
        count = min(len(tokens), vocab_size)
        found = {
            tokens[i]: i
            for i, kind in enumerate(kinds[:count])
            if kind in _SPECIAL and tokens[i] in _ENDS
        }
        ends += found.values()
        if all(name in found for name in _OF_MESSAGES):
            ends = [end for end in ends if end != found.get("<|end|>")]
    return list(dict.fromkeys(end for end in ends if end is not None))

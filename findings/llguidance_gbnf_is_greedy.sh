#!/usr/bin/env bash
# llguidance 1.9.1: GBNF that goes through its converter is another language than llama.cpp's.
#
# llguidance.gbnf_to_lark.any_to_lark() turns GBNF into Lark. Rules without recursion become
# terminals, and a lexer takes the longest match of a terminal. In `("a" | "ab") "bc"` the text
# "abc" is "a" and "bc"; the lexer takes "ab", and "c" is refused. llama.cpp, which has no lexer,
# takes "abc" and "abbc". Both are valid GBNF, and nothing warns.
#
# Seen: "abc" refused, "abbc" taken.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1
"$folder/venv/bin/python" - <<'PY'
import llguidance
from llguidance.gbnf_to_lark import any_to_lark


class Bytes:  # a tokenizer of single bytes; token 256 ends the text
    eos_token_id, bos_token_id = 256, None
    tokens = [bytes([byte]) for byte in range(256)] + [b""]
    special_token_ids = [256]

    def __call__(self, text):
        return list(text.encode() if isinstance(text, str) else text)


tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))
lark = any_to_lark('root ::= x "bc"\nx ::= "a" | "ab"')
print(lark)


def is_taken(text):
    matcher = llguidance.LLMatcher(
        tokenizer, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0
    )
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


seen = {text: is_taken(text) for text in ("abc", "abbc")}
print(seen)
assert seen == {"abc": False, "abbc": True}
PY
echo "as it was found"

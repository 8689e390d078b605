#!/usr/bin/env bash
# llguidance 1.9.1: copies of a matcher share the states of its lexer, and so its limits.
#
# A server compiles a grammar once, and gives each request a deep_copy() of the matcher. When one
# request comes to max_lexer_states, the limit holds for every copy, also for one that is made
# afterwards: it fails at its first mask, on a text that went well before. Only a matcher that is
# compiled anew goes on.
#
# Seen: "ok" for a short text, "too many states: 300 >= 300" for a long one, then the same error for
# the short one; "ok" with a new matcher.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1
"$folder/venv/bin/python" - <<'PY'
import llguidance


class Bytes:  # a tokenizer of single bytes; token 256 ends the text
    eos_token_id, bos_token_id = 256, None
    tokens = [bytes([byte]) for byte in range(256)] + [b""]
    special_token_ids = [256]

    def __call__(self, text):
        return list(text.encode() if isinstance(text, str) else text)


tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))
limits = llguidance.LLParserLimits(max_lexer_states=300)
grammar = llguidance.LLMatcher.grammar_from_regex("q[ab]*a[ab]{12}c")


def compiled():
    return llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def follow(matcher, text):
    state = matcher.deep_copy()
    for byte in text.encode():
        state.compute_bitmask()
        if state.is_error() or not state.consume_token(byte):
            return state.get_error().splitlines()[0]
    return "ok"


many = "".join(f"{number:012b}" for number in range(0, 4096, 61))
many = "q" + many.replace("0", "a").replace("1", "b")
matcher = compiled()
seen = [follow(matcher, "qab"), follow(matcher, many), follow(matcher, "qab")]
seen.append(follow(compiled(), "qab"))
print("\n".join(seen))
assert seen[0] == seen[3] == "ok"
assert "too many states: 300" in seen[1] and seen[2] == seen[1]
PY
echo "as it was found"

"""GBNF, llama.cpp's grammars: which texts they allow, and what is refused."""

import itertools
import random

import pytest

from lmdecode.serving.gbnf import Alternatives, Chars, Node, Reference, Repeated, Row, rules_of
from lmdecode.serving.grammar import GrammarCompiler
from lmdecode.serving.tokenizer import Tokenizer
from tests.serving.grammar_cases import KJV, accepts, allowed, compiler_of

NESTED = r"""
# A list of words, texts and lists, as JSON has them.
root   ::= list
list   ::= "[" space (value ("," space value)*)? "]" space
value  ::= list | text | [0-9]+ space | ("true" | "false") space
text   ::= "\"" ([^"\\\x00-\x1F\x7F] | "\\" (["\\n] | "u" [0-9a-fA-F]{4}))* "\"" space
space  ::= | " " | "\n" [ \t]{0,3}
"""
SUMS = r"""
root  ::= (sum "=" space part "\n")+
sum   ::= part ([-+*/] part)*
part  ::= [a-z] [a-z0-9_]* space | [0-9]+ space | "(" space sum ")" space
space ::= [ \t\n]*
"""

# A grammar, texts that it allows, and texts that it does not.
CASES = {
    "a text": ('root ::= "ab"', ["ab"], ["", "a", "abb", "AB"]),
    "an empty text": ('root ::= ""', [""], ["a"]),
    "a row": ('root ::= "a" "b" "c"', ["abc"], ["ab", "acb"]),
    "alternatives": ('root ::= "a" | "bc" | "b"', ["a", "b", "bc"], ["", "ab", "c"]),
    "an empty alternative": ('root ::= "a" | | "b"', ["a", "b", ""], ["ab"]),
    "an empty alternative at the end": ('root ::= "a" |', ["a", ""], ["b"]),
    "an empty rule": ('root ::= "a" none "b"\nnone ::=', ["ab"], ["a", "b"]),
    "empty brackets": ('root ::= "a" () "b"', ["ab"], ["a", ""]),
    "brackets": ('root ::= ("a" | "b") "c"', ["ac", "bc"], ["a", "c", "abc"]),
    "*": ('root ::= "ab"*', ["", "ab", "abab"], ["a", "abb"]),
    "+": ('root ::= [ab]+', ["a", "ba"], ["", "abc"]),
    "?": ('root ::= "a"? "b"', ["b", "ab"], ["a", "aab"]),
    "{m}": ('root ::= "a"{3}', ["aaa"], ["", "aa", "aaaa"]),
    "{m,}": ('root ::= "a"{2,}', ["aa", "aaaaa"], ["", "a"]),
    "{m,n}": ('root ::= "a"{1,3}', ["a", "aa", "aaa"], ["", "aaaa"]),
    "{0,n}": ('root ::= "a"{0,1}', ["", "a"], ["aa"]),
    "{0}": ('root ::= "a"{0} "b"', ["b"], ["", "ab", "a"]),
    "{0,0}": ('root ::= ("a" root){0,0} "b"', ["b"], ["ab"]),
    "spaces in counts": ('root ::= ("a"{ 1 ,\n 2 # two\n})', ["a", "aa"], ["", "aaa"]),
    "leading zeros": ('root ::= "a"{002}', ["aa"], ["a", "aaa"]),
    "a large count": ('root ::= [ab]{0,90000}', ["", "ab" * 40], ["c"]),
    "a repetition of a repetition": ('root ::= ("a"*)* "b"', ["b", "aab"], ["", "ba"]),
    "two signs": ('root ::= "a"+? "b"?* "c"**', ["", "a", "aabbcc"], ["ba", "ca"]),
    "two counts": ('root ::= "a"{2}{2}', ["aaaa"], ["aa", "aaa", "aaaaa"]),
    "a count of brackets with recursion": (
        'root ::= ("(" root ")"){2} | "a"', ["a", "(a)(a)", "((a)(a))(a)"], ["(a)", "(a)(a)(a)"]),
    "a class": ("root ::= [a-cx]", ["a", "b", "c", "x"], ["", "d", "ab", "-"]),
    "another class": ("root ::= [^a-c\\n]", ["d", "A", "\u00e9"], ["", "a", "\n", "dd"]),
    "a minus at an end": ("root ::= [a-] [-b]", ["a-", "--", "-b"], ["b-", "aa"]),
    "an escaped minus": ("root ::= [a\\-c]+", ["a-c"], ["b"]),
    "a range to a minus": ("root ::= [+--]+", ["+,-"], ["a", "."]),
    "two signs of another engine": ("root ::= [a~~b&&c]+", ["a~b&c"], ["d"]),
    "brackets in a class": ("root ::= [[a\\]/]+", ["[a]/"], ["b"]),
    "^ within a class": ("root ::= [a^]+", ["a^"], ["b"]),
    "an empty class": ('root ::= "a" [] [^] "b"', ["ab"], ["a", "axb"]),
    "a class over surrogates": ("root ::= [\\u0080-\\U0010FFFF]", ["\u00e9", "\U0001f916"], ["a"]),
    "a class beyond Unicode": ("root ::= [b-\\UFFFFFFFF]", ["b", "\U0001f916"], ["a"]),
    ".": ("root ::= . .", ["ab", "\n\r", "\u00e9\U0001f916"], ["", "a", "abc"]),
    "escapes": (r'root ::= "\t\n\r\\\"\[\]\-\x41\u00e9\U0001F916"',
                ['\t\n\r\\"[]-A\u00e9\U0001f916'], ["A"]),
    "escapes in classes": (r'root ::= [\n\\\"\x41\u00e9\U0001F916-\U0001F917]',
                           ["\n", "\\", '"', "A", "\u00e9", "\U0001f917"], ["n", "u", "0"]),
    "characters beyond ASCII": ('root ::= "\u00e9" [\u4e2d-\u4e2f]', ["\u00e9\u4e2d"], ["\u00e9"]),
    "signs of other syntaxes": ('root ::= "/" "//" "%{#" "$" ["\'`]', ["///%{#$'", "///%{#$`"],
                                ["/"]),
    "a new line in quotes": ('root ::= "a\nb"', ["a\nb"], ["ab"]),
    "comments": ('# c "\nroot ::= a # "b"\na ::= ( "a" # )\n | "b" ) # c', ["a", "b"], ["c"]),
    "a comment at the end": ('root ::= "a#b" #', ["a#b"], ["a"]),
    "CRLF": ('root ::= a |\r\n  "b"\r\n\r\na ::= (\r\n"a"\r\n)\r\n', ["a", "b"], ["\r", "a\r"]),
    "a rule of several lines": ('root ::=\n "a" |\n # c\n ("b"\n "c")', ["a", "bc"], ["b"]),
    "tabs and no spaces": ('root::=\t"a"|b\nb\t::="b"', ["a", "b"], ["ab"]),
    "names": ('root ::= start 1st a-b a_b Foo FOO foo\nstart ::= "s"\n1st ::= "1"\na-b ::= "-"\n'
              'a_b ::= "_"\nFoo ::= "F"\nFOO ::= "O"\nfoo ::= "f"', ["s1-_FOf"], ["s1--FOf"]),
    "root as the last rule": ('a ::= "a"\nroot ::= a a', ["aa"], ["a"]),
    "the last of two rules": ('root ::= a\na ::= "a"\na ::= "b"', ["b"], ["a"]),
    "a rule that is not used": ('root ::= "a"\nb ::= b | "b" c\nc ::= "c"', ["a"], ["b"]),
    "recursion": ('root ::= "(" root ")" | ""', ["", "(())"], ["(", "())"]),
    "recursion on the left": ('root ::= root "+" a | a\na ::= [0-9]+', ["1", "12+3+4"],
                              ["+1", "1+"]),
    "recursion without a text": ('root ::= "a" | b\nb ::= "b" b', ["a"], ["b", "bb"]),
    "recursion through nothing": ('root ::= root? root? "a" | ""', ["", "a", "aaa"], ["b"]),
    "a part of a longer one": ('root ::= ("a" | "ab") "bc"', ["abc", "abbc"], ["ac", "ab"]),
    "a part of a longer one beside recursion": (
        'root ::= "(" root ")" | ("a" | "ab") ("bc" | root)', ["abc", "abbc", "(abc)", "aabc"],
        ["ab", "(ab)"]),
    "a repetition and what goes on with it": (
        'root ::= [a-z]* "ab" ("(" root ")")?', ["ab", "abab", "xab(ab)"], ["ba", "ab()"]),
    "a repetition and what goes on with it behind an empty part": (
        'root ::= [ab]+ x "b"\nx ::= "(" root ")" |', ["ab", "bbb", "a(bb)b"], ["b", "a(b)b"]),
    "a keyword and a name": (
        'root ::= "(" root ")" | "if" ":"? root | [a-z]+ ":"', ["if:a:", "ifa:", "(if(if:))", "i:"],
        ["if", "a", "if:if"]),
    "nested lists": (NESTED, ["[]", '[1, "a\\u00e9\\n", [true,\n  [ ]]]'], ["[", "[1,]", '["\n"]']),
    "sums": (SUMS, ["a=1\n", "(a +b_1)*2 = c\n\n\n", "a=b\nc=d\n"], ["a=1", "a=\n", "1a=2\n"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(KJV)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return compiler_of()


@pytest.mark.parametrize("name", CASES)
def test_texts_are_those_that_llama_cpp_allows(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    text, yes, no = CASES[name]
    grammar = compiler.gbnf(text)
    for one in yes:
        assert accepts(grammar, tokenizer, one), one
    for one in no:
        assert not accepts(grammar, tokenizer, one), one


def test_tokens(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """By their numbers and words; any token but one is a text."""
    (a,), (b,) = (tokenizer.encode(text, add_special_tokens=False) for text in "ab")
    assert allowed(compiler.gbnf(f'root ::= <[{a}]> "b"').start()) == [a]
    for text in (f"root ::= !<[{a}]>* <[{a}]>", f"root ::= (!<[{a}]>)* <[{a}]>"):
        tokens = allowed(compiler.gbnf(text).start())
        assert a in tokens and b in tokens and not {0, 1, 2} & set(tokens)
    tokens = allowed(compiler.gbnf(f'root ::= !<[{a}]> "b"').start())
    assert len(tokens) > 4000 and a not in tokens and not {0, 1, 2} & set(tokens)
    special = tokenizer.inner.id_to_token(2)
    assert allowed(compiler.gbnf(f'root ::= "a"? {special} "b"').start())[0] == 2


# Where it is, what stands there, and what is wrong.
ERRORS = {
    "": "it has no rule root",
    "# nothing": "it has no rule root",
    'rule ::= "a"': "it has no rule root",
    "root ::= x": "line 1, column 10, 'x': there is no rule of this name",
    'root ::= "a"\r\na ::= (b)\nb ::= "c" (\n  d)': "line 4, column 3, 'd)': there is no rule",
    'root = "a"': "line 1, column 6, '= \"a\"': expected ::=",
    'root ::= "a"\n | "b"': "line 2, column 2, '| \"b\"': expected the name of a rule, as a rule",
    'root ::= "a"\n"b"': "line 2, column 1, '\"b\"': expected the name of a rule",
    '\u00e9 ::= "a"': "line 1, column 1, '\u00e9 ::= \"a\"': expected the name of a rule",
    'root ::= "a': "line 1, column 10, '\"a': expected a quote at its end",
    'root ::= "a\\': "line 1, column 12, '\\\\': expected \\t, \\r, \\n",
    "root ::= [a\n": "line 1, column 10, '[a': expected ] at its end",
    'root ::= "\\q"': "line 1, column 11, '\\\\q\"': expected \\t",
    'root ::= "\\x1"': "line 1, column 11, '\\\\x1\"': expected \\t",
    'root ::= "\\u00e"': "or \\x, \\u or \\U and 2, 4 or 8 digits",
    'root ::= "\\ud83e\\udd16"': "column 11, '\\\\ud83e\\\\udd16\"': expected a character of texts",
    'root ::= "\\U00110000"': "expected a character of texts",
    'root ::= "\\x00"': "expected a character of texts, no null character",
    "root ::= [\\x00]": "expected a character of texts",
    "root ::= [^\\x00-\\UFFFFFFFF]": "expected a character of texts",
    "root ::= [z-a]": "line 1, column 11, 'z-a]': expected a range",
    'root ::= ("a"': "line 1, column 14, the end: expected a part of a rule, or )",
    'root ::= ("a"\nb ::= "c"': "line 2, column 3, '::= \"c\"': expected a part of a rule, or )",
    'root ::= "a")': "line 1, column 13, ')': expected a part of a rule, or the end of the line",
    "root ::= *": "line 1, column 10, '*': expected a part of a rule before it",
    "root ::= (+)": "line 1, column 11, '+)': expected a part of a rule before it",
    'root ::= "a" | {2}': "'{2}': expected a part of a rule before it",
    'root ::= "a"{,3}': "line 1, column 14, ',3}': expected a number",
    'root ::= "a"{1': "line 1, column 15, the end: expected }",
    'root ::= "a"{\n1}': "line 1, column 14, the end of the line: expected a number",
    'root ::= "a"{1;2}': "line 1, column 15, ';2}': expected }",
    'root ::= "a"{3,1}': "line 1, column 13, '{3,1}': expected a second number that is not below",
    'root ::= "a"{1000000}': "line 1, column 14, '1000000}': expected at most 100000",
    'root ::= "a"{' + "9" * 9999 + "}": "expected at most 100000",
    "root ::= <": "line 1, column 10, '<': expected a token",
    "root ::= !a": "line 1, column 10, '!a': expected a token",
    "root ::= <odd>": "line 1, column 10, '<odd>': the model has no such token",
    "root ::= <[4096]>": "line 1, column 10, '<[4096]>': the model has no such token",
    "root ::= a $": "line 1, column 12, '$': expected a part of a rule, or the end",
    "\ufeffroot ::= a": "line 1, column 1, '\\ufeffroot ::= a': expected the name of a rule",
    'root ::= "' + "a" * 300: "expected a quote at its end",
    "root ::= " + "(" * 201: "line 1, column 211, the end: expected at most 200 levels",
    'root ::= "a"' + "{2}" * 300: "expected at most 200 levels",
    'root ::= "a"' + "*" * 10_001: "more than 10000 rules, brackets and repetitions",
    "root ::= root": "allows no text",
}


@pytest.mark.parametrize("text", ERRORS, ids=lambda text: repr(text)[:40])
def test_errors_have_the_place(compiler: GrammarCompiler, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        compiler.gbnf(text)
    message = str(caught.value)
    assert ERRORS[text] in message and message.startswith("the grammar ")
    assert len(message) < 200 and "\n" not in message


@pytest.mark.parametrize("text", ['root ::= "\ud800"', "root ::= \x00"])
def test_characters_that_no_text_has(compiler: GrammarCompiler, text: str) -> None:
    with pytest.raises(ValueError, match=r"no surrogates|null character"):
        compiler.gbnf(text)


# What a compiler by recursion, or one that copies rules into others, could take long for; and the
# error where it is refused.
LARGE: dict[str, tuple[str, str]] = {
    "doubles": ("root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(100))
                + '\na100 ::= "a"', ""),
    "a chain": ("root ::= r0\n" + "\n".join(f'r{i} ::= r{i + 1} "b"?' for i in range(500))
                + '\nr500 ::= "a"', ""),
    "a long chain": ("root ::= r0\n" + "\n".join(f'r{i} ::= "(" r{i + 1} ")"' for i in range(4000))
                     + '\nr4000 ::= root | "a"', ""),
    "optional rules": ("root ::= " + " ".join(f"r{i}?" for i in range(600)) + "\n"
                       + "\n".join(f'r{i} ::= "a" | "b" root' for i in range(600)),
                       ""),
    "many words": ("root ::= (" + " | ".join(f'"word{i}"' for i in range(3000)) + ") root?", ""),
    "many rules": ("root ::= r0\n" + "\n".join(
        f'r{i} ::= "({i}" r{i + 1}? ")"' for i in range(900)) + "\nr900 ::= root", ""),
    "optional parts": ('root ::= "(" root ")" | ' + '"a"? ' * 200, ""),
    "more optional parts": ('root ::= "(" root ")" | ' + '"a"? ' * 600, "precomputation failed$"),
    "counts of counts": ('root ::= (("a" root?){90000}){90000}', ""),
    "brackets": ("root ::= " + "(" * 200 + '"a"' + ")?" * 200, ""),
    "many characters": (
        'root ::= "(" root ")" | "' + "".join(map(chr, range(0x4E00, 0x5E00))) + '"', ""),
    "empty alternatives": ("root ::= " + "|" * 20_000, ""),
    "many parts": ('root ::= "a" | "(" root ")"' + ' "b" root' * 25_001, "parts; expected at most"),
    "an escape in every place": ('root ::= "' + "\\x61" * 20_000 + '"', ""),
    "a comment": ("#" * 200_000 + '\nroot ::= "a"', ""),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_large_grammars(compiler: GrammarCompiler, name: str) -> None:
    text, error = LARGE[name]
    if not error:
        assert allowed(compiler.gbnf(text).start())
        return
    with pytest.raises(ValueError, match=error):
        compiler.gbnf(text)


def test_too_many_ways_to_go_on_are_an_error(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """It says nothing of what the grammar was written as."""
    grammar = compiler.gbnf('root ::= "(" root ")" | ("if " | [a-z]+) [a-z]* root?')
    with pytest.raises(RuntimeError, match=r"^the grammar has no next token: .* ways to go on$"):
        accepts(grammar, tokenizer, "iffyiffyiffy")


def _random_part(rng: random.Random, level: int) -> str:
    kind = rng.random()
    if kind < 0.5:
        part = f'"{rng.choice(["a", "b", "ab", "ba", "aab", ""])}"'
    elif kind < 0.65:
        part = rng.choice(["[ab]", "[b]"])
    elif kind < 0.8 or level == 0:
        part = rng.choice(["root", "x", "y"])
    else:
        part = f"({_random_body(rng, level - 1)})"
    counts = ["*", "+", "?", "{2}", "{0,2}", "{1,2}", "{2,}"]
    return part + rng.choice(counts) if rng.random() < 0.3 else part


def _random_body(rng: random.Random, level: int) -> str:
    rows = [
        " ".join(_random_part(rng, level) for _ in range(rng.choice([1, 1, 2, 3])))
        for _ in range(rng.choice([1, 2, 3]))
    ]
    return " | ".join(rows)


def _allows(rules: dict[str, Node], text: str) -> bool:
    """Whether a grammar allows a text, by the ends of each rule from each of its places on."""
    ends: dict[tuple[str, int], set[int]] = {
        (name, at): set() for name in rules for at in range(len(text) + 1)
    }

    def of(node: Node, at: int) -> set[int]:
        if isinstance(node, Chars):
            is_here = at < len(text) and any(a <= ord(text[at]) <= b for a, b in node.ranges)
            return {at + 1} if is_here else set()
        if isinstance(node, Reference):
            return ends[node.name, at]
        if isinstance(node, Alternatives):
            return {end for part in node.parts for end in of(part, at)}
        found = {at}
        if isinstance(node, Row):
            for part in node.parts:
                found = {end for begin in found for end in of(part, begin)}
            return found
        assert isinstance(node, Repeated)
        reached = found if node.least == 0 else set()
        for count in range(1, (node.most or node.least + len(text) + 1) + 1):
            found = {end for begin in found for end in of(node.parts[0], begin)}
            reached = reached | found if count >= node.least else reached
        return reached

    while True:
        before = {place: len(found) for place, found in ends.items()}
        for name, at in ends:
            ends[name, at] = ends[name, at] | of(rules[name], at)
        if before == {place: len(found) for place, found in ends.items()}:
            return len(text) in ends["root", 0]


@pytest.mark.parametrize("seed", range(40))
def test_random_grammars_allow_their_texts(
    compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int
) -> None:
    """Rules with recursion on every side, and parts that are the beginning of others."""
    rng = random.Random(seed)
    text = "\n".join(f"{name} ::= {_random_body(rng, 2)}" for name in ("root", "x", "y"))
    rules = rules_of(text, {}.get, 0)
    texts = ["".join(one) for size in range(6) for one in itertools.product("ab", repeat=size)]
    want = [_allows(rules, one) for one in texts]
    try:
        grammar = compiler.gbnf(text)
    except ValueError as error:
        assert "allows no text" in str(error) and not any(want)
        return
    for one, is_allowed in zip(texts, want, strict=True):
        assert accepts(grammar, tokenizer, one) == is_allowed, (text, one)

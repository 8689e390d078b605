"""What ``cuobjdump`` says of CUDA kernels: registers, stacks, instructions of their loops."""

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_RESOURCES = re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?) ;")
_BRANCH = re.compile(r"\bBRA\b.*?0x([0-9a-f]+)")
_PREDICATE = re.compile(r"^@!?U?P\w+ ")


class Loop(NamedTuple):
    """Counts of a loop's instructions: all, HMMA, copies of 16 bytes from global memory, spills."""

    size: int
    products: int
    copies: int
    spills: int


@dataclass
class Kernel:
    """A kernel of one architecture; instructions are (address, text)."""

    name: str
    registers: int
    stack: int
    code: list[tuple[int, str]]

    def _loops(self) -> list[tuple[int, int]]:
        """First and last instruction of each loop: what branches backwards, the longest of each."""
        places = {address: place for place, (address, _) in enumerate(self.code)}
        ends: dict[int, int] = {}
        for place, (_, text) in enumerate(self.code):
            if (found := _BRANCH.search(text)) is None:
                continue
            to = places.get(int(found[1], 16), place)
            if to < place:
                ends[to] = max(ends.get(to, 0), place)
        return sorted(ends.items())

    def inner_loops(self) -> list[list[str]]:
        """Instructions of each loop that has no loop in it."""
        loops = self._loops()
        return [
            [text for _, text in self.code[b : e + 1]]
            for b, e in loops
            if not any((b, e) != (c, f) and b <= c and f <= e for c, f in loops)
        ]

    def main_loop(self) -> Loop | None:
        """The shortest loop with all HMMA, else the first innermost one that copies 16 bytes."""
        loops = self._loops()
        products = [place for place, (_, text) in enumerate(self.code) if _op(text) == "HMMA"]
        if products:
            around = [(b, e) for b, e in loops if b <= products[0] and products[-1] <= e]
        else:
            around = [
                (b, e)
                for b, e in loops
                if _count(self.code[b : e + 1]).copies
                and not any((b, e) != (c, f) and b <= c and f <= e for c, f in loops)
            ][:1]
        if not around:
            return None
        begin, end = min(around, key=lambda loop: loop[1] - loop[0])
        return _count(self.code[begin : end + 1])


def _op(text: str) -> str:
    return _PREDICATE.sub("", text).split(" ")[0].split(".")[0]


def _count(code: list[tuple[int, str]]) -> Loop:
    ops = Counter(_op(text) for _, text in code)
    copies = sum(_op(text) in ("LDG", "LDGSTS") and ".128" in text for _, text in code)
    return Loop(len(code), ops["HMMA"], copies, ops["LDL"] + ops["STL"])


def _code_of(listing: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    for part in listing.split("Function : ")[1:]:
        name, _, lines = part.partition("\n")
        code = [
            (int(found[1], 16), found[2])
            for line in lines.splitlines()
            if (found := _INSTRUCTION.match(line))
        ]
        yield name.strip(), code


def kernels_of(cuobjdump: Path, binary: Path, arch: str) -> dict[str, Kernel]:
    """Return the kernels that a library or cubin has for an architecture, by their plain names."""

    def said(option: str) -> str:
        command = [cuobjdump, "-arch", arch, option, binary]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    resources = {
        name: (int(registers), int(stack))
        for name, registers, stack, *_ in _RESOURCES.findall(said("--dump-resource-usage"))
    }
    code = dict(_code_of(said("-sass")))
    names = subprocess.run(
        ["c++filt"], input="\n".join(code), check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return {
        plain_name(long): Kernel(plain_name(long), *resources[name], code[name])
        for name, long in zip(code, names, strict=True)
    }


def plain_name(name: str) -> str:
    """Return a kernel's name with its template arguments alone."""
    name = re.sub(r"\((?:\w+::)*RowKind\)", "RowKind ", name)
    name = re.sub(r"(?:\w+::)+", "", name.removeprefix("void "))
    name = name[: name.index("(")] if "(" in name else name
    return name.replace("RowKind 0", "any").replace("RowKind 1", "exact").replace(", ", " ")

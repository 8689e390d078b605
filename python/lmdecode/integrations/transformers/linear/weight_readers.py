"""Layers whose weight a model's own code reads, beside calling them.

Mamba multiplies by ``self.dt_proj.weight``. Such reads are found in the source of a model's
classes. Those that are not found there ``PackedLinearModule`` refuses when they happen.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap

from torch import nn

from lmdecode.readers.transformers.foreign_code import decides_what_is_computed

__all__ = ["names_of_read_layers"]

# What tells nothing of the numbers of a weight: its attributes, and functions that are given it.
_FACTS = {"device", "dim", "dtype", "is_meta", "ndim", "numel", "requires_grad", "shape", "size"}
_QUESTIONS = {"getattr", "hasattr", "id", "isinstance", "to", "type", "type_as"}
# Of their classes only those of models read weights of layers.
_LIBRARIES, _MODELS = ("torch.", "transformers.", "builtins"), "transformers.models."


def names_of_read_layers(model: nn.Module) -> frozenset[str]:
    """Return names of modules, as ``named_modules()`` has them, whose ``weight`` is read.

    A read is none where the attributes of its module rule it out, or where it is for training.
    """
    found = set()
    for owner_name, owner in model.named_modules(remove_duplicate=False):
        kind: type = type(owner)
        paths = {path for tree in _readers(kind) for path in _paths_read(tree, owner)}
        for name, _ in owner.named_modules(remove_duplicate=False) if paths else ():
            if any(re.fullmatch(path, name) for path in paths):
                found.add(f"{owner_name}.{name}".removeprefix("."))
    return frozenset(found)


@functools.cache
def _readers(kind: type) -> list[ast.AST]:
    """Return the methods of a class that name a weight, of those that have a source."""
    found: list[ast.AST] = []
    for base in kind.__mro__:
        if base.__module__.startswith(_LIBRARIES) and not base.__module__.startswith(_MODELS):
            continue
        for name, method in vars(base).items():
            if inspect.isfunction(method) and decides_what_is_computed(name):
                try:
                    source = textwrap.dedent(inspect.getsource(method))
                    source = source.replace("self.training", "False")
                    found += [ast.parse(source)] if ".weight" in source else []
                except (OSError, SyntaxError, TypeError):
                    continue
    return found


def _paths_read(node: ast.AST, owner: nn.Module) -> set[str]:
    """Return patterns of names within the owner."""
    if _is_weight(node):
        return _path(node.value)  # type: ignore[attr-defined]
    children = list(ast.iter_child_nodes(node))
    if _asks_only(node):
        children = [child for child in children if not _is_weight(child)]
    elif isinstance(node, (ast.If, ast.IfExp)):
        holds = _holds(node.test, owner)
        parts = [] if holds is None else node.orelse if holds else node.body
        children = [c for c in children if c not in (parts if isinstance(parts, list) else [parts])]
    return set().union(*(_paths_read(child, owner) for child in children))


def _is_weight(node: ast.AST) -> bool:
    """Whether this is X.weight, to be read."""
    is_weight = isinstance(node, ast.Attribute) and node.attr == "weight"
    return is_weight and isinstance(node.ctx, ast.Load)  # type: ignore[attr-defined]


def _asks_only(node: ast.AST) -> bool:
    """Whether a weight that is right in this is asked for what tells nothing of its numbers."""
    if isinstance(node, ast.Call):
        return getattr(node.func, "id", getattr(node.func, "attr", None)) in _QUESTIONS
    if isinstance(node, ast.Compare):
        return isinstance(node.ops[0], (ast.Is, ast.IsNot))
    return isinstance(node, ast.Attribute) and node.attr in _FACTS


def _path(node: ast.expr) -> set[str]:
    """Return the pattern of self.a.b or self.a[i], or with any names before that of other.a.b."""
    parts: list[str] = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        parts.insert(0, node.attr if isinstance(node, ast.Attribute) else "[^.]+")
        node = node.value
    if not isinstance(node, ast.Name) or not parts:
        return set()
    return {("" if node.id == "self" else r"(.*\.)?") + r"\.".join(parts)}


def _holds(test: ast.expr, owner: nn.Module) -> bool | None:
    """Return whether a condition holds; None where the module's attributes alone do not tell."""
    if any(isinstance(node, ast.Call) for node in ast.walk(test)):
        return None
    try:
        return bool(eval(compile(ast.Expression(test), "condition", "eval"), {"self": owner}))
    except Exception:  # a name of the call, or an attribute that is not there yet
        return None

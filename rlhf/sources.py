"""Looks at a user's files without running or loading them: reward functions, reward models, tokenizers."""

from __future__ import annotations

import ast
import difflib
import json
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def function_problem(dotted: str) -> str | None:
    """What is wrong with a function's dotted path, and the cure; None when it can be found. Nothing is imported."""
    module, _, name = dotted.rpartition(".")
    if not module or not all(part.isidentifier() for part in dotted.split(".")):
        return "is not a dotted path; write <package>.<module>.<function>, e.g. rlhf.rewards.courtesy"
    spec = _find_module(module)
    if spec is None:
        return f"names the module {module}, which cannot be found; check the spelling, or put its folder on PYTHONPATH"
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None  # compiled or built in: only importing it would tell
    names = _names_of(ast.parse(Path(spec.origin).read_text()))
    if "*" in names or name in names:
        return None
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {module}.{near[0]}?" if near else f"it has {', '.join(sorted(names)) or 'nothing'}"
    return f"names {name}, which {spec.origin} does not define; {hint}"


def _find_module(dotted: str) -> ModuleSpec | None:
    """importlib.util.find_spec would import the parent packages, and with them perhaps torch."""
    path = [*sys.path, str(Path.cwd())]
    spec = None
    for depth in range(1, dotted.count(".") + 2):
        spec = PathFinder.find_spec(".".join(dotted.split(".")[:depth]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec


def _names_of(module: ast.Module) -> set[str]:
    """Names that the module's top level binds, also under `if` and `try`; "*" when it imports all of another."""
    names = set[str]()
    statements: list[ast.AST] = list(module.body)
    while statements:
        node = statements.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            statements += ast.iter_child_nodes(node)
    return names


def may_be_hub_name(path: str) -> bool:
    """`owner/name` or `name` may be on the hub; a path in a folder that exists here is a misspelt file."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) is not None and not Path(path.split("/")[0]).exists()


def tokenizer_difference(first: Path, second: Path) -> str | None:
    """How the tokenizers of two folders differ, None when they are the same or one cannot be read without loading it.

    Padding, truncation and post-processing may differ: they do not change which text an id stands for.
    """
    files = [folder / "tokenizer.json" for folder in (first, second)]
    if not all(file.is_file() for file in files):
        return None
    ours, theirs = (json.loads(file.read_text()) for file in files)
    sizes = [len(tokenizer["model"].get("vocab", ())) for tokenizer in (ours, theirs)]
    if sizes[0] != sizes[1]:
        return f"vocabularies of {sizes[0]} and {sizes[1]} tokens"
    for key, what in (("model", "tokens or merges"), ("normalizer", "normalisation"), ("pre_tokenizer", "splitting")):
        if ours.get(key) != theirs.get(key):
            return f"other {what}"
    added = [{(t["id"], t["content"]) for t in tokenizer.get("added_tokens", [])} for tokenizer in (ours, theirs)]
    return None if added[0] == added[1] else "other special tokens"

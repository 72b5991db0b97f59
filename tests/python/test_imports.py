"""The modules of the package import each other at their tops and in one direction."""

import ast
import importlib.util
import pathlib
import subprocess
import sys

import pytest

import halftone

FOLDER = pathlib.Path(halftone.__file__).parent
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")

# Imports the module argv[2] of the folder argv[1] as the first one: the package's __init__, which would import the others
# in an order that suits them, does not run.
ALONE = """
import importlib, sys, types
package = types.ModuleType("halftone")
package.__path__ = [sys.argv[1]]
sys.modules["halftone"] = package
importlib.import_module("halftone." + sys.argv[2])
"""


def imports_of(tree):
    """(imported module of the package, whether at the top) of every import statement."""
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if not node.level and node.module and node.module.partition(".")[0] != "halftone" or node.level > 1:
                continue
            path = (node.module or "").removeprefix("halftone").strip(".")
            names = [path.partition(".")[0]] if path else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name.split(".")[1] for a in node.names if a.name.startswith("halftone.")]
        else:
            continue
        for name in names:
            if name in MODULES:
                yield name, id(node) in top


def circle(graph):
    """The names along a circle of ``graph``, or an empty list."""
    done = set()

    def walk(name, path):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        found = next(filter(None, (walk(other, [*path, name]) for other in sorted(graph[name]))), [])
        done.add(name)
        return found

    return next(filter(None, (walk(name, []) for name in sorted(graph))), [])


def test_no_circle_and_no_import_hidden_in_a_function():
    graph, hidden = {}, []
    for name in MODULES:
        found = list(imports_of(ast.parse((FOLDER / f"{name}.py").read_text())))
        graph[name] = {other for other, _ in found}
        hidden += [f"{name} imports {other} in a function" for other, at_top in found if not at_top]
    assert graph["cache"] >= {"_arrays", "spec"} and "cache" in graph["convert"]  # the walk sees imports
    assert hidden == []
    assert circle(graph) == []


@pytest.mark.parametrize(
    "source, expected",
    [
        ("from . import cache, errors", {("cache", True), ("errors", True)}),
        ("from .cache import x\nimport json", {("cache", True)}),
        ("def f():\n    from halftone.cache import x", {("cache", False)}),
        ("import halftone.spec as s\nfrom json import cache", {("spec", True)}),
    ],
)
def test_the_walk_sees_every_kind_of_import(source, expected):
    assert set(imports_of(ast.parse(source))) == expected


def test_the_walk_finds_a_circle():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported_first(name):
    if name == "torch" and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    subprocess.run([sys.executable, "-c", ALONE, str(FOLDER), name], check=True, timeout=120)


ROOMS = {"transformers", "capture"}  # adapters of frameworks


def relative_imports(path):
    """(level, module, names) of every relative import of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node.level, node.module or "", [alias.name for alias in node.names]


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_rooms_use_what_users_have(room):
    """Only public names, and only the version check of the house; no circle inside."""
    graph = {}
    for path in sorted((FOLDER / room).glob("*.py")):
        found = list(relative_imports(path))
        graph[path.stem] = {module for level, module, _ in found if level == 1 and module}
        for level, module, names in found:
            if level == 2:
                assert module == "_transformers" or (not module and set(names) <= {*halftone.__all__, "Error"}), path
            assert level <= 2
    assert len(graph) > 3 and circle(graph) == []


def test_nobody_needs_a_room():
    for name in MODULES:
        for _, module, names in relative_imports(FOLDER / f"{name}.py"):
            assert not {module.partition(".")[0], *names} & ROOMS, name

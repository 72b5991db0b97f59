"""Writes docs/python.md from the docstrings of the Python package: python_reference.py [--check].

Needs an importable halftone (PYTHONPATH=python and HALFTONE_PYTHON_LIBRARY, or an installed wheel). With --check it
writes nothing and fails when the page is not up to date.
"""

import ast
import inspect
import json
import pathlib
import re
import sys

import check_prose
import halftone as ht
from halftone import cache_io, errors

PAGE = pathlib.Path(__file__).parents[1] / "docs/python.md"
SECTIONS = {
    "Formats and geometry": [ht.KVFormat, ht.KVCacheSpec, ht.KVSpan, ht.KVTensors],
    "The cache": [ht.PagedKVCache, ht.LayeredKVCache, ht.Rope, ht.dequantize, cache_io.save, cache_io.load],
    "Formats of a model's layers": [ht.load_recipe, ht.Recipe, ht.RecipeLayer],
    "Attention": [ht.plan, ht.Plan, ht.schedule, ht.Schedule, ht.attend, ht.attend_listed, ht.merge],
    "Scales and foreign rows": [
        ht.calibrate,
        ht.calibrate_channels,
        ht.import_fbgemm_int4,
        ht.export_fbgemm_int4,
        ht.import_flash_mla_lse,
        ht.export_flash_mla_lse,
    ],
}
# Modules that are read as text: heading, module, and its files with the names that they give.
SOURCES = [
    ("torch.compile", "torch", [("torch.py", None)]),
    (
        "transformers",
        "transformers",
        [
            ("transformers/__init__.py", ()),
            ("transformers/attention.py", ("register",)),
            ("transformers/cache.py", ("HalftoneCache",)),
        ],
    ),
    ("Captures", "capture", [("capture/__init__.py", ()), ("capture/run.py", ("capture", "Summary"))]),
    ("Recipes", "recipe", [("recipe/__init__.py", ()), ("recipe/quality.py", ("measure", "Report", "Quality"))]),
]
INTRO = """# Python

The package `halftone-attention` (import `halftone`): the reference, made from the docstrings by
`scripts/python_reference.py`. [README.md](../README.md#in-python) has a quick start,
[python/examples/](../python/examples/) whole programs.

Arrays are those of NumPy, torch, JAX (on the CPU) and CuPy, or anything else with DLPack. They are never copied, except
read-only NumPy inputs and lazily negated torch tensors. Results come in the framework of the input and on its device, or in an array given as `out`.
CUDA work is queued on the framework's current stream and nothing synchronises, unless a sentence below says so.
Shapes are written [outer, ..., inner]. NumPy's bfloat16 is that of `ml_dtypes`.

Calls release Python's lock. Threads can share plans and read one cache; a `Schedule` serves one call at a time, and so
does a cache that is written. Caches wrapped for several layers must not advance one array of lengths together, which
a `LayeredKVCache` sees to. [sequences.md](sequences.md) explains how requests share pages.

A long call on the CPU ends early, within a fraction of a second, when a signal handler raises: Ctrl-C gives
`KeyboardInterrupt`. What the call was to write is then unspecified; the cache's lengths have not advanced, and the next
call works. In a process forked after calls on several threads (the `fork` method of `multiprocessing`) calls run on one
thread, with the same bits.

"""


def text_of(item):
    """A docstring in Markdown: sections become bold words, roles and double backticks become code."""
    doc = inspect.getdoc(item) or ""
    doc = re.sub(r":(?:func|meth|class|attr):`~?(?:halftone\.)?([^`]+)`", r"`\1`", doc).replace("``", "`")
    lines = []
    for line in doc.splitlines():
        heading = re.fullmatch(r"(Args|Returns|Raises|Attributes):(.*)", line)
        if heading:
            lines += ["", f"**{heading[1]}**" + heading[2], ""]
        elif re.match(r"    (?! )[\w, .`]+: ", line):
            name, _, rest = line.strip().partition(": ")
            lines.append(f"- `{name}`: {rest}")
        elif line.startswith("    ") and line.strip():
            lines.append("  " + line.strip() if line.startswith("        ") else "- " + line.strip())
        else:
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def signature_of(name, item):
    """The call as one would write its declaration: every Python version prints it alike."""
    parts, star = [], False
    for parameter in inspect.signature(item).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        text = parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {parameter.annotation}"
        if parameter.default is not parameter.empty:
            default = parameter.default
            text += " = " + (json.dumps(default) if isinstance(default, str) else repr(default))
        parts.append(text)
    returned = inspect.signature(item).return_annotation
    tail = "" if inspect.isclass(item) or returned is inspect.Signature.empty else f" -> {returned}"
    text = f"{name}({', '.join(parts)}){tail}"
    return text if len(text) <= 100 else f"{name}(\n" + "".join(f"    {p},\n" for p in parts) + f"){tail}"


def members_of(cls, shown):
    """Its own members and those of private bases, unless ``shown`` has them of another class."""
    private = [base for base in cls.__mro__[1:] if base.__module__.startswith("halftone._")]
    members = {}
    for base in (cls, *private):
        members = {**members, **{name: x for name, x in vars(base).items() if name not in members}}
    for name, member in members.items():
        if name.startswith("_") or name == "key" or shown.get(name) is member:
            continue
        shown[name] = member
        if isinstance(member, (property,)) or type(member).__name__ == "cached_property":
            yield f"{cls.__name__}.{name}", None, member
        elif isinstance(member, (staticmethod, classmethod)):
            yield f"{cls.__name__}.{name}", getattr(cls, name), member.__func__
        elif inspect.isfunction(member):
            yield f"{cls.__name__}.{name}", member, member


def entry(level, name, call, doc):
    code = f"```python\n{signature_of(name, call)}\n```\n\n" if call is not None else ""
    return f"{'#' * level} {name}\n\n{code}{text_of(doc)}\n\n"


def page():
    text, shown = INTRO, {}
    for section, items in SECTIONS.items():
        text += f"## {section}\n\n"
        for item in items:
            name = item.__name__ if not inspect.isfunction(item) or hasattr(ht, item.__name__) else (
                f"{item.__module__.removeprefix('halftone.')}.{item.__name__}"
            )  # fmt: skip
            constructed = inspect.isclass(item) and item in (ht.Plan, ht.Schedule)  # by plan() and schedule()
            text += entry(3, name, None if constructed else item, item)
            if inspect.isclass(item):
                for member_name, call, doc in members_of(item, shown):
                    text += entry(4, member_name, call, doc)
    text += "## Errors\n\n" + text_of(errors) + "\n\n| class | is also a | raised for |\n| --- | --- | --- |\n"
    for name, cls in vars(errors).items():
        if name.endswith("Error") and name != "Error":
            text += f"| `{cls.__name__}` | `{cls.__mro__[2].__name__}` | {text_of(cls)} |\n"
    return text + "\n" + "".join(source_section(*section) for section in SOURCES)


def source_section(heading, module, files):
    """A module of halftone, read without importing it: torch and transformers need not be there.

    ``files`` are pairs: a file of the module, and the names that it gives, None for all public ones.
    """
    folder = pathlib.Path(ht.__file__).parent
    first = ast.parse((folder / files[0][0]).read_text())
    text = f"## {heading}\n\n{documented(first)}\n\n"
    for file, names in files:
        for node in ast.parse((folder / file).read_text()).body:
            public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if public and ast.get_docstring(node) and (names is None or node.name in names):
                text += source_entry(3, f"{module}.{node.name}", node)
                if isinstance(node, ast.ClassDef) and names is not None:
                    methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
                    text += "".join(source_entry(4, f"{node.name}.{method.name}", method) for method in methods)
    return text


def source_entry(level, name, node):
    where = next((n for n in getattr(node, "body", ()) if getattr(n, "name", "") == "__init__"), node)
    is_property = any(getattr(d, "id", "") == "property" for d in getattr(node, "decorator_list", ()))
    call = ""
    if hasattr(where, "args") and not is_property:
        arguments = re.sub(r"^self(, )?", "", ast.unparse(where.args))
        text = f"{name}({arguments})"
        if len(text) > 100:
            parts = re.split(r", (?![^\[]*\])", arguments)  # not at the commas within brackets
            text = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + ")"
        call = f"```python\n{text}\n```\n\n"
    return f"{'#' * level} {name}\n\n{call}{documented(node)}\n\n"


def documented(node):
    return text_of(type("Holder", (), {"__doc__": ast.get_docstring(node)}))


def main():
    text = check_prose.wrap(page().rstrip() + "\n")
    if "--check" in sys.argv[1:]:
        if PAGE.read_text() != text:
            sys.exit(f"{PAGE} is not up to date: run scripts/python_reference.py")
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()

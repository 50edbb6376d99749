#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/python.md: the signatures and docstrings of the package epkit. With --check: says whether it is up to date.

It reads the source, so it needs no torch. The page has what epkit.__all__ names, epkit.balance and epkit.ops.
"""
import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "epkit"
PAGE = ROOT / "docs" / "python.md"
ORDER = ("Communicator", "Members", "Plan", "Rows", "Metadata", "LowLatency", "LowLatencyRows", "dispatch", "combine", "moe")


def docstring(node):
    """Its text; argument lists, which are indented, as code, so that their lines stay."""
    lines, code = [], False
    for line in (ast.get_docstring(node) or "").split("\n"):
        deep = line.startswith("    ") or (code and not line)
        if deep != code:
            while lines and not lines[-1]:
                lines.pop()
            lines += ["", "```text"] if deep else ["```", ""]
            code = deep
        lines.append(line[4:] if deep else re.sub(r"(`[^`]*`)|([<>*|_])", lambda one: one[1] or "\\" + one[2], line))
    while lines and not lines[-1]:
        lines.pop()
    return "\n".join(lines + (["```"] if code else [])).replace("::\n", ":\n")


def signature(name, function, method):
    arguments = function.args
    if method:
        arguments.args = arguments.args[1:]
    return f"{name}({ast.unparse(arguments)})"


def is_static(node):
    return any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in node.decorator_list)


def is_property(node):
    return any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list)


def class_text(node):
    methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
    init = next((one for one in methods if one.name == "__init__"), None)
    fields = [f"{one.target.id}: {ast.unparse(one.annotation)}" for one in node.body if isinstance(one, ast.AnnAssign)]
    made = node.name not in ("Plan", "LowLatency")  # those are made by a Communicator
    yield f"## {node.name}\n"
    if init is not None and made:
        yield f"```python\n{signature(node.name, init, True)}\n```\n"
    elif fields and init is None:
        yield "```python\n" + f"{node.name}({', '.join(fields)})" + "\n```\n"
    yield docstring(node) + "\n"
    for one in methods:
        if one.name.startswith("_") or not ast.get_docstring(one):
            continue
        what = one.name if is_property(one) else signature(one.name, one, not is_static(one))
        yield f"### {node.name}.{one.name}\n\n```python\n{what}\n```\n\n{docstring(one)}\n"


def page():
    found = {}
    for source in sorted(PACKAGE.glob("*.py")):
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                found.setdefault(node.name, node)
    yield "<!-- Written by scripts/python_page.py from the docstrings of python/epkit. -->\n# The Python package epkit\n"
    yield docstring(ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))) + "\n"
    yield ("Errors are `epkit.Error` (`status`, `name`, `hint`) and its classes `ArgumentError`, `ResourceError`, `PeerError`, "
           "`GroupError`\nand `UnsupportedError`. [migration.md](migration.md) is about `epkit.compat.deep_ep`.\n")
    for name in ORDER:
        node = found[name]
        if isinstance(node, ast.ClassDef):
            yield from class_text(node)
        else:
            yield f"## {name}\n\n```python\n{signature('epkit.' + name, node, False)}\n```\n\n{docstring(node)}\n"
    for module in ("balance", "ops"):
        tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
        yield f"## epkit.{module}\n\n{docstring(tree)}\n"
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and ast.get_docstring(node):
                call = signature(f"epkit.{module}.{node.name}", node, False)
                yield f"### epkit.{module}.{node.name}\n\n```python\n{call}\n```\n\n{docstring(node)}\n"


def main(words):
    text = "\n".join(page())
    if words == ["--check"]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            sys.exit(f"{PAGE.relative_to(ROOT)} is not what the docstrings say: run scripts/python_page.py")
    elif words:
        sys.exit(__doc__)
    else:
        PAGE.write_text(text, encoding="utf-8")


main(sys.argv[1:])

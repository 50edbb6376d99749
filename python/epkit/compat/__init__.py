# SPDX-License-Identifier: Apache-2.0
"""Packages with the interface of others: epkit.compat.deep_ep is DeepEP's, epkit.compat.nixl_ep that of NIXL EP.

Each can be imported under this name. Under its own name, which programs import, it is a distribution of its own
(epkit-deep-ep), because several distributions have a package of that name: pip installs all of them side by side.
"""
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import sys
import warnings
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Iterator, List

# Name -> whether a wheel without files can take the place of another distribution that has it. Those of nixl_ep have more.
NAMES = {"deep_ep": True, "deep_ep_v25": True, "nixl_ep": False}


def stand_in(name: str) -> None:
    """Called by the module `name` while it is imported: the name means epkit.compat.NAME from now on, also that of each of its
    modules. Warns if another distribution has a package of this name, which this one hides."""
    alias(name, importlib.import_module(f"{__name__}.{name}"))
    for path in _paths(name):
        if not _is_own(path):
            warnings.warn(f"this {name} is epkit's. It hides {_described(path)}. {_advice(name, path)}", RuntimeWarning, stacklevel=3)
            return


def alias(name: str, own: ModuleType) -> None:
    """Makes `name` another name of the package `own`, also in the names of its modules."""
    for module in pkgutil.walk_packages(own.__path__, own.__name__ + "."):
        sys.modules[name + module.name[len(own.__name__):]] = importlib.import_module(module.name)
    sys.modules[name] = own


def who(name: str) -> str:
    """What a program gets that imports `name`, and why, as lines of text."""
    spec = importlib.util.find_spec(name)
    found = spec.origin if spec is not None else None
    others = [path for path in _paths(name) if path != found and not _is_own(path)]
    if found is not None and _is_own(found):
        lines = [f"{name}: epkit's, by {_described(found)}"]
        lines += [f"  it hides {_described(path)}" for path in others]
        lines += [f"  {_advice(name, path)}" for path in others[:1]]
        return "\n".join(lines)
    lines = [f"{name}: not installed" if found is None else f"{name}: not epkit's, but {_described(found)}"]
    if found is not None and len(_owners(found)) > 1:
        lines.append("  These distributions have files in common: the last to be installed has overwritten those of the others, and "
                     "removing one breaks the rest. Remove all of them, and install one")
    lines += [f"  it hides {_described(path)}" for path in others]
    lines.append(f"  epkit's is epkit.compat.{name}; to import it as {name}, install {_distribution(name)}")
    return "\n".join(lines)


def _distribution(name: str) -> str:
    return f"epkit-{name.replace('_', '-')}"


def _paths(name: str) -> Iterator[str]:
    """The file of each module or package of this name, in the order of sys.path."""
    for folder in sys.path:
        spec: "ModuleSpec | None" = PathFinder.find_spec(name, [folder or os.getcwd()])
        if spec is not None and spec.origin is not None:  # None: a folder without __init__.py
            yield spec.origin


def _is_own(path: str) -> bool:
    if path.startswith(os.path.dirname(__file__) + os.sep):  # stand_in() has been called
        return True
    if not path.endswith(".py"):
        return False
    with open(path, encoding="utf-8", errors="replace") as file:
        return "epkit.compat" in file.read()


def _owners(path: str) -> List[str]:
    """The distributions that have installed this file: name and version."""
    owners = []
    for one in importlib.metadata.distributions():
        base = str(one.locate_file(""))
        if path.startswith(base + os.sep) and f"\n{os.path.relpath(path, base)}," in "\n" + (one.read_text("RECORD") or ""):
            owners.append(f"{one.metadata['Name']} {one.version}")
    return sorted(owners)


def _described(path: str) -> str:
    owners = _owners(path)
    return f"{path} of {' and '.join(owners)}" if owners else f"{path}, which no distribution owns"


def _advice(name: str, path: str) -> str:
    owners = [owner.split()[0] for owner in _owners(path)]
    if not owners:
        return f"To keep one: pip uninstall {_distribution(name)}, or take that folder from sys.path"
    if not NAMES[name]:
        return f"To have theirs: pip uninstall {_distribution(name)}"
    return (f"To keep one: pip uninstall {_distribution(name)}, or pip uninstall {' '.join(owners)}; where another package requires "
            f"{owners[0]}, install in its place the wheel without files that scripts/wheel.sh --for makes")

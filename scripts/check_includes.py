#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check every #include against the allowed directions in ARCHITECTURE.md.

usage: check_includes.py [ROOT]

Reads two tables, each the first one after its marker comment. "directions": which folders and files the code of a
folder may include in addition to its own. "foreign": where the headers of other libraries may appear. The row with the
longest matching path counts. Prints one line for each violation, and exits with 1 if there is any.
"""
import re
import sys
from pathlib import Path

INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.MULTILINE)
SUFFIXES = {".c", ".h", ".cu", ".cuh"}


def read_table(text, marker):
    """Rows of the table after <!-- marker -->: {first column: [entries of the second column]}."""
    start = text.find(f"<!-- {marker} -->")
    if start < 0:
        sys.exit(f"ARCHITECTURE.md: no table marked '{marker}'")
    rows = {}
    for line in text[start:].splitlines()[1:]:
        if not line.startswith("|"):
            if rows:
                break
            continue
        cells = [re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")]
        if len(cells) >= 2 and cells[0]:
            for name in cells[0]:
                rows[name] = cells[1]
    if not rows:
        sys.exit(f"ARCHITECTURE.md: the table '{marker}' is empty")
    return rows


def is_below(path, folder):
    return path == folder or path.startswith(folder + "/")


def row_of(path, table):
    rows = [name for name in table if is_below(path, name)]
    return max(rows, key=len) if rows else None


def resolve(root, source, name, quoted):
    """Path of an included header of ours relative to root, or None for one of another project."""
    folders = [source.parent] if quoted else []
    for folder in folders + [root, root / "lib", root / "include"]:
        header = (folder / name).resolve()
        if header.is_file() and header.is_relative_to(root):
            return header.relative_to(root).as_posix()
    return None


def check_file(root, source, directions, foreign):
    path = source.relative_to(root).as_posix()
    own = row_of(path, directions)
    text = source.read_text()

    for match in INCLUDE.finditer(text):
        quoted, name = match.group(1) == '"', match.group(2)
        where = f"{path}:{text.count(chr(10), 0, match.start(2)) + 1}"
        header = resolve(root, source, name, quoted)
        if header is None:
            if quoted:
                yield f'{where}: "{name}" is not in the tree'
            elif row_of(name, foreign) and not any(is_below(path, allowed) for allowed in foreign[row_of(name, foreign)]):
                yield f"{where}: <{name}> is not allowed here"
            continue
        if own is None:
            yield f"{where}: ARCHITECTURE.md has no row for this folder"
        elif row_of(header, directions) != own and not any(is_below(header, allowed) for allowed in directions[own]):
            yield f"{where}: {own} must not include {header}"


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    text = (root / "ARCHITECTURE.md").read_text()
    directions, foreign = read_table(text, "directions"), read_table(text, "foreign")
    sources = [
        source
        for folder in ("include", "lib", "common", "machine", "cmd", "python", "examples")
        for source in sorted((root / folder).rglob("*"))
        if source.suffix in SUFFIXES
    ]
    violations = [line for source in sources for line in check_file(root, source, directions, foreign)]

    print("\n".join(violations) if violations else f"{len(sources)} files, all includes in the allowed directions")
    sys.exit(1 if violations or not sources else 0)


if __name__ == "__main__":
    main()

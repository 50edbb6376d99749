#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the binary interface of libepkit with the committed table: exported symbols, prototypes, the layout of
every public struct, and the values of all constants.

    check_abi.py LIBRARY TABLE HEADER...             exit 1 and a diff if they differ
    check_abi.py --update LIBRARY TABLE HEADER...    write the table

A struct may grow at its end, and functions may be added; any other difference breaks existing programs. Layouts come
from the compiler ($CC, else cc): a program generated from the headers prints offsets and sizes. Only for machines with
8-byte pointers, the only ones that epkit supports.
"""
import difflib
import os
import re
import subprocess
import sys
import tempfile


def read_header(path):
    with open(path, encoding="utf-8") as file:
        text = file.read()
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"\\\n", " ", text)
    return text


def fields_of(body):
    """Names of the fields of a struct without nested ones."""
    names = []
    for declaration in body.split(";"):
        declaration = declaration.strip()
        if not declaration:
            continue
        for part in declaration.split(","):
            match = re.search(r"(\w+)\s*(\[[^\]]*\]\s*)*$", part.strip())
            if not match:
                sys.exit(f"check_abi.py: cannot read the field \"{declaration}\"")
            names.append(match.group(1))
    return names


def structs_of(text):
    return [(name, fields_of(body))
            for body, name in re.findall(r"typedef\s+struct\s+\w+\s*\{([^{}]*)\}\s*(\w+)\s*;", text)]


def constants_of(text):
    """Constants of enums, except those that a macro generates."""
    names = []
    for body in re.findall(r"\benum\s*\w*\s*\{([^{}]*)\}", text):
        for item in re.sub(r"^\s*#.*$", "", body, flags=re.M).split(","):
            match = re.match(r"\s*(EP_\w+)\s*(=|$)", item)
            if match:
                names.append(match.group(1))
    names += re.findall(r"^#define\s+(EP_MAX_\w+|EP_SCALE_BLOCK|EP_VERSION_MAJOR)\s+\d+\s*$", text, flags=re.M)
    names += re.findall(r"^\s*X\((EP_\w+),\s*\d+", text, flags=re.M)
    names += re.findall(r"X\((EP_\w+),\s*\d+", text)
    return sorted(set(names))


def prototypes_of(text):
    found = re.findall(r"\bEP_API\s+([^;{]*?\))\s*;", text)
    callbacks = re.findall(r"\btypedef\s+([^;{]*?\(\*\w+\)\s*\([^;{]*\))\s*;", text)
    return sorted(re.sub(r"\s+", " ", one).strip() for one in found + callbacks)


def layouts(headers, texts):
    """Layouts of the structs and values of the constants, by the compiler, one line each."""
    lines = ["#include <stddef.h>", "#include <stdio.h>"]
    lines += [f'#include "{os.path.abspath(header)}"' for header in headers]
    lines += ["int main(void)", "{"]
    for name, fields in sorted(struct for text in texts for struct in structs_of(text)):
        lines.append(f'printf("struct {name}: %zu bytes\\n", sizeof({name}));')
        for field in fields:
            lines.append(f'printf("    %4zu %3zu {field}\\n", offsetof({name}, {field}), '
                         f'sizeof((({name} *)0)->{field}));')
    for name in sorted(set(constant for text in texts for constant in constants_of(text))):
        lines.append(f'printf("constant {name} %lld\\n", (long long){name});')
    lines += ["return 0;", "}"]
    with tempfile.TemporaryDirectory() as folder:
        source, program = os.path.join(folder, "abi.c"), os.path.join(folder, "abi")
        with open(source, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        include = os.path.join(os.path.dirname(os.path.abspath(headers[0])), "..")
        subprocess.run([os.environ.get("CC", "cc"), "-std=c17", "-I", include, source, "-o", program], check=True)
        return subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()


def symbols_of(library):
    out = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    found = re.findall(r"^[0-9a-f]+ [TDRBV] (\w+)@@(EPKIT_[0-9.]+)$", out, flags=re.M)
    return sorted(f"symbol {name} {node}" for name, node in found)


def main():
    arguments = sys.argv[1:]
    update = arguments[:1] == ["--update"]
    arguments = arguments[update:]
    if len(arguments) < 3:
        sys.exit(__doc__)
    library, table, headers = arguments[0], arguments[1], sorted(arguments[2:])
    texts = [read_header(header) for header in headers]
    made = symbols_of(library)
    made += sorted("prototype " + one for text in texts for one in prototypes_of(text))
    made += layouts(headers, texts)
    made = [line + "\n" for line in made]
    if update:
        with open(table, "w", encoding="utf-8") as file:
            file.writelines(made)
        return 0
    with open(table, encoding="utf-8") as file:
        committed = file.readlines()
    if made == committed:
        return 0
    sys.stdout.writelines(difflib.unified_diff(committed, made, table, "this build", n=2))
    return 1


sys.exit(main())

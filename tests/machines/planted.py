#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants what identifies people and machines in everything that epkit has read of a machine.

usage: planted.py TREE SNAPSHOT

SNAPSHOT is one of the machine below TREE: it names what was read, also what a later version reads. Each file below TREE
gets lines with an identifier of each kind, in the forms in which configuration files, programs and logs have them, and
each folder that was listed gets files that are called so. Prints what must not be in a snapshot of the result.
"""
import json
import os
import sys

import identifiers

KINDS = ("host name", "user name", "mail address", "token", "access key", "IPv4 address", "IPv6 address", "MAC address",
         "GID", "UUID", "second user", "domain", "secret key", "private key", "GUID", "GUID without colons", "IPv6 GID",
         "file system", "company", "hosts of a list")
FORMS = ("# {}", "{}", "KEY={}", "KEY=\"{}\"", "key: {}", "\"key\": \"{}\",", "export key='/home/{}/lib'", "a {} b",
         "path=/data/{}/x:{}", "<{}>", "({})", "{}: 1")


def lines():
    for kind in KINDS:
        mark = identifiers.MARKS[kind]
        for form in FORMS:
            yield form.replace("{}", mark)
    # What has no form of its own is known by what stands before it.
    yield f"Serial Number: {identifiers.MARKS['board']}"


def is_text(path):
    with open(path, "rb") as file:
        content = file.read(4096)
    return b"\x7fELF" not in content and b"\0" not in content


def plant(tree, snapshot):
    read = json.load(snapshot)
    paths = set(read["files"]) | {key.split("\t")[0] for key in read["lines"]}
    n_files = n_names = 0
    for path in sorted(paths):
        real = os.path.realpath(tree + path)
        # What is no file of the tree is an answer of the overlay, or not there.
        if not real.startswith(os.path.realpath(tree) + "/") or not os.path.isfile(real) or not is_text(real):
            continue
        with open(real, "a", encoding="utf-8", errors="surrogateescape") as file:
            file.write("".join(line + "\n" for line in lines()))
        n_files += 1
    for folder in sorted(read["folders"]):
        real = os.path.realpath(tree + folder)
        if not os.path.isdir(real) or folder.startswith(("/sys", "/proc", "/dev")):
            continue
        for kind in KINDS:
            mark = identifiers.MARKS[kind]
            for name in (mark, f"{mark}.conf", f"lib{mark}.so.1", f"99-{mark}.driver", f"{mark}.dist-info"):
                with open(f"{real}/{name}", "w", encoding="utf-8"):
                    n_names += 1
    if n_files < 50 or n_names < 50:
        sys.exit(f"planted.py: only {n_files} files and {n_names} names")
    print("\n".join([identifiers.MARKS[kind] for kind in KINDS] + [identifiers.MARKS["board"]]))


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    with open(sys.argv[2], encoding="utf-8") as opened:
        plant(sys.argv[1], opened)

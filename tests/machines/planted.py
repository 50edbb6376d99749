#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants what identifies people and machines in everything that epkit has read of a machine.

usage: planted.py [--replace] TREE SNAPSHOT

SNAPSHOT is one of the machine below TREE: it names what was read, also what a later version reads. Each file below TREE
gets lines with an identifier of each kind, in the forms in which configuration files, programs and logs have them, and
each folder that was listed gets files that are called so. With --replace lines of each file come again, a word of theirs
replaced by an identifier in a form that tools write, and files of one word become one. Prints what must not be in a
snapshot of the result.
"""
import functools
import itertools
import json
import os
import re
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


def files_read(tree, read):
    """Paths of files of text that were read, and where they are."""
    root, real_folder = os.path.realpath(tree), functools.lru_cache(maxsize=None)(os.path.realpath)
    for path in sorted(set(read["files"]) | {key.split("\t")[0] for kind in ("lines", "facts") for key in read[kind]}):
        real = f"{real_folder(root + os.path.dirname(path))}/{os.path.basename(path)}"
        if os.path.islink(real):
            real = os.path.realpath(real)
        # What is no file of the tree is an answer of the overlay, or not there.
        if real.startswith(root + "/") and os.path.isfile(real) and is_text(real):
            yield path, real


def is_counter(path):
    """Its number may be any, so none identifies anybody."""
    return any(part in path for part in ("/counters/", "/hw_counters/", "/statistics/", "/meminfo", "/proc/self/limits"))


def replaced(text, marks):
    """Lines with a word replaced: the first, one in the middle, the last; and with something behind."""
    for line in text.split("\n")[:60]:
        words = re.findall(r"[^\s=:,;\"'()<>]+", line)
        for word in dict.fromkeys((words[0], words[len(words) // 2], words[-1])) if words else ():
            for _ in range(3):
                yield line.replace(word, next(marks))
            yield f"{line} {next(marks)}"
            yield line.replace(word, f"{word}-{next(marks)}")


def replace(tree, snapshot):
    marks = itertools.cycle(identifiers.FORMS.values())
    n_files = 0
    for path, real in files_read(tree, json.load(snapshot)):
        if is_counter(path):
            continue
        with open(real, encoding="utf-8", errors="surrogateescape") as file:
            text = file.read()
        with open(real, "a" if len(text) >= 40 else "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write("\n".join(replaced(text, marks) if len(text) >= 40 else [next(marks)]) + "\n")
        n_files += 1
    variables = ("NCCL_DEBUG_FILE", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_TOPO_FILE", "NCCL_NET_PLUGIN",
                 "NVSHMEM_X", "NVSHMEM_HCA_LIST", "UCX_NET_DEVICES", "SLURM_JOB_NODELIST", "MASTER_ADDR", "LD_LIBRARY_PATH", "PATH",
                 "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "DEEP_EP_DEVICE_TO_HCA_MAPPING", "OMPI_COMM_WORLD_RANK", "TOKEN")
    with open(f"{tree}/proc/self/environ", "ab") as environ:
        for name, mark in itertools.product(variables, identifiers.FORMS.values()):
            environ.write(f"{name}={mark}\0".encode())
    if n_files < 50:
        sys.exit(f"planted.py: only {n_files} files")
    print("\n".join(identifiers.FORMS.values()))


def plant(tree, snapshot):
    read, text = json.load(snapshot), "".join(line + "\n" for line in lines())
    n_files = n_names = 0
    for _, real in files_read(tree, read):
        with open(real, "a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
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
    sys.dont_write_bytecode = not sys.pycache_prefix  # nothing beside the sources
    with open(sys.argv[-1], encoding="utf-8") as opened:
        (replace if sys.argv[1] == "--replace" else plant)(sys.argv[-2], opened)

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""written.py EPKIT TRACE: what processes of epkit have made, opened for writing, renamed and changed in mode, one name a
line, from the output of `strace -f -y`; what programs that it started do is theirs. "new": with O_CREAT, O_EXCL and
O_NOFOLLOW. Random parts of names are XXXXXX, numbers of processes and descriptors N."""
import collections
import os
import re
import sys

CALL = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+)")
TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')
STARTS = ("clone", "clone3", "fork", "vfork")
FLAGS = ("O_RDWR", "O_WRONLY", "O_CREAT", "O_EXCL", "O_NOFOLLOW", "O_TRUNC", "O_APPEND", "O_NONBLOCK")


def calls(trace):
    """(process, call, arguments, result) of those that succeeded, in the order in which they returned."""
    begun = {}
    for line in open(trace, encoding="utf-8", errors="replace"):
        if line.endswith("<unfinished ...>\n"):
            begun[line.split()[0]] = line[:-len("<unfinished ...>\n")]
            continue
        resumed = re.match(r"(\d+) +<\.\.\. \w+ resumed>(.*)", line, re.S)
        if resumed:
            line = begun.pop(resumed[1], resumed[1] + " lost(") + resumed[2]
        call = CALL.match(line)
        if call and int(call[4]) >= 0:
            yield call[1], call[2], call[3], call[4]


def paths(arguments):
    """The names among the arguments, each with the folder whose descriptor is in front of it."""
    found, folder = [], ""
    for part in re.finditer(r'(?:AT_FDCWD|\d+)<([^>]*)>|"((?:[^"\\]|\\.)*)"', arguments):
        if part[2] is None:
            folder = part[1]
        else:
            found.append(os.path.normpath(os.path.join(folder, part[2])))
            folder = ""
    return found or [folder]


def shown(path):
    path = os.path.relpath(path) if path.startswith(os.getcwd()) else path
    path = re.sub(r"(?<=-)[A-Za-z0-9]{6}(?=/|$)", "XXXXXX", path)
    path = re.sub(r"\d{8}T\d{6}Z", "TIME", path)
    path = re.sub(r"(socket:\[)\d+(?=\])|(?<=/)\d+(?=/|$)", lambda at: (at[1] or "") + "N", path)
    return re.sub(r"(?<=epkit-launch-)[0-9a-f]{16}$", "N", path)


def step_of(call, arguments, names):
    """What the call did to the first name; None: it was opened to be read."""
    octal = re.search(r", 0(\d+)$", arguments)
    mode = " " + octal[1].zfill(4) if octal else ""
    if call not in ("open", "openat", "openat2"):
        return call + mode + "".join(" " + shown(name) for name in names[1:])
    flags = [flag for flag in FLAGS if re.search(rf"\b{flag}\b", arguments)]
    if set(flags) <= {"O_NOFOLLOW", "O_NONBLOCK"}:
        return None
    return ("new" if {"O_CREAT", "O_EXCL", "O_NOFOLLOW"} <= set(flags) else "|".join(flags)) + mode


def main():
    epkit, parents, programs = os.path.realpath(sys.argv[1]), {}, collections.defaultdict(list)
    seen, steps = list(calls(sys.argv[2])), collections.defaultdict(list)
    for i, (process, call, arguments, result) in enumerate(seen):
        if call in STARTS:
            parents[result] = process
        elif call == "execve":
            programs[process].append((i, os.path.realpath(TEXT.search(arguments)[1]) == epkit))

    def is_epkit(process, i):
        before = [ours for at, ours in programs[process] if at < i]
        return before[-1] if before else is_epkit(parents[process], i) if process in parents else False

    for i, (process, call, arguments, _) in enumerate(seen):
        if call not in STARTS and call != "execve" and is_epkit(process, i):
            names = paths(arguments)
            step = step_of(call, arguments, names)
            if step and step not in steps[shown(names[0])]:
                steps[shown(names[0])].append(step)
    for name in sorted(steps):
        print(f"{name}: {', '.join(steps[name])}" if steps[name] else "", end="\n" if steps[name] else "")


main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Is each command line of epkit in the documents valid? Commands, actions, options and their values, recipes, and what
`--explain` explains are asked of the command itself.

documented.py EPKIT FILE...   prints each command that would be refused, with its place; the last line is their number
"""
import functools
import re
import shlex
import subprocess
import sys

ACTIONS = {
    "install": {"list", "show", "plan", "apply", "status", "verify", "resume", "uninstall"},
    "deploy": {"check", "why"},
    "test": {"intranode", "internode", "lowlatency"},
}
# Words that stand for something of the reader's: FILE, a4-[0-1], $COORD_POD, <host>, …
PLACEHOLDER = re.compile(r"^[A-Z_|]+$|[$<\[…*]")


@functools.cache
def ask(epkit, *arguments):
    return subprocess.run([epkit, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False,
                          timeout=600)


@functools.cache
def options(epkit, command):
    """Names of options, with what says whether they take a value."""
    found = {}
    for line in ask(epkit, "help", command).stdout.splitlines():
        match = re.match(r"^ +(?:(-\w), )?(--[a-z-]+)( [A-Z])?", line)
        if match:
            found[match[2]] = found[match[1] or match[2]] = bool(match[3])
    return found


def commands(text):
    """(line number, in a block, what is behind "epkit") of fenced blocks and of `code` within lines."""
    fenced, shell, pending, first = False, False, "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            shell = fenced and re.match(r"\s*```(sh|bash|yaml)", line) is not None
            continue
        if fenced and not shell:
            # What a command prints, with the command itself behind a prompt.
            pieces = [line[2:]] if line.startswith("$ ") else []
        elif fenced:
            first = first or number
            pending += line
            if pending.endswith("\\"):
                pending = pending[:-1]
                continue
            pieces, pending = [pending], ""
        else:
            pieces = re.findall(r"`([^`]+)`", line.replace("\\|", "|")) + re.findall(r"\*(epkit [^*]+)\*", line)
        for piece in pieces:
            for start in re.finditer(r"(?:^|[ (\"']|bin/|build[\w-]*/)epkit (?=[a-z-])", piece):
                # A sentence about epkit is no command: what is before it must be able to run one.
                before = piece[:start.start()].strip()
                if not fenced and before and not re.search(r"(sudo|--|srun.*|exec.*|wrap|\$|bin|\||[A-Z_]+=\S*)$", before):
                    continue
                yield first or number, fenced, re.split(r"[|;)>]| #|&&|'\s*$", piece[start.end():])[0].strip().strip("\"'")
        first = 0


def fault(epkit, names, line, whole):
    """Why the command would be refused, or None. One within a sentence may leave out the value of its last option."""
    try:
        words = shlex.split(line)
    except ValueError:
        return "quotes that do not match"
    command = words.pop(0)
    if command.startswith("-"):
        return None if command in ("--version", "--help", "-h") else f"no option {command}"
    if command not in names:
        return f"no command {command}"
    known, positional = options(epkit, command), []
    while words:
        word = words.pop(0)
        if word == "--" or word in ("…", "..."):
            break
        name, equals, value = word.partition("=")
        if word.startswith("-") and word != "-":
            if name not in known:
                return f"{command} has no option {name}"
            if known[name] and not equals:
                if not words and not whole:
                    break
                if not words:
                    return f"{name} lacks its value"
                value = words.pop(0)
            if PLACEHOLDER.search(value):
                continue
            if name == "--explain" and ask(epkit, command, name, value).returncode != 0:
                return f"nothing explains {value}"
            # What is before --help is parsed, values as well.
            given = [word] if equals or not known[name] else [name, value]
            if ask(epkit, command, *given, "--help").returncode != 0:
                return f"{command} does not take {' '.join(given)}"
            continue
        positional.append(word)
        if command in ("launch", "env") and not word.startswith("epkit-test"):
            break  # options after a program are the program's
    if positional and command in ACTIONS and positional[0] not in ACTIONS[command] and not PLACEHOLDER.search(positional[0]):
        return f"{command} has no {positional[0]}"
    if command == "install" and len(positional) > 1:
        recipe = positional[-1]
        if PLACEHOLDER.search(recipe) or "/" in recipe:
            return None
        if recipe not in ask(epkit, "install", "list").stdout.split():
            return f"no recipe {recipe}"
    return None


def main():
    epkit, files = sys.argv[1], sys.argv[2:]
    names = set(re.findall(r"^  ([a-z]+) ", re.search(r"Commands:\n(.*?)\n\n", ask(epkit, "help").stdout, re.S)[1], re.M))
    n = n_bad = 0
    for file in files:
        with open(file, encoding="utf-8") as stream:
            for number, whole, line in commands(stream.read()):
                n += 1
                why = fault(epkit, names, line, whole)
                if why:
                    n_bad += 1
                    print(f"{file}:{number}: epkit {line}: {why}")
    print(f"{n - n_bad} of {n} commands are taken")
    return 1 if n_bad or n == 0 else 0


if __name__ == "__main__":
    sys.exit(main())

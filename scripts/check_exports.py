#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare what a shared library exports with its version script and with the public headers.

usage: check_exports.py LIBRARY MAP HEADER...

Every function that a header marks EP_API must be exported under the public version node, and nothing else may be; every
name in the script must exist; nothing may be exported without a version.
"""
import fnmatch
import re
import subprocess
import sys


def read_map(path):
    """{version node: [patterns of its global part]}"""
    with open(path, encoding="utf-8") as file:
        text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.DOTALL)
    nodes = {}
    for name, body in re.findall(r"(\w[\w.]*)\s*\{(.*?)\}", text, flags=re.DOTALL):
        body = body.split("local:")[0].replace("global:", "")
        nodes[name] = [pattern.strip() for pattern in body.split(";") if pattern.strip()]
    return nodes


def read_exports(library):
    """{symbol: version node}"""
    output = subprocess.run(
        ["nm", "-D", "--defined-only", "--with-symbol-versions", library], check=True, capture_output=True, text=True
    ).stdout
    exports = {}
    for line in output.splitlines():
        kind, name = line.split()[-2:]
        symbol, _, version = name.partition("@")
        if kind != "A":  # the version nodes themselves
            exports[symbol] = version.lstrip("@")
    return exports


def read_api(headers):
    """Functions marked EP_API."""
    names = set()
    for header in headers:
        with open(header, encoding="utf-8") as file:
            text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.DOTALL)
        names.update(re.findall(r"^EP_API\b[^;(]*?\b(\w+)\(", text, flags=re.MULTILINE))
    return names


def matches(symbol, patterns):
    return any(fnmatch.fnmatchcase(symbol, pattern) for pattern in patterns)


def main():
    library, map_path, *headers = sys.argv[1:]
    nodes, exports, api = read_map(map_path), read_exports(library), read_api(headers)
    public = next(iter(nodes))
    wrong = []

    for symbol in sorted(api):
        if exports.get(symbol) != public:
            wrong.append(f"{symbol}: EP_API in a header, but not exported under {public}")
    for symbol, version in sorted(exports.items()):
        if version not in nodes or not matches(symbol, nodes[version]):
            wrong.append(f"{symbol}: exported under '{version}', which the version script does not say")
        elif version == public and symbol not in api:
            wrong.append(f"{symbol}: exported under {public}, but in no public header")
    for node, patterns in nodes.items():
        for pattern in patterns:
            if not any(version == node and matches(symbol, [pattern]) for symbol, version in exports.items()):
                wrong.append(f"{pattern}: in the version script, but nothing is exported for it")

    print("\n".join(wrong) if wrong else f"{len(exports)} exported symbols, {len(api)} of them public")
    sys.exit(1 if wrong or not api else 0)


if __name__ == "__main__":
    main()

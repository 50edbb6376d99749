# SPDX-License-Identifier: Apache-2.0
"""Writes wheels; also as a program: wheels.py OUT [DISTRIBUTION==VERSION...] makes those of the names that programs import.

A name, such as deep_ep, is a distribution of its own (epkit-deep-ep) whose modules stand for epkit.compat.NAME. Other
distributions have a package of the same name, and pip installs, upgrades and removes them without regard to each other. So
it has no file in common with them, and a folder of its own that precedes site-packages in sys.path: this name is epkit's as
long as the distribution is installed, in whatever order, and what it hides stays whole.

DISTRIBUTION==VERSION: a wheel without files, of this version with the local part "+epkit", that needs the name: for programs
that require another distribution of it. Its version satisfies what they require, and is later than the original.
"""
import base64
import hashlib
import os
import re
import sys
import zipfile

_HERE = os.path.dirname(os.path.abspath(__file__))

# Name -> the distributions that have a package of this name, and nothing else: those of nixl_ep also have what moves KV caches.
_NAMES = {"deep_ep": ("deep-ep", "sgl-deep-ep", "tokenspeed-deepep"), "deep_ep_v25": ("sgl-deep-ep-v25",), "nixl_ep": ()}

_FIRST = '''# SPDX-License-Identifier: Apache-2.0
"""Imported by the .pth file of this name when Python starts: this folder precedes site-packages, and what is in it, whatever
else is installed."""
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
if _here not in sys.path:
    _site = os.path.dirname(_here)
    sys.path.insert(sys.path.index(_site) if _site in sys.path else len(sys.path), _here)
'''


def write(path, info, files):
    """A wheel of (name or ZipInfo, bytes) and its RECORD in the folder `info`."""
    record = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for entry, data in files:
            name = entry.filename if isinstance(entry, zipfile.ZipInfo) else entry
            wheel.writestr(entry if isinstance(entry, zipfile.ZipInfo) else _entry(name), data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}\n")
        wheel.writestr(_entry(f"{info}/RECORD"), "".join([*record, f"{info}/RECORD,,\n"]))


def _entry(name):
    entry = zipfile.ZipInfo(name)  # of 1980: the same bytes whenever it is made
    entry.external_attr = 0o644 << 16
    return entry


def _wheel(out, distribution, version, summary, needs, files):
    package = f"{distribution.replace('-', '_')}-{version}"
    info = f"{package}.dist-info"
    metadata = (f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\nSummary: {summary}\nLicense: Apache-2.0\n"
                f"Requires-Python: >=3.10\nRequires-Dist: {needs}\n")
    about = "Wheel-Version: 1.0\nGenerator: epkit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with open(os.path.join(_HERE, "..", "LICENSE"), "rb") as file:
        own = [(f"{info}/METADATA", metadata.encode()), (f"{info}/WHEEL", about.encode()), (f"{info}/LICENSE", file.read())]
    path = os.path.join(out, f"{package}-py3-none-any.whl")
    write(path, info, [*files, *own])
    return path


def _version():
    with open(os.path.join(_HERE, "..", "pyproject.toml"), encoding="utf-8") as file:
        return re.search(r'^version = "(.*)"$', file.read(), re.MULTILINE)[1]


def _name_wheel(out, name):
    folder = os.path.join(_HERE, "names", name)
    files = []
    for source in sorted(os.listdir(folder)):
        if source.endswith(".py"):
            with open(os.path.join(folder, source), "rb") as file:
                data = file.read()
            # Beside the folder, too: .pth files are read in site-packages alone, not in what `pip --target` has filled.
            files += [(source, data), (f"epkit_{name}/{source}", data)]
    files += [(f"epkit_{name}/__init__.py", _FIRST.encode()), (f"epkit_{name}.pth", f"import epkit_{name}\n".encode())]
    return _wheel(out, f"epkit-{name.replace('_', '-')}", _version(), f"The package {name} of epkit", f"epkit (=={_version()})", files)


def _empty_wheel(out, requirement):
    match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][0-9a-z.]*)", requirement)
    distribution = match and re.sub(r"[-_.]+", "-", match[1]).lower()
    for name, others in _NAMES.items():
        if distribution in others:
            return _wheel(out, distribution, match[2] + "+epkit", f"Nothing: {name} is that of epkit",
                          f"epkit-{name.replace('_', '-')}", [])
    every = ", ".join(other for others in _NAMES.values() for other in others)
    sys.exit(f"wheels.py: {requirement!r} must be DISTRIBUTION==VERSION without a local part, with one of {every}")


def main(out, *requirements):
    for path in [*(_name_wheel(out, name) for name in _NAMES), *(_empty_wheel(out, one) for one in requirements)]:
        print(path)


if __name__ == "__main__":
    main(*sys.argv[1:])

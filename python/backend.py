# SPDX-License-Identifier: Apache-2.0
"""The build backend: scikit-build-core, in the root of the tree also where python/ is built, and a check of the wheel.

A wheel may need nothing but the C library, whose version becomes part of its name (manylinux_2_NN): the newest that any
file in it asks for. That takes readelf (binutils); without it the wheel is checked by nobody and named linux.
"""
import base64
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile

os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from scikit_build_core import build as _core  # noqa: E402
from scikit_build_core.build import *  # noqa: E402,F401,F403

# Libraries that others bring: those of the C library; the driver's on a machine with GPUs, and the C++ ones, which every
# build of torch needs as well.
_ALLOWED = re.compile(r"(libc|libm|libdl|libpthread|librt|ld-linux-.*|libcuda|libgcc_s|libstdc\+\+|libepkit)\.so")


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """The hook of PEP 517."""
    built = os.path.join(wheel_directory, _core.build_wheel(wheel_directory, config_settings, metadata_directory))
    try:
        platform = _platform_of(built)
    except FileNotFoundError as error:
        print(f"epkit: {error}: the wheel keeps the platform linux", file=sys.stderr)
        return os.path.basename(built)
    return _renamed(built, platform)


def _readelf(option, path):
    done = subprocess.run(["readelf", option, path], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        raise RuntimeError(f"epkit: readelf {option} {path} failed: {done.stderr}")
    return done.stdout


def _platform_of(wheel):
    newest = 17
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if ".so" not in os.path.basename(name):
                continue
            path = files.extract(name, folder)
            for needed in re.findall(r"\(NEEDED\).*\[(.*)\]", _readelf("-d", path)):
                if not _ALLOWED.match(needed):
                    raise RuntimeError(f"epkit: {name} needs {needed}, which no machine has to have")
            newest = max([newest, *map(int, re.findall(r"GLIBC_2\.(\d+)", _readelf("-V", path)))])
    return f"manylinux_2_{newest}_{os.uname().machine}"


def _renamed(wheel, platform):
    """The same files under the name of the platform: in the wheel's own words, too."""
    name = re.sub(r"-[^-]*\.whl$", f"-{platform}.whl", os.path.basename(wheel))
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(wheel + ".new", "w", zipfile.ZIP_DEFLATED) as new:
        tags = next(entry for entry in old.namelist() if entry.endswith(".dist-info/WHEEL"))
        text = re.sub(rb"(?m)^(Tag: \S+-)[^-\s]+$", rb"\g<1>" + platform.encode(), old.read(tags))
        digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
        for entry in old.infolist():
            data = old.read(entry)
            if entry.filename == tags:
                data = text
            elif entry.filename.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines()
                data = "".join((f"{tags},sha256={digest},{len(text)}" if line.startswith(tags + ",") else line) + "\n"
                               for line in lines).encode()
            new.writestr(entry, data)
    os.remove(wheel)
    os.rename(wheel + ".new", os.path.join(os.path.dirname(wheel), name))
    return name

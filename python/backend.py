# SPDX-License-Identifier: Apache-2.0
"""The build backend: scikit-build-core, in the root of the tree also where python/ is built, and a check of the wheel.

A wheel may need nothing but the C library, whose version becomes part of its name (manylinux_2_NN): the newest that any
file in it asks for. That takes readelf (binutils); without it the wheel is not checked and its platform stays linux. The
CUDA that libepkit-cuda was compiled with is the wheel's local version (0.1.0+cu130), so wheels for several versions of CUDA
have different names.
"""
import os
import re
import subprocess
import sys
import tempfile
import zipfile

os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from scikit_build_core import build as _core  # noqa: E402
from scikit_build_core.build import *  # noqa: E402,F401,F403

import wheels  # noqa: E402

# A wheel's version depends on what is built (_cuda_of), so no metadata can be had before.
del prepare_metadata_for_build_wheel  # noqa: F821

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
        platform = None
    return _renamed(built, platform, _cuda_of(built))


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


def _cuda_of(wheel):
    """The local version of a wheel with libepkit-cuda, as torch has it: "+cu130" for CUDA 13.0; otherwise ""."""
    with zipfile.ZipFile(wheel) as files:
        found = re.search(r'^cuda = "(\d+)\.(\d+)"$', files.read("epkit/_build.py").decode(), re.MULTILINE)
    return f"+cu{found[1]}{found[2]}" if found else ""


def _renamed(wheel, platform, local):
    """The same files under the name of the platform and with the local version: in the wheel's own metadata, too."""
    package, version, *tag = os.path.basename(wheel)[:-4].split("-")
    tag = [*tag[:-1], platform or tag[-1]]
    info, new_info = f"{package}-{version}.dist-info/", f"{package}-{version}{local}.dist-info/"
    name = "-".join([package, version + local, *tag]) + ".whl"
    files = []
    with zipfile.ZipFile(wheel) as old:
        for entry in old.infolist():
            data = old.read(entry)
            if entry.filename == info + "RECORD":
                continue
            if entry.filename == info + "WHEEL":
                data = re.sub(rb"(?m)^Tag: \S+$", b"Tag: " + "-".join(tag).encode(), data)
            elif entry.filename == info + "METADATA":
                data = re.sub(rb"(?m)^(Version: \S+)$", rb"\g<1>" + local.encode(), data, count=1)
            if entry.filename.startswith(info):
                entry.filename = new_info + entry.filename[len(info):]
            files.append((entry, data))
    wheels.write(wheel + ".new", new_info[:-1], files)
    os.remove(wheel)
    os.rename(wheel + ".new", os.path.join(os.path.dirname(wheel), name))
    return name

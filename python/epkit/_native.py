# SPDX-License-Identifier: Apache-2.0
"""Loads the extension module and checks that it, libepkit and this package are of one version."""
import os
import re
import sys
from typing import Any

__version__ = "0.1.0"


_TORCH = (2, 3)  # the oldest


def _check_interpreter() -> None:
    what = f"{sys.implementation.name} {sys.version.split()[0]}"
    if sys.implementation.name != "cpython" or sys.version_info < (3, 10):
        raise ImportError(f"epkit: this is {what}: epkit needs CPython 3.10 or later")
    if "t" in sys.abiflags:
        raise ImportError(f"epkit: this is {what} without the interpreter lock, for which the extension module was not "
                          "compiled: use the usual build of Python")


def _import_torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError("epkit: there is no torch in this Python: epkit needs PyTorch "
                          f"{_TORCH[0]}.{_TORCH[1]} or later: install the torch that fits this machine") from error
    except (ImportError, OSError) as error:
        raise ImportError(f"epkit: torch does not load: {error}: install the torch that fits this machine") from error
    numbers = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    if numbers and (int(numbers[1]), int(numbers[2])) < _TORCH:
        raise ImportError(f"epkit: this is torch {torch.__version__}: epkit needs {_TORCH[0]}.{_TORCH[1]} or later")
    return torch


def _load() -> None:
    _check_interpreter()
    torch = _import_torch()
    try:
        from . import _C
    except ImportError as error:
        here = os.path.dirname(__file__)
        if not any(name.startswith("_C.") and name.endswith(".so") for name in os.listdir(here)):
            text = (f"epkit: {here} has no extension module: it is the source tree, or a build of the command alone. Install the "
                    "package: 'pip install .' in the folder of epkit, or a wheel of scripts/wheel.sh")
        else:
            text = (f"epkit: the extension module in {here} does not load: {error}. It needs Linux on {os.uname().machine}, and the "
                    "libepkit that was built with it, in the same folder")
        raise ImportError(text) from error
    loaded, compiled = _C.versions()
    if loaded != __version__ or compiled != _number(__version__):
        raise ImportError(f"epkit: this package is version {__version__}, its extension module was compiled for "
                          f"{compiled // 10000}.{compiled // 100 % 100}.{compiled % 100}, and libepkit {loaded} was loaded: "
                          "install one version, and look for another libepkit in LD_LIBRARY_PATH or LD_PRELOAD")
    for name in ("bfloat16", "float8_e4m3fn", "float32", "int32", "int64", "uint8", "bool"):
        if hasattr(torch, name):
            _C.know_dtype(getattr(torch, name), name)


def _number(version: str) -> int:
    major, minor, patch = (int(part) for part in version.split("."))
    return major * 10000 + minor * 100 + patch


_load()

from . import _C  # noqa: E402 - loaded and of this version
from ._C import ArgumentError, Error, GroupError, PeerError, ResourceError, UnsupportedError  # noqa: E402

# Flags of the library, as its headers number them.
PLAN_EXPANDED = 1 << 1
PLAN_ZERO_PADDING = 1 << 2
COMBINE_BY_CHOICE = 1 << 3
COMBINE_ROUND_PARTIAL = 1 << 4
LL_MASK_DEAD = 1 << 8
LL_RECV_HOOK = 1 << 9
LL_ROUND_SCALE = 1 << 10
LL_SWIZZLED_SCALES = 1 << 13
LL_ZERO_COPY = 1 << 11
LL_NO_PARTIAL_REDUCE = 1 << 12
COMM_CHECK_VALUES = 1 << 0
COMM_CHECK_DISTINCT = 1 << 5
COMM_DROP_ABSENT = 1 << 7

__all__ = ["ArgumentError", "Error", "GroupError", "PeerError", "ResourceError", "UnsupportedError", "_C", "__version__"]

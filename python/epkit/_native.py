# SPDX-License-Identifier: Apache-2.0
"""Loads the extension module and checks that it, libepkit and this package are of one version."""
import os
import sys

__version__ = "0.1.0"


def _load() -> None:
    try:
        import torch
    except ImportError as error:
        raise ImportError("epkit needs PyTorch 2.3 or later: install the torch that fits this machine") from error
    try:
        from . import _C
    except ImportError as error:
        here = os.path.dirname(__file__)
        if not any(name.startswith("_C.") for name in os.listdir(here)):
            text = f"epkit: {here} has no extension module: it is the source tree. Install the package (pip wheel . in the folder above)"
        else:
            text = (f"epkit: the extension module in {here} does not load: {error}. It needs Linux, Python 3.10 or later "
                    f"(this is {sys.version.split()[0]}) and the libepkit that was built with it, in the same folder")
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
LL_ZERO_COPY = 1 << 11
LL_NO_PARTIAL_REDUCE = 1 << 12
COMM_CHECK_VALUES = 1 << 0

__all__ = ["ArgumentError", "Error", "GroupError", "PeerError", "ResourceError", "UnsupportedError", "_C", "__version__"]

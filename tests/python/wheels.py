# SPDX-License-Identifier: Apache-2.0
"""Files of engines and frameworks as they are, from the package index (long tier), above stubs of what they import."""
import functools
import importlib.abc
import importlib.util
import os
import pathlib
import subprocess
import sys
import tarfile
import types
import zipfile
from unittest import mock

import torch
from ranks import CUDA

CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "epkit-tests"
VERSIONS = {"deepspeed": "0.19.8", "flashinfer": "0.7.4", "megatron-core": "0.19.2", "nemo-automodel": "0.7.0", "sglang": "0.5.23",
            "torchtitan": "0.3.0", "vllm": "0.33.0"}


def fetched(name, version, *pip):
    """A folder that pip fills once, in the long tier."""
    from run import Skip
    if not os.environ.get("EPKIT_TEST_LONG"):
        raise Skip(f"EPKIT_TEST_LONG=1 fetches {name}")
    folder = CACHE / f"{name}-{version}"
    if not (folder / "complete").exists():
        done = subprocess.run([sys.executable, "-m", "pip", *(word.format(folder) for word in pip), "--quiet", "--no-deps"],
                              capture_output=True, text=True, check=False)
        if done.returncode:
            raise Skip(f"pip cannot fetch {name}: {done.stderr[-200:]}")
        (folder / "complete").touch()
    return folder


def archive(package, *pip):
    """A function that gives a file of a distribution, of its wheel, or of its sources where it has none, as a file beside that."""
    version = VERSIONS[package]
    folder = fetched(package, version, "download", "--dest", "{}", *pip, f"{package}=={version}")

    def unpacked(name):
        path = next(path for path in folder.iterdir() if path.suffix in (".whl", ".gz"))
        if path.suffix == ".whl":
            return zipfile.ZipFile(path).read(name)
        with tarfile.open(path) as files:
            return files.extractfile(f"{package}-{version}/{name}").read()

    def file(name):
        kept = folder / name
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            own = kept.with_suffix(f".{os.getpid()}")
            own.write_bytes(unpacked(name))
            own.rename(kept)
        return kept

    return file


def flashinfer():
    """Makes it importable as a whole; no GPU is needed."""
    requirements = pathlib.Path(__file__).with_name("flashinfer.txt")
    folder = fetched("flashinfer", VERSIONS["flashinfer"], "install", "--no-compile", "--upgrade", "--target", "{}", "-r", str(requirements))
    sys.path.insert(0, str(folder))


class Stub(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return vars(self).setdefault(name, mock.MagicMock(name=name))


def without_cuda():
    """In the process of a rank that has no GPU: "cuda" is the CPU."""
    def made(function, *args, device=None, **kwargs):
        return function(*args, device="cpu" if device == "cuda" else device, **kwargs)

    if CUDA:
        return
    torch.accelerator.synchronize = torch.cuda.synchronize = lambda *_: None
    torch.cuda.is_current_stream_capturing = lambda: False
    for name in ("zeros", "empty", "tensor"):
        setattr(torch, name, functools.partial(made, getattr(torch, name)))


class Wheel(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports some files of a distribution as they are. Everything else below its package is a stub."""

    def __init__(self, distribution, files, *pip):
        file = archive(distribution, *pip)
        self.package, self.files = files[0].split(".")[0], {name: file(name.replace(".", "/") + ".py") for name in files}

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == self.package:
            return importlib.util.spec_from_loader(name, self, is_package=name not in self.files)
        return None

    def create_module(self, spec):
        return None if spec.name in self.files else Stub(spec.name)

    def exec_module(self, module):
        if module.__name__ in self.files:
            path = self.files[module.__name__]
            exec(compile(path.read_bytes(), path, "exec"), vars(module))

    def imported(self, **stubs):
        """The modules of the files, in the process of a rank. stubs: what stubs have, {"a.b": {name: value}} without the package."""
        for name in [name for name in sys.modules if name.split(".")[0] == self.package]:  # of a test before this one
            del sys.modules[name]
        sys.meta_path.insert(0, self)
        without_cuda()
        for name, values in stubs.items():
            vars(importlib.import_module(f"{self.package}.{name}")).update(values)
        return [importlib.import_module(name) for name in self.files]

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of python/ and prints TAP: run.py [NAME...]. Needs torch, and the packages in PYTHONPATH.

A test is a function test_* of a module case_*.py here. EPKIT_TEST_LONG=1 makes some of them longer.
EPKIT_TEST_DEVICE=cuda runs the ranks on GPUs, those that are there in turn: all cases but those that a module names in
NOT_ON_CUDA, with the reason; cases in ONLY_ON_CUDA run there alone.
"""
import gc
import importlib
import os
import pathlib
import sys
import traceback

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks are many, processors few; and children are forked
cuda = os.environ.get("EPKIT_TEST_DEVICE") == "cuda"
os.environ["EPKIT_BACKEND"] = "cuda" if cuda else "host"
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # CUDA works in forked children alone

here = pathlib.Path(__file__).parent
sys.path.insert(0, str(here))

if not cuda:  # which nothing may touch before ranks are forked
    import torch._dynamo  # noqa: E402,F401 - optimizers and torch.compile want it: once


class Skip(Exception):
    """Raised by a test that cannot run here."""


def tests():
    for path in sorted(here.glob("case_*.py")):
        module = importlib.import_module(path.stem)
        for name, function in vars(module).items():
            if name.startswith("test_"):
                yield f"{path.stem[5:]}.{name[5:]}", function, _reason(module, name)


def _reason(module, name):
    """Why a test does not run on this device, or None."""
    if cuda:
        not_here = getattr(module, "NOT_ON_CUDA", {})
        return not_here if isinstance(not_here, str) else not_here.get(name)
    return "needs a GPU" if getattr(module, "ONLY_ON_CUDA", False) else None


def main(wanted):
    every = [(name, function, reason) for name, function, reason in tests() if not wanted or any(part in name for part in wanted)]
    print(f"1..{len(every)}", flush=True)
    gc.freeze()  # torch's objects are here for good: neither collected after each test, nor copied by ranks that collect
    failed = 0
    for number, (name, function, reason) in enumerate(every, 1):
        if reason:
            print(f"ok {number} {name} # skip {reason}", flush=True)
            continue
        try:
            function()
            print(f"ok {number} {name}", flush=True)
        except Exception as error:  # noqa: BLE001 - a failed test is a line, and the next one follows
            if type(error).__name__ == "Skip":
                print(f"ok {number} {name} # skip {error}", flush=True)
                continue
            failed += 1
            print("# " + "\n# ".join(traceback.format_exc().splitlines()))
            print(f"not ok {number} {name}", flush=True)
        gc.collect()
    return 1 if failed or not every else 0


if __name__ == "__main__":
    sys.modules.setdefault("run", sys.modules["__main__"])
    sys.exit(main(sys.argv[1:]))

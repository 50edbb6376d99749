# SPDX-License-Identifier: Apache-2.0
"""The programs in examples/python, which check themselves."""
import importlib.util
import pathlib
import sys

from ranks import run

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python"
sys.path.append(str(FOLDER))


def load(name):
    spec = importlib.util.spec_from_file_location("example_" + name, FOLDER / (name + ".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_moe_training():
    module = load("moe_training")
    run(2, lambda rank, size: module.train())


def test_decode_loop():
    module = load("decode_loop")
    run(4, lambda rank, size: module.decode())

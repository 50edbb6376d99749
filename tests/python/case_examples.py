# SPDX-License-Identifier: Apache-2.0
"""The programs in examples/python, which check themselves."""
import importlib.util
import pathlib
import sys

import torch.distributed as dist
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


def test_continue_training():
    module = load("continue_training")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run(3, lambda rank, size: module.train(rank, server.port), group=False)

# SPDX-License-Identifier: Apache-2.0
"""The programs in examples/python, which check themselves."""
import importlib.util
import os
import pathlib
import sys
import tempfile

import torch
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


def test_survivors():
    module = load("survivors")
    for nodes in (1, 2):
        with tempfile.NamedTemporaryFile() as file:
            store = lambda size: torch.distributed.FileStore(file.name, size)  # noqa: E731
            on_nodes(nodes, lambda rank, size: module.decode(module.Group(store(size), rank, size)))


def on_nodes(nodes, function):
    before = os.environ.copy()
    os.environ.update({"EPKIT_NETWORK": "tcp", "EPKIT_RANKS_PER_NODE": str(4 // nodes)} if nodes > 1 else {})
    try:
        run(4, function)
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_decode_loop():
    module = load("decode_loop")
    run(4, lambda rank, size: module.decode())


def test_continue_training():
    module = load("continue_training")
    with tempfile.NamedTemporaryFile() as file:  # the thread of a TCPStore may hold a lock of libc when a rank is forked
        run(4, lambda rank, size: module.train(rank, dist.FileStore(file.name, -1)), group=False)

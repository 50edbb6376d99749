# SPDX-License-Identifier: Apache-2.0
"""Starts an example: on the ranks of torchrun, or on two ranks of its own on the CPU."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing


def _rank_of_two(rank, store, function):
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    function()
    dist.destroy_process_group()


def launch(function):
    """Runs function() on every rank, with a process group of all."""
    if "RANK" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        function()
        dist.destroy_process_group()
        return
    os.environ["EPKIT_BACKEND"] = "host"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank_of_two, args=(os.path.join(folder, "store"), function), nprocs=2)

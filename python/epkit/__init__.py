# SPDX-License-Identifier: Apache-2.0
"""epkit: expert-parallel dispatch and combine for PyTorch.

Shapes are written with these letters everywhere:

    R  ranks in the group             N  tokens of this rank
    K  experts a token selects        H  elements in a row (hidden size)
    E  experts of the whole group     L  local experts, E / R
    M  most tokens of a rank (low latency)

A minimal layer, in a program that torchrun starts::

    torch.distributed.init_process_group("gloo")     # on GPUs "nccl"
    comm = epkit.Communicator()                      # over the default process group of torch.distributed
    plan = comm.plan(topk_idx, num_experts, expanded=True)
    rows = plan.dispatch(x, topk_weights=weights)    # rows.x [n, H] grouped by local expert
    out, _ = plan.combine(experts(rows.x))           # [N, H]

Backends. Tensors on CUDA devices use libepkit-cuda; tensors on the CPU use the host backend, which gives the same bits.
A communicator is of one kind, chosen when it is made.

Streams. On CUDA every call queues in the current stream of torch (or the `stream` argument) and returns; outputs are
valid in the order of that stream, and inputs must not be overwritten before. Plans with exact counts wait for the
counts on the host. On the CPU calls return when they are complete. All waits release the interpreter lock and have a
deadline, after which an exception names the rank that did not come.

cuda_version. The CUDA that libepkit-cuda was compiled with, "13.0", or None without that library.
"""
from ._native import Error, ArgumentError, GroupError, PeerError, ResourceError, UnsupportedError, __version__
from ._build import cuda as cuda_version
from .autograd import combine, dispatch, moe
from .communicator import Communicator
from .lowlatency import LowLatency, LowLatencyRows
from .members import Members
from .plan import Metadata, Plan, Rows

__all__ = [
    "ArgumentError", "Communicator", "Error", "GroupError", "LowLatency", "LowLatencyRows", "Members", "Metadata", "PeerError",
    "Plan", "ResourceError", "Rows", "UnsupportedError", "__version__", "combine", "cuda_version", "dispatch",
    "moe",
]

# SPDX-License-Identifier: Apache-2.0
"""DeepEP V2.5's functions that all buffers have in common."""
from typing import Any, Optional, Tuple

from .utils import envs
from .utils.comm import get_nccl_comm_handle


def barrier(buffer: Any, wait_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True,
            context_idx: Optional[int] = None) -> None:
    """buffer.barrier() of an EPBuffer."""
    buffer.barrier(wait_comm_stream, with_cpu_sync, sequential)


def get_comm_stream(buffer: Any) -> Any:
    """buffer.get_comm_stream()."""
    return buffer.get_comm_stream()


def get_physical_domain_size(group_or_buffer: Any) -> Tuple[int, int]:
    """(hosts, ranks of each) of a buffer, which has asked the hosts, or of a process group, see deep_ep.utils.envs."""
    sizes: Any = getattr(group_or_buffer, "get_physical_domain_size", None)
    return sizes() if sizes is not None else envs.get_physical_domain_size(group_or_buffer)


def get_logical_domain_size(group_or_buffer: Any, allow_hybrid_mode: Optional[bool] = None) -> Tuple[int, int]:
    """(scale-out ranks, scale-up ranks) of a buffer, or of a process group with allow_hybrid_mode (the default) or without."""
    sizes: Any = getattr(group_or_buffer, "get_logical_domain_size", None)
    return sizes() if sizes is not None else envs.get_logical_domain_size(group_or_buffer, allow_hybrid_mode is not False)


def destroy_all_managed_nccl_comm() -> None:
    """Does nothing: there are no NCCL communicators of DeepEP here."""


__all__ = [
    "barrier", "destroy_all_managed_nccl_comm", "get_comm_stream", "get_logical_domain_size", "get_nccl_comm_handle",
    "get_physical_domain_size",
]

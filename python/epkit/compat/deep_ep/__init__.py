# SPDX-License-Identifier: Apache-2.0
"""The interface of DeepEP on libepkit: `Buffer` (V1), `ElasticBuffer` (V2), `EPBuffer` (V2.5) and
`HybridEPBuffer` (branch hybrid-ep).

Programs import this package as they import DeepEP and change nothing. What differs: any hidden
size that is a multiple of 8 elements, any number of ranks; no NVSHMEM, InfiniBand, JIT compiler or NCCL symmetric memory;
rows always come in the order (source rank, token index); a rank that is late or dead is named by an exception after the
deadline instead of a trap; and tensors may be on the CPU, with the same results.

Arguments without a meaning here are accepted and ignored; each docstring names them. What cannot be done raises
NotImplementedError that says what to use instead.
"""
from epkit import __version__ as _epkit_version  # first: it says what is missing

import torch

from . import comm
from ._replicas import BufferAllocator
from .buffer import Buffer, Config
from .comm import destroy_all_managed_nccl_comm, get_logical_domain_size, get_physical_domain_size
from .elastic import ElasticBuffer, EPHandle
from .ep import (BucketBuffer, BucketSession, BufferBase, EngramBuffer, EPBuffer, PPBuffer, get_num_allocation_alignment,
                 get_num_rdma_alignment, get_num_tma_alignment)
from .hybrid_ep_buffer import HybridEPBuffer
from .utils.event import EventHandle, EventOverlap

topk_idx_t = torch.int64
__version__ = f"2.5.0+epkit.{_epkit_version}"

__all__ = [
    "BucketBuffer", "BucketSession", "Buffer", "BufferAllocator", "BufferBase", "Config", "EPBuffer", "EPHandle", "ElasticBuffer",
    "EngramBuffer", "EventHandle", "EventOverlap", "HybridEPBuffer", "PPBuffer", "comm", "destroy_all_managed_nccl_comm", "get_logical_domain_size",
    "get_num_allocation_alignment", "get_num_rdma_alignment", "get_num_tma_alignment", "get_physical_domain_size", "topk_idx_t",
]

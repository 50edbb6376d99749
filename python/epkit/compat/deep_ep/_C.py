# SPDX-License-Identifier: Apache-2.0
"""Names that some programs import from DeepEP's extension module (V2)."""
import torch

from .buffer import Buffer, Config
from .ep import get_num_allocation_alignment, get_num_rdma_alignment, get_num_tma_alignment
from .utils.event import EventHandle

topk_idx_t = torch.int64
is_sm90_compiled = Buffer.is_sm90_compiled
get_low_latency_rdma_size_hint = Buffer.get_low_latency_rdma_size_hint

__all__ = [
    "Config", "EventHandle", "get_low_latency_rdma_size_hint", "get_num_allocation_alignment", "get_num_rdma_alignment",
    "get_num_tma_alignment", "is_sm90_compiled", "topk_idx_t",
]

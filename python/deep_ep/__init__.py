# SPDX-License-Identifier: Apache-2.0
"""The interface of DeepEP on libepkit: `Buffer` (V1) and `ElasticBuffer` (V2).

Programs import this package as they import DeepEP and change nothing. What differs: any hidden
size that is a multiple of 8 elements, any number of ranks; no NVSHMEM, InfiniBand, JIT compiler or NCCL symmetric memory;
rows always come in the order (source rank, token index); a rank that is late or dead is named by an exception after the
deadline instead of a trap; and tensors may be on the CPU, with the same results.

Arguments without a meaning here are accepted and ignored; each docstring names them. What cannot be done raises
NotImplementedError that says what to use instead.
"""
from epkit import __version__ as _epkit_version  # first: it says what is missing

import torch

from .buffer import Buffer, Config
from .elastic import ElasticBuffer, EPHandle
from .utils.envs import get_logical_domain_size, get_physical_domain_size
from .utils.event import EventHandle, EventOverlap

topk_idx_t = torch.int64
__version__ = f"2.0.0+epkit.{_epkit_version}"

__all__ = [
    "Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "get_logical_domain_size",
    "get_physical_domain_size", "topk_idx_t",
]

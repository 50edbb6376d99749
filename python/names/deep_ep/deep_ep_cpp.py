# SPDX-License-Identifier: Apache-2.0
"""Names that some programs import from DeepEP's extension module."""
from epkit.compat.deep_ep import Buffer, Config, EventHandle, topk_idx_t

is_sm90_compiled = Buffer.is_sm90_compiled
get_low_latency_rdma_size_hint = Buffer.get_low_latency_rdma_size_hint

__all__ = ["Buffer", "Config", "EventHandle", "get_low_latency_rdma_size_hint", "is_sm90_compiled", "topk_idx_t"]

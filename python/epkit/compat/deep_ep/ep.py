# SPDX-License-Identifier: Apache-2.0
"""DeepEP V2.5: EPBuffer, its successor of ElasticBuffer."""
from typing import Any, Callable, NoReturn, Optional, Tuple, Union

import torch
import torch.distributed as dist

from ._order import run_untraced
from ._rows import Rows
from .elastic import ENGRAM, PP, ElasticBuffer, EPHandle, not_here
from .utils.event import EventHandle, EventOverlap

_REPLICAS = "copy expert weights and add up gradients of replicas by torch.distributed (NCCL)"


def get_num_allocation_alignment() -> int:
    """Bytes of which DeepEP's buffers are a multiple."""
    return 2 << 20


def get_num_rdma_alignment() -> int:
    """Bytes at a multiple of which DeepEP sends over RDMA."""
    return 64


def get_num_tma_alignment() -> int:
    """Bytes of which rows that DeepEP copies are a multiple."""
    return 32


def _deferred(event: EventOverlap, results: Tuple[Any, ...]) -> EventOverlap:
    event.register_hook_after_wait(lambda: results)
    return event


def _check_deferred(call: str, defer_epilogue: bool, async_with_compute_stream: bool) -> None:
    if defer_epilogue and not async_with_compute_stream:
        raise AssertionError(f"{call}: defer_epilogue needs async_with_compute_stream=True")


class BufferBase:
    """The base class of DeepEP V2.5's buffers."""


class EPBuffer(ElasticBuffer, BufferBase):
    """Dispatch and combine of a group of ranks, on one host or several: as ElasticBuffer, with the arguments of DeepEP V2.5.

    Arguments: those of ElasticBuffer. Ignored in addition: lb_allocation_plan_or_num_bytes, if it is 0; there is no memory for
    replicas of experts.
    """

    def __init__(self, group: dist.ProcessGroup, num_bytes: Optional[int] = None, num_max_tokens_per_rank: int = 0, hidden: int = 0,
                 num_topk: int = 0, use_fp8_dispatch: bool = False, lb_allocation_plan_or_num_bytes: Any = 0,
                 deterministic: bool = False, allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
                 prefer_overlap_with_compute: bool = True, sl_idx: Optional[int] = None, num_allocated_qps: int = 0,
                 num_cpu_timeout_secs: int = 300, num_gpu_timeout_secs: int = 100, explicitly_destroy: bool = False) -> None:
        if not isinstance(lb_allocation_plan_or_num_bytes, int) or lb_allocation_plan_or_num_bytes:
            raise NotImplementedError(f"EPBuffer: lb_allocation_plan_or_num_bytes is not supported by epkit: {_REPLICAS}")
        super().__init__(group, num_bytes, 0, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, deterministic,
                         allow_hybrid_mode, allow_multiple_reduction, prefer_overlap_with_compute, sl_idx or 0, num_allocated_qps,
                         num_cpu_timeout_secs, num_gpu_timeout_secs, explicitly_destroy)
        self.num_lb_bytes = 0

    def print_memory_usage(self) -> None:
        """Prints the bytes of the library for this rank."""
        print(f"rank {self.rank_idx}: {self._comm.info()['library_bytes']} bytes", flush=True)

    def barrier(self, wait_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True,
                context_idx: Optional[int] = None) -> None:
        """A barrier of all ranks in the order of the current stream, and with wait_comm_stream of the communication stream.

        with_cpu_sync: the host waits for the device before and after it. Ignored: sequential, context_idx.
        """
        super().barrier(wait_comm_stream, with_cpu_sync, sequential)

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, num_scaleout_topk: int = 0, rdma_gbs: float = 0,
                                nvlink_gbs: float = 0, sm_read_gbs: float = 0, sm_write_gbs: float = 0) -> int:
        """As of ElasticBuffer."""
        return super().get_theoretical_num_sms(num_experts, num_topk)

    def dispatch(self, x: Rows, topk_idx: Optional[torch.Tensor] = None,  # type: ignore[override]
                 topk_weights: Optional[torch.Tensor] = None, cumulative_local_expert_recv_stats: Optional[torch.Tensor] = None,
                 num_experts: Optional[int] = None, num_max_tokens_per_rank: Optional[int] = None,
                 expert_alignment: Optional[int] = None, num_sms: int = 0, num_qps: int = 0,
                 previous_event: Optional[EventHandle] = None, async_with_compute_stream: bool = False,
                 allocate_on_comm_stream: bool = False, handle: Optional[EPHandle] = None, do_handle_copy: bool = False,
                 do_cpu_sync: Optional[bool] = None, do_expand: bool = False, do_zero_padding: bool = False,
                 use_tma_aligned_col_major_sf: bool = False, defer_epilogue: bool = False
                 ) -> Union[Tuple[Rows, Optional[torch.Tensor], Optional[torch.Tensor], EPHandle, EventOverlap], EventOverlap]:
        """Sends each token to the ranks that own one of its experts. Collective.

        Arguments: those of ElasticBuffer.dispatch(), but:
            do_handle_copy: must be False. The handle has topk_idx itself, which must not be modified while it is used.
            defer_epilogue: returns the event alone. Its wait() returns (rows, local expert numbers, weights, handle). Needs
                async_with_compute_stream. Without a handle and with do_cpu_sync the host waits for the counts in this call.
        """
        if do_handle_copy:
            raise AssertionError("dispatch: do_handle_copy must be False: DeepEP V2.5 no longer copies topk_idx")
        _check_deferred("dispatch", defer_epilogue, async_with_compute_stream)
        rows, idx, weights, handle, event = super().dispatch(
            x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, num_experts, num_max_tokens_per_rank, expert_alignment,
            num_sms, num_qps, previous_event, None, async_with_compute_stream, allocate_on_comm_stream, handle, False, do_cpu_sync,
            do_expand, do_zero_padding, use_tma_aligned_col_major_sf)
        return _deferred(event, (rows, idx, weights, handle)) if defer_epilogue else (rows, idx, weights, handle, event)

    def combine(self, x: torch.Tensor, handle: EPHandle, topk_weights: Optional[torch.Tensor] = None,  # type: ignore[override]
                bias: Union[None, torch.Tensor, Tuple[torch.Tensor, torch.Tensor]] = None, num_sms: int = 0, num_qps: int = 0,
                previous_event: Optional[EventHandle] = None, async_with_compute_stream: bool = False,
                allocate_on_comm_stream: bool = False, defer_epilogue: bool = False
                ) -> Union[Tuple[torch.Tensor, Optional[torch.Tensor], EventOverlap], EventOverlap]:
        """Adds up each token's rows, without weights, as ElasticBuffer.combine(). Collective.

        defer_epilogue: returns the event alone. Its wait() returns (rows, weights). Needs async_with_compute_stream.
        """
        _check_deferred("combine", defer_epilogue, async_with_compute_stream)
        out, weights, event = super().combine(x, handle, topk_weights, bias, num_sms, num_qps, previous_event, None,
                                              async_with_compute_stream, allocate_on_comm_stream)
        return _deferred(event, (out, weights)) if defer_epilogue else (out, weights, event)

    lb_get_theoretical_num_sms = not_here("EPBuffer.lb_get_theoretical_num_sms", _REPLICAS)
    lb_prefetch_weights = not_here("EPBuffer.lb_prefetch_weights", _REPLICAS)
    lb_reduce_grads = not_here("EPBuffer.lb_reduce_grads", _REPLICAS)


def _no_class(name: str, instead: str) -> Any:
    refuse: Callable[..., NoReturn] = not_here(name, instead)
    return type(name, (), {"__init__": lambda self, *args, **kwargs: refuse(), "__doc__": refuse.__doc__, "__module__": __name__})


BufferAllocator = _no_class("BufferAllocator", "allocate by torch.empty(), or by epkit.Communicator.empty() what ranks share")
BucketBuffer = _no_class("BucketBuffer", "use torch.distributed.all_gather_into_tensor, reduce_scatter_tensor and all_reduce (NCCL)")
BucketSession = _no_class("BucketSession", "BucketBuffer makes it, which is not supported either")
EngramBuffer = _no_class("EngramBuffer", ENGRAM)
PPBuffer = _no_class("PPBuffer", PP)

run_untraced(EPBuffer.dispatch, EPBuffer.combine, EPBuffer.barrier)

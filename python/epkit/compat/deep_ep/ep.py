# SPDX-License-Identifier: Apache-2.0
"""DeepEP V2.5: EPBuffer, its successor of ElasticBuffer."""
from typing import Any, Callable, List, NoReturn, Optional, Tuple, Union

import torch
import torch.distributed as dist

from epkit._tensors import run_untraced

from . import _replicas
from ._replicas import BufferAllocator, Payloads
from ._rows import Rows
from .elastic import ENGRAM, PP, ElasticBuffer, EPHandle, not_here
from .utils.event import EventHandle, EventOverlap
from .utils.math import align


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

    Arguments: those of ElasticBuffer, and
        lb_allocation_plan_or_num_bytes: a BufferAllocator, whose tensors get symmetric memory; or a number of bytes of it, which
            are lb_storage then.
    """

    def __init__(self, group: dist.ProcessGroup, num_bytes: Optional[int] = None, num_max_tokens_per_rank: int = 0, hidden: int = 0,
                 num_topk: int = 0, use_fp8_dispatch: bool = False, lb_allocation_plan_or_num_bytes: Any = 0,
                 deterministic: bool = False, allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
                 prefer_overlap_with_compute: bool = True, sl_idx: Optional[int] = None, num_allocated_qps: int = 0,
                 num_cpu_timeout_secs: int = 300, num_gpu_timeout_secs: int = 100, explicitly_destroy: bool = False) -> None:
        planned = isinstance(lb_allocation_plan_or_num_bytes, BufferAllocator)
        if planned and lb_allocation_plan_or_num_bytes.materialized:
            raise AssertionError("EPBuffer: lb_allocation_plan_or_num_bytes: another EPBuffer has been made with this plan")
        if not planned and (not isinstance(lb_allocation_plan_or_num_bytes, int) or lb_allocation_plan_or_num_bytes < 0):
            raise AssertionError(f"EPBuffer: lb_allocation_plan_or_num_bytes is {lb_allocation_plan_or_num_bytes!r}, must be a "
                                 "BufferAllocator or a number of bytes")
        super().__init__(group, num_bytes, 0, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, deterministic,
                         allow_hybrid_mode, allow_multiple_reduction, prefer_overlap_with_compute, sl_idx or 0, num_allocated_qps,
                         num_cpu_timeout_secs, num_gpu_timeout_secs, explicitly_destroy)
        self.num_lb_bytes = lb_allocation_plan_or_num_bytes.num_bytes if planned else lb_allocation_plan_or_num_bytes
        self.lb_storage = self._comm.empty(self.num_lb_bytes, dtype=torch.uint8)
        if planned:
            lb_allocation_plan_or_num_bytes.materialize(self.lb_storage)
        self._view: Optional[RecvView] = None
        self._slab = torch.empty(0, 0, dtype=torch.bfloat16, device=self._comm.device)
        self._readers: List[Any] = []  # events behind what has read the slab

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
                 use_tma_aligned_col_major_sf: bool = False, defer_epilogue: bool = False, emit_expert_ids: bool = False,
                 borrow_recv: bool = False
                 ) -> Union[Tuple[Any, Optional[torch.Tensor], Optional[torch.Tensor], EPHandle, EventOverlap], EventOverlap]:
        """Sends each token to the ranks that own one of its experts. Collective.

        Arguments: those of ElasticBuffer.dispatch(), but:
            do_handle_copy: must be False. The handle has topk_idx itself, which must not be modified while it is used.
            defer_epilogue: returns the event alone. Its wait() returns (rows, local expert numbers, weights, handle). Needs
                async_with_compute_stream. Without a handle and with do_cpu_sync the host waits for the counts in this call.
            emit_expert_ids: handle.recv_expert_ids: int32, the local expert of each expanded row, -1 for padding. Needs do_expand,
                without a handle.
            borrow_recv: a RecvView in place of the rows: they stay in memory of the library, without a copy. bfloat16, not
                expanded, with do_cpu_sync, without a handle. Until its release() no other call of this buffer is possible.
        """
        self._check_view("dispatch")
        if emit_expert_ids and (not do_expand or handle is not None):
            raise AssertionError("dispatch: emit_expert_ids needs do_expand, and no handle")
        if do_handle_copy:
            raise AssertionError("dispatch: do_handle_copy must be False: DeepEP V2.5 no longer copies topk_idx")
        _check_deferred("dispatch", defer_epilogue, async_with_compute_stream)
        if borrow_recv:
            self._lend(x, handle, do_cpu_sync, do_expand or defer_epilogue,
                       self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank)
        given: Any
        given, idx, weights, handle, event = super().dispatch(
            x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, num_experts, num_max_tokens_per_rank, expert_alignment,
            num_sms, num_qps, previous_event, None, async_with_compute_stream, allocate_on_comm_stream, handle, False, do_cpu_sync,
            do_expand, do_zero_padding, use_tma_aligned_col_major_sf)
        if emit_expert_ids:
            handle.recv_expert_ids = _expert_ids(handle)
        if borrow_recv:
            given = self._view = RecvView(self, given)
        return _deferred(event, (given, idx, weights, handle)) if defer_epilogue else (given, idx, weights, handle, event)

    def combine(self, x: torch.Tensor, handle: EPHandle, topk_weights: Optional[torch.Tensor] = None,  # type: ignore[override]
                bias: Union[None, torch.Tensor, Tuple[torch.Tensor, torch.Tensor]] = None, num_sms: int = 0, num_qps: int = 0,
                previous_event: Optional[EventHandle] = None, async_with_compute_stream: bool = False,
                allocate_on_comm_stream: bool = False, defer_epilogue: bool = False
                ) -> Union[Tuple[torch.Tensor, Optional[torch.Tensor], EventOverlap], EventOverlap]:
        """Adds up each token's rows, without weights, as ElasticBuffer.combine(). Collective.

        defer_epilogue: returns the event alone. Its wait() returns (rows, weights). Needs async_with_compute_stream.
        """
        self._check_view("combine")
        _check_deferred("combine", defer_epilogue, async_with_compute_stream)
        out, weights, event = super().combine(x, handle, topk_weights, bias, num_sms, num_qps, previous_event, None,
                                              async_with_compute_stream, allocate_on_comm_stream)
        return _deferred(event, (out, weights)) if defer_epilogue else (out, weights, event)

    def destroy(self) -> None:
        """As of ElasticBuffer."""
        self._check_view("destroy")
        super().destroy()

    def _check_view(self, call: str) -> None:
        if self._view is not None:
            raise RuntimeError(f"{call}: the rows of a dispatch with borrow_recv are in use: call release() of its view first")

    def _lend(self, x: Rows, handle: Optional[EPHandle], do_cpu_sync: Optional[bool], other: bool, most: int) -> None:
        """Room for the rows of the next dispatch, the same on all ranks, when everything that has read it is complete."""
        if handle is not None or other or do_cpu_sync not in (None, True):
            raise ValueError("dispatch: borrow_recv is for dispatches with do_cpu_sync, without handle, do_expand and defer_epilogue")
        if not isinstance(x, torch.Tensor) or x.dtype != torch.bfloat16 or x.dim() != 2:
            raise ValueError("dispatch: borrow_recv is for rows of bfloat16")
        for event in self._readers:
            torch.cuda.current_stream(self._comm.device).wait_event(event)
            self._comm_stream.own.wait_event(event)  # type: ignore[union-attr]
        self._readers = []
        rows = self.num_ranks * most
        if self._slab.shape[0] < rows or self._slab.shape[1] != x.shape[1]:
            self._slab = self._comm.empty(rows, x.shape[1])
        self._out = self._slab

    def lb_get_theoretical_num_sms(self) -> int:
        """As get_theoretical_num_sms(): weights and gradients of replicas are rows of a dispatch."""
        return self._theoretical_sms

    def lb_prefetch_weights(self, redundant_expert_weights: Payloads, expert_weights: Payloads, redundancy_mapping: torch.Tensor,
                            num_sms: int = 0, previous_event: Optional[EventHandle] = None) -> EventOverlap:
        """Copies weights of experts to the slots of their replicas. Collective. Bits are unchanged, and the host does not wait.

        Arguments:
            redundant_expert_weights, expert_weights: [slots, ...] and [L, ...], or lists of such pairs; a multiple of 16 bytes for
                each expert.
            redundancy_mapping: int32 [R, slots], the same on all ranks: the expert of each rank's slot, -1: none; the slot is not
                written then. An expert has 64 replicas at most.
        """
        return self._replicate(previous_event, num_sms, _replicas.prefetch, "lb_prefetch_weights", redundant_expert_weights,
                               expert_weights, redundancy_mapping)

    def lb_reduce_grads(self, redundant_expert_grads: torch.Tensor, expert_grads: torch.Tensor, redundancy_mapping: torch.Tensor,
                        num_sms: int = 0, previous_event: Optional[EventHandle] = None) -> EventOverlap:
        """Adds gradients of replicas, float32 [slots, ...], to those of their experts, [L, ...], one by one in the order of
        (rank, slot): the same bits in every run. Collective."""
        return self._replicate(previous_event, num_sms, _replicas.reduce, "lb_reduce_grads", redundant_expert_grads, expert_grads,
                               redundancy_mapping)

    def _replicate(self, previous_event: Optional[EventHandle], num_sms: int, work: Callable[..., None], call: str,
                   *given: Any) -> EventOverlap:
        self._check_view(call)
        order = self._comm_stream.order(True, previous_event, may_fill=True)
        self._comm._use_num_sms(num_sms)
        with order.on_stream():
            work(self, call, *given, order)
        return order.done(True, tuple(tuple(one) if isinstance(one, list) else one for one in given))


class RecvView:
    """Rows of a dispatch with borrow_recv.

    Attributes: slab, bfloat16 [any, H]; row_indices, int64 [n]: row i of the dispatch is slab[row_indices[i]].
    """

    def __init__(self, buffer: EPBuffer, rows: torch.Tensor) -> None:
        self._buffer: Optional[EPBuffer] = buffer
        self._rows = rows
        self.row_indices = torch.arange(rows.shape[0], device=rows.device)

    @property
    def slab(self) -> torch.Tensor:
        if self._buffer is None:
            raise RuntimeError("RecvView.slab: the view has been released")
        return self._rows

    def release(self, *streams: "torch.cuda.Stream") -> None:
        """The rows may be overwritten when what these streams hold is complete; none: torch's current stream. Again: nothing."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        buffer._view = None
        if buffer._comm.is_cuda:
            buffer._readers = [one.record_event() for one in streams or (torch.cuda.current_stream(buffer._comm.device),)]


def _expert_ids(handle: EPHandle) -> torch.Tensor:
    """By the ends of the experts; in torch's current stream, which need not wait for the rows."""
    if handle._mark is not None:
        handle._mark.wait(handle.psum_num_recv_tokens_per_expert)
    ends = handle.psum_num_recv_tokens_per_expert
    rows = torch.arange(handle.num_expanded_tokens, dtype=torch.int32, device=ends.device)
    expert = torch.bucketize(rows, align(ends, handle.expert_alignment), right=True, out_int32=True)
    return torch.where(rows < ends[expert.clamp(max=len(ends) - 1).long()], expert, -1)


def _no_class(name: str, instead: str, *before: str) -> Any:
    """before: what programs call to make one."""
    refuse: Callable[..., NoReturn] = not_here(name, instead)
    made = {"__init__": lambda self, *args, **kwargs: refuse(), "__doc__": refuse.__doc__, "__module__": __name__}
    return type(name, (), {**made, **{call: staticmethod(not_here(f"{name}.{call}", instead)) for call in before}})


BucketBuffer = _no_class("BucketBuffer", "use torch.distributed.all_gather_into_tensor, reduce_scatter_tensor and all_reduce (NCCL)")
BucketSession = _no_class("BucketSession", "BucketBuffer makes it, which is not supported either")
EngramBuffer = _no_class("EngramBuffer", ENGRAM, "get_storage_size_hint", "get_theoretical_config")
PPBuffer = _no_class("PPBuffer", PP)

run_untraced(EPBuffer.dispatch, EPBuffer.combine, EPBuffer.barrier)

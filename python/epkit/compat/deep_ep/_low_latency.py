# SPDX-License-Identifier: Apache-2.0
"""The low-latency calls of DeepEP V1's Buffer."""
import struct
import warnings
import weakref
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

import epkit
from epkit._tensors import OfThisProcess, Stream, run_untraced, stream_pointer, want_integer, want_tensor
from epkit.lowlatency import Format, Signals

from ._errors import advise
from ._order import CommStream, Order
from ._rows import Rows, _as_given, _origin_of, _origins
from .utils.event import EventOverlap


class _Stream(NamedTuple):
    """A stream of torch by its pointer."""
    cuda_stream: int


class _Call(NamedTuple):
    """A dispatch with low latency: its object, which the Buffer keeps, its number there, and M."""
    object: "weakref.ref[epkit.LowLatency]"
    number: int
    most: int


_MOST_TOPK = 32  # of calls that a rank may miss from the first one on

# Result of a size hint -> its arguments (M, H, R, E): the sizes that a Buffer of so many bytes is for.
_hinted: Dict[int, Tuple[int, int, int, int]] = {}


def size_hint(most: int, hidden: int, ranks: int, num_experts: int) -> int:
    """Bytes of a low-latency buffer: each token once per rank, both ways, two calls at a time, and the counts of experts."""
    bytes_ = 4 * most * ranks * (2 * hidden + 128) + 8 * num_experts
    _hinted[bytes_] = most, hidden, ranks, num_experts
    return bytes_


def hinted(comm: epkit.Communicator, num_bytes: int, ranks: int, num_experts: int = 0) -> List[epkit.LowLatency]:
    """The low-latency object, with masks, of the sizes that num_bytes was the hint for, of so many ranks; num_experts: in place of
    that of the hint. When a rank has failed, no new one can be created. None where num_bytes is no hint, not the same one on
    all ranks, or of sizes that cannot be. Collective."""
    sizes = _hinted.get(num_bytes, (0, 0, 0, 0))
    mine = struct.pack("4q", *sizes)
    every = comm.allgather_bytes(mine)
    if sizes[2] != ranks or any(every[len(mine) * one:len(mine) * (one + 1)] != mine for one in comm.members):
        return []
    most, hidden, _, experts = sizes
    try:
        return [comm.low_latency(most, hidden, num_experts or experts, _MOST_TOPK, mask_dead=True)]
    except (epkit.ArgumentError, epkit.ResourceError) as error:  # on all ranks
        warnings.warn(f"Buffer: no low-latency object of {most} tokens, hidden size {hidden}, {num_experts or experts} experts and "
                      f"top-{_MOST_TOPK} can be made, so the first low-latency call needs all ranks: {error}", stacklevel=3)
        return []


class LowLatencyHandle(OfThisProcess, Tuple[Any, ...]):
    """(src_info int32 [L, R*M], layout_range int64 [L, R], M, H, E), and the call behind them."""
    behind: _Call


class LowLatencyCalls(OfThisProcess):
    """A base class of Buffer, which sets the attributes."""
    rank: int
    num_nvl_bytes: int
    num_rdma_bytes: int
    enable_shrink: bool
    _OTHER = "another Buffer"
    _comm: epkit.Communicator
    _comm_stream: CommStream
    _low_latency: List[epkit.LowLatency]
    _masked: Dict[int, bool]
    _scratch: Dict[bool, torch.Tensor]  # of get_local_buffer_tensor()
    _used: Optional[epkit.LowLatency]  # by the last call that was not captured
    _graphs: bool  # a call has been captured: which objects graphs use is not known

    def _object(self, most: int, hidden: int, num_experts: int, topk: int) -> epkit.LowLatency:
        """The first low-latency object that these sizes fit: the same on all ranks, because nothing but the sizes decides.
        Collective where they fit none: it allocates."""
        for one in self._low_latency:
            if (one.hidden, one.num_experts) == (hidden, num_experts) and one.max_tokens >= most and one.topk >= topk:
                return one
        try:
            new = self._comm.low_latency(most, hidden, num_experts, topk, mask_dead=self.enable_shrink)
        except (epkit.PeerError, epkit.GroupError) as error:
            if self.enable_shrink:
                advise(error, f"the first low-latency call of {most} tokens per rank, hidden size {hidden}, {num_experts} experts "
                       f"and top-{topk} needs all ranks, unless num_rdma_bytes of the Buffer is get_low_latency_rdma_size_hint() of "
                       "these sizes")
            raise
        for rank, masked in self._masked.items():
            if masked:
                new.set_mask(rank)
        self._low_latency.append(new)
        return new

    def _begin_call(self, one: epkit.LowLatency, stream: Stream = None) -> None:
        """Before a call on an object, in its stream: the masks that calls on another one have changed are those of this one, too.
        What a graph will have used before its replay, or before a call behind it, is not known: then the masks of all."""
        if not self.enable_shrink:
            return
        capturing = self._comm.is_cuda and torch.cuda.is_current_stream_capturing()
        self._graphs |= capturing
        for other in self._low_latency if self._graphs else [self._used]:
            if other is not None and other is not one:
                one.merge_mask(other, stream)
        if not capturing:
            self._used = one

    def _hook(self, one: epkit.LowLatency, finish: Optional[Callable[[], None]]) -> Optional[Callable[[], None]]:
        """The hook of a call on an object, of the masks as they are when it receives. It runs in the stream of its call."""
        if finish is None or not self.enable_shrink:
            return finish
        pointer = stream_pointer(self._comm.is_cuda, self._comm.device)
        stream, receive = None if pointer is None else _Stream(pointer), finish

        def hook() -> None:
            self._begin_call(one, stream)
            receive()

        return hook

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """With enable_shrink a barrier, which masks the ranks that do not come. Otherwise no operation: buffers need no cleaning."""
        if self.enable_shrink:
            for one in self._low_latency:
                self._begin_call(one)
                one.barrier()

    def low_latency_dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int,
                             num_experts: int, cumulative_local_expert_recv_stats: Optional[torch.Tensor] = None,
                             dispatch_wait_recv_cost_stats: Optional[torch.Tensor] = None, use_fp8: bool = True,
                             round_scale: bool = False, use_ue8m0: bool = False, async_finish: bool = False,
                             return_recv_hook: bool = False, use_nvfp4: bool = False,
                             x_global_scale: Optional[torch.Tensor] = None
                             ) -> Tuple[Rows, torch.Tensor, LowLatencyHandle, EventOverlap, Optional[Callable[[], None]]]:
        """Sends each token to the experts that it selects; fixed shapes. Collective.

        Arguments:
            x: bfloat16 [N, H], N at most num_max_dispatch_tokens_per_rank (M), the same M on all ranks.
            topk_idx: int64 [N, K], -1: none.
            cumulative_local_expert_recv_stats: int32 [L]: rows received are added to it.
            dispatch_wait_recv_cost_stats: int64 [R] or [R, R] (then this rank's row): time of waiting is added, in ns.
            use_fp8, round_scale, use_ue8m0: as in DeepEP.
            async_finish: the current stream does not wait for the communication stream, on which the call runs; the returned
                event records the end of the call.
            return_recv_hook: only send, on the current stream; the hook that is returned receives, on the same stream.

            use_nvfp4: rows of two e2m1 in a byte, with scales of 16 elements, multiplied by x_global_scale (float32, its first
                element; the same on all ranks); in place of fp8.

        Returns (rows, count int32 [L], handle, event, hook). rows: bfloat16 [L, R*M, H], or (float8_e4m3fn, scales): scales
        float32 [L, R*M, H/128] or int32 [L, R*M, H/512], columns contiguous. With use_nvfp4 (uint8 [R*M, H/2, L], float8_e4m3fn
        [32, 4, ceil(R*M / 128), 4, H/64, L]), views of [L, R*M, H/2] and of scales in tiles, as FlashInfer's grouped GEMMs read
        them. Two results may be in use at a time.
        """
        if async_finish and return_recv_hook:
            raise AssertionError("low_latency_dispatch: async_finish and return_recv_hook exclude each other")
        want_tensor(x, "low_latency_dispatch", "x", "[N, H]")
        want_tensor(topk_idx, "low_latency_dispatch", "topk_idx", "[N, K]")
        most = want_integer(num_max_dispatch_tokens_per_rank, "low_latency_dispatch", "num_max_dispatch_tokens_per_rank")
        num_experts = want_integer(num_experts, "low_latency_dispatch", "num_experts")
        if most < 1:
            raise epkit.ArgumentError(f"low_latency_dispatch: num_max_dispatch_tokens_per_rank is {most}, must be 1 or more")
        if x.shape[0] > most:
            raise epkit.ArgumentError(f"low_latency_dispatch: x has {x.shape[0]} tokens, num_max_dispatch_tokens_per_rank is {most}")
        wait_cost = dispatch_wait_recv_cost_stats
        if wait_cost is not None:
            wait_cost = self._own_row(wait_cost, "low_latency_dispatch", "dispatch_wait_recv_cost_stats")
        object_ = self._object(most, x.shape[-1], num_experts, topk_idx.shape[-1])
        if cumulative_local_expert_recv_stats is not None:
            self._check_sums(cumulative_local_expert_recv_stats, "low_latency_dispatch", "cumulative_local_expert_recv_stats",
                             torch.int32, object_.num_local)
        order = self._low_latency_order(return_recv_hook, async_finish)
        x, topk_idx = order.input(x), order.input(topk_idx)  # copies come before the first access to the communication stream
        if use_nvfp4 and isinstance(x_global_scale, torch.Tensor):
            x_global_scale = order.copied(x_global_scale, order.input(x_global_scale.reshape(-1)))
        self._begin_call(object_, order.stream)
        format_ = Format(nvfp4=True, swizzled=True, global_scale=x_global_scale) if use_nvfp4 else Format(use_fp8, round_scale, use_ue8m0)
        rows = object_._dispatch(x, topk_idx, most, format_, cumulative_local_expert_recv_stats, wait_cost, return_recv_hook, order.stream)
        handle = LowLatencyHandle((rows.source, rows.range, most, x.shape[-1], num_experts))
        handle.behind = _origins[rows.source] = _Call(weakref.ref(object_), rows.call, most)
        if use_nvfp4:
            assert rows.scales is not None
            out: Rows = (rows.x.permute(1, 2, 0), rows.scales.permute(3, 4, 1, 5, 2, 0))
        else:
            out = _as_given(rows if rows.scales is not None else rows.x, rows)
        event = order.done(async_finish, (x, topk_idx, out, rows.count, handle, cumulative_local_expert_recv_stats, x_global_scale))
        return out, rows.count, handle, event, self._hook(object_, rows.finish)

    def _low_latency_order(self, hook: bool, asynchronous: bool) -> Order:
        """A call with a hook runs in the current stream."""
        return self._comm_stream.here if hook else self._comm_stream.order(asynchronous, may_fill=True)

    def _check_sums(self, sums: torch.Tensor, call: str, name: str, dtype: torch.dtype, size: int) -> None:
        """What the call adds to: here, because epkit's call has another name for it."""
        want_tensor(sums, call, name)
        device = self._comm.device.type
        if sums.dtype != dtype or list(sums.shape) != [size] or sums.device.type != device or not sums.is_contiguous():
            raise epkit.ArgumentError(f"{call}: {name}: shape is {list(sums.shape)} of {sums.dtype} on {sums.device}, strides "
                                      f"{list(sums.stride())}, must be [{size}] of {dtype} on {device}, contiguous")

    def _own_row(self, stats: torch.Tensor, call: str, name: str) -> torch.Tensor:
        if isinstance(stats, torch.Tensor) and stats.dim() == 2:
            if stats.shape[0] != self._comm.size:
                raise epkit.ArgumentError(f"{call}: {name}: shape is {list(stats.shape)}, must be [{self._comm.size}] or "
                                          f"[{self._comm.size}, {self._comm.size}]")
            stats = stats[self.rank]
        self._check_sums(stats, call, name, torch.int64, self._comm.size)
        return stats

    def _low_latency_of(self, handle: Any, call: str) -> Tuple[epkit.LowLatency, _Call]:
        known = getattr(handle, "behind", None) or _origin_of(handle, {5: 0})
        if not isinstance(known, _Call):
            raise TypeError(f"{call}: handle is a {type(handle).__name__}, must be what low_latency_dispatch() returned")
        one = known.object()
        if self._comm.closed:
            raise epkit.ArgumentError(f"{call}: the Buffer has been freed")
        if one is None or one.comm is not self._comm:
            raise epkit.ArgumentError(f"{call}: handle is of {self._OTHER}")
        return one, known

    def _signals(self, comp_signal: Optional[torch.Tensor], block_m: int, threshold: int, num_sms: int,
                 src_signals: Optional[torch.Tensor], expected: int, most: int) -> Signals:
        call = "low_latency_combine"
        if (comp_signal is None) == (src_signals is None):
            raise epkit.ArgumentError(f"{call}: overlap takes comp_signal or src_signals, one of them")
        name, signals = ("comp_signal", comp_signal) if src_signals is None else ("src_signals", src_signals)
        assert signals is not None
        want_tensor(signals, call, name, "of counters")
        rows, value, sms = (block_m, threshold, num_sms) if src_signals is None else (self._comm.size * most, expected, 32)
        rows, value = want_integer(rows, call, "block_m"), want_integer(value, call, f"what {name} counts to")
        if value < 1:
            raise epkit.ArgumentError(f"{call}: threshold is {value}, must be 1 or more: else x would be read before it is written"
                                      if src_signals is None else f"{call}: src_signal_expect_value is {value}, must be 1 or more")
        return Signals(signals, rows, value, want_integer(sms, call, "num_sms"))

    def low_latency_combine(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor,
                            handle: LowLatencyHandle, use_logfmt: bool = False, zero_copy: bool = False,
                            async_finish: bool = False, return_recv_hook: bool = False, out: Optional[torch.Tensor] = None,
                            combine_wait_recv_cost_stats: Optional[torch.Tensor] = None, overlap: bool = False,
                            packed_recv_count: Optional[torch.Tensor] = None, comp_signal: Optional[torch.Tensor] = None,
                            block_m: int = 64, threshold: int = 0, num_sms: int = 3,
                            src_signals: Optional[torch.Tensor] = None, src_signal_expect_value: int = 0
                            ) -> Tuple[torch.Tensor, EventOverlap, Optional[Callable[[], None]]]:
        """Adds up each token's rows with its weights. Collective.

        Arguments:
            x: bfloat16 [L, R*M, H]: the experts' outputs, rows as received.
            topk_idx, topk_weights: int64 and float32 [N, K]: as dispatched; -1 leaves a row out.
            zero_copy: x was written into get_next_low_latency_combine_buffer(handle).
            async_finish, return_recv_hook: as in low_latency_dispatch().
            out: bfloat16 [N, H] for the result.
            combine_wait_recv_cost_stats: int64 [R] or [R, R] (then this rank's row): time of waiting is added, in ns.

            overlap: x is still being written by kernels in another stream, which count the blocks that are complete. Either
                comp_signal, int32 [L * ceil(R*M / block_m)] or longer: block_m rows of an expert are complete at `threshold`; the
                call occupies num_sms SMs. Or src_signals, uint32 or int32 [L]: an expert is complete at
                src_signal_expect_value; the call occupies the 32 SMs that SGLang leaves it.

        Ignored: use_logfmt (rows travel as bfloat16, which is more exact), and packed_recv_count (the counts are known).
        Returns (bfloat16 [N, H], event, hook).
        """
        if async_finish and return_recv_hook:
            raise AssertionError("low_latency_combine: async_finish and return_recv_hook exclude each other")
        one, known = self._low_latency_of(handle, "low_latency_combine")
        wait_cost = combine_wait_recv_cost_stats
        if wait_cost is not None:
            wait_cost = self._own_row(wait_cost, "low_latency_combine", "combine_wait_recv_cost_stats")
        order = self._low_latency_order(return_recv_hook, async_finish)
        signals = Signals()
        if overlap:
            signals = self._signals(comp_signal, block_m, threshold, num_sms, src_signals, src_signal_expect_value, known.most)
        x = one.combine_buffer(known.most) if zero_copy else x if overlap else order.input(x)
        topk_idx, topk_weights = order.input(topk_idx), order.input(topk_weights)
        self._begin_call(one, order.stream)
        want_tensor(topk_idx, "low_latency_combine", "topk_idx", "[N, K]")
        result, hook = one._combine(x, topk_idx, topk_weights, known.number, known.most, out, zero_copy, False, wait_cost,
                                    return_recv_hook, order.stream, signals)
        event = order.done(async_finish, (x, topk_idx, topk_weights, result, handle, signals.signals))
        return result, event, self._hook(one, hook)

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """bfloat16 [L, R*M, H] to write the experts' outputs into, for a combine with zero_copy. Valid for one combine: call this
        before each."""
        one, known = self._low_latency_of(handle, "get_next_low_latency_combine_buffer")
        return one.combine_buffer(known.most)

    def get_local_buffer_tensor(self, dtype: torch.dtype, size: Optional[Sequence[int]] = None, offset: int = 0,
                                use_rdma_buffer: bool = False) -> torch.Tensor:
        """A tensor of `dtype` and of num_rdma_bytes or num_nvl_bytes, less `offset` bytes; with `size`, its beginning.

        DeepEP and NIXL EP show their communication memory here, which programs write zeros to after a failure. Here it is memory of
        the buffer that no call reads or writes, zeros at first: what calls use is always clean.
        """
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"get_local_buffer_tensor: dtype is a {type(dtype).__name__}, must be a torch.dtype")
        total = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        if not 0 <= offset <= total or offset % dtype.itemsize:
            raise epkit.ArgumentError(f"get_local_buffer_tensor: offset is {offset}, must be a multiple of {dtype.itemsize} up to "
                                      f"{'num_rdma_bytes' if use_rdma_buffer else 'num_nvl_bytes'}, {total}")
        if use_rdma_buffer not in self._scratch:
            self._scratch[use_rdma_buffer] = torch.zeros(total, dtype=torch.uint8, device=self._comm.device)
        end = offset + (total - offset) // dtype.itemsize * dtype.itemsize
        whole = self._scratch[use_rdma_buffer][offset:end].view(dtype)
        if size is None:
            return whole
        shape = torch.Size(size)
        if shape.numel() > whole.numel():
            raise epkit.ArgumentError(f"get_local_buffer_tensor: size is {list(shape)}, but there are {whole.numel()} elements")
        return whole[:shape.numel()].view(shape)

    def _need_shrink(self, call: str) -> None:
        if not self.enable_shrink:
            raise AssertionError(f"{call} needs Buffer(enable_shrink=True)")

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank, so that low-latency calls leave it out, or unmasks it, in the order of the current stream. Not collective."""
        self._need_shrink("low_latency_update_mask_buffer")
        if not 0 <= want_integer(rank_to_mask, "low_latency_update_mask_buffer", "rank_to_mask") < self._comm.size:
            raise epkit.ArgumentError(f"low_latency_update_mask_buffer: rank_to_mask is {rank_to_mask}, must be 0 to "
                                      f"{self._comm.size - 1}")
        self._masked[rank_to_mask] = bool(mask)
        for one in self._low_latency:
            one.set_mask(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Sets mask_status, int32 [R], to 1 for ranks that are masked and 0 for others, in the order of the current stream."""
        self._need_shrink("low_latency_query_mask_buffer")
        want_tensor(mask_status, "low_latency_query_mask_buffer", "mask_status")
        if mask_status.dtype != torch.int32 or list(mask_status.shape) != [self._comm.size]:
            raise epkit.ArgumentError(f"low_latency_query_mask_buffer: mask_status: shape is {list(mask_status.shape)} of "
                                      f"{mask_status.dtype}, must be [{self._comm.size}] of torch.int32")
        mask_status.zero_()
        for rank, masked in self._masked.items():
            mask_status[rank] = int(masked)
        for one in self._low_latency:
            mask_status |= one.mask().to(mask_status.device)

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmasks all ranks, in the order of the current stream. Not collective: ranks may do so at different times between the
        same two calls, and the next call waits for those that still mask this one. If one of them still does at the deadline,
        that call raises epkit.GroupError (EP_E_EXCLUDED)."""
        self._need_shrink("low_latency_clean_mask_buffer")
        self._masked.clear()
        for one in self._low_latency:
            one.clear_mask()


run_untraced(LowLatencyCalls.low_latency_dispatch, LowLatencyCalls.low_latency_combine,
               LowLatencyCalls.get_next_low_latency_combine_buffer)

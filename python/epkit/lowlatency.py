# SPDX-License-Identifier: Apache-2.0
"""LowLatency: dispatch and combine for decoding."""
from typing import TYPE_CHECKING, Callable, NamedTuple, Optional, Tuple

import torch

from . import _native
from ._tensors import OfThisProcess, Stream, aligned, want_integer, want_no_grad, want_tensor

if TYPE_CHECKING:
    from .communicator import Communicator

_Finish = Callable[[], None]
_BF16, _FP8, _UE8M0, _NVFP4, _MXFP8 = range(5)  # formats, as the extension module numbers them


class LowLatencyRows(NamedTuple):
    """What a low-latency dispatch delivers: per local expert the first count[l] of its R*M rows."""
    x: torch.Tensor  # [L, R*M, H] bfloat16 or float8_e4m3fn
    scales: Optional[torch.Tensor]  # fp8: [L, R*M, H/128] float32 or [L, R*M, H/512] int32, columns contiguous
    count: torch.Tensor  # type: ignore[assignment]  # int32 [L]; not tuple.count()
    source: torch.Tensor  # int32 [L, R*M] token index on its source rank
    range: torch.Tensor  # int64 [L, R] rows of each source: begin << 32 | count
    call: int  # number of the dispatch: combine() names it
    max_tokens: int  # M of this call
    finish: Optional[_Finish]  # with hook: receives; the outputs are valid afterwards


class Format(NamedTuple):
    """Of the rows of a dispatch: arguments of LowLatency.dispatch()."""
    fp8: bool = False
    round_scale: bool = False
    ue8m0: bool = False
    nvfp4: bool = False
    mxfp8: bool = False
    swizzled: bool = False
    global_scale: Optional[torch.Tensor] = None


class Signals(NamedTuple):
    """Of a combine whose input is being written: arguments of LowLatency.combine()."""
    signals: Optional[torch.Tensor] = None
    rows: int = 0
    value: int = 1
    max_sms: int = 0


class LowLatency(OfThisProcess):
    """Made by Communicator.low_latency(). Owns the buffers for two dispatches: dispatch n + 2 voids n.

    Any number of combines may answer a dispatch, or none. Fixed shapes; may be captured into CUDA graphs.

    A call with hook whose `finish` was not called, or was lost, is received by the next call that needs its buffer: the
    second next dispatch, the second next combine, or a combine that answers the same dispatch as one that is still open.
    Its `finish` has nothing left to do then. A combine that answers a dispatch which is not received raises.
    """

    def __init__(self, comm: "Communicator", max_tokens: int, hidden: int, num_experts: int, topk: int,
                 mask_dead: bool) -> None:
        self.comm = comm
        self.max_tokens, self.hidden, self.num_experts, self.topk = max_tokens, hidden, num_experts, topk
        self._native = comm._native.low_latency(max_tokens, hidden, num_experts, topk,
                                                _native.LL_MASK_DEAD if mask_dead else 0)
        self.num_local = num_experts // comm.size
        self._has_exported = False

    def __repr__(self) -> str:
        return (f"<epkit.LowLatency: rank {self.comm.rank} of {self.comm.size}, up to {self.max_tokens} tokens of {self.hidden} "
                f"elements, up to top-{self.topk} of {self.num_experts} experts{', freed' if self.closed else ''}>")

    @property
    def closed(self) -> bool:
        """Whether the object, or its communicator, has been freed."""
        return self._native.closed

    def free(self) -> None:
        """Frees the buffers now instead of with the last reference. Again: nothing."""
        self._native.free()

    def renew(self) -> None:
        """After Communicator.regroup(): makes the object that of the members of now. Collective: in its place a new member calls
        Communicator.low_latency() with the same arguments. Calls are numbered anew, masks are clear.

        On CUDA graphs with calls on the object, captured before or after the change, are valid from here on. On the CPU tensors of
        combine_buffer() go with the object, so one that has made any raises.
        """
        if self._has_exported and not self.comm.is_cuda:
            raise _native.ArgumentError("renew: combine_buffer() has returned memory of this object: free it, and make a new one")
        self._native.renew()

    def _finisher(self, half: int) -> _Finish:
        """The second half of a call, once; in the stream of the first one."""
        called = False

        def finish() -> None:
            nonlocal called
            if called:
                raise _native.ArgumentError("the second half of this low-latency call has been received already")
            self._native.finish(half)
            called = True

        return finish

    def dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor, *, fp8: bool = False, round_scale: bool = False,
                 ue8m0: bool = False, max_tokens: Optional[int] = None, recv_stats: Optional[torch.Tensor] = None,
                 wait_cost: Optional[torch.Tensor] = None, hook: bool = False, stream: Stream = None, nvfp4: bool = False,
                 mxfp8: bool = False, swizzled: bool = False, global_scale: Optional[torch.Tensor] = None) -> LowLatencyRows:
        """Sends each token to the experts that it selects. Collective. Without gradients.

        Arguments:
            x: [N, H] bfloat16, N <= M.
            topk_idx: [N, K] int64 or int32, K at most that of the object, may differ between ranks; -1: none.
            fp8: rows become float8_e4m3fn with a scale per 128 elements; round_scale: powers of two; ue8m0: packed.
            max_tokens: M of this call, at most that of the object.
            recv_stats: int32 [L]: rows received are added to it. wait_cost: int64 [R]: nanoseconds of waiting.
            hook: only send; `finish` of the result receives.
            nvfp4: rows become uint8 [L, R*M, H/2], two e2m1 in a byte, with a float8_e4m3fn scale per 16 elements, which
                global_scale, float32 of one element (others are ignored), multiplies: the same on all ranks.
            mxfp8: rows become float8_e4m3fn, with a ue8m0 scale (uint8) per 32 elements.
            swizzled: their scales are [L, ceil(R*M / 128), W, 32, 4, 4] with 4 * W scales in a row, in tiles as block-scaled GEMMs
                read them: that of row r and block b at [r / 128, b / 4, r % 32, r % 128 / 32, b % 4]. Otherwise [L, R*M, 4 * W].
        """
        want_no_grad("low_latency_dispatch", "use a Plan and epkit.dispatch()", x=x)
        max_tokens = self.max_tokens if max_tokens is None else max_tokens
        max_tokens = want_integer(max_tokens, "low_latency_dispatch", "max_tokens")
        if not 0 < max_tokens <= self.max_tokens:
            raise _native.ArgumentError(f"low_latency_dispatch: max_tokens is {max_tokens}, must be 1 to {self.max_tokens}")
        format_ = Format(fp8, round_scale, ue8m0, nvfp4, mxfp8, swizzled, global_scale)
        return self._dispatch(aligned(x), aligned(topk_idx), max_tokens, format_, recv_stats, wait_cost, hook, stream)

    def _dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor, max_tokens: int, format_: Format, recv_stats: Optional[torch.Tensor],
                  wait_cost: Optional[torch.Tensor], hook: bool, stream: Stream) -> LowLatencyRows:
        """dispatch() of numbers that are checked, and tensors as aligned() returns them."""
        number = self._number_of(format_)
        flags = ((_native.LL_RECV_HOOK if hook else 0) | (_native.LL_SWIZZLED_SCALES if format_.swizzled else 0) |
                 (_native.LL_ROUND_SCALE if format_.fp8 and (format_.round_scale or format_.ue8m0) else 0))
        global_scale = None if format_.global_scale is None else format_.global_scale.reshape(-1)
        (recv_x, scales, count, source, ranges), call, half = self._native.dispatch(
            x, topk_idx, max_tokens, number, flags, recv_stats, wait_cost, global_scale, stream)
        if number >= _NVFP4:
            scales = self._shaped(scales, format_, recv_x.shape[1])
        return LowLatencyRows(recv_x, scales, count, source, ranges, call, max_tokens, self._finisher(half) if hook else None)

    def _number_of(self, format_: Format) -> int:
        """The format as the extension module numbers it."""
        fp8, _, ue8m0, nvfp4, mxfp8, swizzled, global_scale = format_
        if not (nvfp4 or mxfp8 or swizzled or global_scale is not None):
            if fp8 and ue8m0 and self.hidden % 512:
                raise _native.ArgumentError(f"low_latency_dispatch: ue8m0 packs the scales of 512 elements, and hidden is {self.hidden}")
            return (_UE8M0 if ue8m0 else _FP8) if fp8 else _BF16
        if fp8 + nvfp4 + mxfp8 > 1 or (swizzled and not (nvfp4 or mxfp8)) or (global_scale is not None and not nvfp4):
            raise _native.ArgumentError("low_latency_dispatch: fp8, nvfp4 and mxfp8 exclude each other, swizzled is for the latter two, "
                                        "global_scale for nvfp4")
        return _NVFP4 if nvfp4 else _MXFP8

    def _shaped(self, scales: torch.Tensor, format_: Format, rows: int) -> torch.Tensor:
        """Scales of a byte, which the call has made flat."""
        columns = self.hidden // (16 if format_.nvfp4 else 32)
        shape = (self.num_local, -(-rows // 128), columns // 4, 32, 4, 4) if format_.swizzled else (self.num_local, rows, columns)
        return scales.view(shape).view(torch.float8_e4m3fn if format_.nvfp4 else torch.uint8)

    def combine(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, *, call: int = 0,
                max_tokens: Optional[int] = None, out: Optional[torch.Tensor] = None, zero_copy: bool = False,
                exact: bool = False, wait_cost: Optional[torch.Tensor] = None, hook: bool = False,
                signals: Optional[torch.Tensor] = None, signal_rows: int = 0, signal_value: int = 1, max_sms: int = 0,
                stream: Stream = None) -> Tuple[torch.Tensor, Optional[_Finish]]:
        """The weighted sum of each token's rows. Collective. Without gradients.

        Arguments:
            x: [L, R*M, H] bfloat16: the experts' outputs, rows as received; with zero_copy that of combine_buffer().
            topk_idx, topk_weights: [N, K], float32: as in the dispatch; -1 where that has an expert leaves its row out.
            call: number of the dispatch that it answers; 0: the last one.
            exact: every row travels by itself and the sum is rounded once.
            hook: only send; the second result receives.
            signals: x is still being written: int32 or uint32 [L * ceil(R*M / signal_rows)] counters of blocks of each expert's
                rows, which are read when their counter has reached signal_value. On GPUs kernels in another stream count;
                max_sms: the most SMs that the call occupies while it waits for them, 0: all.

        Returns (out [N, H] bfloat16, finish or None).
        """
        want_no_grad("low_latency_combine", "use a Plan and epkit.combine()", x=x, topk_weights=topk_weights)
        max_tokens = self.max_tokens if max_tokens is None else max_tokens
        want_tensor(topk_idx, "low_latency_combine", "topk_idx", "[N, K]")
        if want_integer(call, "low_latency_combine", "call") < 0:
            raise _native.ArgumentError(f"low_latency_combine: call is {call}, must be the number of a dispatch, or 0: the last one")
        if signals is None:
            x = aligned(x)  # otherwise a copy would be of rows that are not written yet
        return self._combine(x, aligned(topk_idx), aligned(topk_weights), call, max_tokens, out, zero_copy, exact, wait_cost, hook, stream,
                             Signals(signals, signal_rows, signal_value, max_sms))

    def _combine(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, call: int, max_tokens: int,
                 out: Optional[torch.Tensor], zero_copy: bool, exact: bool, wait_cost: Optional[torch.Tensor], hook: bool,
                 stream: Stream, overlap: Signals) -> Tuple[torch.Tensor, Optional[_Finish]]:
        """combine() of numbers that are checked, and tensors as aligned() returns them."""
        flags = ((_native.LL_RECV_HOOK if hook else 0) | (_native.LL_ZERO_COPY if zero_copy else 0) |
                 (_native.LL_NO_PARTIAL_REDUCE if exact else 0))
        signals, *sizes = overlap
        if isinstance(signals, torch.Tensor) and signals.dtype == torch.uint32:
            signals = signals.view(torch.int32)
        summed, half = self._native.combine(x, topk_idx, topk_weights, out, call, max_tokens, wait_cost, flags, stream, signals, *sizes)
        return summed, self._finisher(half) if hook else None

    def combine_buffer(self, max_tokens: Optional[int] = None) -> torch.Tensor:
        """[L, R*M, H] bfloat16 of the library, to write the experts' outputs into: the next combine needs no copy.

        Valid until that combine: call this before each.
        """
        max_tokens = self.max_tokens if max_tokens is None else max_tokens
        self._has_exported = True
        memory: torch.Tensor = torch.utils.dlpack.from_dlpack(self._native.combine_buffer(max_tokens))
        return memory.view(torch.bfloat16).view(self.num_local, self.comm.size * max_tokens, self.hidden)

    def set_mask(self, rank: int, masked: bool = True, stream: Stream = None) -> None:
        """With mask_dead: masks a rank, so that later calls in the stream leave it out, or unmasks it. Not collective."""
        if rank < 0:
            raise _native.ArgumentError(f"set_mask: rank is {rank}")
        self._native.set_mask(rank, int(masked), stream)

    def clear_mask(self, stream: Stream = None) -> None:
        """Unmasks all ranks, in the order of the stream. Not collective."""
        self._native.set_mask(-1, 0, stream)

    def merge_mask(self, other: "LowLatency", stream: Stream = None) -> None:
        """For objects that a program uses as one, with masks set and cleared on all of them: call this where calls on this object
        follow those on the other one. Ranks that it masks are masked here, too; where it has found that a rank has unmasked
        this one, this object no longer waits for that. In the order of the stream; not collective."""
        if not isinstance(other, LowLatency):
            raise TypeError(f"merge_mask: other is a {type(other).__name__}, must be an epkit.LowLatency")
        self._native.merge_mask(other._native, stream)

    def mask(self, out: Optional[torch.Tensor] = None, stream: Stream = None) -> torch.Tensor:
        """int32 [R]: 1 for ranks that are masked."""
        if out is None:
            out = torch.zeros(self.comm.size, dtype=torch.int32, device=self.comm.device)
        self._native.query_mask(out, stream)
        return out

    def barrier(self, stream: Stream = None) -> None:
        """A barrier of the ranks that are not masked; with mask_dead one that does not come is masked."""
        self._native.barrier(stream)

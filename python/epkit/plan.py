# SPDX-License-Identifier: Apache-2.0
"""Plan: the routing of tokens to ranks, and the two operations on it."""
import contextlib
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from . import _native
from ._tensors import (Floats, OfThisProcess, Stream, aligned, as_bytes, as_words, in_stream, run_untraced, stream_pointer,
                       want_no_grad, want_tensor)

if TYPE_CHECKING:
    from .communicator import Communicator


class Rows(NamedTuple):
    """The result of a dispatch. n is the number of rows of the plan, or its capacity."""
    x: torch.Tensor  # [n, H], the type of the input
    scales: Optional[torch.Tensor]  # [n, H/128] or as the input has them
    topk_idx: Optional[torch.Tensor]  # rank layout [n, K]: local expert number, -1 for experts of other ranks
    topk_weights: Optional[torch.Tensor]  # rank layout [n, K], 0 where the index is -1; expanded [n]


class Metadata(NamedTuple):
    """Facts of a plan, on its device, int32. n is the number of tokens that this rank receives."""
    recv_source: torch.Tensor  # [n] source rank * source_stride + token index there
    recv_slot: Optional[torch.Tensor]  # expanded [n, K]: row of the token's k-th choice, -1: of another rank
    n_recv_tokens: torch.Tensor  # [1] n
    psum_rank: torch.Tensor  # [R] tokens of this source rank and the ones before it
    psum_expert: torch.Tensor  # [L] rank layout: sums of aligned counts; expanded: row behind the expert's last one
    count_exact: torch.Tensor  # [L] received tokens of each expert
    rank_prefix: torch.Tensor  # [R, R] (i, j): tokens of the ranks 0..i for rank j


_MADE_WHEN_READ = ("recv_per_expert", "recv_from_rank", "expert_start", "n_send", "n_wire")


# What a dispatch can make of bfloat16 rows, as the extension module numbers it from 1 on -> the type of scales of a byte, or None.
FORMATS: Dict[str, Optional[torch.dtype]] = {"fp8": None, "ue8m0": None, "mxfp8": torch.uint8, "nvfp4": torch.float8_e4m3fn}


class Plan(OfThisProcess):
    """Made by Communicator.plan(). Depends on the routing alone: dispatch and combine may use it any number of times.

    The backward pass of a dispatch is a combine on the same plan, that of a combine a dispatch. Rows are ordered by
    (source rank, token index), in the expanded layout within each local expert: the same bits in every run.

    Attributes:
        n_recv: rows that this rank receives (expanded: with padding); None where the capacity is fixed, until settle().
        out_rows: rows that outputs have.
        recv_per_expert: list [L], received tokens of each local expert, rounded up to the alignment; [] where the
            capacity is fixed, until settle().
        expert_start: expanded: list [L + 1], first row of each local expert.
        recv_from_rank: rank layout: list [R + 1], first row of each source rank.
        n_send, n_wire: rows of this rank's tokens: all, and those for other ranks; -1: not known.
    """

    recv_per_expert: List[int]
    recv_from_rank: Optional[List[int]]
    expert_start: Optional[List[int]]
    n_send: int
    n_wire: int

    def __init__(self, comm: "Communicator", topk_idx: Optional[torch.Tensor], num_experts: int,
                 token_in_rank: Optional[torch.Tensor], tokens_per_expert: Optional[torch.Tensor], expanded: bool,
                 alignment: int, zero_padding: bool, max_recv_tokens: int, max_tokens: int, stream: Stream) -> None:
        flags = 0 if not expanded else _native.PLAN_EXPANDED | (_native.PLAN_ZERO_PADDING if zero_padding else 0)
        self.comm = comm
        self.expanded = bool(expanded)
        self.num_experts = num_experts
        self.alignment = alignment
        self.zero_padding = bool(expanded and zero_padding)
        self._native = comm._native.plan(topk_idx, token_in_rank, tokens_per_expert, num_experts, flags, alignment,
                                         max_recv_tokens, max_tokens, stream)
        self.fixed = max_recv_tokens > 0
        self._updated = False
        n_recv, self.out_rows, self._most_recv, self._n_tokens, topk = self._native.sizes()
        self.topk = 0 if topk_idx is None else topk
        self.n_recv = n_recv if n_recv >= 0 else None

    def __getattr__(self, name: str) -> Any:
        """What few programs read, as lists, is made when it is read. It stays the same, but for a plan of fixed capacity."""
        if name not in _MADE_WHEN_READ or "_native" not in self.__dict__:
            raise AttributeError(f"Plan has no attribute {name!r}")
        _, _, n_send, n_wire, per_expert, from_rank, start = self._native.info()
        if self.n_recv is None:  # the library may know them meanwhile: whether it does is a matter of time
            return {"recv_per_expert": [], "n_send": n_send, "n_wire": n_wire}.get(name)
        self.__dict__.update(recv_per_expert=per_expert, recv_from_rank=from_rank, expert_start=start, n_send=n_send, n_wire=n_wire)
        return self.__dict__[name]

    def settle(self) -> int:
        """Makes a plan of fixed capacity one of exact counts, for which the host waits; returns n_recv. On CUDA within a node they are
        there while the rows of a dispatch still move; elsewhere call this after the first operation. Not collective; all ranks
        settle the plan, or none. Not of a plan that was updated or captured."""
        self._settle(None, None)
        assert self.n_recv is not None
        return self.n_recv

    def _settle(self, rows: Optional[Rows], source: Optional[torch.Tensor]) -> Tuple[Any, Any]:
        """settle(); returns what was received: the beginning of the result of a dispatch, and of its recv_source."""
        self.n_recv, self.out_rows, self._most_recv, rows, source = self._native.settle(rows, source)
        self.fixed = False
        return rows, source

    def __repr__(self) -> str:
        received = f"capacity {self.out_rows}" if self.fixed else f"receives {self.out_rows} rows"
        layout = f"expanded, alignment {self.alignment}" if self.expanded else "by rank"
        choices = f"top-{self.topk} of {self.num_experts}" if self.topk else f"a mask, {self.num_experts}"
        return (f"<epkit.Plan: rank {self.comm.rank} of {self.comm.size}, {self._n_tokens} tokens, {choices} experts, {layout}, "
                f"{received}{', freed' if self.closed else ''}>")

    @property
    def n_tokens(self) -> int:
        """N of an operation that is called now. Outside of captures updates in captures do not count."""
        if self._updated and not self.closed:
            # Of torch's current stream: another one joins a capture only when it waits for this one.
            self._n_tokens = self._native.tokens(None)
        return self._n_tokens

    @property
    def closed(self) -> bool:
        """Whether the plan, or its communicator, has been freed."""
        return self._native.closed

    def free(self) -> None:
        """Frees the plan now instead of with its last reference. Again: nothing."""
        self._native.free()

    def _capturing(self) -> bool:
        """Whether a call now is captured."""
        return self.comm.is_cuda and torch.cuda.is_current_stream_capturing()

    def dispatch(self, x: Floats, topk_weights: Optional[torch.Tensor] = None, *, want_topk_idx: bool = False,
                 column_major_scales: bool = False, out: Union[None, torch.Tensor, Rows] = None,
                 stream: Stream = None, quantize: Optional[str] = None, global_scale: Optional[torch.Tensor] = None) -> Rows:
        """Sends each token's row to the ranks of the plan. Collective. Without gradients: epkit.dispatch() has them.

        Arguments:
            x: [N, H] bfloat16 or float8_e4m3fn, or (x, scales): scales float32 [N, H/128], int32 [N, H/512] (packed
                ue8m0), or int32 [N, any] (opaque words), with any strides. mxfp8: scales uint8 or float8_e8m0fnu [N, H/32].
                nvfp4: rows uint8 or float4_e2m1fn_x2 [N, H/2], scales float8_e4m3fn or uint8 [N, H/16].
            topk_weights: [N, K] float32, travels with the row.
            want_topk_idx: rank layout: also the local expert numbers of each row.
            column_major_scales: scales with strides (1, multiple of 4), as TMA requires.
            out: where the rows go: [out_rows or more, H], for instance of Communicator.empty(). Or where everything goes:
                what an earlier dispatch of the same sizes returned; nothing is allocated then.
            quantize: x is bfloat16, and is made "fp8" (scales float32), "ue8m0" (fp8, packed ue8m0), "mxfp8" or "nvfp4", as
                LowLatency.dispatch() does. global_scale: of "nvfp4", float32 of one element.
        """
        if isinstance(x, tuple) and len(x) != 2:
            raise TypeError(f"dispatch: x is a tuple of {len(x)}, must be a tensor, or a tuple of a tensor and its scales")
        rows, scales = x if isinstance(x, tuple) else (x, None)
        if quantize is None and global_scale is None and _native._C.is_ready(rows, scales, topk_weights):
            return self._dispatch(rows, scales, topk_weights, want_topk_idx, column_major_scales, out, stream)
        want_no_grad("dispatch", "use epkit.dispatch(plan, ...)", x=rows, topk_weights=topk_weights)
        if quantize is not None:
            if scales is not None:
                raise _native.ArgumentError("dispatch: scales with quantize, which makes them")
            return self._quantize(aligned(rows), aligned(topk_weights), want_topk_idx, column_major_scales, out, stream, quantize,
                                  global_scale)
        if global_scale is not None:
            raise _native.ArgumentError('dispatch: global_scale without quantize="nvfp4"')
        return self._dispatch(aligned(rows), aligned(scales), aligned(topk_weights), want_topk_idx, column_major_scales, out, stream)

    def _quantize(self, rows: torch.Tensor, topk_weights: Optional[torch.Tensor], want_topk_idx: bool, column_major_scales: bool,
                  out: Union[None, torch.Tensor, Rows], stream: Stream, name: str, global_scale: Optional[torch.Tensor]) -> Rows:
        """dispatch() of rows that it quantises."""
        if name not in FORMATS:
            raise _native.ArgumentError(f"dispatch: quantize is {name!r}, must be one of {', '.join(map(repr, FORMATS))}")
        if global_scale is not None and name != "nvfp4":
            raise _native.ArgumentError(f"dispatch: global_scale with quantize={name!r}")
        bytes_ = FORMATS[name]
        if bytes_ is not None and column_major_scales and not isinstance(out, Rows):
            raise _native.ArgumentError(f"dispatch: scales of {name!r} are contiguous in each row, not with column_major_scales")
        given = Rows(as_bytes(out.x), as_words(out.scales), *out[2:]) if isinstance(out, Rows) else None if out is None else as_bytes(out)
        got = self._native.dispatch(rows, None, topk_weights, given, want_topk_idx, column_major_scales, stream, False, None, 0,
                                    1 + list(FORMATS).index(name), None if global_scale is None else global_scale.reshape(-1))
        if isinstance(out, Rows):
            return out
        return Rows(got.x if out is None else out, got.scales if bytes_ is None else got.scales.view(bytes_), *got[2:])

    def _dispatch(self, rows: torch.Tensor, scales: Optional[torch.Tensor], topk_weights: Optional[torch.Tensor],
                  want_topk_idx: bool, column_major_scales: bool, out: Union[None, torch.Tensor, Rows], stream: Stream,
                  source: Optional[torch.Tensor] = None, source_stride: int = 0) -> Rows:
        """dispatch() of tensors as aligned() returns them. `source`: rank layout: for recv_source of Metadata."""
        if scales is not None:
            want_tensor(scales, "dispatch", "scales", "[N, any]")
            if scales.shape[0] > 1 and not any(scales.stride()):
                scales = scales.contiguous()
        is_plain = scales is None and getattr(rows, "dtype", None) is torch.bfloat16
        words, plain = (None, rows) if is_plain else (as_words(scales), as_bytes(rows))
        if words is scales and plain is rows:
            received: Rows = self._native.dispatch(rows, scales, topk_weights, out, want_topk_idx, column_major_scales, stream, False, source,
                                                   source_stride, 0, None)
            return received
        if scales is not None and words is not scales and column_major_scales and not isinstance(out, Rows):
            raise _native.ArgumentError(f"dispatch: scales: dtype is {scales.dtype}: of one byte they are contiguous in each row, not with "
                                        "column_major_scales; otherwise give words of four (int32)")
        given = Rows(as_bytes(out.x), as_words(out.scales), *out[2:]) if isinstance(out, Rows) else None if out is None else as_bytes(out)
        got = self._native.dispatch(plain, words, topk_weights, given, want_topk_idx, column_major_scales, stream, words is not scales, source,
                                    source_stride, 0, None)
        if isinstance(out, Rows):
            return out
        return Rows(got.x.view(rows.dtype) if out is None else out, None if scales is None else got.scales.view(scales.dtype), *got[2:])

    def combine(self, x: torch.Tensor, topk_weights: Optional[torch.Tensor] = None,
                bias: Union[None, torch.Tensor, Tuple[torch.Tensor, ...]] = None, *, by_choice: bool = False,
                round_partial: bool = False, out: Optional[torch.Tensor] = None,
                stream: Stream = None) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """For each token the sum of its rows, unweighted, in fp32, rounded once to bfloat16. Collective.

        Arguments:
            x: [n, H] bfloat16, a row for each received one.
            topk_weights: float32 [n, K] (expanded [n]): summed up per token and choice.
            bias: none, one or two [N, H] bfloat16, added first.
            by_choice: add up in the order of each token's choices, as DeepEP's ElasticBuffer does, instead of rank order.
            round_partial: with by_choice, expanded: the sum of each rank is rounded to bfloat16 first. The same on all ranks.

        Returns (out [N, H] bfloat16, weights float32 [N, K] or None).
        """
        biases = () if bias is None else tuple(bias) if isinstance(bias, (tuple, list)) else (bias,)
        if not _native._C.is_ready(x, topk_weights, *biases):
            want_no_grad("combine", "use epkit.combine(plan, ...)", x=x, topk_weights=topk_weights)
            want_no_grad("combine", "add it to the result", **{f"bias[{i}]": one for i, one in enumerate(biases)})
            x, topk_weights, biases = aligned(x), aligned(topk_weights), tuple(aligned(one) for one in biases)
        flags = (_native.COMBINE_BY_CHOICE if by_choice else 0) | (_native.COMBINE_ROUND_PARTIAL if round_partial else 0)
        return self._combine(x, topk_weights, biases, flags, out, stream)

    def _combine(self, x: torch.Tensor, topk_weights: Optional[torch.Tensor], biases: Sequence[Optional[torch.Tensor]], flags: int,
                 out: Optional[torch.Tensor], stream: Stream) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """combine() of tensors as aligned() returns them."""
        return self._native.combine(x, topk_weights, biases, out, flags, stream)

    def update(self, topk_idx: Optional[torch.Tensor] = None, *, token_in_rank: Optional[torch.Tensor] = None,
               tokens_per_expert: Optional[torch.Tensor] = None, stream: Stream = None) -> None:
        """New routing for a plan of fixed capacity, in stream order; may be captured into a CUDA graph. Collective."""
        self._native.update(topk_idx, token_in_rank, tokens_per_expert, stream)
        if self.fixed:
            self.n_recv, self._updated = None, True
            for name in _MADE_WHEN_READ:
                self.__dict__.pop(name, None)

    def metadata(self, source_stride: int = 0, stream: Stream = None) -> Metadata:
        """The origin of the received tokens, and the counts of the plan, in stream order. Collective.

        With a fixed capacity, and in the expanded layout, recv_source and recv_slot have more entries than tokens were
        received: the first n_recv_tokens are valid, the others 0.

        Arguments:
            source_stride: of recv_source: at least the most tokens of any rank, the same on all; 0: the plan's.
        """
        parts = self._metadata(source_stride, stream, Metadata._fields)
        return Metadata(*(getattr(parts, name) for name in Metadata._fields))

    def _metadata(self, source_stride: int, stream: Stream, wanted: Sequence[str], here: bool = False) -> "_Parts":
        """The fields of Metadata that are in `wanted`, in one allocation.

        It is made in `stream`, or with `here` in torch's current stream.
        """
        ranks, local = self.comm.size, self.num_experts // self.comm.size
        shapes: Dict[str, Tuple[int, ...]] = {
            "recv_source": (self.out_rows,), "recv_slot": (self.out_rows, self.topk), "n_recv_tokens": (1,), "psum_rank": (ranks,),
            "psum_expert": (local,), "count_exact": (local,), "rank_prefix": (ranks, ranks)}
        parts, offsets, end = _Parts(), [], 0
        for name, shape in shapes.items():
            if name not in wanted or name == "recv_slot" and not self.expanded:
                offsets.append(-1)
                continue
            parts.places[name] = shape, end
            offsets.append(end)
            end += (shape[0] if len(shape) == 1 else shape[0] * shape[1]) + 3 & ~3
        place = self.comm.device
        with contextlib.nullcontext() if here else in_stream(place, stream_pointer(self.comm.is_cuda, place, stream)):
            parts.memory = self.comm._native.new((end,), torch.int32)
        self._native.metadata(parts.memory, source_stride, stream, *offsets)
        return parts


class _Parts:
    """Fields of Metadata as attributes, tensors that are made when they are read; None: not wanted.

    Attributes: memory, int32, that holds them all; tensors: of all memory.
    """

    def __init__(self) -> None:
        self.memory: torch.Tensor
        self.places: Dict[str, Tuple[Tuple[int, ...], int]] = {}

    @property
    def tensors(self) -> Tuple[torch.Tensor, ...]:
        return (self.memory,)

    def part(self, shape: Tuple[int, ...], at: int) -> torch.Tensor:
        """The elements of the memory from `at` on."""
        part: torch.Tensor = _native._C.parts(self.memory, shape, at)[0]
        return part

    def __getattr__(self, name: str) -> Any:
        if name not in Metadata._fields:
            raise AttributeError(f"no field {name!r}")
        tensor = self.part(*self.places[name]) if name in self.places else None
        self.__dict__[name] = tensor
        return tensor


_COUNTS = ("n_recv_tokens", "psum_rank", "psum_expert", "count_exact")


class Sources:
    """Fields of Metadata of a plan in the rank layout: recv_source, which a dispatch has written; others are made when they are
    read, in torch's current stream, which no other rank takes part in.

    Attributes: tensors: of all memory.
    """

    recv_slot = None

    def __init__(self, plan: Plan, recv_source: torch.Tensor) -> None:
        self._plan, self.recv_source = plan, recv_source
        self.tensors: Tuple[torch.Tensor, ...] = (recv_source,)

    def __getattr__(self, name: str) -> Any:
        if name not in _COUNTS:
            raise AttributeError(f"no field {name!r}")
        if self._plan._capturing():  # for the graph alone, of which each launch makes them
            return getattr(self._plan._metadata(0, None, _COUNTS), name)
        self.make()
        return self.__dict__[name]

    def make(self) -> None:
        """Makes the others now."""
        parts = self._plan._metadata(0, None, _COUNTS)
        self.tensors = (self.recv_source, parts.memory)
        self.__dict__.update({field: getattr(parts, field) for field in _COUNTS})


def check_inputs(comm: "Communicator", topk_idx: Any, x: Floats, topk_weights: Optional[torch.Tensor],
                 is_token_in_rank: Optional[torch.Tensor] = None) -> None:
    """Refuses inputs of a dispatch that do not fit its routing before the plan is made: afterwards the other ranks are in the
    dispatch, where a repeated call of this rank would not find them. Also a mask that DeepEP would refuse: with topk_idx the library
    does not read it, but it becomes a part of the handle."""
    rows, scales = (as_bytes(x[0]), as_words(x[1])) if isinstance(x, tuple) else (as_bytes(x), None)
    comm._native.check_dispatch(rows, scales, topk_weights, topk_idx, is_token_in_rank)


_native._C.know_rows(Rows)
run_untraced(Plan.dispatch, Plan.combine)

# SPDX-License-Identifier: Apache-2.0
"""DeepEP V2: ElasticBuffer."""
import contextlib
from typing import Any, Iterator, List, NoReturn, Optional, Tuple, Union

import torch
import torch.distributed as dist

import epkit
from epkit._native import _C, COMBINE_BY_CHOICE, COMBINE_ROUND_PARTIAL
from epkit._tensors import OfThisProcess, run_untraced, want_integer, want_tensor
from epkit.plan import Sources, check_inputs
from epkit.plan import Rows as PlanRows

from ._errors import naming, raise_refused
from ._order import CommStream, Mark, Order
from ._rows import Rows, _as_given, _biases, _check_group, _with_scales, EarlyOutputs
from .utils.event import EventHandle, EventOverlap
from .utils.math import align
from .utils.semantic import value_or

_ALIGNMENT = 2 << 20  # of buffer sizes in DeepEP
_EXPANDED_HAS = ("recv_source", "psum_rank", "psum_expert", "count_exact", "recv_slot", "n_recv_tokens")  # of epkit.Metadata


# Attributes of a handle that are parts of its plan's metadata -> their names there.
_PARTS = {"psum_num_recv_tokens_per_scaleup_rank": "psum_rank", "psum_num_recv_tokens_per_expert": "psum_expert",
          "num_unaligned_recv_tokens_per_expert": "count_exact"}


def _worst_expanded(ranks: int, most: int, topk: int, num_experts: int, alignment: int) -> int:
    """Upper bound of the rows of the expanded layout, padding included, for tokens that name distinct experts. Others are refused
    where they need more."""
    local = num_experts // ranks
    return align(ranks * most * min(topk, local) + (alignment - 1) * local, alignment)


class EPHandle(OfThisProcess):
    """What a dispatch returns: for further dispatches of the same routing, and for the combines that answer it.

    Attributes:
        do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: as dispatched. A program that has reduced
            expanded rows to one for each received token sets do_expand to False before the combine, or writes to
            recv_src_metadata[:, 2:] which row is whose.
        topk_idx: int64 [N, K]: a copy, or the caller's own tensor with do_handle_copy=False.
        psum_num_recv_tokens_per_scaleup_rank: int32 [scale-up ranks], on one host [R]: received tokens of the source ranks with
            this index or a lower one in their scale-up domain.
        psum_num_recv_tokens_per_expert: int32 [L]: sums of aligned counts; expanded: the row behind the expert's last one.
        num_unaligned_recv_tokens_per_expert: int32 [L]: received tokens of each expert.
        num_recv_tokens_per_expert_list: list of L aligned counts; empty without do_cpu_sync.
        num_recv_tokens, num_expanded_tokens: received tokens, rows of the expanded layout; upper bounds without do_cpu_sync.
        recv_src_metadata: int32 [n, 2 + K]: source rank * num_max_tokens_per_rank + token; row; rows of the expanded layout,
            -1 where there is none.
        dst_buffer_slot_idx: int32 [N, K]: the rank that each choice went to, or -1.
        recv_expert_ids: of EPBuffer.dispatch() with emit_expert_ids; else None.

    num_recv_tokens, recv_src_metadata and dst_buffer_slot_idx are computed on first access, from topk_idx as it is then; psum_* and
    num_unaligned_*, too, in torch's current stream, but for a call that ran on the communication stream.
    A copy has its own attributes, and the same tensors.
    """

    def __init__(self, plan: epkit.Plan, do_expand: bool, num_experts: int, expert_alignment: int,
                 num_max_tokens_per_rank: int, num_sms: int, topk_idx: torch.Tensor, scaleup_ranks: int) -> None:
        self.plan, self._scaleup_ranks = plan, scaleup_ranks
        self._by_token: Optional[epkit.Plan] = None
        self.do_expand, self.num_experts, self.expert_alignment = do_expand, num_experts, expert_alignment
        self.num_max_tokens_per_rank, self.num_sms, self.topk_idx = num_max_tokens_per_rank, num_sms, topk_idx
        self.token_metadata_at_forward = self.channel_linked_list = self.cached_recv_src_metadata_before_sort = None
        self._data: Any
        self._mark: Optional[Mark] = None
        self.recv_expert_ids: Optional[torch.Tensor] = None
        self.recv_src_metadata: torch.Tensor
        self.psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
        self.psum_num_recv_tokens_per_expert: torch.Tensor
        self.num_unaligned_recv_tokens_per_expert: torch.Tensor
        self.dst_buffer_slot_idx: torch.Tensor
        self.num_recv_tokens_per_expert_list: List[int]
        self.num_recv_tokens: int
        self.num_expanded_tokens: int

    def __copy__(self) -> "EPHandle":
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: Any) -> "EPHandle":
        return self.__copy__()

    def _expanded(self, x: torch.Tensor, order: Order) -> torch.Tensor:
        """x with the rows of the plan, which is expanded. It has a row for each received token where a program has reduced the
        expanded rows; then recv_src_metadata[:, 2:] has its rows. Each becomes the row of one of the token's last choices, the
        other rows are 0, so that the ranks need not agree on it. In torch's current stream; the host does not wait."""
        metadata = self.__dict__.get("recv_src_metadata")
        if not self.do_expand or not isinstance(metadata, torch.Tensor) or not isinstance(x, torch.Tensor):
            return x
        tokens, topk = len(metadata), self.plan.topk
        if x.dim() != 2 or x.shape[0] != tokens or metadata.dim() != 2 or metadata.shape[1] != 2 + topk or not tokens:
            return x
        assert self._data.recv_slot is not None
        if self._mark is not None:
            self._mark.wait(self._data.recv_slot, self._data.n_recv_tokens)
        slots, given = self._data.recv_slot[:tokens], metadata[:, 2:]
        if slots.shape[0] < tokens:
            slots = torch.nn.functional.pad(slots, (0, 0, 0, tokens - slots.shape[0]), value=-1)
        valid = (torch.arange(tokens, device=x.device) < self._data.n_recv_tokens).unsqueeze(1)
        nowhere = self.plan.out_rows  # of the result, cut off
        beyond = valid & (given >= tokens)
        # On a GPU this would be a wait: there the sums of these tokens become NaN.
        if x.device.type == "cpu" and bool(beyond.any()):
            raise epkit.ArgumentError(f"combine: x has {tokens} rows, one for each received token, but handle.recv_src_metadata[:, 2:] "
                                      "names rows beyond them: set handle.do_expand = False, or write there which row is whose")
        # By the number of a choice among those of the token that are here, from the last one.
        number = torch.where(valid & (slots >= 0), _from_last(slots >= 0), topk).long()
        rows = torch.full((tokens, topk + 1), nowhere, device=x.device).scatter_(1, number, slots.long())
        rows[:, topk] = nowhere
        number = torch.where(valid & (given >= 0), _from_last(given >= 0), topk).long()
        expanded = x.new_zeros((nowhere + 1, x.shape[1]))
        order.wait_here()
        given_rows = x[given.clamp(0, tokens - 1).long().flatten()].masked_fill_(beyond.flatten().unsqueeze(1), float("nan"))
        expanded[rows.gather(1, number).flatten()] = given_rows
        return expanded[:nowhere]

    def _plan(self, stream: Any) -> epkit.Plan:
        """The plan of the layout of do_expand: a second one of the same routing where a program has set it to False."""
        if bool(self.do_expand) == self.plan.expanded:
            return self.plan
        if self.do_expand:
            raise AssertionError("do_expand of a handle may be set to False, not to True: dispatch with do_expand=True")
        if self._by_token is None:
            most = self.plan.comm.size * self.num_max_tokens_per_rank if self.plan.fixed else 0
            self._by_token = self.plan.comm.plan(self.topk_idx, self.num_experts, max_recv_tokens=most, stream=stream)
        return self._by_token

    def _tensors(self) -> Tuple[torch.Tensor, ...]:
        """Tensors of all memory that was allocated on the communication stream; the library's metadata is one piece."""
        counts = self.__dict__.get("psum_num_recv_tokens_per_scaleup_rank")
        return (self.topk_idx, *self._data.tensors) if counts is None else (self.topk_idx, *self._data.tensors, counts)

    def _fill(self, data: Any, mark: Optional[Mark]) -> None:
        """`data`: what Plan._metadata() returned, or Sources."""
        plan = self.plan
        self._data = data
        if self._scaleup_ranks < plan.comm.size:
            each = torch.diff(data.psum_rank, prepend=data.psum_rank.new_zeros(1)).view(-1, self._scaleup_ranks)
            self.psum_num_recv_tokens_per_scaleup_rank = each.sum(0).cumsum(0, dtype=torch.int32)
        if mark is not None and mark.capturing:
            self._fill_rest()
        self._mark = mark

    def __getattr__(self, name: str) -> Any:
        """The other attributes: few programs read them. Some are computed in torch's current stream on first access; their size may
        be known on the device alone."""
        if name in _PARTS and "_data" in self.__dict__:
            return self.__dict__.setdefault(name, getattr(self._data, _PARTS[name]))
        if name in ("num_recv_tokens_per_expert_list", "num_expanded_tokens") and "_data" in self.__dict__:
            return self.__dict__.setdefault(name, list(self.plan.recv_per_expert) if name != "num_expanded_tokens" else self._expanded_tokens())
        if name not in ("recv_src_metadata", "num_recv_tokens", "dst_buffer_slot_idx") or "_data" not in self.__dict__:
            raise AttributeError(f"EPHandle has no attribute {name!r}")
        self._fill_rest()
        return self.__dict__[name]

    def _expanded_tokens(self) -> int:
        plan = self.plan
        if self.do_expand:
            return plan.out_rows
        if plan.n_recv is not None:
            return sum(plan.recv_per_expert)
        return _worst_expanded(plan.comm.size, self.num_max_tokens_per_rank, plan.topk, self.num_experts, self.expert_alignment)

    def _fill_rest(self) -> None:
        data, plan = self._data, self.plan
        if self._mark is not None:
            self._mark.wait()
        if plan.n_recv is None:
            tokens = plan.comm.size * self.num_max_tokens_per_rank
        else:
            tokens = int(data.n_recv_tokens) if plan.expanded else plan.n_recv
        slots = data.recv_slot if data.recv_slot is not None else data.recv_source.new_full((tokens, plan.topk), -1)
        source = data.recv_source[:tokens]
        if source.shape[0] < tokens:  # the worst case of tokens is more than that of rows where K is cut by L
            source = torch.nn.functional.pad(source, (0, tokens - source.shape[0]))
            slots = torch.nn.functional.pad(slots, (0, 0, 0, tokens - slots.shape[0]))
        slots = slots[:tokens]
        place = torch.arange(tokens, dtype=torch.int32, device=source.device)
        local = self.num_experts // plan.comm.size
        # An attribute that the program has assigned meanwhile stays.
        self.__dict__.setdefault("num_recv_tokens", tokens)
        self.__dict__.setdefault("recv_src_metadata", torch.cat((source.unsqueeze(1), place.unsqueeze(1), slots), 1))
        self.__dict__.setdefault("dst_buffer_slot_idx", torch.where(self.topk_idx < 0, -1, self.topk_idx // local).to(torch.int32))


def _from_last(chosen: torch.Tensor) -> torch.Tensor:
    """For each choice [n, K] the number of chosen ones behind it."""
    return chosen.flip(1).cumsum(1).flip(1) - chosen.long()


def not_here(name: str, instead: str) -> Any:
    """A function or method of DeepEP that refuses every call."""
    def method(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not supported by epkit: {instead}")
    method.__name__ = name.rpartition(".")[2]
    method.__doc__ = f"Not supported: {instead}."
    return method


_naming_most = naming("this follows from do_cpu_sync, and from num_max_tokens_per_rank of dispatch() or of the buffer: both must be the "
                      "same on all ranks, and the latter at least the number of tokens of each", "source_stride", "max_recv_tokens")

ENGRAM = "keep the table sharded and fetch rows by dispatch and combine, or use DeepEP itself"
PP = "use torch.distributed.send and recv (NCCL) between pipeline stages"
_AGRS = "use torch.distributed.all_gather_into_tensor and reduce_scatter_tensor (NCCL)"


class ElasticBuffer(OfThisProcess):
    """Dispatch and combine of a group of ranks, on one host or several.

    Arguments:
        group: process group (gloo or nccl). Its ranks use torch's current CUDA device, or the CPU where there is none
            ($EPKIT_BACKEND=host: always).
        num_max_tokens_per_rank: the default for dispatch().
        allow_multiple_reduction: combine of the expanded layout: the rows of each rank are added up and rounded to
            bfloat16 first. False: all of a token's rows are added up in float32 and rounded once.
        allow_hybrid_mode: False: the scale-up domain is the whole group, in attributes and in handles; rows take the same way.
        num_cpu_timeout_secs: deadline of every wait.
        explicitly_destroy: destroy() may be called.

    On GPUs of one host dispatch() with do_cpu_sync sends before the counts are known, into memory for the worst case, of which it
    returns the beginning. Up to $EPKIT_EARLY_OUTPUTS (2) such results may exist at a time. Further ones have the exact size, and
    their rows wait for the counts. 0: all do.

    Ignored: num_bytes, num_cpu_bytes, hidden, num_topk, use_fp8_dispatch (buffers are made as calls need them),
    deterministic (always), sl_idx, num_allocated_qps, num_gpu_timeout_secs.

    Attributes: group, rank_idx, num_ranks, num_rdma_ranks (hosts), num_nvlink_ranks (ranks of each), num_scaleout_ranks,
    num_scaleup_ranks, scaleout_rank_idx, scaleup_rank_idx, num_allocated_qps, num_bytes, num_max_tokens_per_rank.
    """

    def __init__(self, group: dist.ProcessGroup, num_bytes: Optional[int] = None, num_cpu_bytes: int = 0, num_max_tokens_per_rank: int = 0,
                 hidden: int = 0, num_topk: int = 0, use_fp8_dispatch: bool = False, deterministic: bool = False,
                 allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
                 prefer_overlap_with_compute: bool = True, sl_idx: int = 3, num_allocated_qps: int = 0,
                 num_cpu_timeout_secs: int = 300, num_gpu_timeout_secs: int = 100, explicitly_destroy: bool = False) -> None:
        if group is None:
            raise ValueError(f"{type(self).__name__}: group is None, must be a process group")
        self._comm = epkit.Communicator(group, timeout=num_cpu_timeout_secs)
        self._comm_stream = CommStream(self._comm)
        self.group = group
        self.rank_idx, self.num_ranks = self._comm.rank, self._comm.size
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        if num_bytes is None:
            num_bytes = self.get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)
        self.num_bytes = num_bytes
        self.deterministic = deterministic
        self.allow_hybrid_mode, self.allow_multiple_reduction = allow_hybrid_mode, bool(allow_multiple_reduction)
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps = num_allocated_qps or 17
        self.explicitly_destroy = explicitly_destroy
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)
        self.runtime: Optional[epkit.Communicator] = self._comm
        self._out: Optional[torch.Tensor] = None  # memory for the rows of the next dispatch
        self._early = EarlyOutputs(self._comm)
        self._theoretical_sms = 4
        if self._comm.is_cuda:
            most = int(torch.cuda.get_device_properties(self._comm.device).multi_processor_count)
            self._theoretical_sms = self._comm.num_sms if prefer_overlap_with_compute else min(64, most)

    def destroy(self) -> None:
        """Leaves the group and frees everything. Needs explicitly_destroy. Again: nothing."""
        if not self.explicitly_destroy:
            raise AssertionError(f"destroy() needs {type(self).__name__}(explicitly_destroy=True)")
        self._comm.free()
        self.runtime = None

    @staticmethod
    def get_buffer_size_hint(group: dist.ProcessGroup, num_max_tokens_per_rank: int, hidden: int, num_topk: int = 0,
                             use_fp8_dispatch: bool = False, allow_hybrid_mode: bool = True,
                             allow_multiple_reduction: bool = True) -> int:
        """Bytes of the worst case of received rows, a multiple of 2 MiB."""
        return align(max(1, group.size() * num_max_tokens_per_rank * hidden * 2), _ALIGNMENT)

    @staticmethod
    def capture() -> EventHandle:
        """An event on the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> Optional[torch.cuda.Stream]:
        """The communication stream: a torch.cuda.Stream; None on the CPU, which has none."""
        return self._comm_stream.get()

    def get_physical_domain_size(self) -> Tuple[int, int]:
        """(hosts, ranks of each)."""
        return self._comm.nodes, self.num_ranks // self._comm.nodes

    def get_logical_domain_size(self) -> Tuple[int, int]:
        """(scale-out ranks, scale-up ranks): as get_physical_domain_size(); (1, R) without allow_hybrid_mode."""
        return self.get_physical_domain_size() if self.allow_hybrid_mode else (1, self.num_ranks)

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """A barrier of all ranks, in the order of the communication stream or of the current one.

        with_cpu_sync: the host waits for the device before and after it. Ignored: sequential.
        """
        if with_cpu_sync and self._comm.is_cuda:
            torch.cuda.synchronize(self._comm.device)
        if use_comm_stream:
            order = Order(self._comm.device, self._comm_stream.own, None, False)
            self._comm.barrier(order.stream)
            order.done(False, ())
        else:
            self._comm.barrier()
        if with_cpu_sync and self._comm.is_cuda:
            torch.cuda.synchronize(self._comm.device)

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, num_scaleout_topk: int = 0, rdma_gbs: float = 0,
                                nvlink_gbs: float = 0, sm_read_gbs: float = 200, sm_write_gbs: float = 50) -> int:
        """Multiprocessors that the library uses by default: enough to saturate the links. Others copy rows of tensors meanwhile.

        Arguments are accepted and ignored.
        """
        return self._theoretical_sms

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """min(num_sms, num_allocated_qps), as DeepEP; there are no queue pairs here."""
        return min(num_sms, self.num_allocated_qps)

    def _plan_of(self, handle: Any, call: str) -> epkit.Plan:
        if not isinstance(handle, EPHandle):
            raise TypeError(f"{call}: handle is a {type(handle).__name__}, must be what {type(self).__name__}.dispatch() "
                            "returned")
        _check_group(handle.plan, self._comm, call)
        return handle.plan

    def _new_handle(self, order: Order, topk_idx: torch.Tensor, num_experts: Optional[int], most: int, alignment: int,
                    num_sms: int, cpu_sync: bool, expand: bool, capturing: bool) -> EPHandle:
        if num_experts is None or not most:
            raise AssertionError("dispatch: without a handle give num_experts, and num_max_tokens_per_rank here or to "
                                 f"{type(self).__name__}()")
        want_tensor(topk_idx, "dispatch", "topk_idx", "[N, K]")
        if not type(num_experts) is type(most) is type(alignment) is int:
            for name, number in (("num_experts", num_experts), ("num_max_tokens_per_rank", most), ("expert_alignment", alignment)):
                want_integer(number, "dispatch", name)
        tokens, topk = topk_idx.shape
        if tokens > most:
            raise epkit.ArgumentError(f"dispatch: topk_idx has {tokens} tokens, num_max_tokens_per_rank is {most}")
        # Where the devices exchange the counts they need no host for the worst case of rows; that of expanded ones has exceptions.
        if cpu_sync and (expand or not self._early.able or capturing):
            worst = 0
        else:
            worst = _worst_expanded(self.num_ranks, most, topk, num_experts, alignment) if expand else self.num_ranks * most
        if worst:
            raise_refused(self._comm, order.stream)
        plan = epkit.Plan(self._comm, topk_idx, num_experts, None, None, expand, alignment, True, worst, 0, order.stream)
        return EPHandle(plan, expand, num_experts, alignment, most, num_sms or self._theoretical_sms, topk_idx, self.num_scaleup_ranks)

    def _send(self, plan: epkit.Plan, order: Order, x: Rows, topk_weights: Optional[torch.Tensor], columns: bool, cpu_sync: bool,
              stride: int) -> Tuple[PlanRows, Optional[torch.Tensor]]:
        """The dispatch of a new plan: (rows, their sources in the rank layout). With cpu_sync the counts are known afterwards."""
        counted, (out, self._out) = cpu_sync and plan.fixed, (self._out, None)
        # Scales in columns have the stride of their number of rows.
        early = counted and not (columns and isinstance(x, tuple)) and (out is not None or self._early.has_room())
        placed: Optional[Tuple[PlanRows, Optional[torch.Tensor]]] = None
        with order.allocating():
            if counted and not early:
                self._early.settle(plan)
            try:
                placed = self._place_rows(plan, order, x, topk_weights, columns, out, stride)
            except torch.cuda.OutOfMemoryError:
                if not early or out is not None:
                    raise
                early = False
                self._early.settle(plan)
            rows, source = placed or self._place_rows(plan, order, x, topk_weights, columns, out, stride)
        if early and out is None:
            self._early.add(rows.x)
        if counted and plan.fixed:
            rows, source = plan._settle(rows, source)
        return rows, source

    def _place_rows(self, plan: epkit.Plan, order: Order, x: Rows, topk_weights: Optional[torch.Tensor], columns: bool,
                    out: Optional[torch.Tensor], stride: int) -> Tuple[PlanRows, Optional[torch.Tensor]]:
        given, scales = _with_scales(x)
        source = None if plan.expanded else self._comm._native.new((plan.out_rows,), torch.int32)
        return plan._dispatch(given, scales, topk_weights, not plan.expanded, columns, None if out is None else out[:plan.out_rows],
                              order.stream, source, 0 if source is None else stride), source

    @_naming_most
    def dispatch(self, x: Rows, topk_idx: Optional[torch.Tensor] = None, topk_weights: Optional[torch.Tensor] = None,
                 cumulative_local_expert_recv_stats: Optional[torch.Tensor] = None, num_experts: Optional[int] = None,
                 num_max_tokens_per_rank: Optional[int] = None, expert_alignment: Optional[int] = None, num_sms: int = 0,
                 num_qps: int = 0, previous_event: Optional[EventHandle] = None,
                 previous_event_before_epilogue: Optional[EventHandle] = None, async_with_compute_stream: bool = False,
                 allocate_on_comm_stream: bool = False, handle: Optional[EPHandle] = None, do_handle_copy: bool = True,
                 do_cpu_sync: Optional[bool] = None, do_expand: bool = False, do_zero_padding: bool = False,
                 use_tma_aligned_col_major_sf: bool = False
                 ) -> Tuple[Rows, Optional[torch.Tensor], Optional[torch.Tensor], EPHandle, EventOverlap]:
        """Sends each token to the ranks that own one of its experts. Collective.

        Arguments:
            x: bfloat16 [N, H], or (float8_e4m3fn [N, H], scales of 4 bytes [N, any], any strides); nvfp4 and mxfp8: see
                epkit.Plan.dispatch().
            topk_idx, topk_weights: int64 [N, K] (-1: none), float32 [N, K] or None.
            cumulative_local_expert_recv_stats: int32 [L]: received tokens of each expert are added to it.
            num_max_tokens_per_rank: at least N of every rank, the same on all: bounds outputs without do_cpu_sync.
            num_sms: multiprocessors that move rows on CUDA; 0: the library's default.
            expert_alignment: counts per expert (and starts, when expanded) are multiples of it. None: 1.
            previous_event, previous_event_before_epilogue: both are waited for before the operation.
            async_with_compute_stream, allocate_on_comm_stream: see the stream rules in epkit/compat/deep_ep/_order.py.
            handle: of an earlier dispatch: the same routing again. topk_idx must be None, topk_weights may be given.
            do_handle_copy: the handle has a copy of topk_idx.
            do_cpu_sync: exact sizes (the default without a handle); False: the worst case, nothing waits on the host.
            do_expand: a row for each (token, local expert), grouped by expert.
            use_tma_aligned_col_major_sf: scales with strides (1, multiple of 4).

        Ignored: num_qps, do_zero_padding (padding is always zeroed).

        Returns (rows as x, local expert numbers [n, K] or None if expanded, weights [n, K] or [n] or None, handle, event).
        """
        order = self._comm_stream.order(async_with_compute_stream, previous_event, previous_event_before_epilogue, allocate_on_comm_stream)
        stats = cumulative_local_expert_recv_stats
        if not (type(x) is torch.Tensor and _C.is_ready(x, topk_weights)):
            x, topk_weights = order.rows(x), order.input(topk_weights)
        if handle is None:
            if topk_idx is None:
                raise AssertionError("dispatch: give topk_idx or a handle")
            if stats is not None:
                self._check_stats(stats, num_experts)
            check_inputs(self._comm, topk_idx, x, topk_weights)
            cpu_sync, capturing = do_cpu_sync is None or do_cpu_sync, order.capturing()
            most = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
            handle = self._new_handle(order, topk_idx, num_experts, most, expert_alignment or 1, num_sms, cpu_sync, bool(do_expand),
                                      capturing)
            fresh, plan = True, handle.plan
            self._comm._use_num_sms(num_sms or 0)
            rows, source = self._send(plan, order, x, topk_weights, use_tma_aligned_col_major_sf, cpu_sync, most)
        else:
            self._plan_of(handle, "dispatch")
            if stats is not None:
                self._check_stats(stats, handle.num_experts)
            self._check_again(handle, topk_idx, do_cpu_sync, do_expand, num_experts, num_max_tokens_per_rank, expert_alignment)
            fresh, plan, source = False, handle._plan(order.stream), None
            self._comm._use_num_sms(num_sms or 0)
            with order.allocating():
                out, self._out = self._out, None
                rows = plan._dispatch(*_with_scales(x), topk_weights, not plan.expanded, use_tma_aligned_col_major_sf,
                                      None if out is None else out[:plan.out_rows], order.stream)
        with order.on_stream():
            if fresh:
                if do_handle_copy:
                    handle.topk_idx = handle.topk_idx.clone()
                data = None if source is None else Sources(plan, source)
                # Later, in another stream, counts would wait for calls behind this one; behind a capture they are no part of it.
                if data is not None and (order.stream is not None or capturing):
                    data.make()
                handle._fill(data or plan._metadata(most, order.stream, _EXPANDED_HAS), order.mark(capturing))
            if stats is not None:
                stats.add_(handle.num_unaligned_recv_tokens_per_expert)
        # topk_idx as given, too: the handle holds a copy, and the communication stream may still have to read the original.
        event = order.done(async_with_compute_stream, (x, rows, topk_idx, topk_weights, stats),
                           handle._tensors() if fresh and order.stream is not None else ())
        return _as_given(x, rows), rows.topk_idx, rows.topk_weights, handle, event

    def _check_stats(self, stats: torch.Tensor, num_experts: Optional[int]) -> None:
        want_tensor(stats, "dispatch", "cumulative_local_expert_recv_stats")
        local = want_integer(value_or(num_experts, 0), "dispatch", "num_experts") // self.num_ranks
        if stats.dtype != torch.int32 or list(stats.shape) != [local]:
            raise epkit.ArgumentError(f"dispatch: cumulative_local_expert_recv_stats: shape is {list(stats.shape)} of {stats.dtype}, "
                                      f"must be [{local}] of torch.int32")

    @staticmethod
    def _check_again(handle: EPHandle, topk_idx: Optional[torch.Tensor], do_cpu_sync: Optional[bool], do_expand: bool,
                     num_experts: Optional[int], most: Optional[int], alignment: Optional[int]) -> None:
        if topk_idx is not None or do_cpu_sync:
            raise AssertionError("dispatch: with a handle there is no topk_idx and no do_cpu_sync: both are its own")
        if bool(do_expand) != handle.do_expand:
            raise AssertionError(f"dispatch: do_expand is {bool(do_expand)}, but the handle's is {handle.do_expand}")
        for name, given, own in (("num_experts", num_experts, handle.num_experts),
                                 ("num_max_tokens_per_rank", most, handle.num_max_tokens_per_rank),
                                 ("expert_alignment", alignment, handle.expert_alignment)):
            if given is not None and given != own:
                raise AssertionError(f"dispatch: {name} is {given}, but the handle's is {own}")

    @_naming_most
    def combine(self, x: torch.Tensor, handle: EPHandle, topk_weights: Optional[torch.Tensor] = None,
                bias: Union[None, torch.Tensor, Tuple[torch.Tensor, torch.Tensor]] = None, num_sms: int = 0, num_qps: int = 0,
                previous_event: Optional[EventHandle] = None, previous_event_before_epilogue: Optional[EventHandle] = None,
                async_with_compute_stream: bool = False, allocate_on_comm_stream: bool = False
                ) -> Tuple[torch.Tensor, Optional[torch.Tensor], EventOverlap]:
        """Adds up each token's rows, without weights. Collective.

        Arguments:
            x: bfloat16 [n, H]: a row for each received one; expanded: for each row of that layout, or, without topk_weights, for
                each received token, see EPHandle.
            topk_weights: float32 [n, K], expanded [n]: added up, too.
            bias: none, one or two bfloat16 [N, H], added first.

        num_sms: multiprocessors that move rows on CUDA; 0: those of the dispatch.

        Ignored: num_qps. Returns (bfloat16 [N, H], float32 [N, K] or None, event).

        The sum is made in float32 on top of the biases, by the order of each token's choices: a rank's term stands at the
        last choice that went there; rounded once. See allow_multiple_reduction for the expanded layout, and for several hosts: a
        term for each of them, its own sum, rounded. Without it on several hosts the sum is that of Buffer.combine().
        """
        self._plan_of(handle, "combine")
        order = self._comm_stream.order(async_with_compute_stream, previous_event, previous_event_before_epilogue, allocate_on_comm_stream)
        self._comm._use_num_sms(num_sms or self._comm._sms)
        if topk_weights is None and handle.plan.expanded:
            x = order.copied(x, handle._expanded(x, order))
        if not _C.is_ready(x, topk_weights):
            x, topk_weights = order.input(x), order.input(topk_weights)
        biases = () if bias is None else tuple(order.input(one) for one in _biases(bias))
        plan = handle._plan(order.stream)
        flags = 0
        if self._comm.nodes == 1:
            flags = COMBINE_BY_CHOICE | (COMBINE_ROUND_PARTIAL if plan.expanded and self.allow_multiple_reduction else 0)
        elif self.allow_multiple_reduction and self.allow_hybrid_mode:
            flags = COMBINE_BY_CHOICE | COMBINE_ROUND_PARTIAL  # otherwise each host sends one float32 sum of its rows of a token
        with order.allocating():
            out, weights = plan._combine(x, topk_weights, biases, flags, None, order.stream)
        return out, weights, order.done(async_with_compute_stream, (x, topk_weights, biases, out, weights))

    @contextlib.contextmanager
    def agrs_new_session(self, enabled: bool = True) -> Iterator[None]:
        """Not supported, but for enabled=False, which does nothing."""
        if enabled:
            not_here("ElasticBuffer.agrs_new_session", _AGRS)()
        yield


for _names, _instead in (("engram_write engram_fetch get_engram_storage_size_hint", ENGRAM),
                         ("pp_set_config pp_send pp_recv get_pp_buffer_size_hint", PP),
                         ("create_agrs_session destroy_agrs_session agrs_set_config agrs_get_inplace_tensor all_gather "
                          "get_agrs_num_max_session_bytes get_agrs_buffer_size_hint", _AGRS)):
    for _name in _names.split():
        setattr(ElasticBuffer, _name, not_here(f"ElasticBuffer.{_name}", _instead))


run_untraced(EPHandle.__getattr__, ElasticBuffer.dispatch, ElasticBuffer.combine, ElasticBuffer.barrier)

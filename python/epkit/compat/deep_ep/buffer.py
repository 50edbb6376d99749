# SPDX-License-Identifier: Apache-2.0
"""DeepEP V1: Buffer."""
import os
import warnings
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple, Union

import torch

import epkit
from epkit._native import _C
from epkit._tensors import OfThisProcess, run_untraced, want_integer, want_tensor
from epkit.plan import check_inputs
from epkit.plan import Rows as PlanRows

from ._errors import advise, is_refused, naming, raise_refused
from ._low_latency import LowLatencyCalls, hinted, size_hint
from ._order import CommStream, Mark, Order
from ._rows import Rows, _as_given, _biases, _check_group, _origin_of, _origins, _with_columns, _with_scales, EarlyOutputs
from .utils.event import EventHandle, EventOverlap

_STRIDE = 1 << 21  # of source ids: more tokens than a rank has, and 1024 ranks of them fit an int32

_LEAST_EXPECTED = 256  # rows of a first dispatch

_HANDLE_HAS = ("recv_source", "rank_prefix")  # of epkit.Metadata


def _refusal_of(error: epkit.ArgumentError) -> str:
    """What a rank would have received."""
    return str(error).partition("plan: ")[2].partition(" but ")[0]


def deadline() -> Optional[float]:
    """In seconds, that of DeepEP; None: $EPKIT_TIMEOUT_MS. It has to be long: in their first step programs compile kernels,
    each rank for itself."""
    return None if os.environ.get("EPKIT_TIMEOUT_MS") else 100.0


_naming_worst = naming("max_recv_tokens is num_worst_tokens of Buffer.dispatch() on that rank; without it $EPKIT_EARLY_OUTPUTS is 0 on all "
                       "ranks or on none", "max_recv_tokens")


class Config(NamedTuple):
    """Sizes of DeepEP's buffers and its number of multiprocessors.

    num_sms is the number of multiprocessors that an operation occupies on CUDA. DeepEP's default (20) means the library's
    default, unless Buffer.set_num_sms() was called. The other fields describe buffers that do not exist here: ignored.
    """
    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """A small number that grows with both: programs make a new Buffer when it is more than the old one's."""
        return max(1, hidden_bytes) * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: there is no RDMA buffer."""
        return 0


_KEYS = {6: 0, 10: 6}  # number of tensors of a handle -> index of the one by which its plan is found


class Handle(OfThisProcess, Tuple[torch.Tensor, ...]):
    """The handle of a dispatch, for later calls: the tensors of DeepEP's handle, and their plan.

    They are filled on the first access to one of them, in torch's current stream: programs pass handles on and
    rarely read them. The tensors exist from the beginning, because torch.compile reads the tuple without its methods.

    On one node six: rank_prefix_matrix int32 [R, R] (tokens of ranks 0..i for rank j), channel_prefix_matrix and
    recv_channel_prefix_matrix int32 [R, 1], recv_src_idx int32 [n] (token index on its source rank), is_token_in_rank bool
    [N, R], send_head int32 [N, R] (number of the token among those for that rank, or -1).

    On several nodes ten: is_token_in_rank; rdma_channel_prefix_matrix int32 [nodes, 1] and gbl_channel_prefix_matrix int32
    [R, 1] (tokens of this rank for each node and rank); recv_rdma_channel_prefix_matrix [nodes, 1] and
    recv_rdma_rank_prefix_sum [nodes] (of what a rank forwards in its node, which is in the plan: 0);
    recv_gbl_channel_prefix_matrix int32 [R, 1] (first row of each source rank), recv_gbl_rank_prefix_sum int32 [R] (row behind
    its last one), recv_src_meta uint8 [n, 8] (source rank and token index, int32), send_rdma_head int32 [N, nodes] (number of
    the token among those for that node, or -1), send_nvl_head int32 [0, 8].
    """
    plan: epkit.Plan
    written: Tuple[torch.Tensor, ...] = ()  # rank_prefix and recv_source of epkit.Metadata
    memory: Tuple[torch.Tensor, ...] = ()  # of all tensors
    _mark: Optional[Mark] = None
    _filled = True  # of a handle that a program has made of tensors

    @classmethod
    def of(cls, plan: epkit.Plan, order: Order, in_rank: Optional[torch.Tensor], topk_idx: Optional[torch.Tensor],
           source: Optional[torch.Tensor], capturing: bool) -> "Handle":
        """`source`: on one node: memory that the dispatch has written, with _more() at its end. Otherwise the handle's tensors are
        allocated in torch's current stream, and written in that of the call."""
        ranks, nodes, tokens = plan.comm.size, plan.comm.nodes, plan._n_tokens
        if in_rank is None:
            assert topk_idx is not None
            in_rank = plan.comm.layout(topk_idx, plan.num_experts, order.stream)[2]
        if source is not None:
            behind, more = source.shape[0] - _more(ranks, tokens), (ranks, 1)
            at = behind + ranks * ranks
            prefix, sent, received, recv_source, head = _C.parts(source, (ranks, ranks), behind, more, at, more, at + ranks,
                                                                 (plan.out_rows,), 0, (tokens, ranks), at + 2 * ranks)
            handle = cls((prefix, sent, received, recv_source, in_rank, head))
            handle.written = (prefix, recv_source)
            handle.memory = (source, in_rank)
            _origins[prefix] = plan
        else:
            data = plan._metadata(_STRIDE, order.stream, _HANDLE_HAS, here=True)
            new = data.rank_prefix.new_empty
            handle = cls((in_rank, new((nodes, 1)), new((ranks, 1)), new((nodes, 1)), new(nodes), new((ranks, 1)), new(ranks),
                          new((len(data.recv_source), 8), dtype=torch.uint8), new((tokens, nodes)), new((0, 8))))
            handle.written = (data.rank_prefix, data.recv_source)
            handle.memory = (*tuple.__iter__(handle), *handle.written)
            _origins[tuple.__getitem__(handle, _KEYS[len(handle)])] = plan
        handle.plan, handle._filled, mark = plan, False, order.mark(capturing)
        if mark is not None and mark.capturing:
            handle._every()
        handle._mark = mark
        return handle

    def _every(self) -> Tuple[torch.Tensor, ...]:
        """All of them, with their contents."""
        every = tuple(super().__iter__())
        if not self._filled:
            if self._mark is not None:
                self._mark.wait(*every, *self.written)
            with torch.inference_mode():  # outside of which tensors that were made within it cannot be written
                (self._fill if len(every) == 6 else self._fill_nodes)(*every)
            # Not before: a fill that failed is repeated, and two threads that fill write the same. One in a capture, of a handle
            # that was made outside, is for the graph.
            self._filled = self._mark is None or self._mark.capturing or not torch.cuda.is_current_stream_capturing()
        return every

    def _fill(self, prefix: torch.Tensor, sent: torch.Tensor, received: torch.Tensor, source: torch.Tensor,
              in_rank: torch.Tensor, head: torch.Tensor) -> None:
        self.plan._native.metadata(prefix.view(-1), 0, None, -1, -1, -1, -1, -1, -1, 0)
        chosen, own = in_rank.to(torch.bool), prefix[:, self.plan.comm.rank]
        sent.copy_(chosen.sum(0, dtype=torch.int32).view(-1, 1))
        received.copy_(torch.diff(own, prepend=own.new_zeros(1)).view(-1, 1))
        source.remainder_(_STRIDE)
        head.copy_(torch.where(chosen, chosen.cumsum(0, dtype=torch.int32) - 1, -1))

    def _fill_nodes(self, in_rank: torch.Tensor, to_node: torch.Tensor, to_rank: torch.Tensor, forwarded: torch.Tensor,
                    forwarded_sum: torch.Tensor, first: torch.Tensor, behind: torch.Tensor, meta: torch.Tensor,
                    head: torch.Tensor, _: torch.Tensor) -> None:
        prefix, source = self.written
        chosen, own = in_rank.to(torch.bool), prefix[:, self.plan.comm.rank]
        by_node = chosen.view(len(chosen), len(to_node), len(to_rank) // len(to_node)).any(2)
        to_node.copy_(by_node.sum(0, dtype=torch.int32).view(-1, 1))
        to_rank.copy_(chosen.sum(0, dtype=torch.int32).view(-1, 1))
        forwarded.zero_()
        forwarded_sum.zero_()
        first[0] = 0
        first[1:] = own[:-1].view(-1, 1)
        behind.copy_(own)
        words = meta.view(torch.int32)
        words[:, 0] = source.div(_STRIDE, rounding_mode="floor")
        words[:, 1] = source.remainder(_STRIDE)
        head.copy_(torch.where(by_node, by_node.cumsum(0, dtype=torch.int32) - 1, -1))

    def __getitem__(self, index: Any) -> Any:
        return self._every()[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._every())

    def __add__(self, other: Any) -> Any:
        return self._every() + tuple(other)

    def __radd__(self, other: Any) -> Any:
        return tuple(other) + self._every()

    def __repr__(self) -> str:
        return repr(self._every())


def _more(ranks: int, tokens: int) -> int:
    """Elements of a handle behind recv_source, on one node."""
    return ranks * (ranks + 2 + tokens)


class _Runtime:
    """The methods of DeepEP's C++ object that some programs call."""

    def __init__(self, comm: epkit.Communicator) -> None:
        self._comm = comm

    def is_available(self) -> bool:
        return not self._comm.closed

    def get_num_rdma_ranks(self) -> int:
        return self._comm.nodes

    def get_rdma_rank(self) -> int:
        return self._comm.node

    def get_root_rdma_rank(self, is_global: bool) -> int:
        return self._comm.rank % (self._comm.size // self._comm.nodes) if is_global else 0

    def get_local_device_id(self) -> int:
        return self._comm.device.index or 0


class Buffer(LowLatencyCalls):
    """Expert-parallel communication of a group of ranks: dispatch and combine, also with low latency.

    On several hosts, see epkit.Communicator for what has to be set.

    Attributes: rank, group_size, group, num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_sms (of the class), runtime.

    Arguments:
        group: process group (gloo or nccl). Its ranks use torch's current CUDA device, or the CPU where there is none
            ($EPKIT_BACKEND=host: always).
        comm: communicator of mpi4py in place of a group.
        low_latency_mode: kept as an attribute; every buffer can do both.
        explicitly_destroy: destroy() may be called; otherwise the buffer goes with its last reference.
        enable_shrink: low-latency calls mask ranks that do not come before the deadline, and go on without them. A masked rank
            that comes later raises epkit.GroupError (EP_E_EXCLUDED). With num_rdma_bytes of a size hint a rank may be
            missing from the first call on, see get_low_latency_rdma_size_hint().

    Every wait has a deadline: $EPKIT_TIMEOUT_MS, or 100 s, after which an exception names the rank that did not come.

    On GPUs of one host dispatch() sends before the counts are known, into memory for a quarter more rows than in the dispatches
    before, of which it returns the beginning; where a rank receives more, all begin again. Up to $EPKIT_EARLY_OUTPUTS (2) results
    with less than half of their memory in use may exist at a time; further ones wait for the counts. 0: all do.

    Ignored: num_nvl_bytes and num_rdma_bytes (kept as attributes; buffers are made as calls need them), num_qps_per_rank,
    allow_nvlink_for_low_latency_mode; allow_mnnvl and use_fabric, with a warning on GPUs of several hosts.
    """

    num_sms: int = 20
    _num_sms_set = False

    def __init__(self, group: Any = None, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False,
                 num_qps_per_rank: int = 24, allow_nvlink_for_low_latency_mode: bool = True, allow_mnnvl: bool = False,
                 explicitly_destroy: bool = False, enable_shrink: bool = False, comm: Any = None,
                 use_fabric: bool = False) -> None:
        if group is None and comm is None:
            raise ValueError("Buffer: give a process group, or a communicator of mpi4py as comm")
        self._comm = epkit.Communicator(group if group is not None else comm, timeout=deadline())
        if (allow_mnnvl or use_fabric) and self._comm.is_cuda and self._comm.nodes > 1:
            warnings.warn(f"Buffer: {'allow_mnnvl' if allow_mnnvl else 'use_fabric'} has no effect: between hosts rows travel over "
                          "the network, also where NVLink connects them", RuntimeWarning, stacklevel=2)
        self.group = group if group is not None else comm
        self.rank, self.group_size = self._comm.rank, self._comm.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self.runtime: Optional[_Runtime] = _Runtime(self._comm)
        self._comm_stream = CommStream(self._comm)
        self._low_latency: List[epkit.LowLatency] = []
        self._masked: Dict[int, bool] = {}
        self._scratch = {}
        self._used: Optional[epkit.LowLatency] = None
        self._graphs = False
        self._early, self._expected = EarlyOutputs(self._comm), _LEAST_EXPECTED
        if enable_shrink:
            self._low_latency += hinted(self._comm, num_rdma_bytes, self.group_size)

    def destroy(self) -> None:
        """Leaves the group and frees everything. Needs explicitly_destroy."""
        if not self.explicitly_destroy:
            raise AssertionError("destroy() needs Buffer(explicitly_destroy=True)")
        self._comm.free()
        self._low_latency.clear()
        self._used = None
        self._scratch.clear()
        self.runtime = None

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: kernels are for compute capability 9.0 and later."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets the number of multiprocessors that dispatch and combine occupy on CUDA; even. Read by get_dispatch_config(), too.

        By default, and without another number in `config`, the library uses as many as saturate the links.
        """
        if want_integer(new_num_sms, "set_num_sms", "new_num_sms") < 0 or new_num_sms % 2:
            raise AssertionError(f"the number of multiprocessors must be even and not negative, not {new_num_sms}")
        Buffer.num_sms, Buffer._num_sms_set = new_num_sms, True

    def _apply_sms(self, config: Optional[Config]) -> None:
        """Passes the number of multiprocessors that the program has chosen, if any, to the library."""
        if config is not None and not isinstance(config, Config):
            raise TypeError(f"config is a {type(config).__name__}, must be a deep_ep.Config")
        sms = Buffer.num_sms if config is None else config.num_sms
        if not Buffer._num_sms_set and sms == Buffer.num_sms:
            sms = 0
        self._comm._use_num_sms(sms)

    @staticmethod
    def capture() -> EventOverlap:
        """An event on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int,
                                       num_experts: int) -> int:
        """Bytes of a low-latency buffer. A Buffer with enable_shrink of so many num_rdma_bytes, the same on all ranks, allocates for
        these sizes when it is made. Calls of this hidden size and this number of experts, of up to so many tokens per rank and
        a top-k of up to 32 always use that memory: a rank may be missing from the first one on. The first call of other sizes
        allocates, and needs all ranks."""
        return size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def get_comm_stream(self) -> Optional[torch.cuda.Stream]:
        """The communication stream: a torch.cuda.Stream; None on the CPU, which has none."""
        return self._comm_stream.get()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Any number of ranks."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Any number of ranks."""
        return Config(Buffer.num_sms)

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, previous_event: Optional[EventOverlap] = None,
                            async_finish: bool = False, allocate_on_comm_stream: bool = False
                            ) -> Tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor, EventOverlap]:
        """The layout of the routing topk_idx, int64 [N, K] (-1: none): how many tokens go to each rank and each expert.

        Returns (num_tokens_per_rank int32 [R], num_tokens_per_rdma_rank int32 [hosts] or None on one host,
        num_tokens_per_expert int32 [E], is_token_in_rank bool [N, R], event).
        """
        order, given = self._comm_stream.order(async_finish, previous_event, None, allocate_on_comm_stream), topk_idx
        if isinstance(topk_idx, torch.Tensor) and not topk_idx.is_contiguous():
            with order.on_stream():
                topk_idx = topk_idx.contiguous()
        try:
            with order.allocating():
                per_rank, per_expert, in_rank = self._comm._native.layout(topk_idx, num_experts, order.stream)
        except epkit.ArgumentError as error:
            raise self._with_advice(error)
        if self._comm.nodes == 1:
            return per_rank, None, per_expert, in_rank, order.done(async_finish, (given, per_rank, per_expert, in_rank))
        with order.on_stream():
            by_host = in_rank.view(-1, self._comm.nodes, self.group_size // self._comm.nodes).any(2)
            per_host = by_host.sum(0, dtype=torch.int32)
        return per_rank, per_host, per_expert, in_rank, order.done(async_finish, (given, per_rank, per_expert, in_rank), (per_host,))

    def _with_advice(self, error: epkit.ArgumentError) -> epkit.ArgumentError:
        """The error, which for invalid routing also says what this rank owes to the others."""
        if getattr(error, "name", "") == "EP_E_ROUTING" and self.group_size > 1:
            advise(error, "ranks with valid routing wait in dispatch() for this one, until their deadline: repeat the call with valid "
                   "routing, or free the Buffer, which they learn at once")
        return error

    def _plan_of(self, handle: Any, call: str) -> epkit.Plan:
        plan = getattr(handle, "plan", None) or _origin_of(handle, _KEYS)
        if not isinstance(plan, epkit.Plan):
            raise TypeError(f"{call}: handle is a {type(handle).__name__}, must be what Buffer.dispatch() returned, or a tuple "
                            "of its tensors, not of copies")
        _check_group(plan, self._comm, call)
        return plan

    def _new_plan(self, order: Order, topk_idx: Optional[torch.Tensor], is_token_in_rank: Optional[torch.Tensor],
                  num_tokens_per_expert: Optional[torch.Tensor], alignment: int, worst: int) -> epkit.Plan:
        if num_tokens_per_expert is None or (topk_idx is None and is_token_in_rank is None):
            raise AssertionError("dispatch: without a handle give num_tokens_per_rank, is_token_in_rank and "
                                 "num_tokens_per_expert of get_dispatch_layout()")
        want_tensor(num_tokens_per_expert, "dispatch", "num_tokens_per_expert", "[E]")
        mask, counts = (is_token_in_rank, num_tokens_per_expert) if topk_idx is None else (None, None)
        try:
            return epkit.Plan(self._comm, topk_idx, num_tokens_per_expert.shape[0], mask, counts, False, alignment, False, worst, 0,
                              order.stream)
        except epkit.ArgumentError as error:
            raise self._with_advice(error)

    def _send(self, order: Order, x: Rows, topk_idx: Optional[torch.Tensor], topk_weights: Optional[torch.Tensor],
              is_token_in_rank: Optional[torch.Tensor], num_tokens_per_expert: Optional[torch.Tensor], alignment: int, worst: int
              ) -> Tuple[epkit.Plan, PlanRows, Handle]:
        """A plan, and its dispatch. On GPUs of one host rows are sent before their host knows the counts, where they fit the number
        that is expected of each rank. Else no rank sends any, and all begin again."""
        capturing = order.capturing()
        early = not worst and self._early.able and not capturing
        plan = self._new_plan(order, topk_idx, is_token_in_rank, num_tokens_per_expert, alignment, self._expected if early else worst)
        sent: Optional[Tuple[PlanRows, Handle]] = None
        try:
            sent = self._send_rows(plan, order, x, topk_idx, topk_weights, is_token_in_rank, early, capturing)
        except epkit.ArgumentError as error:
            if not early or not is_refused(error):
                raise
            self._end_refused(error, order)
        if sent is None:
            plan = self._new_plan(order, topk_idx, is_token_in_rank, num_tokens_per_expert, alignment, 0)
            sent = self._send_rows(plan, order, x, topk_idx, topk_weights, is_token_in_rank, False, capturing)
        if early:  # programs alternate between sizes: the largest one fades slowly
            self._expected = max(_LEAST_EXPECTED, plan._most_recv + plan._most_recv // 4, self._expected * 15 // 16)
        return (plan, *sent)

    def _send_rows(self, plan: epkit.Plan, order: Order, x: Rows, topk_idx: Optional[torch.Tensor],
                   topk_weights: Optional[torch.Tensor], is_token_in_rank: Optional[torch.Tensor], early: bool, capturing: bool
                   ) -> Tuple[PlanRows, Handle]:
        """The dispatch. Without memory for the rows that are expected it waits for the counts."""
        with order.allocating():
            if early and not self._early.has_room():
                self._early.settle(plan)
            placed: Optional[Tuple[Optional[torch.Tensor], PlanRows]] = None
            try:
                placed = self._place_rows(plan, order, x, topk_idx, topk_weights)
            except torch.cuda.OutOfMemoryError:
                if not (early and plan.fixed):
                    raise
                self._early.settle(plan)
            source, rows = placed or self._place_rows(plan, order, x, topk_idx, topk_weights)
            if early:
                memory, expected = rows.x, plan.out_rows
                rows, _ = plan._settle(rows, None)
                if expected > 2 * plan.out_rows:
                    self._early.add(memory)
            if not plan.fixed:
                return rows, Handle.of(plan, order, is_token_in_rank, topk_idx, source, capturing)
        with order.on_stream():  # where a capture fills the handle
            return rows, Handle.of(plan, order, is_token_in_rank, topk_idx, source, capturing)

    def _place_rows(self, plan: epkit.Plan, order: Order, x: Rows, topk_idx: Optional[torch.Tensor],
                    topk_weights: Optional[torch.Tensor]) -> Tuple[Optional[torch.Tensor], PlanRows]:
        """(memory for a handle, rows). It begins with recv_source of the dispatch; None between nodes."""
        more, source = _more(self.group_size, plan._n_tokens), None
        if self._comm.nodes == 1:
            source = self._comm._native.new((plan.out_rows + more,), torch.int32)
        return source, plan._dispatch(*_with_scales(x), topk_weights, topk_idx is not None, False, None, order.stream, source,
                                      0 if source is None else _STRIDE)

    def _end_refused(self, error: epkit.ArgumentError, order: Order) -> None:
        """After a dispatch that was refused on all ranks: what the library reports of it, too. What it reports of an earlier
        operation is the program's to know."""
        try:
            self._comm.synchronize(order.stream)
        except epkit.ArgumentError as reported:
            if _refusal_of(reported) != _refusal_of(error):
                raise reported from None

    @_naming_worst
    def dispatch(self, x: Rows, handle: Optional[Handle] = None, num_tokens_per_rank: Optional[torch.Tensor] = None,
                 num_tokens_per_rdma_rank: Optional[torch.Tensor] = None, is_token_in_rank: Optional[torch.Tensor] = None,
                 num_tokens_per_expert: Optional[torch.Tensor] = None, topk_idx: Optional[torch.Tensor] = None,
                 topk_weights: Optional[torch.Tensor] = None, expert_alignment: int = 1, num_worst_tokens: int = 0,
                 config: Optional[Config] = None, previous_event: Optional[EventOverlap] = None, async_finish: bool = False,
                 allocate_on_comm_stream: bool = False
                 ) -> Tuple[Rows, Optional[torch.Tensor], Optional[torch.Tensor], Optional[List[int]], Optional[Handle],
                            EventOverlap]:
        """Sends each token to the ranks that own one of its experts. Collective.

        Arguments:
            x: bfloat16 [N, H], or (float8_e4m3fn [N, H], scales float32 or int32 [N, any] or [N], any strides). Rows may be of
                any other type, too, with a multiple of 16 bytes each: their bits are moved. nvfp4 and mxfp8: see
                epkit.Plan.dispatch().
            handle: of an earlier dispatch: the same routing again, without top-k and without waiting on the host.
            is_token_in_rank, num_tokens_per_expert: of get_dispatch_layout(); enough where there is no topk_idx.
            topk_idx, topk_weights: int64 [N, K] (-1: none), float32 [N, K].
            expert_alignment: counts per expert are rounded up to a multiple of it.
            num_worst_tokens: > 0: outputs have that many rows, nothing waits on the host, the list is empty, and rows
                beyond the received ones have the index -1. If they are too few, this call raises; on GPUs, which check it in
                the stream, the next call with num_worst_tokens does.
            previous_event, async_finish, allocate_on_comm_stream: see the stream rules in epkit/compat/deep_ep/_order.py.

        Ignored: config but its num_sms, num_tokens_per_rank, num_tokens_per_rdma_rank.

        Returns (rows as x, local expert numbers int64 [n, K] with -1, weights [n, K], list of L counts, handle, event);
        with a handle (rows, None, None, None, None, event).
        """
        order = self._comm_stream.order(async_finish, previous_event, None, allocate_on_comm_stream)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise AssertionError("dispatch: with a handle there is no topk_idx and no topk_weights")
            plan = self._plan_of(handle, "dispatch")
            self._apply_sms(config)
            given, x = x, order.rows(_with_columns(x))
            with order.allocating():
                rows = plan._dispatch(*_with_scales(x), None, False, False, None, order.stream)
            return _as_given(given, rows), None, None, None, None, order.done(async_finish, (x, rows))
        if topk_idx is None and topk_weights is not None:
            raise AssertionError("dispatch: topk_weights are of topk_idx, which is not given")
        given = x
        if not (type(x) is torch.Tensor and x.dtype is torch.bfloat16 and _C.is_ready(x, topk_weights)):
            x, topk_weights = order.rows(_with_columns(x)), order.input(topk_weights)
        self._apply_sms(config)
        check_inputs(self._comm, topk_idx, x, topk_weights, is_token_in_rank)
        if num_worst_tokens:
            raise_refused(self._comm, order.stream)
        plan, rows, new = self._send(order, x, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert, expert_alignment,
                                     num_worst_tokens)
        event = order.done(async_finish, (x, rows, topk_idx, topk_weights, num_tokens_per_expert, new.memory),
                           new.memory if plan.fixed else ())
        counts: List[int] = [] if plan.fixed else plan._native.info()[4]  # type: ignore[assignment]
        return _as_given(given, rows), rows.topk_idx, rows.topk_weights, counts, new, event

    @_naming_worst
    def combine(self, x: torch.Tensor, handle: Handle, topk_weights: Optional[torch.Tensor] = None,
                bias: Union[None, torch.Tensor, Tuple[torch.Tensor, torch.Tensor]] = None, config: Optional[Config] = None,
                previous_event: Optional[EventOverlap] = None, async_finish: bool = False,
                allocate_on_comm_stream: bool = False) -> Tuple[torch.Tensor, Optional[torch.Tensor], EventOverlap]:
        """Adds up each token's rows, without weights. Collective.

        Arguments:
            x: bfloat16 [n, H]: a row for each received one.
            topk_weights: float32 [n, K]: added up, too.
            bias: none, one or two bfloat16 [N, H], added first.

        Ignored: config but its num_sms.

        Returns (bfloat16 [N, H], float32 [N, K] or None, event). The sum is computed in float32 in rank order and rounded once;
        on several hosts each other host adds its own rows first.
        """
        plan = self._plan_of(handle, "combine")
        order = self._comm_stream.order(async_finish, previous_event, None, allocate_on_comm_stream)
        self._apply_sms(config)
        if not _C.is_ready(x, topk_weights):
            x, topk_weights = order.input(x), order.input(topk_weights)
        biases = () if bias is None else tuple(order.input(one) for one in _biases(bias))
        with order.allocating():
            out, weights = plan._combine(x, topk_weights, biases, 0, None, order.stream)
        return out, weights, order.done(async_finish, (x, topk_weights, biases, out, weights))

    def internode_dispatch(self, x: Rows, handle: Optional[Handle] = None, num_tokens_per_rank: Optional[torch.Tensor] = None,
                           num_tokens_per_rdma_rank: Optional[torch.Tensor] = None,
                           is_token_in_rank: Optional[torch.Tensor] = None,
                           num_tokens_per_expert: Optional[torch.Tensor] = None, topk_idx: Optional[torch.Tensor] = None,
                           topk_weights: Optional[torch.Tensor] = None, expert_alignment: int = 1,
                           config: Optional[Config] = None, previous_event: Optional[EventOverlap] = None,
                           async_finish: bool = False, allocate_on_comm_stream: bool = False, num_worst_tokens: int = 0) -> Any:
        """dispatch(), with the order of arguments that DeepEP has here."""
        return self.dispatch(x, handle, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert,
                             topk_idx, topk_weights, expert_alignment, num_worst_tokens, config, previous_event, async_finish,
                             allocate_on_comm_stream)

    internode_combine = combine


run_untraced(Handle.__getitem__, Handle.__iter__, Handle.__add__, Handle.__radd__, Handle.__repr__, Buffer.get_dispatch_layout,
               Buffer.dispatch, Buffer.combine)

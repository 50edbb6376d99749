# SPDX-License-Identifier: Apache-2.0
"""NIXL EP: Buffer."""
import os
from typing import Any, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import torch
import torch.distributed as dist

import epkit
from epkit._tensors import run_untraced, want_integer, want_tensor
from epkit.members import want_store

from ..deep_ep._low_latency import LowLatencyCalls, LowLatencyHandle, hinted, size_hint
from ..deep_ep._order import CommStream
from ..deep_ep.elastic import not_here
from ._rendezvous import rendezvous

DEFAULT_TIMEOUT_MS = 30000
_HIGH_THROUGHPUT = "use epkit.compat.deep_ep.Buffer, whose ranks cannot change"


class Buffer(LowLatencyCalls):
    """Dispatch and combine for decoding of ranks that come and go.

    A Buffer begins with this rank alone, or with the ranks of a group. Experts belong to ranks: rank r has r * L to r * L + L - 1,
    connected or not, with L = num_experts_per_rank. Rows are [L, R*M, H] for calls of up to M tokens per rank, with R = num_ranks of
    update_memory_buffers(). A choice of an expert of a rank that is not connected counts as -1.

    connect_ranks() and disconnect_ranks() are collective over the ranks that are connected afterwards: those that are connected
    call them for the same ranks, a new one calls connect_ranks() for all others. They rendezvous in the store, for which they have ten
    times the deadline, and make a communicator. Handles, hooks and captured graphs of before are invalid then, and masks clear.
    A new rank that masks all others before its first call makes calls by itself, to warm up, until it unmasks one of them.
    On several hosts $EPKIT_RANKS_PER_NODE must be set where ranks are missing: with 1 any may be, otherwise those of the same places on
    all nodes that have some; else epkit.UnsupportedError, on all of them.

    A rank that is left out, and lives, has no access to the others. If a rank does not come, epkit.PeerError names it, and the
    call can be made again; where it has died meanwhile, and some count it as connected, all call disconnect_ranks() for it.

    Attributes: rank, group_size (num_ranks), group, comm, tcp_store_group, num_rdma_bytes, low_latency_mode, explicitly_destroy,
    runtime (None after destroy()).

    Arguments, by name alone, because their order has changed between versions of NIXL EP:
        rank: the number of this rank.
        low_latency_mode: must be True.
        explicitly_destroy: destroy() may be called; otherwise the buffer goes with its last reference.
        group, comm: a process group, or a communicator of mpi4py: without a store connect_ranks() for all its ranks has its rendezvous there.
        tcp_store_group: a torch.distributed.Store, such as a TCPStore, that all ranks reach.
        timeout_ms: deadline of the waits of a call, which then masks those that did not come. None: $EPKIT_TIMEOUT_MS, else 30 s.

    Ignored: nvlink_backend, disable_ll_nvlink; enable_shrink (always on); nvl_group_size.
    """

    runtime: Optional[str]
    _OTHER = "another Buffer, or of before its ranks have changed"

    def __init__(self, *, rank: int = 0, low_latency_mode: bool = True, explicitly_destroy: bool = False, group: Any = None,
                 comm: Any = None, tcp_store_group: Any = None, timeout_ms: Optional[int] = None, nvlink_backend: str = "nixl",
                 disable_ll_nvlink: bool = False, enable_shrink: bool = True, nvl_group_size: Optional[int] = None) -> None:
        if not low_latency_mode:
            not_here("nixl_ep.Buffer(low_latency_mode=False)", _HIGH_THROUGHPUT)()
        if group is not None and comm is not None:
            raise ValueError("nixl_ep.Buffer: group and comm exclude each other")
        self.rank = want_integer(rank, "nixl_ep.Buffer", "rank")
        self.group, self.comm, self.tcp_store_group = group, comm, tcp_store_group
        self.low_latency_mode, self.explicitly_destroy, self.enable_shrink = True, explicitly_destroy, True
        given = timeout_ms if timeout_ms is not None else os.environ.get("EPKIT_TIMEOUT_MS") or DEFAULT_TIMEOUT_MS
        if not str(given).isdecimal() or not int(given):
            raise ValueError(f"nixl_ep.Buffer: timeout_ms (or $EPKIT_TIMEOUT_MS) is {given!r}, must be a number of milliseconds")
        self._seconds = int(given) / 1000
        self.group_size = self.num_experts_per_rank = self.num_rdma_bytes = self.num_nvl_bytes = 0  # until update_memory_buffers()
        self._connected = {self.rank}
        self._next: Optional[Tuple[epkit.Communicator, List[epkit.LowLatency]]] = None  # of all that are connected, if these are more
        self._new: Set[int] = set()  # connected, but not in the communicator that calls use; _staged: those of them that are masked
        self._staged: Set[int] = set()
        self._active = False  # the attributes of LowLatencyCalls are there
        self._again = False  # the next call needs another communicator
        self._low_latency: List[epkit.LowLatency] = []
        self._scratch, self.runtime = {}, "libepkit"

    def destroy(self) -> None:
        """Leaves the others and frees everything. Needs explicitly_destroy."""
        if not self.explicitly_destroy:
            raise AssertionError("destroy() needs Buffer(explicitly_destroy=True)")
        for comm in ([self._next[0]] if self._next else []) + ([self._comm] if self._active else []):
            comm.free()
        self._next, self._active, self._connected, self._new, self._staged = None, False, {self.rank}, set(), set()
        self._low_latency, self._used, self.runtime, self._again = [], None, None, False
        self._scratch.clear()

    @staticmethod
    def get_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        """For num_rdma_bytes of update_memory_buffers(): memory for calls of this hidden size, up to so many tokens and a top-k of up to
        32 is allocated where ranks are connected. Otherwise the first call of a size allocates, and needs all of them."""
        return size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    get_low_latency_buffer_size_hint = get_rdma_size_hint

    def update_memory_buffers(self, num_ranks: int, num_experts_per_rank: int, num_rdma_bytes: int = 0,
                              num_nvl_bytes: int = 0) -> None:
        """The most ranks that may ever be connected, and L. Once, before connect_ranks(). num_nvl_bytes: ignored."""
        call = "update_memory_buffers"
        num_ranks, local = want_integer(num_ranks, call, "num_ranks"), want_integer(num_experts_per_rank, call, "num_experts_per_rank")
        if self.group_size:
            raise epkit.ArgumentError(f"{call}: it has been called: make another Buffer for other sizes")
        if not 0 <= self.rank < num_ranks or local < 1:
            raise epkit.ArgumentError(f"{call}: num_ranks is {num_ranks}, and this is rank {self.rank}, which must be 0 to num_ranks - 1; "
                                      f"num_experts_per_rank is {local}, must be 1 or more")
        self.group_size, self.num_experts_per_rank, self.num_rdma_bytes = num_ranks, local, num_rdma_bytes

    def set_tcp_store_group(self, tcp_store_group: Any) -> None:
        """The store for the next changes; None: none."""
        if tcp_store_group is not None:
            want_store(tcp_store_group, "set_tcp_store_group", "tcp_store_group")
        self.tcp_store_group = tcp_store_group

    def _numbers(self, ranks: Iterable[int], call: str) -> Set[int]:
        if not hasattr(ranks, "__iter__"):
            raise TypeError(f"{call}: remote_ranks is a {type(ranks).__name__}, must be numbers of ranks")
        numbers = {want_integer(rank, call, "remote_ranks") for rank in ranks}
        if not self.group_size:
            raise epkit.ArgumentError(f"{call}: call update_memory_buffers() first")
        if not numbers or min(numbers) < 0 or max(numbers) >= self.group_size:
            raise epkit.ArgumentError(f"{call}: remote_ranks is {sorted(numbers)}, must be ranks, 0 to {self.group_size - 1}")
        return numbers

    def _rendezvous_of(self, members: List[int]) -> Any:
        """The bootstrap of a communicator of these ranks."""
        if members == [self.rank]:
            stores: Any = dist
            return epkit.Members(stores.HashStore(), members, self.rank, "alone")
        if self.tcp_store_group is not None:
            return rendezvous(self.tcp_store_group, members, self.rank, 10 * self._seconds)
        first = self.group if self.group is not None else self.comm
        size = 0 if first is None else first.size() if self.group is not None else first.Get_size()
        if members != list(range(size)):
            raise epkit.ArgumentError(f"nixl_ep: the ranks {members} have no store for the rendezvous: pass tcp_store_group to Buffer, or call "
                                      "set_tcp_store_group() (etcd is not provided)")
        return first

    def _change(self, call: str, connected: Set[int], staged: Set[int]) -> None:
        """Makes a communicator of the ranks that are connected from now on. Calls use it at once if none of them is staged; otherwise
        they go on in that of before, in which the staged ones have no calls to miss."""
        if staged and not staged - self._staged:
            raise epkit.ArgumentError(f"{call}: rank {min(staged)} is connected and not active: call update_mask_buffer() for it first")
        if self._active and self._new - self._staged:
            self._activate()
        made, before = self._made(sorted(connected)), self._next
        # Another thread may begin calls while new ranks are staged: it must not find them before their communicator.
        self._next, self._staged, self._new = made, staged, (self._new | connected - self._connected) & connected
        self._connected = connected
        if before is not None:
            before[0].free()
        if not staged and (self._active or not self._new):
            self._activate()

    def _made(self, members: List[int]) -> Tuple[epkit.Communicator, List[epkit.LowLatency]]:
        comm = None
        try:
            comm = epkit.Communicator(self._rendezvous_of(members), slots=self.group_size, slot=self.rank, timeout=self._seconds,
                                      drop_absent=True)
            return comm, hinted(comm, self.num_rdma_bytes, self.group_size, self.group_size * self.num_experts_per_rank)
        except epkit.Error:
            if comm is not None:
                comm.free()
            raise

    def _use(self, made: Tuple[epkit.Communicator, List[epkit.LowLatency]]) -> None:
        if self._active:
            self._comm.free()
        else:
            self._comm_stream = CommStream(made[0])
        self._comm, self._low_latency = made
        self._active, self._used, self._graphs, self._again = True, None, False, False
        self._masked: Dict[int, bool] = {}

    def _activate(self) -> None:
        """Uses the communicator of all connected ranks. Those that are staged are masked in it."""
        assert self._next is not None
        self._use(self._next)
        masked, self._next, self._new, self._staged = self._staged, None, set(), set()
        for rank in masked:
            self.low_latency_update_mask_buffer(rank, True)

    def _lost(self, ranks: Set[int]) -> Set[int]:
        """Those of them that count as connected, and cannot be called any more: they have died or left, or left this rank out."""
        called = ranks & self._connected - self._new - {self.rank} if self._active else set()
        if called:
            try:
                self._comm.check()
                return called & set(self._comm.failed_ranks())
            except epkit.Error:
                pass
        return called

    def connect_ranks(self, remote_ranks: Iterable[int], activate: bool = True) -> None:
        """Connects these ranks, of which this one and those that are connected count as well; anew those that have died, of which
        another process takes the place, and all where they have left this rank out. See Buffer.

        With activate=False the new ranks are masked at first, and calls go on without them, up to the dispatch that follows
        update_mask_buffer(rank, False) for all of them, at the same place in the calls of the others. The new ones connect as
        always, and their first call waits for that, until its deadline.
        """
        ranks = self._numbers(remote_ranks, "connect_ranks")
        self._connected -= self._lost(ranks)
        new = ranks - self._connected
        if new or not (self._active or self._next):
            self._change("connect_ranks", self._connected | ranks, self._staged - ranks if activate else self._staged | new)
        elif activate:
            for rank in ranks - {self.rank}:
                self.update_mask_buffer(rank, False)

    def disconnect_ranks(self, remote_ranks: Iterable[int]) -> None:
        """Goes on without these ranks, alive or not, which do not make this call. See Buffer."""
        ranks = self._numbers(remote_ranks, "disconnect_ranks")
        if self.rank in ranks:
            raise epkit.ArgumentError(f"disconnect_ranks: remote_ranks is {sorted(ranks)}: rank {self.rank} is this one")
        self._change("disconnect_ranks", self._connected - ranks, self._staged - ranks)

    def _want_active(self, call: str, begins: bool = False) -> None:
        """begins: calls may use another communicator from this one on."""
        if (begins or not self._active) and self._new - self._staged:
            self._activate()
        elif not self._active and self._next is not None:
            self._use(self._made([self.rank]))
        elif begins and self._again:
            self._use(self._made(sorted(self._connected - self._new)))
        if not self._active:
            raise epkit.ArgumentError(f"{call}: no ranks are connected and active: call connect_ranks() first")

    def low_latency_dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int,
                             num_experts: Optional[int] = None, *args: Any, **kwargs: Any) -> Any:
        """As of epkit.compat.deep_ep.Buffer. num_experts: L times a number of ranks; the shapes are those of the class."""
        self._want_active("dispatch", begins=True)
        local = self.num_experts_per_rank
        most = self.group_size * local
        if num_experts is None:
            num_experts = most
        if not 0 < want_integer(num_experts, "dispatch", "num_experts") <= most or num_experts % local:
            raise epkit.ArgumentError(f"dispatch: num_experts is {num_experts}, must be a multiple of the {local} of a rank, up to {most}")
        return super().low_latency_dispatch(x, topk_idx, num_max_dispatch_tokens_per_rank, most, *args, **kwargs)

    def low_latency_combine(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: LowLatencyHandle,
                            *args: Any, **kwargs: Any) -> Any:
        """As of epkit.compat.deep_ep.Buffer."""
        self._want_active("combine")
        return super().low_latency_combine(x, topk_idx, topk_weights, handle, *args, **kwargs)

    dispatch, combine = low_latency_dispatch, low_latency_combine
    ht_dispatch, ht_combine = (not_here(f"nixl_ep.Buffer.{name}", _HIGH_THROUGHPUT) for name in ("ht_dispatch", "ht_combine"))

    def get_local_buffer_tensor(self, dtype: torch.dtype, size: Optional[Sequence[int]] = None, offset: int = 0,
                                use_rdma_buffer: bool = False) -> torch.Tensor:
        """As of epkit.compat.deep_ep.Buffer."""
        self._want_active("get_local_buffer_tensor")
        return super().get_local_buffer_tensor(dtype, size, offset, use_rdma_buffer)

    def get_next_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """bfloat16 [L, R*M, H] to write the experts' outputs into, for a combine with zero_copy. Call this before each."""
        self._want_active("get_next_combine_buffer")
        return self.get_next_low_latency_combine_buffer(handle)

    def barrier(self) -> None:
        """A barrier of the ranks that are not masked, which masks those that do not come."""
        self._want_active("barrier", begins=True)
        if not self._low_latency:
            self._comm.barrier()
        self.clean_low_latency_buffer(0, 0, 0)

    def clean_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """A barrier: buffers need no cleaning."""
        self.barrier()

    def get_comm_stream(self) -> Optional[torch.cuda.Stream]:
        """The communication stream; None on the CPU."""
        self._want_active("get_comm_stream")
        return self._comm_stream.get()

    def update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a connected rank, so that calls leave it out, or unmasks it. Not this one. In stream order, and not collective."""
        rank = want_integer(rank_to_mask, "update_mask_buffer", "rank_to_mask")
        if rank == self.rank and mask or not 0 <= rank < self.group_size or not (mask or rank in self._connected):
            raise epkit.ArgumentError(f"update_mask_buffer: rank_to_mask is {rank}, must be "
                                      + (f"another rank, 0 to {self.group_size - 1}" if mask else "connected"))
        if rank in self._new:
            self._staged = self._staged | {rank} if mask else self._staged - {rank}
        elif self._active and rank in self._connected - {self.rank}:
            self.low_latency_update_mask_buffer(rank, mask)

    def query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Sets mask_status, int32 [num_ranks], to 0 for ranks that are connected and not masked, and to 1 for all others."""
        want_tensor(mask_status, "query_mask_buffer", "mask_status")
        if mask_status.dtype != torch.int32 or list(mask_status.shape) != [self.group_size]:
            raise epkit.ArgumentError(f"query_mask_buffer: mask_status: shape is {list(mask_status.shape)} of {mask_status.dtype}, must be "
                                      f"[{self.group_size}] of torch.int32")
        masked = torch.zeros_like(mask_status)
        if self._active:
            self.low_latency_query_mask_buffer(masked[:self._comm.size])
        for rank in self._new:  # absent in the communicator that calls use
            masked[rank] = 0
        live = self._connected - self._staged
        mask_status.copy_(masked | torch.tensor([int(rank not in live) for rank in range(self.group_size)], device=masked.device))

    def clean_mask_buffer(self) -> None:
        """Unmasks all connected ranks. Not collective: ranks may do so at different times between the same two calls.

        Where one has missed a call, because the others have masked it at their deadline, all of them call this: the next call then
        begins anew, with a rendezvous as for connect_ranks()."""
        self._staged = set()
        if self._active:
            self._again = self._again or self._out_of_step()
            if not self._again:
                self.low_latency_clean_mask_buffer()

    def _out_of_step(self) -> bool:
        """Whether this rank has been masked by another one, or a call has masked one that lives."""
        mask = torch.zeros(self._comm.size, dtype=torch.int32, device=self._comm.device)
        try:
            self._comm.check()
            self.low_latency_query_mask_buffer(mask)
        except epkit.Error:
            return True
        masked = mask.tolist()  # waits for the calls before: whoever has died in them is known afterwards
        called = self._connected - self._new - set(self._comm.failed_ranks()) - {rank for rank, own in self._masked.items() if own}
        return any(masked[rank] for rank in called)


run_untraced(Buffer.low_latency_dispatch, Buffer.low_latency_combine)

# SPDX-License-Identifier: Apache-2.0
"""Communicator: this rank's membership of a group."""
import atexit
import contextlib
import datetime
import functools
import numbers
import os
import signal
import threading
import time
import weakref
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist

from . import _build, _native
from ._native import _C
from ._tensors import OfThisProcess, Stream, want_integer, want_tensor
from .lowlatency import LowLatency
from .members import Members
from .plan import Plan

_Gather = Callable[[bytes, int], bytes]  # (this rank's, timeout in ms) -> those of all ranks
_live: "weakref.WeakSet[Communicator]" = weakref.WeakSet()


@atexit.register
def _free_all() -> None:
    # While the interpreter still works: the library notifies peers that this rank leaves; otherwise they find its process dead.
    for comm in list(_live):
        for _ in range(50):  # a thread may be in a call that ends
            try:
                comm.free()
                break
            except Exception:  # noqa: BLE001 - too late to raise, and other communicators have to be freed, too
                time.sleep(0.02)
        else:  # maybe behind a kernel that waits for a peer: CUDA would wait for that kernel at exit
            with contextlib.suppress(Exception):
                comm.abort()


@functools.lru_cache(maxsize=None)
def _pool_allocator() -> Any:
    """The library's callbacks, for torch. Never freed, because torch's pools keep no reference to it."""
    # dlsym() on the extension module also searches the libepkit that it is linked with.
    return torch.cuda.memory.CUDAPluggableAllocator(_C.__file__, "ep_pool_alloc", "ep_pool_free")


def _meaning(error: RuntimeError) -> Exception:
    """The error of a lost peer, which torch.distributed raises as a RuntimeError: only its text differs from other failures."""
    words = str(error)
    if "imed out" in words or "imeout" in words:
        return TimeoutError(f"not all ranks came to the all-gather of the process group: {words}")
    if "Connection closed by peer" in words or "Connection reset" in words or "Broken pipe" in words:
        lost = _native.PeerError(f"a rank of the process group has ended: {words}")
        lost.status = 302  # EP_E_PEER_DEAD
        return lost
    return error


def _rank_in(group: Any) -> Tuple[int, int]:
    """Rank and size; torch.distributed need not know the group: engines make some of their own, without new_group()."""
    # torch represents a subgroup without this process by an object of an undocumented type.
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("Communicator: this process is no member of the group")
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError("Communicator: call torch.distributed.init_process_group() first, or give a communicator of mpi4py, or "
                               "Members")
        return dist.get_rank(), dist.get_world_size()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"Communicator: group is a {type(group).__name__}, must be a process group of torch.distributed, a "
                        "communicator of mpi4py, or Members")
    return group.rank(), group.size()


def _device_of(group: Optional[dist.ProcessGroup]) -> torch.device:
    """Where tensors are that a group can gather: on the CPU, unless it has no backend there, as nccl has none. Names of backends do
    not tell: without one init_process_group() makes an "undefined" one, of nccl alone where there is a GPU."""
    own: Any = dist.group.WORLD if group is None else group
    try:
        own._get_backend(torch.device("cpu"))
    except RuntimeError:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _gather_of_group(group: Optional[dist.ProcessGroup], size: int) -> _Gather:
    """An all-gather of bytes over a process group of torch.distributed, for the bootstrap of the library."""
    device = _device_of(group)

    def gather(data: bytes, timeout_ms: int) -> bytes:
        with torch.inference_mode(False):  # which older builds of torch cannot receive into
            mine = torch.tensor(list(data), dtype=torch.uint8, device=device)
            every = [torch.empty_like(mine) for _ in range(size)]
        try:
            work = dist.all_gather(every, mine, group=group, async_op=True)
            if device.type == "cuda":
                work.wait()
            else:
                end = time.monotonic() + timeout_ms / 1000
                while not work.is_completed() and time.monotonic() < end:
                    time.sleep(0.0005)  # in which Ctrl-C is handled
                work.wait(datetime.timedelta(seconds=max(end - time.monotonic(), 0.001)))
                # gloo's thread still releases the tensors, which needs the GIL: in an interpreter that ends it would abort the process.
                del work
                time.sleep(0.001)
        except RuntimeError as error:
            raise _meaning(error) from error
        return b"".join(bytes(block.tolist()) for block in every)

    return gather


def _gather_of_mpi(comm: Any) -> _Gather:
    return lambda data, timeout_ms: b"".join(comm.allgather(data))


def _bootstrap_of(group: Any) -> Tuple[int, int, _Gather]:
    """Number in the group, its size, and its all-gather."""
    if isinstance(group, Members):
        return group.ranks.index(group.rank), len(group.ranks), group._rendezvous()._gather
    if hasattr(group, "allgather") and hasattr(group, "Get_rank"):
        return group.Get_rank(), group.Get_size(), _gather_of_mpi(group)
    rank, size = _rank_in(group)
    return rank, size, _gather_of_group(group, size)


def nodes_of(group: Any, size: int, per_node: int) -> int:
    """Ranks per node of a group of so many ranks, if the ranks of the program are divided into nodes of per_node. 0 where the
    nodes have different numbers of the group's ranks, or these are not together."""
    try:
        of_group = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    except Exception:  # noqa: BLE001 - a group that torch.distributed does not know; of all ranks, if it has so many
        if dist.is_initialized() and dist.get_world_size() != size:
            return 0
        of_group = list(range(size))
    nodes = [rank // per_node for rank in of_group]
    each = size // len(set(nodes))
    together = all(node == nodes[i - i % each] for i, node in enumerate(nodes))
    return each if together and each * len(set(nodes)) == size else 0


def _ranks_per_node(group: Any, size: int, network: Optional[str]) -> int:
    """What the environment says; 0: nothing."""
    name, given = "EPKIT_RANKS_PER_NODE", os.environ.get("EPKIT_RANKS_PER_NODE")
    if not given and (network or os.environ.get("EPKIT_NETWORK")):
        name, given = "LOCAL_WORLD_SIZE", os.environ.get("LOCAL_WORLD_SIZE")
    if not given:
        return 0
    if not given.isdecimal() or not int(given):
        raise ValueError(f"Communicator: ${name} is {given!r}, must be a number of ranks, 1 or more")
    return nodes_of(group, size, int(given))


def _choose_backend(backend: Optional[str], device: Union[None, str, torch.device]) -> str:
    if device is not None:
        kind = torch.device(device).type
        if kind not in ("cuda", "cpu"):
            raise ValueError(f"Communicator: device is {str(device)!r}, must be a CUDA device or the CPU")
        fitting = "cuda" if kind == "cuda" else "host"
        if backend in ("cuda", "host") and backend != fitting:
            raise ValueError(f"Communicator: backend is {backend!r}, but device is {str(device)!r}: give one of them")
        backend = backend or fitting
    name = "backend" if backend else "$EPKIT_BACKEND"
    backend = backend or os.environ.get("EPKIT_BACKEND") or ("cuda" if torch.cuda.is_available() else "host")
    if backend not in ("cuda", "host"):
        raise ValueError(f"Communicator: {name} is {backend!r}, neither 'cuda' nor 'host'")
    return backend


def _milliseconds(timeout: Optional[float]) -> int:
    """A timeout in seconds as the library's milliseconds; 0: its default."""
    if timeout is None:
        return 0
    if not isinstance(timeout, numbers.Real):
        raise TypeError(f"Communicator: timeout is a {type(timeout).__name__}, must be a number of seconds")
    if not timeout > 0:
        raise ValueError(f"Communicator: timeout is {timeout}, must be more than 0 seconds")
    return max(1, int(min(timeout * 1000, 2**31 - 1)))


class Communicator(OfThisProcess):
    """One rank's membership of a group of ranks, on one host or several.

    Ranks that share a host form a node. Every host must have the same number of them, with consecutive numbers. Between
    hosts rows travel over TCP, or over RDMA NICs with network="verbs" or EPKIT_NETWORK=verbs; EPKIT_SECRET (the same on all
    ranks) keeps other programs of the network out.

    Arguments:
        group: a process group of torch.distributed (gloo or nccl), None for the default one, a communicator of mpi4py or
            anything else with its Get_rank(), Get_size() and allgather(bytes), or Members. It is used while the communicator is
            made, and not afterwards.
        backend: "cuda" or "host" (CPU). None: by `device`, else $EPKIT_BACKEND, else cuda where torch finds a device.
        device: what tensors will be on. None: torch's current CUDA device, or the CPU.
        timeout: seconds after which a wait raises an exception that names the rank it waited for. None: $EPKIT_TIMEOUT_MS,
            else 30.
        check_values: refuse NaN in weights and scales; costs a pass over them.
        check_distinct: refuse a token that names an expert twice. Otherwise each choice counts: a row of its own in the
            expanded layout and in low latency.
        network: between nodes: "tcp", "verbs", or "emulated" on one host. None: $EPKIT_NETWORK, else by the hosts.
        ranks_per_node: None: $EPKIT_RANKS_PER_NODE, else $LOCAL_WORLD_SIZE where a network is given, by argument or variable,
            else the ranks that share a host. Less, to try several nodes on one host. The variables count all ranks of the
            program, of which the group may have a part.
        slots: the number of ranks R, of which those of the group are present; see regroup(). None: all are.
        slot: the number of this rank. None: that of Members, else its number in the group.
        drop_absent: choices of experts of absent ranks count as -1, otherwise they are refused.

    Creation is collective, as are plan(), low_latency(), barrier(), empty() and all operations: every rank makes the
    same calls in the same order. A communicator and what belongs to it is used by one thread at a time; abort() and
    check() by any.

    Ctrl-C in the main thread ends a wait of a call: where it raises KeyboardInterrupt and the call has not ended half a second
    later, the communicator is aborted, as by abort(). A handler of the program's own runs when the call ends.
    """

    def __init__(self, group: Any = None, *, backend: Optional[str] = None, device: Union[None, str, torch.device] = None,
                 timeout: Optional[float] = None, check_values: bool = False, network: Optional[str] = None,
                 ranks_per_node: Optional[int] = None, check_distinct: bool = False, slots: Optional[int] = None,
                 slot: Optional[int] = None, drop_absent: bool = False) -> None:
        if network is not None and not isinstance(network, str):
            raise TypeError(f"Communicator: network is a {type(network).__name__}, must be a name")
        backend = _choose_backend(backend, device)
        self.is_cuda = backend == "cuda"
        if self.is_cuda:
            index = torch.device(device).index if device is not None else None
            self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        else:
            self.device = torch.device("cpu")
        rank, size, gather = _bootstrap_of(group)
        flags = ((_native.COMM_CHECK_VALUES if check_values else 0) | (_native.COMM_CHECK_DISTINCT if check_distinct else 0)
                 | (_native.COMM_DROP_ABSENT if drop_absent else 0))
        if slot is None:
            slot = group.rank if isinstance(group, Members) else rank
        if not slots and slot != rank:
            raise ValueError(f"Communicator: rank {slot} is number {rank} of the members, and `slots` is not given: say how many ranks "
                             "there are, of which these are present")
        if ranks_per_node is not None:
            per_node = want_integer(ranks_per_node, "Communicator", "ranks_per_node")
        else:
            # Those of a group that has a part of the ranks do not tell; what is set for all of them does.
            given = os.environ.get("EPKIT_RANKS_PER_NODE", "")
            per_node = _ranks_per_node(group, size, network) if not slots and not isinstance(group, Members) else \
                int(given) if given.isdecimal() else 0
        try:
            self._adopt(_C.Comm(rank, size, gather, backend, _milliseconds(timeout), self.device.index if self.is_cuda else -1,
                                flags, network, per_node, want_integer(slots or 0, "Communicator", "slots"),
                                want_integer(slot, "Communicator", "slot")))
        except _native.UnsupportedError as error:
            if self.is_cuda and _build.cuda is None:
                error.args = (f"{error}; this epkit was built without CUDA: install a wheel that scripts/wheel.sh has made with "
                              "EPKIT_CUDA=ON and an nvcc, or use backend=\"host\" with tensors on the CPU",)
            raise
        self.group = group
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            _C.watch_interrupt()

    def _adopt(self, native: _C.Comm) -> None:
        info = native.info()
        self._native = native
        self.rank: int = info["rank"]
        self.size: int = info["nranks"]
        self.backend: str = info["backend"]
        self.node: int = info["node"]
        self.nodes: int = info["nnodes"]
        _live.add(self)

    def __repr__(self) -> str:
        nodes = f", node {self.node} of {self.nodes}" if self.nodes > 1 else ""
        return f"<epkit.Communicator: rank {self.rank} of {self.size}{nodes}, {self.device}{', freed' if self.closed else ''}>"

    @property
    def closed(self) -> bool:
        """Whether free() has been called."""
        return self._native.closed

    def free(self) -> None:
        """Leave the group and free everything, also its plans. Not collective; again: nothing.

        Memory of empty() and of combine buffers lives on while tensors show it.
        """
        self._native.free()

    def barrier(self, stream: Stream = None) -> None:
        """A barrier of all ranks. On CUDA in the order of the stream (default: the current one), on the CPU on return."""
        self._native.barrier(stream)

    def synchronize(self, stream: Stream = None) -> None:
        """Waits on the host until all calls in the stream are complete, and raises their failure, if any."""
        self._native.sync(stream)

    def allgather_bytes(self, data: bytes) -> bytes:
        """`bytes` of every rank, in rank order, as one `bytes`. The same length on all ranks, at most 4096 each.

        Also of anything else with a buffer: array.array, numpy arrays.
        """
        try:
            view = memoryview(data)  # bytes() would take a number for a length
        except TypeError:
            raise TypeError(f"allgather_bytes: data is a {type(data).__name__}, must be bytes, or have a buffer") from None
        return self._native.allgather(view.tobytes())

    def abort(self) -> None:
        """Wakes every wait of every rank of this host: they raise GroupError naming this rank. Any thread."""
        self._native.abort()

    def check(self) -> None:
        """Raises the failure of the communicator, if any, also that of asynchronous work. On GPUs also, until synchronize() has
        raised it, that an operation of fixed capacity was refused. Never waits. Any thread."""
        self._native.check()

    def failed_ranks(self) -> Dict[int, str]:
        """Ranks of which this rank knows that they cannot take part any more, with the name of the status: EP_E_PEER_DEAD,
        EP_E_PEER_LEFT, or that of the failure of the communicator for the rank that it names. Never waits. Any thread.

        EP_E_EXCLUDED: absent. Ranks may know different things. Who goes on is for the program to decide: its controller, or the
        survivors through a store (torch's TCPStore has compare_set()), before any of them frees its communicator. See regroup().
        """
        return self._native.failed()

    @property
    def members(self) -> Tuple[int, ...]:
        """The ranks that are present."""
        failed = self._native.failed()
        return tuple(rank for rank in range(self.size) if failed.get(rank) != "EP_E_EXCLUDED")

    def regroup(self, group: Any) -> None:
        """Changes the members: those of `group` are present from now on, the other ranks absent. After a failure or without one.

        Every member calls it that has the communicator; a new one, or one that was absent, makes a Communicator of this group
        at the same time, with the same slots and its own. Ranks keep their numbers, experts and memory of empty(). Plans of
        before raise, those of fixed capacity until Plan.update(), and low-latency objects until LowLatency.renew(): all members
        make new ones, or renew them, in the same order. On CUDA graphs go on with what was renewed. A rank that is left out, and
        lives, raises from its next call GroupError (EP_E_EXCLUDED), or the failure that its communicator had before; on CUDA it must
        run, not be stopped. It can come back in the same two ways.

        The members agree before anything changes. If that fails, as where one of them does not come, the communicator is as before.
        A member that dies later leaves it failed: then the text names that rank, and failed_ranks() may not. On both this can be called
        again, with another group. All wait here for the last member: let a new process say that it is ready before the others call.

        Arguments:
            group: Members, whose numbers are those of this communicator's ranks, or as of Communicator.
        """
        if isinstance(group, Members):
            group._want_slot(self.rank, self.size)
        self._native.regroup(*_bootstrap_of(group))
        self.group = group

    def info(self) -> Dict[str, Any]:
        """rank, nranks, backend, network, timeout_ms, library_bytes (memory of the library for this rank), as a dict."""
        return self._native.info()

    def stats(self) -> Dict[str, int]:
        """What the last operation of this rank moved, by name, and nanoseconds.

        rows_* and bytes_*: _self and _node (to itself and to other ranks of the node, of its own tokens), _net (what it sent to
        other nodes), _forward (what it placed or read on its node for other nodes). ns_move, ns_total.
        """
        return self._native.stats()

    _sms = 0  # of the last set_num_sms()

    @property
    def num_sms(self) -> int:
        """Multiprocessors of an operation on CUDA, without those that copy rows outside of empty()'s memory; 0 on the CPU."""
        return self._native.sms()

    def set_num_sms(self, sms: int) -> None:
        """Multiprocessors on which a dispatch or combine moves rows on CUDA; 0: the library's default.

        Up to 24 others copy rows outside of empty()'s memory meanwhile; with EPKIT_STRICT_SMS=1 they are part of `sms`.
        May differ between ranks. On the CPU there are none: nothing happens. A few of them cost speed: the default fills
        the links.
        """
        self._native.set_sms(sms)
        self._sms = sms

    def _use_num_sms(self, sms: int) -> None:
        """set_num_sms() for what says it before each operation."""
        if sms != self._sms:
            self.set_num_sms(sms)

    def set_net_memory(self, reserve: int, limit: int = 0) -> None:
        """Memory that holds rows until they are sent to other nodes, on CUDA: of the host, or of the GPU if the NIC accesses it.
        Not collective.

        It grows when an operation needs more, for which all ranks wait: some tenths of a second for each GB. A program that
        knows its sizes reserves it at the beginning; net_memory() after a first pass of the largest size returns how much.
        On one node, and on the CPU, there is none: nothing happens.

        Arguments:
            reserve: bytes to allocate now, if there are fewer.
            limit: bytes; an operation that would need more raises epkit.ResourceError before anything of it is sent. 0: none.
        """
        self._native.set_net_memory(want_integer(reserve, "set_net_memory", "reserve"),
                                    want_integer(limit, "set_net_memory", "limit"))

    def net_memory(self) -> Tuple[int, int]:
        """(bytes that are held, bytes that the largest operation so far needed) of set_net_memory(); 0 on one node."""
        return self._native.net_memory()

    def mem_pool(self) -> "torch.cuda.MemPool":
        """A torch.cuda.MemPool of symmetric memory, which this rank fills alone, on CUDA.

        What torch allocates in `with torch.cuda.use_mem_pool(pool):` lies there: as an output of dispatch or input of combine
        it needs no copy. torch caches what is freed, and releases it with the pool. Release the pool's tensors before the
        pool. Both hold the memory of the communicator beyond free(), as tensors of empty() do. Of several communicators on one
        device, the one whose mem_pool() was called last serves all their pools from then on.

        The first operation on new memory of a pool waits for some milliseconds until the other ranks have mapped it. One that is
        already in a copy of pageable memory in the default stream (.cpu(), .item()) behind the same operation cannot. Where
        that may happen, synchronise the hosts of all ranks between the allocation and the first use, by allgather_bytes().
        """
        if not self.is_cuda:
            raise NotImplementedError("Communicator.mem_pool: a torch.cuda.MemPool is memory of a GPU, and this communicator is "
                                      "on the CPU. Use Communicator.empty(), and give that tensor as `out`, or as x of a combine")
        if not hasattr(torch.cuda, "MemPool"):
            raise NotImplementedError(f"Communicator.mem_pool: torch {torch.__version__} has no torch.cuda.MemPool (2.5 has). Use "
                                      "Communicator.empty(), and give that tensor as `out`, or as x of a combine")
        hold = self._native.pool_attach(self.device.index)
        pool = torch.cuda.MemPool(_pool_allocator().allocator())
        setattr(pool, "_epkit_memory", hold)
        return pool

    def empty(self, *shape: Union[int, Sequence[int]], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """A tensor in symmetric memory: as an output of dispatch or input of combine it needs no copy. Collective.

        Shapes may differ between ranks. The memory lives as long as the communicator, or the last tensor that refers to it.
        """
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"empty: dtype is a {type(dtype).__name__}, must be a torch.dtype")
        given: Tuple[Any, ...] = shape
        if len(shape) == 1 and not isinstance(shape[0], (str, bytes)):
            with contextlib.suppress(TypeError):  # one size, which may be a tensor without dimensions
                given = tuple(given[0])
        sizes = tuple(want_integer(size, "empty", "size") for size in given)
        count = 1
        for size in sizes:
            if size < 0:
                raise _native.ArgumentError(f"empty: shape is {list(sizes)}, no size may be negative")
            count *= size
        capsule = self._native.alloc(count * dtype.itemsize)
        memory: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
        return memory.view(dtype).view(sizes) if count else torch.empty(sizes, dtype=dtype, device=self.device)

    def plan(self, topk_idx: Optional[torch.Tensor] = None, num_experts: int = 0, *,
             token_in_rank: Optional[torch.Tensor] = None, tokens_per_expert: Optional[torch.Tensor] = None,
             expanded: bool = False, alignment: int = 1, zero_padding: bool = False, max_recv_tokens: int = 0,
             max_tokens: int = 0, stream: Stream = None) -> Plan:
        """A plan of a routing of tokens to experts. Collective; see `Plan`.

        Arguments:
            topk_idx: [N, K] int64 or int32 on the communicator's device, -1: no expert. Copied.
            num_experts: E, a multiple of R.
            token_in_rank, tokens_per_expert: in place of topk_idx: bool or uint8 [N, R] and int32 [E].
            expanded: rows grouped by local expert, one for each choice, instead of one for each (token, rank).
            alignment: counts per expert (and starts, when expanded) are rounded up to a multiple of it.
            zero_padding: expanded: dispatch writes zeros between experts.
            max_recv_tokens: > 0: fixed capacity. The host does not wait for the peers' counts, outputs have this many rows, and
                Plan.update() sets new routing in stream order, also in a CUDA graph.
            max_tokens: most tokens of a later update(); 0: N.
        """
        return Plan(self, topk_idx, num_experts, token_in_rank, tokens_per_expert, expanded, alignment, zero_padding,
                    max_recv_tokens, max_tokens, stream)

    def low_latency(self, max_tokens: int, hidden: int, num_experts: int, topk: int, *,
                    mask_dead: bool = False) -> LowLatency:
        """Dispatch and combine for decoding: few tokens, fixed shapes, no plan. max_tokens and topk are the most of any call.
        Collective; see `LowLatency`."""
        return LowLatency(self, max_tokens, hidden, num_experts, topk, mask_dead)

    def layout(self, topk_idx: torch.Tensor, num_experts: int,
               stream: Stream = None) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Counts of a routing, from this rank's tokens alone. On CUDA in the order of the stream (default: torch's current one).

        Returns (tokens_per_rank int32 [R], tokens_per_expert int32 [E], token_in_rank bool [N, R]).
        """
        want_tensor(topk_idx, "layout", "topk_idx", "[N, K]")
        if want_integer(num_experts, "layout", "num_experts") < 1 or num_experts % self.size:
            raise _native.ArgumentError(f"layout: num_experts is {num_experts}, no multiple of {self.size} ranks")
        return self._native.layout(topk_idx.contiguous(), num_experts, stream)

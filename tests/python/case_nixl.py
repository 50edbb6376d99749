# SPDX-License-Identifier: Apache-2.0
"""nixl_ep: ranks that are connected, staged, killed, disconnected and replaced, with the results of those that are there."""
import os
import resource
import signal
import time

import epkit
import nixl_ep
import torch
import torch.distributed as dist
from case_members import store_of
from ranks import on_ranks, raises

MOST_RANKS, LOCAL, HIDDEN, TOPK, M = 6, 2, 512, 3, 16
NOT_ON_CUDA = {f"test_{name}": "there a call has returned before its kernel finds that others have masked this rank" for name in (
    "a_rank_is_stopped", "all_begin_again", "masks")}


def buffer_of(rank, store, hint=True, seconds=20, **options):
    buffer = nixl_ep.Buffer(rank=rank, tcp_store_group=store, explicitly_destroy=True, timeout_ms=int(1000 * seconds), **options)
    buffer.update_memory_buffers(num_ranks=MOST_RANKS, num_experts_per_rank=LOCAL, num_rdma_bytes=nixl_ep.Buffer.get_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=M, hidden=HIDDEN, num_ranks=MOST_RANKS, num_experts=MOST_RANKS * LOCAL) if hint else 1000)
    return buffer


def inputs(rank, seed):
    draw = torch.Generator(device=torch.get_default_device()).manual_seed(100 * seed + rank)
    idx = torch.rand(9 + rank, MOST_RANKS * LOCAL, generator=draw).topk(TOPK).indices
    x = torch.randint(-9, 9, (9 + rank, HIDDEN), generator=draw).bfloat16()
    return x, idx, torch.randint(1, 3, idx.shape, generator=draw).float()


def step(buffer, live, seed, hook=False, fp8=False, zero_copy=False):
    """One dispatch and combine, against what the ranks that are live must give."""
    x, idx, weights = inputs(buffer.rank, seed)
    stats, bound = torch.zeros(LOCAL, dtype=torch.int32), M * MOST_RANKS
    recv, count, handle, _, finish = buffer.dispatch(x, idx, M, LOCAL * (max(live) + 1), cumulative_local_expert_recv_stats=stats,
                                                     use_fp8=fp8, return_recv_hook=hook)
    if hook:
        finish()
    rows = recv
    if fp8:
        rows = (recv[0].float().view(LOCAL, bound, -1, 128) * recv[1].unsqueeze(-1)).view(LOCAL, bound, HIDDEN).bfloat16()
    assert list(rows.shape) == [LOCAL, bound, HIDDEN] and torch.equal(stats, count)
    for expert in range(LOCAL):
        came = [inputs(rank, seed) for rank in live]
        wanted = torch.cat([one[(choice == buffer.rank * LOCAL + expert).nonzero()[:, 0]] for one, choice, _ in came])
        assert count[expert] == len(wanted)
        assert torch.allclose(rows[expert, :len(wanted)], wanted, rtol=0.07) if fp8 else torch.equal(rows[expert, :len(wanted)], wanted)
    exact = torch.zeros_like(rows)
    exact[:, :] = rows.float().round().bfloat16() * 2
    if zero_copy:
        buffer.get_next_combine_buffer(handle).copy_(exact)
    out, _, finish = buffer.combine(exact, idx, weights, handle, return_recv_hook=hook, zero_copy=zero_copy)
    if hook:
        finish()
    there = torch.isin(idx // LOCAL, torch.tensor(list(live)))
    wanted = 2 * x * (weights * there).sum(1, keepdim=True)
    assert torch.allclose(out.float(), wanted.float(), rtol=0.2, atol=8) if fp8 else torch.equal(out, wanted.bfloat16())
    return handle


def masks(buffer):
    status = torch.full((MOST_RANKS,), 7, dtype=torch.int32)
    buffer.query_mask_buffer(status)
    return status.tolist()


def shown(*live):
    return [int(rank not in live) for rank in range(MOST_RANKS)]


def together(store, size, name, here=True):
    """Waits for so many processes; not for all, because some are dead. here=False: one that need not wait."""
    store.add(name, 1)
    end = time.monotonic() + 60
    while here and store.add(name, 0) < size:
        assert time.monotonic() < end, name
        time.sleep(0.01)


@on_ranks(4)
def test_connected_in_steps(rank, size):
    store = store_of(rank)
    buffer = buffer_of(rank, store)
    assert masks(buffer) == shown(rank)
    raises(epkit.ArgumentError, "dispatch connect_ranks", buffer.dispatch, *inputs(rank, 0)[:2], M, LOCAL)
    old = None
    for seed, count in enumerate((1, 2, 4)):
        if rank < count:
            buffer.connect_ranks(list(range(count)) if old is None else list(range(count // 2, count)))
            assert masks(buffer) == shown(*range(count))
            if old is not None:
                x, idx, weights = inputs(rank, seed - 1)
                raises(epkit.ArgumentError, "combine handle before", buffer.combine, torch.zeros(LOCAL, count * M, HIDDEN).bfloat16(), idx,
                       weights, old)
            for mode in ({}, {"hook": True}, {"fp8": True}, {"zero_copy": True}):
                old = step(buffer, range(count), seed, **mode)
            buffer.barrier()
            buffer.clean_buffer(M, HIDDEN, count * LOCAL)
    together(store, 4, "all")
    for count in (3, 2):  # those that leave do nothing
        if rank < count:
            buffer.disconnect_ranks([count])
            assert masks(buffer) == shown(*range(count))
            step(buffer, range(count), count)
    together(store, 4, "end")
    buffer.destroy()
    together(store, 4, "left", here=rank == 0)


@on_ranks(4)
def test_staged(rank, size):
    """As vLLM does it: new ranks are connected while the others go on without them, and all begin at one place."""
    store = store_of(rank)
    buffer = buffer_of(rank, store)
    if rank < 2:
        buffer.connect_ranks(range(2))
        step(buffer, range(2), 1)
        for ranks in ([2], [3]):
            buffer.connect_ranks(ranks, activate=False) if rank < 2 else None
            assert masks(buffer) == shown(0, 1)
            step(buffer, range(2), 2)
        raises(epkit.ArgumentError, "disconnect_ranks rank 3 active", buffer.disconnect_ranks, [2])
        raises(epkit.ArgumentError, "connect_ranks rank 3 active", buffer.connect_ranks, [2, 4])
        buffer.update_mask_buffer(2, mask=True)  # as it is
        x, idx, weights = inputs(rank, 2)
        rows, _, handle, _, _ = buffer.dispatch(x, idx, M, 2 * LOCAL, use_fp8=False)
        buffer.update_mask_buffer(2, mask=False)
        assert masks(buffer) == shown(0, 1, 2)
        buffer.update_mask_buffer(3)
        out = buffer.combine(rows, idx, weights, handle)[0]  # of the dispatch before
        assert torch.equal(out, (x * (weights * (idx < 2 * LOCAL)).sum(1, keepdim=True)).bfloat16())
    elif rank == 2:
        buffer.connect_ranks(range(3))
        buffer.connect_ranks([3])
    else:
        buffer.connect_ranks(range(4))
    if rank > 1:  # vLLM's new workers warm up by themselves
        for mask in (True, False):
            for other in set(range(4)) - {rank}:
                buffer.update_mask_buffer(other, mask)
            for seed in range(5 if mask else 0):
                assert masks(buffer) == shown(rank)
                step(buffer, [rank], seed)
    assert masks(buffer) == shown(0, 1, 2, 3)
    for seed in range(3, 6):
        step(buffer, range(4), seed)
    if rank < 3:  # staged, and given up
        buffer.disconnect_ranks([3])
        step(buffer, range(3), 6)
    together(store, 4, "gone")
    buffer.connect_ranks([3], activate=False) if rank < 3 else buffer_again(buffer, store)
    if rank < 3:
        step(buffer, range(3), 7)
        buffer.disconnect_ranks([3])
        step(buffer, range(3), 8)
    together(store, 4, "end", here=rank == 0)


def buffer_again(buffer, store):
    """A rank that was disconnected destroys its buffer and comes again with another one."""
    buffer.destroy()
    buffer_of(3, store).connect_ranks(range(4))


@on_ranks(5, expect=(0, -signal.SIGKILL, 0, 0, 0))
def test_a_rank_is_killed_and_replaced(rank, size):
    """Process 4 takes the place of process 1, which dies between two calls. The others see it masked, go on, and admit the new one."""
    store = store_of(rank)
    if rank == 4:
        store.wait(["gone"])
        buffer = buffer_of(1, store)
        buffer.connect_ranks(range(4))
    else:
        buffer = buffer_of(rank, store)
        buffer.connect_ranks(range(4))
        step(buffer, range(4), 1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x, idx, _ = inputs(rank, 2)
        for _ in range(2):
            buffer.clean_mask_buffer()  # which does not wait for the dead
            buffer.dispatch(x, idx, M, 4 * LOCAL)  # at once: the kernel says that it has ended
        assert masks(buffer) == shown(0, 2, 3)
        buffer.disconnect_ranks([1])
        assert masks(buffer) == shown(0, 2, 3)
        for seed in (3, 4):
            step(buffer, (0, 2, 3), seed)
        store.set("gone", b"")
        buffer.connect_ranks([1])
    assert masks(buffer) == shown(0, 1, 2, 3)
    for seed in (5, 6):
        step(buffer, range(4), seed, hook=True)
    together(store, 4, "end")
    buffer.destroy()
    together(store, 4, "left", here=rank == 0)


@on_ranks(5, expect=(0, -signal.SIGKILL, 0, 0, 0))
def test_a_dead_rank_is_connected_anew(rank, size):
    """Without disconnect_ranks(): the others connect the process that takes its place, as it connects them."""
    store = store_of(rank)
    buffer = buffer_of(rank if rank < 4 else 1, store)
    if rank == 4:
        store.wait(["gone"])
        buffer.connect_ranks(range(4))
    else:
        buffer.connect_ranks(range(4))
        step(buffer, range(4), 1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x, idx, _ = inputs(rank, 2)
        buffer.dispatch(x, idx, M, 4 * LOCAL)
        assert masks(buffer) == shown(0, 2, 3)
        store.set("gone", b"")
        buffer.connect_ranks([1])
    assert masks(buffer) == shown(0, 1, 2, 3)
    step(buffer, range(4), 3)
    together(store, 4, "end")
    buffer.destroy()
    together(store, 4, "left", here=rank == 0)


@on_ranks(4)
def test_a_rank_is_stopped(rank, size):
    """It is late, and masked; left out, it learns that when it goes on, and comes again. Again and again, nothing is left of it."""
    store = store_of(rank)
    buffer = buffer_of(rank, store, seconds=4)
    buffer.connect_ranks(range(4))
    step(buffer, range(4), 1)
    x, idx, _ = inputs(rank, 2)
    if rank == 1:
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        raises(epkit.GroupError, "EP_E_EXCLUDED masked", buffer.dispatch, x, idx, M, 4 * LOCAL)
        buffer.connect_ranks(range(4))  # with the same buffer
    else:
        buffer.dispatch(x, idx, M, 4 * LOCAL)
        assert masks(buffer) == shown(0, 2, 3)
        buffer.disconnect_ranks([1])
        step(buffer, (0, 2, 3), 3)
        if rank == 0:
            os.kill(int(store.get("pid")), signal.SIGCONT)
        buffer.connect_ranks([1])
    step(buffer, range(4), 4)
    files, memory = [], []
    for seed in range(200 if os.environ.get("EPKIT_TEST_LONG") else 8):
        buffer.disconnect_ranks([1]) if rank != 1 else buffer.destroy()
        together(store, 4, f"left-{seed}")
        buffer = buffer_of(1, store) if rank == 1 else buffer
        buffer.connect_ranks(range(4))
        step(buffer, range(4), seed)
        files.append(len(os.listdir("/proc/self/fd")))
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert max(files) <= files[1], files  # fewer: rank 0 serves the store, and others have ended
    assert memory[-1] - memory[len(memory) // 4] < 4096, memory  # kB; the first changes reach what the allocators keep
    together(store, 4, "end", here=rank == 0)


@on_ranks(3)
def test_all_begin_again(rank, size):
    """A rank is late and masked. As vLLM's sentinel lets them: all clean their buffers, and are in step."""
    store = store_of(rank)
    buffer = buffer_of(rank, store, seconds=4)
    buffer.connect_ranks(range(3))
    step(buffer, range(3), 1)
    x, idx, _ = inputs(rank, 2)
    for turn in "ab":
        if rank == 1:
            store.wait([turn])
            raises(epkit.GroupError, "EP_E_EXCLUDED", buffer.dispatch, x, idx, M, 3 * LOCAL)
        else:
            buffer.dispatch(x, idx, M, 3 * LOCAL)
            assert masks(buffer) == shown(0, 2)
            store.set(turn, b"")
        whole = buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True)
        assert whole.zero_().numel() == buffer.num_rdma_bytes and not buffer.get_local_buffer_tensor(torch.int8).numel()
        buffer.clean_mask_buffer()
        for seed in (3, 4):
            step(buffer, range(3), seed)
        assert masks(buffer) == shown(0, 1, 2)
    together(store, 3, "end", here=rank == 0)


@on_ranks(3)
def test_masks(rank, size):
    store = store_of(rank)
    buffer = buffer_of(rank, store, hint=False)
    buffer.connect_ranks(range(3))
    step(buffer, range(3), 1)
    dist.barrier()  # a mask ends also a call that has begun before
    other = (rank + 1) % 3
    raises(epkit.ArgumentError, "update_mask_buffer another", buffer.update_mask_buffer, rank, True)
    raises(epkit.ArgumentError, "update_mask_buffer connected", buffer.update_mask_buffer, 4)
    raises(epkit.ArgumentError, "update_mask_buffer 9", buffer.update_mask_buffer, 9, True)
    raises(epkit.ArgumentError, "query_mask_buffer shape [3] [6]", buffer.query_mask_buffer, torch.zeros(3, dtype=torch.int32))
    raises(TypeError, "query_mask_buffer", buffer.query_mask_buffer, [0] * 6)
    buffer.update_mask_buffer(5, True)  # not connected: as it is
    buffer.update_mask_buffer(other, True)
    assert masks(buffer) == shown(*{0, 1, 2} - {other})
    buffer.update_mask_buffer(other)
    buffer.update_mask_buffer(other, mask=True)
    buffer.clean_mask_buffer()
    assert masks(buffer) == shown(0, 1, 2)
    dist.barrier()
    step(buffer, range(3), 2)
    dist.barrier()
    if rank == 2:
        together(store, 3, "two")
        raises(epkit.GroupError, "EP_E_EXCLUDED", step, buffer, range(3), 3)
    else:
        buffer.update_mask_buffer(2, True)
        x, idx, weights = inputs(rank, 3)
        handle = buffer.dispatch(x, idx, M, 3 * LOCAL, use_fp8=False)[2]
        buffer.combine(torch.zeros(LOCAL, M * MOST_RANKS, HIDDEN, dtype=torch.bfloat16), idx, weights, handle)
        together(store, 3, "two")
    dist.barrier()
    if rank < 2:  # and it comes again
        buffer.disconnect_ranks([2])
        buffer.connect_ranks([2])
    else:
        buffer = buffer_of(rank, store, hint=False)
        buffer.connect_ranks([0, 1])
    assert masks(buffer) == shown(0, 1, 2)
    step(buffer, range(3), 4)
    dist.barrier()


@on_ranks(3, expect=(0, 0, -signal.SIGKILL))
def test_meetings(rank, size):
    """Those that wait for nobody, or come too late, do not disturb later meetings of the same ranks."""
    store = store_of(rank)
    hasty = buffer_of(rank, store, seconds=0.1)
    if rank == 1:
        error = raises(epkit.PeerError, "rank 0 connect_ranks", hasty.connect_ranks, [0, 1])
        assert error.name == "EP_E_TIMEOUT" and masks(hasty) == shown(1)
    dist.barrier()
    buffer = buffer_of(rank, store)
    if rank < 2:
        buffer.connect_ranks([0, 1])
        for seed in range(4):
            buffer.disconnect_ranks([1 - rank])  # two groups of one
            step(buffer, [rank], seed)
            buffer.connect_ranks([1 - rank])
            step(buffer, [0, 1], seed)
    dist.barrier()
    if rank == 0:
        store.set("kill", b"")
    elif rank == 2:  # it is killed while it waits: its place is taken, and the others are told
        if not os.fork():
            store = dist.TCPStore("127.0.0.1", store.port, is_master=False)
            store.wait(["kill"])
            time.sleep(1)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        buffer.connect_ranks([0, 1])
    time.sleep(3)
    short = buffer_of(rank, store, seconds=0.5)
    raises(epkit.PeerError, "rank 2", short.connect_ranks, [0, 1, 2])
    dist.barrier(dist.new_group([0, 1], use_local_synchronization=True))
    short = buffer_of(rank, store, seconds=(0.3, 0.1)[rank])
    late = str(raises(epkit.PeerError, "", short.connect_ranks, [0, 1, 2]))
    assert rank or "but rank 2 did not come" in late, late  # rank 1 has given up before, but had come
    assert buffer._connected == {0, 1}
    step(buffer, [0, 1], 9)
    together(store, 2, "end", here=rank == 0)


@on_ranks(2)
def test_a_group(rank, size):
    """Without a store: the ranks of a group, once."""
    buffer = nixl_ep.Buffer(rank=rank, group=dist.group.WORLD)
    raises(epkit.ArgumentError, "connect_ranks update_memory_buffers", buffer.connect_ranks, [0, 1])
    buffer.update_memory_buffers(MOST_RANKS, LOCAL, 0)
    raises(epkit.ArgumentError, "store set_tcp_store_group", buffer.connect_ranks, [0, 1, 2])
    buffer.connect_ranks([0, 1])
    step(buffer, [0, 1], 1)
    assert buffer.get_comm_stream() is None or torch.cuda.is_available()
    raises(epkit.ArgumentError, "store", buffer.connect_ranks, [2])
    buffer.set_tcp_store_group(store_of(rank))
    step(buffer, [0, 1], 2)


@on_ranks(1)
def test_refused(rank, size):
    raises(NotImplementedError, "low_latency_mode deep_ep", nixl_ep.Buffer, rank=0, low_latency_mode=False)
    raises(TypeError, "positional", nixl_ep.Buffer, 0)
    raises(ValueError, "group comm", nixl_ep.Buffer, group=1, comm=2)
    buffer = nixl_ep.Buffer(rank=2)
    raises(AssertionError, "explicitly_destroy", buffer.destroy)
    for name in ("ht_dispatch", "ht_combine"):
        raises(NotImplementedError, f"nixl_ep.Buffer.{name} epkit.compat.deep_ep.Buffer", getattr(buffer, name), torch.zeros(1, 8))
    raises(epkit.ArgumentError, "num_ranks 2", buffer.update_memory_buffers, 2, 1, 0)
    raises(epkit.ArgumentError, "num_experts_per_rank 0", buffer.update_memory_buffers, 3, 0, 0)
    buffer = buffer_of(0, None)
    raises(epkit.ArgumentError, "been called", buffer.update_memory_buffers, 3, 1, 0)
    raises(epkit.ArgumentError, "connect_ranks [7] 5", buffer.connect_ranks, [7])
    raises(epkit.ArgumentError, "connect_ranks []", buffer.connect_ranks, [])
    raises(TypeError, "connect_ranks remote_ranks", buffer.connect_ranks, ["a"])
    raises(epkit.ArgumentError, "disconnect_ranks this", buffer.disconnect_ranks, [0])
    for wrong in (0, -1, "long"):
        raises(ValueError, f"timeout_ms {wrong}", nixl_ep.Buffer, timeout_ms=wrong)
    for call in (buffer.barrier, buffer.get_comm_stream):
        raises(epkit.ArgumentError, f"{call.__name__} connect_ranks", call)
    buffer.connect_ranks([0])
    step(buffer, [0], 1)
    x, idx, weights = inputs(0, 1)
    for wrong in (0, 3, 14):
        raises(epkit.ArgumentError, f"num_experts is {wrong} multiple 2", buffer.dispatch, x, idx, M, wrong)

    def beyond():
        buffer.dispatch(x, idx + MOST_RANKS * LOCAL, M, LOCAL)
        buffer._comm.synchronize()  # on GPUs the stream finds it

    raises(epkit.ArgumentError, "EP_E_ROUTING", beyond)
    raises(TypeError, "handle tuple", buffer.combine, x, idx, weights, ())

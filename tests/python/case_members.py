# SPDX-License-Identifier: Apache-2.0
"""Members that change: ranks leave, die and are replaced, and the others go on in the same communicator."""
import os
import signal

import epkit
import torch
import torch.distributed as dist
from epkit import Members
from ranks import on_ranks, raises

SLOTS, LOCAL, HIDDEN, TOPK, TOKENS = 4, 2, 64, 3, 20


def store_of(rank):
    """A TCPStore that rank 0 serves."""
    port = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None]
    number = [port[0].port if rank == 0 else 0]
    dist.broadcast_object_list(number)
    return port[0] or dist.TCPStore("127.0.0.1", number[0], is_master=False)


def end(store, rank, others):
    """Rank 0 serves the store until the others need it no longer."""
    store.set(f"end-{rank}", b"")
    if rank == 0:
        store.wait([f"end-{other}" for other in others])


def layer(comm, seed, fixed=None, low_latency=None):
    """Dispatch and combine by plans and in low latency: each token returns as itself times what its members say."""
    torch.manual_seed(seed * 10 + comm.rank)
    x = torch.randint(-9, 9, (TOKENS, 512)).bfloat16()
    idx = torch.rand(TOKENS, SLOTS * LOCAL).topk(TOPK).indices
    present = torch.isin(idx // LOCAL, torch.tensor(comm.members))
    ranks = torch.stack([((idx // LOCAL == rank) & present).any(1) for rank in range(SLOTS)]).sum(0)
    plan = comm.plan(idx, SLOTS * LOCAL)
    assert torch.equal(plan.combine(plan.dispatch(x).x)[0], x * ranks.unsqueeze(1))
    if fixed is None:
        fixed = comm.plan(idx, SLOTS * LOCAL, max_recv_tokens=SLOTS * TOKENS)
    else:
        fixed.update(idx)
    assert torch.equal(fixed.combine(fixed.dispatch(x).x)[0], x * ranks.unsqueeze(1))
    if low_latency is None:
        low_latency = comm.low_latency(TOKENS, 512, SLOTS * LOCAL, TOPK)
    low_latency.renew()
    rows = low_latency.dispatch(x, idx, hook=True)
    low_latency.renew()  # of the present members already: the half that is open stays
    rows.finish()
    out = low_latency.combine(rows.x, idx, torch.ones(TOKENS, TOPK), call=rows.call)[0]
    assert torch.equal(out, x * present.sum(1, keepdim=True))
    comm.barrier()
    return plan, fixed, low_latency


@on_ranks(SLOTS, expect=(0, 0, -signal.SIGKILL, 0))
def test_members_change(rank, size):
    store = store_of(rank)
    comm = old = None
    for number, members in enumerate(((0, 1, 2), (0, 1, 2, 3), (0, 1, 2), (0, 3), (0, 1, 3))):
        if rank not in members:
            continue
        group = Members(store, members, rank, f"members-{number}")
        if comm is None:
            comm = epkit.Communicator(group, slots=SLOTS, timeout=60, drop_absent=True)
            memory = comm.empty(8, dtype=torch.float32) if number == 0 else None
        else:
            if memory is not None:
                memory.fill_(number)
            comm.regroup(group)
            assert memory is None or bool((memory == number).all())
            raises(epkit.Error, "changed", old[0].dispatch, torch.zeros(TOKENS, 512, dtype=torch.bfloat16))
            raises(epkit.Error, "changed", old[1].dispatch, torch.zeros(TOKENS, 512, dtype=torch.bfloat16))
            raises(epkit.Error, "changed", old[2].dispatch, torch.zeros(TOKENS, 512, dtype=torch.bfloat16),
                   torch.zeros(TOKENS, TOPK, dtype=torch.int64))
            old[0].free()
        assert (comm.rank, comm.size, comm.members) == (rank, SLOTS, members)
        assert sorted(comm.failed_ranks()) == [other for other in range(SLOTS) if other not in members]
        old = layer(comm, number, *(old or ())[1:])
        if number == 2 and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 2 and rank in members:
            raises(epkit.PeerError, "rank 2", barriers, comm)
            assert comm.failed_ranks()[2] == "EP_E_PEER_DEAD"
    assert comm.members == (0, 1, 3)
    comm.barrier()
    end(store, rank, (1, 3))


def barriers(comm):
    while True:
        comm.barrier()


@on_ranks(2)
def test_members_refused(rank, size):
    store = store_of(rank)
    raises(ValueError, "once", Members, store, [0, 0, 1], rank, "a")
    raises(ValueError, "members", Members, store, [0, 1], 2, "a")
    raises(ValueError, "numbers", Members, store, [-1, rank], rank, "a")
    raises(ValueError, "`slots` is not given", epkit.Communicator, Members(store, [rank, rank + 5], rank + 5, f"a{rank}"))
    raises(TypeError, "store int", Members, 7, [0, 1], rank, "a")
    raises(TypeError, "ranks None", Members, store, None, rank, "a")
    raises(TypeError, "key None", Members, store, [0, 1], rank, None)
    once = Members(store, [0, 1], rank, "b")
    raises(epkit.ArgumentError, "slots is 1", epkit.Communicator, once, slots=1)
    raises(ValueError, "used", epkit.Communicator, once, slots=2)
    raises(ValueError, "used", epkit.Communicator, Members(store, [0, 1], rank, "b"), slots=2)
    raises(epkit.ArgumentError, "slots is 1", epkit.Communicator, Members(store, [0, 1], rank, "bb"), slots=1)
    raises(epkit.ArgumentError, "slot is 7", epkit.Communicator, Members(store, [0, 1], rank, "c"), slots=4, slot=7)
    raises(epkit.GroupError, "both have slot 3", epkit.Communicator, Members(store, [0, 1], rank, "d"), slots=4, slot=3)
    comm = epkit.Communicator(Members(store, [0, 1], rank, "e"), slots=3, timeout=60)
    for other in range(2, 20):  # what was exchanged is gone from the store, but for the last
        assert not store.check([f"e/{other}/{rank}"]) or not store.check([f"e/{other - 1}/{rank}"])
    raises(epkit.ArgumentError, "regroup members numbers", comm.regroup, Members(store, [1 - rank], 1 - rank, f"o{rank}"))
    raises(epkit.ArgumentError, "regroup members numbers", comm.regroup, Members(store, [0, 1, 3], rank, f"p{rank}"))
    raises(epkit.ArgumentError, "rank 2 absent", comm.plan, torch.full((1, 1), 5), 6)
    if rank == 0:  # nobody else comes: nothing has changed afterwards
        alone = epkit.Communicator(Members(store, [0], 0, "f"), slots=3, timeout=5 if comm.is_cuda else 0.5)
        raises(epkit.PeerError, "Communicator.regroup rank 1 come", alone.regroup, Members(store, [0, 1], 0, "g"))
        assert alone.members == (0,)
        alone.barrier()
    comm.barrier()
    comm.regroup(Members(store, [rank], rank, f"h{rank}"))
    assert comm.members == (rank,)
    assert torch.equal(comm.plan(torch.full((1, 1), rank), 3).dispatch(torch.ones(1, 64, dtype=torch.bfloat16)).x,
                       torch.ones(1, 64, dtype=torch.bfloat16))
    end(store, rank, (1,))

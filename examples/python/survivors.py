#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decoding that goes on when a rank dies, over an all-gather of the program's own, without a process group.

    torchrun --nproc-per-node 4 examples/python/survivors.py           # on GPUs if there are any, else on the CPU
    EPKIT_NETWORK=tcp EPKIT_RANKS_PER_NODE=2 torchrun --nproc-per-node 4 examples/python/survivors.py   # as on two nodes

A call does not wait for a rank that is dead or misses the deadline: it masks it. Experts of a masked rank add nothing.
"""
import os

import torch
import torch.distributed as dist

import epkit

TOKENS, HIDDEN, EXPERTS, TOPK, STEPS, LAST_OF_VICTIM = 8, 256, 8, 4, 6, 2


class Group:
    """What a Communicator needs of a group: mpi4py's names, here over a store of torch."""

    def __init__(self, store, rank, size):
        self.store, self.rank, self.size, self.calls = store, rank, size, 0

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def allgather(self, data):
        self.calls += 1
        self.store.set(f"{self.calls}/{self.rank}", data)
        return [self.store.get(f"{self.calls}/{rank}") for rank in range(self.size)]


def decode(group):
    comm = epkit.Communicator(group, timeout=20)
    calls = comm.low_latency(TOKENS, HIDDEN, EXPERTS, TOPK, mask_dead=True)
    own, victim = EXPERTS // comm.size, comm.size - 1
    scale = torch.arange(comm.rank * own + 1, (comm.rank + 1) * own + 1, device=comm.device).view(own, 1, 1)
    weights = torch.full((TOKENS, TOPK), 0.5, device=comm.device)
    torch.manual_seed(comm.rank)
    for step in range(STEPS):
        if step > LAST_OF_VICTIM and comm.rank == victim:
            os._exit(0)  # as a rank that crashes, but torchrun would end the others, too
        topk_idx = torch.rand(TOKENS, EXPERTS).topk(TOPK).indices.to(comm.device)
        x = torch.randint(-4, 5, (TOKENS, HIDDEN)).to(comm.device, torch.bfloat16)
        rows = calls.dispatch(x, topk_idx, hook=True)
        rows.finish()
        out, finish = calls.combine((rows.x * scale).to(torch.bfloat16), topk_idx, weights, call=rows.call, hook=True)
        finish()
        masked = calls.mask().tolist()
        if masked != [int(rank == victim and step > LAST_OF_VICTIM) for rank in range(comm.size)]:
            raise SystemExit(f"step {step}: masked are {masked}")
        alive = topk_idx < (victim * own if step > LAST_OF_VICTIM else EXPERTS)
        want = x.float() * ((topk_idx + 1) * alive).sum(1, keepdim=True) * 0.5
        if (out.float() - want).abs().max() > want.abs().max() / 100:
            raise SystemExit(f"step {step}: a result is not what it must be")
    if comm.rank == 0:
        print(f"{comm.size} ranks ({comm.backend}, {comm.nodes} nodes): {STEPS} steps, the last of them without rank {victim}")
    comm.free()


if __name__ == "__main__":
    mine, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    port = int(os.environ["MASTER_PORT"]) + 1  # torchrun has a store of its own
    decode(Group(dist.TCPStore(os.environ["MASTER_ADDR"], port, ranks, mine == 0), mine, ranks))

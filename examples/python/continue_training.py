#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A rank dies, and the others go on with what they had: they agree who is in the next group, and make its communicator.

    python3 examples/python/continue_training.py                       # starts 3 ranks on the CPU by itself

A key-value store decides, here a TCPStore of the process that starts the ranks: the first view of the members counts. A
controller that knows who is in replaces agree().
"""
import os

import torch
import torch.distributed as dist
import torch.multiprocessing

import epkit

RANKS, STEPS, DIES, IN_STEP, TOKENS, HIDDEN = 3, 8, 1, 3, 6, 128


def agree(store, number, members):
    """The members of that group, by their ranks in the first one: as the first rank that came here saw them."""
    return [int(rank) for rank in store.compare_set(f"members of {number}", "", ",".join(map(str, members))).split(b",")]


def train_step(comm, step):
    """One expert on each rank, which multiplies by 2."""
    x = torch.full((TOKENS, HIDDEN), step + 1, dtype=torch.bfloat16, device=comm.device)
    plan = comm.plan((torch.arange(TOKENS, device=comm.device) % comm.size).view(TOKENS, 1), comm.size)
    y = plan.combine(plan.dispatch(x).x * 2)[0]
    comm.synchronize()
    plan.free()
    if not torch.equal(y, 2 * x):
        raise SystemExit("a result is not what it must be")


def train(rank, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    members, group, number, step = list(range(RANKS)), None, 0, 0
    while step < STEPS:
        # If a rank dies here, it raises: agree again in the same way, without the rank that the error names.
        comm = epkit.Communicator(group)
        try:
            step = min(comm.allgather_bytes(bytes([step])))  # a rank may be one ahead
            while step < STEPS:
                if (rank, step) == (DIES, IN_STEP):
                    os._exit(0)
                train_step(comm, step)
                step += 1
        except (epkit.PeerError, epkit.GroupError) as error:
            failed = comm.failed_ranks()
            print(f"rank {rank}: after {step} steps: {error}", flush=True)
            number += 1
            members = agree(store, number, [member for i, member in enumerate(members) if i not in failed])
            if rank not in members:
                raise SystemExit(f"rank {rank}: the others go on without this rank") from error
            group = dist.new_group(members, use_local_synchronization=True)
        comm.free()
    print(f"rank {rank}: {step} steps are right, the last ones in a group of {members}", flush=True)


if __name__ == "__main__":
    os.environ["EPKIT_BACKEND"] = "host"
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(train, args=(server.port,), nprocs=RANKS)

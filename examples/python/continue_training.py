#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A rank dies, and a spare process takes its place: the others agree on that, and go on with it in the same communicator.

    python3 examples/python/continue_training.py                       # starts 3 ranks and a spare on the CPU by itself

A key-value store decides, here a TCPStore of the process that starts the ranks: the first view of the members counts. A
controller that knows who is in replaces agree().
"""
import os

import torch
import torch.distributed as dist
import torch.multiprocessing

import epkit

RANKS, STEPS, DIES, IN_STEP, TOKENS, HIDDEN = 3, 8, 1, 3, 6, 128


def agree(store, change, failed):
    """The ranks that have failed, as the first one that came here saw them: the spare process takes the place of the first."""
    return [int(rank) for rank in store.compare_set(f"failed {change}", "", ",".join(map(str, failed))).split(b",")]


def train_step(comm, step):
    """One expert on each rank, which multiplies by 2."""
    x = torch.full((TOKENS, HIDDEN), step + 1, dtype=torch.bfloat16, device=comm.device)
    plan = comm.plan((torch.arange(TOKENS, device=comm.device) % comm.size).view(TOKENS, 1), comm.size)
    y = plan.combine(plan.dispatch(x).x * 2)[0]
    comm.synchronize()
    plan.free()
    if not torch.equal(y, 2 * x):
        raise SystemExit("a result is not what it must be")


def train(process, store):
    rank, step, change = process, 0, 0
    if process == RANKS:  # the spare waits until it is needed; the others know the step
        store.wait(["failed 1"])
        rank, step, change = int(store.get("failed 1").split(b",")[0]), STEPS, 1
    comm = epkit.Communicator(epkit.Members(store, range(RANKS), rank, f"members {change}"), slots=RANKS)
    while True:
        try:
            step = min(comm.allgather_bytes(bytes([step])))  # a rank may be one ahead
            while step < STEPS:
                if (process, step) == (DIES, IN_STEP):
                    os._exit(0)
                train_step(comm, step)
                step += 1
            break
        except (epkit.PeerError, epkit.GroupError) as error:
            print(f"rank {rank}: after {step} steps: {error}", flush=True)
            change += 1
            failed = agree(store, change, sorted(comm.failed_ranks()))
            if change > 1 or len(failed) > 1 or rank in failed:
                raise SystemExit(f"rank {rank}: there is one spare process, and {failed} have failed") from error
            comm.regroup(epkit.Members(store, range(RANKS), rank, f"members {change}"))
    print(f"rank {rank}: {step} steps are right, the last ones by members {comm.members}", flush=True)
    comm.free()


def start(process, port):
    train(process, dist.TCPStore("127.0.0.1", port, is_master=False))


if __name__ == "__main__":
    os.environ["EPKIT_BACKEND"] = "host"
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(start, args=(server.port,), nprocs=RANKS + 1)

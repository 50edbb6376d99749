#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A decode loop with low latency: on GPUs one step is captured into a CUDA graph and launched again and again.

    torchrun --nproc-per-node 4 examples/python/decode_loop.py         # on GPUs if there are any, else on the CPU
    python3 examples/python/decode_loop.py                             # starts 2 ranks on the CPU by itself

Shapes are fixed and nothing waits on the host, so a graph can hold the whole step. Each rank launches its graph equally
often.
"""
import torch

import epkit
from launch import launch

TOKENS, HIDDEN, EXPERTS, TOPK, STEPS = 16, 512, 8, 4, 10


class Step:
    """One layer of a decoding step, on tensors that stay where they are."""

    def __init__(self, comm):
        self.comm = comm
        self.calls = comm.low_latency(TOKENS, HIDDEN, EXPERTS, TOPK)
        device = comm.device
        self.x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
        self.topk_idx = torch.zeros(TOKENS, TOPK, dtype=torch.int64, device=device)
        self.weights = torch.zeros(TOKENS, TOPK, device=device)
        self.out = torch.zeros_like(self.x)
        own = EXPERTS // comm.size
        self.scale = torch.arange(comm.rank * own + 1, (comm.rank + 1) * own + 1, device=device).view(own, 1, 1)

    def run(self):
        rows = self.calls.dispatch(self.x, self.topk_idx, hook=True)
        # Work that needs no received token belongs here: on GPUs it has all multiprocessors.
        rows.finish()
        y = (rows.x * self.scale).to(torch.bfloat16)  # expert e multiplies by e + 1
        self.calls.combine(y, self.topk_idx, self.weights, call=rows.call, out=self.out)


def decode():
    comm = epkit.Communicator()
    step = Step(comm)
    replay = step.run
    if comm.is_cuda:
        step.topk_idx.copy_(torch.arange(TOPK))  # any valid routing
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step.run()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.run()
        replay = graph.replay
    torch.manual_seed(comm.rank)
    for _ in range(STEPS):
        step.topk_idx.copy_(torch.rand(TOKENS, EXPERTS).topk(TOPK).indices)
        step.weights.fill_(0.5)
        step.x.copy_(torch.randint(-4, 5, (TOKENS, HIDDEN)))
        replay()
        want = step.x.float() * (step.topk_idx + 1).sum(1, keepdim=True) * 0.5
        if (step.out.float() - want).abs().max() > want.abs().max() / 100:
            raise SystemExit("a result is not what it must be")
    comm.check()
    if comm.rank == 0:
        print(f"{comm.size} ranks ({comm.backend}): {STEPS} steps of {TOKENS} tokens are right")
    comm.free()


if __name__ == "__main__":
    launch(decode)

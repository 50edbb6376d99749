#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A mixture-of-experts layer in training: dispatch, experts, combine, and their backward pass.

    torchrun --nproc-per-node 4 examples/python/moe_training.py        # on GPUs if there are any, else on the CPU
    python3 examples/python/moe_training.py                            # starts 2 ranks on the CPU by itself

Each rank has its share of the tokens and of the experts. The shared experts of the layer (here a dense matrix) need no
communication: on GPUs they run on the current stream while the dispatch runs on another one.
"""
import sys

import torch
import torch.distributed as dist

import epkit
from launch import launch

TOKENS, HIDDEN, INNER, EXPERTS, TOPK, STEPS = 64, 128, 64, 8, 2, 20


class Layer(torch.nn.Module):
    """A router, this rank's experts, and a shared one."""

    def __init__(self, comm):
        super().__init__()
        self.comm = comm
        own = EXPERTS // comm.size
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, bias=False, device=comm.device)
        self.shared = torch.nn.Linear(HIDDEN, HIDDEN, bias=False, device=comm.device)
        self.up = torch.nn.Parameter(torch.randn(own, HIDDEN, INNER, device=comm.device) * HIDDEN ** -0.5)
        self.down = torch.nn.Parameter(torch.randn(own, INNER, HIDDEN, device=comm.device) * INNER ** -0.5)

    def experts(self, rows, counts):
        parts = [torch.relu(part.float() @ up) @ down for part, up, down in zip(rows.split(counts), self.up, self.down)]
        return torch.cat(parts)

    def forward(self, x):
        weights, topk_idx = torch.softmax(self.router(x.float()), -1).topk(TOPK)
        side = torch.cuda.Stream() if self.comm.is_cuda else None
        if side is None:
            return self.shared(x.float()) + self.routed(x, topk_idx, weights).float()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            routed = self.routed(x, topk_idx, weights)
        shared = self.shared(x.float())  # beside the communication
        torch.cuda.current_stream().wait_stream(side)
        routed.record_stream(torch.cuda.current_stream())
        return shared + routed.float()

    def routed(self, x, topk_idx, weights):
        return epkit.moe(self.comm, x.to(torch.bfloat16), topk_idx, weights, EXPERTS, self.experts)


def train():
    comm = epkit.Communicator()
    torch.manual_seed(7)  # the same router and shared expert on all ranks
    layer = Layer(comm)
    everywhere = [layer.router.weight, layer.shared.weight]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    torch.manual_seed(100 + comm.rank)
    x, target = torch.randn(TOKENS, HIDDEN, device=comm.device), torch.randn(TOKENS, HIDDEN, device=comm.device)
    first = last = 0.0
    for step in range(STEPS):
        loss = (layer(x) - target).square().mean()
        loss.backward()
        for parameter in everywhere:  # their tokens are on all ranks; an expert's tokens have all come to it
            dist.all_reduce(parameter.grad)
            parameter.grad /= comm.size
        layer.up.grad /= comm.size
        layer.down.grad /= comm.size
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        last = total.item() / comm.size
        first = first or last
    if comm.rank == 0:
        print(f"{comm.size} ranks ({comm.backend}): loss {first:.4f} -> {last:.4f} in {STEPS} steps")
    if not last < first:
        sys.exit("the loss has not become smaller")
    comm.free()


if __name__ == "__main__":
    launch(train)

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine from Python, beside the same with torch.distributed.all_to_all_single on the same tokens.

    torchrun --nproc-per-node 8 bench/python_layers.py                 # nccl, on GPUs
    torchrun --nproc-per-node 4 bench/python_layers.py --hidden 1024   # gloo, where there are none
    python3 bench/python_layers.py --hidden 512 --repeat 5             # two ranks on the CPU, by itself

Three figures: a decoding step (128 tokens, low latency), a prefill (4096 tokens), and a loop of layers with routing that
changes in each. Median over repetitions of the slowest rank, in microseconds. What comes back is compared first.
"""
import argparse
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist

import epkit

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "examples" / "python"))
from launch import launch  # noqa: E402

TOPK = 8


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--decode", type=int, default=128, help="tokens of a decoding step")
    parser.add_argument("--prefill", type=int, default=4096, help="tokens of a prefill")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=20)
    return parser.parse_args()


def torch_layer(comm, x, topk_idx, experts):
    """Each token once to each rank that it needs, and back; sums on its own rank."""
    in_rank = comm.layout(topk_idx, experts)[2]
    rank, token = in_rank.t().nonzero(as_tuple=True)
    sent = in_rank.sum(0)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    sent, received = sent.tolist(), received.tolist()
    rows = x.new_empty(sum(received), x.shape[1])
    dist.all_to_all_single(rows, x[token], received, sent)
    back = torch.empty_like(x[token])
    dist.all_to_all_single(back, rows, sent, received)
    return torch.zeros_like(x, dtype=torch.float32).index_add_(0, token, back.float()).to(x.dtype)


def epkit_layer(comm, x, topk_idx, experts):
    plan = comm.plan(topk_idx, experts)
    return plan.combine(plan.dispatch(x).x)[0]


def measure(comm, repeat, function):
    """Median of the slowest rank, in microseconds."""
    times = []
    for number in range(repeat + 3):
        dist.barrier()
        if comm.is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        if comm.is_cuda:
            torch.cuda.synchronize()
        slowest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=comm.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if number >= 3:
            times.append(slowest.item() * 1e6)
    return statistics.median(times)


def routing(comm, tokens, experts, seed):
    torch.manual_seed(seed * comm.size + comm.rank)
    return torch.rand(tokens, experts, device=comm.device).topk(min(TOPK, experts)).indices


def bench(args):
    comm = epkit.Communicator()
    experts = args.experts // comm.size * comm.size
    rows = []
    for name, tokens in (("decode", args.decode), ("prefill", args.prefill)):
        x = torch.randint(-4, 5, (tokens, args.hidden), device=comm.device).to(torch.bfloat16)
        topk_idx = routing(comm, tokens, experts, 1)
        if not torch.equal(epkit_layer(comm, x, topk_idx, experts), torch_layer(comm, x, topk_idx, experts)):
            raise SystemExit("the two ways do not agree")
        if name == "decode":
            calls = comm.low_latency(tokens, args.hidden, experts, topk_idx.shape[1])
            weights = torch.ones(topk_idx.shape, device=comm.device)

            def own():
                got = calls.dispatch(x, topk_idx)
                calls.combine(got.x, topk_idx, weights, call=got.call)
        else:
            def own():
                epkit_layer(comm, x, topk_idx, experts)
        rows.append((f"{name}, {tokens} tokens", measure(comm, args.repeat, own),
                     measure(comm, args.repeat, lambda: torch_layer(comm, x, topk_idx, experts))))
    choices = [routing(comm, args.prefill, experts, 2 + layer) for layer in range(args.layers)]
    rows.append((f"{args.layers} layers of {args.prefill} tokens",
                 measure(comm, args.repeat, lambda: [epkit_layer(comm, x, one, experts) for one in choices]),
                 measure(comm, args.repeat, lambda: [torch_layer(comm, x, one, experts) for one in choices])))
    if comm.rank == 0:
        print(f"{comm.size} ranks ({comm.backend}), hidden {args.hidden}, {experts} experts, top-{min(TOPK, experts)}; microseconds")
        print(f"{'':32}{'epkit':>12}{'all_to_all':>12}")
        for name, ours, theirs in rows:
            print(f"{name:32}{ours:12.0f}{theirs:12.0f}")
    comm.free()


def main():
    bench(parse())


if __name__ == "__main__":
    parse()  # a wrong option is told before ranks start
    launch(main)

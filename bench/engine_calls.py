#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times dispatch and combine as engines call them: tensors of torch, new routing, eager calls, layers queued one behind another.

    torchrun --nproc-per-node 2 bench/engine_calls.py --json record.json   # on GPUs
    python3 bench/engine_calls.py --tokens 64 --hidden 512 --repeat 3      # two ranks on the CPU, by itself

Three tables, for the drop-in deep_ep and the native package alike:
    calls         one call behind a small all-reduce, between CUDA events; the median of the slowest rank
    layers        dispatch and combine of many layers queued one behind another; a layer's time, and the host's in brackets
    low latency   a dispatch and a combine, in a CUDA graph and eager, queued
"sym" is memory of Communicator.empty(), all else memory of torch: the rows that a layer combines, too, which are others than those
that it received, as those of an engine are. Every sum is compared before it is timed: rows are small
integers, so that the order of additions does not matter, and freed memory is filled with NaN first. Compare ratios within
one run: host times differ by a factor of two between machines.
"""
import argparse
import json
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist

import deep_ep
import epkit

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "examples" / "python"))
from launch import launch  # noqa: E402

HINT = "on the CPU a call is complete when it returns: calls and layers take as long as the host"


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank, in calls")
    parser.add_argument("--layer-tokens", default="512,4096", help="of each rank, in layers")
    parser.add_argument("--ll-tokens", default="8,128")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--sms", default="12,24", help="0: the library's default")
    parser.add_argument("--layers", type=int, default=40, help="queued one behind another")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--only", choices=("calls", "layers", "ll"), help="one of the tables")
    parser.add_argument("--json", help="file for the figures")
    return parser.parse_args()


class Bench:
    def __init__(self, args):
        self.args, self.rows = args, []
        self.native = epkit.Communicator()
        self.rank, self.size, self.device, self.cuda = (self.native.rank, self.native.size, self.native.device, self.native.is_cuda)
        self.experts = args.experts // self.size * self.size
        self.topk = min(args.topk, self.experts)
        self.v1 = deep_ep.Buffer(dist.group.WORLD, 1 << 20, 0)
        self.v2 = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=max(
            [args.tokens, *map(int, args.layer_tokens.split(","))]), hidden=args.hidden)
        self.small = torch.zeros(1, device=self.device)
        self.seed = 0
        self.experts_of_layer = torch.clone  # from received rows to those that are combined

    def sync(self):
        if self.cuda:
            torch.cuda.synchronize()

    def slowest(self, value):
        number = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return number.item()

    def poison(self):
        """Fills memory that the allocator will give out again with NaN."""
        if self.cuda:
            rows = self.size * self.args.tokens
            memory = [torch.full((rows, self.args.hidden), float("nan"), dtype=torch.bfloat16, device=self.device) for _ in range(2)]
            del memory

    def data(self, tokens):
        """Random rows of small integers and routing, new in each call."""
        self.seed += 1
        torch.manual_seed(self.seed * self.size + self.rank)
        x = torch.randint(-2, 3, (tokens, self.args.hidden), device=self.device).to(torch.bfloat16)
        idx = torch.rand(tokens, self.experts, device=self.device).topk(self.topk).indices
        return x, idx, torch.rand(tokens, self.topk, device=self.device)

    def check(self, name, out, x, idx, expanded):
        """Each row comes back once from every rank, or from every choice in the expanded layout, and is added up."""
        if expanded:
            times = torch.full((len(x), 1), self.topk, device=self.device)
        else:
            owner = idx // (self.experts // self.size)
            times = torch.stack([(owner == rank).any(1) for rank in range(self.size)]).sum(0).unsqueeze(1)
        if not torch.equal(out, (x * times).to(torch.bfloat16)):
            raise SystemExit(f"rank {self.rank}: {name}: wrong sums")

    def time_call(self, call):
        """Microseconds of call() behind an all-reduce: the median of the slowest rank."""
        times = []
        for number in range(self.args.repeat + 3):
            dist.all_reduce(self.small)
            if self.cuda:
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                events[0].record()
                call()
                events[1].record()
                self.sync()
                spent = events[0].elapsed_time(events[1]) * 1e3
            else:
                begin = time.perf_counter()
                call()
                spent = (time.perf_counter() - begin) * 1e6
            if number >= 3:
                times.append(self.slowest(spent))
        return statistics.median(times)

    def time_queue(self, layers):
        """(us of one of the layers queued one behind another, us of the host for it): medians of the slowest rank."""
        whole, host = [], []
        for number in range(max(3, self.args.repeat // 4) + 1):
            dist.all_reduce(self.small)
            self.sync()
            begin = time.perf_counter()
            for layer in layers:
                layer()
            called = time.perf_counter()
            self.sync()
            spent = time.perf_counter() - begin
            if number:
                whole.append(self.slowest(spent / len(layers) * 1e6))
                host.append(self.slowest((called - begin) / len(layers) * 1e6))
        return statistics.median(whole), statistics.median(host)

    def note(self, table, name, **figures):
        self.rows.append({"table": table, "name": name, **figures})
        if self.rank == 0:
            text = "  ".join(f"{key} {value:.1f}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items())
            print(f"{table:8} {name:52} {text}", flush=True)

    # --- calls ---

    def calls(self):
        for sms in map(int, self.args.sms.split(",")):
            deep_ep.Buffer.set_num_sms(sms)
            self.native.set_num_sms(sms)
            for fp8 in (False, True):
                self.dispatches(sms, fp8)
            for expanded in (False, True):
                self.combines(sms, expanded)

    def dispatches(self, sms, fp8):
        tokens, kind = self.args.tokens, "fp8" if fp8 else "bf16"
        x, idx, weights = self.data(tokens)
        rows = (x.to(torch.float8_e4m3fn), torch.rand(tokens, self.args.hidden // 128, device=self.device)) if fp8 else x
        plan = self.native.plan(idx, self.experts)
        out = self.native.empty(plan.out_rows, self.args.hidden, dtype=rows[0].dtype if fp8 else x.dtype)
        v1 = self.v1_dispatch(rows, idx, weights)[4]
        v2 = self.v2_dispatch(rows, idx, weights, sms, True)[3]
        fixed = self.native.plan(idx, self.experts, max_recv_tokens=self.size * tokens)

        def update():
            fixed.update(idx)
            fixed.dispatch(rows, weights, want_topk_idx=True)

        cases = {
            "cached, native, sym": lambda: plan.dispatch(rows, out=out),
            "cached, native": lambda: plan.dispatch(rows),
            "cached, drop-in V1": lambda: self.v1.dispatch(rows, handle=v1),
            "cached, drop-in V2": lambda: self.v2.dispatch(rows, handle=v2, num_sms=sms, do_expand=False),
            "new, native update": update,
            "new, native plan": lambda: self.native.plan(idx, self.experts).dispatch(rows, weights, want_topk_idx=True),
            "new, drop-in V1": lambda: self.v1_dispatch(rows, idx, weights),
            "new, drop-in V2, no counts on the host": lambda: self.v2_dispatch(rows, idx, weights, sms, False),
            "new, drop-in V2, counts on the host": lambda: self.v2_dispatch(rows, idx, weights, sms, True)}
        for name, call in cases.items():
            self.note("calls", f"dispatch {kind}, {name}", sms=sms, us=self.time_call(call))

    def v1_dispatch(self, rows, idx, weights):
        per_rank, per_node, per_expert, in_rank, _ = self.v1.get_dispatch_layout(idx, self.experts)
        return self.v1.dispatch(rows, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
                                num_tokens_per_expert=per_expert, topk_idx=idx, topk_weights=weights)

    def v2_dispatch(self, rows, idx, weights, sms, counts, expand=False):
        return self.v2.dispatch(rows, idx, weights, num_experts=self.experts, num_max_tokens_per_rank=self.args.tokens, num_sms=sms,
                                do_cpu_sync=counts, do_handle_copy=False, do_expand=expand)

    def combines(self, sms, expanded):
        x, idx, weights = self.data(self.args.tokens)
        plan = self.native.plan(idx, self.experts, expanded=expanded)
        received = plan.dispatch(x).x
        memory = self.native.empty(plan.out_rows, self.args.hidden).copy_(received)
        handle = self.v2_dispatch(x, idx, weights, sms, True, expanded)[3]
        cases = {"native, sym": lambda: plan.combine(memory)[0], "native": lambda: plan.combine(received)[0],
                 "native, order of choices": lambda: plan.combine(received, by_choice=True, round_partial=expanded)[0],
                 "drop-in V2": lambda: self.v2.combine(received, handle, num_sms=sms)[0]}
        if not expanded:
            v1 = self.v1_dispatch(x, idx, weights)[4]
            cases["drop-in V1"] = lambda: self.v1.combine(received, v1)[0]
        for name, call in cases.items():
            self.poison()
            self.check(name, call(), x, idx, expanded)
            self.note("calls", f"combine {'expanded' if expanded else 'rank layout'}, {name}", sms=sms, us=self.time_call(call))

    # --- layers ---

    def layers(self):
        deep_ep.Buffer.set_num_sms(24)
        self.native.set_num_sms(24)
        for tokens in map(int, self.args.layer_tokens.split(",")):
            routings = [self.data(tokens) for _ in range(4)]
            for name, layer in self.layer_forms(tokens, routings[0]).items():
                self.experts_of_layer = torch.clone
                for x, idx, weights in routings[:2]:
                    self.poison()
                    self.check(name, layer(x, routings[0][1] if "cached" in name else idx, weights), x,
                               routings[0][1] if "cached" in name else idx, False)
                self.experts_of_layer = lambda rows: self.made[:len(rows)]
                queue = [lambda data=routings[i % 4], layer=layer: layer(*data) for i in range(self.args.layers)]
                us, host = self.time_queue(queue)
                self.note("layers", name, tokens=tokens, us=us, host_us=host)

    def layer_forms(self, tokens, first):
        x, idx, weights = first
        fixed = self.native.plan(idx, self.experts, max_recv_tokens=self.size * tokens, max_tokens=tokens)
        plan = self.native.plan(idx, self.experts)
        rows = self.native.empty(self.size * tokens, self.args.hidden)
        out = self.native.empty(tokens, self.args.hidden)
        v1 = self.v1_dispatch(x, idx, weights)[4]
        v2 = self.v2_dispatch(x, idx, weights, 24, True)[3]
        self.made = torch.ones(self.size * self.v2.num_max_tokens_per_rank, self.args.hidden, dtype=torch.bfloat16, device=self.device)

        def update(x, idx, weights):
            fixed.update(idx)
            fixed.dispatch(x, out=rows)
            return fixed.combine(rows, out=out)[0]

        def cached(x, idx, weights):
            plan.dispatch(x, out=rows)
            return plan.combine(rows[:plan.out_rows], out=out)[0]

        def exact(x, idx, weights):
            plan = self.native.plan(idx, self.experts)
            return plan.combine(self.experts_of_layer(plan.dispatch(x, weights, want_topk_idx=True).x))[0]

        def form_v1(x, idx, weights):
            got = self.v1_dispatch(x, idx, weights)
            return self.v1.combine(self.experts_of_layer(got[0]), got[4])[0]

        def form_v2(counts):
            def layer(x, idx, weights):
                got = self.v2_dispatch(x, idx, weights, 24, counts)
                return self.v2.combine(self.experts_of_layer(got[0]), got[3], num_sms=24)[0]
            return layer

        return {"native update, sym": update, "native cached, sym": cached, "native exact plan": exact,
                "drop-in V1, new": form_v1,
                "drop-in V1, cached": lambda x, idx, weights: self.v1.combine(
                    self.experts_of_layer(self.v1.dispatch(x, handle=v1)[0]), v1)[0],
                "drop-in V2, new": form_v2(False), "drop-in V2, new, counts on the host": form_v2(True),
                "drop-in V2, cached": lambda x, idx, weights: self.v2.combine(
                    self.experts_of_layer(self.v2.dispatch(x, handle=v2, num_sms=24)[0]), v2, num_sms=24)[0],
                "torch.distributed.all_to_all_single": self.torch_layer}

    def torch_layer(self, x, idx, weights):
        """Each token once to each rank that it needs, and back; sums on its own rank."""
        in_rank = self.native.layout(idx, self.experts)[2]
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

    # --- low latency ---

    def low_latency(self):
        for tokens in map(int, self.args.ll_tokens.split(",")):
            x, idx, weights = self.data(tokens)
            ones = torch.ones_like(weights)
            calls = self.native.low_latency(tokens, self.args.hidden, self.experts, self.topk)

            def native(calls=calls, x=x, idx=idx, ones=ones):
                got = calls.dispatch(x, idx, fp8=True)
                return calls.combine(self.expert(got.x), idx, ones, call=got.call)[0]

            def drop_in(x=x, idx=idx, ones=ones, tokens=tokens):
                got = self.v1.low_latency_dispatch(x, idx, tokens, self.experts)
                return self.v1.low_latency_combine(self.expert(got[0][0]), idx, ones, got[2])[0]

            self.rows_of_expert = torch.ones(self.experts // self.size, self.size * tokens, self.args.hidden, dtype=torch.bfloat16,
                                             device=self.device)
            for name, pair in (("native", native), ("drop-in", drop_in)):
                if not torch.equal(pair(), torch.full_like(x, self.topk)):
                    raise SystemExit(f"rank {self.rank}: low latency, {name}: wrong sums")
                eager, host = self.time_queue([pair] * self.args.layers)
                figures = {"graph_us": self.time_graph(pair)} if self.cuda else {}
                self.note("ll", f"fp8 dispatch and combine, {name}", tokens=tokens, us=eager, host_us=host, **figures)

    def expert(self, rows):
        """What the experts make of the rows: ones, at no cost."""
        return self.rows_of_expert

    def time_graph(self, pair):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self.args.layers):
                pair()
        return self.time_queue([graph.replay])[0] / self.args.layers


def bench(args):
    one = Bench(args)
    for name, table in (("calls", one.calls), ("layers", one.layers), ("ll", one.low_latency)):
        if args.only in (None, name):
            table()
    if one.rank == 0 and not one.cuda:
        print(HINT)
    if one.rank == 0 and args.json:
        record = {"command": " ".join(["bench/engine_calls.py", *sys.argv[1:]]), "ranks": one.size, "torch": torch.__version__,
                  "gpu": torch.cuda.get_device_name() if one.cuda else None, "hidden": args.hidden, "topk": one.topk,
                  "experts": one.experts, "rows": one.rows}
        pathlib.Path(args.json).write_text(json.dumps(record, indent=1) + "\n")


def main():
    bench(parse())


if __name__ == "__main__":
    parse()  # reports a wrong option before ranks start
    if "RANK" not in os.environ:
        os.environ["EPKIT_BACKEND"] = "host"
    launch(main)

# SPDX-License-Identifier: Apache-2.0
"""What only GPUs have: streams that really run beside each other, graphs, memory of a device; and the CPU's bits."""
import itertools
import os
import subprocess
import sys
import time

import deep_ep
import epkit
import torch
import torch.distributed as dist
from deep_ep.utils.math import per_token_cast_to_fp8
from ranks import on_ranks, raises, run

ONLY_ON_CUDA = True
TOPK, EXPERTS = 4, 16


def poison():
    """What the allocator hands out next is NaN, and no valid index."""
    for words, count in ((1 << 22, 4), (1 << 16, 8), (1 << 12, 16), (128, 64)):
        blocks = [torch.full((words,), 0x7fc07fc1, dtype=torch.int32) for _ in range(count)]
        del blocks


def same(a, b):
    if a is None or b is None:
        return a is b
    a, b = a.cpu().contiguous(), b.cpu().contiguous()
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check(what, *pairs):
    for name, a, b in pairs:
        assert same(a, b), f"{what}: {name} differs from the CPU's" + (
            "" if a is None or b is None or a.shape != b.shape else
            f" in {(a.cpu() != b.cpu()).sum().item()} elements, first {(a.cpu() != b.cpu()).nonzero()[0].tolist()}")


def cpu(value):
    return tuple(cpu(one) for one in value) if isinstance(value, tuple) else None if value is None else value.cpu()


def make(tokens, hidden, seed):
    torch.manual_seed(seed)
    topk_idx = torch.rand(tokens, EXPERTS).topk(TOPK).indices
    topk_idx[torch.rand(topk_idx.shape) < 0.2] = -1
    return topk_idx, torch.rand(tokens, TOPK), torch.randn(tokens, hidden).to(torch.bfloat16)


def plans_of(comms, topk_idx, options):
    return [comm.plan(topk_idx if comm.is_cuda else topk_idx.cpu(), EXPERTS, **options) for comm in comms]


def operations(plans, x, weights, biases, options):
    """A dispatch and combines on both plans; everything is equal."""
    gpu, host = plans
    out = []
    for plan in plans:
        poison()
        own = (lambda value: value) if plan is gpu else cpu
        rows = plan.dispatch(own(x), own(weights), want_topk_idx=True, column_major_scales=options["columns"])
        out.append(rows)
    n = host.metadata(500).n_recv_tokens.item() if host.fixed and not host.expanded else None
    check(f"dispatch {options}", ("idx", out[0].topk_idx, out[1].topk_idx))
    real = slice(0, n)
    if host.expanded:
        real = torch.cat([torch.arange(begin, end, device="cpu") for begin, end in spans(host)])
    check(f"dispatch {options}", ("x", out[0].x.cpu()[real], out[1].x[real]), ("weights", out[0].topk_weights.cpu()[real],
                                                                            out[1].topk_weights[real]))
    if out[0].scales is not None:
        check(f"dispatch {options}", ("scales", out[0].scales.cpu()[real], out[1].scales[real]))
    torch.manual_seed(5)
    y = torch.randn(out[0].x.shape, device="cpu").to(torch.bfloat16)
    # Without weights each rank adds up its rows first; the second time it knows where they are.
    for by_choice, partial, weighted in ((False, False, True), (True, False, True), (True, True, True), (True, True, False),
                                         (True, True, False)):
        poison()
        received = out[1].topk_weights if weighted else None
        a = gpu.combine(y.cuda(), None if received is None else received.cuda(), biases, by_choice=by_choice, round_partial=partial)
        b = host.combine(y, received, cpu(biases), by_choice=by_choice, round_partial=partial)
        check(f"combine {options} {by_choice} {partial} {weighted}", ("out", a[0], b[0]), ("weights", a[1], b[1]))
    a, b = gpu.metadata(500), host.metadata(500)
    tokens = b.n_recv_tokens.item()
    for name in epkit.Metadata._fields:
        one, other = getattr(a, name), getattr(b, name)
        if name in ("recv_source", "recv_slot") and one is not None:
            one, other = one[:tokens], other[:tokens]
        check(f"metadata {options}", (name, one, other))


def spans(plan):
    """First row and the one behind the last of each expert of an expanded plan."""
    data = plan.metadata()
    return [(end - count, end) for end, count in zip(data.psum_expert.tolist(), data.count_exact.tolist())]


@on_ranks(2)
def test_bits_are_those_of_the_cpu(rank, size):
    comms = epkit.Communicator(), epkit.Communicator(backend="host")
    number = 0
    for expanded, alignment, fixed, fp8 in itertools.product((False, True), (1, 16), (False, True), (False, True)):
        number += 1
        tokens = (0, 1, 37, 150)[(number + rank) % 4]
        topk_idx, weights, x = make(tokens, (256, 1024, 7168)[number % 3], 10 * number + rank)
        given = per_token_cast_to_fp8(x) if fp8 else x
        biases = tuple(torch.randn_like(x) for _ in range(number % 3))
        options = {"expanded": expanded, "alignment": alignment, "zero_padding": expanded,
                   "max_recv_tokens": size * 150 * TOPK + EXPERTS * 16 if fixed else 0, "max_tokens": 150}
        plans = plans_of(comms, topk_idx, options)
        assert plans[0].recv_per_expert == plans[1].recv_per_expert
        operations(plans, given, weights, biases, {**options, "columns": bool(number % 2)})
    for comm in comms:
        comm.free()


@on_ranks(2)
def test_plans_from_masks(rank, size):
    comms = epkit.Communicator(), epkit.Communicator(backend="host")
    topk_idx, _, x = make(40 + rank, 512, rank)
    per_rank, per_expert, in_rank = comms[0].layout(topk_idx, EXPERTS)
    a = comms[0].plan(None, EXPERTS, token_in_rank=in_rank, tokens_per_expert=per_expert, alignment=8)
    b = comms[1].plan(None, EXPERTS, token_in_rank=in_rank.cpu(), tokens_per_expert=per_expert.cpu(), alignment=8)
    assert a.recv_per_expert == b.recv_per_expert and a.recv_from_rank == b.recv_from_rank
    got, want = a.dispatch(x).x, b.dispatch(x.cpu()).x
    check("mask", ("x", got, want), ("combined", a.combine(got)[0], b.combine(want)[0]))
    check("mask", *((name, getattr(a.metadata(100), name), getattr(b.metadata(100), name)) for name in epkit.Metadata._fields))


@on_ranks(2)
def test_low_latency_bits_are_those_of_the_cpu(rank, size):
    comms = epkit.Communicator(), epkit.Communicator(backend="host")
    gpu, host = (comm.low_latency(64, 1024, EXPERTS, TOPK) for comm in comms)
    for number, (fp8, ue8m0, hook, most, exact, zero_copy) in enumerate((
            (False, False, False, 64, False, False), (True, False, True, 32, True, False), (True, True, False, 64, False, True),
            (False, False, True, 48, False, True))):
        topk_idx, weights, x = make(most - rank * 5, 1024, number + 7 * rank)
        stats = torch.ones(EXPERTS // size, dtype=torch.int32)
        results = []
        for calls, own in ((gpu, lambda value: value), (host, cpu)):
            poison()
            rows = calls.dispatch(own(x), own(topk_idx), fp8=fp8, ue8m0=ue8m0, max_tokens=most, hook=hook,
                                  recv_stats=stats if calls is gpu else None)
            if hook:
                rows.finish()
            results.append(rows)
        a, b = results
        check(f"low latency {number}", ("count", a.count, b.count), ("range", a.range, b.range),
              ("stats", stats, b.count + 1))
        for expert, count in enumerate(b.count.tolist()):
            check(f"low latency {number}", ("rows", a.x[expert, :count], b.x[expert, :count]),
                  ("source", a.source[expert, :count], b.source[expert, :count]))
            if fp8:
                check(f"low latency {number}", ("scales", a.scales[expert, :count], b.scales[expert, :count]))
                assert a.scales.stride() == b.scales.stride()
        torch.manual_seed(3 + rank)
        y = torch.randn(a.x.shape).to(torch.bfloat16)
        sums = []
        for calls, own, rows in ((gpu, lambda value: value, a), (host, cpu, b)):
            given = own(y)
            if zero_copy:
                buffer = calls.combine_buffer(most)
                buffer.copy_(given)
                given = buffer
            out, finish = calls.combine(given, own(topk_idx), own(weights), call=rows.call, max_tokens=most, exact=exact,
                                        zero_copy=zero_copy, hook=hook)
            if hook:
                finish()
            sums.append(out)
        check(f"low latency {number}", ("combined", *sums))


def late(x, value):
    """x becomes value, some milliseconds from now in the current stream."""
    torch.cuda._sleep(3_000_000)
    x.copy_(value)


@on_ranks(2)
def test_stream_modes(rank, size):
    """Inputs that are written late, memory that is used again at once: every mode waits for what it must."""
    buffer = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True)
    topk_idx, weights, _ = make(100, 1024, rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    fan_out = in_rank.sum(1, keepdim=True)
    for number, (previous, asynchronous, on_comm, cached) in enumerate(itertools.product((False, True), repeat=4)):
        value = torch.randint(-8, 8, (100, 1024)).to(torch.bfloat16)
        x = torch.full_like(value, float("nan"))
        handle = buffer.dispatch(value, **layout, topk_idx=topk_idx, topk_weights=weights)[4] if cached else None
        torch.cuda.synchronize()
        poison()
        late(x, value)
        modes = lambda: {"previous_event": buffer.capture() if previous else None, "async_finish": asynchronous,  # noqa: E731
                         "allocate_on_comm_stream": on_comm}
        more = {"handle": handle} if cached else {**layout, "topk_idx": topk_idx, "topk_weights": weights}
        rows, _, _, _, new, event = buffer.dispatch(x, **more, **modes())
        if asynchronous:
            event.current_stream_wait()
        x.fill_(float("nan"))  # allowed from here on
        y = torch.full_like(rows, float("nan"))
        late(y, rows)
        out, _, event = buffer.combine(y, handle or new, **modes())
        if asynchronous:
            event.current_stream_wait()
        y.fill_(float("nan"))
        del rows, event
        poison()
        assert torch.equal(out.float(), value.float() * fan_out), f"previous, asynchronous, on_comm, cached: {previous, asynchronous, on_comm, cached}"
    buffer.destroy()


def graphs(rank, size):
    """Cached dispatch and combine of both interfaces, and new routing, captured and replayed."""
    buffer, elastic = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=64)
    topk_idx, weights, x = make(64, 1024, rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
    v1 = buffer.dispatch(x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
                         topk_idx=topk_idx, topk_weights=weights)[4]
    v2 = elastic.dispatch(x, topk_idx, weights, num_experts=EXPERTS, do_expand=True)[3]
    comm = epkit.Communicator()
    plan = comm.plan(topk_idx, EXPERTS, max_recv_tokens=64 * size, max_tokens=64)

    def step():
        one = buffer.combine(buffer.dispatch(x, handle=v1)[0], v1)[0]
        two = elastic.combine(elastic.dispatch(x, handle=v2, do_expand=True)[0], v2)[0]
        plan.update(topk_idx)
        rows = plan.dispatch(x, weights, want_topk_idx=True)
        return one, two, *plan.combine(rows.x, rows.topk_weights)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    fan_out, choices = in_rank.sum(1, keepdim=True), (topk_idx >= 0).sum(1, keepdim=True)
    for number in range(20):
        torch.manual_seed(100 * number + rank)
        x.copy_(torch.randint(-8, 8, x.shape))
        topk_idx.copy_(torch.rand(64, EXPERTS).topk(TOPK).indices)
        weights.copy_(torch.rand(64, TOPK))
        for one in results:
            one.fill_(float("nan"))
        graph.replay()
        now = comm.layout(topk_idx, EXPERTS)[2].sum(1, keepdim=True)
        assert torch.equal(results[0].float(), x.float() * fan_out), "Buffer"
        assert torch.equal(results[1].float(), x.float() * choices), "ElasticBuffer"
        assert torch.equal(results[2].float(), x.float() * now), "Plan.update"
        assert torch.equal(results[3], weights), "Plan.update, weights"
    comm.check()
    torch.cuda.synchronize()


def test_graphs():
    run(2, graphs)


@on_ranks(2)
def test_sums_of_each_rank_in_graphs(rank, size):
    """Combines that add up the rows of each rank first, in graphs with and without an update of their own, between eager ones: each
    uses the routing that is valid when it runs."""
    comm, most = epkit.Communicator(), 64
    routing, _, x = make(most, 1024, rank)
    topk_idx = routing.clone()
    plan = comm.plan(topk_idx, EXPERTS, expanded=True, alignment=8, max_recv_tokens=size * most * TOPK + 8 * EXPERTS, max_tokens=most)
    outs = []

    def step(update):
        if update:
            plan.update(topk_idx)
        return plan.combine(plan.dispatch(x).x, by_choice=True, round_partial=True)[0]

    step(True)
    torch.cuda.synchronize()
    dist.barrier()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph, update in zip(graphs, (True, False)):
        with torch.cuda.graph(graph):
            outs.append(step(update))
    for number, which in enumerate((0, 1, None, 0, None, None, 1, 0, 0, 1, None, 1)):
        torch.manual_seed(100 * number + rank)
        x.copy_(torch.randint(-8, 8, x.shape))
        if which != 1:  # which goes on with the routing of the call before
            topk_idx.copy_(torch.rand(most, EXPERTS).topk(TOPK).indices.masked_fill_(torch.rand(most, TOPK) < 0.2, -1))
        if which is None:
            out = step(True)
        else:
            out = outs[which].fill_(float("nan"))
            graphs[which].replay()
        assert torch.equal(out.float(), x.float() * (topk_idx >= 0).sum(1, keepdim=True)), (number, which)
    comm.check()
    torch.cuda.synchronize()


@on_ranks(2)
def test_orders_of_sums_in_graphs(rank, size):
    """The combine of a graph leaves other rows to add in the memory of the plan than the calls around it need."""
    comm = epkit.Communicator()
    topk_idx, _, x = make(64, 1024, rank)
    x.copy_(torch.randint(-8, 8, x.shape))
    plan = comm.plan(topk_idx, EXPERTS, expanded=True)
    rows, expected = plan.dispatch(x).x, x.float() * (topk_idx >= 0).sum(1, keepdim=True)

    def add(partial):
        return plan.combine(rows, by_choice=True, round_partial=partial)[0]

    add(True)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = add(True)
    for _ in range(3):
        for _ in range(2):
            assert torch.equal(add(False).float(), expected)
        graph.replay()
        assert torch.equal(out.float(), expected)
        out.fill_(float("nan"))
    comm.check()
    torch.cuda.synchronize()


@on_ranks(2)
def test_updates_that_are_not_launched(rank, size):
    """A captured update changes nothing before its graph is replayed: calls have the tokens and the routing of the one before."""
    comm = epkit.Communicator()
    topk_idx, _, x = make(64, 1024, rank)
    x.copy_(torch.randint(-8, 8, x.shape))
    few, few_x = topk_idx[:20].flip(0).contiguous(), x[:20].contiguous()
    plan = comm.plan(topk_idx, EXPERTS, max_recv_tokens=64 * size, max_tokens=64)

    def step(rows):
        return plan.combine(plan.dispatch(rows).x)[0]

    before = step(x)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(few)
        captured = plan.n_tokens
        out = step(few_x)
    assert (captured, plan.n_tokens) == (20, 64)
    assert torch.equal(step(x), before)
    graph.replay()
    assert torch.equal(out.float(), few_x.float() * comm.layout(few, EXPERTS)[2].sum(1, keepdim=True))
    plan.update(topk_idx)
    assert torch.equal(step(x), before)
    comm.check()
    torch.cuda.synchronize()


@on_ranks(2)
def test_capture_routing(rank, size):
    """New routing captured as engines decode: a handle for each layer that goes with the next one, in graphs of several sizes,
    replayed in any order, with eager steps in between."""
    buffer = deep_ep.Buffer(dist.group.WORLD)
    elastic = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=64)
    size_of = lambda: buffer._comm.info()["library_bytes"] + elastic._comm.info()["library_bytes"]  # noqa: E731
    held = {}

    def layers(x, topk_idx, weights):
        outs = []
        for number in range(3):
            expand = number != 1
            rows, _, received, handle, _ = elastic.dispatch(x, topk_idx, weights, num_experts=EXPERTS, do_cpu_sync=False,
                                                            do_expand=expand, expert_alignment=8)
            held["elastic"] = handle
            outs += elastic.combine(rows, handle, topk_weights=received)[:2]
            layout = buffer.get_dispatch_layout(topk_idx, EXPERTS)
            rows, _, received, _, handle, _ = buffer.dispatch(
                x, num_tokens_per_rank=layout[0], is_token_in_rank=layout[3], num_tokens_per_expert=layout[2],
                topk_idx=topk_idx, topk_weights=weights, num_worst_tokens=64 * size)
            held["buffer"] = handle
            outs += buffer.combine(rows, handle, received)[:2]
        return outs

    def check(outs, x, topk_idx, weights):
        ranks = torch.stack([(topk_idx // (EXPERTS // size) == one).any(1) for one in range(size)]).sum(0).unsqueeze(1)
        choices, sums = (topk_idx >= 0).sum(1, keepdim=True), weights.masked_fill(topk_idx < 0, 0)
        for number in range(3):
            got = outs[4 * number:4 * number + 4]
            assert torch.equal(got[0].float(), x.float() * (choices if number != 1 else ranks)), f"ElasticBuffer, layer {number}"
            assert torch.equal(got[2].float(), x.float() * ranks), f"Buffer, layer {number}"
            assert torch.equal(got[1], sums) and torch.equal(got[3], sums), f"weights, layer {number}"

    graphs, marks = [], []
    for tokens in (64, 32, 8, 64, 16, 8):
        given = make(tokens, 1024, rank)
        given = (torch.randint(-8, 8, (tokens, 1024)).to(torch.bfloat16), given[0], given[1])
        if len(graphs) != 1:  # the second one has no step before its capture
            check(layers(*given), *given)
        torch.cuda.synchronize()
        held.clear()  # memory of live plans is not counted
        before, graph = size_of(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = layers(*given)
        held.clear()
        graphs.append((graph, outs, given))
        marks.append(size_of() - before)
    torch.cuda.synchronize()
    assert marks[0] > 0 and not any(marks[3:]), f"memory of plans of captures is not used again: {marks}"
    for step in range(30):
        graph, outs, given = graphs[step * 5 % len(graphs)]
        torch.manual_seed(100 * step + rank)
        given[0].copy_(torch.randint(-8, 8, given[0].shape))
        given[1].copy_(torch.rand(given[0].shape[0], EXPERTS).topk(TOPK).indices)
        given[1][::3, 1] = -1
        given[2].copy_(torch.rand(given[2].shape))
        for one in outs:
            one.fill_(float("nan"))
        graph.replay()
        check(outs, *given)
        if step % 4 == 0:  # an eager step, whose handles stay while graphs run
            other = make(24, 1024, step + rank)
            other = (torch.randint(-8, 8, (24, 1024)).to(torch.bfloat16), other[0], other[1])
            check(layers(*other), *other)
    buffer._comm.check()
    elastic._comm.check()


@on_ranks(2)
def test_handles_are_read_early(rank, size):
    """Facts of a handle may be read before the event of its dispatch: they wait for what they are made of."""
    elastic = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=128)
    buffer = deep_ep.Buffer(dist.group.WORLD)
    for step in range(4):
        topk_idx, weights, value = make(100, 1024, rank + 10 * step)
        for expand in (False, True):
            x = torch.empty_like(value)
            poison()
            late(x, value)
            handle, event = elastic.dispatch(x, topk_idx, weights, num_experts=EXPERTS, do_expand=expand,
                                             async_with_compute_stream=True)[3:]
            n, source = handle.num_recv_tokens, handle.recv_src_metadata[:, 0].clone()
            event.current_stream_wait()
            assert n == handle.psum_num_recv_tokens_per_scaleup_rank[-1].item() == source.shape[0]
            assert torch.equal(source, handle.recv_src_metadata[:, 0]) and (source.diff() > 0).all()
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
        late(x, value)
        rows, _, _, _, handle, event = buffer.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=topk_idx,
            topk_weights=weights, async_finish=True)
        early = [one.clone() for one in handle]
        event.current_stream_wait()
        assert all(torch.equal(a, b) for a, b in zip(early, handle))
        assert early[0][:, rank].tolist() == early[2].cumsum(0).flatten().tolist() and early[3].shape[0] == rows.shape[0]


@on_ranks(2)
def test_first_calls(rank, size):
    """First operations whose memory the peers have not mapped yet. The rank that comes first is by then in a copy of pageable
    memory behind the operation: until that has ended, its process makes no other call of the driver."""
    dist.barrier()
    for number, (tokens, expand) in enumerate(((24, False), (24, True), (96, True), (300, False))):
        for hidden, early in ((1024, 0), (8192, 1)):
            elastic = deep_ep.ElasticBuffer(dist.group.WORLD, num_cpu_timeout_secs=30, explicitly_destroy=True)
            topk_idx, weights, x = make(tokens, hidden, 7 * number + rank)
            torch.cuda.synchronize()
            dist.barrier()
            if rank != early:
                time.sleep(0.3)
            rows, _, _, handle, _ = elastic.dispatch(x, topk_idx, weights, num_experts=EXPERTS, num_max_tokens_per_rank=tokens,
                                                     do_cpu_sync=False, do_expand=expand)
            n = handle.psum_num_recv_tokens_per_scaleup_rank.cpu()[-1].item()
            assert 0 < n <= size * tokens
            if rank == early:
                time.sleep(0.3)
            out, _, _ = elastic.combine(rows, handle)
            times = (topk_idx >= 0).sum(1) if expand else torch.stack(
                [(topk_idx // (EXPERTS // size) == one).any(1) for one in range(size)]).sum(0)
            want = (x.float() * times.unsqueeze(1)).to(torch.bfloat16)
            assert torch.allclose(out.cpu().float(), want.cpu().float(), rtol=0.02), (number, hidden)
            elastic.destroy()
    # Rows that are larger than what a plan of exact counts reserves staging for.
    comm = epkit.Communicator(timeout=30)
    topk_idx, _, x = make(700, 16384, rank)
    plan = comm.plan(topk_idx, EXPERTS)
    dist.barrier()
    if rank:
        time.sleep(0.3)
    assert plan.dispatch(x).x.cpu().float().abs().sum() > 0


def early_starts(rank, size):
    """The kernel before a call may let it start early (programmatic dependent launch): the call waits for what it writes."""
    from late_copy import copy_late  # needs triton

    elastic = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=64)
    low = epkit.Communicator().low_latency(64, 1024, EXPERTS, TOPK)
    topk_idx, _, _ = make(64, 1024, rank)
    value, weights = torch.randint(-8, 8, (64, 1024)).to(torch.bfloat16), torch.ones(64, TOPK)
    x, idx = torch.empty_like(value), torch.empty_like(topk_idx)

    def step():
        x.fill_(float("nan"))
        idx.fill_(-1)
        copy_late(idx, topk_idx)
        copy_late(x, value)
        rows, _, _, handle, _ = elastic.dispatch(x, idx, weights, num_experts=EXPERTS, do_cpu_sync=False, do_expand=True)
        y = torch.full_like(rows, float("nan"))
        copy_late(y, rows)
        first = elastic.combine(y, handle)[0]
        x.fill_(float("nan"))
        copy_late(x, value)
        rows = low.dispatch(x, idx)
        y = torch.full_like(rows.x, float("nan"))
        copy_late(y, rows.x)
        return first, low.combine(y, idx, weights, call=rows.call)[0]

    want, graph = value.float() * (topk_idx >= 0).sum(1, keepdim=True), torch.cuda.CUDAGraph()
    for _ in range(3):
        for number, out in enumerate(step()):
            assert torch.equal(out.float(), want), f"{('a', 'a low-latency')[number]} pair"
    with torch.cuda.graph(graph):
        outs = step()
    for _ in range(3):
        graph.replay()
        for number, out in enumerate(outs):
            assert torch.equal(out.float(), want), f"{('a', 'a low-latency')[number]} pair in a graph"
            out.fill_(float("nan"))


def need_early_starts():
    """triton whose kernels can let the next one start early. Asked in another process: nothing may touch CUDA in this one."""
    asked = subprocess.run([sys.executable, "-c", "import triton.language as tl; tl.extra.cuda.gdc_launch_dependents"],
                           capture_output=True, text=True)
    if asked.returncode:
        from run import Skip

        raise Skip(f"no triton with gdc_launch_dependents: {asked.stderr.strip().rpartition(chr(10))[2]}")


def test_early_starts():
    need_early_starts()
    run(2, early_starts)


@on_ranks(2)
def test_waits_elsewhere(rank, size):
    """Another stream than the caller's waits for the event: what the call was given stays until the call has read it."""
    buffer, side = deep_ep.Buffer(dist.group.WORLD), torch.cuda.Stream()
    topk_idx, weights, x = make(4096, 2048, rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
    want, _, _, _, handle, _ = buffer.dispatch(
        x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=topk_idx,
        topk_weights=weights)
    for on_comm in (False, True):
        again = x.clone()
        torch.cuda.synchronize()
        dist.barrier()
        with torch.cuda.stream(buffer.get_comm_stream()):
            torch.cuda._sleep(200_000_000)
        rows, *_, event = buffer.dispatch(again, handle=handle, async_finish=True, previous_event=buffer.capture(),
                                          allocate_on_comm_stream=on_comm)
        with torch.cuda.stream(side):
            event.current_stream_wait()
            got = rows.clone()
        del event, again
        over = torch.full_like(x, float("nan"))  # where it was, if nobody holds it
        side.synchronize()
        assert torch.equal(got, want), "what was dispatched was overwritten before"
        del over


@on_ranks(2)
def test_invalid_routing_that_has_begun(rank, size):
    """Rows are sent before a host knows that the routing of a rank is not valid: all ranks learn which rank it is, at once."""
    buffer = deep_ep.Buffer(dist.group.WORLD)
    topk_idx, weights, x = make(64, 1024, rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
    given = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert, "topk_weights": weights}
    buffer.dispatch(x, topk_idx=topk_idx, **given)
    raises(epkit.Error, "EP_E_ROUTING rank 1", buffer.dispatch, x, topk_idx=topk_idx + 100 * rank, **given)


@on_ranks(2)
def test_refused_operations_are_reported(rank, size):
    """A dispatch that is refused for want of rows and made again does not hide what is to be said of an earlier operation."""
    buffer = deep_ep.Buffer(dist.group.WORLD)
    for worst, tokens in ((0, 300), (7, 100), (0, 4000), (0, 4000)):
        topk_idx, weights, x = make(tokens, 1024, tokens + rank)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
        given = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert, "topk_weights": weights}
        if worst:
            buffer.dispatch(x, topk_idx=topk_idx, num_worst_tokens=worst, **given)
            refused = True
        elif tokens == 4000 and refused:
            raises(epkit.ArgumentError, "EP_E_CAPACITY 7", buffer.dispatch, x, topk_idx=topk_idx, **given)
            refused = False
        else:
            rows, *_, handle, _ = buffer.dispatch(x, topk_idx=topk_idx, **given)
            assert torch.equal(buffer.combine(rows, handle)[0].float(), (x.float() * in_rank.sum(1, keepdim=True)).to(torch.bfloat16).float())
    buffer._comm.check()


@on_ranks(2)
def test_counted_handles_in_graphs(rank, size):
    """A graph of calls with the handle of a dispatch whose counts the host knows: rows as many as were received."""
    topk_idx, weights, x = make(200 + 30 * rank, 1024, rank)
    v1, v2 = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=4096, hidden=1024)
    per_rank, _, per_expert, in_rank, _ = v1.get_dispatch_layout(topk_idx, EXPERTS)
    rows1, *_, handle1, _ = v1.dispatch(x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
                                        topk_idx=topk_idx, topk_weights=weights)
    rows2, _, _, handle2, _ = v2.dispatch(x, topk_idx, weights, num_experts=EXPERTS)
    assert rows1.shape == rows2.shape and len(rows1) < size * 4096
    sums = v1.combine(rows1, handle1)[0], v2.combine(rows2, handle2)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = v1.dispatch(x, handle=handle1)[0], v2.dispatch(x, handle=handle2)[0]
        outs = v1.combine(again[0], handle1)[0], v2.combine(again[1], handle2)[0]
    for _ in range(3):
        for one in (*again, *outs):
            one.fill_(float("nan"))
        graph.replay()
        check("a graph", *((str(i), a, b) for i, (a, b) in enumerate(zip((*again, *outs), (rows1, rows2, *sums)))))


@on_ranks(2)
def test_layouts(rank, size):
    """The layout of a routing: the CPU's, also of routing that changes under a graph, and of none."""
    gpu, host = epkit.Communicator(), epkit.Communicator(backend="host")
    topk_idx = make(200, 8, rank)[0]
    gpu.layout(topk_idx, EXPERTS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gpu.layout(topk_idx, EXPERTS)
    for step in range(5):
        topk_idx.copy_(make(200, 8, 10 * step + rank)[0])
        graph.replay()
        want = host.layout(topk_idx.cpu(), EXPERTS)
        check("layout", *((str(i), a, b) for i, (a, b) in enumerate(zip(captured, want))),
              *((str(i), a, b) for i, (a, b) in enumerate(zip(gpu.layout(topk_idx.to(torch.int32), EXPERTS), want))))
    none = gpu.layout(topk_idx[:0], EXPERTS)
    assert none[0].sum() == none[1].sum() == 0 and none[2].shape == (0, size)
    gpu.check()


@on_ranks(2)
def test_mem_pool(rank, size):
    """Tensors of a torch.cuda.MemPool are written in place: the library needs no memory to copy them."""
    gpu, host = comms = epkit.Communicator(), epkit.Communicator(backend="host")
    pool = gpu.mem_pool()
    for number in range(4):
        topk_idx, _, x = make(300 + 100 * number + rank, 2048, 11 * number + rank)
        plans = plans_of(comms, topk_idx, {})
        with torch.cuda.use_mem_pool(pool):
            # Each rank alone: others allocate something else before.
            before = [torch.zeros(1 << (18 + 2 * number), dtype=torch.uint8) for _ in range(2 * rank)]
            out = torch.full((plans[0].out_rows, 2048), float("nan"), dtype=torch.bfloat16)
        torch.cuda.synchronize()
        gpu.allgather_bytes(b".")  # all have allocated: see mem_pool()
        held = gpu.info()["library_bytes"]
        rows, want = plans[0].dispatch(x, out=out), plans[1].dispatch(x.cpu())
        assert rows.x.data_ptr() == out.data_ptr()
        check(f"pool {number}", ("x", rows.x, want.x),
              ("combined", plans[0].combine(rows.x)[0], plans[1].combine(want.x)[0]))
        grown = gpu.info()["library_bytes"] - held
        assert grown < 1 << 20, f"{grown} bytes more of the library's own: rows were copied"
        del before, out, rows
    gpu.free()
    with torch.cuda.use_mem_pool(pool):  # the pool holds the communicator's memory
        late = torch.ones(5 << 20, dtype=torch.uint8)
    assert late.sum().item() == 5 << 20
    del late, pool
    host.free()


@on_ranks(2)
def test_memory_is_flat(rank, size):
    """Memory of the device is the same after many steps as after some."""
    buffer = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True)
    most, marks = 10000 if os.environ.get("EPKIT_TEST_LONG") else 240, []
    for step in range(most):
        topk_idx, weights, x = make(64, 1024, step % 7 + rank)
        per_rank, _, per_expert, in_rank, event = buffer.get_dispatch_layout(topk_idx, EXPERTS, async_finish=True)
        rows, _, w, _, handle, event = buffer.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=topk_idx,
            topk_weights=weights, previous_event=event, async_finish=True, allocate_on_comm_stream=True)
        out, _, event = buffer.combine(rows, handle, w, previous_event=event, async_finish=True)
        event.current_stream_wait()
        if step % (most // 8) == most // 8 - 1:
            del rows, w, handle, event, out, x, in_rank, per_expert, per_rank, topk_idx, weights
            torch.cuda.synchronize()
            free = torch.cuda.mem_get_info()[0] if size <= torch.cuda.device_count() else 0
            torch.empty(1)  # looks which blocks are free again
            marks.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), -free))
    for early, late_on in zip(zip(*marks[:4]), zip(*marks[4:])):
        assert max(late_on) <= max(early), marks
    buffer.destroy()


@on_ranks(1)
def test_stream_of_a_call(rank, size):
    """A call that the caller's stream waits for runs there, unless the program orders other streams by the communication stream."""
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=64)
    topk_idx, weights, x = make(64, 256, rank)
    comm_stream = buffer._comm_stream.own

    def waits():
        torch.cuda.synchronize()
        with torch.cuda.stream(comm_stream):
            torch.cuda._sleep(400_000_000)
        rows, _, _, handle, _ = buffer.dispatch(x, topk_idx, weights, num_experts=EXPERTS, do_cpu_sync=False)
        out = buffer.combine(rows, handle)[0]
        torch.cuda.current_stream().synchronize()
        return comm_stream.query(), out

    waits()  # what it compiles and allocates
    waited, first = waits()
    assert not waited, "a call waited for the communication stream"
    assert buffer.get_comm_stream() is comm_stream
    waited, second = waits()
    assert waited, "a call did not run on the communication stream that the program has asked for"
    assert torch.equal(first, second)

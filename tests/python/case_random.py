# SPDX-License-Identifier: Apache-2.0
"""Random calls of deep_ep, with all that a program may give and that no engine gives together, against the contract."""
import os
import random

import deep_ep
import torch
import torch.distributed as dist
from deep_ep.utils.math import align, per_token_cast_to_fp8
from ranks import raises, run

LONG = bool(os.environ.get("EPKIT_TEST_LONG"))


class Case:
    """What all ranks draw alike, and this rank's own data."""

    def __init__(self, seed, rank, size, most=100):
        self.draw, self.rank, self.size = random.Random(seed), rank, size
        draw = self.draw
        self.local = draw.choice((1, 2, 4, 8))
        self.experts, self.topk = self.local * size, draw.randint(1, min(8, self.local * size))
        self.counts = [min(most, draw.choice((0, 1, 2, 5, 33, 100))) for _ in range(size)]
        self.routing = draw.choice(("any", "any", "some", "none", "first", "last", "again", "again"))
        torch.manual_seed(1000 * seed + rank)
        self.idx = self.choices(self.counts[rank], most)
        self.weights = torch.rand(self.idx.shape)
        self.all_idx = self.of_all(self.idx)
        self.in_rank = torch.stack([(self.idx // self.local == one).any(1) for one in range(size)], 1)

    def choices(self, count, most):
        idx = torch.rand(count, self.experts).topk(self.topk).indices
        if self.routing == "again":  # experts that a token names more than once, with room for them in low latency
            idx = torch.randint(0, self.experts, idx.shape)
            for expert in range(self.experts):
                idx.view(-1)[(idx.view(-1) == expert).nonzero()[most:]] = -1
        elif self.routing == "some":
            idx[torch.rand(idx.shape) < 0.5] = -1
        elif self.routing == "none":
            idx[:] = -1
        elif self.routing in ("first", "last"):  # all tokens go to one rank
            to = 0 if self.routing == "first" else self.size - 1
            idx[idx // self.local != to] = -1
        return idx

    def of_all(self, value):
        every = [None] * self.size
        dist.all_gather_object(every, value.cpu())
        return [one.to(value.device) for one in every]

    def arrivals(self):
        """(source, tokens) of what comes to this rank."""
        return [(source, (idx // self.local == self.rank).any(1).nonzero().flatten()) for source, idx in enumerate(self.all_idx)]

    def received(self, value):
        """Rows of all ranks' `value` that come here."""
        every = self.of_all(value)
        return torch.cat([every[source][tokens] for source, tokens in self.arrivals()])

    def received_choices(self):
        idx = torch.cat([self.all_idx[source][tokens] for source, tokens in self.arrivals()])
        return torch.where(idx // self.local == self.rank, idx % self.local, -1)

    def flags(self, buffer, asynchronous="async_finish"):
        """Arguments of streams and events. Drawn behind the inputs, which lie before the event then."""
        given = {asynchronous: self.draw.random() < 0.5}
        previous = self.draw.choice((None, "event", "empty"))
        if previous:
            given["previous_event"] = buffer.capture() if previous == "event" else deep_ep.EventOverlap()
        if previous == "event":
            given["allocate_on_comm_stream"] = self.draw.random() < 0.5
        return given


def odd_place(tensor):
    """The same values where another tensor ends: at no multiple of 16 bytes."""
    whole = torch.cat((tensor.new_zeros(1), tensor.flatten()))
    return whole[1:].view(tensor.shape)


def rows_for(case, count, one_column=()):
    """Rows of any kind that a dispatch takes: tensor or (fp8, scales)."""
    kind = case.draw.choice(("bf16", "bf16", "odd", "fp8", "columns", "packed", "words") + one_column)
    hidden = case.draw.choice((8, 136, 512, 1024)) if kind in ("bf16", "odd") else case.draw.choice((512, 1024))
    x = torch.randn(count, hidden).to(torch.bfloat16)
    if kind == "bf16":
        return x
    if kind == "odd":
        return odd_place(x)
    values, scales = per_token_cast_to_fp8(x)
    if kind == "columns":
        scales = scales.t().contiguous().t()
    elif kind == "packed":
        scales = torch.randint(-2**31, 2**31 - 1, (count, hidden // 512), dtype=torch.int32)
    elif kind == "words":
        scales = torch.randint(-2**31, 2**31 - 1, (2 * count, 3), dtype=torch.int32)[::2]
    elif kind == "row":
        scales = torch.rand(count)
    elif kind == "list":
        return [values, scales[:, :1].contiguous()]
    return values, scales


def as_tuple(x):
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def raw(x):
    """Bytes of rows, which gloo and indices of older torch take."""
    flat = x.clone(memory_format=torch.contiguous_format).flatten()  # contiguous() keeps the strides of one column
    return flat.view(torch.uint8).view(x.shape[0], x.shape[1:].numel() * x.element_size())


def check_rows(case, what, got, x):
    for a, b in zip(as_tuple(got), as_tuple(x)):
        assert a.dtype == b.dtype and a.shape[1:] == b.shape[1:]
        want = case.received(raw(b))
        assert torch.equal(raw(a)[:want.shape[0]], want), what


def wait(event, asynchronous):
    assert (event.event is not None) is asynchronous
    if asynchronous:
        event.current_stream_wait()


def sum_of_ranks(case, y, biases, comm):
    """By the contract of V1: biases, then a row of each rank in rank order, in float32, rounded once. Each node but this rank's
    adds up its own rows first."""
    every = case.of_all(y)
    total = sum((one.float() for one in biases if one is not None), torch.zeros(case.idx.shape[0], y.shape[1]))
    for node in range(comm.nodes):
        part = total if node == comm.node else torch.zeros_like(total)
        for to in range(node * case.size // comm.nodes, (node + 1) * case.size // comm.nodes):
            first = sum(int((case.all_idx[source] // case.local == to).any(1).sum()) for source in range(case.rank))
            mine = case.in_rank[:, to].nonzero().flatten()
            part[mine] += every[to][first:first + mine.numel()].float()
        if node != comm.node:
            total += part
    return total.to(torch.bfloat16)


def one_buffer_case(buffer, case, kept):
    draw, count = case.draw, case.idx.shape[0]
    flags = case.flags(buffer)
    layout = buffer.get_dispatch_layout(case.idx, case.experts, **flags)
    wait(layout[-1], flags["async_finish"])
    assert torch.equal(layout[0], case.in_rank.sum(0, dtype=torch.int32)) and torch.equal(layout[3], case.in_rank)
    assert layout[2].tolist() == [(case.idx == expert).sum().item() for expert in range(case.experts)]
    with_topk, alignment = draw.random() < 0.7, draw.choice((1, 2, 8, 100, 128))
    args = {"num_tokens_per_rank": layout[0], "is_token_in_rank": layout[3], "num_tokens_per_expert": layout[2],
            "expert_alignment": alignment, "config": draw.choice((None, deep_ep.Config(), deep_ep.Config(2, 1, 1, 1, 1),
                                                                  buffer.get_dispatch_config(draw.choice((1, 3, 8, 160)))))}
    n = sum(tokens.numel() for _, tokens in case.arrivals())
    worst = draw.choice((0, 0, sum(case.counts) + 3)) if with_topk else 0
    if with_topk:
        idx = case.idx.to(torch.int32) if draw.random() < 0.2 else case.idx
        args.update(topk_idx=odd_place(idx) if draw.random() < 0.2 else idx, topk_weights=case.weights, num_worst_tokens=worst)
    x, flags = rows_for(case, count, ("row", "list")), case.flags(buffer)
    got, local, weights, counts, handle, event = buffer.dispatch(x, **args, **flags)
    wait(event, flags["async_finish"])
    check_rows(case, "dispatch", got, x)
    local_want = case.received_choices()
    if with_topk:
        assert torch.equal(local[:n], local_want.to(local.dtype)) and (local[n:] == -1).all()
        assert torch.equal(weights[:n], case.received(case.weights).masked_fill(local_want < 0, 0)) and (weights[n:] == 0).all()
    else:
        assert local is None and weights is None
    assert as_tuple(got)[0].shape[0] == (worst or n)
    assert counts == ([] if worst else [align((local_want == expert).sum().item(), alignment) for expert in range(case.local)])
    kept.append((case, handle, worst or n))
    # Answers of dispatches of before, in any order, and the same routing again.
    case, handle, rows = draw.choice(kept)
    y = torch.randn(rows, draw.choice((8, 264, 1024))).to(torch.bfloat16)
    new = lambda: torch.randn(case.idx.shape[0], y.shape[1]).to(torch.bfloat16)  # noqa: E731
    bias = draw.choice((None, new(), (new(), new()), (new(), None), (None, new())))
    flags = case.flags(buffer)
    out, none, event = buffer.combine(y, handle, bias=bias, config=args["config"], **flags)
    wait(event, flags["async_finish"])
    assert none is None and same(out, sum_of_ranks(case, y, as_tuple(bias), buffer._comm)), "combine"
    x, flags = rows_for(case, case.idx.shape[0], ("row",)), case.flags(buffer)
    again = buffer.dispatch(x, handle=handle, **flags)
    wait(again[-1], flags["async_finish"])
    assert again[1:5] == (None, None, None, None) and as_tuple(again[0])[0].shape[0] == rows
    check_rows(case, "dispatch by handle", again[0], x)


def each_case(cases, one):
    """one(number) for each number; a failure names it."""
    for number in range(cases):
        try:
            one(number)
        except BaseException as error:
            raise AssertionError(f"case {number}") from error


def buffers(rank, size, cases):
    buffer, kept = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True), []

    def one(number):
        one_buffer_case(buffer, Case(number, rank, size), kept)
        if number % 8 == 7:
            kept.clear()

    each_case(cases, one)
    buffer.destroy()


def test_buffer():
    run(2, buffers, 400 if LONG else 24)
    run(3, buffers, 400 if LONG else 12)


def one_elastic_case(buffer, case, most):
    draw, count = case.draw, case.idx.shape[0]
    expand, sync, alignment = draw.random() < 0.5, draw.random() < 0.5, draw.choice((1, 3, 16, 128))
    x, with_weights = rows_for(case, count), draw.random() < 0.7
    stats = draw.choice((None, torch.full((case.local,), 7, dtype=torch.int32)))
    given = case.flags(buffer, "async_with_compute_stream")
    got, local, weights, handle, event = buffer.dispatch(
        x, topk_idx=case.idx, topk_weights=case.weights if with_weights else None, num_experts=case.experts,
        num_max_tokens_per_rank=most, expert_alignment=alignment, do_expand=expand, do_cpu_sync=sync,
        cumulative_local_expert_recv_stats=stats, use_tma_aligned_col_major_sf=draw.random() < 0.5,
        do_handle_copy=draw.random() < 0.5, num_sms=draw.choice((0, 4, 24)), **given)
    wait(event, given["async_with_compute_stream"])
    want_local, ends = case.received_choices(), handle.psum_num_recv_tokens_per_expert.tolist()
    exact = [(want_local == expert).sum().item() for expert in range(case.local)]
    n = handle.psum_num_recv_tokens_per_scaleup_rank[-1].item()
    assert n == want_local.shape[0] and handle.num_unaligned_recv_tokens_per_expert.tolist() == exact
    assert stats is None or (stats - 7).tolist() == exact
    assert handle.num_recv_tokens_per_expert_list == ([align(one, alignment) for one in exact] if sync else [])
    every = case.of_all(raw(as_tuple(x)[0]))
    sources = torch.cat([source * most + tokens for source, tokens in case.arrivals()])
    assert torch.equal(handle.recv_src_metadata[:n, 0].long(), sources)
    if expand:
        slots = handle.recv_src_metadata[:n, 2:].long()
        assert torch.equal(slots >= 0, want_local >= 0) and local is None
        begin = 0
        for expert, end in enumerate(ends):  # rows of an expert by (source, token)
            assert slots[want_local == expert].tolist() == list(range(begin, begin + exact[expert])) and end == begin + exact[expert]
            begin = align(end, alignment)
        rows, choices = (slots >= 0).nonzero(as_tuple=True)
        for a, b in zip(as_tuple(got), as_tuple(x)):
            assert torch.equal(raw(a)[slots[rows, choices]], case.received(raw(b))[rows])
        if with_weights:
            assert torch.equal(weights[slots[rows, choices]], case.received(case.weights)[rows, choices])
    else:
        check_rows(case, "dispatch", got, x)
        assert torch.equal(local[:n], want_local) and (local[n:] == -1).all()
        assert not with_weights or torch.equal(weights[:n], case.received(case.weights).masked_fill(want_local < 0, 0))
    assert with_weights or weights is None
    del every
    total = as_tuple(got)[0].shape[0]
    y = torch.zeros(total, draw.choice((8, 264, 1024)), dtype=torch.bfloat16)
    y[:] = torch.randint(-2, 3, (1, y.shape[1]))  # the same on all rows, so that every order of the sum gives the same
    values = case.of_all(y[:1] if total else torch.zeros(1, y.shape[1], dtype=torch.bfloat16))
    bias = draw.choice((None, torch.ones(count, y.shape[1], dtype=torch.bfloat16)))
    given = case.flags(buffer, "async_with_compute_stream")
    out, sums, event = buffer.combine(y, handle, topk_weights=weights, bias=bias, **given)
    wait(event, given["async_with_compute_stream"])
    want = torch.zeros(count, y.shape[1]) if bias is None else bias.float()
    for to in range(case.size):
        times = (case.idx // case.local == to).sum(1, keepdim=True) if expand else case.in_rank[:, to:to + 1]
        want = want + times * values[to].float()
    assert torch.equal(out.float(), want), "combine"
    assert (sums is None) is not with_weights
    assert sums is None or torch.equal(sums, case.weights.masked_fill(case.idx < 0, 0))
    again = buffer.dispatch(x, handle=handle, do_expand=expand, topk_weights=case.weights)
    if expand:
        for a, b in zip(as_tuple(again[0]), as_tuple(x)):
            assert torch.equal(raw(a)[slots[rows, choices]], case.received(raw(b))[rows])
    else:
        check_rows(case, "dispatch by handle", again[0], x)
        assert torch.equal(again[1][:n], want_local)


def elastics(rank, size, cases):
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=128, explicitly_destroy=True)
    each_case(cases, lambda number: one_elastic_case(buffer, Case(5000 + number, rank, size), 100 + number % 2 * 28))
    buffer.destroy()


def test_elastic_buffer():
    run(2, elastics, 400 if LONG else 24)
    run(3, elastics, 400 if LONG else 12)


def one_low_latency_case(buffer, case, most):
    draw, count = case.draw, case.idx.shape[0]
    fp8, ue8m0 = draw.choice(((False, False), (True, False), (True, True)))
    hidden, mode = draw.choice((512, 1024)), draw.choice(("hook", "async", "plain"))
    x = torch.randint(-2, 3, (count, hidden)).to(torch.bfloat16)
    x[:, ::128] = 2  # blocks of equal scales, so that fp8 is exact
    args = {"async_finish": mode == "async", "return_recv_hook": mode == "hook"}
    stats = torch.zeros(case.local, dtype=torch.int32)
    rows, counts, handle, event, hook = buffer.low_latency_dispatch(
        x, case.idx, most, case.experts, stats, use_fp8=fp8, round_scale=ue8m0, use_ue8m0=ue8m0, **args)
    if mode == "hook":
        hook()
        raises(ValueError, "received already", hook)
    wait(event, mode == "async")
    exact = [sum((idx == case.rank * case.local + expert).sum().item() for idx in case.all_idx) for expert in range(case.local)]
    assert counts.tolist() == exact == stats.tolist()
    if fp8:
        values, scales = rows
        if ue8m0:
            scales = (scales.clone(memory_format=torch.contiguous_format).view(torch.uint8).to(torch.int32) << 23).view(torch.float32)
        rows = (values.float().unflatten(-1, (-1, 128)) * scales.unsqueeze(-1)).flatten(-2).to(torch.bfloat16)
    every = case.of_all(x)
    y = torch.full_like(rows, float("nan"))
    for expert in range(case.local):
        for source in range(case.size):
            begin, number = (handle[1][expert, source] >> 32).item(), (handle[1][expert, source] & 0xffffffff).item()
            tokens = (case.all_idx[source] == case.rank * case.local + expert).nonzero()[:, 0]
            origin = handle[0][expert, begin:begin + number].long()
            assert torch.equal(origin.sort().values, tokens)
            assert torch.equal(rows[expert, begin:begin + number], every[source][origin])
        y[expert, :exact[expert]] = rows[expert, :exact[expert]]
    weights = torch.randint(0, 3, case.idx.shape).float()
    for zero_copy in draw.choice(((False,), (True,), (False, True), ())):
        out = torch.full_like(x, 99) if draw.random() < 0.5 else None
        if zero_copy:
            buffer.get_next_low_latency_combine_buffer(handle).copy_(y)
        result, event, hook = buffer.low_latency_combine(y, case.idx, weights, handle, zero_copy=zero_copy, out=out,
                                                         use_logfmt=draw.random() < 0.5, **args)
        if mode == "hook":
            hook()
            raises(ValueError, "received already", hook)
        wait(event, mode == "async")
        assert out is None or result is out
        assert torch.equal(result.float(), x.float() * weights.masked_fill(case.idx < 0, 0).sum(1, keepdim=True))


def low_latencies(rank, size, cases):
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, explicitly_destroy=True)

    def one(number):
        most = (33, 100)[number % 2]
        one_low_latency_case(buffer, Case(9000 + number, rank, size, most), most)

    each_case(cases, one)
    buffer.destroy()


def test_low_latency():
    run(2, low_latencies, 300 if LONG else 16)
    run(3, low_latencies, 300 if LONG else 8)

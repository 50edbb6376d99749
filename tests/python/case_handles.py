# SPDX-License-Identifier: Apache-2.0
"""Handles and buffers as programs pass them around: as tuples, in modules that are copied, through torch.compile."""
import copy
import gc
import pickle
import warnings

import deep_ep
import epkit
import torch
import torch.distributed as dist
from deep_ep._order import Order
from ranks import CUDA, on_ranks, raises, run


def setting(rank, size):
    torch.manual_seed(rank)
    return (torch.randint(-8, 8, (6, 128)).to(torch.bfloat16), torch.rand(6, 2 * size).topk(2).indices, torch.rand(6, 2),
            2 * size)


def dispatch(buffer, x, topk_idx, weights, experts):
    layout = buffer.get_dispatch_layout(topk_idx, experts)
    return buffer.dispatch(x, None, *layout[:2], layout[3], layout[2], topk_idx, weights)


def same(some, other):
    return type(some) is type(other) and len(some) == len(other) and all(a is b for a, b in zip(some, other))


@on_ranks(2)
def test_handles_outlive_their_buffer(rank, size):
    """Programs replace their buffer by a larger one, and use handles of the old one with it, in a backward pass."""
    x, topk_idx, weights, experts = setting(rank, size)
    ranks = torch.zeros(x.shape[0], size).scatter_(1, topk_idx * size // experts, 1).sum(1, keepdim=True)
    buffer, kept = None, []
    for step in range(1, 4):
        buffer = deep_ep.Buffer(dist.group.WORLD, step << 20)  # the old one has no other reference
        gc.collect()
        rows, _, received, _, handle, _ = dispatch(buffer, x * step, topk_idx, weights, experts)
        kept.append((rows, received, handle, tuple(handle)))
    for step, (rows, received, handle, parts) in reversed(list(enumerate(kept, 1))):
        for one in (handle, parts):
            assert torch.equal(buffer.dispatch(x * step, one)[0], rows)
            out, back, _ = buffer.combine(rows, one, received)
            assert torch.equal(out.float(), x.float() * step * ranks) and torch.equal(back, weights)
    for kind in (deep_ep.ElasticBuffer, deep_ep.EPBuffer):
        buffer = kind(dist.group.WORLD, num_max_tokens_per_rank=16)
        rows, _, _, handle, _ = buffer.dispatch(x, topk_idx, weights, num_experts=experts)
        buffer = kind(dist.group.WORLD, num_max_tokens_per_rank=32)
        gc.collect()
        assert torch.equal(buffer.dispatch(x, handle=handle)[0], rows)
        assert torch.equal(buffer.combine(rows, handle)[0].float(), x.float() * ranks)
        other = kind(dist.new_group(list(range(size))))
        raises(ValueError, "combine handle another group", other.combine, rows, handle)


@on_ranks(2)
def test_a_handle_is_a_tuple(rank, size):
    """What a tuple can do gives the six tensors with their contents, whichever way they are asked for first."""
    buffer = deep_ep.Buffer(dist.group.WORLD)
    x, topk_idx, weights, experts = setting(rank, size)
    every = tuple(dispatch(buffer, x, topk_idx, weights, experts)[4])
    in_rank = buffer.get_dispatch_layout(topk_idx, experts)[3]
    assert torch.equal(every[1].view(-1), in_rank.sum(0)) and torch.equal(every[2].cumsum(0).view(-1), every[0][:, rank])
    assert torch.equal(every[5] >= 0, in_rank) and bool((every[3] < 6).all())
    ways = (lambda handle: handle + (), lambda handle: () + handle, lambda handle: (*handle,), lambda handle: handle[:],
            lambda handle: tuple(reversed(handle))[::-1], lambda handle: tuple(one for one in handle))
    for way in ways:
        handle = dispatch(buffer, x, topk_idx, weights, experts)[4]
        got = way(handle)
        assert all(torch.equal(a, b) for a, b in zip(got, every)) and same(got, tuple(handle)), way
    handle = dispatch(buffer, x, topk_idx, weights, experts)[4]
    assert handle + (1, 2) == (*handle, 1, 2) and repr(handle) == repr(tuple(handle)) == repr(every)
    with torch.inference_mode():  # what is made there may be read elsewhere
        handle = dispatch(buffer, x, topk_idx, weights, experts)[4]
    assert all(torch.equal(a, b) for a, b in zip(handle, every))
    rows, _, _, counts, handle, _ = dispatch(buffer, x[:0], topk_idx[:0], weights[:0], experts)
    assert [list(one.shape) for one in handle] == [[size, size], [size, 1], [size, 1], [0], [0, size], [0, size]]


def detached(handle):
    return tuple(one.detach() if isinstance(one, torch.Tensor) else one for one in handle)


def viewed(handle):
    return [one.view_as(one) if isinstance(one, torch.Tensor) else one for one in handle]


def copied(handle):
    return tuple(one.clone() if isinstance(one, torch.Tensor) else one for one in handle)


@on_ranks(2)
def test_aliases_of_a_handle(rank, size):
    """Other tensors of a handle's memory are the handle, as long as any of them is there; copies, and what comes to lie where a
    handle was, are not."""
    buffer, low = deep_ep.Buffer(dist.group.WORLD), deep_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True)
    x, topk_idx, weights, experts = setting(rank, size)
    rows, _, _, _, handle, _ = dispatch(buffer, x, topk_idx, weights, experts)
    want, again = buffer.combine(rows, handle)[0], buffer.dispatch(x + 1, handle=handle)[0]
    received, _, low_handle, _, _ = low.low_latency_dispatch(x, topk_idx, 8, experts, use_fp8=False)
    want_low = low.low_latency_combine(received, topk_idx, weights, low_handle)[0]
    raises(TypeError, "combine handle tuple copies", buffer.combine, rows, copied(handle))
    raises(TypeError, "dispatch handle tuple copies", lambda: buffer.dispatch(x, handle=copied(handle)))
    raises(TypeError, "low_latency_combine handle tuple", low.low_latency_combine, received, topk_idx, weights, copied(low_handle))
    handle, low_handle = detached(handle), detached(low_handle)  # and nobody has the tensors that the calls returned
    for alias in (detached, viewed):
        assert torch.equal(buffer.combine(rows, alias(handle))[0], want)
        assert torch.equal(buffer.dispatch(x + 1, handle=alias(handle))[0], again)
        assert torch.equal(low.low_latency_combine(received, topk_idx, weights, alias(low_handle))[0], want_low)
    raises(TypeError, "combine handle tuple", buffer.combine, rows, (torch.eye(size).to_sparse(), *handle[1:]))
    others = handle[1:]
    del handle
    for _ in range(100):
        raises(TypeError, "combine handle tuple", buffer.combine, rows, (torch.empty(size, size, dtype=torch.int32), *others))


@on_ranks(2)
def test_a_handle_in_a_checkpoint(rank, size):
    """A layer that saves its handle for the backward pass, where hooks return other tensors of the same memory: the checkpoint of
    torch before 2.5 detaches all that it computes again."""
    from torch.utils.checkpoint import checkpoint

    buffer = deep_ep.Buffer(dist.group.WORLD)
    x, topk_idx, weights, experts = setting(rank, size)

    class Dispatch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            rows, _, _, _, handle, _ = dispatch(buffer, x, topk_idx, weights, experts)
            ctx.save_for_backward(*handle)
            return (rows, *handle)

        @staticmethod
        def backward(ctx, grad, *_):
            return buffer.combine(grad.contiguous(), ctx.saved_tensors)[0]

    class Combine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, *handle):
            ctx.save_for_backward(*handle)
            return buffer.combine(rows, handle)[0]

        @staticmethod
        def backward(ctx, grad):
            return (buffer.dispatch(grad.contiguous(), handle=ctx.saved_tensors)[0], *[None] * 6)

    def layer(x):
        rows, *handle = Dispatch.apply(x)
        return Combine.apply(rows * 2, *handle)

    times = buffer.get_dispatch_layout(topk_idx, experts)[3].sum(1, keepdim=True)
    for run_layer in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        for detach in (False, True):
            given = x.clone().requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(*[torch.Tensor.detach if detach else lambda one: one] * 2):
                out = run_layer(given)
                out.backward(torch.ones_like(out))
            assert torch.equal(out, x * 2 * times) and torch.equal(given.grad, torch.ones_like(x) * 2 * times)


class Layer(torch.nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.buffer, self.linear = buffer, torch.nn.Linear(2, 2)


@on_ranks(2)
def test_copies_of_buffers(rank, size):
    """Buffers and handles are of this process: a copy is the thing itself, and modules that have one can be copied."""
    buffer, elastic = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=8)
    x, topk_idx, weights, experts = setting(rank, size)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 8, experts, use_fp8=False)
    for thing in (buffer, elastic, handle):
        assert copy.copy(thing) is thing is copy.deepcopy(thing)
        raises(TypeError, f"{type(thing).__name__} pickled communicator", pickle.dumps, thing)
    layer = copy.deepcopy(Layer(buffer))
    assert layer.buffer is buffer
    out, _, _ = layer.buffer.low_latency_combine(rows, topk_idx, torch.ones_like(weights), copy.deepcopy(handle))
    assert torch.equal(out, x * 2)


def compiled(rank, size):
    """torch.compile breaks its graph at each call, and hands handles from one part to the next."""
    buffer, elastic = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=8)
    x, topk_idx, weights, experts = setting(rank, size)

    def normal(x):
        rows, _, _, _, handle, _ = dispatch(buffer, x * 1, topk_idx, weights, experts)
        return buffer.combine(rows * 2, handle)[0] + handle[5].sum()

    def decode(x):
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x * 1, topk_idx, 8, experts, use_fp8=False)
        return buffer.low_latency_combine(rows * 2, topk_idx, weights, handle)[0] + handle[1].sum()

    def second(x):
        rows, _, _, handle, _ = elastic.dispatch(x * 1, topk_idx, weights, num_experts=experts)
        return elastic.combine(rows * 2, handle)[0] + handle.psum_num_recv_tokens_per_expert.sum()

    plan, calls = buffer._comm.plan(topk_idx, experts), buffer._comm.low_latency(8, x.shape[1], experts, topk_idx.shape[1])

    def own(x):
        return plan.combine(plan.dispatch(x * 1).x * 2)[0] + calls.dispatch(x, topk_idx).count.sum()

    for function in (normal, decode, second, own):
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*epkit")  # each once for the process: of functions that are not of Python
            assert torch.equal(torch.compile(function, backend="eager")(x), function(x)), function.__name__


def test_handles_promise_no_weak_references():
    """A tuple has room for none, and torch._dynamo before 2.5 makes one of all that have the attribute."""
    for kind in (deep_ep.buffer.Handle, deep_ep._low_latency.LowLatencyHandle):
        assert not hasattr(kind, "__weakref__"), kind


def test_torch_compile_around_calls():
    if CUDA:
        import torch._dynamo  # noqa: F401 - each child for itself: before the fork it would touch CUDA
    run(2, compiled)


class Counting:
    """A plan of the extension module that keeps what it is asked for."""

    def __init__(self, native):
        self.native, self.asked = native, []

    def __getattr__(self, name):
        return getattr(self.native, name)

    def metadata(self, *args):
        self.asked.append([name for name, offset in zip(epkit.Metadata._fields, args[3:]) if offset >= 0])
        return self.native.metadata(*args)


def asked_by(call):
    """What a call asks of the library about the plan that it makes."""
    plans, make = [], epkit.Plan.__init__

    def counted(plan, *args):
        make(plan, *args)
        plan._native = Counting(plan._native)
        plans.append(plan._native)

    epkit.Plan.__init__ = counted
    try:
        call()
    finally:
        epkit.Plan.__init__ = make
    return [names for plan in plans for names in plan.asked]


@on_ranks(2)
def test_what_a_dispatch_asks_for(rank, size):
    """The sources of rows come with the rows. Counts are asked for when a program reads them, once."""
    v1, v2 = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=8)
    x, idx = torch.ones(8, 128, dtype=torch.bfloat16), torch.arange(16).view(8, 2) % (2 * size)
    layout = v1.get_dispatch_layout(idx, 2 * size)
    kept = []

    def first():
        kept.append(v1.dispatch(x, topk_idx=idx, topk_weights=torch.ones(8, 2), num_tokens_per_rank=layout[0],
                                is_token_in_rank=layout[3], num_tokens_per_expert=layout[2])[4])

    assert asked_by(first) == [] and asked_by(lambda: v1.dispatch(x, handle=kept[0])) == []
    kept[0].plan._native = asked = Counting(kept[0].plan._native)
    assert len(kept[0]) == 6 and kept[0][0].shape == (size, size) and asked.asked == [["rank_prefix"]]
    prefix, sent, received, source, in_rank, head = kept[0]
    facts = kept[0].plan.metadata(8)
    assert torch.equal(prefix, facts.rank_prefix) and torch.equal(received.view(-1).cumsum(0), facts.psum_rank)
    assert torch.equal(source, facts.recv_source % 8) and torch.equal(in_rank, layout[3])
    assert torch.equal(sent.view(-1), layout[0]) and torch.equal(head >= 0, layout[3])
    counts = {"psum_rank", "psum_expert", "count_exact", "n_recv_tokens"}
    for more in ({}, {"do_expand": True}, {"do_cpu_sync": False}, {"do_expand": True, "do_cpu_sync": False}):
        asked = asked_by(lambda: kept.append(v2.dispatch(x, idx, num_experts=2 * size, **more)[3]))
        handle, native = kept[-1], Counting(kept[-1].plan._native)
        handle.plan._native = native
        if v2.num_scaleup_ranks == size:
            assert [set(names) for names in asked] == ([counts | {"recv_source", "recv_slot"}] if "do_expand" in more else [])
            assert handle.psum_num_recv_tokens_per_expert is handle.psum_num_recv_tokens_per_expert
            assert [set(names) for names in native.asked] == ([] if "do_expand" in more else [counts])
        handle, facts = kept[-1], kept[-1].plan.metadata(8)
        assert v2.num_scaleup_ranks < size or torch.equal(handle.psum_num_recv_tokens_per_scaleup_rank, facts.psum_rank)
        assert torch.equal(handle.psum_num_recv_tokens_per_expert, facts.psum_expert)
        assert torch.equal(handle.num_unaligned_recv_tokens_per_expert, facts.count_exact)
        n = int(facts.n_recv_tokens)
        assert torch.equal(handle.recv_src_metadata[:n, 0], facts.recv_source[:n])
        if "do_expand" in more:
            assert torch.equal(handle.recv_src_metadata[:n, 2:], facts.recv_slot[:n])


def contexts_of(call):
    """How often a call makes the communication stream torch's current one: (for work of torch, for allocations)."""
    count, names = {}, ("on_stream", "allocating")
    methods = {name: getattr(Order, name) for name in names}

    def counted(name):
        def method(self):
            count[name] = count.get(name, 0) + 1
            return methods[name](self)
        return method

    for name in names:
        setattr(Order, name, counted(name))
    try:
        call()
    finally:
        for name in names:
            setattr(Order, name, methods[name])
    return tuple(count.get(name, 0) for name in names)


@on_ranks(2)
def test_streams_of_new_routing(rank, size):
    """A change of torch's stream costs more than the library's part of a call: none for new routing of exact counts, whose
    outputs need no work of torch, and one where there is some."""
    buffer = deep_ep.Buffer(dist.group.WORLD)
    x, topk_idx, weights, experts = setting(rank, size)
    counts = int(buffer._comm.nodes > 1)  # of tokens for each host, which torch adds up
    assert contexts_of(lambda: buffer.get_dispatch_layout(topk_idx, experts)) == (counts, 1)
    layout = buffer.get_dispatch_layout(topk_idx, experts)
    routing = {"num_tokens_per_rank": layout[0], "num_tokens_per_expert": layout[2], "topk_idx": topk_idx, "topk_weights": weights}
    for mask in (layout[3], None):
        assert contexts_of(lambda: buffer.dispatch(x, is_token_in_rank=mask, **routing)) == (0, 1)
    elastic = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=8)
    for more in ({}, {"do_expand": True}, {"do_cpu_sync": False}):  # which copy topk_idx
        assert contexts_of(lambda: elastic.dispatch(x, topk_idx, weights, num_experts=experts, **more)) == (1, 1)
    strided = torch.stack((topk_idx, topk_idx), 2)[:, :, 0]
    assert not strided.is_contiguous()
    assert contexts_of(lambda: buffer.get_dispatch_layout(strided, experts)) == (1 + counts, 1)
    assert all(torch.equal(a, b) for a, b in zip(buffer.get_dispatch_layout(strided, experts)[2:4], layout[2:4]))

# SPDX-License-Identifier: Apache-2.0
"""Handles and buffers as programs pass them around: as tuples, in modules that are copied, through torch.compile."""
import copy
import pickle

import deep_ep
import torch
import torch.distributed as dist
from ranks import CUDA, raises, run


def setting(rank, size):
    torch.manual_seed(rank)
    return (torch.randint(-8, 8, (6, 128)).to(torch.bfloat16), torch.rand(6, 2 * size).topk(2).indices, torch.rand(6, 2),
            2 * size)


def dispatch(buffer, x, topk_idx, weights, experts):
    layout = buffer.get_dispatch_layout(topk_idx, experts)
    return buffer.dispatch(x, None, *layout[:2], layout[3], layout[2], topk_idx, weights)


def same(some, other):
    return type(some) is type(other) and len(some) == len(other) and all(a is b for a, b in zip(some, other))


def tuples(rank, size):
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


def test_a_handle_is_a_tuple():
    run(2, tuples)


class Layer(torch.nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.buffer, self.linear = buffer, torch.nn.Linear(2, 2)


def copies(rank, size):
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


def test_copies_of_buffers():
    run(2, copies)


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

    for function in (normal, decode, second):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(function, backend="eager")(x), function(x)), function.__name__


def test_torch_compile_around_calls():
    if CUDA:
        import torch._dynamo  # noqa: F401 - each child for itself: before the fork it would touch CUDA
    run(2, compiled)

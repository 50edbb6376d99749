# SPDX-License-Identifier: Apache-2.0
"""The package epkit: random shapes against a reference, symmetric memory, fixed capacity, shrinking, torch.compile."""
import os
import random

import epkit
import torch
import torch.distributed as dist
from ranks import raises, run


NOT_ON_CUDA = {"test_facts": "the CUDA backend does not look for NaN"}


def expect(x_all, idx_all, rank, size, experts):
    """Rows by (source, token) that come to `rank`, and their local expert numbers."""
    local = experts // size
    rows, idx = [], []
    for x, choice in zip(x_all, idx_all):
        own = (choice >= rank * local) & (choice < (rank + 1) * local)
        some = own.any(1)
        rows.append(x[some])
        idx.append(torch.where(own, choice - rank * local, -1)[some])
    return torch.cat(rows), torch.cat(idx)


def gather(tensor, size):
    every = [None] * size
    dist.all_gather_object(every, tensor)
    return every


def shapes(rank, size, count):
    comm = epkit.Communicator()
    draw = random.Random(5)  # the same on all ranks
    for number in range(count):
        experts, topk = size * draw.randint(1, 6), draw.randint(1, 9)
        topk = min(topk, experts)
        hidden, idx_type = 8 * draw.randint(1, 60), draw.choice((torch.int32, torch.int64))
        torch.manual_seed(number * size + rank)
        tokens = int(torch.randint(0, 30, ()))
        topk_idx = torch.rand(tokens, experts).topk(topk).indices.to(idx_type)
        topk_idx[torch.rand(topk_idx.shape) < 0.2] = -1
        x = torch.randn(tokens, hidden).to(torch.bfloat16)
        weights = torch.rand(tokens, topk)
        want, want_idx = expect(gather(x, size), gather(topk_idx, size), rank, size, experts)
        plan = comm.plan(topk_idx, experts)
        rows = plan.dispatch(x, weights, want_topk_idx=True)
        assert torch.equal(rows.x, want) and torch.equal(rows.topk_idx, want_idx)
        out, back = plan.combine(rows.x, rows.topk_weights)
        ranks = comm.layout(topk_idx, experts)[2].sum(1, keepdim=True)
        total = torch.zeros(tokens, hidden)
        for _ in range(size):  # equal terms: their order does not matter
            total = torch.where(ranks > 0, total + x.float(), total)
            ranks = ranks - 1
        assert torch.equal(out, total.to(torch.bfloat16))
        assert torch.equal(back, weights.masked_fill(topk_idx < 0, 0))
    comm.free()


def test_random_shapes_2_ranks():
    run(2, shapes, 1000 if os.environ.get("EPKIT_TEST_LONG") else 60)


def test_random_shapes_3_ranks():
    run(3, shapes, 1000 if os.environ.get("EPKIT_TEST_LONG") else 30)


def symmetric(rank, size):
    """Outputs and inputs in memory of the library; tensors of it outlive the communicator."""
    comm = epkit.Communicator()
    experts = 2 * size
    topk_idx = torch.arange(6).view(6, 1) % experts
    x = torch.arange(6 * 64).view(6, 64).to(torch.bfloat16)
    plan = comm.plan(topk_idx, experts)
    out = comm.empty(plan.out_rows, 64)
    rows = plan.dispatch(x, out=out)
    assert rows.x is out
    assert torch.equal(plan.combine(out)[0], x)
    kept, want = out.view(-1)[:64], out.view(-1)[:64].clone()
    calls = comm.low_latency(8, 128, experts, 1)
    buffer = calls.combine_buffer()
    buffer.fill_(3)
    del out, rows
    comm.free()
    assert comm.closed and plan.closed and calls.closed
    assert torch.equal(kept, want) and (buffer == 3).all()


def test_memory_of_the_library_outlives_the_communicator():
    run(2, symmetric)


def capacity(rank, size):
    """A plan of fixed capacity: updates, marks behind the last row, and a capacity that is too small."""
    comm = epkit.Communicator()
    experts, hidden, most = 4 * size, 64, 10
    plan = comm.plan(torch.zeros(0, 2, dtype=torch.int64), experts, max_recv_tokens=size * most, max_tokens=most)
    assert plan.out_rows == size * most and plan.n_recv is None and plan.recv_per_expert == []
    for step in range(4):
        torch.manual_seed(step * size + rank)
        tokens = step * 3 + rank
        topk_idx = torch.rand(tokens, experts).topk(2).indices
        x = torch.randn(tokens, hidden).to(torch.bfloat16)
        want, want_idx = expect(gather(x, size), gather(topk_idx, size), rank, size, experts)
        plan.update(topk_idx)
        rows = plan.dispatch(x, torch.rand(tokens, 2), want_topk_idx=True)
        n = want.shape[0]
        data = plan.metadata(100)
        assert data.n_recv_tokens.item() == n and data.psum_rank[-1] == n
        assert torch.equal(rows.x[:n], want) and torch.equal(rows.topk_idx[:n], want_idx)
        assert (rows.topk_idx[n:] == -1).all() and (rows.topk_weights[n:] == 0).all()
        plan.combine(rows.x)
    raises(epkit.ArgumentError, "topk_idx int32 int64", plan.update, topk_idx.to(torch.int32))
    small = comm.plan(topk_idx, experts, max_recv_tokens=1)

    def too_many():
        small.dispatch(x)
        comm.synchronize()  # on a GPU it is found there

    raises(epkit.ArgumentError, "EP_E_CAPACITY", too_many)
    comm.barrier()


def test_fixed_capacity():
    run(2, capacity)


def shrink(rank, size):
    comm = epkit.Communicator(timeout=60)
    if rank == 1:
        os._exit(7)
    raises(epkit.PeerError, "rank 1", comm.barrier)
    raises(epkit.PeerError, "rank 1", comm.check)
    new = comm.shrink()
    comm.free()
    assert (new.rank, new.size) == ((0, 1, 1)[rank], 2)
    x = torch.full((3, 64), rank + 1, dtype=torch.bfloat16)
    plan = new.plan(torch.tensor([[0], [1], [0]]), 2)
    assert torch.equal(plan.combine(plan.dispatch(x).x)[0], x)
    new.barrier()


def test_shrink_after_a_rank_has_died():
    run(3, shrink, expect=(0, 7, 0))


def info(rank, size):
    comm = epkit.Communicator(check_values=True)
    facts = comm.info()
    assert (facts["rank"], facts["nranks"], facts["backend"]) == (rank, size, "host")
    assert comm.allgather_bytes(bytes([rank, 9])) == b"".join(bytes([r, 9]) for r in range(size))
    plan = comm.plan(torch.zeros(1, 1, dtype=torch.int64), size)
    plan.dispatch(torch.ones(1, 64, dtype=torch.bfloat16))
    assert comm.stats()["rows_self"] + comm.stats()["rows_node"] == 1
    comm.synchronize()


def test_facts():
    run(2, info)


def compiled(rank, size):
    """A layer through torch.compile, forward and backward, against the same in eager mode."""
    import epkit.ops

    comm = epkit.Communicator()
    experts, hidden, tokens, topk = 4 * size, 64, 12, 2
    slot = epkit.ops.register(comm, experts, plans=8)
    torch.manual_seed(rank)
    topk_idx = torch.rand(tokens, experts).topk(topk).indices

    def layer(x, weights, scale):
        rows, idx, w, plan = torch.ops.epkit.moe_dispatch(x, topk_idx, weights, slot, size * tokens)
        w = torch.where(idx >= 0, w, 0).sum(1, keepdim=True)
        y = (rows.float() * scale * w).to(torch.bfloat16)
        return torch.ops.epkit.moe_combine(y, plan, slot, tokens)

    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(rank + 10)
        x = torch.randn(tokens, hidden).to(torch.bfloat16).requires_grad_()
        weights = torch.rand(tokens, topk, requires_grad=True)
        scale = torch.rand(hidden, requires_grad=True)
        out = function(x, weights, scale)
        out.float().square().sum().backward()
        results.append((out.detach(), x.grad, weights.grad, scale.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert results[0][2].abs().sum() > 0
    # A plan that is gone says so.
    plan = torch.ops.epkit.moe_dispatch(x.detach(), topk_idx, weights.detach(), slot, size * tokens)[3]
    for _ in range(8):
        torch.ops.epkit.moe_dispatch(x.detach(), topk_idx, weights.detach(), slot, size * tokens)
    raises(epkit.ArgumentError, "plan gone register", torch.ops.epkit.moe_combine, x.detach(), plan, slot, tokens)


def test_torch_compile():
    run(2, compiled)


class Duck:
    """A tensor of somebody else's: no table of DLPack's, but the attributes of one."""

    def __init__(self, tensor):
        self._tensor = tensor
        self.dtype, self.shape, self.device = tensor.dtype, tuple(tensor.shape), tensor.device

    def data_ptr(self):
        return self._tensor.data_ptr()

    def stride(self):
        return self._tensor.stride()


def ducks(rank, size):
    comm = epkit.Communicator()
    topk_idx, x, weights = torch.zeros(3, 1, dtype=torch.int64), torch.randn(3, 64).to(torch.bfloat16), torch.rand(3, 1)
    plan = comm.plan(Duck(topk_idx), size)
    assert plan.n_tokens == 3 and plan.topk == 1
    out, more = torch.empty(plan.out_rows, 64, dtype=torch.bfloat16), torch.empty(plan.out_rows, 1)
    plan._native.dispatch(Duck(x), None, Duck(weights), Duck(out), None, None, Duck(more), None)
    want = plan.dispatch(x, weights)
    assert torch.equal(out, want.x) and torch.equal(more, want.topk_weights)
    raises(epkit.ArgumentError, "x float32", plan._native.dispatch, Duck(x.float()), None, None, out, None, None, None, None)
    raises(epkit.ArgumentError, "x contiguous", plan._native.dispatch, Duck(x.t().contiguous().t()), None, None, out, None,
           None, None, None)
    raises(TypeError, "x", plan._native.dispatch, "x", None, None, out, None, None, None, None)


def test_tensors_without_dlpack():
    run(2, ducks)


def views(rank, size):
    """Slices that begin anywhere, and tensors that want gradients."""
    comm = epkit.Communicator()
    weights = torch.rand(5, 3)[1:]  # begins at 12 bytes
    x = torch.randn(4, 40).to(torch.bfloat16).requires_grad_()
    topk_idx = torch.stack([torch.randperm(4 * size)[:3] for _ in range(5)])[1:]
    plan = comm.plan(topk_idx, 4 * size)
    rows = plan.dispatch(x, weights)
    assert torch.equal(plan.combine(rows.x, rows.topk_weights)[1], weights)
    with torch.inference_mode():
        assert torch.equal(plan.dispatch(x.detach().clone()).x, rows.x)


def test_views_and_modes():
    run(2, views)


def opaque(rank, size):
    """Scales of any width travel as words; strides of both sides are free."""
    comm = epkit.Communicator()
    torch.manual_seed(rank)
    topk_idx = torch.rand(6, 2 * size).topk(2).indices
    words = torch.randint(-2**31, 2**31 - 1, (6, 5), dtype=torch.int32)
    x = torch.randn(6, 160).to(torch.bfloat16)
    for expanded in (False, True):
        plan = comm.plan(topk_idx, 2 * size, expanded=expanded)
        a = plan.dispatch((x, words))
        b = plan.dispatch((x, words.t().contiguous().t()), column_major_scales=True)
        c = plan.dispatch((x, words[:1].expand(6, 5)))
        assert torch.equal(a.scales, b.scales) and b.scales.stride(0) == 1
        assert c.scales.shape == a.scales.shape
        if not expanded:
            assert torch.equal(a.scales, torch.cat([w[((t >= 2 * rank) & (t < 2 * rank + 2)).any(1)]
                                                    for w, t in zip(gather(words, size), gather(topk_idx, size))]))


def test_opaque_scales():
    run(2, opaque)


def composed(rank, size):
    """What is composed where a backend lacks it is what a backend that has it gives."""
    from epkit import _compose

    comm = epkit.Communicator()
    for number in range(16):
        expanded, fixed, alignment = bool(number & 1), bool(number & 2), (1, 8)[number >> 2 & 1]
        torch.manual_seed(number * size + rank)
        topk_idx = torch.rand((number * 5 + rank) % 23, 4 * size).topk(3).indices
        topk_idx[torch.rand(topk_idx.shape) < 0.3] = -1
        plan = comm.plan(topk_idx, 4 * size, expanded=expanded, alignment=alignment, zero_padding=expanded,
                         max_recv_tokens=400 if fixed else 0, max_tokens=30)
        plan._routing = topk_idx
        want, got = plan.metadata(50), epkit.Metadata(*_compose.metadata(plan, 50, None))
        n = want.n_recv_tokens.item()
        for name, a, b in zip(want._fields, want, got):
            cut = slice(n) if name in ("recv_source", "recv_slot") else slice(None)
            assert (a is b is None) or torch.equal(a[cut], b[cut]), (number, name)
    in_rank, per_expert = comm.layout(topk_idx, 4 * size)[2], comm.layout(topk_idx, 4 * size)[1]
    want = comm.plan(None, 4 * size, token_in_rank=in_rank, tokens_per_expert=per_expert)
    got = comm.plan(want._choices(in_rank, per_expert, None), 4 * size)
    got._exact, got._routing = want._exact, want._routing
    assert want._exact.tolist() == want.recv_per_expert and got.recv_from_rank == want.recv_from_rank
    want._exact = None
    for name, a, b in zip(epkit.Metadata._fields, want.metadata(50), _compose.metadata(got, 50, None)):
        assert (a is b is None) or torch.equal(a, b), name
    comm.barrier()


def test_composed_facts():
    run(2, composed)


def test_composed_facts_3_ranks():
    run(3, composed)

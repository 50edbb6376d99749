# SPDX-License-Identifier: Apache-2.0
"""The package epkit: random shapes against a reference, symmetric memory, fixed capacity, a group without a rank that died, torch.compile."""
import ctypes
import gc
import mmap
import os
import random
import threading
import time

import epkit
import torch
import torch.distributed as dist
from case_misuse import memory_of
from ranks import need_operators, on_ranks, raises, run


NOT_ON_CUDA = {"test_facts": "the CUDA backend does not look for NaN",
               "test_words_are_not_interpreted": "the CUDA backend does not look for NaN",
               "test_worst_cases_take_little_memory": "outputs on GPUs are not cleared"}


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


def naive_rows(idx_all, rank, size, experts, alignment):
    """Where each row of `rank` comes from: [n, 3] source, token, choice (-1: any); -1 in all for padding.

    alignment 0: rows by (source, token); otherwise by (local expert, source, token), experts at multiples of it.
    """
    local, rows = experts // size, []
    if not alignment:
        for source, idx in enumerate(idx_all):
            tokens = (idx.div(local, rounding_mode="floor") == rank).any(1).nonzero()
            rows.append(torch.cat((torch.full_like(tokens, source), tokens, torch.full_like(tokens, -1)), 1))
        return torch.cat(rows)
    for expert in range(rank * local, (rank + 1) * local):
        begin = len(rows)
        for source, idx in enumerate(idx_all):
            rows.extend([source, *place] for place in (idx == expert).nonzero().tolist())
        rows.extend([[-1] * 3] * (-(len(rows) - begin) % alignment))
    return torch.tensor(rows, dtype=torch.int64).view(-1, 3)


def naive_values(rows, tensors):
    """Row (source, token) of the sources' tensors for each row; 0 for padding."""
    out = torch.zeros((rows.shape[0], *tensors[0].shape[1:]), dtype=tensors[0].dtype)
    for source, tensor in enumerate(tensors):
        own = rows[:, 0] == source
        out[own] = tensor[rows[own, 1]]
    return out


def gather(tensor, size):
    """The tensors of all ranks, on this rank's device: an unpickled tensor is on its sender's."""
    every = [None] * size
    dist.all_gather_object(every, tensor)
    return [other.to(tensor.device) for other in every]


def bits(tensor):
    return tensor.view(torch.uint8)


def sent_as(kind, by_torch, tokens, hidden):
    """(rows, scales or None) of a format; some of its types torch has since 2.8, otherwise they are bytes."""
    if kind == "bf16":
        return torch.randn(tokens, hidden).to(torch.bfloat16), None
    any_bits = lambda columns: torch.randint(0, 256, (tokens, columns), dtype=torch.uint8)  # noqa: E731
    e8m0, fp4 = (getattr(torch, name, torch.uint8) if by_torch else torch.uint8 for name in ("float8_e8m0fnu", "float4_e2m1fn_x2"))
    if kind == "nvfp4":
        return any_bits(hidden // 2).view(fp4), any_bits(hidden // 16).view(torch.float8_e4m3fn)
    x = any_bits(hidden).view(torch.float8_e4m3fn)
    return (x, torch.rand(tokens, hidden // 128)) if kind == "fp8" else (x, any_bits(hidden // 32).view(e8m0))


def one_shape(comm, draw, number):
    """A plan of a random shape and kind: rows, scales, weights, and the sum of other rows, against the naive reference.

    Rows of a combine are small integers, so that a sum is exact in any order.
    """
    rank, size = comm.rank, comm.size
    experts, alignment = size * draw.randint(1, 6), draw.choice((0, 0, 1, 4, 16))
    topk, blocks = min(draw.randint(1, 9), experts), draw.randint(1, 4)
    kind, biases, fixed = draw.choice(("bf16", "bf16", "fp8", "mxfp8", "nvfp4")), draw.randint(0, 2), draw.random() < 0.3
    hidden, idx_type = (128 if kind != "bf16" else 8 * draw.randint(1, 15)) * blocks, draw.choice((torch.int32, torch.int64))
    torch.manual_seed(number * size + rank)
    tokens = int(torch.randint(0, 30, ()))
    topk_idx = torch.rand(tokens, experts).topk(topk).indices.to(idx_type)
    topk_idx[torch.rand(topk_idx.shape) < 0.2] = -1
    weights = torch.rand(tokens, topk)
    x, scales = sent_as(kind, draw.random() < 0.5, tokens, hidden)
    idx_all = gather(topk_idx, size)
    plan = comm.plan(topk_idx, experts, expanded=bool(alignment), alignment=alignment or 1, zero_padding=True,
                     max_recv_tokens=size * 30 * topk + experts * 16 if fixed else 0)
    given = x if scales is None else (x, scales)
    rows = plan.dispatch(given, weights, want_topk_idx=True)
    again = plan.dispatch(given, weights, out=epkit.Rows(*(one.clone() if one is not None else one for one in rows)))
    assert all(a is b is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(rows, again))
    where = [naive_rows(idx_all, to, size, experts, alignment) for to in range(size)]
    own = where[rank]
    n = own.shape[0]
    assert rows.x.shape[0] >= n if fixed else rows.x.shape[0] == n
    assert rows.x.dtype == x.dtype and torch.equal(bits(rows.x)[:n], naive_values(own, gather(bits(x), size)))
    if scales is not None:
        real = own[:, 0] >= 0
        assert rows.scales.dtype == scales.dtype
        assert torch.equal(bits(rows.scales)[:n][real], naive_values(own, gather(bits(scales), size))[real])
    got_weights = naive_values(own, gather(weights, size))
    if alignment:
        got_weights = torch.where(own[:, 2] < 0, 0, got_weights.gather(1, own[:, 2:].clamp(min=0))[:, 0])
        assert torch.equal(rows.topk_weights[:n], got_weights)
    else:
        want_idx = expect(gather(bits(x), size), idx_all, rank, size, experts)[1]
        assert torch.equal(rows.topk_idx[:n], want_idx)
        assert torch.equal(rows.topk_weights[:n], got_weights.masked_fill(want_idx < 0, 0))
    y = torch.randint(-4, 5, (rows.x.shape[0], hidden)).to(torch.bfloat16)
    bias = tuple(torch.randint(-4, 5, (tokens, hidden)).to(torch.bfloat16) for _ in range(biases))
    total = sum((one.float() for one in bias), torch.zeros(tokens, hidden))
    for rows_there, values in zip(where, gather(y.float(), size)):
        here = rows_there[:, 0] == rank
        total.index_add_(0, rows_there[here, 1], values[:rows_there.shape[0]][here])
    for by_choice, partial, received in ((False, False, rows.topk_weights), (True, False, rows.topk_weights),
                                         (True, True, rows.topk_weights), (True, True, None)):
        if by_choice and comm.nodes > 1 and (comm.is_cuda or not partial):
            continue
        out, back = plan.combine(y, received, bias, by_choice=by_choice, round_partial=partial)
        assert torch.equal(out.float(), total)
        assert back is received is None or torch.equal(back, weights.masked_fill(topk_idx < 0, 0))


def shapes(rank, size, count):
    comm = epkit.Communicator()
    draw = random.Random(5)  # the same on all ranks
    for number in range(count):
        try:
            one_shape(comm, draw, number)
        except Exception as error:
            raise AssertionError(f"shape {number}") from error
    comm.free()


def test_random_shapes_2_ranks():
    run(2, shapes, 1000 if os.environ.get("EPKIT_TEST_LONG") else 60)


def test_random_shapes_3_ranks():
    run(3, shapes, 1000 if os.environ.get("EPKIT_TEST_LONG") else 30)


def test_random_shapes_4_ranks():
    run(4, shapes, 1000 if os.environ.get("EPKIT_TEST_LONG") else 20)


@on_ranks(2)
def test_memory_of_the_library_outlives_the_communicator(rank, size):
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


@on_ranks(2)
def test_sums_of_each_rank_after_updates(rank, size):
    """Combines that add up the rows of each rank first, several with one routing: of the routing before nothing is left."""
    comm = epkit.Communicator()
    if comm.nodes > 1 and comm.is_cuda:
        return  # which refuses them
    experts, most, topk = 4 * size, 20, 5
    fixed = comm.plan(torch.zeros(0, topk, dtype=torch.int64), experts, expanded=True, alignment=4, max_tokens=most,
                      max_recv_tokens=size * most * topk + 4 * experts)
    for step in range(6):
        torch.manual_seed(step * size + rank)
        topk_idx = torch.randint(-1, experts, (most - step * rank, topk))
        x = torch.randint(-8, 9, (len(topk_idx), 64)).to(torch.bfloat16)
        fixed.update(topk_idx)
        for plan in fixed, comm.plan(topk_idx, experts, expanded=True):
            for _ in range(2):
                x = x.roll(1, 0)
                out = plan.combine(plan.dispatch(x).x, by_choice=True, round_partial=True)[0]
                assert torch.equal(out.float(), x.float() * (topk_idx >= 0).sum(1, keepdim=True)), (step, plan.fixed)
        local = topk_idx.div(experts // size, rounding_mode="floor")
        # The CPU reads each row, a GPU one sum for each (token, rank).
        read = sum(((local == one).any(1) if comm.is_cuda else (local == one)).sum().item() for one in range(size))
        stats = comm.stats()
        assert comm.nodes > 1 or stats["rows_self"] + stats["rows_node"] == read, (stats, read)
        assert stats["bytes_node"] == 128 * stats["rows_node"], stats


@on_ranks(3, expect=(0, 7, 0))
def test_go_on_after_a_rank_has_died(rank, size):
    comm = epkit.Communicator(timeout=60)
    assert comm.failed_ranks() == {}
    comm.barrier()
    comm.synchronize()
    if rank == 1:
        os._exit(7)

    def meet():
        comm.barrier()
        comm.synchronize()  # on a GPU it is found there

    raises(epkit.PeerError, "rank 1", meet)
    raises(epkit.PeerError, "rank 1", comm.check)
    assert comm.failed_ranks()[1] == "EP_E_PEER_DEAD"  # the other one may have left already
    comm.free()
    new = epkit.Communicator(dist.new_group([0, 2], use_local_synchronization=True), timeout=60)
    assert (new.rank, new.size) == ((0, 1, 1)[rank], 2)
    x = torch.full((3, 64), rank + 1, dtype=torch.bfloat16)
    plan = new.plan(torch.tensor([[0], [1], [0]]), 2)
    assert torch.equal(plan.combine(plan.dispatch(x).x)[0], x)
    new.barrier()


@on_ranks(2)
def test_facts(rank, size):
    comm = epkit.Communicator(check_values=True)
    facts = comm.info()
    assert (facts["rank"], facts["nranks"], facts["backend"]) == (rank, size, "host")
    assert comm.allgather_bytes(bytes([rank, 9])) == b"".join(bytes([r, 9]) for r in range(size))
    plan = comm.plan(torch.zeros(1, 1, dtype=torch.int64), size)
    plan.dispatch(torch.ones(1, 64, dtype=torch.bfloat16))
    moved = comm.stats()
    kind = "self" if rank == 0 else "node" if comm.nodes == 1 else "net"
    assert {name: moved["rows_" + name] for name in ("self", "node", "net")} == {
        name: int(name == kind) for name in ("self", "node", "net")}
    assert moved["bytes_" + kind] >= 128 and moved["bytes_forward"] == 128 * moved["rows_forward"]
    assert moved["rows_forward"] == int(comm.nodes > 1 and rank == 0)  # rank 0 places the row of rank 1
    comm.synchronize()


@on_ranks(2)
def test_memory_between_nodes(rank, size):
    """On one node and on the CPU there is none; wrong numbers are refused before anything is taken."""
    comm = epkit.Communicator()
    comm.set_net_memory(1 << 20)
    comm.set_net_memory(0, limit=1 << 30)
    assert comm.net_memory() == (0, 0)
    raises(epkit.ArgumentError, "reserve is 2 limit 1", comm.set_net_memory, 2, 1)
    raises(epkit.ArgumentError, "reserve is -1", comm.set_net_memory, -1)
    raises(TypeError, "limit integer", comm.set_net_memory, 1, 2.5)
    raises(TypeError, "reserve 64 bits", comm.set_net_memory, 1 << 70)
    comm.free()
    raises(epkit.ArgumentError, "net_memory freed", comm.net_memory)
    raises(epkit.ArgumentError, "set_net_memory freed", comm.set_net_memory, 0)


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
    # A plan that is not kept any more, or whose tensor is a copy, is made again.
    first = torch.ops.epkit.moe_dispatch(x.detach(), topk_idx, weights.detach(), slot, size * tokens)
    want = torch.ops.epkit.moe_combine(first[0], first[3], slot, tokens)
    for step in range(8):
        torch.ops.epkit.moe_dispatch(x.detach(), (topk_idx + step) % experts, weights.detach(), slot, size * tokens)
    assert torch.equal(torch.ops.epkit.moe_combine(first[0], first[3], slot, tokens), want)
    assert torch.equal(torch.ops.epkit.moe_combine(first[0], first[3].clone(), slot, tokens), want)
    epkit.ops.unregister(slot)
    raises(epkit.ArgumentError, "slot register", torch.ops.epkit.moe_combine, first[0], first[3], slot, tokens)


def symbolic(rank, size):
    """One graph for all numbers of tokens, none among them, and without gradients; ranks differ in theirs."""
    import epkit.ops
    from torch._dynamo.testing import CompileCounterWithBackend

    comm = epkit.Communicator()
    experts, hidden, topk = 4 * size, 64, 2
    slot = epkit.ops.register(comm, experts)
    counter = CompileCounterWithBackend("aot_eager")

    def layer(x, topk_idx, weights, capacity):
        rows, idx, w, plan = torch.ops.epkit.moe_dispatch(x, topk_idx, weights, slot, capacity)
        return torch.ops.epkit.moe_combine(rows, plan, slot, x.shape[0]), torch.where(idx >= 0, w, 0).sum()

    fast = torch.compile(layer, backend=counter, dynamic=True, fullgraph=True)
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode():
            for most in (12, 20, 31):
                tokens = most - 7 * rank
                torch.manual_seed(most + rank)
                topk_idx = torch.rand(tokens, experts).topk(topk).indices
                x, weights = torch.randn(tokens, hidden).to(torch.bfloat16), torch.rand(tokens, topk)
                a, b = layer(x, topk_idx, weights, size * most), fast(x, topk_idx, weights, size * most)
                assert all(torch.equal(one, other) for one, other in zip(a, b))
    assert counter.frame_count <= 2, counter.frame_count
    nothing = torch.empty(0, hidden, dtype=torch.bfloat16), torch.empty(0, topk, dtype=torch.int64), torch.empty(0, topk)
    assert layer(*nothing, size)[0].shape == (0, hidden)


def test_torch_compile_with_symbolic_sizes():
    need_operators()
    run(2, symbolic)


def opchecks(rank, size):
    """torch.library.opcheck: schema, registration of gradients, fake kernels, and AOT dispatch with symbolic sizes."""
    import epkit.ops

    ops, tokens, topk = torch.ops.epkit, 6, 2
    slot = epkit.ops.register(epkit.Communicator(), 8)
    topk_idx = torch.rand(tokens, 8).topk(topk).indices
    x, weights = torch.randn(tokens, 64).to(torch.bfloat16), torch.rand(tokens, topk)
    rows, _, w, plan = ops.moe_dispatch(x, topk_idx, weights, slot, tokens)
    for op, args in ((ops.moe_dispatch, (x.clone().requires_grad_(), topk_idx, weights.clone().requires_grad_(), slot, tokens)),
                     (ops.moe_combine, (rows.clone().requires_grad_(), plan, slot, tokens)),
                     (ops.moe_dispatch_again, (x, plan, slot, tokens)),
                     (ops.moe_combine_weighted, (rows, w, plan, slot, tokens, topk))):
        done = torch.library.opcheck(op.default, args)
        assert set(done.values()) == {"SUCCESS"} and len(done) == 4, done


def sizes_that_do_not_fit(rank, size):
    """A compiled program believes the sizes that it gave: an operator that has others says so instead of returning fewer rows."""
    import epkit.ops

    comm = epkit.Communicator()
    slot, ops = epkit.ops.register(comm, 4 * size), torch.ops.epkit
    x, topk_idx, weights = torch.randn(6, 128).to(torch.bfloat16), torch.arange(12).view(6, 2) % (4 * size), torch.rand(6, 2)
    raises(epkit.ArgumentError, "moe_dispatch capacity 0", ops.moe_dispatch, x, topk_idx, weights, slot, 0)
    raises(TypeError, "register comm NoneType Communicator", epkit.ops.register, None, 4 * size)
    raises(epkit.ArgumentError, "register num_experts no multiple", epkit.ops.register, comm, 4 * size + 1)
    raises(TypeError, "register num_experts str integer", epkit.ops.register, comm, "4")
    raises(TypeError, "moe_dispatch topk_weights NoneType tensor", ops.moe_dispatch, x, topk_idx, None, slot, 6 * size)
    if not comm.is_cuda:  # where a later call says so
        raises(epkit.ArgumentError, "max_recv_tokens is 1 capacity of moe_dispatch", ops.moe_dispatch, x, topk_idx, weights, slot, 1)
    rows, _, received, plan = ops.moe_dispatch(x, topk_idx, weights, slot, 6 * size)
    compiled_combine = torch.compile(ops.moe_combine, backend="aot_eager", dynamic=False)
    for tokens in (0, 5, 9):
        for call in (ops.moe_combine, compiled_combine):
            raises(epkit.ArgumentError, f"moe_combine n_tokens {tokens} [6, 2]", call, rows, plan, slot, tokens)
        raises(epkit.ArgumentError, f"moe_combine_weighted n_tokens {tokens}", ops.moe_combine_weighted, rows, received, plan, slot,
               tokens, 2)
    raises(epkit.ArgumentError, "moe_combine_weighted topk 3", ops.moe_combine_weighted, rows, received, plan, slot, 6, 3)
    raises(epkit.ArgumentError, "moe_combine n_tokens", ops.moe_combine, rows, plan.view(-1), slot, 12)
    fan_out = comm.layout(topk_idx, 4 * size)[2].sum(1, keepdim=True)
    assert torch.equal(ops.moe_combine(rows, plan, slot, 6), x * fan_out)  # by 1 or 2: exact
    epkit.ops.unregister(slot)


def test_sizes_of_operators_that_do_not_fit():
    need_operators()
    run(2, sizes_that_do_not_fit)


def test_opcheck():
    need_operators()
    run(1, opchecks)


def test_torch_compile():
    need_operators()
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


@on_ranks(2)
def test_tensors_without_dlpack(rank, size):
    comm = epkit.Communicator()
    topk_idx, x, weights = torch.zeros(3, 1, dtype=torch.int64), torch.randn(3, 64).to(torch.bfloat16), torch.rand(3, 1)
    plan = comm.plan(Duck(topk_idx), size)
    assert plan.n_tokens == 3 and plan.topk == 1
    out, more = torch.empty(plan.out_rows, 64, dtype=torch.bfloat16), torch.empty(plan.out_rows, 1)
    given = epkit.plan.Rows(Duck(out), None, None, Duck(more))
    assert plan._native.dispatch(Duck(x), None, Duck(weights), given, False, False, None, False, None, 0, 0, None) is given
    want = plan.dispatch(x, weights)
    assert torch.equal(out, want.x) and torch.equal(more, want.topk_weights)
    raises(epkit.ArgumentError, "x float32", plan._native.dispatch, Duck(x.float()), None, None, out, False, False, None, False, None, 0,
           0, None)
    raises(epkit.ArgumentError, "x contiguous", plan._native.dispatch, Duck(x.t().contiguous().t()), None, None, out, False, False,
           None, False, None, 0, 0, None)
    raises(TypeError, "x", plan._native.dispatch, "x", None, None, out, False, False, None, False, None, 0, 0, None)


@on_ranks(2)
def test_views_and_modes(rank, size):
    """Slices that begin anywhere; tensors that want gradients, where nothing records them."""
    comm = epkit.Communicator()
    weights = torch.rand(5, 3)[1:]  # begins at 12 bytes
    x = torch.randn(4, 40).to(torch.bfloat16).requires_grad_()
    topk_idx = torch.stack([torch.randperm(4 * size)[:3] for _ in range(5)])[1:]
    plan = comm.plan(topk_idx, 4 * size)
    with torch.no_grad():
        rows = plan.dispatch(x, weights)
    assert torch.equal(plan.combine(rows.x, rows.topk_weights)[1], weights)
    with torch.inference_mode():
        assert torch.equal(plan.dispatch(x.detach().clone()).x, rows.x)
    negated = torch._neg_view(torch.rand(4, 3))  # memory holds the opposite
    assert negated.is_neg() and torch.equal(plan.combine(rows.x, plan.dispatch(x.detach(), negated).topk_weights)[1], negated)


class Foreign(torch.Tensor):
    """As a tensor of another library that has DLPack's table, but not the attributes of torch."""
    @property
    def requires_grad(self):
        raise AttributeError("requires_grad")


class Untrue:
    def __bool__(self):
        raise ValueError("neither true nor false")


@on_ranks(1)
def test_code_of_python_in_a_call(rank, size):
    """Calls make their tensors while code of Python may run, which fails, or sees what they have made so far."""
    comm = epkit.Communicator()
    topk_idx = torch.zeros(6, 1, dtype=torch.int64)
    plan, calls, x = comm.plan(topk_idx, size), comm.low_latency(6, 128, size, 1), torch.ones(6, 128).to(torch.bfloat16)
    for name in ("want_topk_idx", "column_major_scales"):
        raises(ValueError, "neither", plan.dispatch, x, **{name: Untrue()})
    assert not epkit._native._C.is_ready(x.as_subclass(Foreign)) and epkit._native._C.is_ready(x)
    held, before = [], gc.get_threshold()

    def look(*_):
        held[:] = gc.get_objects()

    gc.callbacks.append(look)
    gc.set_threshold(1)
    try:
        for _ in range(3):
            assert comm.layout(topk_idx, size)[2].all()
            rows = plan.dispatch(x, torch.ones(6, 1), want_topk_idx=True)
            assert torch.equal(plan.combine(rows.x, rows.topk_weights)[0], x)
            assert torch.equal(calls.combine(calls.dispatch(x, topk_idx).x, topk_idx, torch.ones(6, 1))[0], x)
            assert plan._metadata(6, None, ("rank_prefix",)).rank_prefix.tolist() == [[6]]
    finally:
        gc.callbacks.remove(look)
        gc.set_threshold(*before)


@on_ranks(2)
def test_gradients_are_not_lost(rank, size):
    """Calls without gradients refuse tensors that want some, before anything is sent, and say what has them."""
    comm = epkit.Communicator()
    topk_idx = torch.arange(8).view(4, 2) % (2 * size)
    x, weights = torch.randn(4, 128).to(torch.bfloat16).requires_grad_(), torch.rand(4, 2, requires_grad=True)
    plan, calls = comm.plan(topk_idx, 2 * size), comm.low_latency(4, 128, 2 * size, 2)
    raises(epkit.ArgumentError, "dispatch: x gradients epkit.dispatch detach()", plan.dispatch, x)
    raises(epkit.ArgumentError, "dispatch: topk_weights gradients", plan.dispatch, x.detach(), weights)
    rows, recv_weights = epkit.dispatch(plan, x, weights)
    assert rows.requires_grad and recv_weights.requires_grad
    raises(epkit.ArgumentError, "combine: x gradients epkit.combine", plan.combine, rows)
    assert epkit.combine(plan, rows).requires_grad
    raises(epkit.ArgumentError, "low_latency_dispatch: x gradients", calls.dispatch, x, topk_idx)
    got = calls.dispatch(x.detach(), topk_idx)
    raises(epkit.ArgumentError, "low_latency_combine: topk_weights gradients", calls.combine, got.x, topk_idx, weights)
    calls.combine(got.x, topk_idx, weights.detach())
    comm.barrier()


@on_ranks(2)
def test_what_objects_show(rank, size):
    comm = epkit.Communicator()
    plan = comm.plan(torch.tensor([[0, 1]]), 4)
    fixed = comm.plan(torch.tensor([[0, 1]]), 4, expanded=True, alignment=8, max_recv_tokens=40)
    calls = comm.low_latency(4, 128, 4, 2)
    node = f", node {rank} of 2" if comm.nodes > 1 else ""
    where, rows = f"rank {rank} of 2", 2 if rank == 0 else 0
    assert repr(comm) == f"<epkit.Communicator: {where}{node}, {comm.device}>"
    assert repr(plan) == f"<epkit.Plan: {where}, 1 tokens, top-2 of 4 experts, by rank, receives {rows} rows>"
    assert repr(fixed) == f"<epkit.Plan: {where}, 1 tokens, top-2 of 4 experts, expanded, alignment 8, capacity 40>"
    assert repr(calls) == f"<epkit.LowLatency: {where}, up to 4 tokens of 128 elements, up to top-2 of 4 experts>"
    comm.free()
    assert all(repr(one).endswith(", freed>") for one in (comm, plan, fixed, calls))


@on_ranks(2)
def test_what_a_call_was_given_lives_until_it_ends(rank, size):
    comm = epkit.Communicator()
    calls = comm.low_latency(16, 128, 2 * size, 2)
    torch.manual_seed(rank)
    topk_idx, weights = torch.rand(16, 2 * size).topk(2).indices, torch.rand(16, 2)
    for exact in (False, True):
        rows = calls.dispatch(torch.randn(16, 128).to(torch.bfloat16), topk_idx)
        y = torch.randn(rows.x.shape).to(torch.bfloat16)
        want, _ = calls.combine(y, topk_idx, weights, call=rows.call, exact=exact)
        out, finish = calls.combine(y.clone(), topk_idx.clone(), weights.clone(), call=rows.call, exact=exact, hook=True)
        finish()
        assert torch.equal(out, want), f"exact {exact}: {(out != want).sum().item()} elements differ"
    comm.barrier()


@on_ranks(2)
def test_opaque_scales(rank, size):
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
        codes = torch.zeros(6, 32, dtype=torch.uint8)
        for scales, options in ((codes[:, :6], {}), (codes.t()[:8].t(), {"column_major_scales": True}), (codes[:, ::2], {})):
            raises(epkit.ArgumentError, "dispatch scales uint8 contiguous int32", plan.dispatch, (x, scales), **options)
        fp4 = torch.zeros(6, 32, dtype=torch.uint8).view(getattr(torch, "float4_e2m1fn_x2", torch.uint8))
        got = plan.dispatch((fp4, words), column_major_scales=True)
        assert got.scales.stride(0) == 1 and torch.equal(got.scales, a.scales) and got.x.dtype == fp4.dtype
        again = plan.dispatch((fp4, codes), column_major_scales=True, out=plan.dispatch((fp4, codes)))  # which has strides
        assert again.scales.shape[1] == codes.shape[1]
        raises(epkit.ArgumentError, "dispatch scales uint8 column_major_scales", plan.dispatch, (x, codes), column_major_scales=True)
        raises(epkit.ArgumentError, "hidden 66 fp4 64", plan.dispatch, torch.zeros(6, 33, dtype=torch.uint8))
        if not expanded:
            assert torch.equal(a.scales, torch.cat([w[((t >= 2 * rank) & (t < 2 * rank + 2)).any(1)]
                                                    for w, t in zip(gather(words, size), gather(topk_idx, size))]))


@on_ranks(2)
def test_words_are_not_interpreted(rank, size):
    """Also where they are as many as the bytes of mxfp8 or nvfp4 would make."""
    comm = epkit.Communicator(check_values=True)
    plan = comm.plan(torch.full((4, 1), 1 - rank), size)
    words = torch.full((4, 4), -1, dtype=torch.int32)
    for x in torch.zeros(4, 512).to(torch.float8_e4m3fn), torch.zeros(4, 128, dtype=torch.uint8):
        words = words[:, :x.shape[1] * (2 if x.dtype == torch.uint8 else 1) // 64]
        assert torch.equal(plan.dispatch((x, words)).scales, words)
    comm.check()
    comm.synchronize()
    comm.free()
    raises(epkit.ArgumentError, "freed", comm.set_num_sms, 0)


@on_ranks(2)
def test_worst_cases_take_little_memory(rank, size):
    """Outputs of the worst case are zeros, also in memory that was used before, and take the memory of the rows that came."""
    comm = epkit.Communicator()
    used = torch.full((64 << 20,), 7, dtype=torch.uint8)
    for count in (1, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 4095):
        epkit._native._C.clear(used.data_ptr() + 5, count)
        assert not used[5:5 + count].any() and used[4] == 7 and used[5 + count] == 7
        used[5:5 + count] = 7
    del used
    with torch._subclasses.FakeTensorMode():
        assert epkit._tensors.zeros((4 << 20,), torch.int32, torch.device("cpu")).shape == (4 << 20,)
    calls = comm.low_latency(128, 7168, 16 * size, 4)
    plan = comm.plan(torch.zeros(2, 1, dtype=torch.int64), size, max_recv_tokens=20000)
    before = memory_of()
    rows = calls.dispatch(torch.ones(1, 7168).to(torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64))
    fixed = plan.dispatch(torch.ones(2, 7168).to(torch.bfloat16)).x
    size_of = (rows.x.numel() + fixed.numel()) * 2 >> 10
    grown = memory_of() - before
    assert grown < size_of / 4, f"{grown} KiB of {size_of}"
    own = size if rank == 0 else 0
    assert rows.count[0] == own and int(torch.count_nonzero(rows.x)) == own * 7168
    assert int(torch.count_nonzero(fixed)) == 2 * own * 7168
    comm.barrier()


def other_threads_run():
    """Whether another thread runs while shared memory, of which all pages are written, is cleared."""
    count, times, ended = 64 << 20, [], threading.Event()

    def record():
        while not ended.is_set():
            times.append(time.perf_counter())
            time.sleep(0.0002)

    with mmap.mmap(-1, count) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        thread = threading.Thread(target=record)
        thread.start()
        while not times:
            time.sleep(0.001)
        begin = time.perf_counter()
        epkit._native._C.clear(address, count)
        took = time.perf_counter() - begin
        ended.set()
        thread.join()
    return any(begin + took / 4 < at < begin + took * 3 / 4 for at in times)


def test_clearing_memory_lets_other_threads_run():
    assert any(other_threads_run() for _ in range(20)), "none ran"

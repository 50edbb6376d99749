# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer and EPBuffer: what DeepEP's tests of them assert, on the CPU: 144 modes, everything bit for bit."""
import contextlib
import copy
import gc
import io
import itertools
import os
import socket

import deep_ep
import epkit
import torch
import torch.distributed as dist
from deep_ep.utils.envs import init_seed
from deep_ep.utils.gate import get_unbalanced_scores
from deep_ep.utils.math import align, per_token_cast_back, per_token_cast_to_fp8
from deep_ep.utils.refs import combine as ref_combine
from deep_ep.utils.refs import dispatch as ref_dispatch
from deep_ep.utils.refs import generate_pre_combine_data, ordered_accumulate
from ranks import CUDA, need_devices, on_ranks, raises, run

MOST, HIDDEN, TOPK = 24, 256, 4

def modes():
    for copy, alignment, fp8, biases, previous, asynchronous in itertools.product((1, 0), (128, 1), (1, 0), (0, 1, 2), (0, 1), (0, 1)):
        for on_comm in ((1,) if previous else (0, 1)):
            yield copy, alignment, fp8, biases, previous, asynchronous, on_comm


def same(a, b):
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def as_tuple(rows):
    return rows if isinstance(rows, tuple) else (rows,)


def bf16(rows):
    return per_token_cast_back(*rows) if isinstance(rows, tuple) else rows


class Mode:
    """One mode: its inputs, its calls, and what they must give."""

    def __init__(self, buffer, routing, mode, cpu_sync):
        self.buffer, self.cpu_sync = buffer, cpu_sync
        self.copy, self.alignment, self.fp8, biases, self.previous, self.asynchronous, self.on_comm = mode
        self.topk_idx, self.weights, self.experts = routing
        self.tokens = self.topk_idx.shape[0]
        self.deferred = self.asynchronous and isinstance(buffer, deep_ep.EPBuffer)
        x = torch.randn(self.tokens, HIDDEN, dtype=torch.bfloat16)
        self.x = per_token_cast_to_fp8(x) if self.fp8 else x
        new = lambda: torch.randn(self.tokens, HIDDEN, dtype=torch.bfloat16)  # noqa: E731
        self.bias = (None, new(), (new(), new()))[biases] if biases < 2 else (new(), new())
        self.ref = ref_dispatch(self.x, self.topk_idx, self.weights, MOST, self.experts)

    def call(self, name, **args):
        if self.previous:
            args["previous_event"] = self.buffer.capture()
        if self.deferred:
            args["defer_epilogue"] = True
        result = getattr(self.buffer, name)(async_with_compute_stream=self.asynchronous, allocate_on_comm_stream=self.on_comm,
                                            num_sms=4, num_qps=1, **args)
        if self.deferred:
            assert isinstance(result, deep_ep.EventOverlap)
            return (*result.wait(), result)
        if self.asynchronous:
            result[-1].current_stream_wait()
        return result

    def dispatch(self, **more):
        return self.call("dispatch", x=self.x, topk_idx=self.topk_idx, topk_weights=self.weights, num_experts=self.experts,
                         num_max_tokens_per_rank=MOST, expert_alignment=self.alignment, do_handle_copy=self.copy,
                         do_cpu_sync=self.cpu_sync, **more)

    def outputs(self):
        """y of each (token, choice), and both sums of it."""
        first = dist.get_rank() * MOST
        y = generate_pre_combine_data(first + torch.arange(self.tokens), MOST, TOPK, HIDDEN)
        y[self.topk_idx == -1] = 0
        size, multiple = dist.get_world_size(), self.buffer.allow_multiple_reduction
        if self.buffer._comm.nodes > 1:
            return self.between_nodes(y, False), self.between_nodes(y, True)
        plain = ref_combine(y, self.topk_idx, 1, size, self.experts, self.bias, True, False)
        expanded = ref_combine(y, self.topk_idx, 1, size, self.experts, self.bias, multiple, False)
        return plain, expanded


    def between_nodes(self, y, expanded):
        """By the contract of several nodes: biases, then the nodes in order, each other one as a sum of its rows in float32."""
        comm = self.buffer._comm
        each, owner = self.experts // comm.size, torch.where(self.topk_idx < 0, -1, self.topk_idx * comm.size // self.experts)
        total = sum((one.float() for one in as_tuple(self.bias) if one is not None), torch.zeros(self.tokens, HIDDEN))
        for node in range(comm.nodes):
            part = total if node == comm.node else torch.zeros_like(total)
            for rank in range(node * comm.size // comm.nodes, (node + 1) * comm.size // comm.nodes):
                if not expanded:
                    part += ordered_accumulate(torch.where((owner == rank).unsqueeze(2), y, 0)).float()
                for expert in range(rank * each, (rank + 1) * each) if expanded else ():
                    part += torch.where((self.topk_idx == expert).unsqueeze(2), y, 0).float().sum(1)  # of one choice at most
            if node != comm.node:
                total += part
        return total.to(torch.bfloat16)


def check_counts(mode, handle, expanded_handle):
    ref_idx = mode.ref[1]
    local = mode.experts // dist.get_world_size()
    counts = [(ref_idx == e).sum().item() for e in range(local)]
    aligned = [align(count, mode.alignment) for count in counts]
    if mode.cpu_sync:
        assert handle.num_recv_tokens_per_expert_list == aligned == expanded_handle.num_recv_tokens_per_expert_list
    else:
        assert handle.num_recv_tokens_per_expert_list == []
    assert handle.psum_num_recv_tokens_per_expert.tolist() == list(itertools.accumulate(aligned))
    start, ends = 0, expanded_handle.psum_num_recv_tokens_per_expert.tolist()
    for count, end in zip(counts, ends):
        assert end == start + count
        start = align(end, mode.alignment)
    scaleup = mode.buffer.num_scaleup_ranks
    per_rank = list(itertools.accumulate(sum(mode.ref[4].tolist()[index::scaleup]) for index in range(scaleup)))
    for one in (handle, expanded_handle):
        assert one.psum_num_recv_tokens_per_scaleup_rank.tolist() == per_rank
        assert one.num_unaligned_recv_tokens_per_expert.tolist() == counts


def check_rows(mode, n, rows, idx, weights, handle, expanded, expanded_weights, expanded_handle):
    ref_rows, ref_idx, ref_weights, ref_source, _ = mode.ref
    assert torch.equal(handle.recv_src_metadata[:n, 0], ref_source)
    assert torch.equal(expanded_handle.recv_src_metadata[:n, 0], ref_source)
    for got, want in zip(as_tuple(rows), as_tuple(ref_rows)):
        assert same(got[:n], want)
    assert torch.equal(idx[:n], ref_idx) and (mode.cpu_sync or (idx[n:] == -1).all())
    assert torch.equal(weights[:n], ref_weights.masked_fill(ref_idx < 0, 0))
    slots = expanded_handle.recv_src_metadata[:n, 2:]
    assert torch.equal(slots >= 0, ref_idx >= 0)
    token, choice = (slots >= 0).nonzero(as_tuple=True)
    flat = slots[token, choice].long()
    assert flat.unique().numel() == flat.numel()
    for got, want in zip(as_tuple(expanded), as_tuple(ref_rows)):
        assert same(bytes_of(got)[flat], bytes_of(want)[token])
    assert torch.equal(expanded_weights[flat], ref_weights[token, choice])
    return slots, flat


def bytes_of(rows):
    """8-bit floats as integers, which older builds of torch index, too."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def check_padding(mode, rows, weights, handle):
    for end in handle.psum_num_recv_tokens_per_expert.tolist():
        upto = align(end, mode.alignment)
        assert (bf16(rows)[end:upto] == 0).all() and (weights[end:upto] == 0).all()


def combine_inputs(handle, idx, slots, n, rows, expanded_rows):
    y = generate_pre_combine_data(handle.recv_src_metadata[:n, 0], MOST, TOPK, HIDDEN)
    y[idx[:n] == -1] = 0
    plain = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16)
    plain[:n] = ordered_accumulate(y)
    expanded = torch.zeros(expanded_rows + 1, HIDDEN, dtype=torch.bfloat16)
    expanded[slots.flatten().long()] = y.view(-1, HIDDEN)  # -1 is the row behind the last one
    return plain, expanded[:-1]


def one_mode(buffer, routing, which, cpu_sync):
    mode = Mode(buffer, routing, which, cpu_sync)
    stats = torch.zeros(mode.experts // buffer.num_ranks, dtype=torch.int32)
    rows, idx, weights, handle, _ = mode.dispatch(cumulative_local_expert_recv_stats=stats)
    expanded, no_idx, expanded_weights, expanded_handle, _ = mode.dispatch(do_expand=True, use_tma_aligned_col_major_sf=True)
    n = handle.psum_num_recv_tokens_per_scaleup_rank[-1].item()
    assert no_idx is None and torch.equal(stats, handle.num_unaligned_recv_tokens_per_expert)
    assert (mode.topk_idx.data_ptr() != handle.topk_idx.data_ptr()) == bool(mode.copy)
    if cpu_sync:
        assert expanded_handle.recv_src_metadata.size(0) == n == as_tuple(rows)[0].size(0)
    if mode.fp8:
        assert expanded[1].stride(0) == 1 and expanded[1].stride(1) % 4 == 0
    check_counts(mode, handle, expanded_handle)
    slots, flat = check_rows(mode, n, rows, idx, weights, handle, expanded, expanded_weights, expanded_handle)

    again, again_idx, none, same_handle, _ = mode.call("dispatch", x=mode.x, handle=handle)
    assert none is None and same_handle.topk_idx.data_ptr() == handle.topk_idx.data_ptr()
    assert all(same(a[:n], b[:n]) for a, b in zip(as_tuple(again), as_tuple(rows))) and torch.equal(again_idx[:n], idx[:n])
    again, _, again_weights, _, _ = mode.call("dispatch", x=mode.x, topk_weights=mode.weights, handle=expanded_handle,
                                              do_expand=True, do_zero_padding=True, use_tma_aligned_col_major_sf=True)
    assert all(same(bytes_of(a)[flat], bytes_of(b)[flat]) for a, b in zip(as_tuple(again), as_tuple(expanded)))
    assert torch.equal(again_weights[flat], expanded_weights[flat])
    check_padding(mode, again, again_weights, expanded_handle)

    y, expanded_y = combine_inputs(handle, idx, slots, n, as_tuple(rows)[0].shape[0], as_tuple(expanded)[0].shape[0])
    combined, combined_weights, _ = mode.call("combine", x=y, topk_weights=weights, bias=mode.bias, handle=handle)
    reduced, reduced_weights, _ = mode.call("combine", x=expanded_y, topk_weights=expanded_weights, bias=mode.bias,
                                            handle=expanded_handle)
    want, want_reduced = mode.outputs()
    assert torch.equal(combined, want), (combined != want).sum()
    assert torch.equal(reduced, want_reduced), (reduced != want_reduced).sum()
    assert torch.equal(combined_weights, mode.weights) and torch.equal(reduced_weights, mode.weights)


def make_routing(size, masked):
    experts = 4 * size
    tokens = max(1, MOST - dist.get_rank())
    weights, topk_idx = torch.topk(get_unbalanced_scores(tokens, experts, size, TOPK, 1.0, False), TOPK, sorted=False)
    if masked:
        topk_idx.masked_fill_(torch.rand(topk_idx.shape) < masked, -1)
        weights.masked_fill_(topk_idx < 0, 0)
    return topk_idx, weights, experts


def new_buffer(kind=deep_ep.ElasticBuffer, **more):
    return kind(dist.group.WORLD, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOPK, explicitly_destroy=True, **more)


def all_modes(rank, size, cpu_sync, step, kind=deep_ep.ElasticBuffer):
    init_seed(3)
    buffer = new_buffer(kind)
    every = [which for which in modes() if kind is deep_ep.ElasticBuffer or not which[0]]  # EPBuffer never copies topk_idx
    count = 0
    for masked in (0, 0.3):
        routing = make_routing(size, masked)
        for which in every[::step]:
            one_mode(buffer, routing, which, cpu_sync)
            count += 1
    assert step > 1 or count == 2 * len(every) == (288 if kind is deep_ep.ElasticBuffer else 144)
    buffer.barrier()
    buffer.destroy()


def test_144_modes():
    run(2, all_modes, True, 1 if os.environ.get("EPKIT_TEST_LONG") else 5)


def test_modes_without_cpu_sync():
    run(2, all_modes, False, 1 if os.environ.get("EPKIT_TEST_LONG") else 17)


def test_modes_on_4_ranks():
    run(4, all_modes, True, 1 if os.environ.get("EPKIT_TEST_LONG") else 29)


def test_modes_of_ep_buffer():
    for cpu_sync, step in ((True, 7), (False, 11)):
        run(2, all_modes, cpu_sync, 1 if os.environ.get("EPKIT_TEST_LONG") else step, deep_ep.EPBuffer)


@on_ranks(2)
def test_ep_buffer(rank, size):
    """What DeepEP V2.5 has and V2 has not."""
    buffer = new_buffer(deep_ep.EPBuffer, sl_idx=None)
    nodes = buffer._comm.nodes
    assert deep_ep.get_logical_domain_size(buffer) == deep_ep.comm.get_physical_domain_size(buffer) == (nodes, size // nodes)
    assert deep_ep.get_logical_domain_size(dist.group.WORLD, False) == (1, size)
    assert deep_ep.comm.get_comm_stream(buffer) is buffer.get_comm_stream()
    topk_idx, weights, experts = make_routing(size, 0.2)
    x = torch.randn(topk_idx.shape[0], HIDDEN, dtype=torch.bfloat16)
    again = {"async_with_compute_stream": True, "defer_epilogue": True}
    event = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=experts, expert_alignment=8, do_expand=True,
                            do_zero_padding=True, use_tma_aligned_col_major_sf=True, **again)
    deep_ep.comm.barrier(buffer, True)
    rows, none, received, handle = event.current_stream_wait(release_handle=True)
    assert none is None and event.event is None and handle.topk_idx is topk_idx
    pending = buffer.combine(rows * received.unsqueeze(1).to(rows.dtype), handle=handle, bias=x, **again)
    out, none = pending.wait()
    assert none is None and pending.wait() is None
    gradients, _, _, same_handle, event = buffer.dispatch(out, handle=handle, do_expand=True, do_zero_padding=True,
                                                          async_with_compute_stream=True)
    event.current_stream_wait()
    assert same_handle is handle and gradients.shape == rows.shape
    _, summed, _ = buffer.combine(gradients, handle=handle, topk_weights=received, async_with_compute_stream=True)
    assert torch.equal(summed, weights)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        buffer.print_memory_usage()
    assert f"rank {rank}: {buffer._comm.info()['library_bytes']} bytes" in printed.getvalue()
    buffer.barrier(False, True, True)

    routing = {"topk_idx": topk_idx, "num_experts": experts}
    raises(AssertionError, "do_handle_copy False", buffer.dispatch, x, do_handle_copy=True, **routing)
    raises(AssertionError, "dispatch defer_epilogue async_with_compute_stream", buffer.dispatch, x, defer_epilogue=True, **routing)
    raises(AssertionError, "combine defer_epilogue async_with_compute_stream", buffer.combine, rows, handle, defer_epilogue=True)
    raises(TypeError, "handle EPBuffer.dispatch()", buffer.combine, rows, (1, 2))
    assert isinstance(buffer, deep_ep.BufferBase)
    for kind in (deep_ep.BucketBuffer, deep_ep.BucketSession, deep_ep.EngramBuffer, deep_ep.PPBuffer):
        raises(NotImplementedError, kind.__name__, kind)
    raises(NotImplementedError, "EngramBuffer.get_storage_size_hint shard", deep_ep.EngramBuffer.get_storage_size_hint, dist.group.WORLD, [9])
    raises(NotImplementedError, "EngramBuffer.get_theoretical_config shard", deep_ep.EngramBuffer.get_theoretical_config, None, 1, 9, 1)
    raises(AssertionError, "lb_allocation_plan_or_num_bytes -1", deep_ep.EPBuffer, dist.group.WORLD, lb_allocation_plan_or_num_bytes=-1)
    buffer.destroy()
    deep_ep.destroy_all_managed_nccl_comm()


@on_ranks(2)
def test_expert_ids_of_expanded_rows(rank, size):
    buffer = new_buffer(deep_ep.EPBuffer)
    topk_idx, _, experts = make_routing(size, 0.3)
    x = torch.ones(topk_idx.shape[0], HIDDEN, dtype=torch.bfloat16)
    routing = {"topk_idx": topk_idx, "num_experts": experts, "expert_alignment": 8}
    for sync in (True, False):
        rows, _, _, handle, _ = buffer.dispatch(x, do_expand=True, do_cpu_sync=sync, emit_expert_ids=True, **routing)
        ids, begin = [], 0
        for end in handle.psum_num_recv_tokens_per_expert.tolist():
            ids += [-1] * (-begin % 8)
            begin += -begin % 8
            ids += [handle.psum_num_recv_tokens_per_expert.tolist().index(end)] * (end - begin)
            begin = end
        assert handle.recv_expert_ids.dtype == torch.int32 and rows.shape[0] == len(handle.recv_expert_ids)
        assert handle.recv_expert_ids.tolist() == ids + [-1] * (len(rows) - len(ids)) and max(ids) >= 0
    assert buffer.dispatch(x, **routing)[3].recv_expert_ids is None
    raises(AssertionError, "emit_expert_ids do_expand", buffer.dispatch, x, emit_expert_ids=True, **routing)
    raises(AssertionError, "emit_expert_ids handle", buffer.dispatch, x, handle=handle, do_expand=True, emit_expert_ids=True)
    buffer.destroy()


@on_ranks(2)
def test_rows_are_borrowed(rank, size):
    buffer = new_buffer(deep_ep.EPBuffer)
    address = None
    for step in range(3):
        topk_idx, weights, experts = make_routing(size, 0.3)
        x = torch.randn(topk_idx.shape[0], HIDDEN).to(torch.bfloat16)
        call = {"topk_idx": topk_idx, "topk_weights": weights, "num_experts": experts}
        want = buffer.dispatch(x, **call)
        view, ids, weights, handle, _ = buffer.dispatch(x, borrow_recv=True, **call)
        assert torch.equal(view.slab[view.row_indices], want[0]) and torch.equal(ids, want[1]) and torch.equal(weights, want[2])
        assert address in (None, view.slab.data_ptr())
        address = view.slab.data_ptr()
        kept = view.slab
        for refused in (lambda: buffer.dispatch(x, **call), lambda: buffer.combine(want[0], handle), buffer.destroy):  # noqa: B023
            raises(RuntimeError, "borrow_recv release()", refused)
        view.release()
        view.release()
        raises(RuntimeError, "released", lambda: view.slab)  # noqa: B023
        assert torch.equal(buffer.combine(kept, handle)[0], buffer.combine(want[0], want[3])[0])
    for more in ({"do_expand": True}, {"do_cpu_sync": False}, {"defer_epilogue": True, "async_with_compute_stream": True}):
        raises(ValueError, "borrow_recv", buffer.dispatch, x, borrow_recv=True, **call, **more)
    raises(ValueError, "borrow_recv", buffer.dispatch, x, handle=handle, borrow_recv=True)
    raises(ValueError, "borrow_recv bfloat16", buffer.dispatch, x.float(), borrow_recv=True, **call)
    buffer.destroy()


@on_ranks(2)
def test_sent_before_counts(rank, size):
    """Rows that are sent before their host knows how many there are, as on GPUs: what a dispatch that waits brings."""
    early, waits = new_buffer(), new_buffer()
    early._early.able, waits._early.able = True, False
    for step, tokens in enumerate((MOST, 3, 0, MOST)):
        torch.manual_seed(10 * step + rank)
        topk_idx, weights = torch.rand(tokens, 4 * size).topk(TOPK).indices, torch.rand(tokens, TOPK)
        x = torch.randn(tokens, HIDDEN).to(torch.bfloat16)
        x = per_token_cast_to_fp8(x) if step % 2 else x
        a, b = (one.dispatch(x, topk_idx, weights, num_experts=4 * size) for one in (early, waits))
        for got, want in zip((*as_tuple(a[0]), *a[1:3], a[3].recv_src_metadata), (*as_tuple(b[0]), *b[1:3], b[3].recv_src_metadata)):
            assert got.shape == want.shape and got.stride() == want.stride() and torch.equal(got.float(), want.float())
        assert a[3].num_recv_tokens_per_expert_list == b[3].num_recv_tokens_per_expert_list and a[3].plan.n_recv == len(a[1])
        y = torch.randn(len(a[1]), HIDDEN).to(torch.bfloat16)
        assert torch.equal(early.combine(y, a[3])[0], waits.combine(y, b[3])[0])


@on_ranks(2)
def test_a_rank_without_room_sends_what_is_refused(rank, size):
    """It waits for the counts before it sends. Where all ranks refuse them, because of another number of tokens here, others are in
    that dispatch already."""
    buffer, settle, sent = new_buffer(), epkit.Plan.settle, []
    place, buffer._early.able = buffer._place_rows, True
    topk_idx, x = torch.zeros(1 + 8 * rank, 1, dtype=torch.int64), torch.ones(1 + 8 * rank, HIDDEN, dtype=torch.bfloat16)
    call = {"topk_idx": topk_idx, "num_experts": size}

    def as_on_gpus(plan):
        error = epkit.ArgumentError("EP_E_CAPACITY")
        error.name = "EP_E_CAPACITY"
        raise error

    buffer._place_rows = lambda plan, *args: (sent.append(plan.fixed), place(plan, *args))[1]
    if rank == 0:
        buffer._early._most, epkit.Plan.settle = 0, settle if CUDA else as_on_gpus
    raises(epkit.ArgumentError, "EP_E_CAPACITY rank 0 receives 10", buffer.dispatch, x, num_max_tokens_per_rank=1 + 10 * rank, **call)
    epkit.Plan.settle, buffer._early._most = settle, 2
    assert sent == [True]
    if CUDA:  # where ranks compare num_max_tokens_per_rank in that dispatch
        raises(epkit.Error, "num_max_tokens_per_rank same ranks", buffer.dispatch, x, **call)
        dist.barrier()
        return
    rows, _, _, handle, _ = buffer.dispatch(x, **call)
    assert len(rows) == (0 if rank else 10) and torch.equal(buffer.combine(rows, handle)[0], x)


@on_ranks(4)
def test_replicas_of_experts(rank, size):
    """Weights go to their slots bit by bit, and gradients come back to the owner, added in the order of (rank, slot)."""
    local, slots = 2, 3
    sizes = ((5,), (96,), (9000, 3))
    plan = deep_ep.BufferAllocator()
    pools = [plan.allocate((slots, 16, *one), torch.uint8) for one in sizes]
    grads = plan.allocate((slots, 264), torch.float32)
    assert pools[2].shape == (slots, 16, 9000, 3) and not plan.materialized and plan.num_bytes % (2 << 20) == 0
    buffer = deep_ep.EPBuffer(dist.group.WORLD, lb_allocation_plan_or_num_bytes=plan, explicitly_destroy=True)
    assert plan.materialized and buffer.num_lb_bytes == plan.num_bytes
    for wrong, words in ((lambda: plan.allocate(3, torch.uint8), RuntimeError), (lambda: deep_ep.EPBuffer(
            dist.group.WORLD, lb_allocation_plan_or_num_bytes=plan), AssertionError)):
        raises(words, "EPBuffer made", wrong)
    generator = torch.Generator(torch.get_default_device()).manual_seed(8)
    for round_ in range(4):
        mapping = torch.randint(-1, local * size, (size, slots), generator=generator, dtype=torch.int32)
        if round_ == 3:
            mapping[:] = 5  # all of them replicas of one expert
        all_weights = [torch.randint(0, 256, (local * size, *pool.shape[1:]), generator=generator, dtype=torch.uint8) for pool in pools]
        for pool in pools:
            pool.fill_(0xa5)
        mine = [one[rank * local:(rank + 1) * local] for one in all_weights]
        buffer.lb_prefetch_weights(pools, mine, mapping, num_sms=8, previous_event=buffer.capture() if round_ % 2 else None).wait()
        for slot, expert in enumerate(mapping[rank].tolist()):
            for pool, whole in zip(pools, all_weights):
                assert torch.equal(pool[slot], whole[expert] if expert >= 0 else torch.full_like(pool[slot], 0xa5))
        every = torch.randn(size, slots, 264, generator=generator)
        grads.copy_(every[rank])
        total = torch.randn(local, 264, generator=torch.Generator(torch.get_default_device()).manual_seed(rank))
        want = total.clone()
        for other in range(size):
            for slot, expert in enumerate(mapping[other].tolist()):
                if expert >= 0 and expert // local == rank:
                    want[expert % local] += every[other, slot]
        buffer.lb_reduce_grads(grads, total, mapping).current_stream_wait()
        assert torch.equal(total, want)
    raises(epkit.ArgumentError, "redundancy_mapping shape 4", buffer.lb_prefetch_weights, pools, mine, mapping[:2])
    raises(epkit.ArgumentError, "same bytes", buffer.lb_prefetch_weights, pools[0], mine[1], mapping)
    raises(epkit.ArgumentError, "float32", buffer.lb_reduce_grads, pools[0], mine[0], mapping)
    raises(epkit.ArgumentError, "multiple of 16", buffer.lb_prefetch_weights, torch.zeros(slots, 5), torch.zeros(local, 5), mapping)
    buffer.destroy()


@on_ranks(2)
def test_single_reduction(rank, size):
    init_seed(4)
    buffer = new_buffer(allow_multiple_reduction=False)
    for which in ((1, 128, 0, 2, 0, 0, 0), (0, 1, 1, 1, 1, 1, 1)):
        one_mode(buffer, make_routing(size, 0.2), which, True)
    buffer.destroy()


@on_ranks(2)
def test_rows_are_reduced_before_the_combine(rank, size):
    """A program adds up the expanded rows of each token itself, and tells the handle that its rows are those of tokens."""
    buffer = new_buffer()
    for sync, copy in ((True, False), (False, True)):
        topk_idx, weights, experts = make_routing(size, 0.2)
        x = torch.randint(-8, 8, (topk_idx.shape[0], HIDDEN)).to(torch.bfloat16)
        recv_x, _, recv_weights, handle, _ = buffer.dispatch(x, topk_idx, weights, num_experts=experts, do_expand=True,
                                                             expert_alignment=16, do_cpu_sync=sync, do_handle_copy=copy)
        tokens = handle.psum_num_recv_tokens_per_scaleup_rank[-1].item()
        rows = handle.recv_src_metadata[:tokens, 2:]
        reduced = torch.zeros(tokens if sync else size * handle.num_max_tokens_per_rank, HIDDEN, dtype=torch.bfloat16)
        for slot in rows.unbind(1):
            reduced[:tokens] += recv_x[slot] * (slot >= 0).unsqueeze(1)
        want = buffer.combine(recv_x, handle)[0]
        handle.do_expand = False
        for _ in range(2):  # the second one has the plan
            out, back, _ = buffer.combine(reduced, handle, topk_weights=None)
            assert back is None and torch.equal(out.float(), x.float() * (topk_idx >= 0).sum(1, keepdim=True))
            assert torch.equal(out, want)
        again, idx, _, same, _ = buffer.dispatch(x, handle=handle)
        assert same is handle and idx.shape == (again.shape[0], topk_idx.shape[1])
        assert torch.equal(buffer.combine(again, handle)[0].float(), x.float() * ranks_of(topk_idx, experts // size, size))
        handle.do_expand = True
        assert torch.equal(buffer.combine(recv_x, handle)[0], want)
        other = buffer.dispatch(x, topk_idx, num_experts=experts)[3]
        other.do_expand = True
        raises(AssertionError, "do_expand dispatch", buffer.combine, again, other)
    buffer.destroy()


def reduced_in_metadata(rank, size):
    """A program adds up the expanded rows of each token itself, all or some, and says so in recv_src_metadata alone."""
    local = 4
    for multiple, sync, alignment in itertools.product((True, False), (True, False), (1, 16)):
        buffer = new_buffer(deep_ep.EPBuffer if sync else deep_ep.ElasticBuffer, allow_multiple_reduction=multiple)
        topk_idx, weights, experts = make_routing(size, 0.2)
        if rank == 0:  # its tokens have one row on each rank: there the expanded rows may be as many as the tokens
            topk_idx = torch.tensor([[local * other for other in range(size)] + [-1] * (TOPK - size)]).repeat(topk_idx.shape[0], 1)
        if alignment == 1 and sync:  # the last rank receives the tokens of rank 0 alone
            topk_idx[topk_idx >= local * (size - 1)] = local * (size - 1) if rank == 0 else -1
        x = torch.randint(-8, 8, (topk_idx.shape[0], HIDDEN)).to(torch.bfloat16)
        given = {"do_handle_copy": False} if isinstance(buffer, deep_ep.EPBuffer) else {}
        recv_x, _, _, handle, _ = buffer.dispatch(x, topk_idx, None, num_experts=experts, do_expand=True,
                                                  expert_alignment=alignment, do_cpu_sync=sync, **given)
        tokens, metadata = handle.psum_num_recv_tokens_per_scaleup_rank[-1].item(), handle.recv_src_metadata
        assert (metadata.shape[0] == recv_x.shape[0]) == (sync and alignment == 1 and rank == size - 1)
        rows = metadata[:tokens, 2:]
        written = rows[rows >= 0]  # the rows between are not: of alignment, and beyond the last
        y = (recv_x.float() * 0.37).to(torch.bfloat16)
        reduced = torch.full((metadata.shape[0], HIDDEN), float("nan"), dtype=torch.bfloat16)
        reduced[:tokens] = ordered_accumulate(torch.where((rows >= 0).unsqueeze(2), y[rows.clamp(min=0)], 0))
        if not torch.isnan(reduced).any():
            assert torch.equal(buffer.combine(y, handle)[0], buffer.combine(y, copy.copy(handle))[0])
        beyond = [None] * size
        dist.all_gather_object(beyond, bool((rows >= metadata.shape[0]).any()))
        if all(beyond) and not CUDA:
            raises(ValueError, "x rows token recv_src_metadata do_expand", buffer.combine, reduced, handle)
        again = copy.copy(handle)  # as a program keeps the original
        again.do_expand = False
        want = buffer.combine(reduced, again)[0]
        assert handle.do_expand and torch.equal(want.isnan(), torch.zeros_like(want, dtype=torch.bool))
        compact = copy.deepcopy(handle)
        compact.recv_src_metadata = metadata.clone()
        compact.recv_src_metadata[:, 2:] = -1
        compact.recv_src_metadata[:, 2] = torch.arange(metadata.shape[0])
        assert torch.equal(buffer.combine(reduced, compact)[0], want)
        backward = metadata.clone()  # other rows, in another column
        backward[:, 2:] = -1
        backward[:tokens, 1 + TOPK] = torch.arange(tokens - 1, -1, -1)
        compact.recv_src_metadata = backward
        flipped = reduced.clone()
        flipped[:tokens] = reduced[:tokens].flip(0)
        assert torch.equal(buffer.combine(flipped, compact)[0], want)
        metadata[:, 2:] = -1  # in place
        metadata[:, 2] = torch.arange(metadata.shape[0])
        assert torch.equal(buffer.combine(reduced, handle)[0], want)
        assert torch.equal(buffer.dispatch(x, handle=handle, do_expand=True)[0][written], recv_x[written])
        buffer.barrier()
        buffer.destroy()


def test_rows_are_reduced_in_the_metadata():
    run(2, reduced_in_metadata)
    run(4, reduced_in_metadata)


def ranks_of(topk_idx, local, size):
    """Ranks that each token goes to, [N, 1]."""
    chosen = torch.zeros(topk_idx.shape[0], size + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(topk_idx < 0, size, topk_idx // local), True)
    return chosen[:, :size].sum(1, keepdim=True)


class Moved(torch.autograd.Function):
    """A dispatch as training writes it: the tensors of the handle are saved, and set again for the backward pass."""

    @staticmethod
    def forward(ctx, x, topk_idx, weights, buffer, experts):
        recv_x, idx, recv_weights, handle, _ = buffer.dispatch(x, topk_idx, weights, num_experts=experts, num_sms=None)
        ctx.fields = [name for name in ("topk_idx", "psum_num_recv_tokens_per_scaleup_rank", "psum_num_recv_tokens_per_expert",
                                        "num_unaligned_recv_tokens_per_expert", "recv_src_metadata", "dst_buffer_slot_idx",
                                        "token_metadata_at_forward", "channel_linked_list", "cached_recv_src_metadata_before_sort")
                      if getattr(handle, name) is not None]
        ctx.buffer, ctx.handle = buffer, handle
        ctx.save_for_backward(*(getattr(handle, name) for name in ctx.fields))
        return recv_x, idx, recv_weights, handle

    @staticmethod
    def backward(ctx, grad_x, _, grad_weights, *rest):
        for name, tensor in zip(ctx.fields, ctx.saved_tensors):
            setattr(ctx.handle, name, tensor)
        grad, weights, _ = ctx.buffer.combine(grad_x.contiguous(), ctx.handle, topk_weights=grad_weights.float().contiguous())
        return grad, None, weights, None, None


@on_ranks(2)
def test_a_handle_is_saved_for_the_backward_pass(rank, size):
    """With the activations kept, and computed again."""
    from torch.utils.checkpoint import checkpoint

    buffer = new_buffer()
    topk_idx, weights, experts = make_routing(size, 0.2)
    for again in (False, True):
        x = torch.randint(-8, 8, (topk_idx.shape[0], HIDDEN)).to(torch.bfloat16).requires_grad_()
        weights = weights.detach().requires_grad_()

        def layer(x, weights):
            rows, idx, scale, handle = Moved.apply(x, topk_idx, weights, buffer, experts)
            assert isinstance(handle, deep_ep.EPHandle)
            return rows.float().sum() + (2 * scale * (idx >= 0)).sum()

        (checkpoint(layer, x, weights, use_reentrant=False) if again else layer(x, weights)).backward()
        assert torch.equal(x.grad, ranks_of(topk_idx, experts // size, size).expand_as(x).to(torch.bfloat16))
        assert torch.equal(weights.grad, 2.0 * (topk_idx >= 0))
    buffer.destroy()


@on_ranks(2)
def test_results_are_kept(rank, size):
    """Any number of results at a time. On GPUs rows of some travel before their number is known, to memory for the worst case."""
    buffer, kept = new_buffer(), []
    for _ in range(5):
        topk_idx, weights, experts = make_routing(size, 0.3)
        x = torch.randn(topk_idx.shape[0], HIDDEN).to(torch.bfloat16)
        got = buffer.dispatch(x, topk_idx, weights, num_experts=experts)
        kept.append((got, [part.clone() for part in got[:3]], buffer.combine(got[0], got[3])[0]))
    large = [got[0].untyped_storage().nbytes() > got[0].nbytes for got, _, _ in kept]
    assert large == [CUDA, CUDA, False, False, False]
    for got, parts, out in kept:
        assert all(torch.equal(part, was) for part, was in zip(got, parts))
        assert len(got[0]) == got[3].num_recv_tokens == int(got[3].psum_num_recv_tokens_per_scaleup_rank[-1])
        assert torch.equal(buffer.combine(got[0], got[3])[0], out)
    del kept[0], got, parts, out
    gc.collect()
    more = buffer.dispatch(x, topk_idx, weights, num_experts=experts)[0]
    assert (more.untyped_storage().nbytes() > more.nbytes) == CUDA


@on_ranks(2)
def test_refusals(rank, size):
    buffer = new_buffer()
    raises(NotImplementedError, "engram_write dispatch", buffer.engram_write, None)
    raises(NotImplementedError, "pp_send torch.distributed", buffer.pp_send, None, 1)
    raises(NotImplementedError, "all_gather all_gather_into_tensor", buffer.all_gather, None)
    with buffer.agrs_new_session(enabled=False):
        pass
    nodes = buffer._comm.nodes
    assert buffer.get_logical_domain_size() == (nodes, size // nodes) == (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks)
    assert buffer.get_theoretical_num_qps(buffer.get_theoretical_num_sms(8, 2)) <= buffer.num_allocated_qps
    topk_idx, weights, experts = make_routing(size, 0)
    x = torch.zeros(topk_idx.shape[0], HIDDEN, dtype=torch.bfloat16)
    raises(AssertionError, "num_experts", buffer.dispatch, x, topk_idx, weights)
    handle = buffer.dispatch(x, topk_idx, weights, num_experts=experts)[3]
    raises(AssertionError, "do_expand", buffer.dispatch, x, handle=handle, do_expand=True)
    raises(AssertionError, "topk_idx", buffer.dispatch, x, topk_idx, handle=handle)
    raises(TypeError, "handle tuple", buffer.combine, x, (1, 2))
    raises(TypeError, "combine x tuple", buffer.combine, (x, None), handle)
    for wrong in (torch.zeros(experts // size), torch.zeros(experts, dtype=torch.int32)):
        raises(ValueError, "cumulative_local_expert_recv_stats torch.int32", buffer.dispatch, x, topk_idx, weights, wrong, experts)
        raises(ValueError, "cumulative_local_expert_recv_stats shape", buffer.dispatch, x, None, weights, wrong, handle=handle)
    raises(TypeError, "previous_event int", buffer.dispatch, x, handle=handle, previous_event=3)
    buffer.destroy()
    buffer.destroy()
    raises(Exception, "freed", buffer.combine, x, handle)


def unequal_most(rank, size, sync, expand):
    """num_max_tokens_per_rank of one rank is less than the tokens of another: the failure, and those of later calls, name it."""
    buffer = new_buffer()
    topk_idx, weights, experts = make_routing(size, 0)
    x, tokens = torch.zeros(topk_idx.shape[0], HIDDEN, dtype=torch.bfloat16), topk_idx.shape[0] - (5 if rank else 0)
    routing = {"num_experts": experts, "num_max_tokens_per_rank": tokens, "do_cpu_sync": sync, "do_expand": expand}

    def complete():
        for _ in range(3):  # the rank with more tokens learns it in a later call, on GPUs both may
            buffer.dispatch(x[:tokens], topk_idx[:tokens], weights[:tokens], **routing)
            with contextlib.suppress(epkit.Error):  # which has the words of the library alone
                torch.cuda.synchronize() if CUDA else buffer._comm.synchronize()

    words = "num_max_tokens_per_rank same ranks least"
    raises(epkit.Error, words, complete)
    raises(epkit.Error, words, complete)
    dist.barrier()  # a rank that has not learned it yet would see the other one leave instead


@on_ranks(2)
def test_do_cpu_sync_differs(rank, size):
    buffer = new_buffer()
    topk_idx, weights, experts = make_routing(size, 0)
    x = torch.zeros(topk_idx.shape[0], HIDDEN, dtype=torch.bfloat16)

    def complete():
        for _ in range(3):  # on GPUs a rank that does not wait learns it in a later call
            buffer.dispatch(x, topk_idx, weights, num_experts=experts, num_max_tokens_per_rank=topk_idx.shape[0],
                            do_cpu_sync=rank == 0)
            with contextlib.suppress(epkit.Error):
                torch.cuda.synchronize() if CUDA else buffer._comm.synchronize()

    # On GPUs within a node the ranks need not agree on it, but those that made a call have the same number of tokens.
    raises(epkit.Error, "do_cpu_sync same ranks", complete)
    dist.barrier()


def test_num_max_tokens_per_rank_differs():
    for sync in (True, False):
        for expand in (True, False):
            run(2, unequal_most, sync, expand)


def as_its_test_does(rank, size, port):
    """The surroundings of DeepEP's own test: its init_dist, bfloat16 as the default type, inference mode, measurements."""
    from deep_ep.utils.envs import dist_print, init_dist
    from deep_ep.utils.testing import bench_kineto

    os.environ["MASTER_PORT"] = str(port)
    with torch.inference_mode():
        assert init_dist(rank, size, seed=9)[:2] == (rank, size)
        buffer = new_buffer(deterministic=True)
        one_mode(buffer, make_routing(size, 0.1), (1, 128, 1, 2, 1, 1, 1), True)
        for precise in (False, True):
            scores = get_unbalanced_scores(256, 8 * size, size, 2, 1.5, precise)
            assert scores.shape == (256, 8 * size) and scores.dtype == torch.float32
        topk_idx, _, experts = make_routing(size, 0.1)
        x = torch.zeros(topk_idx.shape[0], HIDDEN)
        handle = buffer.dispatch(x, topk_idx, num_experts=experts)[3]
        times = bench_kineto(lambda: buffer.dispatch(x, handle=handle), ("dispatch_impl", "dispatch_copy_epilogue_impl"), num_tests=2)
        assert len(times) == 2 and min(times) > 0
        dist_print("", once_in_node=True)
        buffer.destroy()
        dist.destroy_process_group()


def test_as_deepep_tests_it():
    need_devices(2)  # its group is NCCL
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run(2, as_its_test_does, port, group=False)

# SPDX-License-Identifier: Apache-2.0
"""Names, arguments, defaults and results of deep_ep, as programs written for DeepEP use them."""
import copy
import gc
import inspect
import pickle
import weakref

import deep_ep
import deep_ep.utils
import deep_ep_cpp
import nixl_ep
import torch
import torch.distributed as dist
from deep_ep.utils.math import calc_diff
from ranks import on_ranks, raises

# Parameters in order with DeepEP's defaults; "!" stands for none.
SIGNATURES = {
    deep_ep.Config: "num_sms=20 num_max_nvl_chunked_send_tokens=6 num_max_nvl_chunked_recv_tokens=256 "
                    "num_max_rdma_chunked_send_tokens=6 num_max_rdma_chunked_recv_tokens=256",
    deep_ep.Config.get_nvl_buffer_size_hint: "self=! hidden_bytes=! num_ranks=!",
    deep_ep.Config.get_rdma_buffer_size_hint: "self=! hidden_bytes=! num_ranks=!",
    deep_ep.Buffer: "group=None num_nvl_bytes=0 num_rdma_bytes=0 low_latency_mode=False num_qps_per_rank=24 "
                    "allow_nvlink_for_low_latency_mode=True allow_mnnvl=False explicitly_destroy=False "
                    "enable_shrink=False comm=None",
    deep_ep.Buffer.set_num_sms: "new_num_sms=!",
    deep_ep.Buffer.get_low_latency_rdma_size_hint: "num_max_dispatch_tokens_per_rank=! hidden=! num_ranks=! num_experts=!",
    deep_ep.Buffer.get_dispatch_config: "num_ranks=!",
    deep_ep.Buffer.get_combine_config: "num_ranks=!",
    deep_ep.Buffer.get_local_buffer_tensor: "self=! dtype=! size=None offset=0 use_rdma_buffer=False",
    deep_ep.Buffer.get_dispatch_layout: "self=! topk_idx=! num_experts=! previous_event=None async_finish=False "
                                        "allocate_on_comm_stream=False",
    deep_ep.Buffer.dispatch: "self=! x=! handle=None num_tokens_per_rank=None num_tokens_per_rdma_rank=None "
                             "is_token_in_rank=None num_tokens_per_expert=None topk_idx=None topk_weights=None "
                             "expert_alignment=1 num_worst_tokens=0 config=None previous_event=None async_finish=False "
                             "allocate_on_comm_stream=False",
    deep_ep.Buffer.internode_dispatch: "self=! x=! handle=None num_tokens_per_rank=None num_tokens_per_rdma_rank=None "
                                       "is_token_in_rank=None num_tokens_per_expert=None topk_idx=None topk_weights=None "
                                       "expert_alignment=1 config=None previous_event=None async_finish=False "
                                       "allocate_on_comm_stream=False",
    deep_ep.Buffer.combine: "self=! x=! handle=! topk_weights=None bias=None config=None previous_event=None "
                            "async_finish=False allocate_on_comm_stream=False",
    deep_ep.Buffer.clean_low_latency_buffer: "self=! num_max_dispatch_tokens_per_rank=! hidden=! num_experts=!",
    deep_ep.Buffer.low_latency_dispatch: "self=! x=! topk_idx=! num_max_dispatch_tokens_per_rank=! num_experts=! "
                                         "cumulative_local_expert_recv_stats=None dispatch_wait_recv_cost_stats=None "
                                         "use_fp8=True round_scale=False use_ue8m0=False async_finish=False "
                                         "return_recv_hook=False",
    deep_ep.Buffer.low_latency_combine: "self=! x=! topk_idx=! topk_weights=! handle=! use_logfmt=False zero_copy=False "
                                        "async_finish=False return_recv_hook=False out=None "
                                        "combine_wait_recv_cost_stats=None overlap=False packed_recv_count=None "
                                        "comp_signal=None block_m=64 threshold=0 num_sms=3",
    deep_ep.Buffer.low_latency_update_mask_buffer: "self=! rank_to_mask=! mask=False",
    deep_ep.Buffer.low_latency_query_mask_buffer: "self=! mask_status=!",
    deep_ep.Buffer.low_latency_clean_mask_buffer: "self=!",
    deep_ep.Buffer.get_next_low_latency_combine_buffer: "self=! handle=!",
    deep_ep.ElasticBuffer: "group=! num_bytes=None num_cpu_bytes=0 num_max_tokens_per_rank=0 hidden=0 num_topk=0 "
                           "use_fp8_dispatch=False deterministic=False allow_hybrid_mode=True allow_multiple_reduction=True "
                           "prefer_overlap_with_compute=True sl_idx=3 num_allocated_qps=0 num_cpu_timeout_secs=300 "
                           "num_gpu_timeout_secs=100 explicitly_destroy=False",
    deep_ep.ElasticBuffer.get_buffer_size_hint: "group=! num_max_tokens_per_rank=! hidden=! num_topk=0 "
                                                "use_fp8_dispatch=False allow_hybrid_mode=True "
                                                "allow_multiple_reduction=True",
    deep_ep.ElasticBuffer.barrier: "self=! use_comm_stream=True with_cpu_sync=False sequential=True",
    deep_ep.ElasticBuffer.get_theoretical_num_sms: "self=! num_experts=! num_topk=! num_scaleout_topk=0 rdma_gbs=0 "
                                                   "nvlink_gbs=0 sm_read_gbs=200 sm_write_gbs=50",
    deep_ep.ElasticBuffer.get_theoretical_num_qps: "self=! num_sms=!",
    deep_ep.ElasticBuffer.dispatch: "self=! x=! topk_idx=None topk_weights=None cumulative_local_expert_recv_stats=None "
                                    "num_experts=None num_max_tokens_per_rank=None expert_alignment=None num_sms=0 "
                                    "num_qps=0 previous_event=None previous_event_before_epilogue=None "
                                    "async_with_compute_stream=False allocate_on_comm_stream=False handle=None "
                                    "do_handle_copy=True do_cpu_sync=None do_expand=False do_zero_padding=False "
                                    "use_tma_aligned_col_major_sf=False",
    deep_ep.ElasticBuffer.combine: "self=! x=! handle=! topk_weights=None bias=None num_sms=0 num_qps=0 "
                                   "previous_event=None previous_event_before_epilogue=None "
                                   "async_with_compute_stream=False allocate_on_comm_stream=False",
    deep_ep.EPBuffer: "group=! num_bytes=None num_max_tokens_per_rank=0 hidden=0 num_topk=0 use_fp8_dispatch=False "
                      "lb_allocation_plan_or_num_bytes=0 deterministic=False allow_hybrid_mode=True allow_multiple_reduction=True "
                      "prefer_overlap_with_compute=True sl_idx=None num_allocated_qps=0 num_cpu_timeout_secs=300 "
                      "num_gpu_timeout_secs=100 explicitly_destroy=False",
    deep_ep.EPBuffer.get_buffer_size_hint: "group=! num_max_tokens_per_rank=! hidden=! num_topk=0 use_fp8_dispatch=False "
                                           "allow_hybrid_mode=True allow_multiple_reduction=True",
    deep_ep.EPBuffer.barrier: "self=! wait_comm_stream=True with_cpu_sync=False sequential=True context_idx=None",
    deep_ep.EPBuffer.get_theoretical_num_sms: "self=! num_experts=! num_topk=! num_scaleout_topk=0 rdma_gbs=0 nvlink_gbs=0 "
                                              "sm_read_gbs=0 sm_write_gbs=0",
    deep_ep.EPBuffer.dispatch: "self=! x=! topk_idx=None topk_weights=None cumulative_local_expert_recv_stats=None "
                               "num_experts=None num_max_tokens_per_rank=None expert_alignment=None num_sms=0 num_qps=0 "
                               "previous_event=None async_with_compute_stream=False allocate_on_comm_stream=False handle=None "
                               "do_handle_copy=False do_cpu_sync=None do_expand=False do_zero_padding=False "
                               "use_tma_aligned_col_major_sf=False defer_epilogue=False",
    deep_ep.EPBuffer.combine: "self=! x=! handle=! topk_weights=None bias=None num_sms=0 num_qps=0 previous_event=None "
                              "async_with_compute_stream=False allocate_on_comm_stream=False defer_epilogue=False",
    deep_ep.comm.barrier: "buffer=! wait_comm_stream=True with_cpu_sync=False sequential=True context_idx=None",
    deep_ep.EventOverlap: "event=None extra_tensors=None",
    deep_ep.EventOverlap.current_stream_wait: "self=! release_handle=False",
}


def test_signatures():
    for function, wanted in SIGNATURES.items():
        given = []
        for name, parameter in inspect.signature(function).parameters.items():
            assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD, (function, name)
            given.append(f"{name}={'!' if parameter.default is parameter.empty else parameter.default}")
        # Forks append arguments of their own: they come behind.
        assert given[:len(wanted.split())] == wanted.split(), (function, given)


@on_ranks(1)
def test_loads_of_a_gate(rank, size):
    """By construction the other ranks differ by one token, and rank 0 has `ratio` times as many, where the numbers allow."""
    from deep_ep.utils import gate
    torch.manual_seed(1)
    for ranks, local, topk in ((2, 4, 2), (4, 8, 6), (8, 4, 8), (16, 2, 3), (3, 1, 2)):
        for ratio in (1.0, 1.5, 2.0):
            experts = ranks * local
            count = gate.generate_rank_count(997, experts, ranks, topk, ratio)
            assert (count.sum(1) == topk).all() and (count <= local).all()
            chosen = gate.generate_topk_idx(count, 997, experts, ranks, topk)
            assert torch.equal(torch.stack([(chosen // local == one).sum(1) for one in range(ranks)], 1), count.long())
            assert all(len(set(row)) == topk for row in chosen.tolist())
            loads = (count > 0).sum(0)
            assert loads[1:].max() - loads[1:].min() <= 1
            if topk < ranks and ratio * topk < ranks:
                assert abs(loads[0] - ratio * loads[1:].float().mean()) <= ratio + ranks, (ranks, ratio, loads)
            scores = gate.get_precise_unbalanced_scores(997, experts, ranks, topk, ratio)
            assert scores.dtype == torch.float32 and scores.min() >= 0 and scores.max() <= 1
            assert scores.topk(topk, 1).values.min() > 0.9 > scores.topk(topk + 1, 1).values[:, -1].max()
    raises(AssertionError, "ratio 0.5", gate.generate_rank_count, 8, 8, 2, 2, 0.5)
    raises(AssertionError, "rank_count 997 1 in each row", gate.generate_topk_idx, count, 997, experts, ranks, 1)
    random = gate.get_random_unbalanced_scores(2000, 32, 4, 2, 2.0).topk(2, 1).indices // 8
    loads = torch.stack([(random == one).any(1).sum() for one in range(4)]).float()
    assert 1.6 < loads[0] / loads[1:].mean() < 2.4 and gate.get_scores_by_factor(9, 8, 2, 5.0)[:, 4:].max() <= 1


def test_name_of_sglang():
    import deep_ep_v25
    import deep_ep_v25.utils.envs
    from epkit.compat import deep_ep_v25 as own

    assert deep_ep_v25 is deep_ep is own and deep_ep_v25.utils.envs is deep_ep.utils.envs
    assert issubclass(deep_ep_v25.EPBuffer, deep_ep.BufferBase)


def test_names():
    from deep_ep import Buffer, Config, ElasticBuffer, EPHandle, EventHandle, EventOverlap, topk_idx_t
    from deep_ep.buffers import Buffer as other_buffer
    from deep_ep.buffers.elastic import ElasticBuffer as other_elastic
    from deep_ep.buffers.legacy import Buffer as third_buffer
    from deep_ep.buffers.ep import EPBuffer
    from deep_ep.utils.event import EventOverlap as other_event

    import deep_ep._C

    assert other_buffer is Buffer is third_buffer and other_elastic is ElasticBuffer and other_event is EventOverlap
    assert deep_ep.utils.EventHandle is EventHandle is deep_ep_cpp.EventHandle and deep_ep_cpp.Config is Config
    assert deep_ep._C.EventHandle is EventHandle and deep_ep._C.Config is Config and deep_ep._C.is_sm90_compiled() is True
    assert deep_ep._C.topk_idx_t is topk_idx_t and nixl_ep.Config is Config
    assert deep_ep.utils.envs.check_fast_rdma_atomic_support() is False
    assert topk_idx_t is torch.int64 is deep_ep_cpp.topk_idx_t and deep_ep_cpp.is_sm90_compiled() is True
    assert EPBuffer is deep_ep.EPBuffer and deep_ep._C.get_num_tma_alignment() == deep_ep.get_num_tma_alignment() == 32
    assert deep_ep.get_num_rdma_alignment() == 64 and deep_ep.get_num_allocation_alignment() == 2 << 20
    assert EPHandle.__name__ == "EPHandle" and deep_ep.HybridEPBuffer is deep_ep.hybrid_ep_buffer.HybridEPBuffer
    for name in ("align", "calc_diff", "ceil_div", "count_bytes", "per_token_cast_back", "per_token_cast_to_fp8", "safe_div"):
        assert callable(getattr(__import__("deep_ep.utils.math", fromlist=[name]), name))
    config = Config(**{"num_sms": 24, "num_max_nvl_chunked_send_tokens": 8, "num_max_nvl_chunked_recv_tokens": 256,
                       "num_max_rdma_chunked_send_tokens": 16, "num_max_rdma_chunked_recv_tokens": 128})
    assert config.get_nvl_buffer_size_hint(7168 * 2, 8) > 0 == config.get_rdma_buffer_size_hint(7168 * 2, 8)
    for ranks in range(1, 161):
        assert Buffer.get_dispatch_config(ranks).num_sms == Buffer.num_sms == Buffer.get_combine_config(ranks).num_sms
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 288) > 0


def make(rank, size):
    experts = 4 * size
    torch.manual_seed(rank)
    return (torch.randn(10, 512).to(torch.bfloat16), torch.rand(10, experts).topk(3).indices, torch.rand(10, 3), experts)


@on_ranks(2)
def test_as_engines_call_buffer(rank, size):
    """As vLLM, SGLang and Megatron call Buffer: all arguments by name, then by place; a backward pass by saved tensors."""
    buffer = deep_ep.Buffer(dist.group.WORLD, 10**9, 0, low_latency_mode=False, num_qps_per_rank=1, allow_mnnvl=True)
    assert (buffer.rank, buffer.group_size, buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (rank, size, 10**9, 0)
    x, topk_idx, weights, experts = make(rank, size)
    assert buffer.group is dist.group.WORLD and buffer.low_latency_mode is False and buffer.runtime.get_num_rdma_ranks() == buffer._comm.nodes
    assert (buffer.get_comm_stream() is None) is not x.is_cuda  # torch.cuda.stream(None) does nothing
    previous = buffer.capture()
    assert isinstance(previous, deep_ep.EventOverlap) and previous.event is not None
    layout = buffer.get_dispatch_layout(topk_idx=topk_idx, num_experts=experts, previous_event=previous, async_finish=True,
                                        allocate_on_comm_stream=True)
    per_host = type(None) if buffer._comm.nodes == 1 else torch.Tensor
    assert [type(one) for one in layout] == [torch.Tensor, per_host, torch.Tensor, torch.Tensor, deep_ep.EventOverlap]
    assert [one.dtype for one in (layout[0], *layout[2:4])] == [torch.int32, torch.int32, torch.bool]
    result = buffer.dispatch(x=x, handle=None, num_tokens_per_rank=layout[0], num_tokens_per_rdma_rank=layout[1],
                             is_token_in_rank=layout[3], num_tokens_per_expert=layout[2], topk_idx=topk_idx,
                             topk_weights=weights, expert_alignment=1, config=buffer.get_dispatch_config(size),
                             previous_event=layout[4], async_finish=True, allocate_on_comm_stream=True)
    rows, idx, received, counts, handle, event = result
    event.current_stream_wait()
    assert (idx.dtype, received.dtype, type(counts), len(counts)) == (torch.int64, torch.float32, list, experts // size)
    assert isinstance(handle, tuple) and len(handle) == 6 and handle[0].shape == (size, size)
    assert handle[3].shape == (rows.shape[0],) and handle[3].dtype == torch.int32
    assert torch.equal(handle[4], layout[3]) and handle[5].shape == (10, size)
    same = buffer.dispatch(x, None, layout[0], None, layout[3], layout[2], topk_idx, weights, 1, 0, None, None, False, False)
    assert torch.equal(same[0], rows) and same[5].event is None

    class Saved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            ctx.save_for_backward(*handle)
            return buffer.combine(y, handle, None, None, None, None, False, False)[0]

        @staticmethod
        def backward(ctx, grad):
            again = buffer.dispatch(grad.contiguous(), handle=tuple(ctx.saved_tensors))
            assert again[1:5] == (None, None, None, None)
            return again[0]

    leaf = rows.clone().requires_grad_()
    Saved.apply(leaf).float().sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(rows))
    out, sums, event = buffer.combine(x=rows, handle=list(handle), topk_weights=received, config=deep_ep.Config(8),
                                      previous_event=event, async_finish=True, allocate_on_comm_stream=True)
    with event:
        pass
    assert out.shape == x.shape and sums.shape == weights.shape and event.event is not None
    with raises_nothing(deep_ep.Buffer.set_num_sms, deep_ep.Buffer.num_sms):
        assert buffer.combine(rows, handle)[0].shape == x.shape


class raises_nothing:
    """Calls function(argument), and puts the class back as it was."""

    def __init__(self, function, argument):
        self._before = deep_ep.Buffer.num_sms, deep_ep.Buffer._num_sms_set
        function(argument)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        deep_ep.Buffer.num_sms, deep_ep.Buffer._num_sms_set = self._before


@on_ranks(2)
def test_as_engines_decode(rank, size):
    """As vLLM and SGLang decode: hooks and events, `out`, scales of two kinds, arguments of an overlap that is off."""
    buffer = deep_ep.Buffer(group=dist.group.WORLD, num_nvl_bytes=0, num_rdma_bytes=1 << 30, low_latency_mode=True,
                            num_qps_per_rank=4, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False,
                            explicitly_destroy=True)
    x, topk_idx, weights, experts = make(rank, size)
    buffer.clean_low_latency_buffer(16, 512, experts)
    want = (x.float() * weights.sum(1, keepdim=True))
    for hooked, fp8, ue8m0 in ((True, True, False), (True, True, True), (False, False, False)):
        packed, count, handle, event, hook = buffer.low_latency_dispatch(
            x, topk_idx, 16, experts, use_fp8=fp8, round_scale=ue8m0, use_ue8m0=ue8m0, x_global_scale=torch.ones(1),
            async_finish=not hooked, return_recv_hook=hooked)
        hook() if hooked else event.current_stream_wait()
        assert (hook is None) is not hooked and (event.event is None) is hooked
        assert isinstance(packed, tuple) is fp8 and count.shape == (experts // size,) and count.dtype == torch.int32
        assert isinstance(handle, tuple) and handle[2:] == (16, 512, experts) and handle[1].dtype == torch.int64
        rows = packed[0] if fp8 else packed
        assert rows.shape == (experts // size, 16 * size, 512)
        if fp8:
            assert packed[1].dtype == (torch.int32 if ue8m0 else torch.float32)
            assert packed[1].shape[2] == (1 if ue8m0 else 4) and packed[1].stride(1) == 1
            scales = packed[1].clone(memory_format=torch.contiguous_format)
            if ue8m0:
                scales = (scales.view(torch.uint8).to(torch.int32) << 23).view(torch.float32)
            rows = (rows.float().unflatten(2, (4, 128)) * scales.unsqueeze(3)).flatten(2).to(torch.bfloat16)
        out = torch.empty_like(x)
        got, event, hook = buffer.low_latency_combine(
            rows, topk_idx, weights, tuple(handle), async_finish=not hooked, zero_copy=False, return_recv_hook=hooked, out=out,
            overlap=False, packed_recv_count=count, comp_signal=torch.zeros(8, dtype=torch.int32), block_m=64, threshold=2,
            num_sms=3)
        hook() if hooked else event.current_stream_wait()
        assert got is out and calc_diff(got, want) < (9e-4 if fp8 else 1e-5)
    buffer.destroy()
    assert buffer.runtime is None


@on_ranks(2)
def test_as_engines_call_elastic_buffer(rank, size):
    """As vLLM and SGLang call ElasticBuffer, and fields of its handle."""
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=16, hidden=512, num_topk=3,
                                   use_fp8_dispatch=False, allow_hybrid_mode=False, sl_idx=0, num_allocated_qps=1,
                                   prefer_overlap_with_compute=False, explicitly_destroy=True)
    assert (buffer.rank_idx, buffer.num_ranks, buffer.num_max_tokens_per_rank) == (rank, size, 16)
    assert buffer.num_bytes % (2 << 20) == 0 and buffer.num_bytes >= size * 16 * 512 * 2
    x, topk_idx, weights, experts = make(rank, size)
    sms = buffer.get_theoretical_num_sms(experts, 3)
    for expand, sync in ((False, True), (True, True), (False, False), (True, False)):
        rows, idx, received, handle, event = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=weights, num_experts=experts, num_max_tokens_per_rank=16, expert_alignment=8,
            num_sms=sms, num_qps=buffer.get_theoretical_num_qps(sms), use_tma_aligned_col_major_sf=False, do_cpu_sync=sync,
            do_expand=expand, async_with_compute_stream=False)
        assert event.event is None and isinstance(event, deep_ep.EventOverlap) and isinstance(handle, deep_ep.EPHandle)
        n = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        assert (idx is None) is expand and received.dim() == (1 if expand else 2)
        assert handle.recv_src_metadata.shape[1] == 2 + 3 and handle.psum_num_recv_tokens_per_expert.shape == (experts // size,)
        assert len(handle.num_recv_tokens_per_expert_list) == (experts // size if sync else 0)
        assert (handle.num_experts, handle.expert_alignment, handle.num_max_tokens_per_rank) == (experts, 8, 16)
        assert handle.do_expand is expand and torch.equal(handle.topk_idx, topk_idx) and handle.topk_idx is not topk_idx
        if not expand:
            assert rows.shape[0] == (n if sync else 16 * size)
        assert handle.num_recv_tokens == (n if sync else 16 * size) and handle.dst_buffer_slot_idx.shape == (10, 3)
        handle.recv_src_metadata = handle.recv_src_metadata[:n]  # a program may put its own there
        assert handle.recv_src_metadata.shape == (n, 2 + 3) and not hasattr(handle, "recv_src")
        out, _, event = buffer.combine(rows, handle=handle, topk_weights=received, num_sms=sms)
        ranks = buffer._comm.layout(topk_idx, experts)[2].sum(1, keepdim=True)
        assert event.event is None and torch.equal(out.float(), x.float() * ranks) if not expand else out.shape == x.shape
    buffer.barrier(use_comm_stream=False, with_cpu_sync=True)
    buffer.destroy()


@on_ranks(2)
def test_copies_and_pickles(rank, size):
    """A copy of what belongs to this process is the thing itself; pickles are refused by name."""
    buffer = deep_ep.Buffer(dist.group.WORLD)
    x, topk_idx, weights, experts = make(rank, size)
    layout = buffer.get_dispatch_layout(topk_idx, experts)
    rows, _, _, _, handle, _ = buffer.dispatch(x, None, *layout[:2], layout[3], layout[2], topk_idx, weights)
    for twin in (copy.copy(handle), copy.deepcopy(handle), tuple(handle), [*handle]):
        assert len(twin) == 6 and [one.dtype for one in twin] == [torch.int32] * 4 + [torch.bool, torch.int32]
        assert all(a is b for a, b in zip(twin, handle)) and twin[-1] is handle[5] and twin[1:3] == type(twin)(handle)[1:3]
    for twin in (copy.copy(handle), copy.deepcopy(handle)):
        assert twin.plan is handle.plan and torch.equal(buffer.combine(rows, twin)[0], buffer.combine(rows, handle)[0])
    for thing in (handle, handle.plan, buffer._comm, handle.plan._native, buffer._comm._native):
        raises(TypeError, "cannot pickle" if "_C" in type(thing).__module__ else "pickled communicator", pickle.dumps, thing)
    assert torch.equal(pickle.loads(pickle.dumps(handle[0])), handle[0])  # a tensor stays a tensor
    again = type(handle)(handle)  # as programs make a tuple of the same type
    assert all(a is b for a, b in zip(again, handle)) and torch.equal(buffer.combine(rows, again)[0], buffer.combine(rows, handle)[0])
    for kept in (lambda handle: handle, tuple, lambda handle: handle[0].detach()):
        again = buffer.dispatch(x, None, *layout[:2], layout[3], layout[2], topk_idx, weights)[4]
        plan, part = weakref.ref(again.plan), kept(again)
        del again
        gc.collect()
        assert plan() is not None
        del part
        assert plan() is None, "handles are not forgotten"


class Kernel:
    """A kernel in a profile of torch, with what every version has."""

    def __init__(self, name, start, microseconds):
        self.name, self.time_range, self.start, self.elapsed_us = name, self, start, lambda: microseconds


def test_times_of_kernels():
    """As DeepEP: the mean of each name, 0 where no kernel ran; copies that epkit does not make count a little."""
    from deep_ep.utils.testing import _seconds as seconds

    ran = [Kernel("void epkit::dispatch_rows(int)", 30, 40.0), Kernel("void epkit::dispatch_rows(int)", 10, 20.0),
           Kernel("my_dispatch", 20, 9.0), Kernel("triton_add", 40, 5.0)]
    for name, want in (("dispatch_impl", 3e-5), ("dispatch", 3e-5), ("triton_add", 5e-6), ("my_dispatch", 9e-6), ("nowhere", 0)):
        assert abs(seconds(ran, name, 1) - want) < 1e-12, name
        assert seconds([], name, 1) == 0 and seconds([], name, 2) == [0, 0]
    assert [round(one * 1e6) for one in seconds(ran, "dispatch", 2)] == [20, 40]
    assert 0 < seconds(ran, "combine_reduce_epilogue_impl", 1) < 1e-6

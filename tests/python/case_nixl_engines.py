# SPDX-License-Identifier: Apache-2.0
"""nixl_ep below the elastic parts of vLLM, SGLang and FlashInfer: their own files, from their wheels (long tier)."""
import os
import signal
import sys
import threading
import time
import types
from unittest import mock

import case_nixl
import nixl_ep
import torch
import torch.distributed as dist
import wheels
from case_members import store_of
from case_nixl import LOCAL, M, MOST_RANKS, TOPK, inputs, step, together
from ranks import run

HIDDEN = 2048  # which engines know
FUSED = "vllm.model_executor.layers.fused_moe."
VLLM = ("vllm.distributed.device_communicators.base_device_communicator", FUSED + "modular_kernel", FUSED + "topk_weight_and_reduce",
        "vllm.distributed.device_communicators.all2all", FUSED + "prepare_finalize.nixl_ep")
SGLANG = [f"sglang.srt.{name}" for name in ("layers.moe.token_dispatcher.base", "layers.moe.utils", "layers.moe.token_dispatcher.deepep",
                                            "elastic_ep.elastic_ep", "layers.moe.token_dispatcher.nixl")]


class Engine:
    """What step() calls. victim: "dispatch" or "combine", in which this rank is killed."""
    victim = None

    def between(self, call):
        if self.victim == call:
            self.store.set("killed", str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    def loose(self, seed):
        """A step whose results depend on when a rank is killed."""
        x, idx, weights = inputs(self.rank, seed)
        rows, count, *_ = self.dispatch(x, idx, M, LOCAL, torch.zeros(LOCAL, dtype=torch.int32))
        self.combine(rows, idx, weights, None)

    def recover(self, live, seed):
        for one in (seed, seed + 1):
            self.loose(one)
        step(self, live, seed + 2)
        print(f"# {time.monotonic() - float(self.store.get('killed')):.3f} s from a kill to a good step")


class Vllm(Engine):
    def __init__(self, wheel, rank, store, size, epoch):
        case_nixl.HIDDEN = HIDDEN
        _, _, self.reduce, self.all2all, layer = wheel.imported()
        self.rank, self.store, self.begun = rank, store, time.monotonic()
        layer.dbo_current_ubatch_id, layer.dbo_enabled, layer.moe_kernel_quantize_input = lambda: 0, lambda: False, lambda x, *_: (x, None)
        self.quant = types.SimpleNamespace(a1_scale=None, a2_scale=None, block_shape=None, quant_dtype=None, per_act_token_quant=False)
        self.buffer = self.manager(size, epoch).get_handle({"max_num_tokens_per_dp_rank": M, "token_hidden_size": HIDDEN,
                                                            "num_local_experts": LOCAL})
        self.layer = layer.NixlEPPrepareAndFinalize(self.buffer, M, self.now.max_num_ep_ranks, LOCAL * self.now.max_num_ep_ranks)

    def manager(self, size, epoch):
        config = types.SimpleNamespace(enable_elastic_ep=True, elastic_ep_max_dp_size=MOST_RANKS, data_parallel_size=size)
        self.all2all.get_current_vllm_config = lambda: types.SimpleNamespace(parallel_config=config)
        group = types.SimpleNamespace(rank=lambda: self.rank, size=lambda: size)
        self.now = self.all2all.NixlEPAll2AllManager(group, types.SimpleNamespace(store=dist.PrefixStore(f"epoch-{epoch}", self.store)))
        return self.now

    def dispatch(self, x, idx, most, experts, cumulative_local_expert_recv_stats, **_):
        hook, receive = self.layer.prepare_async(x, None, idx, 0, None, False, self.quant)
        self.between("dispatch")
        hook()
        rows, _, meta, _, _ = receive()
        return rows, cumulative_local_expert_recv_stats.copy_(meta.expert_num_tokens), None, None, None

    def combine(self, y, idx, weights, handle, **_):
        out = torch.empty(len(idx), HIDDEN, dtype=torch.bfloat16)
        hook, _ = self.layer.finalize_async(out, y, weights, idx, False, self.reduce.TopKWeightAndReduceDelegate())
        self.between("combine")
        hook()
        return out, None, None


def staged(manager, stream):
    """In a thread, whose current device is its own."""
    if stream is not None:
        torch.cuda.set_device(stream.device)
    manager.stage_ep_size()


def vllm(rank, size, wheel, victim):
    """2 ranks, then 4: a thread connects the new ones, which warm up by themselves. Process 4 takes the place of rank 1, which is
    killed. Then all begin again, and 2 go."""
    store = store_of(rank)
    if rank == 4:
        store.wait(["gone"])
    engine = Vllm(wheel, rank % 3 if rank == 4 else rank, store, 2 if rank < 2 else 4, 2 if rank < 2 else rank // 4)
    if rank < 2:
        step(engine, range(2), 1)
        thread = threading.Thread(target=staged, args=(engine.manager(4, 0), engine.buffer.get_comm_stream()))
        thread.start()
        for seed in range(2, 30):
            step(engine, range(2), seed)
        thread.join()
        step(engine, range(2), 1)
        engine.now.commit_ep_size()
    elif rank < 4:
        with engine.now.mask_remote_ranks():
            for seed in range(5):
                step(engine, [rank], seed)
    if rank < 4:
        for seed in (30, 31):
            step(engine, range(4), seed)
        assert not engine.now.query_fault()
        engine.victim = victim if rank == 1 else None
        engine.recover((0, 2, 3), 32)
        assert engine.now.query_fault() and engine.now.query_active_mask().tolist() == [0, 1, 0, 0]
        engine.buffer.disconnect_ranks([1])
        step(engine, (0, 2, 3), 35)
        store.set("gone", b"")
        engine.manager(4, 1)
        engine.buffer.set_tcp_store_group(engine.now.tcp_store_group.store)
        engine.buffer.connect_ranks([1])
    step(engine, range(4), 36)
    print(f"# {time.monotonic() - engine.begun:.3f} s from admission to the first step" if rank == 4 else "#")
    engine.now.clean_buffers()
    step(engine, range(4), 37)
    together(store, 4, "large")
    if engine.rank < 2:
        engine.manager(2, 2).commit_ep_size()
        step(engine, range(2), 38)
    together(store, 4, "end", here=rank == 0)


class Sglang(Engine):
    """Ranks 0 and 1 are launched, the others join."""

    def __init__(self, wheel, rank, store):
        sys.modules["msgspec"] = types.SimpleNamespace(Struct=type("Struct", (), {"__init_subclass__": classmethod(lambda *_, **__: None)}))
        case_nixl.HIDDEN = HIDDEN
        *_, utils, _, elastic, nixl = wheel.imported(**{"srt.utils": dict.fromkeys(("is_npu", "is_hip", "is_cuda"), lambda: False)})
        self.rank, self.store, self.state = rank, store, elastic.ElasticEPStateManager
        cohort = [dist.new_group([first, first + 1]) for first in (0, 2)][rank // 2]
        parallel = types.SimpleNamespace(max_world_size=MOST_RANKS, max_ep_size=MOST_RANKS, ep_join_rank_offset=rank // 2 * 2, tp_size=2,
                                         elastic_ep_initial_size=2)
        moe = types.SimpleNamespace(elastic_ep_backend="nixl", moe_a2a_backend="nixl", is_ep_joiner=rank > 1, ep_join_mode="scale")
        elastic.get_parallel = nixl.get_parallel = lambda: parallel
        elastic.get_exec = lambda: types.SimpleNamespace(moe=moe)
        resources, nixl.deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = types.SimpleNamespace(buffers={}), False
        nixl.get_resources, nixl.get_global_tcp_store, nixl.get_is_extend_in_batch = lambda: resources, lambda: store, lambda: False
        nixl.envs.SGLANG_NIXL_EP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get = lambda: M
        with mock.patch.object(dist, "get_world_size", lambda: 2):
            self.state.init(None)
        self.dispatcher = nixl.NixlEPDispatcher(cohort, TOPK, num_experts=2 * LOCAL, num_local_experts=LOCAL, hidden_size=HIDDEN,
                                                deepep_mode=utils.DeepEPMode.LOW_LATENCY, return_recv_hook=True)

    def dispatch(self, x, idx, most, experts, cumulative_local_expert_recv_stats, **_):
        self.dispatcher.dispatch_a(x, types.SimpleNamespace(topk_weights=None, topk_ids=idx.to(torch.int32)))
        self.between("dispatch")
        got = self.dispatcher.dispatch_b()
        return got.hidden_states, cumulative_local_expert_recv_stats.copy_(got.masked_m), None, None, None

    def combine(self, y, idx, weights, handle, **_):
        self.dispatcher.combine_a((y, idx, weights))
        self.between("combine")
        return self.dispatcher.combine_b(), None, None


def sglang(rank, size, wheel, victim):
    """2 ranks, then 4, of which one is killed: the others see it in the state of SGLang, and go on."""
    store = store_of(rank)
    engine = Sglang(wheel, rank, store)
    if rank < 2:
        step(engine, range(2), 1)
        assert engine.state.request_scale(4) and engine.state.begin_scale()
    engine.state.mark_configuring_data_plane()
    engine.state.on_scale(2, 4)
    step(engine, range(4), 2)
    engine.state.commit_scale()
    engine.state.instance().reset()
    step(engine, range(4), 3)
    assert engine.state.instance().is_active_equal_last() and engine.state.get_effective_ep_size() == 4
    engine.victim = victim if rank == 2 else None
    engine.recover((0, 1, 3), 4)
    assert engine.state.instance().active_ranks.tolist() == [1, 1, 0, 1, 0, 0] and not engine.state.instance().is_active_equal_last()
    together(store, 3, "end", here=rank == 0)


class Flashinfer(Engine):
    """The fleet of FlashInfer, which would load the nixl_ep that its build puts beside it."""

    def __init__(self, rank, store, size, *knobs):
        from flashinfer import moe_ep
        from flashinfer.moe_ep.backends.split.comm.nixl_ep import fleet
        fleet._require_built, fleet._load_nixl_ep, fleet.validate_arch_for_backend = lambda _: None, lambda: nixl_ep, lambda _: None
        case_nixl.HIDDEN = HIDDEN
        wheels.without_cuda()
        self.api, self.rank, self.store, self.begun = moe_ep, rank, store, time.monotonic()
        params = moe_ep.FleetParams(num_experts=LOCAL * MOST_RANKS, max_tokens_per_rank=M, token_hidden_size=HIDDEN)
        knobs = (moe_ep.FleetAlgoKnobTopologyCapacity(MOST_RANKS), moe_ep.FleetAlgoKnobFaultTolerance(timeout_ms=20000), *knobs)
        self.fleet = fleet.NixlEpFleet(self.bootstrap(size), params, knobs)

    def bootstrap(self, size):
        return self.api.BootstrapConfig(world_size=size, rank=self.rank, tcp_store=self.store)

    def dispatch(self, x, idx, most, experts, cumulative_local_expert_recv_stats, return_recv_hook=False, **_):
        self.weights = torch.empty(idx.shape)
        knobs = [self.api.HandleAlgoKnobTopKWeights(self.weights)] + [self.api.HandleAlgoKnobSplitOperation()] * return_recv_hook
        self.handle = self.fleet.create_handle(self.api.HandleParams(idx.to(torch.int32)), knobs)
        got = self.handle.dispatch(self.api.DispatchInputParams(x=[x]))
        self.between("dispatch")

        def finish():
            self.handle.complete()
            cumulative_local_expert_recv_stats.copy_(got.expert_counts)

        if not return_recv_hook:
            finish()
        rows = got.expert_tensors if got.expert_scales is None else (got.expert_tensors, got.expert_scales)
        return rows, cumulative_local_expert_recv_stats, None, None, finish

    def combine(self, y, idx, weights, handle, **_):
        self.weights.copy_(weights)
        out = torch.empty(len(idx), HIDDEN, dtype=torch.bfloat16)
        assert self.handle.combine(self.api.CombineInputParams(x=[y], out=out)).x is out
        self.between("combine")
        return out, None, self.handle.complete


def flashinfer(rank, size, victim):
    """4 ranks, of which rank 3 is killed and left out, until process 4 takes its place. Then 2 ranks with fp8."""
    store = store_of(rank)
    dist.destroy_process_group()  # FlashInfer compares sizes with it
    if rank == 4:
        store.wait(["gone"])
    engine = Flashinfer(min(rank, 3), store, 4)
    if rank < 4:
        for hook in (False, True):
            step(engine, range(4), 1, hook=hook)
        assert not engine.fleet.query_fault() and engine.fleet.query_active_mask().tolist() == [1, 1, 1, 1]
        engine.victim = victim if rank == 3 else None
        engine.recover(range(3), 2)
        assert engine.fleet.query_fault() and engine.fleet.reconcile_active_mask().tolist() == [1, 1, 1, 0]
        assert not engine.fleet.query_fault()
        step(engine, range(3), 5)
        engine.fleet.update_topology(engine.bootstrap(3))
        step(engine, range(3), 6)
        store.set("gone", b"")
        engine.fleet.update_topology(engine.bootstrap(4))
    step(engine, range(4), 7, hook=True)
    engine.fleet.clear_faults(readmit=True)
    step(engine, range(4), 8)
    together(store, 4, "left")
    engine.fleet.destroy()
    if engine.rank < 2:
        fp8 = engine.api.FleetAlgoKnobQuantization(frozenset([engine.api.QuantType.FP8E4M3]))
        step(Flashinfer(rank, dist.PrefixStore("fp8", store), 2, fp8), range(2), 9, fp8=True)
    together(store, 4, "end", here=rank == 0)


def test_flashinfer():
    wheels.flashinfer()
    for victim in ("dispatch", "combine"):
        run(5, flashinfer, victim, expect=(0, 0, 0, -signal.SIGKILL, 0))


def test_vllm():
    wheel = wheels.Wheel("vllm", VLLM)
    for victim in ("dispatch", "combine"):
        run(5, vllm, wheel, victim, expect=(0, -signal.SIGKILL, 0, 0, 0))


def test_sglang():
    wheel = wheels.Wheel("sglang", SGLANG)
    for victim in ("dispatch", "combine"):
        run(4, sglang, wheel, victim, expect=(0, 0, -signal.SIGKILL, 0))

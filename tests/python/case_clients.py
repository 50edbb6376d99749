# SPDX-License-Identifier: Apache-2.0
"""deep_ep below the files with which vLLM, SGLang, Megatron and DeepSpeed call it, as their releases have them (long tier).

As in case_engines.py an expert multiplies by its number + 1, and all results are exact. Outputs are poisoned before.
"""
import threading
import types

import case_engines
import torch
import torch.distributed as dist
from case_engines import EACH, TOPK, apply_experts, dense, on_device_of, tokens_of
from case_formats import nvfp4_values
from deep_ep.utils.math import per_token_cast_to_fp8
from ranks import CUDA, run
from torch.utils.checkpoint import checkpoint
from wheels import Wheel

HIDDEN, MOST, POISON = 2048, 16, 99  # sizes that engines know
SCALE = 3.0  # the global one of nvfp4, with which 1 and 2 are exact
FUSED = "model_executor.layers.fused_moe."
VLLM = [f"vllm.{name}" for name in (
    "distributed.device_communicators.base_device_communicator", "v1.worker.ubatching", FUSED + "modular_kernel",
    FUSED + "topk_weight_and_reduce", "distributed.device_communicators.all2all", FUSED + "prepare_finalize.deepep_ht",
    FUSED + "prepare_finalize.deepep_ll", FUSED + "prepare_finalize.deepep_v2")]
SGLANG = [f"sglang.srt.layers.moe.{name}" for name in ("token_dispatcher.base", "utils", "token_dispatcher.deepep",
                                                       "token_dispatcher.deepep_v2")]


def values_of(rows, scales):
    """bfloat16 rows of what a dispatch has received: bfloat16, or fp8 with scales, float32, ue8m0 in int32 or bytes, or nvfp4."""
    if scales is None:
        return rows
    if rows.dtype == torch.uint8:
        return nvfp4_values(rows, scales, SCALE).to(torch.bfloat16)
    if scales.dtype != torch.float32:
        scales = scales.clone(memory_format=torch.contiguous_format)  # contiguous() keeps strides of one column
        scales = (scales.view(torch.uint8).to(torch.int32) << 23).view(torch.float32)
    return (rows.float().unflatten(-1, (scales.shape[-1], -1)) * scales.contiguous().unsqueeze(-1)).flatten(-2).to(torch.bfloat16)


def batched(rows, counts, first):
    """What a batched kernel gives, which looks at the first counts[l] rows of expert l alone."""
    y = torch.full(rows.shape, float("nan"), dtype=torch.bfloat16)
    for expert, count in enumerate(counts.tolist()):
        y[expert, :count] = rows[expert, :count] * (first + expert + 1)
    return y


class Stream:
    """Also an event, without GPUs; each thread has a current one."""
    current, own = threading.local(), None

    def __init__(self, *_):
        self.wait_event = self.wait_stream = self.record = lambda *_: None

    @classmethod
    def now(cls):
        return getattr(cls.current, "stream", cls.own)


# --- vLLM -------------------------------------------------------------------------------------------------------------

PLAIN, FP8, MXFP8 = {}, {"is_block_quantized": True, "quant_dtype": torch.float8_e4m3fn, "block_shape": [128, 128]}, {"quant_dtype": "mxfp8"}
NVFP4 = {"quant_dtype": "nvfp4"}


def quantised(x, *_, quant_dtype=None, **__):
    if quant_dtype == "mxfp8":
        return x.to(torch.float8_e4m3fn), torch.full((len(x), HIDDEN // 32), 127, dtype=torch.uint8)
    return (x, None) if quant_dtype is None else per_token_cast_to_fp8(x)


def vllm_files(wheel):
    """Its modules with what they find in place of the rest of vLLM."""
    platform = types.SimpleNamespace(is_cuda=lambda: False, is_rocm=lambda: False)
    triton = {}
    if CUDA:
        import triton.language

        triton = {"triton": __import__("triton"), "tl": triton.language}
    else:
        torch.Event, torch.cuda.set_stream = Stream, lambda stream: setattr(Stream.current, "stream", stream)
    base, *modules = wheel.imported(**{
        "envs": {"VLLM_DEEPEP_BUFFER_SIZE_MB": 64, "VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE": True, "VLLM_DEEPEP_V2_PREFER_OVERLAP": False,
                 "VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION": False, "VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL": False,
                 "VLLM_DEEPEPLL_NVFP4_DISPATCH": True},
        "platforms": {"current_platform": platform}, "triton_utils": triton,
        FUSED + "utils": {"moe_kernel_quantize_input": quantised, "normalize_batched_scales_shape": lambda scales, _: scales},
        "utils.torch_utils": {"PIN_MEMORY": CUDA, "current_stream": torch.cuda.current_stream if CUDA else Stream.now},
        "utils.math_utils": {"cdiv": lambda a, b: -(-a // b)}, "utils.nccl": {"query_nccl_gin_type": lambda *_, **__: 1}})
    *_, all2all, ht, _, v2 = modules
    parallel = types.SimpleNamespace(enable_fault_tolerance=True)
    all2all.get_current_vllm_config = lambda: types.SimpleNamespace(parallel_config=parallel)
    metadata = types.SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([MOST - 3], device="cpu"))
    v2.get_forward_context = lambda: types.SimpleNamespace(dp_metadata=metadata)
    if not CUDA:
        ht._dbo_record_stream = lambda *_: None
        v2._globalize_recv_topk_idx = lambda idx, psum, first, experts: torch.where(
            (torch.arange(len(idx)).unsqueeze(1) < psum[-1]) & (idx >= 0), idx + first, -1)
    return modules


class Vllm:
    def __init__(self, wheel, rank, size, kind, quant, options):
        case_engines.HIDDEN = HIDDEN
        self.ubatching, modular, reduce, all2all, ht, ll, v2 = vllm_files(wheel)
        self.kind, self.first, self.experts, fp8 = kind, rank * EACH, EACH * size, "block_shape" in quant
        if kind == "ht":
            self.manager = all2all.DeepEPHTAll2AllManager(dist.group.WORLD)
            self.manager.set_num_sms(20)
            self.layer = ht.DeepEPHTPrepareAndFinalize(self.manager.get_handle({}), size, size, self.first)
        elif kind == "ll":
            self.manager = all2all.DeepEPLLAll2AllManager(dist.group.WORLD)
            buffer = self.manager.get_handle({"max_num_tokens_per_dp_rank": MOST, "token_hidden_size": HIDDEN, "num_ep_ranks": size,
                                              "num_global_experts": self.experts, "num_local_experts": EACH})
            self.layer = ll.DeepEPLLPrepareAndFinalize(buffer, MOST, size, fp8)
        else:
            self.manager = all2all.DeepEPV2All2AllManager(dist.group.WORLD)
            buffer = self.manager.get_handle({"num_experts": self.experts, "num_max_tokens_per_rank": MOST, "hidden": HIDDEN,
                                              "num_topk": TOPK, "use_fp8_dispatch": fp8})
            self.layer = v2.DeepEPV2PrepareAndFinalize(buffer, size, size, self.first, self.experts, TOPK, fp8, **options)
        given = dict.fromkeys(("a1_scale", "a2_scale", "a1_gscale", "block_shape", "quant_dtype"))
        given.update(dict.fromkeys(("is_block_quantized", "per_act_token_quant", "is_scale_swizzled"), False), mx_alignment=0)
        given.update(quant, a1_gscale=torch.tensor(SCALE))
        reduction = reduce.TopKWeightAndReduceDelegate() if kind == "ll" else reduce.TopKWeightAndReduceNoOP()
        experts = types.SimpleNamespace(
            quant_config=types.SimpleNamespace(**given), expects_unquantized_inputs=False, finalize_weight_and_reduce_impl=lambda: reduction,
            moe_config=types.SimpleNamespace(moe_parallel_config=None), supports_packed_ue8m0_act_scales=lambda: "ue8m0" in quant)
        self.kernel = modular.FusedMoEKernelModularImpl(self.layer, experts)
        self.layer.post_init_setup(experts)

    def run(self, x, idx, weights, out):
        rows, scales, meta, ids, given = self.kernel._prepare(x, weights, idx, self.experts, None, False)
        rows = values_of(rows, scales) if rows.numel() else rows
        if self.kind == "ll":
            y = batched(rows, meta.expert_num_tokens, self.first)
        else:
            local = torch.where((ids >= self.first) & (ids < self.first + EACH), ids - self.first, -1)
            y = apply_experts(rows, local, torch.where(local >= 0, given, 0), self.first) if rows.numel() else rows.to(torch.bfloat16)
        assert self.kernel._finalize(out, y, x, given, ids, False, None, None) is out

    def two(self, batches, outs):
        """Two micro-batches, in threads of vLLM's contexts."""
        barrier, errors = threading.Barrier(3), []
        compute, comm = (torch.cuda.current_stream(), torch.cuda.Stream()) if CUDA else (Stream(), Stream())
        Stream.own = compute
        contexts = self.ubatching.make_ubatch_contexts(2, compute, comm, [object(), object()], barrier)

        def body(number):
            on_device_of(batches[number][0])
            torch.set_default_device(batches[number][0].device)
            try:
                with contexts[number], torch.inference_mode():
                    self.run(*batches[number], outs[number])
            except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
                errors.append(error)

        threads = [threading.Thread(target=body, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        barrier.wait()
        contexts[0].cpu_wait_event.set()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


@torch.inference_mode()  # in which it runs
def vllm(rank, size, wheel, kind, quant, options):
    engine = Vllm(wheel, rank, size, kind, quant, options)
    for seed in range(4):  # in the second step all tokens go to experts of the first rank
        x, idx, weights = tokens_of(rank, size, 5 + rank if seed else 0, seed, EACH if seed == 1 else None)
        out = torch.full_like(x, POISON)
        engine.run(x, idx, weights, out)
        assert torch.equal(out, dense(x, idx, weights)), (kind, quant, seed)
    for seed in range(3 if kind != "v2" else 0):
        batches = [tokens_of(rank, size, 5 + seed + batch, 10 + 2 * seed + batch) for batch in range(2)]
        outs = [torch.full_like(batch[0], POISON) for batch in batches]
        engine.two(batches, outs)
        for batch, out in zip(batches, outs):
            assert torch.equal(out, dense(*batch)), (kind, quant, "two micro-batches", seed)
    if kind == "ll":
        assert not engine.manager.query_fault() and not engine.manager.query_active_mask().any()
        engine.manager.clean_buffers()
        out = torch.full_like(x, POISON)
        engine.run(x, idx, weights, out)
        assert torch.equal(out, dense(x, idx, weights))
    engine.manager.destroy()


def every_vllm(rank, size, wheel):
    for kind, quant in (("ht", PLAIN), ("ht", FP8), ("ll", PLAIN), ("ll", FP8), ("ll", NVFP4), ("ll", {**FP8, "ue8m0": True})):
        vllm(rank, size, wheel, kind, quant, {})
    for quant in (PLAIN, FP8, MXFP8):
        for graph in (False, True):
            vllm(rank, size, wheel, "v2", quant, {"use_cudagraph": graph})


def test_vllm():
    wheel = Wheel("vllm", VLLM)
    for size in (2, 3):
        run(size, every_vllm, wheel)


# --- SGLang -----------------------------------------------------------------------------------------------------------


class Sglang:
    def __init__(self, wheel, rank, size, kind, config):
        case_engines.HIDDEN = HIDDEN
        self.first, self.experts, self.extend = rank * EACH, EACH * size, True
        moe = types.SimpleNamespace(deepep_dispatcher_output_dtype=kind, deepep_v2_mode="direct")
        flags = types.SimpleNamespace(moe=types.SimpleNamespace(deepep_config=config, tbo_enabled=False))
        gemm = {"ENABLE_JIT_DEEPGEMM": True, "DEEPGEMM_SCALE_UE8M0": False, "DEEPGEMM_BLACKWELL": False,
                "DEEPGEMM_NEED_TMA_ALIGNED_SCALES": False}
        no = dict.fromkeys(("is_npu", "is_hip", "get_bool_env_var", "is_flashinfer_available", "is_blackwell"), lambda *_: False)
        _, self.utils, self.v1, self.v2 = wheel.imported(**{
            "srt.utils": {**no, "is_cuda": lambda: CUDA, "get_cuda_version": lambda: (13, 0), "load_json_config": lambda config: config},
            "srt.layers.dp_attention": {"get_is_extend_in_batch": lambda: self.extend},
            "kernels.ops.quantization.fp8_kernel": {"sglang_per_token_group_quant_fp8": lambda x, *_, **__: per_token_cast_to_fp8(x)},
            "srt.runtime_context": {"get_exec": lambda: types.SimpleNamespace(moe=moe), "get_resources": lambda: self.resources,
                                    "get_flags": lambda: flags},
            "srt.layers.deep_gemm_wrapper": gemm})
        self.resources = types.SimpleNamespace(buffers={})
        envs = self.v1.envs
        envs.SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE.get = envs.SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND.get = lambda: False
        envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get = envs.SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get = lambda: MOST
        envs.SGLANG_DEEPEP_V2_NUM_SMS.get = lambda: 0
        if not CUDA:
            torch.cuda.get_device_properties = lambda *_, **__: types.SimpleNamespace(multi_processor_count=132)

    def dispatcher(self, version, kind, **options):
        common = {"group": dist.group.WORLD, "router_topk": TOPK, "num_experts": self.experts, "num_local_experts": EACH,
                  "hidden_size": HIDDEN, "params_dtype": torch.bfloat16}
        if version == 2:
            return self.v2.DeepEPv2Dispatcher(**common, use_fp8_dispatch=kind == "fp8")
        made = self.v1.DeepEPDispatcher(**common, deepep_mode=self.utils.DeepEPMode.AUTO, **options)
        if kind == "nvfp4":
            made.set_quant_config({"input_global_scale": torch.full((EACH,), SCALE)})
        return made

    def experts_of(self, got):
        """What its runners give for each kind of dispatch."""
        name = type(got).__name__
        if name == "DeepEPLLDispatchOutput":
            rows = got.hidden_states.permute(2, 0, 1) if got.hidden_states.dtype == torch.uint8 else got.hidden_states
            y = batched(values_of(rows, got.hidden_states_scale), got.masked_m, self.first)
            return self.v1.DeepEPLLCombineInput(y, got.topk_ids, got.topk_weights)
        if name == "DeepEPNormalDispatchOutput":
            rows, scale = got.hidden_states if isinstance(got.hidden_states, tuple) else (got.hidden_states, got.hidden_states_scale)
            assert all(count % 128 == 0 for count in got.num_recv_tokens_per_expert)
            y = apply_experts(values_of(rows, scale), got.topk_ids, got.topk_weights, self.first)
            return self.v1.DeepEPNormalCombineInput(y, got.topk_ids, got.topk_weights)
        rows = values_of(got.hidden_states, got.hidden_states_scale)
        if not got.is_expanded:
            return self.v2.DeepEPv2CombineInput(apply_experts(rows, got.topk_ids, got.topk_weights, self.first), None)
        y, begin = torch.full(rows.shape, float("nan"), dtype=torch.bfloat16), 0
        for expert, end in enumerate(got.psum_num_recv_tokens_per_expert.tolist()):
            y[begin:end] = rows[begin:end] * (self.first + expert + 1) * got.topk_weights[begin:end].unsqueeze(1)
            begin = -(-end // got.expert_alignment) * got.expert_alignment
        return self.v2.DeepEPv2CombineInput(y, None)


@torch.inference_mode()
def sglang(rank, size, wheel, version, kind, config, options):
    engine = Sglang(wheel, rank, size, kind, config)
    dispatchers = [engine.dispatcher(version, kind, **options) for _ in range(2)]
    for seed in range(8):
        engine.extend = seed in (0, 1, 4, 5)
        x, idx, weights = tokens_of(rank, size, (6 + rank) * (seed % 4 != 1), seed)
        out = dispatchers[0].dispatch(x, types.SimpleNamespace(topk_weights=weights, topk_ids=idx.to(torch.int32)))
        given = engine.experts_of(out)
        if version == 1 and not engine.extend and seed % 2:  # single-batch overlap, whose blocks have been signalled before
            stream, signals = (torch.cuda.Stream if CUDA else Stream)(), torch.full((EACH * -(-MOST * size // 64),), 7, dtype=torch.int32)
            dispatchers[0].set_overlap_args(types.SimpleNamespace(
                stream=stream, wait_event=torch.cuda.current_stream().record_event() if CUDA else None, overlap=True, signal=signals,
                threshold=7, num_sms=3), {"block_m": 64, "threshold": 7})
        got = dispatchers[0].combine(given)
        dispatchers[0].clear_overlap_args()
        assert torch.equal(got, dense(x, idx, weights)), (version, kind, options, seed, type(out).__name__)
    if version == 1 and options.get("return_recv_hook"):  # two batches: the second one is sent while the first one's experts run
        engine.extend = False
        batches = [tokens_of(rank, size, 8, 20 + batch) for batch in range(2)]
        given = []
        for one, (x, idx, weights) in zip(dispatchers, batches):
            one.dispatch_a(x, types.SimpleNamespace(topk_weights=weights, topk_ids=idx))
        for one in dispatchers:
            given.append(engine.experts_of(one.dispatch_b()))
        for one, (x, idx, weights) in zip(dispatchers, batches):
            one.combine_a(given.pop(0))
            assert torch.equal(one.combine_b(), dense(x, idx, weights))


def every_sglang(rank, size, wheel):
    tuned = dict.fromkeys(("normal_dispatch", "normal_combine"), case_engines.Dispatcher.tuned)
    for kind in ("bf16", "fp8", "nvfp4"):
        for config, options in (("", {"async_finish": True, "return_recv_hook": True}), (tuned, {}), ("", {"async_finish": True})):
            sglang(rank, size, wheel, 1, kind, config, options)
        if kind != "nvfp4":
            sglang(rank, size, wheel, 2, kind, "", {})


def test_sglang():
    run(2, every_sglang, Wheel("sglang", SGLANG))


# --- training ---------------------------------------------------------------------------------------------------------


def gradients(rank, size, seed, layer, rtol=0):
    """The layer and its gradients against the dense computation. rtol: of the weights', where they are computed in bfloat16."""
    x, idx, weights = tokens_of(rank, size, (6 + rank) * (seed != 1), seed)
    given = torch.randint(-2, 3, x.shape).to(torch.bfloat16)
    made = []
    for function in (lambda x, weights: layer(x, idx, weights), lambda x, weights: dense(x, idx, weights)):
        leaves = x.clone().requires_grad_(), weights.masked_fill(idx < 0, 0).requires_grad_()
        out = function(*leaves)
        out.backward(given)
        made.append([out.detach(), leaves[0].grad, leaves[1].grad.masked_fill(idx < 0, 0)])
    (out, grad, grad_weights), (dense_out, dense_grad, dense_weights) = made
    assert torch.equal(out, dense_out) and torch.equal(grad, dense_grad) and torch.allclose(grad_weights, dense_weights, rtol, 0), seed


def expanded(rows, weights, counts, first):
    """What experts give for rows that are grouped by them; behind those, anything."""
    ends = torch.as_tensor(counts, device=rows.device).cumsum(0)  # with its device: a thread of autograd has no default one
    expert = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True)
    return rows * ((expert + first + 1) * weights).unsqueeze(1).to(rows.dtype)


def megatron(rank, size, wheel):
    case_engines.HIDDEN = HIDDEN
    (fused,) = wheel.imported(**{"core.utils": {"internal_api": lambda function: function}} if wheel.package == "megatron" else {})
    group, first, experts = dist.group.WORLD, rank * EACH, EACH * size
    fused.set_deepep_num_sms(20)

    def layer(x, idx, weights):
        rows, local, received, counts, handle = fused.fused_dispatch(x, idx, weights, experts, group, *asynchronous)
        assert counts.tolist() == [(local == expert).sum() for expert in range(EACH)]
        y = apply_experts(rows, local, torch.where(local >= 0, received, 0), first)
        return fused.fused_combine(y, group, handle, *asynchronous)[0]

    for seed in range(4):
        asynchronous = (seed > 1, seed > 2)
        gradients(rank, size, seed, layer)

    def hybrid(x, idx, weights):
        probs = torch.zeros(len(x), experts + 1).scatter(1, torch.where(idx < 0, experts, idx), weights)[:, :experts]
        rows, received, none, counts, handle = fused.hybrid_ep_dispatch(x, probs.detach() != 0, probs, group, EACH)
        assert none is None
        return fused.hybrid_ep_combine(expanded(rows, received, counts, first), handle, None, None)

    for seed in range(3):
        gradients(rank, size, seed, hybrid)


def test_megatron():
    wheel = Wheel("megatron-core", ["megatron.core.transformer.moe.fused_a2a"], "--only-binary=:all:", "--python-version=3.12",
                  "--platform=manylinux_2_28_x86_64")  # it wants Python 3.12; this file does not
    for size in (2, 3):
        run(size, megatron, wheel)
    run(2, megatron, Wheel("nemo-automodel", ["nemo_automodel.components.moe.megatron.fused_a2a"]))  # the same calls, grown further


def deepspeed(rank, size, wheel):
    case_engines.HIDDEN = HIDDEN
    (comm,) = wheel.imported()
    exchange = comm.shared_exchange(comm.new_exchange_scope(), dist.group.WORLD, EACH * size, TOPK, HIDDEN, MOST)
    replay = comm.DeepEPCheckpointReplay()

    def layer(x, idx, weights):
        rows, received, made = comm.deepep_dispatch(exchange, x, idx, weights, replay)
        handle = made.last_handle
        return comm.deepep_combine(exchange, expanded(rows, received, handle.num_recv_tokens_per_expert_list, rank * EACH), handle)

    for reentrant in (None, False, True):
        for seed in range(3):
            gradients(rank, size, seed, layer if reentrant is None else lambda x, idx, weights: checkpoint(
                layer, x, idx, weights, use_reentrant=reentrant))
    exchange.release()
    assert exchange.destroyed


def test_deepspeed():
    wheel = Wheel("deepspeed", ["deepspeed.module_inject.auto_ep_comm"], "--no-build-isolation", "--no-binary=:all:")
    for size in (2, 3):
        run(size, deepspeed, wheel)


def torchtitan(rank, size, wheel):
    case_engines.HIDDEN = HIDDEN
    if not CUDA:
        torch.library.impl = lambda library, name, _, own=torch.library.impl: own(library, name, "CPU")
    (deepep,) = wheel.imported()
    deepep.get_buffer(dist.group.WORLD, hidden=HIDDEN, num_max_tokens_per_rank=MOST, num_topk=TOPK)

    def layer(x, idx, weights, **options):
        rows, counts, state = deepep.dispatch_tokens(x, idx, weights, EACH, EACH * size, num_tokens_per_rank=MOST, **options)
        out = deepep.combine_tokens(expanded(rows, torch.ones(len(rows)), counts, rank * EACH), state)
        deepep.sync_combine()
        return out

    for seed in range(3):
        gradients(rank, size, seed, layer, rtol=0.02)
        with torch.no_grad():
            x, idx, weights = tokens_of(rank, size, 6 + rank, 10 + seed)
            assert torch.equal(layer(x, idx, weights, cudagraphable=True), dense(x, idx, weights)), seed


def test_torchtitan():
    wheel = Wheel("torchtitan", ["torchtitan.distributed.deepep.deepep"])
    for size in (2, 3):
        run(size, torchtitan, wheel)

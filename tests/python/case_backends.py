# SPDX-License-Identifier: Apache-2.0
"""Backends of epkit for registries of others, with the real registries."""
import __future__
import ast
import enum
import os
import subprocess
import sys
import types
import typing

import torch
import torch.distributed as dist
from ranks import raises, run
from wheels import archive, flashinfer


def gathered(size, *tensors):
    """Those of all ranks, on the GPU of this one."""
    every = [None] * size
    dist.all_gather_object(every, tensors)
    return [[tensor if tensor is None else tensor.to(tensors[0].device) for tensor in one] for one in every]


def communication(rank, size):
    from flashinfer.moe_ep import BootstrapConfig, MoEEpCommParams, MoEEpCommunication, create_communication

    import epkit.compat.flashinfer as backend

    experts, topk, most, hidden = 4 * size, 3, 12, 64
    params = MoEEpCommParams(num_experts=experts, top_k=topk, max_tokens_per_rank=most, hidden_size=hidden, invalid_expert_id=-7)
    one = create_communication(BootstrapConfig(world_size=size, rank=rank, process_group=dist.group.WORLD), params, "epkit")
    assert isinstance(one, MoEEpCommunication) and type(one) is backend.EpkitCommunication and one.backend_name == "epkit"
    for seed, (dtype, width, scales) in enumerate(((torch.bfloat16, hidden, None), (torch.uint8, 33, torch.uint8), (torch.float16, 8, None),
                                                   (torch.bfloat16, hidden, torch.float32))):
        torch.manual_seed(10 * seed + rank)
        tokens = (12, 5, 0, 9)[(seed + rank) % 4]
        idx = torch.stack([torch.randperm(experts)[:topk] for _ in range(tokens)]) if tokens else torch.zeros(0, topk, dtype=torch.int64)
        idx[torch.rand(idx.shape) < 0.2] = -1
        x = torch.randint(-8, 9, (tokens, width)).to(dtype)
        weights = torch.rand(tokens, topk)
        scale = None if scales is None else torch.randint(0, 99, (tokens, 5)).to(scales)
        stats = torch.full((experts,), float(rank))
        given = {"hidden_states_scale": scale, "runtime_max_tokens_per_rank": None if seed else 12, "eplb_local_stats": stats}
        got = one.dispatch(x, idx.to(torch.int32) if seed % 2 else idx, weights, **given)
        raises(RuntimeError, "no combine", one.dispatch, x, idx, weights)
        every = gathered(size, x, idx, weights, scale)
        here = [(idx // 4 == rank).any(1) for _, idx, _, _ in every]
        n, rows = sum(int(mask.sum()) for mask in here), size * most
        assert got.tokens_per_rank == most and all(len(one) == rows for one in (got.hidden_states, got.topk_ids, got.topk_weights))
        assert torch.equal(got.hidden_states[:n], torch.cat([x[mask] for (x, *_), mask in zip(every, here)]))
        assert got.hidden_states.dtype == dtype and (got.topk_ids[n:] == -7).all()
        want = torch.cat([idx[mask] for (_, idx, _, _), mask in zip(every, here)])
        mine = want // 4 == rank
        assert torch.equal(got.topk_ids[:n].long(), torch.where(mine, want, -7))
        assert torch.equal(got.topk_weights[:n][mine], torch.cat([w[mask] for (_, _, w, _), mask in zip(every, here)])[mine])
        assert scale is None or torch.equal(got.hidden_states_scale[:n], torch.cat([s[mask] for (*_, s), mask in zip(every, here)]))
        assert torch.equal(got.eplb_gathered_stats[:, 0], torch.arange(size).float())
        # Each rank adds up the choices that it has; small integers are exact in any order.
        y = torch.zeros(rows, hidden, dtype=torch.bfloat16)
        y[:n] = mine.sum(1, keepdim=True).to(torch.bfloat16)
        out = torch.empty(tokens, hidden, dtype=torch.bfloat16) if seed == 2 else None
        total = one.combine(y.view(size, most, hidden) if seed % 2 else y, output=out)
        assert torch.equal(total, (idx >= 0).sum(1, keepdim=True).expand(-1, hidden).to(torch.bfloat16)) and (out is None or total is out)
        raises(RuntimeError, "no dispatch", one.combine, y)
    raises(ValueError, "13 tokens 12", one.dispatch, torch.zeros(13, hidden), torch.zeros(13, topk, dtype=torch.int64))
    one.destroy()
    one.destroy()
    raises(RuntimeError, "destroy()", one.dispatch, x, idx, weights)
    wrong = MoEEpCommParams(num_experts=experts, top_k=topk, max_tokens_per_rank=most, hidden_size=hidden, dtype=torch.float32)
    bootstrap = BootstrapConfig(world_size=size, rank=rank, process_group=dist.group.WORLD)
    raises(ValueError, "bfloat16", create_communication, bootstrap, wrong, "epkit")


def test_communication_of_flashinfer():
    """Its registry."""
    flashinfer()
    for size in (2, 3):
        run(size, communication)


def sglang():
    """What of SGLang a dispatcher meets, from its wheel (39 MB): its packages need far more than a CPU has, so their files are
    read one by one, and of most of them the classes and functions that are named."""
    file = archive("sglang")

    def module(name, *only, **context):
        parents = name.split(".")[:-1]
        for n in range(1, len(parents) + 1):
            sys.modules.setdefault(".".join(parents[:n]), types.ModuleType(".".join(parents[:n]))).__path__ = []
        tree = ast.parse(file(name.replace(".", "/") + ".py").read_bytes())
        if only:
            tree.body = [one for one in tree.body if getattr(one, "name", None) in only]
        made = sys.modules[name] = types.ModuleType(name)
        vars(made).update({**vars(typing), **vars(enum), **context, "__name__": name} if only else {})
        exec(compile(tree, name, "exec", flags=__future__.annotations.compiler_flag), vars(made))
        setattr(sys.modules[".".join(parents)], name.split(".")[-1], made)
        return made

    base = module("sglang.srt.layers.moe.token_dispatcher.base")
    standard = module("sglang.srt.layers.moe.token_dispatcher.standard", "StandardDispatchOutput", "StandardCombineInput", **vars(base))
    topk = module("sglang.srt.layers.moe.topk", "TopKOutputFormat", "StandardTopKOutput", torch=torch)
    return module, base, standard, topk


def dispatcher(rank, size):
    _, base, standard, topk = sglang()
    import epkit.compat.sglang as backend

    experts, most = 4 * size, 9
    counts = None
    one = backend.EpkitDispatcher(dist.group.WORLD, experts, tokens=lambda: counts)
    assert isinstance(one, base.BaseDispatcher)
    for seed in range(6):
        counts = [2 * most - 1] + [0] * (size // 2 - 1) if seed % 2 else None  # ranks in pairs, of one data-parallel rank each
        torch.manual_seed(10 * seed + rank)
        tokens = (most, 5, 0)[(seed + rank) % 3]
        idx = torch.stack([torch.randperm(experts)[:3] for _ in range(tokens)]) if tokens else torch.zeros(0, 3, dtype=torch.int64)
        idx[torch.rand(idx.shape) < 0.2] = -1
        x = torch.randint(-8, 9, (tokens, 64)).to(torch.bfloat16)
        given = topk.StandardTopKOutput(torch.rand(tokens, 3), idx.to(torch.int32), None)
        hooked = one.register_post_dispatch_hook(lambda self, output: None) if not seed else None  # SGLang's own: may replace dispatch()
        got = one.dispatch(hidden_states=x, topk_output=given)
        raises(RuntimeError, "no combine", backend.EpkitDispatcher.dispatch, one, x, given)
        every = gathered(size, x, idx, given.topk_weights)
        here = [(idx // 4 == rank).any(1) for _, idx, _ in every]
        n = sum(int(mask.sum()) for mask in here)
        assert got.format is base.DispatchOutputFormat.STANDARD and isinstance(got, base.DispatchOutput)
        assert len(got.hidden_states) == (size * most if counts else n) and got.hidden_states_scale is None
        assert torch.equal(got.hidden_states[:n], torch.cat([x[mask] for (x, *_), mask in zip(every, here)]))
        want = torch.cat([idx[mask] for (_, idx, _), mask in zip(every, here)])
        mine = want // 4 == rank
        assert torch.equal(got.topk_output.topk_ids[:n].long(), torch.where(mine, want % 4, -1))
        assert (got.topk_output.topk_ids[n:] == -1).all()
        assert torch.equal(got.topk_output.topk_weights[:n][mine], torch.cat([w[mask] for (*_, w), mask in zip(every, here)])[mine])
        y = torch.zeros(len(got.hidden_states), 64, dtype=torch.bfloat16)
        y[:n] = mine.sum(1, keepdim=True).to(torch.bfloat16)
        total = one.combine(combine_input=standard.StandardCombineInput(y))
        assert torch.equal(total, (idx >= 0).sum(1, keepdim=True).expand(-1, 64).to(torch.bfloat16))
        raises(RuntimeError, "no dispatch", one.combine, standard.StandardCombineInput(y))
        if hooked:
            hooked.remove()
    counts = [4] + [0] * (size // 2 - 1)
    raises(ValueError, "3 tokens 2", one.dispatch, torch.zeros(3, 64, dtype=torch.bfloat16),
           topk.StandardTopKOutput(torch.zeros(3, 3), torch.zeros(3, 3, dtype=torch.int32), None))


def plugin_of_sglang(rank, size):
    """SGLang's registry applies the hooks to its own functions, which make no dispatcher for "customized"."""
    module, *_ = sglang()
    import epkit.compat.sglang as backend

    group = types.SimpleNamespace(device_group=dist.group.WORLD)
    flags = types.SimpleNamespace(moe=types.SimpleNamespace(a2a_backend=None, disable_fp4_allgather=True))
    context = {"get_flags": lambda: flags, "get_parallel": lambda: types.SimpleNamespace(tp_group=group, dwdp_size=1)}
    utils = module("sglang.srt.layers.moe.utils", "MoeA2ABackend", "_MoeRunnerBackendPredicates", "MoeRunnerBackend",
                   "get_moe_a2a_backend", "should_use_flashinfer_cutlass_moe_fp4_allgather", "post_experts_output_is_complete", **context)
    layer = module("sglang.srt.layers.moe.fused_moe_triton.layer", "create_moe_dispatcher", is_npu=lambda: False,
                   get_moe_a2a_backend=utils.get_moe_a2a_backend, StandardDispatcher=lambda config: ("theirs", config))
    module("sglang.srt.layers.dp_attention", "get_dp_global_num_tokens", **context)
    module("sglang.srt.runtime_context", "nothing", **context)
    config = types.SimpleNamespace(num_experts=8, num_local_experts=4, num_fused_shared_experts=None, runner_backend=None)
    flags.moe.a2a_backend = utils.MoeA2ABackend.CUSTOMIZED
    raises(NotImplementedError, "Unsupported a2a backend", layer.create_moe_dispatcher, config, quant_method=None)
    assert not utils.post_experts_output_is_complete(is_tp_path=False)
    registry = module("sglang.srt.plugins.hook_registry")
    backend.plugin()
    registry.HookRegistry.apply_hooks()
    assert registry.HookRegistry._patched == {backend._LAYER, backend._UTILS}
    assert type(layer.create_moe_dispatcher(config, quant_method=None)) is backend.EpkitDispatcher
    assert utils.post_experts_output_is_complete(is_tp_path=False)
    config.runner_backend = utils.MoeRunnerBackend.FLASHINFER_CUTLASS
    raises(NotImplementedError, "FLASHINFER_CUTLASS triton", layer.create_moe_dispatcher, config, quant_method=None)
    config.runner_backend, config.num_local_experts = utils.MoeRunnerBackend.TRITON, 8
    raises(NotImplementedError, "8 of 8 experts --ep-size", layer.create_moe_dispatcher, config, quant_method=None)
    for theirs, complete in ((utils.MoeA2ABackend.NONE, False), (utils.MoeA2ABackend.FLASHINFER, True)):
        flags.moe.a2a_backend = theirs
        assert utils.post_experts_output_is_complete(is_tp_path=False) == complete
    flags.moe.a2a_backend = utils.MoeA2ABackend.NONE
    assert layer.create_moe_dispatcher(config, quant_method=None) == ("theirs", config)


def test_dispatcher_of_sglang():
    sglang()
    run(2, dispatcher)
    run(4, dispatcher)
    run(2, plugin_of_sglang)


def test_plugin_of_vllm():
    """As vLLM 0.33 calls it (vllm/plugins/__init__.py): in each process, more than once. Its wheel has 336 MB, so not with it."""
    said = """if True:
        import importlib.util, os, sys
        from epkit.compat.vllm import plugin
        plugin()
        plugin()
        import epkit.compat.deep_ep as own
        found = importlib.util.find_spec("deep_ep")  # as vLLM asks
        named = "epkit" in os.environ.get("VLLM_PLUGINS", "")
        assert (found is not None and "epkit/compat" in found.origin) == named, found
        if named:
            import deep_ep
            from deep_ep.utils import EventOverlap
            assert deep_ep is own and EventOverlap is own.EventOverlap
            sys.modules["deep_ep"] = os
            try:
                plugin()
            except RuntimeError as error:
                assert "is imported as deep_ep already" in str(error)
            else:
                raise AssertionError("another deep_ep was replaced")
        """
    # Torch, which takes longer to import than all else, once.
    each = """if True:
        import os, sys, torch
        for plugins in (None, "other", "epkit", "other,epkit"):
            if os.fork():
                assert os.wait()[1] == 0, plugins
                continue
            if plugins:
                os.environ["VLLM_PLUGINS"] = plugins
            exec(sys.argv[1])
            os._exit(0)
        """
    env = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    done = subprocess.run([sys.executable, "-c", each, said], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

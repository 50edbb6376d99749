# SPDX-License-Identifier: Apache-2.0
"""epkit as the customized all-to-all of SGLang's MoE layers (MoeA2ABackend.CUSTOMIZED, SGLang 0.5.23).

SGLang has the backend "customized", but makes no dispatcher for it. plugin() is in the entry points of the group
sglang.srt.plugins, so SGLang calls it in each of its processes: with moe_a2a_backend "customized" its layers get an
EpkitDispatcher. Other backends stay as they are.

Rows are bfloat16, in SGLang's standard format: the runner quantises them, and finds the local number of each choice's expert,
-1 for those of other ranks. The experts must span the tensor-parallel group (ep_size = tp_size).
"""
import functools
from typing import Any, Callable, List, Optional

import torch
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher

import epkit

_UTILS = "sglang.srt.layers.moe.utils.post_experts_output_is_complete"
_LAYER = "sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher"


@functools.lru_cache(maxsize=None)
def _communicator(group: Any) -> epkit.Communicator:
    return epkit.Communicator(group)  # for all layers, as long as the process lives


class EpkitDispatcher(BaseDispatcher):
    """Dispatch and combine of one layer.

    tokens: returns the numbers of tokens of the data-parallel ranks, in the same order on all ranks, or None. With them the
    host waits for nothing and results have room for the most, so that graphs can be captured; without, they have the rows
    that arrive.
    """

    def __init__(self, group: Any, num_experts: int, runner_backend: Any = None,
                 tokens: Callable[[], Optional[List[int]]] = lambda: None) -> None:
        super().__init__()
        if runner_backend is not None and not runner_backend.is_triton() and not runner_backend.is_deep_gemm():
            raise NotImplementedError(f"epkit: the MoE runner {runner_backend} wants global expert numbers: use "
                                      "--moe-runner-backend triton or deep_gemm")
        self.runner_backend = runner_backend
        self._comm = _communicator(group)
        self._num_experts = num_experts
        self._tokens = tokens
        self._plan: Optional[epkit.Plan] = None

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput

        if self._plan is not None:
            raise RuntimeError("EpkitDispatcher.dispatch: the dispatch before has had no combine")
        counts, most = self._tokens(), 0
        if counts:  # each data-parallel rank divides its tokens among the same number of ranks
            most = -(-max(counts) // (self._comm.size // len(counts)))
            if hidden_states.shape[0] > most:
                raise ValueError(f"EpkitDispatcher.dispatch: {hidden_states.shape[0]} tokens, the most of a rank is {most}")
        plan = self._comm.plan(topk_output.topk_ids.contiguous(), self._num_experts,
                               max_recv_tokens=self._comm.size * most, max_tokens=most)
        got = plan.dispatch(hidden_states.detach().contiguous(), topk_output.topk_weights.detach().float().contiguous(),
                            want_topk_idx=True)
        self._plan = plan
        return StandardDispatchOutput(got.x, None, topk_output._replace(topk_ids=got.topk_idx, topk_weights=got.topk_weights))

    def combine(self, combine_input: Any) -> torch.Tensor:
        if self._plan is None:
            raise RuntimeError("EpkitDispatcher.combine: there was no dispatch before")
        plan, self._plan = self._plan, None
        return plan.combine(combine_input.hidden_states.detach().contiguous())[0]


def _create(original: Callable[..., Any], moe_runner_config: Any, quant_method: Any = None) -> Any:
    """Around SGLang's create_moe_dispatcher()."""
    from sglang.srt.layers.dp_attention import get_dp_global_num_tokens
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend
    from sglang.srt.runtime_context import get_parallel

    config = moe_runner_config
    if not get_moe_a2a_backend().is_customized():
        return original(config, quant_method=quant_method)
    group = get_parallel().tp_group.device_group
    if config.num_fused_shared_experts or config.num_local_experts * group.size() != config.num_experts:
        raise NotImplementedError(
            f"epkit: {config.num_local_experts} of {config.num_experts} experts on each of {group.size()} ranks, "
            f"{config.num_fused_shared_experts or 0} shared ones fused: the experts must be divided among the tensor-parallel "
            "ranks (--ep-size as --tp-size), and --disable-shared-experts-fusion set")
    return EpkitDispatcher(group, config.num_experts, config.runner_backend, get_dp_global_num_tokens)


def _is_complete(original: Callable[..., bool], *, is_tp_path: bool) -> bool:
    """Around post_experts_output_is_complete(): a combine has added up the outputs of all ranks."""
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend

    return get_moe_a2a_backend().is_customized() or original(is_tp_path=is_tp_path)


def plugin() -> None:
    """Registers the hooks, which SGLang applies when all plugins have been loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_LAYER, _create, HookType.AROUND)
    HookRegistry.register(_UTILS, _is_complete, HookType.AROUND)

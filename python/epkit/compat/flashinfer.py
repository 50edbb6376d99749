# SPDX-License-Identifier: Apache-2.0
"""The communication backend "epkit" of FlashInfer's expert parallelism (flashinfer.moe_ep, 0.7.4).

Its import registers the backend::

    import epkit.compat.flashinfer
    layer = flashinfer.moe_ep.MoEEpLayer(..., backend=SplitConfig(comm="epkit"))

The ranks are those of the bootstrap's process group, on one host or several, on GPUs or CPUs. Received rows come in the order of
(source rank, token), without gaps. The sum of a combine is that of Plan.combine(): by ranks, in float32, rounded once.
"""
from typing import Any, Optional, Tuple

import torch
import torch.distributed as dist
from flashinfer.moe_ep import MoEEpCommParams, MoEEpCommunication, MoEEpDispatchResult, register_communication

import epkit


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of any type as bfloat16, whose bits a dispatch does not change; padded to 16 bytes."""
    wide = tensor.contiguous().view(tensor.shape[0], tensor.shape[1:].numel()).view(torch.uint8)
    return torch.nn.functional.pad(wide, (0, -wide.shape[1] % 16)).view(torch.bfloat16)


def _like(rows: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Such rows in the type and width of the tensor that they were made of."""
    width = tensor.shape[1:].numel() * tensor.element_size()
    return rows.view(torch.uint8)[:, :width].contiguous().view(tensor.dtype).view(rows.shape[0], *tensor.shape[1:])


@register_communication("epkit")
class EpkitCommunication(MoEEpCommunication):
    """Dispatch and combine of epkit. The host waits for nothing; capacities are those of the call, so graphs can be captured."""

    def __init__(self, bootstrap: Any, params: MoEEpCommParams, config: Any = None) -> None:
        super().__init__(bootstrap, params)
        if params.token_dtype != torch.bfloat16:
            raise ValueError(f"epkit: MoEEpCommParams.dtype is {params.token_dtype}: a combine is for torch.bfloat16")
        self._group = getattr(bootstrap, "process_group", None)
        self._comm = epkit.Communicator(self._group)
        if (self._comm.rank, self._comm.size) != (self.ep_rank, self.ep_size):
            raise ValueError(f"epkit: the bootstrap is rank {self.ep_rank} of {self.ep_size}, but its process group has rank "
                             f"{self._comm.rank} of {self._comm.size}: set process_group")
        self._plan: Optional[epkit.Plan] = None

    @classmethod
    def is_platform_supported(cls) -> bool:
        return True

    def dispatch(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: Optional[torch.Tensor] = None, *,
                 hidden_states_scale: Optional[torch.Tensor] = None, runtime_max_tokens_per_rank: Optional[int] = None,
                 eplb_local_stats: Optional[torch.Tensor] = None) -> MoEEpDispatchResult:
        if self._comm.closed:
            raise RuntimeError("EpkitCommunication.dispatch: destroy() has been called")
        if self._plan is not None:
            raise RuntimeError("EpkitCommunication.dispatch: the dispatch before has had no combine")
        most = self._resolve_runtime_max_tokens_per_rank(runtime_max_tokens_per_rank)
        if hidden_states.shape[0] > most:
            raise ValueError(f"EpkitCommunication.dispatch: {hidden_states.shape[0]} tokens, the most of a rank is {most}")
        plan = self._comm.plan(topk_ids.contiguous(), self.params.num_experts, max_recv_tokens=self.ep_size * most, max_tokens=most)
        weights = None if topk_weights is None else topk_weights.float().contiguous()
        rows, local, received = self._rows(plan, hidden_states, weights)
        scale = None
        if hidden_states_scale is not None:
            scale = self._rows(plan, hidden_states_scale, None)[0]
        ids = torch.where(local < 0, self.params.invalid_expert_id, local + self.ep_rank * self.num_local_experts)
        self._plan = plan
        return MoEEpDispatchResult(rows, ids, received, most, scale, self._gathered(eplb_local_stats))

    def _rows(self, plan: epkit.Plan, tensor: torch.Tensor,
              weights: Optional[torch.Tensor]) -> Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]:
        got = plan.dispatch(_as_rows(tensor.detach()), weights, want_topk_idx=True)
        assert got.topk_idx is not None
        return _like(got.x, tensor), got.topk_idx, got.topk_weights

    def _gathered(self, stats: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        if stats is None:
            return None
        every = [torch.empty_like(stats) for _ in range(self.ep_size)]
        dist.all_gather(every, stats.contiguous(), group=self._group)
        return torch.stack(every)

    def combine(self, expert_output: torch.Tensor, *, output: Optional[torch.Tensor] = None) -> torch.Tensor:
        if self._plan is None:
            raise RuntimeError("EpkitCommunication.combine: there was no dispatch before")
        plan, self._plan = self._plan, None
        return plan.combine(expert_output.detach().flatten(0, -2).contiguous(), out=output)[0]

    def destroy(self) -> None:
        self._plan = None
        self._comm.free()

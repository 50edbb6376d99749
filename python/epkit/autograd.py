# SPDX-License-Identifier: Apache-2.0
"""Differentiable dispatch and combine, and a mixture-of-experts layer of the two.

The gradient of a dispatch is a combine on the same plan, and the other way round, so that gradients are added up in the
same order in every run, too. Rows are bfloat16. There are no gradients of gradients.
"""
from typing import Any, Callable, List, Optional, Tuple

import torch
from torch.autograd.function import once_differentiable

from ._native import ArgumentError
from ._tensors import aligned, want_tensor, zeros
from .communicator import Communicator
from .plan import Plan, check_inputs


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, x: torch.Tensor, topk_weights: Optional[torch.Tensor]) -> Any:
        rows = plan.dispatch(x, topk_weights, want_topk_idx=topk_weights is not None)
        ctx.plan, ctx.topk_idx = plan, rows.topk_idx
        ctx.dtype = x.dtype
        if rows.topk_weights is None:
            return rows.x
        return rows.x, rows.topk_weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: torch.Tensor, grad_weights: Optional[torch.Tensor] = None) -> Any:
        plan: Plan = ctx.plan
        if grad_weights is not None:
            grad_weights = grad_weights.to(torch.float32).contiguous()
            if ctx.topk_idx is not None:  # what was delivered there is a constant 0
                grad_weights = grad_weights.masked_fill(ctx.topk_idx < 0, 0)
        grad, weights = plan.combine(grad_x.to(torch.bfloat16).contiguous(), grad_weights)
        return None, grad.to(ctx.dtype), weights


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, x: torch.Tensor) -> torch.Tensor:
        ctx.plan, ctx.rows = plan, x.shape[0]
        return plan.combine(x)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        plan: Plan = ctx.plan
        # With a fixed capacity the dispatch leaves rows unwritten that belong to no token: their gradient is 0.
        out = zeros((max(ctx.rows, plan.out_rows), grad.shape[1]), torch.bfloat16, grad.device) if plan.fixed else None
        rows = plan.dispatch(grad.to(torch.bfloat16).contiguous(), out=out).x
        if plan.expanded and plan.comm.is_cuda and not plan.fixed and not plan.zero_padding:
            _zero_padding(plan, rows)
        return None, rows[:ctx.rows]


def _zero_padding(plan: Plan, rows: torch.Tensor) -> None:
    """Zeroes the gradient of padding rows, which belong to no token."""
    counts: List[int] = plan.metadata().count_exact.tolist()
    assert plan.expert_start is not None
    for expert, count in enumerate(counts):
        rows[plan.expert_start[expert] + count:plan.expert_start[expert + 1]].zero_()


def _want(value: Any, kind: type, call: str, name: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{call}: {name} is a {type(value).__name__}, must be an epkit.{kind.__name__}")


def dispatch(plan: Plan, x: torch.Tensor,
             topk_weights: Optional[torch.Tensor] = None) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Plan.dispatch() with gradients for x and topk_weights. Returns (rows [n, H], weights or None)."""
    _want(plan, Plan, "dispatch", "plan")
    want_tensor(x, "dispatch", "x", "[N, H]")
    if topk_weights is None:
        return _Dispatch.apply(plan, x, None), None  # type: ignore[no-untyped-call]
    rows, weights = _Dispatch.apply(plan, x, topk_weights)  # type: ignore[no-untyped-call]
    return rows, weights


def combine(plan: Plan, x: torch.Tensor) -> torch.Tensor:
    """Plan.combine() with a gradient for x. Returns [N, H]."""
    _want(plan, Plan, "combine", "plan")
    want_tensor(x, "combine", "x", "[n, H]")
    out: torch.Tensor = _Combine.apply(plan, x)  # type: ignore[no-untyped-call]
    return out


def moe(comm: Communicator, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int,
        experts: Callable[[torch.Tensor, List[int]], torch.Tensor], *, alignment: int = 1) -> torch.Tensor:
    """A mixture-of-experts layer: dispatch, this rank's experts, weighting, combine. Differentiable. Collective.

    Arguments:
        comm: a Communicator.
        x: [N, H] bfloat16.
        topk_idx: [N, K] int64 or int32, -1: none. topk_weights: [N, K] float32.
        experts: takes rows [n, H] grouped by local expert and their counts [L] (multiples of `alignment`, sum n), and
            returns [n, H].
        alignment: of each expert's first row, for grouped GEMMs. Padding rows are zeros.

    Returns [N, H] bfloat16.
    """
    _want(comm, Communicator, "moe", "comm")
    want_tensor(x, "moe", "x", "[N, H]")
    want_tensor(topk_weights, "moe", "topk_weights", "[N, K]")
    x, topk_weights = aligned(x), aligned(topk_weights)
    check_inputs(comm, topk_idx, x, topk_weights)
    plan = comm.plan(topk_idx, num_experts, expanded=True, alignment=alignment, zero_padding=True)
    rows, weights = dispatch(plan, x, topk_weights)
    assert weights is not None
    y = experts(rows, plan.recv_per_expert)
    if not isinstance(y, torch.Tensor) or y.shape != rows.shape:
        what = list(y.shape) if isinstance(y, torch.Tensor) else f"a {type(y).__name__}"
        raise ArgumentError(f"moe: experts returned {what}, must return a tensor of the shape of its rows, {list(rows.shape)}")
    return combine(plan, (y.float() * weights.unsqueeze(1)).to(torch.bfloat16))

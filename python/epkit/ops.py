# SPDX-License-Identifier: Apache-2.0
"""Operators of torch.library, so that torch.compile traces a mixture-of-experts layer as two nodes.

    import epkit.ops
    slot = epkit.ops.register(comm, num_experts)
    rows, idx, weights, plan = torch.ops.epkit.moe_dispatch(x, topk_idx, topk_weights, slot, capacity)
    out = torch.ops.epkit.moe_combine(y, plan, slot, x.shape[0])

Shapes are static: `capacity` is the rows of the result, at least those that any rank can receive (R * N of the fullest
rank never is too few). Rows beyond the received ones have idx -1, weight 0, and x 0.

Plans. `plan` is an int64 [1] on the CPU that names a plan of the communicator. The newest `plans` of each slot are kept
(register()), so that a backward pass finds its own; one that is gone raises and says so.
"""
from collections import OrderedDict
from typing import Dict, List

import torch

from ._native import ArgumentError
from .communicator import Communicator

_library = torch.library.Library("epkit", "DEF")
_library.define("moe_dispatch(Tensor x, Tensor topk_idx, Tensor topk_weights, int slot, int capacity)"
                " -> (Tensor, Tensor, Tensor, Tensor)")
_library.define("moe_combine(Tensor x, Tensor plan, int slot, int n_tokens) -> Tensor")
_library.define("moe_dispatch_again(Tensor x, Tensor plan, int slot, int capacity) -> Tensor")
_library.define("moe_combine_weighted(Tensor x, Tensor weights, Tensor plan, int slot, int n_tokens, int topk)"
                " -> (Tensor, Tensor)")


class _Slot:
    def __init__(self, comm: Communicator, num_experts: int, plans: int) -> None:
        self.comm, self.num_experts, self.most = comm, num_experts, plans
        self.plans: "OrderedDict[int, object]" = OrderedDict()
        self.next = 0

    def add(self, plan) -> int:
        self.next += 1
        self.plans[self.next] = plan
        while len(self.plans) > self.most:
            self.plans.popitem(last=False)[1].free()
        return self.next

    def get(self, number: torch.Tensor):
        plan = self.plans.get(int(number))
        if plan is None:
            raise ArgumentError(f"moe_combine: plan {int(number)} is gone: {self.most} newer ones have been made since; "
                                "give epkit.ops.register() more plans")
        return plan


_slots: Dict[int, _Slot] = {}


def register(comm: Communicator, num_experts: int, plans: int = 64) -> int:
    """A number for a communicator and its experts, for the operators. `plans`: how many of its plans are kept."""
    number = len(_slots)
    _slots[number] = _Slot(comm, num_experts, plans)
    return number


def _zeros(x, capacity):
    """Rows that nobody writes are factors of gradients: 0 times what was in memory may be NaN."""
    return x.new_zeros((capacity, x.shape[1]))


def _dispatch(x, topk_idx, topk_weights, slot, capacity):
    own = _slots[slot]
    plan = own.comm.plan(topk_idx.contiguous(), own.num_experts, max_recv_tokens=capacity)
    rows = plan.dispatch(x.contiguous(), topk_weights.contiguous(), want_topk_idx=True, out=_zeros(x, capacity))
    return rows.x, rows.topk_idx, rows.topk_weights, torch.tensor([own.add(plan)], dtype=torch.int64, device="cpu")


def _combine(x, plan, slot, n_tokens):
    return _slots[slot].get(plan).combine(x.contiguous())[0]


def _dispatch_again(x, plan, slot, capacity):
    return _slots[slot].get(plan).dispatch(x.contiguous(), out=_zeros(x, capacity)).x


def _combine_weighted(x, weights, plan, slot, n_tokens, topk):
    return _slots[slot].get(plan).combine(x.contiguous(), weights.contiguous())


def _fake_dispatch(x, topk_idx, topk_weights, slot, capacity):
    return (x.new_empty((capacity, x.shape[1])), topk_idx.new_empty((capacity, topk_idx.shape[1])),
            topk_weights.new_empty((capacity, topk_idx.shape[1])), torch.empty(1, dtype=torch.int64, device="cpu"))


for _name, _kernel, _fake in (
        ("moe_dispatch", _dispatch, _fake_dispatch),
        ("moe_combine", _combine, lambda x, plan, slot, n_tokens: x.new_empty((n_tokens, x.shape[1]))),
        ("moe_dispatch_again", _dispatch_again, lambda x, plan, slot, capacity: x.new_empty((capacity, x.shape[1]))),
        ("moe_combine_weighted", _combine_weighted, lambda x, weights, plan, slot, n_tokens, topk:
         (x.new_empty((n_tokens, x.shape[1])), weights.new_empty((n_tokens, topk))))):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake("epkit::" + _name, _fake, lib=_library)


def _dispatch_setup(ctx, inputs, output):
    x, topk_idx, _, ctx.slot, _ = inputs
    ctx.tokens, ctx.topk = topk_idx.shape
    ctx.mark_non_differentiable(output[1], output[3])
    ctx.save_for_backward(output[1], output[3])


def _dispatch_backward(ctx, grad_x, grad_idx, grad_weights, grad_plan):
    idx, plan = ctx.saved_tensors
    weights = grad_weights.masked_fill(idx < 0, 0)
    grad, weights = torch.ops.epkit.moe_combine_weighted(grad_x, weights, plan, ctx.slot, ctx.tokens, ctx.topk)
    return grad, None, weights, None, None


def _combine_setup(ctx, inputs, output):
    x, plan, ctx.slot, _ = inputs
    ctx.capacity = x.shape[0]
    ctx.save_for_backward(plan)


def _combine_backward(ctx, grad):
    plan, = ctx.saved_tensors
    return torch.ops.epkit.moe_dispatch_again(grad, plan, ctx.slot, ctx.capacity), None, None, None


torch.library.register_autograd("epkit::moe_dispatch", _dispatch_backward, setup_context=_dispatch_setup, lib=_library)
torch.library.register_autograd("epkit::moe_combine", _combine_backward, setup_context=_combine_setup, lib=_library)

__all__: List[str] = ["register"]

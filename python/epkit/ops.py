# SPDX-License-Identifier: Apache-2.0
"""Operators of torch.library, so that torch.compile traces a mixture-of-experts layer as two nodes.

    import epkit.ops
    slot = epkit.ops.register(comm, num_experts)
    rows, idx, weights, plan = torch.ops.epkit.moe_dispatch(x, topk_idx, topk_weights, slot, capacity)
    out = torch.ops.epkit.moe_combine(y, plan, slot, x.shape[0])

`capacity` is the rows of the result, at least those that any rank can receive (R * N of the fullest rank never is too
few). Rows beyond the received ones have idx -1, weight 0, and x 0. Sizes may be symbolic. All ranks run the same graph.

Plans. The tensor `plan` is a copy of topk_idx: all that a plan depends on. The newest `plans` of them are kept with the
plan that they were made with (register()); for an older one, or a copy of the tensor, it is made again.

There are no gradients of gradients, and no forward-mode derivatives (torch.func.jvp, torch.autograd.forward_ad).
"""
import functools
import itertools
from collections import OrderedDict
from typing import Any, Dict, List, NoReturn, Tuple

import torch
from torch.autograd import forward_ad

from ._native import ArgumentError, Error
from ._tensors import want_integer, want_tensor, zeros
from .communicator import Communicator
from .plan import Plan, check_inputs

if not hasattr(torch.library, "register_fake"):
    raise ImportError(f"epkit.ops: torch {torch.__version__} has no torch.library.register_fake: operators need 2.4 or later, all "
                      "else of epkit does not")

_library: Any = torch.library.Library("epkit", "DEF")  # type: ignore[no-untyped-call]
_library.define("moe_dispatch(Tensor x, Tensor topk_idx, Tensor topk_weights, int slot, SymInt capacity)"
                " -> (Tensor, Tensor, Tensor, Tensor)")
_library.define("moe_combine(Tensor x, Tensor plan, int slot, SymInt n_tokens) -> Tensor")
_library.define("moe_dispatch_again(Tensor x, Tensor plan, int slot, SymInt capacity) -> Tensor")
_library.define("moe_combine_weighted(Tensor x, Tensor weights, Tensor plan, int slot, SymInt n_tokens, int topk)"
                " -> (Tensor, Tensor)")


class _Slot:
    """Plans by the storage of their tensor, which is kept, so that no other tensor gets that memory meanwhile.

    Ranks find the same plans and make the same ones again, because they make the same calls in the same order.
    """

    def __init__(self, comm: Communicator, num_experts: int, plans: int) -> None:
        if not isinstance(comm, Communicator):
            raise TypeError(f"epkit.ops.register: comm is a {type(comm).__name__}, must be an epkit.Communicator")
        if want_integer(num_experts, "epkit.ops.register", "num_experts") < 1 or num_experts % comm.size:
            raise ArgumentError(f"epkit.ops.register: num_experts is {num_experts}, no multiple of {comm.size} ranks")
        if want_integer(plans, "epkit.ops.register", "plans") < 1:
            raise ArgumentError(f"epkit.ops.register: plans is {plans}, must be 1 or more")
        self.comm, self.num_experts, self.most = comm, num_experts, plans
        self.plans: "OrderedDict[int, Tuple[torch.Tensor, int, Plan]]" = OrderedDict()

    def make(self, topk_idx: torch.Tensor, capacity: int) -> Plan:
        plan = self.comm.plan(topk_idx, self.num_experts, max_recv_tokens=capacity)
        self.plans[topk_idx.untyped_storage().data_ptr()] = topk_idx, _version(topk_idx), plan
        while len(self.plans) > self.most:
            self.plans.popitem(last=False)[1][2].free()
        return plan

    def get(self, topk_idx: torch.Tensor, capacity: int) -> Plan:
        kept, version, plan = self.plans.get(topk_idx.untyped_storage().data_ptr(), (topk_idx, -1, None))
        if plan is not None and _version(topk_idx) == version and kept.shape == topk_idx.shape and plan.out_rows == capacity:
            return plan
        return self.make(_copy(topk_idx), capacity)

    def free(self) -> None:
        for _, _, plan in self.plans.values():
            plan.free()


def _version(tensor: torch.Tensor) -> int:
    """Another number after each write to the tensor; tensors of inference mode do not count."""
    return -1 if tensor.is_inference() else tensor._version


def _copy(topk_idx: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, whose storage has an address also where there are no tokens."""
    memory = topk_idx.new_empty(max(1, topk_idx.numel()))
    return memory[:topk_idx.numel()].view(topk_idx.shape).copy_(topk_idx)


_slots: Dict[int, _Slot] = {}
_numbers = itertools.count()


def register(comm: Communicator, num_experts: int, plans: int = 64) -> int:
    """A number for a communicator and its experts, for the operators. `plans`: how many of its plans are kept.

    The communicator is kept, too, until unregister().
    """
    number = next(_numbers)
    _slots[number] = _Slot(comm, num_experts, plans)
    return number


def unregister(slot: int) -> None:
    """Forgets the communicator of `slot` and the plans that were kept for it. Again: nothing."""
    own = _slots.pop(slot, None)
    if own is not None:
        own.free()


def _zeros(x: torch.Tensor, capacity: int) -> torch.Tensor:
    """Rows that no operation writes are factors of gradients: 0 times what was in memory may be NaN."""
    return zeros((capacity, x.shape[1]), x.dtype, x.device)


def _slot(number: int) -> _Slot:
    if number not in _slots:
        raise ArgumentError(f"epkit.ops: there is no slot {number}: give what epkit.ops.register() returned")
    return _slots[number]


def _dispatch(x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, slot: int,
              capacity: int) -> Tuple[torch.Tensor, ...]:
    own = _slot(slot)
    want_tensor(x, "moe_dispatch", "x", "[N, H]")
    want_tensor(topk_weights, "moe_dispatch", "topk_weights", "[N, K]")
    if capacity < 1:
        raise ArgumentError(f"moe_dispatch: capacity is {capacity}, must be 1 or more")
    x, topk_weights = x.contiguous(), topk_weights.contiguous()
    check_inputs(own.comm, topk_idx, x, topk_weights)
    topk_idx = _copy(topk_idx)
    plan = own.make(topk_idx, capacity)
    rows = plan.dispatch(x, topk_weights, want_topk_idx=True, out=_zeros(x, capacity))
    assert rows.topk_idx is not None and rows.topk_weights is not None
    return rows.x, rows.topk_idx, rows.topk_weights, topk_idx


def _want_tokens(call: str, plan: torch.Tensor, n_tokens: int) -> None:
    """A compiled program assumes that the result has as many rows as it requested, and would read beyond a smaller one."""
    if plan.dim() != 2 or plan.shape[0] != n_tokens:
        raise ArgumentError(f"{call}: n_tokens is {n_tokens}, but plan has the shape {list(plan.shape)}: give the tokens of the "
                            "moe_dispatch that it is of")


def _combine(x: torch.Tensor, plan: torch.Tensor, slot: int, n_tokens: int) -> torch.Tensor:
    _want_tokens("moe_combine", plan, n_tokens)
    return _slot(slot).get(plan, x.shape[0]).combine(x.contiguous())[0]


def _dispatch_again(x: torch.Tensor, plan: torch.Tensor, slot: int, capacity: int) -> torch.Tensor:
    return _slot(slot).get(plan, capacity).dispatch(x.contiguous(), out=_zeros(x, capacity)).x


def _combine_weighted(x: torch.Tensor, weights: torch.Tensor, plan: torch.Tensor, slot: int, n_tokens: int,
                      topk: int) -> Tuple[torch.Tensor, ...]:
    _want_tokens("moe_combine_weighted", plan, n_tokens)
    if plan.shape[1] != topk:
        raise ArgumentError(f"moe_combine_weighted: topk is {topk}, but plan has the shape {list(plan.shape)}")
    out, summed = _slot(slot).get(plan, x.shape[0]).combine(x.contiguous(), weights.contiguous())
    assert summed is not None
    return out, summed


def _fake_dispatch(x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, slot: int,
                   capacity: int) -> Tuple[torch.Tensor, ...]:
    return (x.new_empty((capacity, x.shape[1])), topk_idx.new_empty((capacity, topk_idx.shape[1])),
            topk_weights.new_empty((capacity, topk_idx.shape[1])), torch.empty_like(topk_idx, memory_format=torch.contiguous_format))


def _fake_rows(x: torch.Tensor, plan: torch.Tensor, slot: int, rows: int) -> torch.Tensor:
    return x.new_empty((rows, x.shape[1]))


def _fake_combine_weighted(x: torch.Tensor, weights: torch.Tensor, plan: torch.Tensor, slot: int, n_tokens: int,
                           topk: int) -> Tuple[torch.Tensor, ...]:
    return x.new_empty((n_tokens, x.shape[1])), weights.new_empty((n_tokens, topk))


_kernels: Tuple[Tuple[str, Any, Any], ...] = (
    ("moe_dispatch", _dispatch, _fake_dispatch), ("moe_combine", _combine, _fake_rows),
    ("moe_dispatch_again", _dispatch_again, _fake_rows),
    ("moe_combine_weighted", _combine_weighted, _fake_combine_weighted))


def _no_forward_mode(name: str, function: Any) -> Any:
    """The function, which refuses forward mode: torch would take its derivative for 0. It refuses other inputs of a dual level,
    too, because torch.func.jvp() does not show here which have a derivative."""
    @functools.wraps(function)
    def checked(*args: Any) -> Any:
        if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
            raise NotImplementedError(f"{name}: there are no forward-mode derivatives (torch.func.jvp, torch.func.jacfwd, "
                                      "torch.autograd.forward_ad) of epkit's operators: use reverse mode (backward(), "
                                      "torch.autograd.grad), or call them outside of the dual level")
        return function(*args)
    return checked


def _naming_capacity(function: Any) -> Any:
    """The function, whose errors name the capacity as the operators do."""
    @functools.wraps(function)
    def named(*args: Any) -> Any:
        try:
            return function(*args)
        except Error as error:
            if "max_recv_tokens" in str(error):
                error.args = (f"{error}; max_recv_tokens is `capacity` of moe_dispatch, or the rows of x of moe_combine, on that rank",)
            raise
    return named


for _name, _kernel, _fake in _kernels:
    _library.impl(_name, _no_forward_mode(_name, _naming_capacity(_kernel)), "CompositeExplicitAutograd")
    torch.library.register_fake("epkit::" + _name, _no_forward_mode(_name, _fake), lib=_library)


def _dispatch_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, topk_idx, _, ctx.slot, _ = inputs
    ctx.tokens, ctx.topk = topk_idx.shape
    ctx.mark_non_differentiable(output[1], output[3])
    ctx.save_for_backward(output[1], output[3])


def _dispatch_backward(ctx: Any, grad_x: Any, grad_idx: Any, grad_weights: Any, grad_plan: Any) -> Any:
    idx, plan = ctx.saved_tensors
    weights = grad_weights.masked_fill(idx < 0, 0)
    grad, weights = torch.ops.epkit.moe_combine_weighted(grad_x, weights, plan, ctx.slot, ctx.tokens, ctx.topk)
    return grad, None, weights, None, None


def _combine_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, plan, ctx.slot, _ = inputs
    ctx.capacity = x.shape[0]
    ctx.save_for_backward(plan)


def _combine_backward(ctx: Any, grad: Any) -> Any:
    plan, = ctx.saved_tensors
    return torch.ops.epkit.moe_dispatch_again(grad, plan, ctx.slot, ctx.capacity), None, None, None


def _refuse_backward(ctx: Any, *grads: Any) -> NoReturn:
    raise RuntimeError("epkit.ops: a gradient of a gradient goes through moe_dispatch or moe_combine again, which are differentiable "
                       "once")


torch.library.register_autograd("epkit::moe_dispatch", _dispatch_backward, setup_context=_dispatch_setup, lib=_library)
torch.library.register_autograd("epkit::moe_combine", _combine_backward, setup_context=_combine_setup, lib=_library)
for _name in ("moe_dispatch_again", "moe_combine_weighted"):  # of which torch would assume that their gradient is 0
    torch.library.register_autograd("epkit::" + _name, _refuse_backward, lib=_library)

__all__: List[str] = ["register", "unregister"]

# SPDX-License-Identifier: Apache-2.0
"""Rows in the form of DeepEP's interface, and the origin of the tensors of a handle."""
import os
import weakref
from typing import Any, Dict, List, Sequence, Tuple, Union

import torch

import epkit
from epkit._tensors import want_tensor

from ._errors import is_refused

Rows = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]


class _Origins:
    """A tensor of a handle -> its plan or call: programs save the tensors for a backward pass and rebuild the tuple.

    The key is the memory, because a checkpoint or a hook of autograd returns other tensors of it. The value is an attribute of the
    object of torch that represents the memory: torch keeps this object, with its attributes, as long as any tensor of the
    memory exists, and releases it with the last one.
    """

    _NAME = "_epkit_origin"

    def __setitem__(self, tensor: torch.Tensor, origin: Any) -> None:
        setattr(tensor.untyped_storage(), self._NAME, origin)

    def get(self, tensor: torch.Tensor) -> Any:
        try:
            return getattr(tensor.untyped_storage(), self._NAME, None)
        except (NotImplementedError, RuntimeError):  # a tensor without memory, such as a sparse one
            return None


_origins = _Origins()

_ROW_TYPES = (torch.bfloat16, torch.float8_e4m3fn)


def _origin_of(handle: Any, keys: Dict[int, int]) -> Any:
    """The plan or call of a handle that a program has rebuilt from its tensors; None: unknown. `keys`: number of its members ->
    index of the tensor that _origins has."""
    key = handle[keys[len(handle)]] if isinstance(handle, (tuple, list)) and len(handle) in keys else None
    return _origins.get(key) if isinstance(key, torch.Tensor) else None


def _check_group(plan: epkit.Plan, comm: epkit.Communicator, call: str) -> None:
    """Refuses a handle of this plan unless a buffer of `comm` may use it; it works on the plan's communicator. A handle of DeepEP is
    valid for all buffers of its group, and programs replace their buffer by a larger one between a forward and a backward pass."""
    own = plan.comm
    if own is not comm and (own.group is None or own.group is not comm.group or own.device != comm.device):
        raise epkit.ArgumentError(f"{call}: handle is of another group: it belongs to a group of {own.size} ranks in which this is "
                                  f"rank {own.rank}")


def _with_columns(x: Any) -> Any:
    """Rows of any type as a type that the library accepts, and scales [N], one for each row, as [N, 1]."""
    if isinstance(x, torch.Tensor):
        return _as_bits(x)
    if isinstance(x, (tuple, list)) and len(x) == 2 and isinstance(x[1], torch.Tensor):
        return _as_bits(x[0]), x[1].unsqueeze(1) if x[1].dim() == 1 else x[1]
    return x


def _with_scales(x: Any) -> Tuple[Any, Any]:
    """(rows, scales) of what Order.rows() returned; scales None: there are none."""
    return x if isinstance(x, tuple) else (x, None)


def _as_bits(x: Any) -> Any:
    """A dispatch copies bits: rows of other types are viewed as bfloat16."""
    if not isinstance(x, torch.Tensor) or x.dtype in _ROW_TYPES or x.dim() != 2 or not x.is_contiguous():
        return x  # the library may refuse it
    if x.dtype.is_complex or x.shape[1] * x.element_size() % 16:
        return x
    return x.detach().view(torch.bfloat16)


def _as_given(x: Any, rows: Any) -> Any:
    """Received rows in the type and form of x, with scales of as many dimensions if x has scales."""
    scales, with_scales = rows.scales, isinstance(x, (tuple, list))
    if with_scales and isinstance(x[1], torch.Tensor) and x[1].dim() == 1:
        scales = scales.squeeze(1)
    first = x[0] if with_scales else x
    received = rows.x if first.dtype in _ROW_TYPES else rows.x.view(first.dtype)
    return (received, scales) if with_scales else received


def _biases(bias: Union[None, torch.Tensor, Sequence[torch.Tensor]]) -> Tuple[torch.Tensor, ...]:
    """None, one or several, of which any may be None, as a tuple."""
    biases = tuple(bias) if isinstance(bias, (tuple, list)) else () if bias is None else (bias,)
    for one in biases:
        if one is not None:
            want_tensor(one, "combine", "bias")
    return biases


class EarlyOutputs:
    """Results with memory for more rows than they have, because rows were sent before the host knew their number. At most
    $EPKIT_EARLY_OUTPUTS exist at a time.

    Attributes: able: devices exchange the counts: not on the CPU, nor on several hosts; and the variable, which is the same on all
    ranks, is not 0.
    """

    def __init__(self, comm: epkit.Communicator) -> None:
        given = os.environ.get("EPKIT_EARLY_OUTPUTS", "2")
        if not given.isdecimal():
            raise ValueError(f"$EPKIT_EARLY_OUTPUTS is {given!r}, must be a number of results, 0 or more")
        self._most = int(given)
        self._storages: List["weakref.ref[Any]"] = []
        self.able = comm.is_cuda and comm.nodes == 1 and self._most > 0

    def has_room(self) -> bool:
        """Whether one more may exist. Each rank for itself: the number of rows to send does not depend on it."""
        self._storages = [storage for storage in self._storages if storage() is not None]
        return len(self._storages) < self._most

    def add(self, out: torch.Tensor) -> None:
        self._storages.append(weakref.ref(out.untyped_storage()))

    @staticmethod
    def settle(plan: epkit.Plan) -> None:
        """plan.settle() before the dispatch. A plan that is refused stays as it is: other ranks may have called its dispatch, which
        all take part in, and which says so."""
        try:
            plan.settle()
        except epkit.ArgumentError as error:
            if not is_refused(error):
                raise

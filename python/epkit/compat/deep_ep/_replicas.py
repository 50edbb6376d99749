# SPDX-License-Identifier: Apache-2.0
"""Replicas of experts: their memory, and their weights and gradients as rows of a dispatch."""
from typing import TYPE_CHECKING, List, Sequence, Tuple, Union

import torch

import epkit
from epkit._tensors import want_tensor
from epkit.communicator import _choose_backend

from ._order import Order

if TYPE_CHECKING:
    from .elastic import ElasticBuffer

Payloads = Union[torch.Tensor, Sequence[torch.Tensor]]

_ALIGNMENT = 256  # bytes of each tensor of a BufferAllocator
_ROW = 1 << 14    # bytes of a row at most
_MOST_COPIES = 64  # of an expert: choices of a token


class BufferAllocator:
    """Tensors that get their memory when an EPBuffer is made with this plan: symmetric memory, all of it at once.

    Attributes: num_bytes, a multiple of 2 MiB; materialized.
    """

    def __init__(self) -> None:
        self._tensors: List[Tuple[torch.Tensor, int]] = []
        self._end = 0
        self.materialized = False

    @property
    def num_bytes(self) -> int:
        return -(-self._end // (2 << 20)) * (2 << 20)

    def allocate(self, shape: Union[int, Sequence[int]], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this shape. It may be read and written when the EPBuffer exists."""
        if self.materialized:
            raise RuntimeError("BufferAllocator.allocate: its EPBuffer has been made already: plan all tensors before")
        device = "cuda" if _choose_backend(None, None) == "cuda" else "cpu"
        tensor = torch.empty(1, dtype=dtype, device=device).expand((shape,) if isinstance(shape, int) else tuple(shape))
        self._tensors.append((tensor, self._end))
        self._end += -(-tensor.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return tensor

    def materialize(self, storage: torch.Tensor) -> None:
        """Called by EPBuffer. storage: num_bytes of memory."""
        self.materialized = True
        for tensor, at in self._tensors:
            real = storage[at:at + tensor.numel() * tensor.element_size()].view(tensor.dtype)
            tensor.set_(real.untyped_storage(), real.storage_offset(), tensor.shape, torch.empty(tensor.shape, device="meta").stride())


def _as_list(payloads: Payloads, call: str, name: str) -> List[torch.Tensor]:
    tensors = [payloads] if isinstance(payloads, torch.Tensor) else list(payloads)
    for one in tensors:
        want_tensor(one, call, name)
        if one.dim() < 1 or not one.shape[0] or not one.is_contiguous():
            raise epkit.ArgumentError(f"{call}: {name}: shape is {list(one.shape)}, must be contiguous with at least one expert")
    if not tensors:
        raise epkit.ArgumentError(f"{call}: {name} is empty")
    return tensors


def _check_mapping(buffer: "ElasticBuffer", call: str, mapping: torch.Tensor) -> None:
    want_tensor(mapping, call, "redundancy_mapping", "[ranks, slots]")
    if buffer._comm.nodes > 1:
        raise NotImplementedError(f"{call}: replicas are for the ranks of one host: DeepEP moves them over NVLink, too")
    if mapping.dtype != torch.int32 or mapping.dim() != 2 or mapping.shape[0] != buffer.num_ranks or not mapping.shape[1]:
        raise epkit.ArgumentError(f"{call}: redundancy_mapping: shape is {list(mapping.shape)} of {mapping.dtype}, must be "
                                  f"[{buffer.num_ranks}, slots] of torch.int32")


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each expert as rows of bfloat16: [experts, rows, elements]; padded to whole rows."""
    wide = tensor.view(tensor.shape[0], -1).view(torch.uint8)
    if wide.shape[1] % 16:
        raise epkit.ArgumentError(f"replicas: {wide.shape[1]} bytes of an expert are no multiple of 16")
    rows = -(-wide.shape[1] // _ROW)
    each = -(-wide.shape[1] // (16 * rows)) * 16
    padded = torch.nn.functional.pad(wide, (0, rows * each - wide.shape[1]))
    return padded.view(tensor.shape[0], rows, each).view(torch.bfloat16)


def prefetch(buffer: "ElasticBuffer", call: str, replicas: Payloads, weights: Payloads, mapping: torch.Tensor, order: Order) -> None:
    """Each local expert is a token whose choices are the slots that the mapping gives it. The host does not wait."""
    _check_mapping(buffer, call, mapping)
    replicas, weights = _as_list(replicas, call, "redundant_expert_weights"), _as_list(weights, call, "expert_weights")
    local, (ranks, slots), comm = weights[0].shape[0], mapping.shape, buffer._comm
    flat, own = mapping.flatten(), torch.arange(local, dtype=torch.int32, device=mapping.device) + comm.rank * local
    chosen = torch.where(flat == own.unsqueeze(1), torch.arange(ranks * slots, dtype=torch.int32, device=mapping.device), -1)
    if ranks * slots > _MOST_COPIES:
        chosen = chosen.topk(_MOST_COPIES).values
    mine = mapping[comm.rank]
    used = (mine >= 0).unsqueeze(1)
    place = (used.flatten().cumsum(0) - 1).clamp(min=0)  # of a slot among those in use, whose rows come one behind the other
    if len(replicas) != len(weights):
        raise epkit.ArgumentError(f"{call}: {len(replicas)} redundant_expert_weights for {len(weights)} expert_weights")
    for to, source in zip(replicas, weights):
        rows = _as_rows(source)
        bytes_of = source[0].numel() * source.element_size()
        if source.shape[0] != local or to.shape[0] != slots or to[0].numel() * to.element_size() != bytes_of:
            raise epkit.ArgumentError(f"{call}: redundant_expert_weights {list(to.shape)} for expert_weights {list(source.shape)}: must "
                                      f"have {slots} and {local} experts of the same bytes")
        plan = comm.plan(chosen.repeat_interleave(rows.shape[1], 0), ranks * slots, expanded=True,
                         max_recv_tokens=slots * rows.shape[1], stream=order.stream)
        received = plan._dispatch(rows.flatten(0, 1), None, None, False, False, None, order.stream).x
        arrived = received.view(torch.uint8).view(slots, -1)[:, :bytes_of]
        out = to.view(slots, -1).view(torch.uint8)
        out.copy_(torch.where(used, arrived[place], out))


def reduce(buffer: "ElasticBuffer", call: str, replicas: torch.Tensor, gradients: torch.Tensor, mapping: torch.Tensor,
           order: Order) -> None:
    """Each slot is a token whose choice is its expert; the owner adds the rows of an expert by (rank, slot), in float32."""
    _check_mapping(buffer, call, mapping)
    _as_list([replicas, gradients], call, "redundant_expert_grads, expert_grads")
    local, (ranks, slots), comm = gradients.shape[0], mapping.shape, buffer._comm
    if replicas.dtype != torch.float32 or gradients.dtype != torch.float32 or replicas.shape[0] != slots or \
            replicas.shape[1:] != gradients.shape[1:]:
        raise epkit.ArgumentError(f"{call}: redundant_expert_grads {list(replicas.shape)} of {replicas.dtype} for expert_grads "
                                  f"{list(gradients.shape)} of {gradients.dtype}: must be [{slots}, ...] and [experts, ...] of float32")
    rows = _as_rows(replicas)
    each = rows.shape[1]
    chosen = mapping[comm.rank].unsqueeze(1).repeat_interleave(each, 0)
    plan = comm.plan(chosen, ranks * local, expanded=True, stream=order.stream)
    received = plan._dispatch(rows.flatten(0, 1), None, None, False, False, None, order.stream).x
    total = gradients.view(local, -1)
    for expert, count in enumerate(plan.recv_per_expert):
        begin = sum(plan.recv_per_expert[:expert])
        for one in received[begin:begin + count].view(torch.float32).reshape(count // each, each * rows.shape[2] // 2):
            total[expert] += one[:total.shape[1]]

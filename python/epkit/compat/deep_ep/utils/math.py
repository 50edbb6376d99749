# SPDX-License-Identifier: Apache-2.0
"""Rounding, comparison, and the block-scaled fp8 format."""
from typing import Any, Tuple, TypeVar

import torch

BLOCK = 128  # elements that share a scale
LARGEST = 448.0  # of float8_e4m3fn
_Number = TypeVar("_Number", int, torch.Tensor)


def ceil_div(x: _Number, y: int) -> _Number:
    """x / y, rounded up."""
    return -(-x // y)


def align(x: _Number, y: int) -> _Number:
    """The smallest multiple of y that is not below x."""
    return ceil_div(x, y) * y


def safe_div(a: Any, b: Any) -> Any:
    """a / b, and 0 for 0 / 0."""
    return 0 if a == 0 and b == 0 else a / b


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """How far two tensors are apart, 0 for equal ones: 1 - 2<a,b> / (<a,a> + <b,b>) of x + 1 and y + 1, in double."""
    a, b = x.double() + 1, y.double() + 1
    return 1 - (2 * (a * b).sum() / (a.square() + b.square()).sum()).item()


def per_token_cast_to_fp8(x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """[m, n] to float8_e4m3fn, with a float32 factor for each 128 elements of a row: x is about value * factor."""
    rows, columns = x.shape
    width = align(columns, BLOCK)
    blocks = torch.nn.functional.pad(x, (0, width - columns)).float().view(rows, width // BLOCK, BLOCK)
    amax = blocks.abs().amax(-1).clamp(min=1e-4)
    values = (blocks * (LARGEST / amax).unsqueeze(-1)).to(torch.float8_e4m3fn)
    return values.view(rows, width)[:, :columns].contiguous(), amax / LARGEST


def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """The reverse, to bfloat16. int32 scales hold four ue8m0 bytes each, lowest first."""
    if x_fp8.numel() == 0:
        return x_fp8.to(torch.bfloat16)
    rows, columns = x_fp8.shape
    width = align(columns, BLOCK)
    if x_scales.dtype == torch.int32:
        exponents = x_scales.clone(memory_format=torch.contiguous_format).view(torch.uint8).to(torch.int32)
        x_scales = (exponents << 23).view(torch.float32)
    values = torch.nn.functional.pad(x_fp8.float(), (0, width - columns)).view(rows, width // BLOCK, BLOCK)
    return (values * x_scales.reshape(rows, width // BLOCK, 1)).view(rows, width)[:, :columns].to(torch.bfloat16).contiguous()


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Each row of x becomes its distinct entries in 0 .. num_slots - 1, the most frequent ones first where there is not
    room for all, then in descending order, then -1."""
    counts = torch.zeros((x.shape[0], num_slots + 1), dtype=torch.int64, device=x.device)
    slots = torch.where(x < 0, num_slots, x).to(torch.int64)
    counts.scatter_add_(1, slots, torch.ones_like(slots))
    counts = counts[:, :num_slots]
    keep = min(num_slots, x.shape[1])
    most, which = torch.sort(counts, dim=1, descending=True)
    which = torch.where(most > 0, which, -1).sort(dim=1, descending=True).values
    x.fill_(-1)
    x[:, :keep] = which[:, :keep].to(x.dtype)


def create_grouped_scores(scores: torch.Tensor, group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """scores [N, E], with 0 for experts of groups that are not in group_idx [N, any]."""
    chosen = torch.zeros((scores.shape[0], num_groups), dtype=torch.bool, device=scores.device)
    chosen.scatter_(1, group_idx, True)
    return scores * chosen.repeat_interleave(scores.shape[1] // num_groups, dim=1)


def hash_tensor(t: torch.Tensor) -> int:
    """A sum over the tensor's words: equal for equal contents."""
    t = t.contiguous()
    return int(t.view(torch.int32 if t.element_size() == 4 else torch.uint8).sum(dtype=torch.int64).item())


def hash_tensors(*tensors: Any) -> int:
    """All hashes of tensors, also in tuples and lists, combined by exclusive or."""
    value = 0
    for t in tensors:
        if isinstance(t, (tuple, list)):
            value ^= hash_tensors(*t)
        elif t is not None:
            value ^= hash_tensor(t)
    return value


def count_bytes(*tensors: Any) -> int:
    """Bytes of all elements of tensors, also in tuples and lists; None counts 0."""
    total = 0
    for t in tensors:
        if isinstance(t, (tuple, list)):
            total += count_bytes(*t)
        elif t is not None:
            total += t.numel() * t.element_size()
    return total

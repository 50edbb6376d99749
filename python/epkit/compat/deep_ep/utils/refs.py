# SPDX-License-Identifier: Apache-2.0
"""Reference results from torch.distributed alone, to compare dispatch and combine with."""
import math
from typing import Any, List, Optional, Tuple, Union

import torch
import torch.distributed as dist

from .envs import get_global_seed


def _exchange(parts: List[torch.Tensor], counts: List[int]) -> torch.Tensor:
    """parts[r] goes to rank r; counts[r] rows come from it. As bytes, since gloo does not know every type."""
    like = parts[0]
    flat = [part.contiguous().view(torch.uint8).flatten() for part in parts]
    row = like[:1].numel() * like.element_size() if like.shape[0] else math.prod(like.shape[1:]) * like.element_size()
    out = torch.empty(sum(counts) * row, dtype=torch.uint8, device=like.device)
    dist.all_to_all_single(out, torch.cat(flat), [count * row for count in counts], [part.numel() for part in flat])
    return out.view(like.dtype).view(sum(counts), *like.shape[1:])


def _rows(tensor: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """tensor[which], also of 8-bit floats, which older builds of torch cannot index."""
    if tensor.element_size() == 1:
        return tensor.view(torch.uint8)[which].view(tensor.dtype)
    return tensor[which]


def dispatch(x: Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]], topk_idx: torch.Tensor,
             topk_weights: Optional[torch.Tensor], num_max_tokens_per_rank: int, num_experts: int) -> Any:
    """Rows by (source rank, token), as a dispatch without expansion delivers them.

    Returns (x or (x, scales), topk_idx with local numbers and -1, topk_weights, source ids int32 [n], tokens of each rank
    int32 [R]). A source id is rank * num_max_tokens_per_rank + token.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    local = num_experts // size
    owner = torch.where(topk_idx < 0, -1, topk_idx // local)
    tokens = [(owner == to).any(1).nonzero().flatten() for to in range(size)]
    sent = torch.tensor([len(some) for some in tokens], dtype=torch.int32, device=topk_idx.device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    counts: List[int] = received.tolist()

    def move(tensor: Optional[torch.Tensor]) -> Any:
        return None if tensor is None else _exchange([_rows(tensor, some) for some in tokens], counts)

    ids = torch.arange(topk_idx.shape[0], dtype=torch.int32, device=topk_idx.device) + rank * num_max_tokens_per_rank
    idx = move(topk_idx)
    idx = torch.where((idx >= rank * local) & (idx < (rank + 1) * local), idx - rank * local, -1)
    rows = tuple(move(part) for part in x) if isinstance(x, tuple) else move(x)
    return rows, idx, move(topk_weights), move(ids), received.to("cpu")


def generate_pre_combine_data(src_token_global_idx: torch.Tensor, num_max_tokens_per_rank: int, num_topk: int,
                              hidden: int) -> torch.Tensor:
    """bfloat16 [n, K, H] that every rank computes alike from source ids: waves of a frequency of each (token, choice)."""
    most = dist.get_world_size() * num_max_tokens_per_rank * num_topk
    choice = torch.arange(num_topk, device=src_token_global_idx.device)
    seed = (src_token_global_idx.to(torch.int64).unsqueeze(1) * num_topk + choice) * 131071 % most
    column = torch.arange(1, hidden + 1, dtype=torch.float32, device=src_token_global_idx.device)
    angle = ((seed.float() + 1) / most).unsqueeze(2) * column + math.sin(float(get_global_seed()))
    return torch.sin(angle).to(torch.bfloat16)


def ordered_accumulate(data: torch.Tensor, initial_value: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Sum of [n, K, H] over K, one after the other in float32 on top of initial_value, rounded once to data's type."""
    total = torch.zeros_like(data[:, 0], dtype=torch.float32) if initial_value is None else initial_value.float().clone()
    for k in range(data.shape[1]):
        total += data[:, k].float()
    return total.to(data.dtype)


def _sum_groups(y: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """The choices of a group are added up in ascending order, rounded, and stand at the group's last choice; 0 elsewhere."""
    out = torch.zeros_like(y)
    for last in range(y.shape[1]):
        is_last = ~(group[:, last + 1:] == group[:, last:last + 1]).any(1)
        total = torch.zeros_like(y[:, 0], dtype=torch.float32)
        for k in range(last + 1):
            total += torch.where((group[:, k] == group[:, last]).unsqueeze(1), y[:, k].float(), 0)
        out[:, last] = torch.where(is_last.unsqueeze(1), total.to(y.dtype), 0)
    return out


def combine(y: torch.Tensor, topk_idx: torch.Tensor, num_scaleout_ranks: int, num_scaleup_ranks: int, num_experts: int,
            bias: Union[None, torch.Tensor, Tuple[torch.Tensor, torch.Tensor]], reduce_in_local: bool,
            reduce_in_scaleup: bool) -> torch.Tensor:
    """What a combine of y [N, K, H] has to give, by the order of each token's choices.

    reduce_in_local: the choices of a rank are added up and rounded first; reduce_in_scaleup: then those of a scale-up domain.
    """
    local = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    if reduce_in_local:
        y = _sum_groups(y, topk_idx.div(local, rounding_mode="floor"))
    if reduce_in_scaleup:
        y = _sum_groups(y, topk_idx.div(local * num_scaleup_ranks, rounding_mode="floor"))
    if isinstance(bias, tuple):
        bias = bias[0].float() + bias[1].float()
    return ordered_accumulate(y, bias)

# SPDX-License-Identifier: Apache-2.0
"""Replicas of experts: which experts get them, on which ranks, and which choice goes to which instance.

    mapping = epkit.balance.place(load, num_ranks, slots)          # int32 [R, slots]: expert, or -1
    physical = epkit.balance.route(topk_idx, mapping, num_experts)  # ids for a plan of R * (L + slots) experts

The same loads give the same mapping on every rank, so that nothing has to be agreed on. An expert's instances share its choices
evenly, in turn. A sum in the order of choices (EP_COMBINE_BY_CHOICE, expanded layout) has the same bits
whichever instance served a choice. Weights go to the slots by EPBuffer.lb_prefetch_weights() with this mapping.
"""
import heapq
from typing import List, Sequence, Union

import torch

from ._native import ArgumentError
from ._tensors import want_integer, want_tensor


def place(load: Union[torch.Tensor, Sequence[int]], num_ranks: int, slots: int) -> torch.Tensor:
    """The mapping of replicas, int32 [num_ranks, slots] on the CPU: -1 where a slot is not worth using.

    load: choices of each expert, integers; of all ranks together. Waits for it if it is on a device.

    One replica after the other: the expert with the most choices for each of its instances, of equal ones the first, gets one
    on the rank with the least load that has a free slot and no instance of it. It ends when no replica lowers the load of an
    instance, or slots are used up.
    """
    loads = [want_integer(one, "place", "load") for one in (load.tolist() if isinstance(load, torch.Tensor) else load)]
    num_ranks, slots = want_integer(num_ranks, "place", "num_ranks"), want_integer(slots, "place", "slots")
    if not loads or num_ranks < 1 or len(loads) % num_ranks or slots < 0 or min(loads) < 0:
        raise ArgumentError(f"place: {len(loads)} loads for {num_ranks} ranks of {slots} slots: must be a multiple of the ranks, and none "
                            "below 0")
    local = len(loads) // num_ranks
    homes: List[List[int]] = [[expert // local] for expert in range(len(loads))]
    mapping: List[List[int]] = [[] for _ in range(num_ranks)]
    order = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(order)
    while order:
        expert = heapq.heappop(order)[1]
        free = [rank for rank in range(num_ranks) if len(mapping[rank]) < slots and rank not in homes[expert]]
        if not free or loads[expert] <= len(homes[expert]):
            continue
        used = [0.0] * num_ranks
        for other, ranks in enumerate(homes):
            for rank in ranks:
                used[rank] += loads[other] / len(ranks)
        rank = min(free, key=lambda one: (used[one], one))
        homes[expert].append(rank)
        mapping[rank].append(expert)
        heapq.heappush(order, (-(loads[expert] // len(homes[expert])), expert))
    return torch.tensor([row + [-1] * (slots - len(row)) for row in mapping], dtype=torch.int32).view(num_ranks, slots)


def route(topk_idx: torch.Tensor, mapping: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The instance of each choice, of the type of topk_idx; -1 stays -1. On its device; the host does not wait.

    On each rank the L experts come first, then the slots: instance i of rank r is r * (L + slots) + i.
    """
    want_tensor(topk_idx, "route", "topk_idx", "[N, K]")
    want_tensor(mapping, "route", "mapping", "[ranks, slots]")
    ranks, slots = mapping.shape
    if num_experts % ranks:
        raise ArgumentError(f"route: num_experts is {num_experts}, no multiple of {ranks} ranks")
    local, device = num_experts // ranks, topk_idx.device
    flat = mapping.to(device).flatten().long()
    experts, place_of = torch.arange(num_experts, device=device), torch.arange(ranks * slots, device=device)
    # Instances of each expert: itself, then its slots in the order of (rank, slot).
    first = experts // local * (local + slots) + experts % local
    physical = place_of // max(slots, 1) * (local + slots) + local + place_of % max(slots, 1)
    hosted = flat.unsqueeze(0) == experts.unsqueeze(1)  # [E, R * slots]
    count = 1 + hosted.sum(1)
    table = torch.cat((first.unsqueeze(1), torch.where(hosted, physical, ranks * (local + slots)).sort(1).values), 1)
    # The number of a choice among this rank's choices of the same expert.
    ordered, order = topk_idx.flatten().sort(stable=True)
    number = torch.arange(len(ordered), device=device) - torch.searchsorted(ordered, ordered)
    number = torch.empty_like(order).scatter_(0, order, number).view(topk_idx.shape)
    chosen = topk_idx.long().clamp(min=0)
    return torch.where(topk_idx < 0, -1, table[chosen, number % count[chosen]]).to(topk_idx.dtype)

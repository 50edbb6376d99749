# SPDX-License-Identifier: Apache-2.0
"""epkit.balance against a slow reference, and replicas that give the bits of their experts."""
from fractions import Fraction

import deep_ep
import epkit
import torch
import torch.distributed as dist
from epkit import balance
from ranks import on_ranks, raises


def reference(loads, ranks, slots):
    """By the docstring of place(), in exact numbers: all candidates are compared for each replica."""
    local = len(loads) // ranks
    homes = {expert: [expert // local] for expert in range(len(loads))}
    placed = [[] for _ in range(ranks)]
    while True:
        able = [(-(loads[e] // len(homes[e])), e) for e in homes if loads[e] > len(homes[e]) and
                any(len(placed[r]) < slots and r not in homes[e] for r in range(ranks))]
        if not able:
            return [row + [-1] * (slots - len(row)) for row in placed]
        expert = min(able)[1]
        used = [sum(Fraction(loads[e], len(homes[e])) for e in homes if r in homes[e]) for r in range(ranks)]
        rank = min((used[r], r) for r in range(ranks) if len(placed[r]) < slots and r not in homes[expert])[1]
        homes[expert].append(rank)
        placed[rank].append(expert)


def test_places_of_replicas():
    torch.manual_seed(3)
    for ranks, local, slots in ((1, 4, 2), (2, 2, 1), (4, 2, 3), (3, 5, 2), (8, 1, 4), (4, 4, 0)):
        for most in (0, 2, 1000):
            loads = torch.randint(0, most + 1, (ranks * local,)) * torch.randint(0, 2, (ranks * local,))
            mapping = balance.place(loads, ranks, slots)
            assert mapping.dtype == torch.int32 and mapping.tolist() == (reference(loads.tolist(), ranks, slots) if slots else [[]] * ranks)
            for rank, row in enumerate(mapping.tolist()):
                used = [expert for expert in row if expert >= 0]
                assert len(set(used)) == len(used) and all(expert // local != rank for expert in used)
    skewed = [1000, 1, 1, 1, 1, 1, 1, 1]
    assert sorted(balance.place(skewed, 4, 1).flatten().tolist()) == [-1, 0, 0, 0]
    for bad in (([1, 2, 3], 2, 1), ([1, -2], 2, 1), ([], 2, 1), ([1, 2], 2, -1)):
        raises(epkit.ArgumentError, "place loads", balance.place, *bad)
    raises(TypeError, "place load float", balance.place, [1.5, 2], 2, 1)


def test_choices_of_an_expert_are_shared():
    torch.manual_seed(4)
    experts, ranks, slots = 8, 4, 2
    mapping = torch.tensor([[7, 3], [7, -1], [0, 7], [3, 0]], dtype=torch.int32)
    topk_idx = torch.randint(-1, experts, (100, 3))
    physical = balance.route(topk_idx, mapping, experts)
    logical = torch.full((ranks, 2 + slots), -1)
    logical[:, :2] = torch.arange(experts).view(ranks, 2)
    logical[:, 2:] = mapping
    assert torch.equal(torch.where(physical < 0, -1, logical.flatten()[physical.clamp(min=0)]), topk_idx)
    for expert in range(experts):
        counts = [int((physical == one).sum()) for one in (logical.flatten() == expert).nonzero().flatten().tolist()]
        assert max(counts) - min(counts) <= 1, (expert, counts)
    assert balance.route(topk_idx.to(torch.int32), mapping, experts).dtype == torch.int32
    assert balance.route(topk_idx[:0], mapping, experts).shape == (0, 3)
    raises(epkit.ArgumentError, "num_experts 7", balance.route, topk_idx, mapping, 7)


@on_ranks(4)
def test_replicas_have_the_bits_of_their_experts(rank, size):
    """Experts with weights of their own; the hot ones get replicas. Sums in the order of the choices do not change by a bit."""
    local, slots, hidden, topk = 2, 1, 64, 3
    experts, physical = local * size, (local + slots) * size
    plan = deep_ep.BufferAllocator()
    replicas = plan.allocate((slots, hidden), torch.bfloat16)
    buffer = deep_ep.EPBuffer(dist.group.WORLD, num_max_tokens_per_rank=32, hidden=hidden, num_topk=topk, allow_multiple_reduction=False,
                              lb_allocation_plan_or_num_bytes=plan)
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    weights = torch.randn(experts, hidden, generator=generator).to(torch.bfloat16)[rank * local:(rank + 1) * local]
    torch.manual_seed(rank)
    topk_idx = (torch.rand(32, topk) ** 3 * experts).long()  # the first ones are hot
    x = torch.randn(32, hidden).to(torch.bfloat16)
    load = torch.bincount(topk_idx.flatten(), minlength=experts)
    dist.all_reduce(load)
    mapping = balance.place(load, size, slots)
    buffer.lb_prefetch_weights(replicas, weights, mapping).wait()

    def layer(idx, count, tables):
        rows, _, _, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=count, do_expand=True, emit_expert_ids=True)
        return buffer.combine(rows * tables[handle.recv_expert_ids.long()], handle)[0], rows.shape[0]

    want, before = layer(topk_idx, experts, weights)
    got, after = layer(balance.route(topk_idx, mapping, experts), physical, torch.cat((weights, replicas)))
    assert torch.equal(got, want)
    most = torch.tensor([before, after])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    assert most[1] < most[0], most

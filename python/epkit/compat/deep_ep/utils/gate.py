# SPDX-License-Identifier: Apache-2.0
"""Scores of a gate, from which top-k choices follow, with rank 0 more loaded than the others."""
import torch


def _device() -> torch.device:
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def _loads(scores: torch.Tensor, num_ranks: int, num_topk: int) -> torch.Tensor:
    """Tokens that each rank receives: [R]."""
    ranks = scores.topk(num_topk, dim=1).indices // (scores.shape[1] // num_ranks)
    return torch.zeros((scores.shape[0], num_ranks), dtype=torch.float32, device=scores.device).scatter_(1, ranks, 1).sum(0)


def _scaled(num_tokens: int, num_experts: int, num_local: int, factor: float) -> torch.Tensor:
    scores = torch.rand((num_tokens, num_experts), dtype=torch.float32, device=_device())
    scores[:, :num_local] *= factor
    return scores


def _factor(num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float) -> float:
    """By bisection: the factor of rank 0's scores that gives it `ratio` times the others' mean load."""
    low, high = 1.0, 100.0
    for _ in range(20):
        middle = (low + high) / 2
        loads = _loads(_scaled(num_tokens, num_experts, num_experts // num_ranks, middle), num_ranks, num_topk)
        if loads[0] > loads[1:].mean() * ratio:
            high = middle
        else:
            low = middle
    return low


def _precise(num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float) -> torch.Tensor:
    """The first tokens of a random order choose an expert of rank 0, the others none; how many is found by bisection."""
    base = torch.rand((num_tokens, num_experts), dtype=torch.float32, device=_device())
    order = torch.randperm(num_tokens, device=base.device)
    num_local = num_experts // num_ranks
    if num_experts - num_local < num_topk:
        raise ValueError(f"{num_topk} choices do not fit the {num_experts - num_local} experts of the other ranks")

    def scores_of(count: int) -> torch.Tensor:
        scores = base.clone()
        scores[order[:count], torch.randint(num_local, (count,), device=base.device)] += 2
        scores[order[count:], :num_local] -= 2
        return scores

    low, high = 0, num_tokens
    while low < high:
        middle = (low + high + 1) // 2
        loads = _loads(scores_of(middle), num_ranks, num_topk)
        low, high = (middle, high) if loads[0] <= loads[1:].mean() * ratio else (low, middle - 1)
    scores = scores_of(low)
    return (scores - scores.min()) / (scores.max() - scores.min())


def get_unbalanced_scores(num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float,
                          precise: bool) -> torch.Tensor:
    """float32 [N, E] whose top-k choices send rank 0 `ratio` times the tokens of the other ranks' mean.

    precise: by construction instead of by chance.
    """
    if num_ranks == 1 or (ratio == 1.0 and not precise):
        return _scaled(num_tokens, num_experts, 0, 1.0)
    if precise:
        return _precise(num_tokens, num_experts, num_ranks, num_topk, ratio)
    return _scaled(num_tokens, num_experts, num_experts // num_ranks,
                   _factor(num_tokens, num_experts, num_ranks, num_topk, ratio))

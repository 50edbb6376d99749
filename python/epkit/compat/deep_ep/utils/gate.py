# SPDX-License-Identifier: Apache-2.0
"""Scores of a gate, from which top-k choices follow, with rank 0 more loaded than the others."""
import torch


def _device() -> torch.device:
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def _spread(chosen: torch.Tensor, num_ranks: int, num_local: int) -> torch.Tensor:
    """Whether each token goes to each rank: bool [N, R]."""
    there = torch.zeros((chosen.shape[0], num_ranks), dtype=torch.bool, device=chosen.device)
    return there.scatter_(1, chosen // num_local, True)


def generate_rank_count(num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float) -> torch.Tensor:
    """int32 [N, R]: how many of its choices each token has on each rank. Rank 0 gets `ratio` times the tokens of each other one,
    and these the same number but for one, as far as the numbers allow."""
    if ratio < 1:
        raise AssertionError(f"generate_rank_count: ratio is {ratio}, must be at least 1")
    device, local, others = _device(), num_experts // num_ranks, num_ranks - 1
    least = -(-num_topk // local)
    chosen = torch.rand((num_tokens, num_experts), device=device, dtype=torch.float32).topk(num_topk, 1).indices
    width = _spread(chosen, num_ranks, local).sum(1).clamp(least, max(least, int(others / ratio) + 1))
    total = int(width.sum())
    each = int(total / (others + ratio))
    everywhere = width == num_ranks
    hot_tokens = max(int(everywhere.sum()), min(total - each * others, int(each * ratio) + 1))
    # Those that go to all ranks go to rank 0, too; random ones of the rest.
    order = torch.argsort(torch.rand(num_tokens, device=device, dtype=torch.float32) - 2 * everywhere.float())
    hot = torch.zeros(num_tokens, dtype=torch.long, device=device)
    hot[order[:hot_tokens]] = 1
    # The other ranks are taken in turn.
    cold = width - hot
    turn = torch.arange(others, device=device)
    rank = torch.randperm(others, device=device)[((cold.cumsum(0) - cold).unsqueeze(1) + turn) % others] + 1
    share, rest = (num_topk // width).unsqueeze(1), (num_topk % width).unsqueeze(1)
    taken = torch.where(turn < cold.unsqueeze(1), share + (turn + hot.unsqueeze(1) < rest).long(), 0)
    count = torch.zeros((num_tokens, num_ranks), dtype=torch.int32, device=device).scatter_(1, rank, taken.to(torch.int32))
    count[:, :1] = (hot.unsqueeze(1) * (share + (rest > 0).long())).to(torch.int32)
    return count


def generate_topk_idx(rank_count: torch.Tensor, num_tokens: int, num_experts: int, num_ranks: int, num_topk: int) -> torch.Tensor:
    """int64 [N, K]: so many random experts of each rank."""
    if list(rank_count.shape) != [num_tokens, num_ranks] or bool((rank_count.sum(1) != num_topk).any()):
        raise AssertionError(f"generate_topk_idx: rank_count must be [{num_tokens}, {num_ranks}], and {num_topk} in each row")
    local = num_experts // num_ranks
    order = torch.rand((num_tokens, num_ranks, local), device=rank_count.device, dtype=torch.float32).argsort(-1)
    experts = order + (torch.arange(num_ranks, device=rank_count.device) * local).view(1, -1, 1)
    return experts[torch.arange(local, device=rank_count.device) < rank_count.unsqueeze(2)].view(num_tokens, num_topk)


def get_precise_unbalanced_scores(num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float) -> torch.Tensor:
    """float32 [N, E] whose top-k choices are by construction those of generate_rank_count()."""
    count = generate_rank_count(num_tokens, num_experts, num_ranks, num_topk, ratio)
    chosen = generate_topk_idx(count, num_tokens, num_experts, num_ranks, num_topk)
    scores = torch.rand((num_tokens, num_experts), device=count.device, dtype=torch.float32) * 0.9
    return scores.scatter_(1, chosen, 0.901 + 0.099 * torch.rand(chosen.shape, device=count.device, dtype=torch.float32))


def get_scores_by_factor(num_tokens: int, num_experts: int, num_ranks: int, factor: float) -> torch.Tensor:
    """float32 [N, E]: up to `factor` for the experts of rank 0, up to 1 for others."""
    scores = torch.empty((num_tokens, num_experts), dtype=torch.float32, device=_device())
    scores[:, :num_experts // num_ranks].uniform_(to=factor)
    scores[:, num_experts // num_ranks:].uniform_(to=1)
    return scores


def map_unbalanced_ratio_to_factor(num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float) -> float:
    """By bisection: the factor that gives rank 0 `ratio` times the others' mean load."""
    low, high = 1.0, 100.0
    for _ in range(20):
        middle = (low + high) / 2
        chosen = get_scores_by_factor(num_tokens, num_experts, num_ranks, middle).topk(num_topk, 1).indices
        loads = _spread(chosen, num_ranks, num_experts // num_ranks).float().sum(0)
        if loads[0] > loads[1:].mean() * ratio:
            high = middle
        else:
            low = middle
    return low


def get_random_unbalanced_scores(num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float) -> torch.Tensor:
    """float32 [N, E] that gives rank 0 about `ratio` times the load of others."""
    unbalanced = ratio != 1.0 and num_ranks > 1
    factor = map_unbalanced_ratio_to_factor(num_tokens, num_experts, num_ranks, num_topk, ratio) if unbalanced else 1.0
    return get_scores_by_factor(num_tokens, num_experts, num_ranks, factor)


def get_unbalanced_scores(num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float,
                          precise: bool) -> torch.Tensor:
    """float32 [N, E] whose top-k choices send rank 0 `ratio` times the tokens of the other ranks' mean.

    precise: by construction instead of by chance.
    """
    make = get_precise_unbalanced_scores if precise and num_ranks > 1 else get_random_unbalanced_scores
    return make(num_tokens, num_experts, num_ranks, num_topk, ratio)

# SPDX-License-Identifier: Apache-2.0
"""What a backend of the library does not have yet, made of what it has: in stream order, on the tensors' device.

Plan uses it where the library raises UnsupportedError: facts of a plan (ep_plan_get_metadata) and plans from a mask.
"""
import torch

WORDS = 4  # int32 in the 16 bytes that rows are a multiple of


def as_rows(words):
    """int32 [n, w], w a multiple of 4, as bfloat16 rows, which travel bit for bit."""
    return words.view(torch.bfloat16)


def padded(tensor, width):
    """int32 [n, w] with columns of -1 up to `width`."""
    return torch.nn.functional.pad(tensor.to(torch.int32), (0, width - tensor.shape[1]), value=-1)


def gather(comm, row, stream):
    """int32 [n] of every rank: [R, n]. Collective, in stream order; the first one makes a plan."""
    if comm._everyone is None:
        every = torch.arange(comm.size, dtype=torch.int64, device=comm.device).unsqueeze(0)
        comm._everyone = comm._native.plan(every, None, None, comm.size, 0, 1, 0, 0, stream)
    width = -(-row.shape[0] // WORDS) * WORDS
    sent = padded(row.unsqueeze(0), width).contiguous()
    got = torch.empty((comm.size, width), dtype=torch.int32, device=comm.device)
    comm._everyone.dispatch(as_rows(sent), None, None, as_rows(got), None, None, None, stream)
    return got[:, :row.shape[0]]


def choices_of_mask(token_in_rank, num_experts):
    """int64 [N, R]: the first expert of each rank that a token goes to, otherwise -1."""
    ranks = token_in_rank.shape[1]
    first = torch.arange(ranks, dtype=torch.int64, device=token_in_rank.device) * (num_experts // ranks)
    return torch.where(token_in_rank.to(torch.bool), first, -1).contiguous()


def counts_of_mask(comm, tokens_per_expert, stream):
    """int32 [L]: received tokens of each local expert."""
    local = tokens_per_expert.shape[0] // comm.size
    every = gather(comm, tokens_per_expert, stream)
    return every.sum(0, dtype=torch.int32)[comm.rank * local:(comm.rank + 1) * local].contiguous()


def _send_sources(plan, stream):
    """What every received row is: (rank + 1, token, choices ...) int32, and in the expanded layout the number of its choice.

    Rows that are none have a first word below 1.
    """
    routing, device = plan._routing, plan.comm.device
    tokens, topk = routing.shape
    width = -(-(2 + topk) // WORDS) * WORDS
    place = torch.arange(tokens, dtype=torch.int32, device=device)
    sent = torch.cat((torch.full_like(place, plan.comm.rank + 1).unsqueeze(1), place.unsqueeze(1), routing.to(torch.int32)), 1)
    got = torch.full((plan.out_rows, width), -1, dtype=torch.int32, device=device)
    which = choice = None
    if plan.expanded:
        which = torch.arange(topk, dtype=torch.float32, device=device).expand(tokens, topk).contiguous()
        choice = torch.zeros(plan.out_rows, dtype=torch.float32, device=device)
    plan._native.dispatch(as_rows(padded(sent, width).contiguous()), None, which, as_rows(got), None, None, choice, stream)
    return got, choice.to(torch.int64) if plan.expanded else None


def _count(values, size):
    """int32 [size]: how often each of 0 .. size - 1 occurs; other values do not count."""
    values = torch.where((values >= 0) & (values < size), values, size).to(torch.int64).flatten()
    counts = torch.zeros(size + 1, dtype=torch.int32, device=values.device)
    return counts.scatter_add_(0, values, torch.ones_like(values, dtype=torch.int32))[:size]


def _tokens_of_rows(plan, rank, token, choice):
    """Expanded layout: rows to tokens. Returns (rank of each token, its index there, slots [out_rows, K])."""
    rows = plan.out_rows
    key = torch.where(rank >= 0, (rank.to(torch.int64) << 32) + token, 2 ** 62)
    key, order = torch.sort(key, stable=True)
    valid = key < 2 ** 62
    first = valid & (torch.diff(key, prepend=key.new_full((1,), -1)) != 0)
    at = torch.where(valid, first.to(torch.int64).cumsum(0) - 1, rows)  # the row behind the last one takes what is none
    slots = torch.full((rows + 1, plan._routing.shape[1]), -1, dtype=torch.int32, device=key.device)
    slots[at, choice[order]] = order.to(torch.int32)
    ranks = torch.full((rows + 1,), -1, dtype=torch.int32, device=key.device)
    tokens = torch.zeros_like(ranks)
    ranks[at], tokens[at] = rank[order], token[order]
    ranks = ranks[:rows].contiguous()
    return ranks, tokens[:rows], torch.where((ranks >= 0).unsqueeze(1), slots[:rows], 0)


def metadata(plan, source_stride, stream):
    """The fields of epkit.Metadata. Collective. torch works in `stream` already."""
    comm, local = plan.comm, plan.num_experts // plan.comm.size
    got, choice = _send_sources(plan, stream)
    rank, token = torch.where(got[:, 0] > 0, got[:, 0] - 1, -1), got[:, 1]
    slots = None
    own = got[:, 2:2 + plan._routing.shape[1]]
    if plan.expanded:
        own = own.gather(1, choice.unsqueeze(1))
        rows = rank
        rank, token, slots = _tokens_of_rows(plan, rank, token, choice)
    else:
        rows = rank
    if plan._exact is not None:
        exact = plan._exact
    else:
        exact = _count(torch.where((rows >= 0).unsqueeze(1) & (own >= 0), own - comm.rank * local, -1), local)
    aligned = (exact + plan.alignment - 1) // plan.alignment * plan.alignment
    ends = aligned.cumsum(0, dtype=torch.int32)
    per_rank = _count(rank, comm.size)
    source = torch.where(rank >= 0, rank * (source_stride or plan.most_tokens) + token, 0).to(torch.int32)
    sent = gather(comm, comm.layout(plan._routing, plan.num_experts)[0], stream)
    return (source, slots, per_rank.sum(0, dtype=torch.int32).view(1), per_rank.cumsum(0, dtype=torch.int32),
            ends - aligned + exact if plan.expanded else ends, exact, sent.cumsum(0, dtype=torch.int32))

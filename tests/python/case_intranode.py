# SPDX-License-Identifier: Apache-2.0
"""Buffer: what DeepEP's test of one node asserts, on the CPU."""
import itertools

import deep_ep
import epkit
import torch
import torch.distributed as dist
from deep_ep.utils.math import calc_diff, create_grouped_scores, inplace_unique, per_token_cast_back, per_token_cast_to_fp8
from ranks import CUDA, on_ranks, raises, run

TOKENS, HIDDEN, TOPK = 48, 256, 4
NOT_ON_CUDA = {"test_events": "events of the CPU"}


def make_routing(rank, size, experts):
    torch.manual_seed(rank)
    scores = torch.randn(TOKENS, experts).abs() + 1
    topk_idx = torch.topk(scores, TOPK, dim=-1, sorted=False).indices
    topk_idx[3] = -1
    topk_idx[::5, 2] = -1
    rank_idx = topk_idx.div(experts // size, rounding_mode="floor")
    rank_idx.masked_fill_(topk_idx == -1, -1)
    inplace_unique(rank_idx, size)
    in_rank = torch.stack([(rank_idx == to).any(1) for to in range(size)], 1)
    return topk_idx, in_rank


def check_layout(buffer, topk_idx, in_rank, experts, size):
    per_rank, per_rdma_rank, per_expert, is_in_rank, event = buffer.get_dispatch_layout(topk_idx, experts)
    assert torch.equal(per_rank, in_rank.sum(0, dtype=torch.int32)) and per_rank.dtype == torch.int32
    nodes = buffer.runtime.get_num_rdma_ranks()
    per_node = in_rank.view(len(in_rank), nodes, size // nodes).any(2).sum(0, dtype=torch.int32)
    assert event.event is None and (per_rdma_rank is None if nodes == 1 else torch.equal(per_rdma_rank, per_node))
    assert torch.equal(per_expert, torch.stack([(topk_idx == e).sum() for e in range(experts)]).to(torch.int32))
    assert torch.equal(is_in_rank, in_rank) and is_in_rank.dtype == torch.bool
    return per_rank, per_expert, is_in_rank


def check_data(rows, prefix):
    """Rows of source i are constant and i."""
    assert torch.equal(rows.amin(1), rows.amax(1))
    begin = 0
    for source, end in enumerate(prefix.tolist()):
        assert (rows[begin:end].int() - source).sum().item() == 0
        begin = end
    assert begin == rows.shape[0]


class Call:
    """Calls of one of the 24 combinations."""

    def __init__(self, buffer, previous, asynchronous):
        self.buffer, self.previous, self.asynchronous = buffer, previous, asynchronous

    def __call__(self, name, **args):
        if self.previous:
            args["previous_event"] = self.buffer.capture()
        result = getattr(self.buffer, name)(async_finish=self.asynchronous, **args)
        if self.asynchronous:
            assert result[-1].event is not None
            result[-1].current_stream_wait()
        return result


def check_handle(handle, prefix, per_rank, in_rank, rank, size):
    """As DeepEP documents and reads it, on one node and on several. Returns the token of each row on its source rank."""
    if len(handle) == 6:
        assert torch.equal(handle[0], prefix)
        return handle[3]
    assert torch.equal(handle[-4], prefix[:, rank])  # what DeepEP's test of nodes reads
    mask, to_node, to_rank, _, _, first, _, meta, head, _ = handle
    by_node = in_rank.view(len(in_rank), len(to_node), -1).any(2)
    assert torch.equal(mask, in_rank) and torch.equal(to_rank.flatten(), per_rank)
    assert to_node.flatten().tolist() == by_node.sum(0).tolist() and first.flatten().tolist() == [0, *prefix[:-1, rank].tolist()]
    assert torch.equal(head >= 0, by_node) and (head.amax(0) + 1).tolist() == by_node.sum(0).tolist()
    assert [tuple(one.shape) for one in handle[3:5]] == [(len(to_node), 1), (len(to_node),)] and handle[9].shape == (0, 8)
    rank_of, token = meta.view(torch.int32).unbind(1)
    assert torch.equal(rank_of, torch.repeat_interleave(torch.diff(prefix[:, rank], prepend=prefix.new_zeros(1))).to(torch.int32))
    return token


def one_case(call, x, constant, with_topk, routing, layout, rank, size, experts):
    topk_idx, in_rank = routing
    per_rank, per_expert, is_in_rank = layout
    weights = (torch.ones(TOKENS, TOPK) * rank) if constant else torch.rand(TOKENS, TOPK)
    args = {"x": x, "num_tokens_per_rank": per_rank, "is_token_in_rank": is_in_rank, "num_tokens_per_expert": per_expert,
            "config": deep_ep.Config(8, 8, 256)}
    if with_topk:
        args.update(topk_idx=topk_idx, topk_weights=weights)
    recv, recv_idx, recv_weights, counts, handle, _ = call("dispatch", **args)
    rows = per_token_cast_back(*recv) if isinstance(recv, tuple) else recv
    all_per_rank = [torch.empty_like(per_rank) for _ in range(size)]
    dist.all_gather(all_per_rank, per_rank)
    prefix = torch.stack(all_per_rank).cumsum(0, dtype=torch.int32)
    token = check_handle(handle, prefix, per_rank, is_in_rank, rank, size)
    total = per_expert.view(size, -1).clone()
    dist.all_reduce(total)
    assert counts == total[rank].tolist()
    assert rows.shape[0] == sum(one[rank] for one in all_per_rank)
    if constant:
        check_data(rows, prefix[:, rank])
    sources = token.split(torch.diff(prefix[:, rank], prepend=prefix.new_zeros(1)).tolist())
    assert torch.equal(sources[rank], in_rank[:, rank].nonzero().flatten().int())

    if with_topk:
        local = experts // size
        assert ((recv_idx == -1) | ((recv_idx >= 0) & (recv_idx < local))).all()
        assert [(recv_idx == e).sum().item() for e in range(local)] == counts
        assert (recv_weights[recv_idx < 0] == 0).all()
        if constant:
            check_data(torch.where(recv_idx < 0, recv_weights.amax(1, keepdim=True), recv_weights), prefix[:, rank])
        worst = size * TOKENS
        more = call("dispatch", **args, num_worst_tokens=worst)
        n = rows.shape[0]
        assert more[3] == [] and more[1].shape[0] == worst
        for a, b in zip(more[0] if isinstance(recv, tuple) else (more[0],), recv if isinstance(recv, tuple) else (recv,)):
            assert a.shape[0] == worst and torch.equal(a[:n].view(torch.uint8), b.view(torch.uint8))
        assert torch.equal(more[1][:n], recv_idx) and torch.equal(more[2][:n], recv_weights) and (more[1][n:] == -1).all()
    else:
        assert recv_idx is None and recv_weights is None
        again = call("dispatch", x=x, handle=handle, config=None)
        assert again[1:5] == (None, None, None, None)
        same = per_token_cast_back(*again[0]) if isinstance(again[0], tuple) else again[0]
        assert torch.equal(same, rows)

    args = {"x": rows, "handle": handle}
    if with_topk:
        args["topk_weights"] = recv_weights
    combined, combined_weights, _ = call("combine", **args)
    fan_out = in_rank.sum(1, keepdim=True)
    reference = per_token_cast_back(*x) if isinstance(x, tuple) else x
    kept = fan_out[:, 0] > 0
    assert calc_diff(combined[kept].float() / fan_out[kept], reference[kept]) < 5e-6
    assert (combined[~kept] == 0).all()
    if with_topk:
        assert calc_diff(combined_weights, weights.masked_fill(topk_idx < 0, 0)) < 1e-9


def cases(rank, size):
    experts = 4 * size
    buffer = deep_ep.Buffer(dist.group.WORLD, int(2e9), 0, low_latency_mode=False, num_qps_per_rank=1,
                            explicitly_destroy=True)
    routing = make_routing(rank, size, experts)
    layout = check_layout(buffer, *routing, experts, size)
    constant = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16) * rank
    random = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    cast = per_token_cast_to_fp8(random)
    fp8 = (cast[0], cast[1].T.contiguous().T)  # scales with strides
    count = 0
    for previous, asynchronous, x, with_topk in itertools.product((False, True), (False, True), (random, constant, fp8),
                                                                  (False, True)):
        one_case(Call(buffer, previous, asynchronous), x, x is constant, with_topk, routing, layout, rank, size, experts)
        count += 1
    assert count == 24
    buffer.destroy()


def test_24_combinations_2_ranks():
    run(2, cases)


def test_24_combinations_3_ranks():
    run(3, cases)


@on_ranks(2)
def test_bias_is_exact(rank, size):
    buffer = deep_ep.Buffer(dist.group.WORLD)
    experts = 4 * size
    topk_idx, in_rank = make_routing(rank, size, experts)
    layout = buffer.get_dispatch_layout(topk_idx, experts)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    recv, _, _, _, handle, _ = buffer.dispatch(x, num_tokens_per_rank=layout[0], is_token_in_rank=layout[3],
                                               num_tokens_per_expert=layout[2], topk_idx=topk_idx,
                                               topk_weights=torch.rand(TOKENS, TOPK))
    one, two = torch.randn_like(x), torch.randn_like(x)
    for given in (one, (one, two)):
        out = buffer.combine(recv, handle, bias=given)[0]
        # By the contract: biases first, then a row of each rank in rank order, in float32, rounded once.
        total = one.float() if given is one else one.float() + two.float()
        for to in range(size):
            total = torch.where(in_rank[:, to:to + 1], total + x.float(), total)
        assert torch.equal(out, total.to(torch.bfloat16))


def dispatch_new(buffer, x, topk_idx, weights, experts):
    layout = buffer.get_dispatch_layout(topk_idx, experts)
    choices = {} if weights is None else {"topk_idx": topk_idx, "topk_weights": weights}
    return buffer.dispatch(x, num_tokens_per_rank=layout[0], is_token_in_rank=layout[3], num_tokens_per_expert=layout[2], **choices)


def sent_before_counts(rank, size):
    """Rows that are sent before their host knows how many there are, to more and to fewer than expected: what a dispatch that waits
    brings, and so with the handle."""
    early, waits = deep_ep.Buffer(dist.group.WORLD), deep_ep.Buffer(dist.group.WORLD)
    early._early.able, waits._early.able = True, False  # on the CPU there is nothing to gain
    experts, attempts = 4 * size, []
    for step, tokens in enumerate((300, 320, 40, 3000, 2900, 0, 3000, 300, 4000)):
        torch.manual_seed(10 * step + rank)
        tokens += 7 * rank
        topk_idx = torch.rand(tokens, experts).topk(TOPK).indices
        weights = None if step in (2, 4) else torch.rand(tokens, TOPK)  # without: from the mask alone
        topk_idx[torch.rand(tokens, TOPK) < 0.3] = -1
        x = per_token_cast_to_fp8(torch.randn(tokens, HIDDEN)) if step % 2 else torch.randn(tokens, HIDDEN).to(torch.bfloat16)
        before = early._expected
        a, b = dispatch_new(early, x, topk_idx, weights, experts), dispatch_new(waits, x, topk_idx, weights, experts)
        attempts.append(1 if before >= a[4].plan._most_recv else 2)
        for one, other in zip((*(a[0] if step % 2 else a[:1]), *a[1:3], *a[4]), (*(b[0] if step % 2 else b[:1]), *b[1:3], *b[4])):
            assert one is other is None or (one.shape == other.shape and one.dtype == other.dtype and torch.equal(
                one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)))
        assert a[3] == b[3] and waits._expected == 256
        again = early.dispatch(x, handle=a[4])[0]
        for one, other in zip(*((again, a[0]) if step % 2 else ((again,), a[:1]))):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        y = torch.randn(len(a[0][0]) if step % 2 else len(a[0]), HIDDEN).to(torch.bfloat16)
        sums = early.combine(y, a[4], a[2]), waits.combine(y, b[4], b[2])
        assert torch.equal(sums[0][0], sums[1][0]) and (weights is None or torch.equal(sums[0][1], sums[1][1]))
        raises(epkit.ArgumentError, "x shape", early.combine, y[1:], a[4]) if len(y) else None
    assert attempts == [2, 1, 1, 2, 1, 1, 1, 1, 2], attempts
    early.runtime._comm.check()


def test_sent_before_counts_2_ranks():
    run(2, sent_before_counts)


def test_sent_before_counts_3_ranks():
    run(3, sent_before_counts)


@on_ranks(2)
def test_a_rank_without_room_sends_what_is_refused(rank, size):
    """Without room for one more result of the expected size a rank waits for the counts before it sends. Where all ranks refuse them
    it sends all the same: others are in that dispatch already."""
    buffer, settle, sent = deep_ep.Buffer(dist.group.WORLD), epkit.Plan.settle, []
    topk_idx, x = torch.arange(600).view(600, 1) % size, torch.full((600, HIDDEN), rank + 1, dtype=torch.bfloat16)
    place, buffer._early.able = buffer._place_rows, True

    def note(plan, *args):
        sent.append(plan.fixed)
        return place(plan, *args)

    def as_on_gpus(plan):
        raise refused

    buffer._place_rows = note
    if not CUDA:  # there the host knows counts only after the dispatch
        plan = buffer._comm.plan(topk_idx, size, max_recv_tokens=1)
        refused = raises(epkit.ArgumentError, "EP_E_CAPACITY", plan.dispatch, x)
    if rank == 0:
        buffer._early._most, epkit.Plan.settle = 0, settle if CUDA else as_on_gpus
    rows, _, _, counts, handle, _ = dispatch_new(buffer, x, topk_idx, torch.ones(600, 1), size)
    epkit.Plan.settle = settle
    assert sent == [True, False] and counts == [600] and rows[:, 0].tolist() == [1] * 300 + [2] * 300
    assert torch.equal(buffer.combine(rows, handle)[0], x)


def grouped():
    scores = torch.rand(5, 12)
    masked = create_grouped_scores(scores, torch.tensor([[0], [1], [2], [3], [1]]), 4)
    for row, group in enumerate((0, 1, 2, 3, 1)):
        assert torch.equal(masked[row, 3 * group:3 * group + 3], scores[row, 3 * group:3 * group + 3])
        assert (masked[row] != 0).sum() <= 3


@on_ranks(2)
def test_rows_of_any_type(rank, size):
    """A dispatch moves bits, of whatever type: what comes is what a dispatch of the same bits as bfloat16 brings."""
    buffer = deep_ep.Buffer(dist.group.WORLD)
    experts = 4 * size
    torch.manual_seed(rank)
    idx = torch.rand(9, experts).topk(2).indices
    bits = torch.randint(0, 256, (9, 256), dtype=torch.uint8)
    layout = buffer.get_dispatch_layout(idx, experts)
    new = {"num_tokens_per_rank": layout[0], "is_token_in_rank": layout[3], "num_tokens_per_expert": layout[2], "topk_idx": idx}
    want, handle = [buffer.dispatch(bits.view(torch.bfloat16), **new)[i] for i in (0, 4)]
    words = torch.randint(-2**31, 2**31 - 1, (9, 3), dtype=torch.int32)
    for dtype in (torch.float32, torch.float16, torch.int32, torch.int64, torch.uint8, torch.int8, torch.float8_e5m2, torch.bool):
        x = bits.view(dtype) if dtype is not torch.bool else bits > 127
        for arguments in (new, {"handle": handle}):
            recv = buffer.dispatch(x, **arguments)[0]
            assert recv.dtype == dtype and recv.shape[1] == x.shape[1]
            assert dtype is torch.bool or torch.equal(recv.view(torch.uint8), want.view(torch.uint8))
            if x.element_size() == 1:
                recv, scales = buffer.dispatch((x, words), **arguments)[0]
                assert recv.dtype == dtype and scales.dtype == torch.int32 and scales.shape == (recv.shape[0], 3)
                assert dtype is torch.bool or torch.equal(recv.view(torch.uint8), want.view(torch.uint8))
    x = torch.randn(9, 64, requires_grad=True)
    assert not buffer.dispatch(x, **new)[0].requires_grad
    raises(epkit.ArgumentError, "x float16", buffer.dispatch, torch.zeros(9, 4, dtype=torch.float16), **new)
    raises(epkit.ArgumentError, "combine x float32 bfloat16", buffer.combine, torch.zeros(want.shape[0], 64), handle)


def test_helpers():
    grouped()
    x = torch.tensor([[3, 3, 1, -1], [0, 2, 2, 2], [-1, -1, -1, -1]])
    inplace_unique(x, 4)
    assert x.tolist() == [[3, 1, -1, -1], [2, 0, -1, -1], [-1, -1, -1, -1]]
    y = torch.randn(7, 300).to(torch.bfloat16)
    assert calc_diff(per_token_cast_back(*per_token_cast_to_fp8(y)), y) < 1e-3


def test_events():
    event = deep_ep.EventOverlap()
    assert event.event is None
    with event:  # nothing to wait for
        pass
    event, order = deep_ep.EventOverlap(deep_ep.EventHandle()), []
    event.register_hook_after_wait(lambda: order.append("hook") or 7)
    with event(release_handle=True):
        order.append("work")
    assert order == ["work", "hook"] and event.event is None
    assert deep_ep.EventOverlap(deep_ep.EventHandle()).current_stream_wait() is None

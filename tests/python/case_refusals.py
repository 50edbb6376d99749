# SPDX-License-Identifier: Apache-2.0
"""Arguments that are of another kind, or do not fit each other: the exception names the argument, before anything is sent."""
import array
import contextlib
import ctypes
import functools
import io
import os

import deep_ep
import epkit
import epkit.selftest
import torch
import torch.distributed as dist
from ranks import on_ranks, raises

H = 128
NOT_ON_CUDA = {"test_a_selftest_of_many_ranks": "28 ranks need as many contexts of a GPU"}


def setting(size):
    topk_idx = torch.arange(12).view(6, 2) % (2 * size)
    return topk_idx, torch.ones(6, H, dtype=torch.bfloat16), torch.rand(6, 2)


@on_ranks(2)
def test_kinds_of_arguments(rank, size):
    buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 12)
    topk_idx, x, weights = setting(size)
    experts, bad = 2 * size, epkit.ArgumentError
    send = buffer.low_latency_dispatch
    raises(TypeError, "low_latency_dispatch x NoneType tensor", send, None, topk_idx, 8, experts)
    raises(TypeError, "low_latency_dispatch x tuple tensor", send, (x, x), topk_idx, 8, experts)
    raises(TypeError, "low_latency_dispatch topk_idx list", send, x, [[1, 2]], 8, experts)
    raises(bad, "low_latency_dispatch x shape [N, H]", send, x[0], topk_idx, 8, experts)
    raises(bad, "low_latency_dispatch topk_idx shape [N, K]", send, x, topk_idx[:, 0], 8, experts)
    raises(TypeError, "num_max_dispatch_tokens_per_rank NoneType integer", send, x, topk_idx, None, experts)
    raises(TypeError, "num_max_dispatch_tokens_per_rank float integer", send, x, topk_idx, 8.0, experts)
    raises(TypeError, "num_experts NoneType integer", send, x, topk_idx, 8, None)
    for most in (0, -1):
        raises(bad, f"num_max_dispatch_tokens_per_rank {most}", send, x[:0], topk_idx[:0], most, experts)
    raises(TypeError, "low_latency_dispatch dispatch_wait_recv_cost_stats list", functools.partial(
        send, dispatch_wait_recv_cost_stats=[0, 0]), x, topk_idx, 8, experts)
    for stats, words in ((torch.zeros(2, dtype=torch.int64), "int64"), (torch.zeros(3, dtype=torch.int32), "[3]"),
                         (torch.zeros(4, dtype=torch.int32)[::2], "strides [2]")):
        raises(bad, f"low_latency_dispatch cumulative_local_expert_recv_stats {words}", send, x, topk_idx, 8, experts, stats)
    raises(TypeError, "cumulative_local_expert_recv_stats list", send, x, topk_idx, 8, experts, [0, 0])
    raises(bad, "dispatch_wait_recv_cost_stats int32", functools.partial(
        send, dispatch_wait_recv_cost_stats=torch.zeros(size, dtype=torch.int32)), x, topk_idx, 8, experts)
    rows, _, handle, _, _ = send(x, topk_idx, 8, experts, use_fp8=False)
    raises(TypeError, "low_latency_combine topk_idx NoneType", buffer.low_latency_combine, rows, None, weights, handle)
    raises(bad, "low_latency_combine combine_wait_recv_cost_stats [3]", functools.partial(
        buffer.low_latency_combine, combine_wait_recv_cost_stats=torch.zeros(3, dtype=torch.int64)), rows, topk_idx, weights, handle)
    raises(TypeError, "layout topk_idx NoneType", buffer.get_dispatch_layout, None, experts)
    raises(TypeError, "layout num_experts NoneType", buffer.get_dispatch_layout, topk_idx, None)
    raises(TypeError, "get_local_buffer_tensor dtype NoneType", buffer.get_local_buffer_tensor, None)
    layout = buffer.get_dispatch_layout(topk_idx, experts)
    args = {"num_tokens_per_rank": layout[0], "is_token_in_rank": layout[3], "num_tokens_per_expert": layout[2],
            "topk_idx": topk_idx, "topk_weights": weights}
    raises(TypeError, "num_tokens_per_expert list", buffer.dispatch, x, **{**args, "num_tokens_per_expert": [1, 2]})
    raises(TypeError, "is_token_in_rank list", buffer.dispatch, x, **{**args, "is_token_in_rank": layout[3].tolist()})
    raises(bad, "is_token_in_rank shape", buffer.dispatch, x, **{**args, "is_token_in_rank": layout[3][1:]})
    for mask, words in ((layout[3].int(), "is_token_in_rank int32 bool"),
                        (layout[3].t().contiguous().t(), "is_token_in_rank strides contiguous"),
                        (layout[3].repeat(1, 2)[:, ::2], "is_token_in_rank strides contiguous")):
        raises(bad, words, buffer.dispatch, x, **{**args, "is_token_in_rank": mask})
        raises(bad, words, buffer.dispatch, x, is_token_in_rank=mask, num_tokens_per_expert=layout[2])
    got, _, _, _, handle, _ = buffer.dispatch(x, **args)
    assert torch.equal(buffer.combine(got, handle)[0].float(), x.float() * layout[3].sum(1, keepdim=True))


@on_ranks(2)
def test_more_kinds_of_arguments(rank, size):
    buffer = deep_ep.Buffer(dist.group.WORLD, enable_shrink=True)
    elastic = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=8)
    topk_idx, x, weights = setting(size)
    send = functools.partial(elastic.dispatch, num_experts=2 * size)
    raises(TypeError, "dispatch topk_idx list tensor", send, x, [[1, 2]], weights)
    raises(epkit.ArgumentError, "dispatch topk_idx shape [N, K]", send, x, topk_idx[0], weights)
    raises(TypeError, "dispatch stats list tensor", send, x, topk_idx, weights, [0, 0])
    for name in ("num_experts", "num_max_tokens_per_rank", "expert_alignment"):
        raises(TypeError, f"dispatch {name} float integer", send, x, topk_idx, weights, **{name: 8.5})
    rows, _, _, handle, _ = send(x, topk_idx, weights)
    for bias in (3, (x, "x"), [3]):
        raises(TypeError, "combine bias tensor", elastic.combine, rows, handle, None, bias)
    assert torch.equal(elastic.combine(rows, handle)[0].float(), x.float() * (len(set(map(int, topk_idx[0] // 2)))))
    # Nothing is known of the counts: the field is a bound, as the others are.
    for alignment in (0, 1, 8):
        bounds = [send(x, topk_idx, weights, expert_alignment=alignment, do_cpu_sync=False, do_expand=expand)[3].num_expanded_tokens
                  for expand in (False, True)]
        assert bounds[0] == bounds[1] >= size * 8 * 2
    raises(TypeError, "rank_to_mask str integer", buffer.low_latency_update_mask_buffer, "0")
    raises(TypeError, "mask_status NoneType tensor", buffer.low_latency_query_mask_buffer, None)
    raises(AssertionError, "negative -2", deep_ep.Buffer.set_num_sms, -2)
    raises(TypeError, "new_num_sms float integer", deep_ep.Buffer.set_num_sms, 8.0)


@on_ranks(2)
def test_native_kinds_of_arguments(rank, size):
    """What would have been ignored, or taken for something else."""
    comm = epkit.Communicator()
    topk_idx, x, weights = setting(size)
    in_rank, counts = torch.ones(6, size, dtype=torch.bool), torch.full((2 * size,), 6, dtype=torch.int32)
    for other in ({"token_in_rank": in_rank}, {"tokens_per_expert": counts}):
        raises(epkit.ArgumentError, f"plan topk_idx and {next(iter(other))}", comm.plan, topk_idx, 2 * size, **other)
    raises(TypeError, "allgather_bytes int bytes", comm.allgather_bytes, 3)
    raises(TypeError, "allgather_bytes str bytes", comm.allgather_bytes, "abc")
    raises(TypeError, "allgather_bytes list bytes", comm.allgather_bytes, [1, 2])
    pair = (ctypes.c_uint8 * 2)(97, 98)
    for data in (memoryview(b"ab"), memoryview(b"a-b")[::2], bytearray(b"ab"), array.array("B", b"ab"), pair):
        assert comm.allgather_bytes(data) == b"ab" * size
    raises(epkit.ArgumentError, "empty shape [-1, -2] negative", comm.empty, -1, -2)
    for wrong in (2.0, "3", "", b"ab", None):
        raises(TypeError, "empty size integer", comm.empty, wrong)
    assert comm.empty(torch.tensor(3), True).shape == (3, 1) and comm.empty(torch.Size([2, 0])).shape == (2, 0)
    for shape in (range(2, 4), torch.tensor([2, 3]), array.array("q", [2, 3]), (size for size in (2, 3))):
        assert comm.empty(shape).shape == (2, 3)
    assert comm.empty(torch.tensor(3)).shape == (3,) and comm.empty(()).shape == ()
    rows = comm.low_latency(8, H, 2 * size, 2)
    y = rows.dispatch(x, topk_idx).x
    error = raises(TypeError, "recv_stats", rows.dispatch, x, topk_idx, recv_stats="3")
    assert str(error) == "low_latency_dispatch: recv_stats is a str, must be a tensor with data in memory", error
    for value, name in (("2", "str"), (None, "NoneType"), (2.5, "float")):
        error = raises(TypeError, "alloc", comm._native.alloc, value)
        assert str(error) == f"alloc: bytes is a {name}, must be an integer", error
    raises(epkit.ArgumentError, "low_latency_combine call -1", rows.combine, y, topk_idx, weights, call=-1)
    comm.barrier()


@on_ranks(2)
def test_kinds_of_rows(rank, size):
    """Rows without dimensions, or that are none; and what belongs to them."""
    comm, buffer = epkit.Communicator(), deep_ep.Buffer(dist.group.WORLD)
    elastic = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=8)
    topk_idx, x, weights = setting(size)
    experts, bad, scalar = 2 * size, epkit.ArgumentError, torch.zeros((), dtype=torch.bfloat16)
    plan, calls = comm.plan(topk_idx, experts), comm.low_latency(8, H, experts, 2)
    _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, experts)
    v1 = buffer.dispatch(x, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=topk_idx)[4]
    v2 = elastic.dispatch(x, topk_idx, num_experts=experts)[3]
    again = (plan.dispatch, functools.partial(buffer.dispatch, handle=v1), functools.partial(elastic.dispatch, handle=v2))
    for send in again:
        raises(bad, "dispatch x shape", send, scalar)
        raises(TypeError, "dispatch x int", send, (1, torch.ones(6, 1)))
        raises(TypeError, "dispatch scales int", send, (x, 2))
        raises((bad, TypeError), "dispatch shape scales", send, (x.to(torch.float8_e4m3fn), torch.ones(())))
        raises(TypeError, "dispatch x tuple", send, (x, x, x))
    rows = plan.dispatch(x)
    raises(TypeError, "dispatch scales int", plan.dispatch, (x, 2), out=rows)
    raises(bad, "dispatch scales shape", plan.dispatch, (x, scalar), out=rows)
    for back in (plan.combine, functools.partial(buffer.combine, handle=v1), functools.partial(elastic.combine, handle=v2)):
        raises(bad, "combine x shape", back, scalar)
    raises(TypeError, "combine bias[0] int", plan.combine, x, bias=3)
    for out in (3, "x", []):
        raises(TypeError, f"dispatch out {type(out).__name__} tensor", plan.dispatch, x, out=out)
    raises(bad, "dispatch out shape", plan.dispatch, x, out=scalar)
    raises(TypeError, "dispatch plan NoneType Plan", epkit.dispatch, None, x)
    raises(TypeError, "dispatch x tuple tensor", epkit.dispatch, plan, (x, torch.ones(6, 1)))
    raises(TypeError, "combine plan NoneType Plan", epkit.combine, None, x)
    raises(TypeError, "combine x NoneType tensor", epkit.combine, plan, None)
    raises(TypeError, "moe comm NoneType Communicator", epkit.moe, None, x, topk_idx, weights, experts, lambda rows, counts: rows)
    raises(TypeError, "moe x NoneType tensor", epkit.moe, comm, None, topk_idx, weights, experts, lambda rows, counts: rows)
    raises(TypeError, "moe topk_weights NoneType", epkit.moe, comm, x, topk_idx, None, experts, lambda rows, counts: rows)
    for most in (-1, 9, 2 ** 40):
        raises(bad, f"max_tokens {most} 8", calls.dispatch, x, topk_idx, max_tokens=most)
    raises(TypeError, "merge_mask other NoneType LowLatency", calls.merge_mask, None)
    raises(TypeError, "num_experts str integer", comm.low_latency, 8, H, "4", 2)
    raises(TypeError, "empty dtype str", comm.empty, 3, dtype="float32")
    costs = torch.zeros(1, size + 1, dtype=torch.int64)  # of which the last rank has no row
    raises(bad, "wait_recv_cost_stats shape", functools.partial(buffer.low_latency_dispatch, dispatch_wait_recv_cost_stats=costs),
           x, topk_idx, 8, experts)
    assert torch.equal(plan.combine(plan.dispatch(x).x)[0].float(), x.float() * in_rank.sum(1, keepdim=True))


@on_ranks(2)
def test_a_combine_has_the_size_of_its_dispatch(rank, size):
    """A combine of fewer rows than its dispatch gave would read what lies behind them."""
    comm = epkit.Communicator()
    topk_idx, x, weights = setting(size)
    calls, bad = comm.low_latency(8, H, 2 * size, 2), epkit.ArgumentError
    raises(bad, "max_tokens 0", calls.dispatch, x[:0], topk_idx[:0], max_tokens=0)
    for most in (8, 6):
        rows = calls.dispatch(x, topk_idx, max_tokens=most)
        other = torch.full((2, size * 7, H), 7, dtype=torch.bfloat16)
        for call in (rows.call, 0):
            raises(bad, f"low_latency_combine max_tokens 7 {most}", calls.combine, other, topk_idx, weights, call=call,
                   max_tokens=7)
        out, _ = calls.combine(rows.x, topk_idx, torch.ones_like(weights), call=rows.call, max_tokens=most)
        assert torch.equal(out, x * 2)
    before = calls.dispatch(x, topk_idx, max_tokens=7)  # the one before is remembered as well
    calls.dispatch(x, topk_idx, max_tokens=6)
    raises(bad, "max_tokens 6 7", calls.combine, rows.x, topk_idx, weights, call=before.call, max_tokens=6)
    out, _ = calls.combine(before.x, topk_idx, torch.ones_like(weights), call=before.call, max_tokens=7)
    assert torch.equal(out, x * 2)


@on_ranks(4)
def test_groups(rank, size):
    half = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    mine, other = half if rank in (0, 2) else half[::-1]
    for make in (deep_ep.Buffer, deep_ep.ElasticBuffer, epkit.Communicator):
        raises(ValueError, "Communicator no member group", make, other)
        raises(TypeError, "group list process", make, [0, 1])
        raises(TypeError, "group str process", make, "0")
    raises(ValueError, "ElasticBuffer group None", deep_ep.ElasticBuffer, None)
    raises(ValueError, "device meta CUDA CPU", epkit.Communicator, device="meta")
    raises(ValueError, "backend cuda device cpu", epkit.Communicator, backend="cuda", device="cpu")
    raises(ValueError, "backend host device cuda:0", epkit.Communicator, backend="host", device="cuda:0")
    raises(TypeError, "timeout str seconds", epkit.Communicator, timeout="30")
    before = os.environ["EPKIT_BACKEND"]
    os.environ["EPKIT_BACKEND"] = "rocm"
    raises(ValueError, "$EPKIT_BACKEND rocm", epkit.Communicator)
    os.environ["EPKIT_BACKEND"] = before
    # Two groups in turn, one of them in another order than its ranks.
    pair, every = deep_ep.Buffer(mine), deep_ep.Buffer(dist.group.WORLD)
    assert pair.group_size == 2 and pair.rank == dist.get_rank(mine) and every.rank == rank
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        for buffer in (pair, every):
            experts = 2 * buffer.group_size
            topk_idx = torch.rand(6, experts).topk(2).indices
            x = torch.randint(-8, 8, (6, H)).to(torch.bfloat16)
            layout = buffer.get_dispatch_layout(topk_idx, experts)
            rows, _, _, _, handle, _ = buffer.dispatch(x, None, *layout[:2], layout[3], layout[2], topk_idx)
            out = buffer.combine(rows, handle)[0]
            assert torch.equal(out.float(), x.float() * layout[3].sum(1, keepdim=True))


def test_a_selftest_of_no_ranks():
    """Ranks that are not there prove nothing."""
    for words in (["0"], ["00"], ["-1"], ["two"], ["\u00b2"], ["2", "2"]):
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            assert epkit.selftest.main(words) == 2, words
        assert repr(" ".join(words)) in said.getvalue() and "number of ranks" in said.getvalue()


def test_a_selftest_explains_itself():
    for words in (["-h"], ["--help"]):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            assert epkit.selftest.main(words) == 0, words
        assert "python -m epkit.selftest" in said.getvalue()


@on_ranks(28)
def test_a_selftest_of_many_ranks(rank, size):
    comm = epkit.Communicator()
    epkit.selftest._work(comm)
    comm.barrier()

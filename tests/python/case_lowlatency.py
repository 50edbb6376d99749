# SPDX-License-Identifier: Apache-2.0
"""Buffer with low latency: what DeepEP's test asserts, on the CPU, and shrinking."""
import gc
import os
import random
import tempfile
import threading
import time

import deep_ep
import epkit
import torch
import torch.distributed as dist
from deep_ep.utils.math import calc_diff, hash_tensor, per_token_cast_back
from ranks import CUDA, on_ranks, raises, run

TOKENS, HIDDEN, TOPK = 16, 512, 4
OFFSET = 128
MASK = 2 ** 32 - 1

NOT_ON_CUDA = {"test_a_hook_is_refused": "there a barrier is queued, and nobody waits in it",
               "test_a_mask_that_is_not_cleaned": "there the failure comes with a later call",
               "test_a_rank_ends_behind_its_last_combine": "there a rank that has ended is seen at once, whoever waits for it"}


def make(rank, size, seed):
    torch.manual_seed(seed + rank)
    random.seed(seed + rank)
    experts = 4 * size
    x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16) * (rank - OFFSET)
    x[:, -128:] = torch.arange(TOKENS).to(torch.bfloat16).view(-1, 1)
    noise = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16) * 0.1
    topk_idx = torch.topk(torch.randn(TOKENS, experts).abs() + 1, TOPK).indices
    for _ in range(6):
        topk_idx[random.randint(0, TOKENS - 1), random.randint(0, TOPK - 1)] = -1
    return x, noise, topk_idx, torch.randn(TOKENS, TOPK).abs(), experts


def variants(x, noise):
    for current in (x, noise):
        for hook in (False, True):
            for fp8, rounded, ue8m0 in ((0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)):
                yield current, hook, bool(fp8), bool(rounded), bool(ue8m0)


def dispatch(buffer, current, topk_idx, experts, hook, fp8, rounded, ue8m0, stats):
    recv, count, handle, event, receive = buffer.low_latency_dispatch(
        current, topk_idx, TOKENS, experts, use_fp8=fp8, round_scale=rounded, use_ue8m0=ue8m0,
        cumulative_local_expert_recv_stats=stats, async_finish=not hook, return_recv_hook=hook)
    receive() if hook else event.current_stream_wait()
    return recv, count, handle


def check_rows(recv_x, handle, expert, topk_all, rounded, size, valid):
    source, ranges = handle[0][expert[1]], handle[1][expert[1]]
    assert valid == (ranges & MASK).sum().item() == (topk_all == expert[0]).sum().item()
    rows, source = recv_x[:valid], source[:valid]
    low = rows[:, :-128].amin(-1)
    assert torch.equal(low, rows[:, :-128].amax(-1))
    if rounded:
        assert not valid or calc_diff(rows[:, -1], source) < 0.007
    else:
        assert (rows[:, -128:] - source.view(-1, 1) % TOKENS).sum().item() == 0
    for rank in range(size):
        begin, count = (ranges[rank] >> 32).item(), (ranges[rank] & MASK).item()
        assert count == (topk_all[rank] == expert[0]).sum().item()
        if not rounded:
            assert (low == rank - OFFSET).sum().item() == count
            assert (low[begin:begin + count] == rank - OFFSET).all()


def whole(buffer, rank, size, seed):
    x, noise, topk_idx, weights, experts = make(rank, size, seed)
    local = experts // size
    gathered = [torch.empty_like(topk_idx) for _ in range(size)]
    dist.all_gather(gathered, topk_idx)
    topk_all = torch.stack(gathered)
    value = 0
    for number, (current, hook, fp8, rounded, ue8m0) in enumerate(variants(x, noise), 1):
        for _ in range(number % 2 + 1):  # a dispatch may be dropped
            stats = torch.zeros(local, dtype=torch.int32)
            recv, count, handle = dispatch(buffer, current, topk_idx, experts, hook, fp8, rounded, ue8m0, stats)
        assert torch.equal(stats, count)
        if fp8:
            columns = HIDDEN // (512 if ue8m0 else 128)
            assert recv[1].shape == (local, size * TOKENS, columns) and recv[1].stride(1) == 1
            simulated = torch.stack([per_token_cast_back(recv[0][i], recv[1][i].contiguous()) for i in range(local)])
        else:
            simulated = recv.clone()
        for i in range(local):
            valid = count[i].item()
            if current is x:
                check_rows(simulated[i], handle, (rank * local + i, i), topk_all, rounded, size, valid)
            for tensor in recv if fp8 else (recv,):
                value ^= hash_tensor(tensor[i, :valid])
        for zero_copy in (False, True):  # two combines answer one dispatch
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = simulated
            out = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
            combined, event, receive = buffer.low_latency_combine(
                simulated, topk_idx, weights, handle, async_finish=not hook, zero_copy=zero_copy,
                return_recv_hook=hook, out=out)
            receive() if hook else event.current_stream_wait()
            assert combined.data_ptr() == out.data_ptr() and not torch.isnan(combined).any()
            expected = current * weights.masked_fill(topk_idx == -1, 0).sum(1, keepdim=True)
            assert calc_diff(expected, combined) < (9e-4 if fp8 else 1e-5)
            value ^= hash_tensor(combined)
    return value


def repeated(rank, size, times):
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    first = whole(buffer, rank, size, 1)
    for _ in range(times):
        assert whole(buffer, rank, size, 1) == first
    buffer.destroy()


def test_all_variants_2_ranks():
    run(2, repeated, 2)


def test_all_variants_4_ranks():
    run(4, repeated, 1)


@on_ranks(2)
def test_sizes_change_between_calls(rank, size):
    """M, H, E and K of a call may change from call to call, also to many sizes, each larger than all before."""
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
    many = tuple((16, 128 * blocks, 2) for blocks in range(5, 30))
    for most, hidden, topk in ((16, 256, 2), (8, 256, 2), (32, 256, 2), (16, 512, 3)) + many:
        torch.manual_seed(rank)
        experts = 4 * size
        topk_idx = torch.rand(most // 2, experts).topk(topk).indices
        x = torch.randint(-4, 4, (most // 2, hidden)).to(torch.bfloat16)
        cost, matrix = torch.zeros(size, dtype=torch.int64), torch.zeros(size, size, dtype=torch.int64)
        recv, count, handle, _, hook = buffer.low_latency_dispatch(x, topk_idx, most, experts, use_fp8=False,
                                                                   dispatch_wait_recv_cost_stats=cost)
        assert hook is None and recv.shape == (4, size * most, hidden)
        out, _, _ = buffer.low_latency_combine(recv, topk_idx, torch.ones(most // 2, topk), handle, use_logfmt=True,
                                               combine_wait_recv_cost_stats=matrix)
        assert torch.equal(out, x * topk)
        assert (cost >= 0).all() and (matrix >= 0).all() and (matrix[1 - rank] == 0).all()


@on_ranks(2)
def test_no_tokens(rank, size):
    """A rank without tokens, and one whose choices are all -1."""
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
    x, _, topk_idx, weights, experts = make(rank, size, 3)
    x, topk_idx, weights = (x[:0], topk_idx[:0], weights[:0]) if rank == 0 else (x, torch.full_like(topk_idx, -1), weights)
    recv, count, handle, _, hook = buffer.low_latency_dispatch(x, topk_idx, TOKENS, experts, return_recv_hook=True)
    hook()
    assert (count == 0).all() and (handle[1] & MASK == 0).all()
    out, _, hook = buffer.low_latency_combine(torch.ones(recv[0].shape, dtype=torch.bfloat16), topk_idx, weights, handle,
                                              return_recv_hook=True)
    hook()
    assert out.shape == x.shape and (out == 0).all()


@on_ranks(3)
def test_two_hooks_are_open(rank, size):
    """Two halves of calls are open at a time, as two micro-batches want: received in any order, the same on all ranks."""
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
    experts = 4 * size
    for step in range(4):
        torch.manual_seed(100 * step + rank)
        x = [torch.randint(-8, 8, (TOKENS - rank, 256)).to(torch.bfloat16) for _ in range(2)]
        idx = [torch.rand(TOKENS - rank, experts).topk(TOPK).indices for _ in range(2)]
        weights = [torch.randint(1, 4, (TOKENS - rank, TOPK)).float() for _ in range(2)]
        want = [a.float() * w.sum(1, keepdim=True) for a, w in zip(x, weights)]

        def send(i):
            return buffer.low_latency_dispatch(x[i], idx[i], TOKENS, experts, use_fp8=False, return_recv_hook=True)

        def answer(i, sent):
            return buffer.low_latency_combine(sent[0], idx[i], weights[i], sent[2], return_recv_hook=True)

        sent = [send(0), send(1)]
        for i in (0, 1) if step % 2 else (1, 0):
            sent[i][4]()
            raises(epkit.ArgumentError, "received already", sent[i][4])
        back = [answer(0, sent[0]), answer(1, sent[1])]
        for i in (1, 0) if step % 2 else (0, 1):
            back[i][2]()
        assert all(torch.equal(one[0].float(), total) for one, total in zip(back, want)), "two dispatches, then two combines"
        # A combine is open while the next micro-batch is dispatched.
        first = send(0)
        first[4]()
        combined = answer(0, first)
        second = send(1)
        combined[2]()
        second[4]()
        last = answer(1, second)
        last[2]()
        assert torch.equal(combined[0].float(), want[0]) and torch.equal(last[0].float(), want[1]), "a combine and a dispatch"
    # Until its rows are here nothing can be computed of them.
    first = send(0)
    raises(epkit.ArgumentError, "EP_E_STATE finish()", answer, 0, first)
    first[4]()


class Sender:
    """Calls with hooks, each with rows of its own."""

    def __init__(self, rank, size):
        self.buffer, self.experts = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True), 4 * size
        torch.manual_seed(rank)

    def send(self):
        x = torch.randint(-8, 8, (TOKENS, 256)).to(torch.bfloat16)
        idx = torch.rand(TOKENS, self.experts).topk(TOPK).indices
        recv, count, handle, _, hook = self.buffer.low_latency_dispatch(x, idx, TOKENS, self.experts, use_fp8=False,
                                                                        return_recv_hook=True)
        return recv, count, handle, hook, x, idx

    def answer(self, sent, factor=1.0):
        out, _, hook = self.buffer.low_latency_combine(sent[0], sent[5], torch.full((TOKENS, TOPK), factor), sent[2],
                                                       return_recv_hook=True)
        return out, hook, sent[4] * factor * TOPK


@on_ranks(3)
def test_hooks_are_lost(rank, size):
    """A rank loses hooks, or calls them much later, and others do not: later calls are as ever."""
    calls = Sender(rank, size)
    for step in range(6):
        lost = (step + rank) % 2 == 0  # ranks need not do the same
        dropped = [calls.send() for _ in range(2)]
        if not lost:
            for one in dropped:
                one[3]()
        kept = dropped[0][3], dropped[0]
        del dropped
        sent = calls.send()  # receives the first one, if nobody has
        assert kept[1][1].sum() == (kept[1][2][1] & MASK).sum() > 0, "rows that were received for a later call"
        assert (kept[1][0][0, :kept[1][1][0]] != 0).any()
        if lost:
            kept[0]()  # has nothing left to do
        raises(epkit.ArgumentError, "received already", kept[0])
        sent[3]()
        out, hook, want = calls.answer(sent)
        if not lost:
            hook()
        again, second, twice = calls.answer(sent, 2.0)  # of the same dispatch: receives the first answer
        assert torch.equal(out, want)
        if lost:
            hook()
        del second
        third, hook, wanted = calls.answer(sent, 4.0)
        assert torch.equal(again, twice)
        hook()
        assert torch.equal(third, wanted)


@on_ranks(2)
def test_hooks_are_never_called(rank, size):
    """A program that never calls a hook: it receives nothing that it may rely on, and every call works. Nor does anybody wait
    for it in the end, which takes a deadline."""
    os.environ["EPKIT_TIMEOUT_MS"] = "60000" if CUDA else "3600000"
    calls = Sender(rank, size)
    for _ in range(9):
        calls.send()
    for _ in range(5):
        sent = calls.send()
        sent[3]()
        results = [calls.answer(sent, float(i))[::2] for i in range(3)]
        assert all(torch.equal(*one) for one in results[:2])
    gc.collect()
    calls.buffer.low_latency_dispatch(sent[4], sent[5], TOKENS, calls.experts)
    dist.barrier()


@on_ranks(2)
def test_a_hook_is_refused(rank, size):
    """A hook that is refused while another thread is in a call may be called again."""
    calls = Sender(rank, size)
    sent = calls.send()
    if rank == 0:
        waits = threading.Thread(target=calls.buffer._comm.barrier)
        waits.start()
        while not is_busy(calls.buffer._comm):
            time.sleep(0.001)
        raises(epkit.ArgumentError, "another thread", sent[3])
        dist.barrier()
        waits.join()
    else:
        dist.barrier()
        calls.buffer._comm.barrier()
    sent[3]()
    out, hook, want = calls.answer(sent)
    hook()
    assert torch.equal(out, want)


def is_busy(comm):
    try:
        comm.set_num_sms(0)
    except epkit.ArgumentError:
        return True
    return False


def ends_behind_a_combine(rank, size, times):
    """A rank that has everything ends at once, without a word. One that receives later has its rows."""
    pids = [None] * size
    dist.all_gather_object(pids, os.getpid())
    calls = Sender(rank, size)
    for step in range(times):
        sent = calls.send()
        sent[3]()
        out, hook, want = calls.answer(sent)
        while rank == 0 and step == times - 1 and is_there(pids[-1]):
            time.sleep(0.01)
        hook()
        assert torch.equal(out, want)
    if rank == size - 1:
        os._exit(0)


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_rank_ends_behind_its_last_combine():
    for times in (1, 2, 3):  # buffers are used in turn
        run(3, ends_behind_a_combine, times)


@on_ranks(3)
def test_a_rank_that_ends_is_masked(rank, size):
    """A rank ends; the others say so, mask it and go on, with its choices at -1 from then on."""
    os.environ["EPKIT_TIMEOUT_MS"] = "30000"
    said = tempfile.TemporaryFile()
    os.dup2(said.fileno(), 2)
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, enable_shrink=True)
    x, _, topk_idx, weights, experts = make(rank, size, 7)
    recv, count, handle = dispatch(buffer, x, topk_idx, experts, False, False, False, False, None)
    if rank == size - 1:
        os._exit(0)
    status = torch.empty(size, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    while not status[size - 1]:
        buffer.clean_low_latency_buffer(TOKENS, HIDDEN, experts)
        buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * (size - 1) + [1]
    said.seek(0)
    assert CUDA or f"epkit: rank {rank} of {size}: low latency continues without rank {size - 1}\n".encode() in said.read()
    lives = topk_idx.masked_fill(topk_idx >= (size - 1) * (experts // size), -1)
    recv, count, handle = dispatch(buffer, x, topk_idx, experts, False, False, False, False, None)
    out, _, _ = buffer.low_latency_combine(recv.clone(), lives, weights, handle)
    expected = x * weights.masked_fill(lives == -1, 0).sum(1, keepdim=True)
    assert calc_diff(expected, out) < 1e-5
    try:
        buffer.low_latency_update_mask_buffer(size + 3, True)
    except epkit.ArgumentError as error:
        assert "rank_to_mask" in str(error)
    else:
        raise AssertionError("a rank that is none was masked")


@on_ranks(4)
def test_a_rank_is_missing_from_the_first_call(rank, size):
    """A rank is gone before its first call, as in DeepEP's test of shrinking; the others find that out in theirs. They know the
    sizes by the hint that the buffer was made with."""
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, size, 4 * size)
    buffer = deep_ep.Buffer(dist.group.WORLD, num_rdma_bytes=hint, low_latency_mode=True, explicitly_destroy=True, enable_shrink=True)
    x, _, topk_idx, weights, experts = make(rank, size, 11)
    if rank == 1:
        buffer.destroy()
        return
    lives = topk_idx.masked_fill(topk_idx // 4 == 1, -1)
    status = torch.zeros(size, dtype=torch.int32)
    for step, (_, hook, fp8, rounded, ue8m0) in enumerate(variants(x, x)):
        for topk in (TOPK, 1):
            stats = torch.zeros(4, dtype=torch.int32)
            recv, count, handle = dispatch(buffer, x, topk_idx[:, :topk].contiguous(), experts, hook, fp8, rounded, ue8m0, stats)
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [int(one == 1) for one in range(size)] and torch.equal(stats, count)
            rows = torch.stack([per_token_cast_back(*pair) for pair in zip(recv[0], recv[1].contiguous())]) if fp8 else recv.clone()
            left, weight = lives[:, :topk].contiguous(), weights[:, :topk].contiguous()
            out, _, _ = buffer.low_latency_combine(rows, left, weight, handle)
            assert calc_diff(x * weight.masked_fill(left == -1, 0).sum(1, keepdim=True), out) < (9e-4 if fp8 else 1e-5)
        raises(epkit.ArgumentError, "topk is 3 had 1", buffer.low_latency_combine, rows, topk_idx[:, :3].contiguous(),
               weights[:, :3].contiguous(), handle)
        raises(epkit.ArgumentError, "topk_weights", buffer.low_latency_combine, rows, topk_idx[:, :1].contiguous(), weights,
               handle)
    buffer.destroy()


@on_ranks(2)
def test_standby_of_a_buffer_that_shrinks(rank, size):
    """Calls that fit the hint use the object that was created with the buffer; others have one of their own, as all calls where
    ranks know no sizes, or not the same."""
    hint, experts = deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, size, 4 * size), 4 * size
    wide, odd = (deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, hidden, size, 4 * size) for hidden in (1 << 17, 100))
    for given, known in ((hint, True), (hint + rank, False), (0, False), (wide, False), (odd, False)):
        buffer = deep_ep.Buffer(dist.group.WORLD, num_rdma_bytes=given, low_latency_mode=True, enable_shrink=True)
        assert len(buffer._low_latency) == known
        x, _, topk_idx, weights, _ = make(rank, size, 3)
        recv, _, handle = dispatch(buffer, x, topk_idx, experts, False, False, False, False, None)
        assert handle.behind.object() is buffer._low_latency[0] and len(buffer._low_latency) == 1
        out, _, _ = buffer.low_latency_combine(recv.clone(), topk_idx, weights, handle)
        assert calc_diff(x * weights.masked_fill(topk_idx == -1, 0).sum(1, keepdim=True), out) < 1e-5
        for most, topk, more in ((TOKENS // 2, 2, False), (TOKENS + 1, 2, True), (TOKENS, TOPK, False),
                                 (TOKENS, 32, not known), (TOKENS, 33, True), (TOKENS + 1, 33, True), (TOKENS + 1, 1, False)):
            if CUDA and topk > 32:  # the most of that backend
                continue
            before = len(buffer._low_latency)
            choices = torch.full((4, topk), -1)
            choices[:, :2] = torch.arange(min(topk, 2))
            buffer.low_latency_dispatch(x[:4], choices, most, experts)
            assert len(buffer._low_latency) == before + more, (given, most, topk)


def own_topk(rank, size):
    """Each call of an object has its own K, which may differ between ranks; two results in use, and both halves of each."""
    local, most = 8, 6
    experts = local * size
    comm = epkit.Communicator(dist.group.WORLD)
    calls = comm.low_latency(8, 512, experts, most)
    for step in range(8):
        made = []
        for i in range(2):
            topk, hook = 1 + (rank + 2 * step + 3 * i) % most, bool(step & 1)
            x = torch.randint(-4, 4, (7 - rank, 512)).to(torch.bfloat16)
            idx = torch.rand(7 - rank, experts).topk(topk).indices.to(torch.int32 if step & 2 else torch.int64)
            rows = calls.dispatch(x, idx, fp8=i == 1, ue8m0=i == 1 and step % 3 == 0, round_scale=True, hook=hook)
            if hook:
                rows.finish()
            everyone = [None] * size
            dist.all_gather_object(everyone, idx.tolist())
            chosen = torch.tensor([one for ids in everyone for token in ids for one in token])
            assert rows.count.tolist() == torch.bincount(chosen, minlength=experts)[local * rank:local * rank + local].tolist()
            made.append((x, idx, rows))
        for x, idx, rows in made:
            # Each expert returns its number plus 1, in all elements.
            answers = torch.arange(local * rank + 1, local * (rank + 1) + 1).to(torch.bfloat16).view(local, 1, 1)
            answers = answers.expand(rows.x.shape).contiguous()
            weights, left = torch.ones(idx.shape), idx.clone()
            left[::2, -1] = -1
            for given in (idx, left):
                out, finish = calls.combine(answers, given, weights, call=rows.call, exact=True, hook=hook)
                if finish:
                    finish()
                assert torch.equal(out.float(), (given + 1).sum(1, keepdim=True).to(torch.bfloat16).float().expand(out.shape))
            if idx.shape[1] > 1:
                raises(epkit.ArgumentError, f"topk is 1 had {idx.shape[1]}", calls.combine, answers, idx[:, :1].contiguous(),
                       weights[:, :1].contiguous(), call=rows.call)
    comm.free()


def test_calls_have_their_own_topk():
    for size in (1, 3):
        run(size, own_topk)


def cleaned(rank, size, late, missed):
    """Ranks mask each other, make some calls apart, and clean their masks at different times, without a word to each other."""
    os.environ["EPKIT_TIMEOUT_MS"] = "60000"
    buffer, last = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, enable_shrink=True), size - 1
    x, idx = torch.full((4, 128), rank + 1.0).to(torch.bfloat16), torch.arange(size).repeat(4, 1)

    def layer(ranks):
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, 4, size, use_fp8=False)
        out, _, _ = buffer.low_latency_combine(rows, idx, torch.ones(4, size), handle)
        assert torch.equal(out, x * ranks)

    layer(size)
    dist.barrier()
    for one in range(last) if rank == last else (last,):
        buffer.low_latency_update_mask_buffer(one, True)
    if CUDA:
        torch.cuda.synchronize()
    dist.barrier()
    for _ in range(missed):
        layer(1 if rank == last else size - 1)
    if CUDA:
        torch.cuda.synchronize()
    dist.barrier()
    if rank in late:
        time.sleep(0.3)
    buffer.low_latency_clean_mask_buffer()
    for _ in range(4):
        layer(size)


def test_masks_are_cleaned_at_different_times():
    for late, missed in (((0,), 0), ((0, 1), 1), ((2,), 2), ((), 3)):
        run(3, cleaned, late, missed)


@on_ranks(2)
def test_a_mask_that_is_not_cleaned(rank, size):
    """A rank that still masks this one at the deadline leaves it out."""
    os.environ["EPKIT_TIMEOUT_MS"] = "300"
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, enable_shrink=True)
    x, idx = torch.ones(4, 128, dtype=torch.bfloat16), torch.arange(size).repeat(4, 1)
    buffer.low_latency_dispatch(x, idx, 4, size)
    dist.barrier()
    if rank == 0:
        buffer.low_latency_update_mask_buffer(1, True)
        dist.barrier()
    else:
        dist.barrier()
        buffer.low_latency_clean_mask_buffer()
        begin = time.monotonic()
        raises(epkit.GroupError, "EP_E_EXCLUDED rank 0 masked", buffer.low_latency_dispatch, x, idx, 4, size)
        assert time.monotonic() - begin > 0.25
    dist.barrier()


def layer_of(buffer, rank, size, hidden):
    """A call with one expert per rank, which all tokens select; returns how many ranks have answered each element."""
    x, idx = torch.full((4, hidden), rank + 1.0).to(torch.bfloat16), torch.arange(size).repeat(4, 1)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, 4, size, use_fp8=False)
    out, _, _ = buffer.low_latency_combine(rows, idx, torch.ones(4, size), handle)
    return (out / x).cpu()


def answered(ranks, *args):
    out = layer_of(*args)
    assert (out == ranks).all(), f"{out[0, 0]} ranks have answered, not {ranks}"


def excluded(words, *args):
    """A call raises that this rank is masked; on CUDA the one after it."""
    def call():
        for _ in range(1 + CUDA):
            layer_of(*args)

    raises(epkit.GroupError, "EP_E_EXCLUDED masked " + words, call)


def masks_of(buffer, size):
    status = torch.zeros(size, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


def missing_without_hint(rank, size, given):
    """No call of new sizes can be made when a rank is missing. The error says what would have helped."""
    buffer = deep_ep.Buffer(dist.group.WORLD, num_rdma_bytes=given, explicitly_destroy=True, enable_shrink=True)
    if rank == 1:
        buffer.destroy()
    else:
        raises(epkit.PeerError, "EP_E_PEER_LEFT rank 1 num_rdma_bytes get_low_latency_rdma_size_hint() hidden size 128",
               layer_of, buffer, rank, size, 128)
    dist.barrier()


def test_a_rank_is_missing_and_sizes_are_new():
    for given in (0, deep_ep.Buffer.get_low_latency_rdma_size_hint(4, 256, 3, 3)):
        run(3, missing_without_hint, given)


def apart(rank, size, begins):
    """First calls that are further apart than the deadline: rank 0 masks rank 1, which comes while rank 2 still waits for it."""
    deadline = 2.0
    os.environ["EPKIT_TIMEOUT_MS"] = str(int(1000 * deadline))
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(4, 128, size, size)
    buffer = deep_ep.Buffer(dist.group.WORLD, num_rdma_bytes=hint, low_latency_mode=True, enable_shrink=True)
    dist.barrier()
    time.sleep(deadline * begins[rank])
    if rank == 1:
        excluded("rank 0", buffer, rank, size, 128)
    else:
        for _ in range(3):
            answered(size - 1, buffer, rank, size, 128)
        assert masks_of(buffer, size) == [int(one == 1) for one in range(size)]
    dist.barrier()


def test_first_calls_are_far_apart():
    run(3, apart, (0, 1.25, 0.5))


@on_ranks(3)
def test_masks_are_cleaned_once_for_two_sizes(rank, size):
    """A buffer with calls of two sizes has one mask: what one of them finds counts for the other."""
    deadline = 6.0
    os.environ["EPKIT_TIMEOUT_MS"] = str(int(1000 * deadline))
    buffer, last = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, enable_shrink=True), size - 1
    for hidden in (128, 256):
        answered(size, buffer, rank, size, hidden)
    dist.barrier()
    buffer.low_latency_clean_mask_buffer()
    answered(size, buffer, rank, size, 128)  # after which no rank waits for another one to clean its mask
    dist.barrier()
    if rank != last:
        buffer.low_latency_update_mask_buffer(last, True)
    if CUDA:
        torch.cuda.synchronize()
    dist.barrier()
    begin = time.monotonic()
    if rank == last:
        excluded("", buffer, rank, size, 256)
    else:
        answered(last, buffer, rank, size, 256)
    assert time.monotonic() - begin < deadline / 2
    dist.barrier()


@on_ranks(3)
def test_a_rank_is_masked_for_all_sizes(rank, size):
    """A rank that was masked in calls of one size is in those of another one, too: nobody waits for it again."""
    deadline = 3.0
    os.environ["EPKIT_TIMEOUT_MS"] = str(int(1000 * deadline))
    buffer, last = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, enable_shrink=True), size - 1
    for hidden in (128, 256, 384):
        answered(size, buffer, rank, size, hidden)
    dist.barrier()
    if rank != last:
        answered(last, buffer, rank, size, 128)
        begin = time.monotonic()
        for hidden in (256, 128):
            answered(last, buffer, rank, size, hidden)
        buffer.clean_low_latency_buffer(4, 128, size)
        assert time.monotonic() - begin < deadline / 2
        assert masks_of(buffer, size) == [0] * last + [1]
    dist.barrier()
    if rank == last:
        excluded("", buffer, rank, size, 384)
    dist.barrier()


@on_ranks(3)
def test_hooks_of_all_sizes_share_the_masks(rank, size):
    """Hooks of two sizes are open when a rank stays away: the first one waits for it, the second one does not."""
    deadline = 6.0
    os.environ["EPKIT_TIMEOUT_MS"] = str(int(1000 * deadline))
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, enable_shrink=True)

    def send(hidden, hook):
        x, idx = torch.ones(4, hidden, dtype=torch.bfloat16), torch.arange(size).repeat(4, 1)
        return buffer.low_latency_dispatch(x, idx, 4, size, use_fp8=False, return_recv_hook=hook)

    for hidden in (128, 256):
        send(hidden, False)
    dist.barrier()
    if rank < 2:
        begin = time.monotonic()
        for _, _, _, _, hook in [send(hidden, True) for hidden in (128, 256)]:
            hook()
        masks = [one.mask().tolist() for one in buffer._low_latency]
        assert masks == [[0, 0, 1], [0, 0, 1]], masks
        assert time.monotonic() - begin < 1.5 * deadline
    dist.barrier()


@on_ranks(2)
def test_misaligned_inputs_of_two_sizes(rank, size):
    """Inputs that are copied for their alignment, while calls change from one size to another."""
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, enable_shrink=True)
    experts, topk, tokens = 2 * size, 3, 5
    for step in range(12):
        hidden = (128, 256)[step % 2]
        torch.manual_seed(100 * step + rank)
        storage = torch.zeros(tokens * hidden + 1, dtype=torch.bfloat16)
        if CUDA:
            torch.cuda._sleep(2_000_000)  # the copies wait for what is queued
        storage[1:] = torch.randint(-4, 5, (tokens * hidden,)).to(torch.bfloat16)
        x = storage[1:].view(tokens, hidden)
        idx = torch.cat((torch.zeros(1, dtype=torch.int64), torch.rand(tokens, experts).topk(topk).indices.flatten()))[1:]
        weights = torch.cat((torch.zeros(1), torch.randint(1, 4, (tokens * topk,)).float()))[1:]
        idx, weights = idx.view(tokens, topk), weights.view(tokens, topk)
        recv, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, 8, experts, use_fp8=False)
        out, _, _ = buffer.low_latency_combine(recv.clone(), idx, weights, handle)
        assert torch.equal(out.float(), x.float() * weights.sum(1, keepdim=True)), step

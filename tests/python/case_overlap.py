# SPDX-License-Identifier: Apache-2.0
"""Low-latency combines of rows that are still being written (single-batch overlap): blocks are signalled late, in any order, or
never."""
import random
import threading
import time

import deep_ep
import epkit
import torch
import torch.distributed as dist
from ranks import CUDA, on_ranks, raises, run

TOKENS, HIDDEN, TOPK = 24, 256, 4


def routing(rank, experts, seed):
    torch.manual_seed(100 * seed + rank)
    tokens = (TOKENS, 7, 0, 1)[(seed + rank) % 4]
    topk_idx = torch.randint(-1, experts, (tokens, TOPK))
    topk_idx[::3, 1] = topk_idx[::3, 0]  # a token may name an expert twice
    return torch.randn(tokens, HIDDEN).to(torch.bfloat16), topk_idx, torch.rand(tokens, TOPK)


class Writer:
    """Writes the rows of x block by block, in random order, and counts each block in steps up to `value`: a thread, or on a GPU
    kernels in a stream of their own."""

    def __init__(self, x, rows, counts, block, signals, value, seed):
        order = [(expert, first) for expert, count in enumerate(counts) for first in range(0, count, block)]
        random.Random(seed).shuffle(order)
        per_expert = -(-x.shape[1] // block)

        def write():
            for expert, first in order:
                if CUDA:
                    torch.cuda._sleep(200_000)
                else:
                    time.sleep(0.001)
                x[expert, first:first + block] = rows[expert, first:first + block]
                at = expert * per_expert + first // block
                for step in {value // 2, value}:
                    signals[at:at + 1].fill_(step)

        if CUDA:
            self.stream = torch.cuda.Stream()
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                write()
        else:
            self.thread = threading.Thread(target=write)
            self.thread.start()

    def end(self):
        torch.cuda.current_stream().wait_stream(self.stream) if CUDA else self.thread.join()


def bits(rank, size):
    experts = 3 * size
    calls = epkit.Communicator().low_latency(TOKENS, HIDDEN, experts, TOPK)
    for seed, (block, hook, exact, zero_copy, value, unsigned) in enumerate((
            (64, False, False, False, 1, False), (1, True, False, False, 129, False), (5, False, True, False, 7, True),
            (7, True, False, True, 2, False), (size * TOKENS, True, True, False, 100, True), (1000, False, False, True, 1, False))):
        x, topk_idx, weights = routing(rank, experts, seed)
        got = calls.dispatch(x, topk_idx)
        rows = torch.randn(got.x.shape).to(torch.bfloat16)
        want = calls.combine(rows, topk_idx, weights, call=got.call, exact=exact)[0].clone()
        late = calls.combine_buffer() if zero_copy else torch.empty_like(rows)
        late.fill_(float("nan"))
        signals = torch.zeros(3 * -(-size * TOKENS // block) + 2, dtype=torch.int32)
        counts = got.count.tolist()  # waits: nothing of what the writer needs is loaded for the first time behind it
        writer = Writer(late, rows, counts, block, signals, value, seed)
        out, finish = calls.combine(late, topk_idx, weights, call=got.call, exact=exact, zero_copy=zero_copy, hook=hook, max_sms=2,
                                    signals=signals.view(torch.uint32) if unsigned else signals, signal_rows=block, signal_value=value)
        if hook:
            finish()
        writer.end()
        assert torch.equal(out, want), seed


def test_bits():
    run(2, bits)
    run(3, bits)


@on_ranks(2)
def test_as_sglang_calls(rank, size):
    """comp_signal of blocks of 64 rows, allocated as SGLang does, and src_signals of whole experts (SGLang 0.5.23)."""
    most, experts = 64, 2 * size
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    torch.manual_seed(rank)
    x, weights = torch.randn(most, HIDDEN).to(torch.bfloat16), torch.rand(most, TOPK)
    topk_idx = torch.stack([torch.randperm(experts)[:TOPK] for _ in range(most)])
    for blackwell in (False, True):
        rows, count, handle, _, hook = buffer.low_latency_dispatch(x, topk_idx, most, experts, use_fp8=False, return_recv_hook=True)
        hook()
        given = dict(x=torch.zeros_like(rows), topk_idx=topk_idx, topk_weights=weights, handle=handle, async_finish=False,
                     return_recv_hook=True)
        want, _, hook = buffer.low_latency_combine(**{**given, "x": rows})
        hook()
        signal = torch.zeros(2 if blackwell else 2 * (size * most // 64), dtype=torch.uint32 if blackwell else torch.int32)
        block = size * most if blackwell else 64
        writer = Writer(given["x"], rows, count.tolist(), block, signal.view(torch.int32), 100, 1)
        overlap = {"src_signals": signal, "src_signal_expect_value": 100} if blackwell else {
            "packed_recv_count": count, "comp_signal": signal, "block_m": 64, "threshold": 100, "num_sms": 3}
        out, _, hook = buffer.low_latency_combine(**given, overlap=True, **overlap)
        hook()
        writer.end()
        assert torch.equal(out, want)
    for more, words in (({}, "comp_signal src_signals one"), ({"comp_signal": signal, "src_signals": signal}, "one of them"),
                        ({"comp_signal": signal.view(torch.int32), "threshold": 1, "block_m": 64}, "signals has 2 elements, must have 4"),
                        ({"comp_signal": signal.view(torch.int32), "threshold": 0}, "threshold is 0"),
                        ({"comp_signal": signal.view(torch.int32), "threshold": 1, "block_m": 0}, "signal_rows is 0"),
                        ({"src_signals": signal}, "src_signal_expect_value is 0"),
                        ({"src_signals": signal.view(torch.int32).float(), "src_signal_expect_value": 1}, "signals float32 int32")):
        raises(epkit.ArgumentError, words, buffer.low_latency_combine, **given, overlap=True, **more)
    buffer.destroy()


def missing(rank, size, experts):
    """A signal that never comes: the deadline names the expert and the block; the peer learns which rank it was. With two experts of
    a token on the rank, the sum of both rows waits for the later one."""
    index = torch.tensor(experts).expand(TOKENS, -1).contiguous()
    calls = epkit.Communicator(timeout=3 if rank == 0 else 60).low_latency(TOKENS, HIDDEN, 2 * size, len(experts))
    got = calls.dispatch(torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16), index)
    rows, weights = torch.zeros_like(got.x), torch.ones(index.shape)
    signals = torch.zeros(2 * 6, dtype=torch.int32)
    if 0 in experts:
        signals[:6] = 3
    signals[6:8] = 3
    signals[8] = 2

    def combine():
        calls.combine(rows, index, weights, signals=signals if rank == 0 else None, signal_rows=8, signal_value=3, max_sms=1)
        if CUDA:
            torch.cuda.synchronize()
            calls.barrier()

    late = "block" if CUDA else "block 2 is 2"  # a GPU waits for all blocks at once
    error = raises(epkit.PeerError if rank else epkit.Error, "EP_E_TIMEOUT" if rank else f"local expert 1, {late} signal_value 3", combine)
    assert "rank 0" in str(error) and "signals" in str(error), error


def test_a_signal_that_never_comes():
    for experts in ([1], [0, 1], [1, 0], [3, 1, 0]):
        run(2, missing, experts)

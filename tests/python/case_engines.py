# SPDX-License-Identifier: Apache-2.0
"""Call sequences of inference engines and training frameworks on deep_ep, from the making of a buffer to its end.

Each test makes the calls that one of them makes, with its arguments by place and by name, and reads what it reads. An
expert multiplies by its number + 1, and all numbers are small integers, so that every result is exact.
"""
import tempfile
import threading
from datetime import timedelta

import deep_ep
import epkit
import torch
import torch.distributed as dist
from deep_ep.utils.math import align, per_token_cast_to_fp8
from epkit import communicator
from ranks import CUDA, on_ranks, raises, run

HIDDEN, TOPK, EACH = 512, 3, 4  # EACH: experts of a rank


def tokens_of(rank, size, count, seed=0, experts=None):
    """x [N, H] of integers, choices [N, K] with some -1, weights 1 or 2."""
    torch.manual_seed(1000 * seed + rank)
    idx = torch.rand(count, experts or EACH * size).topk(TOPK).indices
    idx[torch.rand(idx.shape) < 0.1] = -1
    return (torch.randint(-2, 3, (count, HIDDEN)).to(torch.bfloat16), idx, torch.randint(1, 3, idx.shape).float())


def dense(x, idx, weights):
    """What the layer gives: each choice contributes weight * (expert + 1) * x."""
    return (x.float() * (weights * (idx + 1)).sum(1, keepdim=True)).to(torch.bfloat16)


def apply_experts(rows, local_idx, weights, first):
    """Rows of a rank with all of their local experts, as a fused kernel makes them: local_idx [n, K], -1: none."""
    factor = (weights * torch.where(local_idx >= 0, local_idx + first + 1, 0)).sum(1, keepdim=True)
    return (rows.float() * factor).to(torch.bfloat16)


def dequantised(rows, scales):
    """fp8 rows with a float32 scale for each 128 elements."""
    return (rows.float().unflatten(-1, (-1, 128)) * scales.contiguous().unsqueeze(-1)).flatten(-2).to(torch.bfloat16)


def on_device_of(tensor):
    """A thread's current device is its own."""
    if tensor.is_cuda:
        torch.cuda.set_device(tensor.device)


class Micro:
    """Two micro-batches in two threads of which one runs at a time, as vLLM overlaps them."""

    def __init__(self):
        self._turns = [threading.Semaphore(1), threading.Semaphore(0)]
        self.errors = []

    def run(self, function, *args):
        def body(number):
            self._turns[number].acquire()
            try:
                on_device_of(args[0][number])
                function(number, lambda: self._switch(number), *(arg[number] for arg in args))
            except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
                self.errors.append(error)
            self._turns[1 - number].release()

        threads = [threading.Thread(target=body, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _switch(self, number):
        self._turns[1 - number].release()
        self._turns[number].acquire()


# --- vLLM -------------------------------------------------------------------------------------------------------------


class HighThroughput:
    """vLLM with the high-throughput calls: prepare and finalize of a layer."""

    ranks_with_config = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)

    def __init__(self, rank, size):
        self.size, self.first, self.experts = size, rank * EACH, EACH * size
        deep_ep.Buffer.set_num_sms(min(20, deep_ep.Buffer.num_sms))
        self.buffer = deep_ep.Buffer(group=dist.group.WORLD, num_nvl_bytes=1 << 30, num_rdma_bytes=0, low_latency_mode=False,
                                     num_qps_per_rank=1, explicitly_destroy=True)
        self.handles = [None, None]

    def config(self, of):
        return of(self.size) if self.size in self.ranks_with_config else None

    def prepare(self, batch, switch, x, idx, weights, previous, asynchronous):
        switch()
        (per_rank, per_rdma_rank, per_expert, in_rank, event) = self.buffer.get_dispatch_layout(
            topk_idx=idx, num_experts=self.experts, previous_event=previous, async_finish=False, allocate_on_comm_stream=False)
        assert event.event is None and (per_rdma_rank is None) == (self.buffer.runtime.get_num_rdma_ranks() == 1)
        rows, local, received, counts, handle, event = self.buffer.dispatch(
            x=x, handle=None, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_rdma_rank, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert, topk_idx=idx, topk_weights=weights, expert_alignment=1,
            config=self.config(deep_ep.Buffer.get_dispatch_config), previous_event=previous, async_finish=asynchronous,
            allocate_on_comm_stream=False)
        self.handles[batch] = handle
        switch()
        if event.event is not None:
            event.current_stream_wait()
        assert event.event is not None or not asynchronous
        # Its kernels want a valid expert everywhere: one that this rank has not stands for none.
        outside = self.experts - 1 if self.first == 0 else 0
        globally = torch.where(local == -1, outside, local + self.first)
        assert globally.dtype == torch.int64 and torch.tensor(counts).sum() == (local >= 0).sum()
        return rows, torch.where((globally >= self.first) & (globally < self.first + EACH), globally - self.first, -1), received

    def finalize(self, batch, switch, y, output, previous):
        switch()
        combined, none, event = self.buffer.combine(
            x=y, handle=self.handles[batch], topk_weights=None, config=self.config(deep_ep.Buffer.get_combine_config),
            previous_event=previous, async_finish=False, allocate_on_comm_stream=False)
        assert none is None and event.event is None
        switch()
        output.copy_(combined, non_blocking=True)

    def layer(self, batch, switch, x, idx, weights, output, fp8=False, asynchronous=False):
        previous = self.buffer.capture() if batch is not None else None
        given = per_token_cast_to_fp8(x) if fp8 else x
        rows, local, received = self.prepare(batch or 0, switch, given, idx, weights, previous, asynchronous)
        rows = dequantised(*rows) if fp8 else rows
        y = apply_experts(rows, local, received, self.first) if rows.numel() else rows
        self.finalize(batch or 0, switch, y, output, self.buffer.capture() if batch is not None else None)


def vllm_high_throughput(rank, size):
    kept = deep_ep.Buffer.num_sms, deep_ep.Buffer._num_sms_set
    engine = HighThroughput(rank, size)
    for step, (fp8, asynchronous) in enumerate(((False, False), (True, True), (True, False), (False, True))):
        # At the second step all tokens go to experts of the first rank: the others receive none.
        x, idx, weights = tokens_of(rank, size, 7 + rank, step, EACH if step == 1 else None)
        output = torch.full_like(x, 99)
        engine.layer(None, lambda: None, x, idx, weights, output, fp8, asynchronous)
        assert torch.equal(output, dense(x, idx, weights)), f"step {step}"
    for step in range(3):
        batches = [tokens_of(rank, size, 5 + step + batch, 10 + 2 * step + batch) for batch in range(2)]
        outputs = [torch.full_like(batch[0], 99) for batch in batches]
        Micro().run(lambda number, switch, batch, output: engine.layer(number, switch, *batch, output),
                    [Tensors(batch) for batch in batches], outputs)
        for batch, output in zip(batches, outputs):
            assert torch.equal(output, dense(*batch)), "two micro-batches"
    engine.buffer.destroy()
    deep_ep.Buffer.num_sms, deep_ep.Buffer._num_sms_set = kept


class Tensors(tuple):
    """Tensors of one micro-batch, which are on one device."""

    is_cuda = property(lambda self: self[0].is_cuda)
    device = property(lambda self: self[0].device)


def test_vllm_high_throughput():
    for size in (2, 3):
        run(size, vllm_high_throughput)


class LowLatency:
    """vLLM with the low-latency calls. A hook that is open runs before the next call is made."""

    def __init__(self, rank, size, most, shrink):
        self.most, self.first, self.experts, self.size = most, rank * EACH, EACH * size, size
        rdma = deep_ep.Buffer.get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank=most, hidden=HIDDEN,
                                                             num_ranks=size, num_experts=self.experts)
        self.buffer = deep_ep.Buffer(group=dist.group.WORLD, num_nvl_bytes=1 << 20, num_rdma_bytes=rdma, low_latency_mode=True,
                                     num_qps_per_rank=EACH, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False,
                                     explicitly_destroy=True, enable_shrink=shrink)
        self.handles, self.open = [None, None], None

    def run_open_hook(self):
        hook, self.open = self.open, None
        if hook is not None:
            hook()

    def layer(self, batch, switch, x, idx, weights, output, fp8=False, ue8m0=False):
        self.run_open_hook()
        expert_x, counts, handle, _, hook = self.buffer.low_latency_dispatch(
            x, idx, self.most, self.experts, use_fp8=fp8, round_scale=ue8m0, use_ue8m0=ue8m0, async_finish=False,
            return_recv_hook=True)
        self.handles[batch], self.open = handle, hook
        switch()
        self.run_open_hook() if self.open is hook else None
        if fp8:
            rows, scales = expert_x
            assert rows.is_contiguous() and scales.shape[1] == rows.shape[1]
            if ue8m0:
                scales = scales.clone(memory_format=torch.contiguous_format)  # contiguous() keeps strides of one column
                scales = (scales.view(torch.uint8).to(torch.int32) << 23).view(torch.float32)
            expert_x = dequantised(rows, scales)
        assert expert_x.shape == (EACH, self.most * self.size, HIDDEN) and counts.shape == (EACH,)
        # A batched kernel looks at the first counts[l] rows of expert l.
        y = torch.full_like(expert_x, float("nan"))
        for expert, count in enumerate(counts.tolist()):
            y[expert, :count] = expert_x[expert, :count] * (self.first + expert + 1)
        self.run_open_hook()
        _, _, hook = self.buffer.low_latency_combine(y, idx, weights, self.handles[batch], async_finish=False, zero_copy=False,
                                                     return_recv_hook=True, out=output)
        self.open = hook
        switch()
        self.run_open_hook() if self.open is hook else None


@torch.inference_mode()  # in which it runs
def vllm_low_latency(rank, size):
    engine = LowLatency(rank, size, 16, shrink=True)
    mask = torch.zeros(size, dtype=torch.int32)
    engine.buffer.low_latency_query_mask_buffer(mask)  # before the first call
    assert not mask.any()
    for step, (fp8, ue8m0) in enumerate(((False, False), (True, False), (True, True))):
        x, idx, weights = tokens_of(rank, size, 9 + rank, step)
        output = torch.full_like(x, 99)
        engine.layer(0, lambda: None, x, idx, weights, output, fp8, ue8m0)
        assert torch.equal(output, dense(x, idx, weights)), f"step {step}"
    for step in range(3):
        batches = [tokens_of(rank, size, 5 + batch, 10 + 2 * step + batch) for batch in range(2)]
        outputs = [torch.full_like(batch[0], 99) for batch in batches]
        Micro().run(lambda number, switch, batch, output: engine.layer(number, switch, *batch, output),
                    [Tensors(batch) for batch in batches], outputs)
        engine.run_open_hook()
        for batch, output in zip(batches, outputs):
            assert torch.equal(output, dense(*batch)), "two micro-batches"
    # What it does after a failure: all memory of the buffer becomes 0, and all ranks are waited for again.
    memory = engine.buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True)
    assert memory.numel() == engine.buffer.num_rdma_bytes and memory.device == x.device
    memory.zero_()
    engine.buffer.low_latency_clean_mask_buffer()
    engine.buffer.low_latency_query_mask_buffer(mask)
    assert not mask.any()
    shaped = engine.buffer.get_local_buffer_tensor(torch.float32, torch.Size((3, 5)), offset=64, use_rdma_buffer=True)
    shaped.fill_(1)
    x, idx, weights = tokens_of(rank, size, 9 + rank, 50)
    assert engine.buffer.get_local_buffer_tensor(torch.float32, use_rdma_buffer=True).count_nonzero() == 15
    raises(ValueError, "offset multiple", engine.buffer.get_local_buffer_tensor, torch.float32, None, 2)
    raises(ValueError, "size elements", engine.buffer.get_local_buffer_tensor, torch.int8, torch.Size((1 << 21,)))
    output = torch.full_like(x, 99)
    engine.layer(0, lambda: None, x, idx, weights, output)
    assert torch.equal(output, dense(x, idx, weights))
    engine.buffer.destroy()


def test_vllm_low_latency():
    run(2, vllm_low_latency)


@torch.inference_mode()  # in which it runs
def vllm_elastic(rank, size):
    """Decode: worst sizes and no wait on the host. Prefill: expanded. Blocks of 32 with a byte each as opaque scales."""
    buffer = deep_ep.ElasticBuffer(group=dist.group.WORLD, num_max_tokens_per_rank=32, hidden=HIDDEN, num_topk=TOPK,
                                   use_fp8_dispatch=False, allow_hybrid_mode=False, prefer_overlap_with_compute=True,
                                   allow_multiple_reduction=False, num_cpu_timeout_secs=1800, num_gpu_timeout_secs=1800,
                                   explicitly_destroy=True)
    assert buffer._comm.info()["timeout_ms"] == 1800_000
    experts, first = EACH * size, rank * EACH
    for step, (decode, mxfp8) in enumerate(((True, False), (False, False), (True, True), (False, True))):
        x, idx, weights = tokens_of(rank, size, 5 + rank, step)
        most = 1 << (5 + size - 2).bit_length() if decode else None
        bytes_ = torch.randint(0, 255, (x.shape[0], HIDDEN // 32), dtype=torch.uint8)
        given = (x.to(torch.float8_e4m3fn), bytes_.contiguous().view(torch.int32)) if mxfp8 else x
        rows, local, received, handle, event = buffer.dispatch(
            x=given, topk_idx=idx, topk_weights=weights, num_experts=experts, num_max_tokens_per_rank=most,
            do_expand=not decode, do_cpu_sync=not decode, async_with_compute_stream=False)
        assert event.event is None
        if mxfp8:
            rows, scales = rows
            assert scales.contiguous().view(torch.uint8).shape == (rows.shape[0], HIDDEN // 32)
        counts = handle.num_recv_tokens_per_expert_list
        n = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        if local is None:
            assert not decode and len(counts) == EACH
            numbers = torch.repeat_interleave(torch.arange(EACH), torch.tensor(counts), output_size=sum(counts))
            local, received = numbers.unsqueeze(1), received.unsqueeze(1)
        else:
            assert decode and not counts and rows.shape[0] == most * size
            # Rows behind the last one may hold anything: the prefix sum on the device says where they begin.
            local = torch.where(torch.arange(rows.shape[0]).unsqueeze(1) < n, local, -1)
        y = apply_experts(rows, local, torch.where(local >= 0, received, 0), first)
        combined, _, event = buffer.combine(x=y, handle=handle, topk_weights=None, async_with_compute_stream=True)
        event.current_stream_wait()
        assert torch.equal(combined, dense(x.to(torch.float8_e4m3fn).to(torch.bfloat16) if mxfp8 else x, idx, weights)), step
    buffer.destroy()
    buffer.destroy()


def test_vllm_elastic():
    for size in (2, 3):
        run(size, vllm_elastic)


# --- SGLang -----------------------------------------------------------------------------------------------------------


class Dispatcher:
    """SGLang: a buffer for both modes; cleaned when low latency follows the other mode."""

    tuned = {"num_sms": 24, "num_max_nvl_chunked_send_tokens": 8, "num_max_nvl_chunked_recv_tokens": 256,
             "num_max_rdma_chunked_send_tokens": 16, "num_max_rdma_chunked_recv_tokens": 128}

    def __init__(self, rank, size, most, tuned):
        group = dist.group.WORLD
        self.most, self.experts, self.first = most, EACH * size, rank * EACH
        self.config = deep_ep.Config(**self.tuned) if tuned else None
        num_sms = self.tuned["num_sms"] if tuned else deep_ep.Buffer.num_sms
        nvl = rdma = 0
        for config in (self.config or deep_ep.Buffer.get_dispatch_config(group.size()),
                       self.config or deep_ep.Buffer.get_combine_config(group.size())):
            nvl = max(config.get_nvl_buffer_size_hint(HIDDEN * 2, group.size()), nvl)
            rdma = max(config.get_rdma_buffer_size_hint(HIDDEN * 2, group.size()), rdma)
        rdma = max(deep_ep.Buffer.get_low_latency_rdma_size_hint(most, HIDDEN, group.size(), self.experts), rdma)
        self.buffer = deep_ep.Buffer(group, nvl, rdma, low_latency_mode=True, num_qps_per_rank=max(num_sms, EACH),
                                     allow_mnnvl=True)
        assert self.buffer.group_size == size and self.buffer.low_latency_mode
        self.was_normal = False

    def normal(self, x, idx, weights, asynchronous, alignment):
        self.was_normal = True
        previous = deep_ep.Buffer.capture() if asynchronous else None
        per_rank, per_rdma_rank, per_expert, in_rank, previous = self.buffer.get_dispatch_layout(
            idx, self.experts, previous_event=previous, async_finish=asynchronous,
            allocate_on_comm_stream=previous is not None)
        rows, local, received, counts, handle, event = self.buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, previous_event=previous, async_finish=asynchronous,
            allocate_on_comm_stream=(previous is not None) and asynchronous, expert_alignment=alignment, config=self.config)
        event.current_stream_wait() if asynchronous else ()
        assert all(count % alignment == 0 for count in counts) and sum(counts) >= (local >= 0).sum()
        y = apply_experts(rows, local, received, self.first)
        previous = deep_ep.Buffer.capture() if asynchronous else None
        combined, _, event = self.buffer.combine(y, handle, async_finish=asynchronous, previous_event=previous,
                                                 allocate_on_comm_stream=previous is not None, config=self.config)
        event.current_stream_wait() if asynchronous else ()
        return combined

    def dispatch_a(self, x, idx, hook):
        if self.was_normal:
            self.buffer.clean_low_latency_buffer(self.most, HIDDEN, self.experts)
        self.was_normal = False
        return self.buffer.low_latency_dispatch(x, idx, self.most, self.experts, use_fp8=False, async_finish=not hook,
                                                return_recv_hook=hook)

    def combine_a(self, state, idx, weights, hook):
        rows, counts, handle, _, _ = state
        y = rows * (torch.arange(EACH, device=rows.device).view(-1, 1, 1) + self.first + 1).to(rows.dtype)
        return self.buffer.low_latency_combine(x=y, topk_idx=idx, topk_weights=weights, handle=handle, async_finish=not hook,
                                               return_recv_hook=hook)

    @staticmethod
    def wait(event, hook):
        hook() if hook is not None else event.current_stream_wait()


@on_ranks(2)
def test_sglang(rank, size):
    for tuned in (False, True):
        engine = Dispatcher(rank, size, 16, tuned)
        for step, asynchronous in enumerate((False, True, True)):
            x, idx, weights = tokens_of(rank, size, 6 + rank, step)
            out = engine.normal(x, idx, weights, asynchronous, 128 if step else 1)
            assert torch.equal(out, dense(x, idx, weights)), "normal"
            for hook in (True, False):
                state = engine.dispatch_a(x, idx, hook)
                engine.wait(state[3], state[4])
                out, event, second = engine.combine_a(state, idx, weights, hook)
                engine.wait(event, second)
                assert torch.equal(out, dense(x, idx, weights)), "low latency"
        # Two batches: the second one is sent while the first one's experts run.
        batches = [tokens_of(rank, size, 8, 20 + batch) for batch in range(2)]
        states = [engine.dispatch_a(batches[0][0], batches[0][1], True)]
        states[0][4]()
        outs = [engine.combine_a(states[0], *batches[0][1:], True)]
        states.append(engine.dispatch_a(batches[1][0], batches[1][1], True))
        outs[0][2]()
        states[1][4]()
        outs.append(engine.combine_a(states[1], *batches[1][1:], True))
        outs[1][2]()
        for batch, out in zip(batches, outs):
            assert torch.equal(out[0], dense(*batch)), "two batches"


def sglang_elastic(rank, size, kind):
    """Decode is expanded, with counts on the device; an empty batch is padded to one token of weight 0."""
    buffer = kind(dist.group.WORLD, num_max_tokens_per_rank=16, hidden=HIDDEN, num_topk=TOPK, use_fp8_dispatch=True,
                  allow_hybrid_mode=False, sl_idx=0, prefer_overlap_with_compute=False)
    experts, first, alignment = EACH * size, rank * EACH, 8
    for step, (decode, count) in enumerate(((True, 6), (False, 6), (True, 0), (False, 0), (True, 9))):
        x, idx, weights = tokens_of(rank, size, count if rank == 0 else 7, step)
        padded = not decode and not x.shape[0]
        want = dense(x, idx, weights)
        if padded:
            x, weights = x.new_zeros((1, HIDDEN)), weights.new_zeros((1, TOPK))
            idx = torch.arange(TOPK).unsqueeze(0)
        sms = buffer.get_theoretical_num_sms(experts, TOPK)
        qps = buffer.get_theoretical_num_qps(sms)
        rows, local, received, handle, event = buffer.dispatch(
            per_token_cast_to_fp8(x) if x.shape[0] else (x.to(torch.float8_e4m3fn), torch.ones(0, HIDDEN // 128)),
            topk_idx=idx, topk_weights=weights, num_experts=experts, num_max_tokens_per_rank=16, expert_alignment=alignment,
            num_sms=sms, num_qps=qps, use_tma_aligned_col_major_sf=decode, do_cpu_sync=not decode, do_expand=decode)
        if event.event is not None:
            event.current_stream_wait()
        if decode:
            assert local is None and rows[1].stride(0) == 1
            y = torch.zeros(rows[0].shape, dtype=torch.bfloat16)
            ends, begin = handle.psum_num_recv_tokens_per_expert.tolist(), 0
            values = dequantised(*rows)
            for expert, end in enumerate(ends):
                begin = align(ends[expert - 1], alignment) if expert else 0
                y[begin:end] = values[begin:end] * (first + expert + 1) * received[begin:end].unsqueeze(1)
        else:
            n = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1].item())
            rows, local, received = dequantised(rows[0][:n], rows[1][:n]), local[:n], received[:n]
            assert len(handle.num_recv_tokens_per_expert_list) == EACH
            y = apply_experts(rows, local, received, first)
        out, _, event = buffer.combine(y.to(torch.bfloat16), handle=handle, topk_weights=None, num_sms=sms, num_qps=qps)
        if event.event is not None:
            event.current_stream_wait()
        assert torch.equal(out[:0] if padded else out, want), f"step {step}"


def test_sglang_elastic():
    for kind in (deep_ep.ElasticBuffer, deep_ep.EPBuffer):
        run(2, sglang_elastic, kind)


def stateless(rank, size, folder, initialised):
    """A process group that torch.distributed does not know: vLLM makes such ones to change the number of ranks, also where there
    is no default group."""
    if initialised:
        dist.init_process_group("gloo", init_method=f"file://{folder}/default", rank=rank, world_size=size)
    store = dist.PrefixStore("own", dist.FileStore(f"{folder}/own", size))
    if hasattr(dist.ProcessGroup, "_set_default_backend"):  # since torch 2.6
        group = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    else:
        group = dist.ProcessGroup(store, rank, size, dist.ProcessGroup.Options(backend="gloo"))
    backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    buffer = deep_ep.Buffer(group=group, num_nvl_bytes=1 << 20, explicitly_destroy=True)
    assert (buffer.rank, buffer.group_size, buffer.group) == (rank, size, group)
    topk_idx = torch.arange(12).view(6, 2) % (2 * size)
    x = torch.full((6, HIDDEN), rank + 1, dtype=torch.bfloat16)
    layout = buffer.get_dispatch_layout(topk_idx, 2 * size)
    rows, _, _, _, handle, _ = buffer.dispatch(x, None, *layout[:2], layout[3], layout[2], topk_idx)
    assert torch.equal(buffer.combine(rows, handle)[0].float(), x.float() * layout[3].sum(1, keepdim=True))
    for kind in (deep_ep.ElasticBuffer, deep_ep.EPBuffer):
        kind(group, num_max_tokens_per_rank=8, hidden=HIDDEN, num_topk=2).barrier()
    buffer.destroy()
    if not initialised:
        raises(RuntimeError, "init_process_group", epkit.Communicator)


def of_no_backend(rank, size, folder):
    """init_process_group() alone: "undefined" is gloo on the CPU, and nccl alone on GPUs."""
    dist.init_process_group(init_method=f"file://{folder}/undefined", rank=rank, world_size=size)
    deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=8).barrier(with_cpu_sync=True)
    epkit.Communicator().barrier()


def test_groups_of_no_backend():
    with tempfile.TemporaryDirectory() as folder:
        run(1 if CUDA else 2, of_no_backend, folder, group=False)  # ranks of nccl cannot share a GPU


class OfGpusAlone:
    """A group as nccl's is."""

    def _get_backend(self, device):
        if device.type == "cpu":
            raise RuntimeError("No backend type associated with device type cpu")


def test_a_group_of_gpus_alone():
    before = torch.cuda.current_device
    torch.cuda.current_device = lambda: 3
    try:
        assert communicator._device_of(OfGpusAlone()) == torch.device("cuda", 3)
    finally:
        torch.cuda.current_device = before


def test_groups_of_an_engine():
    for initialised in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            run(2, stateless, folder, initialised, group=False)


# --- training ---------------------------------------------------------------------------------------------------------


class Shared:
    buffer = None


def buffer_for(group, x):
    """A buffer is made anew when sizes have grown."""
    nvl = rdma = 0
    hidden_bytes = x.size(1) * max(x.element_size(), 2)
    for config in (deep_ep.Buffer.get_dispatch_config(group.size()), deep_ep.Buffer.get_combine_config(group.size())):
        nvl = max(config.get_nvl_buffer_size_hint(hidden_bytes, group.size()), nvl)
        rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, group.size()), rdma)
    own = Shared.buffer
    if own is None or own.group != group or own.num_nvl_bytes < nvl or own.num_rdma_bytes < rdma:
        Shared.buffer = deep_ep.Buffer(group, nvl, rdma)
    return Shared.buffer


def previous_of(asynchronous):
    from deep_ep.utils import EventHandle, EventOverlap

    return EventOverlap(EventHandle()) if asynchronous else None


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, idx, weights, experts, group, asynchronous):
        previous = previous_of(asynchronous)
        buffer = buffer_for(group, x)
        per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
            idx, experts, previous_event=previous, async_finish=asynchronous, allocate_on_comm_stream=asynchronous)
        rows, local, received, counts, handle, after = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, previous_event=event, async_finish=asynchronous,
            allocate_on_comm_stream=asynchronous)
        if asynchronous:
            after.current_stream_wait()
        ctx.group, ctx.handle, ctx.asynchronous = group, handle, asynchronous
        return rows, local, received, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx, grad, grad_local, grad_received, grad_counts, grad_handle):
        buffer = buffer_for(ctx.group, grad)
        previous = previous_of(ctx.asynchronous)
        grad_x, grad_weights, after = buffer.combine(
            grad.contiguous(), ctx.handle, topk_weights=grad_received.float(), previous_event=previous,
            async_finish=ctx.asynchronous, allocate_on_comm_stream=ctx.asynchronous)
        if ctx.asynchronous:
            after.current_stream_wait()
        return grad_x, None, grad_weights, None, None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, group, handle, asynchronous):
        buffer = buffer_for(group, y)
        out, _, after = buffer.combine(y, handle=handle, async_finish=asynchronous, previous_event=previous_of(asynchronous),
                                       allocate_on_comm_stream=asynchronous)
        if asynchronous:
            after.current_stream_wait()
        ctx.handle, ctx.group, ctx.asynchronous = handle, group, asynchronous
        return out, None

    @staticmethod
    def backward(ctx, grad, unused=None):
        buffer = buffer_for(ctx.group, grad)
        grad_y, _, _, _, _, after = buffer.dispatch(
            grad.contiguous(), handle=ctx.handle, previous_event=previous_of(ctx.asynchronous),
            async_finish=ctx.asynchronous, allocate_on_comm_stream=ctx.asynchronous)
        if ctx.asynchronous:
            after.current_stream_wait()
        return grad_y, None, None, None


@on_ranks(2)
def test_megatron(rank, size):
    """Forward and backward of a layer against the same computation on one rank, with a buffer that grows."""
    group, first = dist.group.WORLD, rank * EACH
    made = set()
    for step, asynchronous in enumerate((False, True)):
        x, idx, weights = tokens_of(rank, size, 6 + rank, step)
        x, weights = (x[:, :HIDDEN // 2].contiguous() if not step else x).requires_grad_(), weights.requires_grad_()
        rows, local, received, counts, handle = Dispatch.apply(x, idx, weights, EACH * size, group, asynchronous)
        assert counts.tolist() == [(local == expert).sum() for expert in range(EACH)]
        y = apply_experts(rows, local, received, first)
        out, none = Combine.apply(y, group, handle, asynchronous)
        made.add(id(Shared.buffer))
        assert none is None and torch.equal(out, dense(x, idx, weights).detach())
        given = torch.randint(-2, 3, out.shape).to(torch.bfloat16)
        got = torch.autograd.grad(out, (x, weights), given)
        copies = x.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
        want = torch.autograd.grad(dense(copies[0], idx, copies[1]), copies, given)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1].masked_fill(idx < 0, 0)), f"step {step}"
    assert len(made) == 2, "a larger hidden size has made no other buffer"
    Shared.buffer = None


# --- others -----------------------------------------------------------------------------------------------------------


class Mpi:
    """What deep_ep asks of a communicator of mpi4py, over the gloo group."""

    def Get_rank(self):
        return dist.get_rank()

    def Get_size(self):
        return dist.get_world_size()

    def allgather(self, data):
        every = [None] * self.Get_size()
        dist.all_gather_object(every, data)
        return every


@on_ranks(2)
def test_mpi_and_what_is_not_there(rank, size):
    """A buffer over a communicator of MPI, as TensorRT-LLM makes it; all that programs ask of one that is idle."""
    own = Mpi()
    buffer = deep_ep.Buffer(None, 1 << 20, 1 << 20, low_latency_mode=True, num_qps_per_rank=EACH, explicitly_destroy=True, comm=own)
    assert (buffer.rank, buffer.group_size, buffer.group) == (rank, size, own)
    assert buffer.runtime.is_available() and buffer.runtime.get_num_rdma_ranks() == buffer._comm.nodes and buffer.is_sm90_compiled()
    x, idx, weights = tokens_of(rank, size, 5)
    rows, _, handle, event, hook = buffer.low_latency_dispatch(x, idx, 8, EACH * size, use_fp8=False, async_finish=True)
    assert hook is None
    with event:
        pass
    buffer.get_next_low_latency_combine_buffer(handle).copy_(rows)
    out, event, _ = buffer.low_latency_combine(rows, idx, weights, handle, zero_copy=True, async_finish=True)
    event.current_stream_wait()
    assert torch.equal(out, (x.float() * weights.masked_fill(idx < 0, 0).sum(1, keepdim=True)).to(torch.bfloat16))
    stream = buffer.get_comm_stream()
    with torch.cuda.stream(stream):  # of nothing on the CPU
        pass
    for name in ("get_engram_storage_size_hint", "get_pp_buffer_size_hint", "get_agrs_buffer_size_hint"):
        raises(NotImplementedError, name, getattr(deep_ep.ElasticBuffer, name), num_entries=1)
        raises(NotImplementedError, name, getattr(deep_ep.ElasticBuffer, name))
    buffer.destroy()
    assert buffer.runtime is None
    raises(ValueError, "group comm", deep_ep.Buffer, None)


@on_ranks(1)
def test_deadlines(rank, size):
    """As long as DeepEP waits, unless the user says otherwise: ranks that compile kernels are late."""
    import os

    os.environ.pop("EPKIT_TIMEOUT_MS", None)
    assert deep_ep.Buffer(dist.group.WORLD)._comm.info()["timeout_ms"] == 100_000
    os.environ["EPKIT_TIMEOUT_MS"] = "7000"
    assert deep_ep.Buffer(dist.group.WORLD)._comm.info()["timeout_ms"] == 7000
    raises(ValueError, "timeout 0", deep_ep.ElasticBuffer, dist.group.WORLD, num_cpu_timeout_secs=0)
    assert deep_ep.ElasticBuffer(dist.group.WORLD, num_cpu_timeout_secs=10**9)._comm.info()["timeout_ms"] == 2**31 - 1

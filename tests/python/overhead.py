# SPDX-License-Identifier: Apache-2.0
"""overhead.py NANOSECONDS: processor time of a dispatch with seven tensors from Python, beside the same one in C.

One rank, one token, the quickest of 50 batches. Then what each call of deep_ep takes in all. Says it; judges nothing.
EPKIT_TEST_DEVICE=cuda: on a GPU, in short batches which the device has room to queue, beside `overhead cuda`.
"""
import os
import sys
import time

import torch
import torch.distributed as dist

import deep_ep
import epkit


CUDA = os.environ.get("EPKIT_TEST_DEVICE") == "cuda"


def quickest(function, batch=2000, batches=50):
    best = float("inf")
    for _ in range(batches):
        if CUDA:
            batch = min(batch, 100)
            torch.cuda.synchronize()
        begin = time.thread_time_ns()
        for _ in range(batch):
            function()
        best = min(best, (time.thread_time_ns() - begin) / batch)
    return best


torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
device = "cuda" if CUDA else "cpu"  # torch.set_default_device() would make each call of torch slower
comm = epkit.Communicator(backend="cuda" if CUDA else "host")
plan = comm.plan(torch.zeros(1, 1, dtype=torch.int64, device=device), 1)
x = torch.zeros(1, 128, device=device).to(torch.float8_e4m3fn)
scales, weights = torch.ones(1, 1, device=device), torch.ones(1, 1, device=device)
rows = plan.dispatch((x, scales), weights, want_topk_idx=True)
library = float(sys.argv[1])
native, out = plan._native.dispatch, (rows.x, rows.scales, rows.topk_idx, rows.topk_weights)
stream = torch.cuda.current_stream().cuda_stream if CUDA else None
call = quickest(lambda: native(x, scales, weights, *out, stream))
empty = quickest(lambda: None)
again = quickest(lambda: plan.dispatch((x, scales), weights, out=rows)) - empty
whole = quickest(lambda: plan.dispatch((x, scales), weights, want_topk_idx=True), batch=500)
print(f"dispatch of one token, 7 tensors: {library:.0f} ns in C; {call - empty - library:.0f} ns more by the extension module, "
      f"{again - library:.0f} by Plan.dispatch(out=...), {whole - empty - library:.0f} where that allocates the four outputs")

buffer = deep_ep.Buffer(dist.group.WORLD)
x, topk_idx = torch.zeros(1, 128, dtype=torch.bfloat16, device=device), torch.zeros(1, 1, dtype=torch.int64, device=device)
layout = buffer.get_dispatch_layout(topk_idx, 1)
routing = {"num_tokens_per_rank": layout[0], "is_token_in_rank": layout[3], "num_tokens_per_expert": layout[2],
           "topk_idx": topk_idx, "topk_weights": weights}
handle = buffer.dispatch(x, **routing)[4]
received, _, sent, _, _ = buffer.low_latency_dispatch(x, topk_idx, 8, 1, use_fp8=False)
for name, function in (("get_dispatch_layout", lambda: buffer.get_dispatch_layout(topk_idx, 1)),
                       ("dispatch, new routing", lambda: buffer.dispatch(x, **routing)),
                       ("dispatch, handle", lambda: buffer.dispatch(x, handle)),
                       ("combine", lambda: buffer.combine(x, handle)),
                       ("low_latency_combine", lambda: buffer.low_latency_combine(received, topk_idx, weights, sent)),
                       ("low_latency_dispatch", lambda: buffer.low_latency_dispatch(x, topk_idx, 8, 1, use_fp8=False))):
    print(f"Buffer: {name}: {quickest(function, batch=200) / 1000:.1f} us")

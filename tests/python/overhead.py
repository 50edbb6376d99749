# SPDX-License-Identifier: Apache-2.0
"""overhead.py LIBRARY: processor time of a dispatch with seven tensors from Python, beside the same one in C, which LIBRARY
(overhead.c) makes in this process.

One rank, one token; batches of all alternate, the quickest of 50 counts. Then what each call of deep_ep takes in all. Says it;
judges nothing. EPKIT_TEST_DEVICE=cuda: on a GPU, in batches which the device has room to queue.
"""
import ctypes
import os
import sys
import time

import torch
import torch.distributed as dist

import deep_ep
import epkit


CUDA = os.environ.get("EPKIT_TEST_DEVICE") == "cuda"
BATCH = 100 if CUDA else 2000


def batch_of(function, batch=BATCH):
    if CUDA:
        torch.cuda.synchronize()
    begin = time.thread_time_ns()
    for _ in range(batch):
        function()
    return (time.thread_time_ns() - begin) / batch


def quickest(function, batch=BATCH):
    return min(batch_of(function, min(batch, BATCH)) for _ in range(50))


torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
device = "cuda" if CUDA else "cpu"  # torch.set_default_device() would make each call of torch slower
comm = epkit.Communicator(backend="cuda" if CUDA else "host")
plan = comm.plan(torch.zeros(1, 1, dtype=torch.int64, device=device), 1)
x = torch.zeros(1, 128, device=device).to(torch.float8_e4m3fn)
scales, weights = torch.ones(1, 1, device=device), torch.ones(1, 1, device=device)
rows = plan.dispatch((x, scales), weights, want_topk_idx=True)
native = plan._native.dispatch
in_c = ctypes.CDLL(sys.argv[1])
in_c.overhead_open.restype, in_c.overhead_batch.restype = ctypes.c_void_p, ctypes.c_double
opened = in_c.overhead_open(int(CUDA))
if not opened:
    sys.exit(1)
calls = {"C": lambda: in_c.overhead_batch(ctypes.c_void_p(opened), BATCH),
         "empty": lambda: batch_of(lambda: None),
         "extension": lambda: batch_of(lambda: native(x, scales, weights, rows, True, False, None, False, None, 0, 0, None)),
         "again": lambda: batch_of(lambda: plan.dispatch((x, scales), weights, out=rows)),
         "whole": lambda: batch_of(lambda: plan.dispatch((x, scales), weights, want_topk_idx=True))}
best = {name: min(times) for name, times in zip(calls, zip(*([call() for call in calls.values()] for _ in range(50))))}
more = {name: best[name] - best["empty"] - best["C"] for name in best}
print(f"dispatch of one token, 7 tensors: {best['C']:.0f} ns in C; {more['extension']:.0f} ns more by the extension module, "
      f"{more['again']:.0f} by Plan.dispatch(out=...), {more['whole']:.0f} where that allocates the four outputs")

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

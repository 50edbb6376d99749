# SPDX-License-Identifier: Apache-2.0
"""overhead.py NANOSECONDS: processor time of a dispatch with seven tensors from Python, beside the same one in C.

One rank, one token, the quickest of 50 batches. Says it; judges nothing.
"""
import sys
import time

import torch
import torch.distributed as dist

import epkit


def quickest(function, batch=2000, batches=50):
    best = float("inf")
    for _ in range(batches):
        begin = time.thread_time_ns()
        for _ in range(batch):
            function()
        best = min(best, (time.thread_time_ns() - begin) / batch)
    return best


torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
comm = epkit.Communicator(backend="host")
plan = comm.plan(torch.zeros(1, 1, dtype=torch.int64), 1)
x, scales, weights = torch.zeros(1, 128).to(torch.float8_e4m3fn), torch.ones(1, 1), torch.ones(1, 1)
rows = plan.dispatch((x, scales), weights, want_topk_idx=True)
library = float(sys.argv[1])
native, out = plan._native.dispatch, (rows.x, rows.scales, rows.topk_idx, rows.topk_weights)
call = quickest(lambda: native(x, scales, weights, *out, None))
empty = quickest(lambda: None)
again = quickest(lambda: plan.dispatch((x, scales), weights, out=rows)) - empty
whole = quickest(lambda: plan.dispatch((x, scales), weights, want_topk_idx=True), batch=500)
print(f"dispatch of one token, 7 tensors: {library:.0f} ns in C; {call - empty - library:.0f} ns more by the extension module, "
      f"{again - library:.0f} by Plan.dispatch(out=...), {whole - empty - library:.0f} where that allocates the four outputs")

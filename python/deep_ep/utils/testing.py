# SPDX-License-Identifier: Apache-2.0
"""Measurements."""
import contextlib
import os
import time
from typing import Callable, Optional, Union

import torch
import torch.distributed as dist

# Kernels of epkit under the names that programs ask for. What has no kernel of its own here takes no time.
_KERNELS = {"dispatch_impl": "dispatch", "combine_impl": "combine"}
_NO_KERNELS = ("dispatch_copy_epilogue_impl", "combine_reduce_epilogue_impl")
_NOTHING = 1e-9


class empty_suppress(contextlib.nullcontext):
    """Suppresses nothing."""


class suppress_stdout_stderr:
    """Both standard outputs, also of libraries, go nowhere."""

    def __enter__(self):
        self._kept = [os.dup(fd) for fd in (1, 2)]
        null = os.open(os.devnull, os.O_WRONLY)
        for fd in (1, 2):
            os.dup2(null, fd)
        os.close(null)
        return self

    def __exit__(self, *_):
        for fd, kept in zip((1, 2), self._kept):
            os.dup2(kept, fd)
            os.close(kept)


def flush_l2_cache(enabled: bool = True) -> None:
    """Writes 256 MB on the device."""
    if enabled and torch.cuda.is_available():
        torch.empty(64 << 20, dtype=torch.int32, device="cuda").zero_()


def bench(fn: Callable, num_warmups: int = 30, num_tests: int = 30, post_fn: Optional[Callable] = None, flush_l2: bool = True):
    """(mean, least, most) seconds of a call: by events on a device, by the clock on the CPU."""
    cuda, times = torch.cuda.is_available(), []
    for _ in range(num_warmups):
        fn()
    for _ in range(num_tests):
        flush_l2_cache(flush_l2)
        if cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            fn()
            end.record()
            times.append((begin, end))
        else:
            begin = time.perf_counter()
            fn()
            times.append(time.perf_counter() - begin)
        if post_fn is not None:
            post_fn()
    if cuda:
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) / 1e3 for begin, end in times]
    times = times[1:] or times
    return sum(times) / len(times), min(times), max(times)


def bench_kineto(fn: Callable, kernel_names: Union[str, tuple], num_tests: int = 30, suppress_kineto_output: bool = False,
                 trace_path: Optional[str] = None, flush_l2: bool = True, barrier_comm_profiling: bool = False,
                 num_kernels_per_period: int = 1, barrier: Optional[Callable] = None):
    """Mean seconds of each named kernel in fn(); with num_kernels_per_period > 1 a list for each.

    Kernels that DeepEP has and epkit has not (copies and reductions behind the operation) count 1 ns. On the CPU, where
    there are no kernels, all of them count the time of fn().
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)
    if not torch.cuda.is_available() or int(os.environ.get("EP_USE_NVIDIA_TOOLS", "0")):
        seconds = bench(fn, 1, num_tests, flush_l2=False)[0]
        result = [_NOTHING if name in _NO_KERNELS else
                  [seconds] * num_kernels_per_period if num_kernels_per_period > 1 else seconds for name in names]
    else:
        result = _profile(fn, names, num_tests, suppress_kineto_output, trace_path, flush_l2, barrier_comm_profiling,
                          num_kernels_per_period, barrier)
    return result[0] if isinstance(kernel_names, str) else result


def _profile(fn, names, num_tests, suppress, trace_path, flush_l2, with_barrier, per_period, barrier):
    fn()
    torch.cuda.synchronize()
    with suppress_stdout_stderr() if suppress else contextlib.nullcontext():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(num_tests):
                flush_l2_cache(flush_l2)
                if with_barrier:
                    torch.cuda._sleep(20_000_000)  # some 10 ms: hides how far apart the hosts are
                    barrier() if barrier is not None else dist.all_reduce(torch.ones(1, device="cuda"))
                fn()
            torch.cuda.synchronize()
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    result = []
    for name in names:
        times = [kernel.device_time / 1e6 for kernel in sorted(kernels, key=lambda one: one.time_range.start)
                 if "::" + _KERNELS.get(name, name) in kernel.name]
        if not times:
            if name not in _NO_KERNELS:
                raise RuntimeError(f"no kernel {name!r} ran: {sorted({kernel.name for kernel in kernels})}")
            times = [_NOTHING]
        if per_period > 1:
            result.append([sum(times[i::per_period]) / len(times[i::per_period]) for i in range(per_period)])
        else:
            result.append(sum(times) / len(times))
    return result

# SPDX-License-Identifier: Apache-2.0
"""Measurements."""
import contextlib
import os
import time
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist

# DeepEP's names of kernels -> those of epkit. What has no kernel of its own here counts as no time.
_KERNELS = {"dispatch_impl": "dispatch", "combine_impl": "combine"}
_NO_KERNELS = ("dispatch_copy_epilogue_impl", "combine_reduce_epilogue_impl", "notify")
_NOTHING = 1e-9


class empty_suppress(contextlib.nullcontext):  # type: ignore[type-arg]
    """Suppresses nothing."""


class suppress_stdout_stderr:
    """Both standard outputs, also of libraries, go nowhere."""

    def __enter__(self) -> "suppress_stdout_stderr":
        self._kept = [os.dup(fd) for fd in (1, 2)]
        null = os.open(os.devnull, os.O_WRONLY)
        for fd in (1, 2):
            os.dup2(null, fd)
        os.close(null)
        return self

    def __exit__(self, *_: Any) -> None:
        for fd, kept in zip((1, 2), self._kept):
            os.dup2(kept, fd)
            os.close(kept)


def flush_l2_cache(enabled: bool = True) -> None:
    """Writes 256 MB on the device."""
    if enabled and torch.cuda.is_available():
        torch.empty(64 << 20, dtype=torch.int32, device="cuda").zero_()


def _timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def bench(fn: Callable[[], Any], num_warmups: int = 30, num_tests: int = 30, post_fn: Optional[Callable[[], Any]] = None,
          flush_l2: bool = True) -> Tuple[float, float, float]:
    """(mean, least, most) seconds of a call: by events on a device, by the clock on the CPU."""
    cuda = torch.cuda.is_available()
    times: List[float] = []
    events: List[Tuple[Any, Any]] = []
    for _ in range(num_warmups):
        fn()
    for _ in range(num_tests):
        flush_l2_cache(flush_l2)
        if cuda:
            events.append((_timing_event(), _timing_event()))
            events[-1][0].record()
            fn()
            events[-1][1].record()
        else:
            start = time.perf_counter()
            fn()
            times.append(time.perf_counter() - start)
        if post_fn is not None:
            post_fn()
    if cuda:
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) / 1e3 for begin, end in events]
    times = times[1:] or times
    return sum(times) / len(times), min(times), max(times)


def bench_kineto(fn: Callable[[], Any], kernel_names: Union[str, Tuple[str, ...]], num_tests: int = 30, suppress_kineto_output: bool = False,
                 trace_path: Optional[str] = None, flush_l2: bool = True, barrier_comm_profiling: bool = False,
                 num_kernels_per_period: int = 1, barrier: Optional[Callable[[], Any]] = None) -> Any:
    """Mean seconds of each named kernel in fn(); with num_kernels_per_period > 1 a list for each.

    0 for a name of which no kernel ran. Kernels that DeepEP has and epkit has not (copies and reductions behind the
    operation, notifications before it) count 1 ns, because its tests divide by their time. On the CPU, where there are no kernels, all of them count the time of
    fn().
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)
    if not torch.cuda.is_available() or int(os.environ.get("EP_USE_NVIDIA_TOOLS", "0")):
        seconds = bench(fn, 1, num_tests, flush_l2=False)[0]
        result: Sequence[Any] = [
            _each(_NOTHING if name in _NO_KERNELS else seconds, num_kernels_per_period) for name in names]
    else:
        result = _profile(fn, names, num_tests, suppress_kineto_output, trace_path, flush_l2, barrier_comm_profiling,
                          num_kernels_per_period, barrier)
    return result[0] if isinstance(kernel_names, str) else result


def _profile(fn: Callable[[], Any], names: Tuple[str, ...], num_tests: int, suppress: bool, trace_path: Optional[str],
             flush_l2: bool, with_barrier: bool, per_period: int, barrier: Optional[Callable[[], Any]]) -> List[Any]:
    fn()
    torch.cuda.synchronize()
    with suppress_stdout_stderr() if suppress else contextlib.nullcontext():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(num_tests):
                flush_l2_cache(flush_l2)
                if with_barrier:
                    torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # some 10 ms: hides how far apart the hosts are
                    barrier() if barrier is not None else dist.all_reduce(torch.ones(1, device="cuda"))
                fn()
            torch.cuda.synchronize()
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    kernels = [event for event in profiler.events() if str(event.device_type).endswith("CUDA")]
    return [_seconds(kernels, name, per_period) for name in names]


def _each(value: float, per_period: int) -> Any:
    return value if per_period == 1 else [value] * per_period


def _seconds(kernels: Sequence[Any], name: str, per_period: int) -> Any:
    """The mean of the kernels of this name in a profile, or a list for each of a period. 0 where none ran, as in DeepEP."""
    kernels = sorted(kernels, key=lambda one: one.time_range.start)
    own = [one for one in kernels if "::" + _KERNELS.get(name, name) in one.name]
    # Those without a namespace, such as kernels of the program. DeepEP looks for its names anywhere, too.
    own = own or [one for one in kernels if name in one.name]
    # By the range: torch before 2.4 has no device_time.
    times = [one.time_range.elapsed_us() / 1e6 for one in own]
    if not times:
        return _each(_NOTHING if name in _NO_KERNELS else 0.0, per_period)
    if per_period == 1:
        return sum(times) / len(times)
    return [sum(some) / max(1, len(some)) for some in (times[begin::per_period] for begin in range(per_period))]

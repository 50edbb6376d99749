# SPDX-License-Identifier: Apache-2.0
"""Small helpers around tensors and streams that every call uses."""
import contextlib
import operator
import threading
from typing import Any, Callable, ContextManager, Dict, List, NoReturn, Optional, Protocol, Sequence, Tuple, TypeVar, Union, overload

import torch

from ._native import _C, ArgumentError

ALIGNMENT = 16  # bytes, of every pointer that is passed to the library


class HasStream(Protocol):
    """torch.cuda.Stream, or anything else with the pointer of one."""
    @property
    def cuda_stream(self) -> int: ...


Stream = Optional[HasStream]
Floats = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]  # rows, or (fp8 rows, scales)
_Self = TypeVar("_Self")


class OfThisProcess:
    """What belongs to a communicator of this process. A copy is the object itself; it cannot be pickled."""

    # Without this, subclasses of tuple inherit a __weakref__ that they cannot serve, and torch._dynamo before 2.5 uses it.
    __slots__ = ()

    def __copy__(self: _Self) -> _Self:
        return self

    def __deepcopy__(self: _Self, memo: Any) -> _Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__module__}.{type(self).__name__} cannot be pickled: it belongs to a communicator of "
                        "this process; make one in each process")


def want_tensor(value: Any, call: str, name: str, dims: Optional[str] = None) -> None:
    """Refuses what is no tensor; with `dims`, such as "[N, K]", one of another number of dimensions."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{call}: {name} is a {type(value).__name__}, must be a tensor")
    if dims is not None and value.dim() != dims.count(",") + 1:
        raise ArgumentError(f"{call}: {name}: shape is {list(value.shape)}, must be {dims}")


def want_no_grad(call: str, instead: str, **tensors: Any) -> None:
    """Refuses tensors whose gradients would be lost."""
    for name, tensor in tensors.items():
        if not _C.is_ready(tensor) and isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(f"{call}: {name} requires gradients, which this call does not record: {instead}, or give "
                                f"{name}.detach()")


def want_integer(value: Any, call: str, name: str) -> int:
    """The number that an integer of any type is; refuses what is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{call}: {name} is a {type(value).__name__}, must be an integer") from None


@overload
def aligned(tensor: torch.Tensor) -> torch.Tensor: ...
@overload
def aligned(tensor: Optional[torch.Tensor]) -> Optional[torch.Tensor]: ...


def aligned(tensor: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """The tensor, or a copy of it: where its first element is not at a multiple of 16 bytes (a slice may begin anywhere),
    and where memory holds the negated values (torch.Tensor.is_neg(), of the imaginary part of a conjugate)."""
    if _C.is_ready(tensor) or not isinstance(tensor, torch.Tensor):
        return tensor
    try:
        if not tensor.data_ptr() % ALIGNMENT and (tensor.dtype is not torch.float32 or not tensor.is_neg()):
            return tensor
    except RuntimeError:  # a tensor without memory: the call itself refuses it
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)  # since torch 2.8


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """Rows of fp4 as bytes of two elements; others as they are."""
    return rows.view(torch.uint8) if isinstance(rows, torch.Tensor) and rows.dtype is _FLOAT4 else rows


def as_words(scales: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """Scales of a byte as words of four; others as they are."""
    if not isinstance(scales, torch.Tensor) or scales.element_size() != 1:
        return scales
    try:
        return scales.view(torch.int32)
    except RuntimeError:
        raise ArgumentError(f"dispatch: scales: shape is {list(scales.shape)} of {scales.dtype}, strides {list(scales.stride())}: "
                            "of one byte they must be contiguous in each row, a multiple of 4; otherwise give words of four (int32)"
                            ) from None


def stream_pointer(cuda: bool, device: torch.device, stream: Stream = None) -> Optional[int]:
    """The stream argument of the library: None on the CPU, else the pointer of `stream` or of torch's current one."""
    if not cuda:
        return None
    return _current_pointer(device) if stream is None else stream.cuda_stream


_STREAMS_KEPT = 64
_streams: Dict[Tuple[Optional[int], int], torch.cuda.Stream] = {}
_of_thread = threading.local()


# The function that code of Inductor calls: a fortieth of the time of torch.cuda.current_stream().
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (lambda index: torch.cuda.current_stream(index).cuda_stream)


def _current_pointer(device: torch.device) -> int:
    pointer: int = _raw_stream(device.index)
    return pointer


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """torch.cuda.current_stream(device); the object of one that was current before is used again."""
    key = (device.index, _current_pointer(device))
    stream = _streams.get(key)
    if stream is None:
        if len(_streams) >= _STREAMS_KEPT:
            _streams.clear()
        stream = _streams[key] = torch.cuda.current_stream(device)
    return stream


def wait_stream(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
    """stream.wait_stream(other) with one event per thread and device. A wait refers to the last record before it was queued, so
    that the event may be recorded again."""
    events: Dict[int, torch.cuda.Event] = _of_thread.__dict__.setdefault("events", {})
    event = events.get(other.device_index)
    if event is None:
        event = events[other.device_index] = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(other)
    stream.wait_event(event)


class _OnStream:
    """torch.cuda.stream(), on the current device: without the objects that it makes of streams on the way."""

    def __init__(self, stream: torch.cuda.Stream, device: torch.device) -> None:
        self._stream, self._before = stream, current_stream(device)

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: Any) -> None:
        torch.cuda.set_stream(self._before)


def on_stream(stream: torch.cuda.Stream, device: torch.device) -> ContextManager[Any]:
    """torch works in a stream of this device."""
    # torch.cuda.set_stream() makes the stream's device the current one.
    return _OnStream(stream, device) if torch.cuda.current_device() == device.index else torch.cuda.stream(stream)


def in_stream(device: torch.device, pointer: Optional[int]) -> ContextManager[Any]:
    """torch works in the stream that stream_pointer() gave. Nothing on the CPU."""
    if pointer is None or _current_pointer(device) == pointer:
        return contextlib.nullcontext()
    return on_stream(torch.cuda.ExternalStream(pointer, device), device)  # type: ignore[no-untyped-call]


def run_untraced(*functions: Any) -> None:
    """Makes torch.compile run these functions, and what they call, without tracing them. torch.compiler.disable() would do the
    same, but imports torch._dynamo, which takes seconds, and adds time to each call. torch before 2.7 traces what they call."""
    frames = torch._C._dynamo.eval_frame
    for function in functions:
        function._torchdynamo_disable = True  # of a call that torch._dynamo sees: it would warn of functions that are not of Python
        if hasattr(frames, "set_code_exec_strategy"):
            skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
            frames.set_code_exec_strategy(function.__code__, skip)


run_untraced(aligned, want_no_grad)


# It has functions that code of Inductor calls, of a third of the time of torch.empty() and of as_strided().
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


def _make(shape: Tuple[int, ...], strides: Tuple[int, ...], dtype: torch.dtype, device: int, clear: bool) -> torch.Tensor:
    """A new tensor for a call: on the CUDA device, or with -1 on the CPU."""
    if clear and strides[-1] == 1:
        return zeros(shape, dtype, torch.device("cpu"))
    if clear:
        elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides)) if all(shape) else 0
        return zeros((elements,), dtype, torch.device("cpu")).as_strided(shape, strides)
    return torch.empty_strided(shape, strides, dtype=dtype, device=torch.device("cuda", device) if device >= 0 else "cpu")


# _empty_strided_cuda makes tensors of the current device, without what modes of torch add and without filling them.
_C.know_torch(_make, getattr(_guards, "_empty_strided_cuda", None), torch._C._len_torch_dispatch_stack, torch._C._get_deterministic_algorithms,
              getattr(torch._C, "_cuda_getDevice", None), _raw_stream,
              torch.cuda.is_current_stream_capturing, torch.Tensor.as_strided, getattr(_guards, "_reinterpret_tensor", None))


_LARGE = 1 << 20  # bytes


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """torch.zeros(), also of 8-bit floats, which older builds of torch cannot fill. On the CPU a large tensor takes the memory of
    what is written to it: outputs of the worst case are gigabytes, of which a call fills some rows."""
    if device.type == "cpu":
        tensor = torch.empty(shape, dtype=dtype, device=device)
        size = tensor.numel() * dtype.itemsize
        if size >= _LARGE and type(tensor) is torch.Tensor:  # a FakeTensor has no memory
            _C.clear(tensor.data_ptr(), size)
            return tensor
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return torch.zeros(shape, dtype=torch.uint8, device=device).view(dtype)
    return torch.zeros(shape, dtype=dtype, device=device)

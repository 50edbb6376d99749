# SPDX-License-Identifier: Apache-2.0
"""Small helpers around tensors and streams that every call uses."""
import contextlib
from typing import Any, ContextManager, NoReturn, Optional, Protocol, Sequence, Tuple, TypeVar, Union, overload

import torch

ALIGNMENT = 16  # of every pointer that the library takes


class HasStream(Protocol):
    """torch.cuda.Stream, or anything else with the pointer of one."""
    @property
    def cuda_stream(self) -> int: ...


Stream = Optional[HasStream]
Floats = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]  # rows, or (fp8 rows, scales)
_Self = TypeVar("_Self")


class OfThisProcess:
    """What belongs to a communicator of this process. A copy is the object itself; it cannot be pickled."""

    def __copy__(self: _Self) -> _Self:
        return self

    def __deepcopy__(self: _Self, memo: Any) -> _Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__module__}.{type(self).__name__} cannot be pickled: it belongs to a communicator of "
                        "this process; make one in each process")


@overload
def aligned(tensor: torch.Tensor) -> torch.Tensor: ...
@overload
def aligned(tensor: Optional[torch.Tensor]) -> Optional[torch.Tensor]: ...


def aligned(tensor: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """The tensor, or a copy of it: where its first element is not at a multiple of 16 bytes (a slice may begin anywhere),
    and where memory holds the negated values (torch.Tensor.is_neg(), of the imaginary part of a conjugate)."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    try:
        if not tensor.data_ptr() % ALIGNMENT and not tensor.is_neg():
            return tensor
    except RuntimeError:  # nothing that is in memory: the call says so
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def stream_pointer(cuda: bool, device: torch.device, stream: Stream = None) -> Optional[int]:
    """What the library takes as a stream: None on the CPU, else the pointer of `stream` or of torch's current one."""
    if not cuda:
        return None
    if stream is None:
        stream = torch.cuda.current_stream(device)
    return stream.cuda_stream


def in_stream(device: torch.device, pointer: Optional[int]) -> ContextManager[Any]:
    """torch works in the stream that stream_pointer() gave. Nothing on the CPU."""
    if pointer is None or torch.cuda.current_stream(device).cuda_stream == pointer:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(pointer, device))  # type: ignore[no-untyped-call]


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """torch.zeros(), also of 8-bit floats, which older builds of torch cannot fill."""
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return torch.zeros(shape, dtype=torch.uint8, device=device).view(dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def column_major(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[rows, columns] whose columns are contiguous and begin at multiples of 16 bytes, as TMA wants scales."""
    each = max(1, ALIGNMENT // dtype.itemsize)
    stride = (rows + each - 1) // each * each
    return torch.empty((columns, max(stride, each)), dtype=dtype, device=device).t()[:rows]

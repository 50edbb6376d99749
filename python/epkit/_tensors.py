# SPDX-License-Identifier: Apache-2.0
"""Small helpers around tensors that every call uses."""
import contextlib

import torch

ALIGNMENT = 16  # of every pointer that the library takes


def aligned(tensor):
    """The tensor, or a copy of it where its first element is not at a multiple of 16 bytes (a slice may begin anywhere)."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or not tensor.data_ptr() % ALIGNMENT:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def stream_pointer(cuda, device, stream=None):
    """What the library takes as a stream: None on the CPU, else the pointer of `stream` or of torch's current one."""
    if not cuda:
        return None
    if stream is None:
        stream = torch.cuda.current_stream(device)
    return stream.cuda_stream


def in_stream(device, pointer):
    """torch works in the stream that stream_pointer() gave. Nothing on the CPU."""
    if pointer is None or torch.cuda.current_stream(device).cuda_stream == pointer:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(pointer, device))


def column_major(rows, columns, like, device, dtype=None):
    """[rows, columns] whose columns are contiguous and begin at multiples of 16 bytes, as TMA wants scales."""
    dtype = dtype or like.dtype
    each = max(1, ALIGNMENT // torch.empty((), dtype=dtype).element_size())
    stride = (rows + each - 1) // each * each
    return torch.empty((columns, max(stride, each)), dtype=dtype, device=device).t()[:rows]

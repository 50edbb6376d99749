# SPDX-License-Identifier: Apache-2.0
"""Stream rules that Buffer and ElasticBuffer share.

On CUDA each call runs on the buffer's communication stream. Before it that stream waits for `previous_event`, or for
what the current stream holds when the call is made. After it the current stream waits for it, or, if the call is
asynchronous, the returned event says when it is complete; it keeps the call's tensors until somebody has waited.

On the CPU a call is complete when it returns, and all events are complete.
"""
import contextlib

import torch

from epkit._tensors import aligned

from .utils.event import EventHandle, EventOverlap


class Order:
    """One call on the communication stream.

    The library takes `cuda_stream` of it as the stream; by then outputs have been allocated, so that nothing which fills
    them can run beside the operation.
    """

    def __init__(self, device, comm_stream, previous_event, allocate_on_comm_stream, another_event=None):
        self._device = device
        self._stream = comm_stream
        self._previous = getattr(previous_event, "event", previous_event)
        self._another = getattr(another_event, "event", another_event)
        self._on_comm = allocate_on_comm_stream
        self._waited = self._copied = False

    def inputs(self, *tensors):
        """The tensors as the library takes them: copies, made on the current stream, where one begins at an odd place."""
        ready = tuple(aligned(tensor) for tensor in tensors)
        self._copied |= any(one is not tensor for one, tensor in zip(ready, tensors))
        return ready

    @property
    def stream(self):
        """What to hand to epkit as a stream: None on the CPU."""
        return self if self._stream is not None else None

    @property
    def cuda_stream(self):
        if not self._waited:
            self._waited = True
            for event in (self._previous, self._another):
                if event is not None and event.cuda_event is not None:
                    self._stream.wait_event(event.cuda_event)
            if self._previous is None or self._copied:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._stream.cuda_stream

    def allocating(self):
        """Where outputs are allocated: with this, on the communication stream, if that was asked for."""
        if self._stream is None or not self._on_comm:
            return contextlib.nullcontext()
        if self._previous is None:
            # What the current stream holds has to be known before it is no longer the current one.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._waited = True
        return torch.cuda.stream(self._stream)

    def on_stream(self):
        """Work of torch that belongs to the call: with this it runs on the communication stream."""
        if self._stream is None:
            return contextlib.nullcontext()
        _ = self.cuda_stream
        return torch.cuda.stream(self._stream)

    def done(self, asynchronous, tensors, made_on_stream=()):
        """The end of the call: the current stream waits, or gets an event. Returns an EventOverlap.

        tensors: of the call. made_on_stream: those that were allocated within on_stream().
        """
        if self._stream is None:
            return EventOverlap(EventHandle.complete() if asynchronous else None)
        current = torch.cuda.current_stream(self._device)
        if not torch.cuda.is_current_stream_capturing():
            for tensor in list(made_on_stream) + (list(tensors) if self._on_comm else []):
                tensor.record_stream(current)
        tensors = list(tensors) + list(made_on_stream)
        if asynchronous:
            return EventOverlap(EventHandle(self._stream, tensors))
        current.wait_stream(self._stream)
        return EventOverlap(None)


def new_comm_stream(comm):
    """The communication stream of a buffer; None on the CPU."""
    return torch.cuda.Stream(comm.device, priority=-1) if comm.is_cuda else None

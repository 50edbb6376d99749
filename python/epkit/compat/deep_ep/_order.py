# SPDX-License-Identifier: Apache-2.0
"""Stream rules that Buffer and ElasticBuffer share.

On CUDA a call that is asynchronous or has a `previous_event` runs on the buffer's communication stream. Before it that
stream waits for `previous_event`, or for what the current stream holds when the call is made. With a `previous_event`
outputs are allocated on the communication stream: memory of the current stream may still be in use by work that was
queued after the event. After the call the current stream waits for it, or, if the call is asynchronous, the returned
event records its completion; it keeps the call's tensors until a stream has waited for it.

Any other call would keep the current stream waiting from its beginning to its end, so it runs there: two waits and two
events less. All calls of a buffer are in order nevertheless, also where a program drops an event: the first call in the
current stream behind an asynchronous one runs on the communication stream, and before a call there that stream waits for
those in the current one. A program that has asked for the communication stream may order other streams by it: from
then on all calls run on that.

On the CPU a call is complete when it returns, and all events are complete.
"""
from typing import Any, ContextManager, List, Optional, Sequence, TypeVar, Union, overload

import torch

import epkit
from epkit._native import _C
from epkit._tensors import Floats, aligned, current_stream, on_stream, wait_stream

from .utils.envs import check_torch_deterministic
from .utils.event import EventHandle, EventOverlap

Event = Union[None, EventHandle, EventOverlap]


class _Here:
    """A context in which torch's stream stays the current one. contextlib.nullcontext has methods of Python, which take time."""
    __enter__ = __exit__ = staticmethod(_C.nothing)


_HERE: ContextManager[Any] = _Here()
_Given = TypeVar("_Given", bound=Optional[torch.Tensor])


def _handle_of(event: Event) -> Optional[EventHandle]:
    own: Any = event
    handle: Any = own.event if isinstance(own, EventOverlap) else own
    if handle is None or isinstance(handle, EventHandle):
        return handle
    raise TypeError(f"previous_event is a {type(handle).__name__}, must be an EventOverlap or EventHandle")


class Order:
    """One call on the communication stream.

    The library reads `cuda_stream` as the stream of the call. Outputs have been allocated by then, so that no kernel that
    fills them runs concurrently with the operation.
    """

    def __init__(self, device: torch.device, comm_stream: Optional[torch.cuda.Stream], previous_event: Event,
                 allocate_on_comm_stream: bool, another_event: Event = None) -> None:
        self._device = device
        self._stream = comm_stream  # None: the current stream, or the CPU
        self._previous = None if previous_event is None else _handle_of(previous_event)
        self._another = None if another_event is None else _handle_of(another_event)
        # In a capture record_stream() is not possible, and a graph orders all its work.
        apart = comm_stream is not None and self._previous is not None and not torch.cuda.is_current_stream_capturing()
        self._on_comm = allocate_on_comm_stream or apart
        self._waited = self._copied = False

    def capturing(self) -> bool:
        """Whether the call is captured into a graph."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @overload
    def input(self, tensor: torch.Tensor) -> torch.Tensor: ...
    @overload
    def input(self, tensor: Optional[torch.Tensor]) -> Optional[torch.Tensor]: ...

    def input(self, tensor: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        """The tensor, or a copy made on the current stream where its address is not aligned as the library requires."""
        if _C.is_ready(tensor):
            return tensor
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor = tensor.detach()  # as in DeepEP, gradients are the program's
        return self.copied(tensor, aligned(tensor))

    def copied(self, tensor: _Given, ready: _Given) -> _Given:
        """`ready`, which was made of the tensor on the current stream, unless it is the tensor itself."""
        self._copied |= ready is not tensor
        return ready

    def rows(self, x: Floats) -> Floats:
        """The same for rows, alone or with scales."""
        if isinstance(x, torch.Tensor):
            return self.input(x)
        if not isinstance(x, (tuple, list)) or len(x) != 2:
            raise TypeError(f"dispatch: x is a {type(x).__name__}, must be a tensor, or a tuple of a tensor and its scales")
        return self.input(x[0]), self.input(x[1])

    @property
    def stream(self) -> Optional["Order"]:
        """The `stream` argument for calls of epkit; None: the current stream, or the CPU."""
        return self if self._stream is not None else None

    @property
    def cuda_stream(self) -> int:
        """The pointer of the communication stream; the first access makes that stream wait for the events of the call."""
        assert self._stream is not None
        if not self._waited:
            self._waited = True
            for event in (self._previous, self._another):
                if event is not None and event.cuda_event is not None:
                    self._stream.wait_event(event.cuda_event)
            if self._previous is None or self._copied:
                wait_stream(self._stream, current_stream(self._device))
        return self._stream.cuda_stream

    def wait_here(self) -> None:
        """Makes the current stream wait for the events of the call: it is going to read the inputs."""
        for event in (self._previous, self._another):
            if event is not None and event.cuda_event is not None:
                current_stream(self._device).wait_event(event.cuda_event)

    def allocating(self) -> ContextManager[Any]:
        """A context for the allocation of outputs: on the communication stream if the call requires that."""
        if self._stream is None or not self._on_comm:
            return _HERE
        _ = self.cuda_stream  # its waits, while the caller's stream is still the current one
        return on_stream(self._stream, self._device)

    def on_stream(self) -> ContextManager[Any]:
        """A context in which operations of torch run on the communication stream."""
        if self._stream is None:
            return _HERE
        _ = self.cuda_stream
        return on_stream(self._stream, self._device)

    def mark(self, capturing: bool) -> Optional["Mark"]:
        """A position in the stream of the call behind what it has queued so far; None on the CPU."""
        if self._device.type == "cpu":
            return None
        return Mark(current_stream(self._device) if self._stream is None else self._stream, self._stream is not None, capturing)

    def done(self, asynchronous: bool, tensors: Any, made_on_stream: Sequence[torch.Tensor] = ()) -> EventOverlap:
        """The end of the call: the current stream waits, or gets an event. Returns an EventOverlap.

        tensors: of the call, in nested tuples. made_on_stream: those that were allocated within on_stream().
        """
        if self._stream is None:
            return EventOverlap(EventHandle.complete() if asynchronous else None)
        current = current_stream(self._device)
        of_call = _flat(tensors) if asynchronous or self._on_comm else []
        of_comm = list(made_on_stream) + (of_call if self._on_comm else [])
        if of_comm and not torch.cuda.is_current_stream_capturing():
            for tensor in of_comm:
                tensor.record_stream(current)
        if asynchronous:
            return EventOverlap(EventHandle(self._stream, of_call + list(made_on_stream), current))
        wait_stream(current, self._stream)
        return EventOverlap(None)


def _flat(value: Any) -> List[torch.Tensor]:
    """All tensors in nested tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for one in value for tensor in _flat(one)] if isinstance(value, (tuple, list)) else []


class Mark:
    """A position in the stream of a call, for work on a call's results that is queued later. A captured call has none:
    such work has to be captured as well."""

    def __init__(self, stream: torch.cuda.Stream, apart: bool, capturing: bool) -> None:
        self.capturing = capturing
        self._stream = stream
        self._event = self._record() if apart and not self.capturing else None

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, *tensors: torch.Tensor) -> None:
        """Makes torch's current stream wait for it, and lets it write to the tensors. A stream that is being captured cannot
        wait for work outside of the capture: the program has waited before."""
        if self.capturing or torch.cuda.is_current_stream_capturing():
            return
        current = torch.cuda.current_stream()
        if self._event is None:  # of a call in the program's own stream: mostly the one that is current again
            if current == self._stream:
                return
            self._event = self._record()
        current.wait_event(self._event)
        for tensor in tensors:  # the allocator has to know every stream that uses them
            tensor.record_stream(current)


class CommStream:
    """The communication stream of a buffer.

    own: a torch.cuda.Stream; None on the CPU. here: of calls in the current stream, or on the CPU.
    """

    def __init__(self, comm: epkit.Communicator) -> None:
        self.own = torch.cuda.Stream(comm.device, priority=-1) if comm.is_cuda else None  # type: ignore[no-untyped-call]
        self._device = comm.device
        self.here = Order(comm.device, None, None, False)
        self._is_known = False
        self._is_ahead = self._is_behind = False  # own: of the current stream, by the calls since it was joined

    def get(self) -> Optional[torch.cuda.Stream]:
        """For the program, which may order its streams by it."""
        self._is_known = True
        return self.own

    def order(self, asynchronous: bool, previous: Event = None, another: Event = None, on_comm: bool = False,
              may_fill: bool = False) -> Order:
        """Of a call: see the stream rules. `may_fill`: torch may fill new tensors."""
        if not may_fill and torch._C._get_deterministic_algorithms():
            check_torch_deterministic()
        if previous is None and another is None and (self.own is None or not (asynchronous or self._is_known or self._is_ahead)):
            self._is_behind = True
            return self.here
        if self.own is not None:
            if self._is_behind:
                wait_stream(self.own, current_stream(self._device))
            self._is_behind, self._is_ahead = False, asynchronous
        return Order(self._device, self.own, previous, on_comm, another)

# SPDX-License-Identifier: Apache-2.0
"""Events of asynchronous operations."""
from typing import Any, Callable, Optional, Sequence

import torch


class EventHandle:
    """An event on torch's current CUDA stream. Without CUDA it is complete from the beginning.

    It may keep tensors of a call that was made in the stream `caller`, whose allocator reuses their memory: they stay allocated
    until that stream has waited for the event, or, if it does not, until the work on the event's stream is complete.
    """

    def __init__(self, stream: Optional["torch.cuda.Stream"] = None, tensors: Sequence[torch.Tensor] = (),
                 caller: Optional["torch.cuda.Stream"] = None) -> None:
        self.cuda_event = None
        self._stream, self._tensors, self._caller = stream, tensors, caller
        if stream is not None or torch.cuda.is_available():
            self.cuda_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.cuda_event.record(stream if stream is not None else torch.cuda.current_stream())

    @classmethod
    def complete(cls) -> "EventHandle":
        """An event of something that is complete."""
        event = object.__new__(cls)
        event.cuda_event, event._stream, event._tensors, event._caller = None, None, (), None
        return event

    def current_stream_wait(self) -> None:
        """torch's current stream waits for the event."""
        if self.cuda_event is not None:
            current = torch.cuda.current_stream()
            current.wait_event(self.cuda_event)
            if self._caller is None or current == self._caller:
                self._stream = None

    def __del__(self) -> None:
        # The caller's stream has not waited: the allocator has to know that the event's stream may still use the tensors.
        stream = getattr(self, "_stream", None)
        if stream is None:
            return
        try:
            if not torch.cuda.is_current_stream_capturing():
                for tensor in self._tensors:
                    tensor.record_stream(stream)
        except Exception:  # noqa: BLE001 - torch may be gone at the end of the interpreter, and the allocator with it
            pass


class EventOverlap:
    """An event that a `with` statement waits for at its end, and whose hooks run after the wait.

    Attributes:
        event: an EventHandle, or None where the operation was not asynchronous.
        extra_tensors: kept as long as this object.
    """

    hook_after_wait: Optional[Callable[[], Any]] = None
    _release = False

    def __init__(self, event: Optional[EventHandle] = None, extra_tensors: Optional[Sequence[torch.Tensor]] = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """torch's current stream waits for the event. Returns what the hook returns, if there is one.

        release_handle: drop the event, and with it the tensors that it keeps.
        """
        if self.event is None:
            raise AssertionError("there is no event to wait for: the operation was not asynchronous")
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if release_handle:
            self.event = None
        return hook() if hook is not None else None

    def wait(self) -> Any:
        """As current_stream_wait()."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Runs a function once, after the next wait."""
        if self.hook_after_wait is not None:
            raise AssertionError("a hook is registered already")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> "EventOverlap":
        """`with event(release_handle=True):` drops the event at the end."""
        self._release = release_handle
        return self

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(self, *_: Any) -> None:
        if self.event is not None:
            self.current_stream_wait(self._release)
        self._release = False

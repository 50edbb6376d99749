# SPDX-License-Identifier: Apache-2.0
"""Errors of the library in the words of DeepEP's interface."""
import contextlib
import functools
from typing import Any, Callable, TypeVar

import epkit

_Call = TypeVar("_Call", bound=Callable[..., Any])
_Error = TypeVar("_Error", bound=epkit.Error)


def advise(error: _Error, advice: str) -> _Error:
    """The error, whose text ends with the advice."""
    error.args = (f"{error}; {advice}",)
    return error


def is_refused(error: epkit.Error) -> bool:
    """Whether all ranks refuse a plan: one would receive more rows than its capacity."""
    return getattr(error, "name", "") == "EP_E_CAPACITY"


def naming(advice: str, *names: str) -> Callable[[_Call], _Call]:
    """Makes a call add `advice` to errors with one of these names: arguments of the library, which its caller has not given. The
    reason may be an earlier call, and another rank."""
    def decorate(call: _Call) -> _Call:
        @functools.wraps(call)
        def named(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except epkit.Error as error:
                if any(name in str(error) for name in names):
                    advise(error, advice)
                raise
        return named  # type: ignore[return-value]
    return decorate


def raise_refused(comm: epkit.Communicator, stream: Any) -> None:
    """Raises, once, that an earlier operation of fixed capacity in `stream` was refused. On GPUs a program that waits only with
    torch learns it in no other way."""
    try:
        comm.check()
    except epkit.ArgumentError:
        with contextlib.suppress(epkit.Error):
            comm.synchronize(stream)  # marks it as reported; not possible in a capture
        raise

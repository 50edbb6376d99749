# SPDX-License-Identifier: Apache-2.0
"""Two helpers of Python."""
import functools
import weakref
from typing import Any, Callable, Optional, TypeVar

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])


def value_or(value: Optional[_T], default: _T) -> _T:
    """`value`, or `default` where it is None."""
    return default if value is None else value


def weak_lru(maxsize: Optional[int] = 128, typed: bool = False) -> Callable[[_F], _F]:
    """functools.lru_cache for methods: keeps no object alive."""
    def decorate(method: Any) -> Any:
        @functools.lru_cache(maxsize, typed)
        def cached(reference: Any, *args: Any, **kwargs: Any) -> Any:
            return method(reference(), *args, **kwargs)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return cached(weakref.ref(self), *args, **kwargs)
        return call
    return decorate

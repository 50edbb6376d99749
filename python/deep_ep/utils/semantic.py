# SPDX-License-Identifier: Apache-2.0
"""Two helpers of Python."""
import functools
import weakref


def value_or(value, default):
    """`value`, or `default` where it is None."""
    return default if value is None else value


def weak_lru(maxsize=128, typed=False):
    """functools.lru_cache for methods: keeps no object alive."""
    def decorate(method):
        @functools.lru_cache(maxsize, typed)
        def cached(reference, *args, **kwargs):
            return method(reference(), *args, **kwargs)

        @functools.wraps(method)
        def call(self, *args, **kwargs):
            return cached(weakref.ref(self), *args, **kwargs)
        return call
    return decorate

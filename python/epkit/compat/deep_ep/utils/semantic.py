# SPDX-License-Identifier: Apache-2.0
"""A helper of Python."""
from typing import Optional, TypeVar

_T = TypeVar("_T")


def value_or(value: Optional[_T], default: _T) -> _T:
    """`value`, or `default` where it is None."""
    return default if value is None else value

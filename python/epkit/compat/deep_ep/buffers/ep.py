# SPDX-License-Identifier: Apache-2.0
"""DeepEP V2.5's name of this module."""
from ..elastic import EPHandle
from ..ep import EPBuffer

__all__ = ["EPBuffer", "EPHandle"]

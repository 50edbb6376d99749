# SPDX-License-Identifier: Apache-2.0
"""DeepEP V2's name of this module."""
from ..buffer import Buffer

__all__ = ["Buffer"]

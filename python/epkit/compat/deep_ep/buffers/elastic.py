# SPDX-License-Identifier: Apache-2.0
"""DeepEP V2's name of this module."""
from ..elastic import ElasticBuffer, EPHandle

__all__ = ["EPHandle", "ElasticBuffer"]

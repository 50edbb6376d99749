# SPDX-License-Identifier: Apache-2.0
"""Where DeepEP V2 keeps its buffers."""
from ..buffer import Buffer
from ..elastic import ElasticBuffer, EPHandle

__all__ = ["Buffer", "EPHandle", "ElasticBuffer"]

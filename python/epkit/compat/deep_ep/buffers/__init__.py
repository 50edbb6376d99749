# SPDX-License-Identifier: Apache-2.0
"""Where DeepEP V2 keeps its buffers."""
from ..buffer import Buffer
from ..elastic import ElasticBuffer, EPHandle
from ..ep import EPBuffer

__all__ = ["Buffer", "EPBuffer", "EPHandle", "ElasticBuffer"]

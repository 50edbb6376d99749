# SPDX-License-Identifier: Apache-2.0
"""Names that some programs import from DeepEP's extension module."""
from deep_ep import Buffer, Config, EventHandle  # noqa: F401

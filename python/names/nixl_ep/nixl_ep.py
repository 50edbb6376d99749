# SPDX-License-Identifier: Apache-2.0
"""The name nixl_ep for epkit.compat.nixl_ep."""
from epkit.compat import stand_in
from epkit.compat.nixl_ep import *  # noqa: F403 - for type checkers

stand_in(__name__)

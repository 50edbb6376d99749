# SPDX-License-Identifier: Apache-2.0
"""The name deep_ep_v25 for epkit.compat.deep_ep_v25."""
from epkit.compat import stand_in
from epkit.compat.deep_ep import *  # noqa: F403 - for type checkers

stand_in(__name__)

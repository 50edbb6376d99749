# SPDX-License-Identifier: Apache-2.0
"""The name deep_ep for epkit.compat.deep_ep."""
from epkit.compat import stand_in
from epkit.compat.deep_ep import *  # noqa: F403 - for type checkers

stand_in(__name__)

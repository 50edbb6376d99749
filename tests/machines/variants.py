# SPDX-License-Identifier: Apache-2.0
"""One change to a golden machine for each failure mode."""

FAULTS = []
HOSTILE = []
ALL = {}

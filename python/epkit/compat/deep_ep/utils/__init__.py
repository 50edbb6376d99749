# SPDX-License-Identifier: Apache-2.0
"""Helpers under the names that DeepEP gives them, for programs and tests that import them."""
from .envs import check_nvlink_connections
from .event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap", "check_nvlink_connections"]

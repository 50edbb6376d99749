# SPDX-License-Identifier: Apache-2.0
"""The interface of NIXL EP on libepkit: `Buffer` for dispatch and combine of ranks that come and go, as vLLM and SGLang call it.

Of NIXL EP's two modes it has low latency. For the other one, whose ranks cannot change, use epkit.compat.deep_ep.
"""
from epkit import __version__ as _epkit_version  # first: it says what is missing

import torch

from ..deep_ep.buffer import Config
from ..deep_ep.utils.event import EventOverlap
from .buffer import Buffer

topk_idx_t = torch.int64
__version__ = f"1.5.1+epkit.{_epkit_version}"

__all__ = ["Buffer", "Config", "EventOverlap", "topk_idx_t"]

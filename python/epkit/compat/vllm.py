# SPDX-License-Identifier: Apache-2.0
"""The plugin of vLLM (entry point of the group vllm.general_plugins, vLLM 0.33): its deep_ep is epkit's.

vLLM has no registry of all-to-all backends: those that it has import deep_ep. It calls plugin() in each of its processes
before that. Nothing happens unless the variable VLLM_PLUGINS names epkit; other plugins must then be named there, too.
"""
import importlib
import os
import sys

from . import alias


def plugin() -> None:
    if "epkit" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    own = importlib.import_module("epkit.compat.deep_ep")
    before = sys.modules.get("deep_ep")
    if before is not None and before is not own:
        raise RuntimeError(f"epkit: VLLM_PLUGINS names epkit, but {before.__file__} is imported as deep_ep already")
    alias("deep_ep", own)

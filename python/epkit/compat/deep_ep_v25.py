# SPDX-License-Identifier: Apache-2.0
"""The name of DeepEP V2.5 in the distribution sgl-deep-ep-v25: epkit.compat.deep_ep, which has V1 and V2 as well."""
from . import alias, deep_ep

alias(__name__, deep_ep)

# SPDX-License-Identifier: Apache-2.0
"""_build.py is written by CMake: what the libraries of the package were compiled with."""
from typing import Optional

cuda: Optional[str]

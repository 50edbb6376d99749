# SPDX-License-Identifier: Apache-2.0
"""The build backend of pyproject.toml here: scikit-build-core, in the folder above, which has the sources in C."""
import os

os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from scikit_build_core.build import *  # noqa: E402,F401,F403

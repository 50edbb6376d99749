#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What a call from Python costs beyond the library's own. A measurement, no test.
set -euo pipefail

source=$(cd "$(dirname "$0")/../.." && pwd)
build=${EPKIT_BUILD:-$source/build}
python=$("$source/scripts/torch_venv.sh")
PYTHONPATH=$build/python exec "$python" "$source/tests/python/overhead.py" "$build/tests/python/liboverhead.so"

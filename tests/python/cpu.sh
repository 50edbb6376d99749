#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The tests of python/ in the build tree: cpu.sh [NAME...]
set -euo pipefail

EPKIT_SOURCE=${EPKIT_SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
EPKIT_BUILD=${EPKIT_BUILD:-$EPKIT_SOURCE/build}

if [ ! -e "$EPKIT_BUILD/python/epkit/_C.abi3.so" ]; then
    echo 'skipped: python/ is not built: it needs the headers of Python 3.10 or later (package python3-dev)'
    exit 77
fi
python=$("$EPKIT_SOURCE/scripts/torch_venv.sh" 2>&1) || {
    printf '%s\n' "${python##*$'\n'}"
    exit 77
}
# Huge pages: a process with torch is forked, and ends, in a fifth of the time.
export PYTHONMALLOC=malloc GLIBC_TUNABLES=glibc.malloc.hugetlb=1
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$EPKIT_BUILD/python exec "${python##*$'\n'}" "$EPKIT_SOURCE/tests/python/run.py" "$@"

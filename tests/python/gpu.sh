#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The tests of python/ on GPUs: gpu.sh [NAME...], with the python3 of the machine, which brings torch. Ranks share a GPU
# where there are fewer than ranks. EPKIT_PYTHON names another Python, EPKIT_PACKAGES the folder with the packages.
set -euo pipefail

EPKIT_SOURCE=${EPKIT_SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
packages=${EPKIT_PACKAGES:-${EPKIT_BUILD:-$EPKIT_SOURCE/build-cuda}/python}
python=${EPKIT_PYTHON:-python3}

if [ ! -e "$packages/epkit/_C.abi3.so" ]; then
    echo 'skipped: python/ is not built: it needs the headers of Python 3.10 or later (package python3-dev)'
    exit 77
fi
if [ ! -e "$packages/epkit/libepkit-cuda.so" ] && [ ! -e "$packages/../libepkit-cuda.so" ]; then
    echo 'skipped: libepkit-cuda is not built: it needs nvcc (EPKIT_CUDA=ON says what is missing)'
    exit 77
fi
if ! why=$("$python" -c 'import torch, sys; sys.exit(None if torch.cuda.is_available() else "torch finds no GPU")' 2>&1); then
    echo "skipped: ${why##*$'\n'}"
    exit 77
fi
export EPKIT_TEST_DEVICE=cuda PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$packages
exec "$python" "$EPKIT_SOURCE/tests/python/run.py" "$@"

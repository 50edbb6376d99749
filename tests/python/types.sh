#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The types of python/ as mypy sees them, strictly ([tool.mypy] in pyproject.toml), with those of torch.
set -euo pipefail

EPKIT_SOURCE=${EPKIT_SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}

for module in torch mypy; do
    python=$("$EPKIT_SOURCE/scripts/torch_venv.sh" "$module" 2>&1) || {
        printf '%s\n' "${python##*$'\n'}"
        exit 77
    }
    [ "$module" = mypy ] || torch=${python##*$'\n'}
done
cd "$EPKIT_SOURCE"
# What it knows of torch, which takes 20 seconds, is kept with the environment for all builds.
python=${python##*$'\n'}
exec "$python" -m mypy --python-executable "$torch" --cache-dir "${python%/bin/*}/cache"

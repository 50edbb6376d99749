#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The types of python/ as mypy sees them, strictly ([tool.mypy] in pyproject.toml), with those of torch.
set -euo pipefail

EPKIT_SOURCE=${EPKIT_SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
EPKIT_BUILD=${EPKIT_BUILD:-$EPKIT_SOURCE/build}

for module in torch mypy; do
    python=$("$EPKIT_SOURCE/scripts/torch_venv.sh" "$module" 2>&1) || {
        printf '%s\n' "${python##*$'\n'}"
        exit 77
    }
    [ "$module" = mypy ] || torch=${python##*$'\n'}
done
cd "$EPKIT_SOURCE"
exec "${python##*$'\n'}" -m mypy --python-executable "$torch" --cache-dir "$EPKIT_BUILD/mypy"

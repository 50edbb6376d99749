#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# wheel.sh OUT [PIP-OPTION...] - build the wheel of python/ into the folder OUT.
#
# Runs `pip wheel .`, whose backend (python/backend.py) checks the wheel and names its platform. Needs Python 3.10 with
# pip, a C compiler, CMake, binutils. EPKIT_PYTHON names the Python. EPKIT_CUDA=ON includes libepkit-cuda, for the
# toolkit that CUDACXX names: one wheel for each version of CUDA.
set -euo pipefail

[ $# -ge 1 ] || {
    sed -n '3,7s/^# //p' "$0" >&2
    exit 2
}
out=$1
shift
source=$(cd "$(dirname "$0")/.." && pwd)
python=${EPKIT_PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/wheels" "$@" "$source"
wheel=$(find "$work/wheels" -name '*.whl')
mkdir -p "$out"
mv "$wheel" "$out/"
printf '%s\n' "$out/$(basename "$wheel")"

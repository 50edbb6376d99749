#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# wheel.sh OUT [--for DISTRIBUTION==VERSION]... [PIP-OPTION...] - build the wheels of python/ into the folder OUT.
#
# epkit: by `pip wheel .`, whose backend (python/backend.py) checks the wheel and names its platform. Needs Python 3.10
# with pip, a C compiler, CMake, binutils. EPKIT_PYTHON names the Python. With an nvcc (CUDACXX, PATH) the wheel has
# libepkit-cuda: one wheel for each version of CUDA. EPKIT_CUDA=ON: it must; OFF: it has not. epkit-deep-ep: the name
# deep_ep, for programs that import it; epkit-deep-ep-v25: deep_ep_v25; epkit-nixl-ep: nixl_ep. --for: a wheel without
# files that satisfies a program that requires another distribution of the first two names, sgl-deep-ep==0.1.2.post1 for
# instance (python/wheels.py).
set -euo pipefail

[ $# -ge 1 ] || {
    sed -n '3,10s/^# //p' "$0" >&2
    exit 2
}
out=$1
shift
empty=()
while [ "${1-}" = --for ]; do
    empty+=("${2?--for needs DISTRIBUTION==VERSION}")
    shift 2
done
source=$(cd "$(dirname "$0")/.." && pwd)
python=${EPKIT_PYTHON:-python3}
if ! "$python" -m pip --version >/dev/null 2>&1; then
    echo "wheel.sh: $python cannot run pip: install it (Debian: python3-pip python3-dev), or name another Python in EPKIT_PYTHON" >&2
    exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir "$work/wheels"
"$python" "$source/python/wheels.py" "$work/wheels" "${empty[@]}" >/dev/null
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/wheels" "$@" "$source"
mkdir -p "$out"
for wheel in "$work"/wheels/*.whl; do
    mv "$wheel" "$out/"
    printf '%s\n' "$out/$(basename "$wheel")"
    if [[ $wheel == */epkit-* && $wheel != *+cu* ]]; then
        # shellcheck disable=SC2016 # a command to paste
        echo 'built without CUDA. For GPUs: EPKIT_CUDA=ON CUDACXX=$(scripts/cuda_toolkit.sh) scripts/wheel.sh dist' >&2
    fi
done

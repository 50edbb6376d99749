#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# torch_venv.sh [MODULE] - print the Python of a virtual environment that has torch, or MODULE (mypy); creates it if
# necessary.
#
# It is in ~/.cache/epkit-tests, named after the requirements and the version of Python, so it is created once per
# machine: torch is 0.5 GB from the package registry. Concurrent runs wait for each other. EPKIT_TORCH_PYTHON names
# a Python that already has torch. If it cannot be created, exits with 77 and prints the reason on stderr.
set -euo pipefail

module=${1:-torch}
requirements=$(dirname "$0")/../tests/python/requirements.txt
[ "$module" = torch ] || requirements=${requirements%/*}/$module.txt
python=${EPKIT_PYTHON:-/usr/bin/python3}

skip() {
    printf 'skipped: %s\n' "$1" >&2
    exit 77
}

if [ "$module" = torch ] && [ -n "${EPKIT_TORCH_PYTHON:-}" ]; then
    "$EPKIT_TORCH_PYTHON" -c 'import torch' 2>/dev/null || skip "EPKIT_TORCH_PYTHON=$EPKIT_TORCH_PYTHON has no torch"
    echo "$EPKIT_TORCH_PYTHON"
    exit 0
fi
version=$("$python" -c 'import sys; assert sys.version_info >= (3, 10); print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    skip "$python is no Python of version 3.10 or later"

# stand_in FOLDER: libraries with the names and the functions of those of CUDA that the torch in FOLDER was linked with and that
# are not there, 2.7 GB. No function of theirs is called on a CPU; one that is traps. Torch finds the true ones first.
stand_in() {
    nm -D --undefined-only "$1"/*.so | sed -nE 's/^ *U ((cu|nccl|nvrtc|nvshmem)[^@]*).*/void \1() { __builtin_trap(); }/p' |
        sort -u >"$1/stand_in.c"
    local name version
    readelf -d "$1"/*.so | sed -nE 's/.*NEEDED.*\[(lib(cu|nccl|nv).*)\]/\1/p' | sort -u | while read -r name; do
        version=$name
        [[ $name != libnvshmem* ]] || version=NVSHMEM
        [ "$name" = libcuda.so.1 ] || # the driver's
            compgen -G "${1%/torch/lib}/nvidia/*/lib/$name" >/dev/null ||
            cc -w -x c -shared -fPIC -o "$1/$name" "$1/stand_in.c" -Wl,-soname,"$name",--version-script=/dev/stdin <<<"$version { *; };"
    done
}

hash=$({ cat "$requirements" && echo "$version"; } | sha256sum | cut -c1-16)
venv=${XDG_CACHE_HOME:-$HOME/.cache}/epkit-tests/$module-$hash

mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
flock 9
if [ ! -e "$venv/complete" ]; then
    printf 'installing %s with pip into %s (torch: 0.5 GB, once)\n' "$module" "$venv" >&2
    rm -rf "$venv"
    "$python" -m venv "$venv" >"$venv.log" 2>&1 || skip "$python -m venv fails (package python3-venv): see $venv.log"
    if ! "$venv/bin/pip" install --quiet --no-deps --no-compile --no-cache-dir -r "$requirements" >>"$venv.log" 2>&1; then
        rm -rf "$venv"
        skip "pip cannot install $module: $(tail -n 1 "$venv.log")"
    fi
    [ "$module" != torch ] || stand_in "$(echo "$venv"/lib/python*/site-packages)/torch/lib" >>"$venv.log" 2>&1 ||
        skip "libraries in place of CUDA's cannot be linked: see $venv.log"
    "$venv/bin/python" -c "import $module" >>"$venv.log" 2>&1 || skip "$module does not load: see $venv.log"
    touch "$venv/complete"
fi
# The bytecode of what tests import, once: they may not write any, and torch is 2500 files that each process would compile.
if [ ! -e "$venv/compiled" ]; then
    imported=$module
    [ "$module" != torch ] || imported=torch._dynamo
    env -u PYTHONDONTWRITEBYTECODE -u PYTHONPYCACHEPREFIX "$venv/bin/python" -c "import $imported" >>"$venv.log" 2>&1 ||
        skip "$imported does not load: see $venv.log"
    touch "$venv/compiled"
fi
echo "$venv/bin/python"

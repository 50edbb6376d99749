#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# cuda_toolkit.sh - print the path of an nvcc: $CUDACXX, the one on PATH, that of /usr/local/cuda, or one in
# build-cuda-toolkit/, which is made from Python wheels on first use (about 270 MB). If there is none, exits with 1 and
# prints the reason on stderr. Compiling needs no GPU and no driver.
set -euo pipefail
cd "$(dirname "$0")/.."

version=13.0
folder="$PWD/build-cuda-toolkit"
own="$folder/site/nvidia/cu13"

print_nvcc() {
    local nvcc
    for nvcc in "${CUDACXX-}" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc "$own/bin/nvcc"; do
        if [ -x "$nvcc" ]; then
            printf '%s\n' "$nvcc"
            return 0
        fi
    done
    return 1
}

if print_nvcc; then
    exit 0
fi

# The python3 in PATH may have no pip, but another one may.
python=
for candidate in python3 /usr/bin/python3; do
    if "$candidate" -m pip --version >/dev/null 2>&1; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo 'there is no nvcc, and no Python with pip to fetch one (Debian: python3-pip)' >&2
    exit 1
fi

packages=()
for name in nvcc runtime crt cccl; do
    packages+=("nvidia-cuda-$name==$version.*")
done
packages+=("nvidia-nvvm==$version.*")

# One at a time in a checkout: a process that waited uses what the other one has fetched.
mkdir -p "$folder"
exec 9>"$folder/lock"
if ! flock --timeout 180 9; then
    echo 'there is no nvcc, and another cuda_toolkit.sh has been fetching one for 3 minutes' >&2
    exit 1
fi
if print_nvcc; then
    exit 0
fi

printf 'cuda_toolkit.sh: fetching nvcc %s\n' "$version" >&2
rm -rf "$folder/new" "$folder/site"
# Renamed when it is complete, so that an interrupted run is not taken for a toolkit.
if ! timeout 120 "$python" -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-warn-script-location \
    --root-user-action ignore --target "$folder/new" "${packages[@]}" >"$folder/log" 2>&1 9>&-; then
    printf 'there is no nvcc, and pip could not fetch one: %s\n' "$(grep -v '^$' "$folder/log" | tail -n 1)" >&2
    exit 1
fi
# Where nvcc searches for its libraries.
ln -s lib "$folder/new/nvidia/cu13/lib64"
mv "$folder/new" "$folder/site"
printf '%s\n' "$own/bin/nvcc"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# wheel.sh OUT [PIP-OPTION...] - build the wheel of python/ into the folder OUT, check it, and name its platform.
#
# A wheel may need nothing but the C library, whose version becomes part of its name (manylinux_2_NN): the newest that any
# file in it asks for. Needs Python 3.10 with pip, a C compiler, CMake, binutils. EPKIT_PYTHON names the Python;
# EPKIT_CUDA=ON puts libepkit-cuda in, for the toolkit that CUDACXX names: one wheel for each version of CUDA.
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

"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/wheels" "$@" "$source/python"
wheel=$(find "$work/wheels" -name '*.whl')
"$python" -m zipfile -e "$wheel" "$work/files"

# Libraries that others bring: those of the C library; the driver's on a machine with GPUs, and the C++ ones, which every
# build of torch needs as well.
allowed='^(libc|libm|libdl|libpthread|librt|ld-linux-.*|libcuda|libgcc_s|libstdc\+\+|libepkit)\.so'
find "$work/files" -name '*.so*' | while read -r file; do
    if wanted=$(readelf -d "$file" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -Ev "$allowed"); then
        printf 'wheel.sh: %s needs %s, which no machine has to have\n' "$(basename "$file")" "$wanted" >&2
        exit 1
    fi
    readelf -V "$file" | grep -o 'GLIBC_2\.[0-9]*' >>"$work/versions" || true
done
newest=$(sed 's/GLIBC_2\.//' "$work/versions" | sort -n | tail -n 1)

# The same files under the name of the platform: in the wheel's own words, too.
platform=manylinux_2_${newest}_$(uname -m)
mkdir -p "$out"
EPKIT_WHEEL=$wheel EPKIT_PLATFORM=$platform EPKIT_OUT=$out "$python" - <<'PYTHON'
import base64, hashlib, os, re, zipfile

source, platform = os.environ["EPKIT_WHEEL"], os.environ["EPKIT_PLATFORM"]
name = re.sub(r"-[^-]*\.whl$", f"-{platform}.whl", os.path.basename(source))
with zipfile.ZipFile(source) as old, zipfile.ZipFile(os.path.join(os.environ["EPKIT_OUT"], name), "w", zipfile.ZIP_DEFLATED) as new:
    tags = next(entry for entry in old.namelist() if entry.endswith(".dist-info/WHEEL"))
    text = re.sub(rb"(?m)^(Tag: \S+-)[^-\s]+$", rb"\g<1>" + platform.encode(), old.read(tags))
    digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
    for entry in old.infolist():
        data = old.read(entry)
        if entry.filename == tags:
            data = text
        elif entry.filename.endswith(".dist-info/RECORD"):
            lines = data.decode().splitlines()
            data = "".join((f"{tags},sha256={digest},{len(text)}" if line.startswith(tags + ",") else line) + "\n"
                           for line in lines).encode()
        new.writestr(entry, data)
print(os.path.join(os.environ["EPKIT_OUT"], name))
PYTHON

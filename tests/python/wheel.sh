#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# scripts/wheel.sh, and what it makes: installed into a folder of its own, away from the source, it works by itself.
# shellcheck disable=SC2317 # functions are called by report
set -euo pipefail

EPKIT_SOURCE=${EPKIT_SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}

python=$("$EPKIT_SOURCE/scripts/torch_venv.sh" 2>&1) || {
    printf '%s\n' "${python##*$'\n'}"
    exit 77
}
python=${python##*$'\n'}
if ! "$python" -c 'import sysconfig, os, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'; then
    echo 'skipped: the headers of Python are not installed (package python3-dev)'
    exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Where the source lies is no reason to compile again what the build of the tests has compiled, by the same name and with
# the same flags, nor where pip unpacks an archive of it.
export CCACHE_BASEDIR=$work CCACHE_DEPEND=1 TMPDIR=$work
export CC=${CC:-cc} CMAKE_ARGS=-DEPKIT_WERROR=ON SKBUILD_BUILD_DIR=build-wheel
export PYTHONDONTWRITEBYTECODE=1 EPKIT_BACKEND=host OMP_NUM_THREADS=1
number=0

# report NAME COMMAND...: one line of TAP
report() {
    local name=$1
    shift
    number=$((number + 1))
    if "$@" >"$work/log" 2>&1; then
        echo "ok $number $name"
    else
        sed 's/^/# /' "$work/log"
        echo "not ok $number $name"
        failed=1
    fi
}

build() {
    # A copy of what git would check out, so that nothing of this build is left in the source.
    mkdir "$work/source"
    tar -C "$EPKIT_SOURCE" -cf - CMakeLists.txt LICENSE pyproject.toml cmake include lib python scripts | tar -C "$work/source" -xf -
    PATH=$(dirname "$python"):$PATH "$work/source/scripts/wheel.sh" "$work/wheels" --no-build-isolation
}

one_abi3_wheel() {
    wheel=$(find "$work/wheels" -name 'epkit-*-cp310-abi3-manylinux_2_*.whl')
    [ "$(printf '%s\n' "$wheel" | wc -l)" -eq 1 ] && [ -n "$wheel" ] || return 1
    check_wheel "$wheel"
}

# check_wheel WHEEL: its metadata agree with its name; the licence and the types are in it, and each file is the one that
# RECORD names.
check_wheel() {
    "$python" - "$1" <<'PYTHON'
import base64, csv, hashlib, io, sys, zipfile

wheel = zipfile.ZipFile(sys.argv[1])
names = set(wheel.namelist())
info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
tag = "-".join(sys.argv[1].rsplit("/", 1)[1][:-4].rsplit("-", 3)[1:])
said = wheel.read(info + "/WHEEL").decode()
assert f"Tag: {tag}\n" in said and "Root-Is-Purelib: false" in said, said
meta = wheel.read(info + "/METADATA").decode()
version = sys.argv[1].rsplit("/", 1)[1].split("-")[1]
assert info == f"epkit-{version}.dist-info" and version.split("+")[0] == "0.1.0", (info, version)
assert f"\nVersion: {version}\n" in meta and "\nRequires-Python: >=3.10\n" in meta and "Requires-Dist" not in meta, meta
wanted = {f"{info}/licenses/LICENSE", "epkit/_C.abi3.so", "epkit/_C.pyi", "epkit/libepkit.so.0"}
wanted |= {"epkit/py.typed", "epkit/compat/deep_ep/__init__.py"}
assert wanted <= names, wanted - names
assert all(name.split("/")[0] in ("epkit", info) for name in names), names
record = list(csv.reader(io.StringIO(wheel.read(info + "/RECORD").decode())))
assert {name for name, _, _ in record} == names, names.symmetric_difference(name for name, _, _ in record)
for name, digest, size in record:
    if digest:
        data = wheel.read(name)
        assert digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode(), name
        assert int(size) == len(data), name
PYTHON
}

# Wheels for two versions of CUDA have two names, and pip shows which one is installed. Without nvcc there is nothing to
# name: then a copy is named as one with libepkit-cuda.
cuda_in_the_version() {
    mkdir "$work/cuda" && cp "$wheel" "$work/cuda/" || return 1
    PYTHONPATH=$work/source/python "$python" - "$work/cuda/${wheel##*/}" <<'PYTHON' || return 1
import sys
import backend
if not backend._cuda_of(sys.argv[1]):
    backend._renamed(sys.argv[1], None, "+cu124")
PYTHON
    set -- "$work"/cuda/*.whl
    [ $# -eq 1 ] && [[ ${1##*/} == epkit-0.1.0+cu1*-cp310-abi3-* ]] && check_wheel "$1" &&
        "$python" -m pip install --quiet --no-deps --no-compile --target "$work/cuda/site" "$1" &&
        compgen -G "$work/cuda/site/epkit-0.1.0+cu1*.dist-info" >/dev/null
}

# With the CUDA module, by the nvcc that CUDACXX names, in an environment that has torch and nothing else. One architecture:
# the kernels of another one take as long again.
cuda_wheel() {
    local nvcc site
    nvcc=$("$EPKIT_SOURCE/scripts/cuda_toolkit.sh" | tail -n 1)
    mkdir "$work/gpu"
    tar -C "$EPKIT_SOURCE" -cf - CMakeLists.txt LICENSE pyproject.toml cmake include lib python scripts | tar -C "$work/gpu" -xf -
    PATH=$(dirname "$python"):$PATH CUDACXX=$nvcc EPKIT_CUDA=ON CMAKE_ARGS="$CMAKE_ARGS -DCMAKE_CUDA_ARCHITECTURES=90" \
        "$work/gpu/scripts/wheel.sh" "$work/gpu/wheels" --no-build-isolation || return 1
    wheel=$(find "$work/gpu/wheels" -name 'epkit-0.1.0+cu1*-cp310-abi3-manylinux_2_*.whl')
    [ -n "$wheel" ] && check_wheel "$wheel" && "$python" -m zipfile -l "$wheel" | grep -q 'epkit/libepkit-cuda.so' || return 1
    "$python" -m venv --without-pip "$work/gpu/venv"
    site=$(echo "$work"/gpu/venv/lib/python*/site-packages)
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/torch.pth"
    "$python" -m pip --python "$work/gpu/venv/bin/python" install --quiet --no-deps --no-index "$work"/gpu/wheels/*.whl
    rm -rf "$work/gpu/lib" "$work/gpu/python" "$work/gpu/build-wheel"
    (cd "$work" && "$work/gpu/venv/bin/python" -m epkit.selftest 2 >"$work/said" && grep -q 'all results are exact' "$work/said" &&
        "$work/gpu/venv/bin/python" -c 'import deep_ep, deep_ep_v25, epkit, nixl_ep; assert epkit.cuda_version and deep_ep_v25 is deep_ep')
}

# `pip wheel python/` is the same package. With the flags of the first build, nothing is compiled again.
subfolder() {
    PATH=$(dirname "$python"):$PATH "$python" -m pip wheel --quiet --no-deps --no-build-isolation \
        --wheel-dir "$work/subfolder" "$work/source/python" || return 1
    [ "$(ls "$work/subfolder")" = "${wheel##*/}" ] &&
        diff <("$python" -m zipfile -l "$wheel" | cut -d' ' -f1) <("$python" -m zipfile -l "$work"/subfolder/*.whl | cut -d' ' -f1)
}

# The source archive, which `python -m build` begins with, makes the same wheel, again by its names: what is compiled a
# second time, because there is no cache, need not be optimised.
source_archive() {
    local args=${CMAKE_ARGS-}
    command -v ccache >/dev/null || args+=' -DCMAKE_C_FLAGS_RELEASE=-O0'
    PYTHONPATH=$work/source/python "$python" -c 'import sys, backend; backend.build_sdist(sys.argv[1])' "$work/archive" || return 1
    set -- "$work"/archive/epkit-0.1.0.tar.gz
    CMAKE_ARGS=$args PATH=$(dirname "$python"):$PATH "$python" -m pip wheel --quiet --no-deps --no-build-isolation \
        --wheel-dir "$work/archive/wheels" "$1" || return 1
    diff <("$python" -m zipfile -l "$wheel" | cut -d' ' -f1) <("$python" -m zipfile -l "$work"/archive/wheels/*.whl | cut -d' ' -f1)
}

# No path of the build machine is searched, and nothing but what every machine with torch has is needed.
no_foreign_paths() {
    for file in "$work"/site/epkit/*.so*; do
        readelf -d "$file" | sed -n "s|.*(R[UN]*PATH).*\[\(.*\)\]|${file##*/} \1|p"
    done >"$work/paths"
    cat "$work/paths"
    # shellcheck disable=SC2016
    grep -q '^_C.abi3.so $ORIGIN$' "$work/paths" && ! grep -v ' $ORIGIN$' "$work/paths"
}

# The headers of Python 3.13 and those before disagree on functions that take sizes: one that calls these runs on some alone.
any_headers() {
    ! readelf --wide --dyn-syms "$work/site/epkit/_C.abi3.so" | grep '_SizeT' &&
        ! grep -rnE 'PY_SSIZE_T_CLEAN$|(CallFunction|CallMethod|BuildValue|ParseTuple)[^;]*"[^"]*#' "$EPKIT_SOURCE/python/src"
}

install() {
    "$python" -m pip install --quiet --no-deps --no-compile --target "$work/site" "$work"/wheels/*.whl
    rm -rf "$work/source"
}

# stands_in NAME TEXT: a package NAME that is TEXT, before all others
stands_in() {
    rm -rf "$work/instead" && mkdir -p "$work/instead/$1" && printf '%s\n' "$2" >"$work/instead/$1/__init__.py"
}

# Only torch is needed: numpy, which torch can use, may be missing.
selftest() {
    stands_in numpy 'raise ModuleNotFoundError("there is no numpy", name="numpy")'
    (cd "$work" && PYTHONPATH=$work/instead:$work/site "$python" -m epkit.selftest 2 | tee "$work/said" && grep -q 'backend host.*all results are exact' "$work/said") &&
        rm -r "$work/instead"
}

# Nothing of the build machine in the module: libepkit is found beside it, also after a move.
own_library() {
    mv "$work/site" "$work/moved" && PYTHONPATH=$work/moved "$python" -c '
import epkit, deep_ep, deep_ep_cpp
maps = [line.split()[-1] for line in open("/proc/self/maps") if "libepkit.so" in line]
assert maps and all(name.startswith("'"$work"'/moved/epkit/") for name in maps), maps
assert deep_ep.Buffer is deep_ep_cpp.Buffer and deep_ep.__version__.endswith(epkit.__version__)'
}

# As vLLM and SGLang find their plugins. The latter imports SGLang.
plugins() {
    (cd "$work" && VLLM_PLUGINS=epkit PYTHONPATH=$work/moved "$python" -c '
import importlib.metadata, sys
points = {one.group: one for one in importlib.metadata.distribution("epkit").entry_points}
assert {group: one.value for group, one in points.items()} == {
    "vllm.general_plugins": "epkit.compat.vllm:plugin", "sglang.srt.plugins": "epkit.compat.sglang:plugin"}, points
points["vllm.general_plugins"].load()()
assert sys.modules["deep_ep"].__name__ == "epkit.compat.deep_ep"')
}

# -S: without the packages of the interpreter, torch among them.
no_torch() {
    PYTHONPATH=$work/moved "$python" -S -c 'import deep_ep' 2>"$work/said" && return 1
    grep -q 'ImportError: epkit: there is no torch in this Python: .*install' "$work/said" || { cat "$work/said" && return 1; }
}

other_torch() {
    stands_in torch '__version__ = "2.2.1+cpu"'
    says 'this is torch 2.2.1+cpu: epkit needs 2.3 or later' || return 1
    stands_in torch 'raise OSError("libcudart.so.13: cannot open shared object file")'
    says 'torch does not load: libcudart.so.13: cannot open' || return 1
    rm -r "$work/instead"
}

# What Python says of itself is what is asked: there is one of a kind here.
other_python() {
    stands_in sitecustomize 'import sys; sys.version_info = (3, 9, 1, "final", 0)'
    says 'this is cpython .*: epkit needs CPython 3.10 or later' || return 1
    stands_in sitecustomize 'import sys; sys.implementation.name = "pypy"'
    says 'this is pypy .*: epkit needs CPython 3.10 or later' || return 1
    stands_in sitecustomize 'import sys; sys.abiflags = "t"'
    says 'without the interpreter lock' || return 1
    rm -r "$work/instead"
}

# says WORDS: importing epkit fails with an ImportError that has them
says() {
    PYTHONPATH=$work/instead:$work/moved "$python" -c 'import epkit' 2>"$work/said" && return 1
    grep -q "ImportError: epkit: .*$1" "$work/said" || { cat "$work/said" && return 1; }
}

missing_library() {
    mv "$work/moved/epkit/libepkit.so.0" "$work/kept"
    says 'libepkit.so.0' && mv "$work/kept" "$work/moved/epkit/libepkit.so.0"
}

# Its types are there nevertheless, as in the source and in a build of the command.
missing_module() {
    mv "$work"/moved/epkit/_C.*.so "$work/" && [ -e "$work/moved/epkit/_C.pyi" ] || return 1
    says 'no extension module.*Install the package' && mv "$work"/_C.*.so "$work/moved/epkit/"
}

other_version() {
    sed -i 's/^__version__ = .*/__version__ = "0.2.0"/' "$work/moved/epkit/_native.py"
    says 'this package is version 0.2.0.*libepkit 0.1.0 was loaded'
}

orders() {
    "$python" "$EPKIT_SOURCE/tests/python/names.py" "$work/wheels" "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
}

failed=0
if [ -n "${EPKIT_TEST_LONG-}" ]; then echo 1..19; else echo 1..18; fi
report "a wheel is built" build
report "it is one for every Python from 3.10 on, with its licence" one_abi3_wheel
report "the version of CUDA is part of a wheel's version" cuda_in_the_version
report "the folder python/ makes the same one" subfolder
report "a source archive makes the same one" source_archive
report "it installs" install
report "it searches no path but its own" no_foreign_paths
report "it calls what Python has since 3.10, whichever version compiled it" any_headers
report "its selftest passes without the source and without numpy" selftest
report "it brings its own libepkit" own_library
report "vLLM and SGLang find their plugins" plugins
report "a Python without torch is told" no_torch
report "an old torch and a broken one are named at import" other_torch
report "an interpreter that it is not for is named at import" other_python
report "a missing libepkit is named at import" missing_library
report "a package without its extension module is told" missing_module
report "another version is named at import" other_version
report "every order of installing and removing distributions with a package deep_ep is right, or says what is wrong" orders
[ -z "${EPKIT_TEST_LONG-}" ] || report "a wheel with the CUDA module installs into an environment of its own" cuda_wheel
exit "$failed"

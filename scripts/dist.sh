#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# dist.sh [OPTION...] [CMAKE-OPTION...] - make dist/: a relocatable tree of the command and the libraries that runs on
# machines where only the C library (and, for the CUDA backend, an NVIDIA driver) is installed.
#
#   --to FOLDER      make it in FOLDER instead of dist/
#   --without-cuda   omit libepkit-cuda, even if there is an nvcc
#   --tar            also pack it: epkit-VERSION-ARCH-linux.tar.gz next to it
#
# Installs the build dependencies. Builds in build-dist/, or in $EPKIT_BUILD_FOLDER. The last line, on stdout, describes
# the result. FOLDER does not change before the new tree is complete and checked.
set -euo pipefail
here=$PWD
cd "$(dirname "$0")/.."

fail() {
    printf 'dist.sh: %s\n' "$1" >&2
    exit "${2:-1}"
}

to=$PWD/dist
with_cuda=1
with_tar=
options=()
while [ $# -gt 0 ]; do
    case "$1" in
    --to)
        [ -n "${2-}" ] || fail '--to needs a folder' 2
        to=$(realpath -m -- "$here/$2")
        [[ "$2" != /* ]] || to=$(realpath -m -- "$2")
        shift
        ;;
    --without-cuda) with_cuda= ;;
    --tar) with_tar=1 ;;
    -D?*) options+=("$1") ;;
    *) fail "unknown option '$1'; see the first lines of scripts/dist.sh" 2 ;;
    esac
    shift
done
mkdir -p -- "$(dirname -- "$to")"
part="$to.part" # the new tree until it is complete, and the previous one
mark="$part/made-by-dist.sh"

# Only files made by this script, and empty folders, are removed.
is_empty() {
    [ ! -e "$1" ] || [ -n "$(find "$1" -maxdepth 0 -type d -empty)" ]
}
refuse() {
    fail "$1 exists and was not made by this script: choose another folder with --to, or move it away"
}

# The dist contains a list of its files. With other files next to them it is not a separate tree (unpacked in
# /usr/local).
list=share/doc/epkit/FILES
files_of() {
    (cd "$1" && find . ! -type d | LC_ALL=C sort)
}
own_dist() {
    if is_empty "$to"; then return; fi
    if [ -f "$to/$list" ] && files_of "$to" | cmp -s - "$to/$list"; then return; fi
    refuse "$to"
}
own_dist

scripts/packages.sh build dist ${with_cuda:+cuda}
export EPKIT_BUILD_FOLDER="${EPKIT_BUILD_FOLDER:-build-dist}"
mkdir -p "$EPKIT_BUILD_FOLDER"
exec {lock}<"$EPKIT_BUILD_FOLDER"
flock --wait 3600 "$lock" ||
    fail "another run has been building in $EPKIT_BUILD_FOLDER for an hour; end it and try again"

# cuda_toolkit.sh prints why there is none.
cuda='without the CUDA backend (--without-cuda)'
if [ -n "$with_cuda" ]; then
    if CUDACXX=$(scripts/cuda_toolkit.sh); then
        export CUDACXX
        # CMake keeps the compiler that it found before, even if it no longer exists.
        known=$(sed -n 's/^CMAKE_CUDA_COMPILER:[A-Z]*=//p' "$EPKIT_BUILD_FOLDER/CMakeCache.txt" 2>/dev/null || true)
        if [ -n "$known" ] && [ "$known" != "$CUDACXX" ]; then
            rm -rf "$EPKIT_BUILD_FOLDER/CMakeCache.txt" "$EPKIT_BUILD_FOLDER/CMakeFiles"
        fi
        release=$("$CUDACXX" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p' || true)
        [ -n "$release" ] || fail "$CUDACXX says no release of CUDA: it is no nvcc, or a broken one"
        cuda="with the CUDA backend (CUDA $release)"
    else
        with_cuda=
        cuda='without the CUDA backend (there is no nvcc)'
    fi
fi
scripts/build.sh dist -DEPKIT_CUDA="$([ -n "$with_cuda" ] && echo ON || echo OFF)" "${options[@]}"

# The mark is created first and removed last, so that the next run cleans up after one that was killed.
[ -e "$mark" ] || is_empty "$part" || refuse "$part"
mkdir -p "$part"
touch "$mark"
rm -rf "$part/new" "$part/old"
tidy() {
    rm -rf "$part/new" "$part/old"
    rm -f "$mark"
    rmdir "$part"
}
trap tidy EXIT
DESTDIR='' cmake --install "$EPKIT_BUILD_FOLDER" --prefix "$part/new" >"$EPKIT_BUILD_FOLDER/install.log"
glibc=$(scripts/check_dist.sh "$part/new") ||
    fail "the tree would not run elsewhere, for the reasons above; $to is as it was"
mkdir -p "$part/new/${list%/*}"
: >"$part/new/$list"
files_of "$part/new" >"$part/new/$list"
own_dist # still: it has been some minutes
[ ! -e "$to" ] || mv -T "$to" "$part/old"
mv -T "$part/new" "$to"
tidy
trap - EXIT

arch=$(uname -m)
if [ -n "$with_tar" ]; then
    name="epkit-$("$to/bin/epkit" --version | sed -n '1s/^epkit //p')-$arch-linux"
    archive="$(dirname "$to")/$name.tar.gz"
    tar -C "$to" --owner=0 --group=0 --transform="flags=r;s,^\.,$name," -czf "$archive.new" .
    mv "$archive.new" "$archive"
fi
if [ "$(printf '%s\n' 2.36 "$glibc" | sort -V | tail -n 1)" != 2.36 ]; then
    printf 'dist.sh: warning: built on this system it needs glibc %s; built on Debian 12, at most 2.36\n' "$glibc" >&2
fi
printf '%s is complete: %s MB, %s and without MPI, for any %s Linux with glibc %s or later%s.\n' "$to" \
    "$(du -sk --apparent-size "$to" | awk '{ printf "%.1f", $1 * 1024 / 1e6 }')" "$cuda" "$arch" "$glibc" \
    "${with_tar:+; packed as $archive}"

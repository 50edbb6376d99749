#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# What scripts/dist.sh makes runs from any place, without an environment, and with nothing but the C library around it.
# EPKIT_DIST in the environment names one that is there already; without it one is made, without the CUDA backend.
#
# shellcheck disable=SC2154 # $stderr is set by run

bats_require_minimum_version 1.5.0

CHECK="$EPKIT_SOURCE/scripts/check_dist.sh"
SMALL=(--ranks 2 --tokens 16 --hidden 512 --timeout 120)

setup_file() {
    local made="${EPKIT_DIST-}"
    if [ -z "$made" ]; then
        made="$BATS_FILE_TMPDIR/made"
        # The flags of this build, so that ccache knows the objects.
        EPKIT_BUILD_FOLDER="$EPKIT_BUILD/dist" "$EPKIT_SOURCE/scripts/dist.sh" --to "$made" --without-cuda \
            "-DEPKIT_WERROR=$(sed -n 's/^EPKIT_WERROR:BOOL=//p' "$EPKIT_BUILD/CMakeCache.txt")"
    fi
    # Elsewhere, and in a folder whose name a shell would take apart.
    export DIST="$BATS_FILE_TMPDIR/a place/epkit"
    mkdir "$BATS_FILE_TMPDIR/a place"
    cp -a "$made" "$DIST"
    [ -n "${EPKIT_DIST-}" ] || rm -r "$made"

    printf '#!/bin/sh\nexec env -i "%s/bin/epkit" "$@"\n' "$DIST" >"$BATS_FILE_TMPDIR/bare"
    chmod +x "$BATS_FILE_TMPDIR/bare"
}

# The moved command with an empty environment.
bare() {
    timeout --kill-after=10 1200 "$BATS_FILE_TMPDIR/bare" "$@"
}

# copy: a dist that may be changed, in $COPY
copy() {
    COPY="$BATS_TEST_TMPDIR/copy"
    cp -a "$DIST" "$COPY"
}

# library FILE CC-OPTION...: an empty shared library
library() {
    echo 'void ep_planted(void); void ep_planted(void) { }' >"$BATS_TEST_TMPDIR/planted.c"
    cc -shared -fPIC -nostdlib "$BATS_TEST_TMPDIR/planted.c" -o "$@"
}

# usual_command FILE: a copy of the command of this build, which needs libraries of the system
usual_command() {
    objdump --private-headers "$EPKIT_BUILD/epkit" | grep -q 'NEEDED *libjansson' ||
        skip "the command of this build has jansson linked in"
    cp "$EPKIT_BUILD/epkit" "$1"
}

# --- what the files need ---

@test "everything in it needs the C library, its own libraries, and no glibc newer than 2.36" {
    local glibc here
    glibc=$("$CHECK" "$DIST")
    here=$(getconf GNU_LIBC_VERSION | cut -d' ' -f2)
    if [ "$(printf '%s\n' 2.36 "$here" | sort -V | tail -n 1)" != 2.36 ]; then
        skip "built with glibc $here, and needs $glibc: only on Debian 12 can it be 2.36 at most"
    fi
    [ "$(printf '%s\n' 2.36 "$glibc" | sort -V | tail -n 1)" = 2.36 ]
    # objdump agrees: no file asks for more than the check has found.
    run bash -c 'find "$1" -type f -exec objdump --private-headers {} + 2>/dev/null | grep -o "GLIBC_2[0-9.]*" |
        sort -Vu | tail -n 1' - "$DIST"
    [ "$output" = "GLIBC_$glibc" ]
}

@test "the check notices a library from elsewhere" {
    copy
    library "$BATS_TEST_TMPDIR/libforeign.so.1" -Wl,-soname,libforeign.so.1
    library "$COPY/lib/libplanted.so" -Wl,--no-as-needed "$BATS_TEST_TMPDIR/libforeign.so.1"
    run -1 "$CHECK" "$COPY"
    [ "$output" = "lib/libplanted.so: it needs libforeign.so.1, which its run path does not find in the tree" ]
    # It is no better in the tree while no run path leads to it.
    cp "$BATS_TEST_TMPDIR/libforeign.so.1" "$COPY/lib/epkit/"
    run -1 "$CHECK" "$COPY"
    library "$COPY/lib/libplanted.so" -Wl,--no-as-needed "$BATS_TEST_TMPDIR/libforeign.so.1" "-Wl,-rpath,\$ORIGIN/epkit"
    "$CHECK" "$COPY"
}

@test "the check notices a command that is linked as usual" {
    copy
    usual_command "$COPY/bin/epkit"
    run -1 "$CHECK" "$COPY"
    [[ "$output" == *"bin/epkit: it needs libjansson.so.4, which its run path does not find in the tree"* ]]
}

@test "the check notices run paths that lead elsewhere" {
    local path
    copy
    # shellcheck disable=SC2016
    for path in /usr/lib '$ORIGIN/../../lib' lib '$ORIGIN:' '$ORIGINAL'; do
        library "$COPY/lib/libplanted.so" "-Wl,-rpath,$path"
        run -1 "$CHECK" "$COPY"
        echo "$path: $output"
        [[ "$output" == "lib/libplanted.so: its run path"* ]]
    done
}

# library_for NODE FILE: a library that needs the symbol version NODE of the C library
library_for() {
    echo "$1 { global: ep_planted; };" >"$BATS_TEST_TMPDIR/map"
    library "$BATS_TEST_TMPDIR/libc.so.6" -Wl,-soname,libc.so.6 "-Wl,--version-script=$BATS_TEST_TMPDIR/map"
    echo 'void ep_planted(void); void ep_user(void); void ep_user(void) { ep_planted(); }' >"$BATS_TEST_TMPDIR/user.c"
    cc -shared -fPIC -nostdlib "$BATS_TEST_TMPDIR/user.c" "$BATS_TEST_TMPDIR/libc.so.6" -o "$2"
}

@test "the check notices a newer glibc, and symbols that are private to one" {
    copy
    library_for GLIBC_2.99 "$COPY/lib/libplanted.so"
    [ "$("$CHECK" "$COPY")" = 2.99 ]
    library_for GLIBC_ABI_DT_RELR "$COPY/lib/libplanted.so"
    [ "$("$CHECK" "$COPY")" = 2.36 ]
    library_for GLIBC_PRIVATE "$COPY/lib/libplanted.so"
    run -1 "$CHECK" "$COPY"
    [ "$output" = "lib/libplanted.so: it needs GLIBC_PRIVATE, which says no version of glibc" ]
}

@test "what is not epkit's is named, with its licence" {
    local file name
    cd "$DIST/share/doc/epkit"
    cmp LICENSE "$EPKIT_SOURCE/LICENSE"
    grep -x 'libjansson' THIRD-PARTY
    for file in "$DIST"/lib/epkit/*; do
        name=${file##*/}
        grep -x "${name%%.so*}" THIRD-PARTY
    done
    while read -r file; do
        echo "$file"
        [ -s "$file" ]
    done < <(sed -n 's/^ *text  *//p' THIRD-PARTY)
}

@test "nothing in it points into the build or the source tree" {
    # Programs and libraries, too: they are built without notes for debuggers.
    run -1 grep -rl -e "$EPKIT_BUILD" -e "$EPKIT_SOURCE" "$DIST"
}

# --- with an empty environment ---

@test "the command says its version, which is the package's" {
    local version
    version=$(bare --version | sed -n '1s/^epkit //p')
    [ -n "$version" ]
    [ "$(PKG_CONFIG_PATH="$DIST/lib/pkgconfig" pkg-config --modversion epkit)" = "$version" ]
    grep -qF "\"$version\"" "$DIST/lib/cmake/epkit/epkitConfigVersion.cmake"
}

@test "ranks move rows, and the result is JSON that fits its schema" {
    local matrix
    for matrix in intranode lowlatency internode; do
        bare test "$matrix" "${SMALL[@]}" --boot fork --json >"$BATS_TEST_TMPDIR/result.json"
        python3 -S "$EPKIT_SOURCE/tests/cli/validate.py" "$EPKIT_SOURCE/cmd/test/schema.json" \
            "$BATS_TEST_TMPDIR/result.json"
        jq --exit-status '.result == "passed" and .passed > 0' "$BATS_TEST_TMPDIR/result.json"
    done
    bare test intranode "${SMALL[@]}" --boot threads
}

@test "a golden machine is described as by any other build" {
    cd "$BATS_TEST_TMPDIR"
    python3 -S "$EPKIT_SOURCE/tests/machines/machines.py" a4/one-nic sick
    python3 -S "$EPKIT_SOURCE/tests/machines/machines.py" a4 a4
    "$EPKIT_SOURCE/tests/machines/outputs.sh" "$BATS_FILE_TMPDIR/bare" a4 got
    diff --recursive --unified "$EPKIT_SOURCE/tests/machines/expected/a4" got
    run -3 bare doctor --from sick
    [[ "$output" == *one-nic* ]]
}

@test "a CUDA backend in it needs a driver and no CUDA" {
    [ -e "$DIST/lib/libepkit-cuda.so" ] || skip "made without the CUDA backend"
    [ -s "$DIST/include/epkit/cuda.h" ]
    if [ -e /dev/nvidiactl ]; then
        bare test intranode --ranks 1 --backend cuda
    else
        run -4 bare test intranode --ranks 2 --backend cuda
        # It was loaded, and it is the driver that is missing.
        [[ "$output" == *[Dd]river* ]]
        [[ "$output" != *"cannot open shared object"* ]]
    fi
}

@test "man finds the pages from the folder of the command" {
    local page
    for page in epkit.1 epkit-test.1 epkit-doctor.1 epkit.7 libepkit.3; do
        [ -s "$DIST/share/man/man${page##*.}/$page" ]
    done
    command -v mandb >/dev/null || skip "man-db is not installed"
    page=$(env -i PATH="$DIST/bin:/usr/bin:/bin" man --where epkit-test)
    [ "$page" = "$DIST/share/man/man1/epkit-test.1" ]
}

@test "completions are in place" {
    [ -s "$DIST/share/bash-completion/completions/epkit" ]
}

# --- for programs ---

@test "the examples build by make and pkg-config, and run" {
    cp -r "$EPKIT_SOURCE/examples" "$BATS_TEST_TMPDIR/examples"
    PKG_CONFIG_PATH="$DIST/lib/pkgconfig" LD_LIBRARY_PATH="$DIST/lib" make -C "$BATS_TEST_TMPDIR/examples" \
        CFLAGS="-O2 -Wall -Wextra -Werror" check
}

@test "the examples build by the CMake package, and run" {
    cmake -S "$EPKIT_SOURCE/examples" -B "$BATS_TEST_TMPDIR/build" -DCMAKE_PREFIX_PATH="$DIST"
    cmake --build "$BATS_TEST_TMPDIR/build"
    ctest --test-dir "$BATS_TEST_TMPDIR/build" --output-on-failure --no-tests=error
}

# --- where there is nothing but a C library ---

# A root folder with the C library of this system, and the dist in it. It needs the right to mount /proc there.
libc_root() {
    local name
    BARE_ROOT="$BATS_TEST_TMPDIR/root"
    IN_NAMESPACE=(unshare --mount)
    [ "$(id -u)" -eq 0 ] || IN_NAMESPACE=(unshare --user --map-root-user --mount)
    mkdir -p "$BARE_ROOT/proc"
    # shellcheck disable=SC2016
    "${IN_NAMESPACE[@]}" sh -c 'mount --rbind /proc "$1/proc" && chroot "$1" /none; [ $? -eq 127 ]' - "$BARE_ROOT" \
        2>"$BATS_TEST_TMPDIR/why" || skip "no root folder of its own on this machine: $(tail -n 1 "$BATS_TEST_TMPDIR/why")"
    for name in libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1; do
        cp -L --parents "$(realpath "$(cc -print-file-name="$name")")" "$BARE_ROOT"
    done
    cp -L --parents "$(readelf -l "$DIST/bin/epkit" | sed -n 's/.*interpreter: \(.*\)\]$/\1/p')" "$BARE_ROOT"
    cp -a "$DIST" "$BARE_ROOT/epkit"
}

# in_root PROGRAM ARGUMENT...
in_root() {
    # shellcheck disable=SC2016
    timeout --kill-after=10 1200 "${IN_NAMESPACE[@]}" sh -c \
        'mount --rbind /proc "$1/proc" && chroot=$(command -v chroot) && exec env -i "$chroot" "$@"' - "$BARE_ROOT" "$@"
}

@test "it runs where there is nothing but the C library" {
    libc_root
    python3 -S "$EPKIT_SOURCE/tests/machines/machines.py" a4 "$BARE_ROOT/machine"
    in_root /epkit/bin/epkit --version
    in_root /epkit/bin/epkit test intranode "${SMALL[@]}"
    in_root /epkit/bin/epkit topo --from /machine >"$BATS_TEST_TMPDIR/topo.txt"
    sed 's,/machine,a4,' "$BATS_TEST_TMPDIR/topo.txt" | diff --unified "$EPKIT_SOURCE/tests/machines/expected/a4/topo.txt" -
    in_root /epkit/bin/epkit doctor --from /machine
}

@test "a command that is linked as usual does not run there" {
    libc_root
    usual_command "$BARE_ROOT/epkit/bin/epkit"
    run -127 in_root /epkit/bin/epkit --version
    [[ "$output" == *"error while loading shared libraries: "* ]]
}

# --- how it is made: dist.sh around a CMake that only copies ---

# The dist in $TO, and a cmake that installs by running COMMAND, with the prefix in its $1, and does nothing else.
fake_install() {
    TO="$BATS_TEST_TMPDIR/to/dist"
    mkdir -p "$BATS_TEST_TMPDIR/bin" "$BATS_TEST_TMPDIR/to"
    [ -e "$TO" ] || cp -a "$DIST" "$TO"
    {
        echo '#!/bin/sh'
        # shellcheck disable=SC2016
        echo 'if [ "$1" != --install ]; then exit; fi; shift 3'
        echo "$1"
    } >"$BATS_TEST_TMPDIR/bin/cmake"
    chmod +x "$BATS_TEST_TMPDIR/bin/cmake"
}

make_dist() {
    PATH="$BATS_TEST_TMPDIR/bin:$PATH" EPKIT_BUILD_FOLDER="$BATS_TEST_TMPDIR/build" \
        "$EPKIT_SOURCE/scripts/dist.sh" --to "$TO" --without-cuda "$@"
}

@test "a run that is killed leaves the dist as it was, and the next one tidies up" {
    # shellcheck disable=SC2016
    fake_install 'mkdir -p "$1/bin"; cp -a "'"$DIST"'/bin/epkit" "$1/bin"; kill -KILL $PPID'
    run -137 make_dist
    diff --recursive --no-dereference "$DIST" "$TO"
    [ -e "$TO.part/new/bin/epkit" ]

    fake_install "cp -a '$DIST/.' \"\$1\""
    echo old >"$TO/bin/of-the-old-one"
    (cd "$TO" && find . ! -type d | LC_ALL=C sort -o share/doc/epkit/FILES)
    run -0 make_dist
    diff --recursive --no-dereference "$DIST" "$TO"
    [ "$(ls -A "$BATS_TEST_TMPDIR/to")" = dist ]

    # Also when the kill fell between the two renames.
    mkdir -p "$TO.part"
    touch "$TO.part/made-by-dist.sh"
    mv "$TO" "$TO.part/old"
    run -0 make_dist
    diff --recursive --no-dereference "$DIST" "$TO"
    [ "$(ls -A "$BATS_TEST_TMPDIR/to")" = dist ]
}

@test "a tree that would not run elsewhere does not become the dist" {
    usual_command "$BATS_TEST_TMPDIR/epkit"
    fake_install "cp -a '$DIST/.' \"\$1\" && cp '$BATS_TEST_TMPDIR/epkit' \"\$1/bin\""
    run --separate-stderr -1 make_dist
    [ -z "$output" ]
    [[ "$stderr" == *"it needs libjansson.so.4"*"dist.sh: the tree would not run elsewhere"* ]]
    diff --recursive --no-dereference "$DIST" "$TO"
    [ "$(ls -A "$BATS_TEST_TMPDIR/to")" = dist ]
}

@test "a tree that needs a newer glibc than Debian 12 has says so" {
    fake_install "cp -a '$DIST/.' \"\$1\" && cp '$BATS_TEST_TMPDIR/libplanted.so' \"\$1/lib\""
    library_for GLIBC_2.99 "$BATS_TEST_TMPDIR/libplanted.so"
    run --separate-stderr -0 make_dist
    [[ "$output" == *" with glibc 2.99 or later." ]]
    [[ "$stderr" == *"warning: built on this system it needs glibc 2.99"* ]]
}

@test "a folder that somebody else made is left alone" {
    fake_install false
    rm -r "$TO"
    mkdir "$TO"
    echo precious >"$TO/file"
    run -1 make_dist
    [[ "$output" == *"was not made by this script"* ]]
    [ "$(cat "$TO/file")" = precious ]
    mv "$TO" "$TO.part"
    run -1 make_dist
    [[ "$output" == *"was not made by this script"* ]]
    [ "$(cat "$TO.part/file")" = precious ]
}

@test "a folder in which a dist lies among other files is left alone" {
    fake_install "cp -a '$DIST/.' \"\$1\""
    echo precious >"$TO/share/file"
    run -1 make_dist
    [[ "$output" == *"was not made by this script"* ]]
    [ "$(cat "$TO/share/file")" = precious ]
    # Also one that came while it was built.
    rm "$TO/share/file"
    fake_install "cp -a '$DIST/.' \"\$1\" && echo precious >'$TO/share/file'"
    run -1 make_dist
    [[ "$output" == *"was not made by this script"* ]]
    [ "$(cat "$TO/share/file")" = precious ]
}

@test "an empty folder stays when the build fails, and becomes the dist when it does not" {
    fake_install false
    rm -r "$TO"
    mkdir "$TO"
    run -1 make_dist
    [ -d "$TO" ]
    fake_install "cp -a '$DIST/.' \"\$1\""
    run -0 make_dist
    diff --recursive --no-dereference "$DIST" "$TO"
}

@test "an nvcc that is none is named" {
    fake_install false
    printf '#!/bin/sh\nexit 1\n' >"$BATS_TEST_TMPDIR/nvcc"
    chmod +x "$BATS_TEST_TMPDIR/nvcc"
    run -1 env CUDACXX="$BATS_TEST_TMPDIR/nvcc" PATH="$BATS_TEST_TMPDIR/bin:$PATH" \
        EPKIT_BUILD_FOLDER="$BATS_TEST_TMPDIR/build" "$EPKIT_SOURCE/scripts/dist.sh" --to "$TO"
    [[ "$output" == *"dist.sh: $BATS_TEST_TMPDIR/nvcc says no release of CUDA"* ]]
}

@test "the verdict is one sentence, and the archive holds the dist" {
    fake_install "cp -a '$DIST/.' \"\$1\""
    run -0 --separate-stderr make_dist --tar
    [ "${#lines[@]}" -eq 1 ]
    [[ "$output" =~ ^"$TO is complete: "[0-9.]+" MB, without the CUDA backend (--without-cuda) and without MPI, for any " ]]
    cd "$BATS_TEST_TMPDIR"
    tar -xzf to/epkit-*-linux.tar.gz
    diff --recursive --no-dereference "$DIST" epkit-*-linux
}

@test "an option that is none: exit code 2" {
    run -2 "$EPKIT_SOURCE/scripts/dist.sh" --too somewhere
    run -2 "$EPKIT_SOURCE/scripts/dist.sh" --to
}

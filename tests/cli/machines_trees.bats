#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The made-up machines themselves: what makes them is right, or tests that use them prove nothing.

load common
load machines

setup_file() {
    make_trees a4 gb200 h100
}

setup() {
    cd "$BATS_FILE_TMPDIR" || return 1
}

@test "libraries: readelf and objdump read them and have nothing to complain about" {
    local file n=0
    while read -r file; do
        readelf --wide --file-header --segments --sections --dynamic --version-info "$file" >readelf.txt 2>complaints.txt
        objdump --private-headers "$file" >objdump.txt 2>>complaints.txt
        [ ! -s complaints.txt ] || { cat complaints.txt && false; }
        ! grep -q -e 'corrupt' -e '<.*>' -e 'Warning' readelf.txt || { grep -e corrupt -e '<' readelf.txt && false; }
        n=$((n + 1))
    done < <(find a4 gb200 -type f -name '*.so*' -not -path '*/etc/*')
    [ "$n" -gt 40 ]
}

@test "libraries: names, paths and versions are in them as written" {
    readelf --wide --dynamic --version-info a4/usr/lib/x86_64-linux-gnu/libmlx5.so.1 >readelf.txt
    cat readelf.txt
    grep -q 'SONAME.*\[libmlx5.so.1\]' readelf.txt
    grep -q 'NEEDED.*\[libibverbs.so.1\]' readelf.txt
    grep -q 'Flags: BASE .*Name: libmlx5.so.1' readelf.txt
    grep -q 'Name: MLX5_1.25' readelf.txt
    grep -q 'File: libibverbs.so.1  Cnt: 2' readelf.txt
    grep -q 'Name: IBVERBS_PRIVATE_57 ' readelf.txt
    objdump --private-headers a4/usr/lib/x86_64-linux-gnu/libmlx5.so.1 | grep -A2 'required from libibverbs.so.1:' |
        grep -q IBVERBS_PRIVATE_57
    readelf --wide --dynamic a4/opt/deepep/python/deep_ep_cpp*.so | grep -q 'RUNPATH.*\[/opt/deepep/nvshmem/lib\]'
    readelf --wide --file-header gb200/usr/lib/aarch64-linux-gnu/libc.so.6 | grep -q 'Machine: *AArch64'
}

@test "libraries: GPU code is in a section of its own" {
    readelf --wide --sections a4/opt/deepep/python/deep_ep_cpp*.so | grep -q '\.nv_fatbin'
    # The magic number of a container, little-endian.
    [ "$(LC_ALL=C grep --count --text --only-matching --perl-regexp '\x50\xed\x55\xba' a4/opt/deepep/python/deep_ep_cpp*.so)" -gt 0 ]
}

@test "no link of a healthy machine leads out of it or to nothing" {
    local link
    for tree in a4 gb200 h100; do
        [ -z "$(find "$tree" -xtype l)" ]
        while read -r link; do
            [[ "$(realpath "$link")" == "$PWD/$tree"/* ]]
        done < <(find "$tree" -type l -path '*/class/*')
    done
}

@test "the same machine twice is the same" {
    rm -rf again
    python3 -S "$MACHINES/machines.py" a4 again
    diff --recursive --no-dereference a4 again
}

@test "nothing names a real machine: addresses are those for documentation" {
    ! grep --recursive --extended-regexp --only-matching --no-filename --text --ignore-case \
        '\b([0-9a-f]{2}:){5}[0-9a-f]{2}\b' a4 h100 | grep --invert-match '^00:00:5e:00:53:' || false
    ! grep --recursive --extended-regexp --only-matching --no-filename --text \
        'GPU-[0-9a-f]{8}-[0-9a-f-]*' a4 h100 | grep --invert-match '^GPU-00000000-0000-0000-0000-0000000000' || false
    ! find a4 h100 -path '*/gids/*' -exec cat {} + | grep --invert-match --extended-regexp \
        '^(0000:){7}0000$|^fe80:0000:0000:0000:0200:5eff:fe00:53[0-9a-f]{2}$|:ffff:c000:02[0-9a-f]{2}$' || false
}

@test "wrong usage is said in words, and nothing is written" {
    run -1 python3 -S "$MACHINES/machines.py" a5 nowhere
    [ "$output" = "machines.py: no machine 'a5'; --list and --field name them" ]
    run -1 python3 -S "$MACHINES/machines.py" a4/nothing nowhere
    [ "$output" = "machines.py: no variant 'a4/nothing'; --variants names them" ]
    run -1 python3 -S "$MACHINES/machines.py" a4 a4
    [ "$output" = "machines.py: a4 is already there" ]
    run -1 python3 -S "$MACHINES/machines.py"
    [[ "$output" == *usage:* ]]
    [ ! -e nowhere ]
}

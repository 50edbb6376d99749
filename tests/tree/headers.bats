#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Each public header compiles alone and twice, as C17 and as C++17, with gcc and with clang, without a warning.

# compiles COMPILER LANGUAGE FLAGS...: every header with the given compiler.
compiles() {
    local compiler="$1" standard="$2" header
    shift 2
    command -v "$compiler" >/dev/null || skip "$compiler is not installed"
    for header in "$EPKIT_SOURCE"/include/epkit/*.h; do
        case "$header" in
        */cuda.h) continue ;;
        esac
        printf '#include <epkit/%s>\n#include <epkit/%s>\n' "${header##*/}" "${header##*/}" >"$BATS_TEST_TMPDIR/alone"
        echo "$header"
        "$compiler" "-std=$standard" -Wall -Wextra -Wpedantic -Werror -I "$EPKIT_SOURCE/include" "$@" \
            -fsyntax-only "$BATS_TEST_TMPDIR/alone"
    done
}

# The macros that initialise argument structs, which only do something where they are used.
initialises() {
    local compiler="$1" standard="$2" macro type
    shift 2
    command -v "$compiler" >/dev/null || skip "$compiler is not installed"
    echo '#include <epkit/epkit.h>
extern ep_comm_config config; ep_comm_config config = EP_COMM_CONFIG_INIT;' >"$BATS_TEST_TMPDIR/init"
    while read -r macro type; do
        echo "extern $type value_$type; $type value_$type = $macro;" >>"$BATS_TEST_TMPDIR/init"
    done < <(sed -n 's/^#define \(EP_[A-Z_]*_INIT\) EP_INIT(\(.*\))$/\1 \2/p' "$EPKIT_SOURCE"/include/epkit/*.h)
    [ "$(grep -c _INIT "$BATS_TEST_TMPDIR/init")" -ge 9 ]
    "$compiler" "-std=$standard" -Wall -Wextra -Werror -I "$EPKIT_SOURCE/include" "$@" -fsyntax-only "$BATS_TEST_TMPDIR/init"
}

@test "headers alone: gcc, C17" {
    compiles gcc c17 -x c
}

@test "headers alone: g++, C++17" {
    compiles g++ c++17 -x c++
}

@test "headers alone: clang, C17" {
    compiles clang c17 -x c
}

@test "headers alone: clang++, C++17" {
    compiles clang++ c++17 -x c++
}

@test "initial values of argument structs: gcc, C17" {
    initialises gcc c17 -x c
}

@test "initial values of argument structs: g++, C++17" {
    initialises g++ c++17 -x c++
}

@test "initial values of argument structs: clang++, C++17" {
    initialises clang++ c++17 -x c++
}

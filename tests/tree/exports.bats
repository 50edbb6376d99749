#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The libraries export what the version script and the headers say, and nothing else.

bats_require_minimum_version 1.5.0

# check WITHOUT HEADER...: with all public headers of libepkit but the one named WITHOUT, and HEADER... in addition
check() {
    local without="$1" header headers=()
    shift
    for header in "$EPKIT_SOURCE"/include/epkit/*.h; do
        case "${header##*/}" in
        cuda.h | "$without") ;;
        *) headers+=("$header") ;;
        esac
    done
    python3 "$EPKIT_SOURCE/scripts/check_exports.py" "$EPKIT_BUILD/libepkit.so" "$EPKIT_SOURCE/cmake/epkit.map" \
        "${headers[@]}" "$@"
}

@test "libepkit exports the public API and the private node" {
    check none
}

@test "the checker notices a function that is not exported" {
    echo 'EP_API int ep_not_there(void);' >"$BATS_TEST_TMPDIR/extra.h"
    run -1 check none "$BATS_TEST_TMPDIR/extra.h"
    [ "$output" = "ep_not_there: EP_API in a header, but not exported under EPKIT_0.1" ]
}

@test "the checker notices an export that no header has" {
    local name expected=
    for name in alloc alloc_local free free_local pool_alloc pool_attach pool_free register unregister; do
        expected+="ep_$name: exported under EPKIT_0.1, but in no public header"$'\n'
    done
    run -1 check memory.h
    [ "$output"$'\n' = "$expected" ]
}

@test "libepkit needs nothing beyond the C library" {
    local needed
    needed=$(objdump -p "$EPKIT_BUILD/libepkit.so" | awk '$1 == "NEEDED" {print $2}' | grep -v -e '^libc\.so' -e '^libm\.so' \
        -e '^ld-linux' -e '^lib[atu]san\.so' || true)
    echo "$needed"
    [ -z "$needed" ]
}

#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The binary interface of libepkit is the one of tests/tree/abi.txt. After a change that is meant:
#   scripts/check_abi.py --update build/libepkit.so tests/tree/abi.txt \
#       $(ls include/epkit/*.h | grep -v cuda.h)
# and look at the diff: fields at the end of a struct and new functions are fine, all else breaks programs that exist.

bats_require_minimum_version 1.5.0

# abi FOLDER: the headers of a folder, but those of other libraries
abi() {
    local header headers=()
    for header in "$1"/*.h; do
        case "${header##*/}" in
        cuda.h) ;;
        *) headers+=("$header") ;;
        esac
    done
    python3 "$EPKIT_SOURCE/scripts/check_abi.py" "$EPKIT_BUILD/libepkit.so" "$EPKIT_SOURCE/tests/tree/abi.txt" \
        "${headers[@]}"
}

@test "symbols, prototypes, structs and constants are those of the table" {
    command -v cc >/dev/null || skip "there is no cc"
    abi "$EPKIT_SOURCE/include/epkit"
}

@test "a field that moves, a flag that changes and a function that goes are noticed" {
    command -v cc >/dev/null || skip "there is no cc"
    mkdir -p "$BATS_TEST_TMPDIR/include/epkit"
    cp "$EPKIT_SOURCE"/include/epkit/*.h "$BATS_TEST_TMPDIR/include/epkit"
    cd "$BATS_TEST_TMPDIR/include/epkit"
    sed -i 's/^    int32_t n_experts; .*/    int64_t n_experts;/' lowlatency.h
    sed -i 's/EP_PLAN_EXPANDED = 1u << 1/EP_PLAN_EXPANDED = 1u << 20/' plan.h
    sed -i '/EP_API void ep_comm_abort/d' comm.h
    run -1 abi "$PWD"
    [[ "$output" = *"
+      16   8 n_experts"* ]]
    [[ "$output" = *"
-constant EP_PLAN_EXPANDED 2"* ]]
    [[ "$output" = *"
-prototype void ep_comm_abort(ep_comm *comm)"* ]]
}

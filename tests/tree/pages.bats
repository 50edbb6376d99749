#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Pages about the interfaces: that of Python is generated, that of C names every call.

bats_require_minimum_version 1.5.0

@test "docs/python.md is what the docstrings say" {
    "$EPKIT_SOURCE/scripts/python_page.py" --check
    cp -r "$EPKIT_SOURCE/python" "$EPKIT_SOURCE/scripts" "$EPKIT_SOURCE/docs" "$BATS_TEST_TMPDIR"
    sed -i 's/check_distinct: bool = False/distinct: bool = False/' "$BATS_TEST_TMPDIR/python/epkit/communicator.py"
    run -1 "$BATS_TEST_TMPDIR/scripts/python_page.py" --check
    [[ "$output" == *"docs/python.md is not what the docstrings say"* ]]
}

@test "libepkit(3) names every call of the headers" {
    local call missing=()
    for call in $(grep -hoE '\bep_[a-z0-9_]+\(' "$EPKIT_SOURCE"/include/epkit/*.h | tr -d '(' | sort -u); do
        grep -q "EP_API.*\b$call(" "$EPKIT_SOURCE"/include/epkit/*.h || continue
        grep -q "\*$call\*()" "$EPKIT_SOURCE/man/libepkit.3.scd" || missing+=("$call")
    done
    echo "not named: ${missing[*]}"
    [ "${#missing[@]}" -eq 0 ]
}

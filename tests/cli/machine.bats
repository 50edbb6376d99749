#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# What is said about this machine. Made-up ones: tests/unit/test_machine.c.

load common

machine() {
    epkit bench --quick --only plan --boot fork --json | jq .machine
}

@test "this machine: cores, memory and kernel are those of the system" {
    machine >"$BATS_TEST_TMPDIR/machine.json"
    cd "$BATS_TEST_TMPDIR"
    [ "$(jq .cores machine.json)" -eq "$(nproc)" ]
    [ "$(jq -r .kernel machine.json)" = "$(uname -r)" ]
    [ "$(jq .memory_bytes machine.json)" -gt $((1 << 26)) ]
}

@test "nothing in it names the machine" {
    machine >"$BATS_TEST_TMPDIR/machine.json"
    run jq -r 'keys[]' "$BATS_TEST_TMPDIR/machine.json"
    [ "$(xargs <<<"$output")" = "arch cores cpu gpu_driver gpus kernel memory_bytes numa_nodes os" ]
}

#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit bench on fake GPUs: all rows of a table have the same backend.
#
# shellcheck disable=SC2154 # $stderr is set by run

load common
load gpus

# Baselines need real GPUs.
bench() {
    epkit bench --quick --no-baselines --only dispatch --dtype bf16 "$@"
}

@test "bench: a list of ranks that all get GPUs" {
    machine_with_gpus 2
    bench --ranks 1,2 --json >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err"
    valid bench "$BATS_TEST_TMPDIR/out"
    [ "$(jq -c '[.device, .parameters.backend, .parameters.backend_why, .parameters.boot, [.rows[].ranks]]' \
        "$BATS_TEST_TMPDIR/out")" = '["Made-up GPU 0","cuda","there is a GPU for each rank","fork",[1,2]]' ]
    [ "$(jq '[.rows[] | select(.sms)] | length' "$BATS_TEST_TMPDIR/out")" -eq 2 ]
    run ! grep warning "$BATS_TEST_TMPDIR/err"
}

@test "bench: a list of ranks of which one is too large: the host backend for all, with the reason" {
    machine_with_gpus 2
    run -0 --separate-stderr bench --ranks 2,4 --json
    [ "$(jq -c '[.device, .parameters.backend, [.rows[].ranks], [.rows[] | select(.sms)]]' <<<"$output")" = \
        '["host","host",[2,4],[]]' ]
    [ "$(grep -c warning <<<"$stderr")" -eq 1 ]
    [[ "$stderr" == *"using the host backend, not the GPUs of this machine: 2 GPUs are visible, 4 ranks"* ]]
}

@test "bench: one rank per GPU by default" {
    machine_with_gpus 3
    [ "$(bench --experts 66 --json | jq -c '[.device, .rows[0].ranks]')" = '["Made-up GPU 0",3]' ]
}

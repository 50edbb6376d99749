#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit run on made-up GPUs: said once where they are passed over. It is interrupted then: a whole run takes minutes in
# builds without optimisation, and what its report says of backends is what epkit test says.

load common
load gpus

# until_it_runs: epkit run up to its first cases
until_it_runs() {
    cd "$BATS_TEST_TMPDIR" || return 1
    "$EPKIT" run --output here --seed 3 >out 2>err &
    within 60 grep -q 'run [0-9]*/' err
    kill -INT $!
    wait $! || [ $? -eq 130 ]
    cat out err
}

@test "GPUs that do not reach each other: one line that names the pair" {
    machine_with_gpus 2
    export FAKE_APART=1
    until_it_runs
    [ "$(grep -c 'warning' err)" -eq 1 ]
    grep -qF "epkit: warning: on the host backend, not on the GPUs of this machine: no P2P between GPU 0000:e0:00.0" err
}

@test "a GPU for each rank: no line" {
    machine_with_gpus 2
    until_it_runs
    run ! grep warning err
}

#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit run on fake GPUs: one warning if they are not used. The backends in its report are those of epkit test.
#
# shellcheck disable=SC2154 # $stderr is set by run

load common
load gpus

run_quickly() {
    cd "$BATS_TEST_TMPDIR" || return 1
    limited 60 "$EPKIT" run --quick --output here --seed 3 >out 2>err || true
    cat out err
}

@test "GPUs without P2P: one warning that names the pair" {
    machine_with_gpus 2
    # shellcheck disable=SC2030
    export FAKE_APART=1
    run_quickly
    [ "$(grep -c 'warning' err)" -eq 1 ]
    grep -qF "epkit: warning: using the host backend, not the GPUs of this machine: no P2P between GPU 0000:e0:00.0" err
}

@test "a GPU for each rank: no warning" {
    machine_with_gpus 2
    run_quickly
    run ! grep warning err
}

@test "two islands of GPUs: the smaller groups use the host backend, too, as in the warning" {
    machine_with_gpus 8
    export FAKE_USED="$BATS_TEST_TMPDIR/used"
    # shellcheck disable=SC2031 # a test has an environment of its own
    export FAKE_APART=4
    # Each of the 4 ranks of lowlatency could have a GPU.
    run_quickly
    grep -q '^lowlatency  *4 ' out
    [ "$(grep -c 'warning' err)" -eq 1 ]
    [ ! -e used ]
    # The fake module records the use of a GPU.
    epkit test lowlatency --ranks 2 --tokens 16 --hidden 512 --only 1
    [ -e used ]
}

@test "an explicit backend that cannot be used: exit code 4, and no measurements on GPUs" {
    machine_with_gpus 0
    cd "$BATS_TEST_TMPDIR" || return 1
    export EPKIT_BACKEND=cuda
    run --separate-stderr -4 epkit run --quick --output here
    [[ "$output" == *"the CUDA backend (EPKIT_BACKEND names it), which failed on this machine; see the errors."* ]]
    [[ "$stderr" == *"none is visible"* ]]
}

@test "a part that the backend lacks: the verdict names it, and does not blame the network" {
    machine_with_gpus 2
    cd "$BATS_TEST_TMPDIR" || return 1
    # shellcheck disable=SC2030,SC2031
    export FAKE_NO_LL=1
    for network in auto emulated; do
        run --separate-stderr -4 epkit run --quick --network "$network" --output here --json
        [ "$(jq -r .verdict <<<"$output")" = "epkit cannot run lowlatency here: the library does not support it on this machine; 24/24, 32/32 and 0/32 cases passed." ]
    done
}

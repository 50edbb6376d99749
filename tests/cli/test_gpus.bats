#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit test on fake GPUs: when they are used, the warning when not, and the copies of the data.
#
# shellcheck disable=SC2154 # $stderr is set by run

load common
load gpus

CASE=(--tokens 16 --hidden 512 --timeout 120 --only 1 --seed 1)

# expect CHOSEN ARGUMENTS...: the choice, without output on standard error
expect() {
    epkit test intranode "${CASE[@]}" "${@:2}" --json >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err"
    valid test "$BATS_TEST_TMPDIR/out"
    chosen "$BATS_TEST_TMPDIR/out"
    [ "$(chosen "$BATS_TEST_TMPDIR/out")" = "$1" ]
    run ! grep -v '^epkit: test ' "$BATS_TEST_TMPDIR/err"
}

# expect_line RANKS WHY ARGUMENTS...: the host backend, and one warning with the reason
expect_line() {
    run -0 --separate-stderr epkit test intranode "${CASE[@]}" "${@:3}" --json
    [ "$(grep -c 'warning' <<<"$stderr")" -eq 1 ]
    [[ "$stderr" == *"epkit: warning: using the host backend, not the GPUs of this machine: $2"* ]]
    [ "$(chosen - <<<"$output")" = "host $1 $2" ]
}

@test "a rank for each GPU, without a warning" {
    machine_with_gpus 3
    expect "cuda 3 there is a GPU for each rank"
    expect "cuda 2 there is a GPU for each rank" --ranks 2
    expect "cuda 3 there is a GPU for each rank" --boot threads
    CUDA_VISIBLE_DEVICES=2 expect "cuda 1 there is a GPU"
}

@test "all cases pass through the memory of GPUs" {
    machine_with_gpus 2
    for matrix in intranode lowlatency; do
        epkit test "$matrix" --tokens 16 --hidden 512 --timeout 120 --json >"$BATS_TEST_TMPDIR/out"
        [ "$(chosen "$BATS_TEST_TMPDIR/out")" = "cuda 2 there is a GPU for each rank" ]
        [ "$(jq .failed "$BATS_TEST_TMPDIR/out")" -eq 0 ]
    done
}

@test "more ranks than GPUs: the host backend, and the reason; with --backend cuda they share GPUs" {
    machine_with_gpus 2
    expect_line 4 "2 GPUs are visible, 4 ranks" --ranks 4
    CUDA_VISIBLE_DEVICES=1 expect_line 2 "1 GPU is visible, 2 ranks" --ranks 2
    expect "cuda 4 --backend names it" --ranks 4 --backend cuda
    EPKIT_BACKEND=cuda expect "cuda 2 EPKIT_BACKEND names it"
    expect "host 8 --backend names it" --backend host
    EPKIT_BACKEND=host expect "host 8 EPKIT_BACKEND names it"
}

@test "GPUs without P2P: the host backend, and the pair" {
    machine_with_gpus 3
    export FAKE_APART=2
    expect_line 8 "no P2P between GPU 0000:e0:00.0 and GPU 0000:e2:00.0"
    expect_line 3 "no P2P between GPU 0000:e0:00.0 and GPU 0000:e2:00.0" --ranks 3
    # The GPUs of two ranks have P2P.
    expect "cuda 2 there is a GPU for each rank" --ranks 2
    # With --backend cuda the library refuses; the default number of ranks is the same.
    expect "cuda 3 --backend names it" --backend cuda
}

@test "GPUs that are too old are not used, and the warning says so" {
    machine_with_gpus 2
    export FAKE_OLD=1
    expect "cuda 1 there is a GPU"
    expect_line 2 "GPU 0000:e1:00.0 is too old" --ranks 2
    FAKE_OLD=0 expect_line 8 "GPU 0000:e0:00.0 is too old"
}

@test "no GPU: the host backend, without a warning" {
    [ ! -e /dev/nvidia0 ] || skip "this machine has GPUs"
    machine_with_gpus 0
    expect "host 8 no usable GPU: none is visible"
    rm "${EPKIT%/*}/libepkit-cuda.so"
    expect "host 8 this epkit was built without the CUDA backend"
}

@test "several nodes: the host backend, without a warning" {
    machine_with_gpus 2
    epkit test internode "${CASE[@]}" --json >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err"
    [ "$(chosen "$BATS_TEST_TMPDIR/out")" = "host 8 several nodes use the host backend unless --backend cuda is given" ]
    run ! grep warning "$BATS_TEST_TMPDIR/err"
}

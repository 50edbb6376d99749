#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit under mpirun on fake GPUs: each rank may see a different GPU.
#
# shellcheck disable=SC2016 # the ranks' shells expand

load common
load gpus

setup() {
    command -v mpirun >/dev/null || skip "mpirun is not installed"
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
}

CASE=(test intranode --tokens 16 --hidden 512 --timeout 120 --only 1 --seed 1 --json)

# under VISIBLE: three ranks, with VISIBLE, expanded by the shell, as CUDA_VISIBLE_DEVICES ("-": not set)
under() {
    local set="export CUDA_VISIBLE_DEVICES=$1;"
    [ "$1" != - ] || set=
    limited 100 mpirun -n 3 --oversubscribe --bind-to none \
        sh -c "$set exec \"\$@\"" sh "$EPKIT" "${CASE[@]}" >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err"
    cat "$BATS_TEST_TMPDIR/out" "$BATS_TEST_TMPDIR/err"
    valid test "$BATS_TEST_TMPDIR/out"
}

expect() {
    [ "$(chosen "$BATS_TEST_TMPDIR/out")" = "$1" ]
    [ "$(grep -c warning "$BATS_TEST_TMPDIR/err")" -eq "$2" ]
}

# As set by a batch system with one GPU per task.
OWN='$OMPI_COMM_WORLD_RANK'

@test "a GPU of its own for each rank, which the others do not see" {
    machine_with_gpus 3
    under "$OWN"
    expect "cuda 3 there is a GPU for each rank" 0
}

@test "GPUs that all ranks see" {
    machine_with_gpus 3
    under -
    expect "cuda 3 there is a GPU for each rank" 0
}

@test "GPUs whose memory other ranks cannot map: the host backend, and the error of the library" {
    machine_with_gpus 3
    export FAKE_ISOLATED=1
    under "$OWN"
    expect "host 3 ep_comm_new: the GPU of rank 1 cannot be mapped by rank 0" 1
}

@test "too few GPUs, for different reasons" {
    machine_with_gpus 3
    under 1
    expect "host 3 1 GPU is visible, 3 ranks" 1
    under '$((OMPI_COMM_WORLD_RANK % 2))'
    expect "host 3 ranks 0 and 2 see the same GPU, 0000:e0:00.0" 1
    under '$((OMPI_COMM_WORLD_RANK * 2))'
    expect "host 3 rank 2: no usable GPU: none is visible" 1
    FAKE_APART=2 under -
    expect "host 3 no P2P between GPU 0000:e0:00.0 and GPU 0000:e2:00.0" 1
}

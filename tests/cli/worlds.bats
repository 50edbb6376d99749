#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Variables of launchers that contradict each other, or do not say where the ranks meet, are reported before anything
# starts. No MPI is needed.
#
# shellcheck disable=SC2154 # $stderr is set by run

load common

ONE=(test intranode --ranks 2 --tokens 16 --hidden 512 --timeout 120 --only 1 --seed 1)

# refused TEXT VARIABLE=VALUE...: the error has the text and names the variables, nothing starts
refused() {
    local text="$1" arguments
    shift
    for arguments in "${ONE[*]}" "bench --ranks 2 --tokens 16"; do
        # shellcheck disable=SC2086 # words
        run --separate-stderr env "$@" timeout 1200 "$EPKIT" $arguments
        echo "$*: $arguments: $status $output$stderr"
        [ "$status" -eq 2 ]
        [ -z "$output" ]
        [[ "$stderr" == *"$text"*"that this process is a rank: ${1%=*}="*"unset these variables"* ]]
    done
    run -2 --separate-stderr env "$@" timeout 1200 "$EPKIT" run --output "$BATS_TEST_TMPDIR/report"
    [[ "$stderr" == *"${1%=*}="*" say that this is one of several: use epkit test or epkit bench, or unset them"* ]]
    [ ! -e "$BATS_TEST_TMPDIR/report" ]
}

@test "ranks that may be on several hosts need MASTER_ADDR" {
    local text="the ranks may be on several hosts: set MASTER_ADDR"
    refused "$text" PMI_RANK=0 PMI_SIZE=4
    refused "$text" OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2
    refused "$text" SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2
    # On another node than rank 0, which may have it: said once there.
    refused "rank 2 lacks it" OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0
    run -2 --separate-stderr env OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 \
        timeout 1200 "$EPKIT" "${ONE[@]}"
    [ -z "$stderr" ]
}

@test "contradictions, and a rank without a size" {
    refused "PMI_SIZE is '7', but OMPI_COMM_WORLD_SIZE is '2'" \
        OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMI_RANK=0 PMI_SIZE=7
    refused "PMIX_RANK is '1', but OMPI_COMM_WORLD_RANK is '0'" \
        OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_RANK=1
    refused "no variable gives the number of ranks" PMIX_RANK=3
    refused "PMI_RANK is '4', and PMI_SIZE is '4'" PMI_RANK=4 PMI_SIZE=4 MPI_LOCALNRANKS=4
}

@test "invalid numbers and sizes" {
    for value in abc -1 0 4x 99999999999 ""; do
        run --separate-stderr env PMI_RANK=0 "PMI_SIZE=$value" timeout 1200 "$EPKIT" "${ONE[@]}"
        echo "'$value': $status $stderr"
        [ "$status" -eq 2 ]
        [[ "$stderr" == *PMI_SIZE* ]]
    done
}

@test "variables that were inherited from a rank: the time ends the wait, and the hint names them" {
    run --separate-stderr env EPKIT_TIMEOUT_MS=1500 PMI_RANK=0 PMI_SIZE=4 MPI_LOCALNRANKS=4 "$EPKIT" "${ONE[@]:0:2}"
    echo "$status $stderr"
    [ "$status" -eq 1 ]
    [[ "$stderr" == *"3 of 4 ranks did not arrive within 1500 ms"*"is a rank: PMI_RANK=0, PMI_SIZE=4"*"unset these"* ]]
}

@test "a single rank is not a world, and a batch script is not a rank" {
    for variables in "PMI_RANK=0 PMI_SIZE=1" "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1" \
        "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0 SLURM_JOB_ID=7" "PMIX_RANK=0"; do
        # shellcheck disable=SC2086 # words
        run --separate-stderr env $variables timeout 1200 "$EPKIT" "${ONE[@]}"
        echo "$variables: $status $output$stderr"
        [ "$status" -eq 0 ]
        [[ "$output" == *"(2 ranks, seed 1"* ]]
    done
}

@test "srun: two tasks of one node, by Slurm's variables alone" {
    local rank
    export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 SLURM_JOB_ID=$$ SLURM_STEP_ID=0
    for rank in 0 1; do
        SLURM_PROCID=$rank limited 60 "$EPKIT" test intranode --tokens 16 --hidden 512 --only 1 >"$BATS_TEST_TMPDIR/$rank" &
    done
    wait
    [[ "$(tail -n 1 "$BATS_TEST_TMPDIR/0")" == "intranode: 1/1 cases passed (2 ranks"* ]]
    [ ! -s "$BATS_TEST_TMPDIR/1" ]
}

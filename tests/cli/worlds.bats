#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Variables of launchers: variables that contradict MPI are reported before anything starts.
#
# shellcheck disable=SC2154 # $stderr is set by run

load common

ONE=(test intranode --ranks 2 --tokens 16 --hidden 512 --timeout 120 --only 1 --seed 1)

setup() {
    [ -e "$EPKIT_BUILD/libepkit-mpi.so" ] || skip "libepkit-mpi is not built"
    command -v mpirun >/dev/null || skip "mpirun is not installed"
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
}

# refused NAME VARIABLE=VALUE...: the error names the variable, nothing starts
refused() {
    local name="$1"
    shift
    for arguments in "${ONE[*]}" "bench --ranks 2 --tokens 16" "run --output $BATS_TEST_TMPDIR/report"; do
        # shellcheck disable=SC2086 # words
        run --separate-stderr env "$@" timeout 1200 "$EPKIT" $arguments
        echo "$*: $arguments: $status $output$stderr"
        [ "$status" -eq 2 ]
        [ -z "$output" ]
        [[ "$stderr" == *"$name is '"* ]]
        [[ "$stderr" == *"unset these variables"* ]]
    done
    [ ! -e "$BATS_TEST_TMPDIR/report" ]
}

@test "one of several ranks by its variables, but not by MPI" {
    refused PMI_SIZE PMI_RANK=0 PMI_SIZE=4
    refused OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2
    refused PMIX_RANK PMIX_RANK=3
    refused SLURM_STEP_NUM_TASKS SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4 SLURM_NTASKS=4
}

@test "invalid numbers and sizes" {
    for value in abc -1 0 4x 99999999999 ""; do
        run --separate-stderr env PMI_RANK=0 "PMI_SIZE=$value" timeout 1200 "$EPKIT" "${ONE[@]}"
        echo "'$value': $status $stderr"
        [ "$status" -eq 2 ]
        [[ "$stderr" == *PMI_SIZE* ]]
    done
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

@test "under mpirun: a smaller and a larger size, another rank, are reported once, by all ranks" {
    # shellcheck disable=SC2016 # is for the shells that are run
    for set in 'OMPI_COMM_WORLD_SIZE=2' 'OMPI_COMM_WORLD_SIZE=300' 'OMPI_COMM_WORLD_RANK=0 ' \
        'PMI_SIZE=2 PMI_RANK=$OMPI_COMM_WORLD_RANK'; do
        run --separate-stderr timeout --kill-after=10 1200 mpirun -n 3 --oversubscribe --bind-to none \
            sh -c "$set exec \"\$0\" \"\$@\"" "$EPKIT" test intranode --tokens 16 --hidden 512
        echo "$set: $status $output$stderr"
        [ "$status" -eq 2 ]
        [ -z "$output" ]
        [ "$(grep -c "but by MPI " <<<"$stderr")" -eq 1 ]
    done
}

@test "under mpirun: a usage error ends all ranks" {
    run --separate-stderr timeout --kill-after=10 1200 mpirun -n 2 --oversubscribe --bind-to none "$EPKIT" test --bad
    [ "$status" -eq 2 ]
    [ "$(grep -c "unknown option" <<<"$stderr")" -eq 1 ]
}

#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit launch inside jobs of a real Slurm: sbatch, salloc, srun. Long tier: the daemons take a while to start.
#
# shellcheck disable=SC2154 # $stderr is set by run
# shellcheck disable=SC2016 # programs of inner shells

load common

setup_file() {
    hosts_up_slurm 4
}

teardown_file() {
    hosts_down
}

slurm() {
    on login env -C "$HOSTS_DIR/work" SLURM_CONF="$HOSTS_DIR/slurm/slurm.conf" timeout 300 "$@"
}

@test "salloc: the hosts are those of the job" {
    run -0 slurm salloc -Q -N 3 "$EPKIT" launch "${PATIENT[@]}" --no-logs hostname
    [[ "$output" == *"hostname ran on 3 nodes with 3 ranks"* ]]
}

@test "sbatch: internode over Open MPI, 32 of 32, on the allocated nodes; a failure is that of the job" {
    printf '#!/bin/bash\nexec %s launch --connect-timeout 60 --no-logs --per-node 1 epkit-test internode -- --tokens 8 --hidden 256\n' \
        "$EPKIT" >"$HOSTS_DIR/work/job.sh"
    run slurm sbatch --wait -N 4 -o "$HOSTS_DIR/work/job.out" "$HOSTS_DIR/work/job.sh"
    cat "$HOSTS_DIR/work/job.out"
    [ "$status" -eq 0 ]
    grep -q 'internode: 32/32 cases passed (4 ranks on 4 nodes' "$HOSTS_DIR/work/job.out"
    printf '#!/bin/bash\nexec %s launch --connect-timeout 60 --no-logs -- sh -c "exit 6"\n' "$EPKIT" >"$HOSTS_DIR/work/job.sh"
    run slurm sbatch --wait -N 2 -o "$HOSTS_DIR/work/job.out" "$HOSTS_DIR/work/job.sh"
    cat "$HOSTS_DIR/work/job.out"
    [ "$status" -eq 6 ]
}

@test "srun: task 0 launches, the other tasks end" {
    run -0 slurm srun -N 2 --ntasks-per-node=1 "$EPKIT" launch "${PATIENT[@]}" --no-logs hostname
    [ "$(grep -c 'hostname ran on 2 nodes' <<<"$output")" -eq 1 ]
    [[ "$output" == *"task 1 leaves the launch to task 0"* ]]
}

@test "agents by srun instead of ssh" {
    run -0 slurm salloc -Q -N 2 "$EPKIT" launch "${PATIENT[@]}" --no-logs --connect srun -- sh -c 'echo $RANK/$WORLD_SIZE $(hostname)'
    [[ "$output" == *"h1: 0/2 h1"* && "$output" == *"h2: 1/2 h2"* ]]
}

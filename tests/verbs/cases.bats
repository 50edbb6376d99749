#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The network over RDMA, with Soft-RoCE: run by guest.sh in a virtual machine that has rxe0 and rxe1. It is emulated, so
# all times are long.

bats_require_minimum_version 1.5.0

# small ARGUMENT...: epkit test with few and short rows
small() {
    "$EPKIT" test internode --nodes 2 --network verbs --tokens 16 --hidden 256 --timeout 60 "$@"
}

within() { # SECONDS COMMAND...
    local left=$1
    shift
    until "$@"; do
        left=$((left - 1))
        [ "$left" -gt 0 ] || return 1
        sleep 1
    done
}

teardown() {
    ip link set veth1 up
}

@test "messages in order, back-pressure and damage, as on every network" {
    EPKIT_TEST_VERBS=1 run "$EPKIT_BUILD/tests/unit/test_stream"
    echo "$output"
    [ "$status" -eq 0 ]
}

@test "32 of 32 cases between two nodes" {
    run small --ranks 4
    echo "$output"
    [ "$status" -eq 0 ]
    [[ "$output" == *"internode: 32/32 cases passed (4 ranks on 2 nodes"* ]]
}

@test "low latency between two nodes: 32 of 32 cases" {
    EPKIT_VERBS_DEVICE=rxe1 run "$EPKIT" test lowlatency --nodes 2 --ranks 4 --network verbs --tokens 4 --hidden 512 --timeout 60
    echo "$output"
    [ "$status" -eq 0 ]
    [[ "$output" == *"lowlatency: 32/32 cases passed (4 ranks on 2 nodes"* ]]
}

@test "ranks that are started by themselves, without MPI" {
    local rank
    for rank in 0 1; do
        RANK=$rank WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.9.0.1 MASTER_PORT=29517 \
            EPKIT_SECRET=of-this-test small >"$BATS_TEST_TMPDIR/rank$rank" 2>&1 3>&- &
        eval "pid$rank=$!"
    done
    # shellcheck disable=SC2154 # set by eval
    wait "$pid0" && wait "$pid1"
    grep -q 'internode: 32/32 cases passed (2 ranks on 2 nodes' "$BATS_TEST_TMPDIR/rank0"
}

@test "a device that is not there, and options that are none" {
    EPKIT_VERBS_DEVICE=mlx5_9 run small --ranks 2
    [ "$status" -eq 1 ]
    [[ "$output" == *'there is no device "mlx5_9", which EPKIT_VERBS_DEVICE names'*rxe0* ]]
    EPKIT_VERBS_GID_INDEX=200 run small --ranks 2
    [ "$status" -eq 4 ]
    [[ "$output" == *"rxe0:1: no address at index 200 (EPKIT_VERBS_GID_INDEX)"* ]]
    EPKIT_VERBS_TRAFFIC_CLASS=high run small --ranks 2
    [ "$status" -eq 1 ]
    [[ "$output" == *'EPKIT_VERBS_TRAFFIC_CLASS is "high", not a number of 0..255'* ]]
}

@test "without enough locked memory: which limit" {
    run bash -c "ulimit -l 64; setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock -- '$EPKIT' test internode --nodes 2 \
        --network verbs --ranks 2 --timeout 60"
    echo "$output"
    [ "$status" -eq 1 ]
    [[ "$output" == *"the limit of locked memory is 65536 bytes (ulimit -l, RLIMIT_MEMLOCK): raise it"* ]]
}

@test "ranks that die, stop and leave: named, and a group without them" {
    run "$EPKIT_BUILD/tests/fault/fault_matrix" --network verbs --slow 12 --cell tcp.barrier.before/kill \
        --cell tcp.dispatch.forwarder/kill --cell tcp.plan.waiting/stop --cell tcp.combine.middle/crash \
        --cell tcp.combine.end/abort --cell tcp.combine.before/exit
    echo "$output"
    [ "$status" -eq 0 ]
}

@test "a link that goes down: this rank's port is named" {
    EPKIT_VERBS_DEVICE=rxe1 small --ranks 2 --repeat 1000 >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
    within 100 grep -q '^\[ *2/.*passed' "$BATS_TEST_TMPDIR/out"
    ip link set veth1 down
    status=0
    wait $! || status=$?
    cat "$BATS_TEST_TMPDIR/out"
    [ "$status" -eq 1 ]
    grep -qE 'network verbs: rank [01], channel [0-9]+, over rxe1:1: the port of this rank is down: ' "$BATS_TEST_TMPDIR/out"
}

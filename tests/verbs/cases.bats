#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The network over RDMA, with Soft-RoCE: run by guest.sh in a virtual machine that has rxe0 and rxe1. It is emulated, so
# all times are long.

bats_require_minimum_version 1.5.0

# small ARGUMENT...: epkit test with few and short rows, in place of the subshell that calls it
small() {
    exec "$EPKIT" test internode --nodes 2 --network verbs --tokens 16 --hidden 256 --timeout 60 "$@"
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

# reach 1|0: whether what rxe0 and rxe1 send each other arrives, as between NICs of one fabric. If not, their addresses
# are known: what is lost are the packets. Not otherwise, because rxe of Linux 6.1 sends a packet to a known address over
# a link that is down again and again, for ever, in the kernel.
reach() {
    local i
    for i in 0 1; do
        echo "$1" >/proc/sys/net/ipv4/conf/veth$i/accept_local
        ip neighbour flush dev veth$i nud permanent
        [ "$1" = 1 ] ||
            ip neighbour replace 10.9.$((1 - i)).1 lladdr "$(cat /sys/class/net/veth$((1 - i))/address)" dev veth$i nud permanent
    done
}

teardown() {
    ip link set veth1 up
    [ -n "$(ip address show dev veth1 to 10.9.1.1)" ] || ip address add 10.9.1.1/24 dev veth1
    reach 1
}

@test "the cases that every network passes" {
    EPKIT_TEST_VERBS=1 run -0 "$EPKIT_BUILD/tests/unit/test_net_engines"
}

@test "messages in order, back-pressure and damage, as on every network" {
    EPKIT_TEST_VERBS=1 run -0 "$EPKIT_BUILD/tests/unit/test_stream"
}

@test "a death and an abort while ranks wait for messages of each other" {
    EPKIT_TEST_VERBS=1 run -0 "$EPKIT_BUILD/tests/unit/test_host_connecting"
}

@test "32 of 32 cases between two nodes" {
    run -0 small --ranks 4
    [[ "$output" == *"internode: 32/32 cases passed (4 ranks on 2 nodes"* ]]
}

@test "low latency between two nodes: 32 of 32 cases" {
    EPKIT_VERBS_DEVICE=rxe1 run -0 "$EPKIT" test lowlatency --nodes 2 --ranks 4 --network verbs --tokens 4 --hidden 512 --timeout 60
    [[ "$output" == *"lowlatency: 32/32 cases passed (4 ranks on 2 nodes"* ]]
}

@test "low latency over two devices: each reaches both" {
    run -0 "$EPKIT" test lowlatency --nodes 2 --ranks 4 --network verbs --tokens 4 --hidden 512 --timeout 60 --only 1
}

@test "low latency over two devices that do not reach each other: both are named at once" {
    reach 0
    run -1 "$EPKIT" test lowlatency --nodes 2 --ranks 4 --network verbs --tokens 4 --hidden 512 --timeout 60
    [[ "$output" =~ "network verbs: rank "[0-3]" with rxe"[01]":1 and rank "[0-3]" with rxe"[01]":1 cannot reach each other: " ]]
    [[ "$output" == *"EPKIT_VERBS_DEVICE"* ]]
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
    EPKIT_VERBS_DEVICE=mlx5_9 run -1 small --ranks 2
    [[ "$output" == *'there is no device "mlx5_9", which EPKIT_VERBS_DEVICE names'*rxe0* ]]
    EPKIT_VERBS_GID_INDEX=200 run -4 small --ranks 2
    [[ "$output" == *"rxe0:1: no GID at index 200 (EPKIT_VERBS_GID_INDEX)"* ]]
    EPKIT_VERBS_TRAFFIC_CLASS=high run -1 small --ranks 2
    [[ "$output" == *'EPKIT_VERBS_TRAFFIC_CLASS is "high", not a number of 0..255'* ]]
}

@test "without enough locked memory: which limit" {
    run -1 bash -c "ulimit -l 64; setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock -- '$EPKIT' test internode --nodes 2 \
        --network verbs --ranks 2 --timeout 60"
    [[ "$output" == *"the limit of locked memory is 65536 bytes (ulimit -l, RLIMIT_MEMLOCK): raise it"* ]]
}

@test "ranks that die, stop and leave: named, and a group without them" {
    run -0 "$EPKIT_BUILD/tests/fault/fault_matrix" --network verbs --slow 12 --cell tcp.barrier.before/kill \
        --cell tcp.dispatch.forwarder/kill --cell tcp.plan.waiting/stop --cell tcp.combine.middle/crash \
        --cell tcp.combine.end/abort --cell tcp.combine.before/exit
}

@test "ranks that die and stop in low latency: masked, and the others go on" {
    run -0 "$EPKIT_BUILD/tests/fault/fault_matrix" --network verbs --slow 12 --cell ll.tcp.send.before/kill \
        --cell ll.tcp.combine.middle/stop --cell ll.tcp.finish.waiting/kill
}

# What a device sends to itself needs no cable, so the two ranks of these jobs have a device each.
start_pair() { # PORT
    local rank
    for rank in 0 1; do
        RANK=$rank WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.9.0.1 MASTER_PORT=$1 \
            EPKIT_SECRET=of-this-test EPKIT_VERBS_DEVICE=rxe$rank small --repeat 1000 \
            >"$BATS_TEST_TMPDIR/rank$rank" 2>&1 3>&- &
        eval "pid$rank=$!"
    done
    within 100 grep -q '^\[ *2/.*passed' "$BATS_TEST_TMPDIR/rank0"
}

# port_is_named: both ranks report a rank whose own port is down. Then they are ended, as they would go on to the next
# cases without ports.
port_is_named() {
    local rank down='network verbs: rank [01], channel [0-9]+, over rxe[01]:1: the port of this rank is down: '
    for rank in 0 1; do
        within 200 grep -qE "$down" "$BATS_TEST_TMPDIR/rank$rank" || { cat "$BATS_TEST_TMPDIR"/rank? && false; }
    done
    # shellcheck disable=SC2154 # set by eval
    kill "$pid0" "$pid1" 2>/dev/null || true
    wait "$pid0" "$pid1" || true
    grep -hE "$down" "$BATS_TEST_TMPDIR"/rank?
}

@test "a link that goes down: each rank names its own port" {
    start_pair 29518
    ip link set veth1 down
    port_is_named
}

# Without its address a port of Soft-RoCE cannot send, and is still active.
@test "a port whose operations fail before it is reported down" {
    start_pair 29519
    { echo address del 10.9.1.1/24 dev veth1 && sleep 0.2 && echo link set veth1 down; } | ip -batch -
    port_is_named
}

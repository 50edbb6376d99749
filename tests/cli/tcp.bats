#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Bootstrap by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and the network over TCP.
#
# shellcheck disable=SC2154,SC2016 # $stderr is set by run; programs of inner shells

load common

setup() {
    unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT EPKIT_ADDRESS TORCHELASTIC_RUN_ID
    export EPKIT_SECRET=of-this-test
}

# world N PER_NODE ARGS...: starts one epkit per rank; output in rank.0, ..., exit codes in code.0, ...
world() {
    local n=$1 per_node=$2 rank port=$((20000 + RANDOM % 12000))
    shift 2
    for rank in $(seq 0 $((n - 1))); do
        (
            code=0
            RANK=$rank WORLD_SIZE=${size:-$n} LOCAL_RANK=$((rank % per_node)) LOCAL_WORLD_SIZE=$per_node \
                MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$EPKIT" "$@" >"$BATS_TEST_TMPDIR/rank.$rank" \
                2>"$BATS_TEST_TMPDIR/errors.$rank" 3>&- || code=$?
            echo "$code" >"$BATS_TEST_TMPDIR/code.$rank"
        ) &
    done
    wait
}

codes() {
    cat "$BATS_TEST_TMPDIR"/code.* | tr '\n' ' '
}

@test "ranks that torchrun started: nodes by LOCAL_WORLD_SIZE, 32 of 32 cases, and only rank 0 prints" {
    TORCHELASTIC_RUN_ID=1 world 4 2 test internode --tokens 8 --hidden 256
    cat "$BATS_TEST_TMPDIR"/errors.* "$BATS_TEST_TMPDIR/rank.0"
    [ "$(codes)" = "0 0 0 0 " ]
    grep -q 'internode: 32/32 cases passed (4 ranks on 2 nodes' "$BATS_TEST_TMPDIR/rank.0"
    for rank in 1 2 3; do [ ! -s "$BATS_TEST_TMPDIR/rank.$rank" ]; done
}

@test "without torchrun the command line requests it, and one node needs no network" {
    world 2 2 test intranode --boot tcp --tokens 8 --hidden 256 --json
    cat "$BATS_TEST_TMPDIR"/errors.*
    [ "$(codes)" = "0 0 " ]
    [ "$(jq -c '[.result, .parameters.boot, .parameters.ranks]' "$BATS_TEST_TMPDIR/rank.0")" = '["passed","tcp",2]' ]
}

@test "unrelated variables, as in pods, are ignored" {
    RANK=0 WORLD_SIZE=16 MASTER_ADDR=nowhere.invalid MASTER_PORT=1 run -0 --separate-stderr "$EPKIT" test intranode --ranks 2 \
        --tokens 8 --hidden 256
}

@test "--boot tcp for a job of one rank, and an EPKIT_ADDRESS that is empty" {
    world 1 1 test intranode --boot tcp --tokens 8 --hidden 256
    cat "$BATS_TEST_TMPDIR"/errors.*
    [ "$(codes)" = "0 " ]
    grep -q '24/24 cases passed (1 rank' "$BATS_TEST_TMPDIR/rank.0"
    # Without --boot tcp the variables of such a job are ignored: containers may have them.
    world 1 1 test internode --network tcp --tokens 8 --hidden 256 --only 1
    [ "$(codes)" = "0 " ]
    grep -q '1/1 cases passed (8 ranks on 2 nodes' "$BATS_TEST_TMPDIR/rank.0"
    EPKIT_ADDRESS='' world 2 1 test internode --boot tcp --tokens 8 --hidden 256 --only 1
    cat "$BATS_TEST_TMPDIR"/errors.*
    [ "$(codes)" = "0 0 " ]
}

@test "ranks of one machine in two PID namespaces, as two pods of a node: it is said why they do not share memory" {
    unshare --pid --fork --mount-proc true 2>/dev/null || skip "no namespaces here"
    printf '#!/bin/sh\nexec unshare --pid --fork --kill-child --mount-proc %s "$@"\n' "$EPKIT" >"$BATS_TEST_TMPDIR/apart"
    chmod +x "$BATS_TEST_TMPDIR/apart"
    EPKIT="$BATS_TEST_TMPDIR/apart" world 2 1 test internode --boot tcp --tokens 8 --hidden 256 --only 1
    cat "$BATS_TEST_TMPDIR"/errors.*
    [ "$(codes)" = "0 0 " ]
    grep -q 'rank 0 of 2: rank 1 is on this machine, but reached by network tcp.*hostPID' "$BATS_TEST_TMPDIR/errors.0"
    world 2 1 test internode --boot tcp --tokens 8 --hidden 256 --only 1
    [ ! -s "$BATS_TEST_TMPDIR/errors.1" ]
}

@test "a rank that does not join is named" {
    local ms
    # On a loaded machine the deadline may expire before both have joined: then repeat with a longer one.
    for ms in 2000 10000 50000; do
        size=3 EPKIT_TIMEOUT_MS=$ms world 2 1 test internode --network tcp --nodes 3
        cat "$BATS_TEST_TMPDIR"/errors.*
        [ "$(codes)" = "1 1 " ]
        ! grep -q "1 of 3 ranks did not arrive within $ms ms: rank 2" "$BATS_TEST_TMPDIR/errors.0" || break
    done
    grep -q "1 of 3 ranks did not arrive within $ms ms: rank 2" "$BATS_TEST_TMPDIR/errors.0"
    grep -q "1 of 3 ranks did not arrive within $ms ms: rank 2" "$BATS_TEST_TMPDIR/errors.1"
    grep -q 'check that all ranks were started' "$BATS_TEST_TMPDIR/errors.1"
}

@test "all ranks end with one code: a usage error of rank 0 only, and of another rank only" {
    TORCHELASTIC_RUN_ID=1 world 3 1 test internode --experts 7
    cat "$BATS_TEST_TMPDIR"/errors.*
    [ "$(codes)" = "2 2 2 " ]
    [ "$(cat "$BATS_TEST_TMPDIR"/errors.* | grep -c -e '--experts 7 cannot be spread')" -eq 1 ]

    printf '#!/bin/sh\n[ "$RANK" != 1 ] || set -- test internode --tokens -3\nexec "%s" "$@"\n' "$EPKIT" >"$BATS_TEST_TMPDIR/epkit"
    chmod +x "$BATS_TEST_TMPDIR/epkit"
    EPKIT=$BATS_TEST_TMPDIR/epkit TORCHELASTIC_RUN_ID=1 world 2 1 test internode --tokens 8 --hidden 256
    cat "$BATS_TEST_TMPDIR"/errors.*
    [ "$(cat "$BATS_TEST_TMPDIR/code.0" "$BATS_TEST_TMPDIR/code.1")" = "$(printf '2\n2')" ]
    grep -q -e '--tokens: -3 is out of range' "$BATS_TEST_TMPDIR/errors.1"
}

@test "the deadline for missing ranks is --timeout, or EPKIT_TIMEOUT_MS" {
    run -1 --separate-stderr env RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 12000)) \
        timeout --kill-after=5 1200 "$EPKIT" test internode --boot tcp --timeout 1
    [[ "$stderr" == *"1000 ms"*"rank 1"* || "$stderr" == *"rank 1"*"1000 ms"* ]]
    run -1 --separate-stderr env RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 12000)) \
        EPKIT_TIMEOUT_MS=300 timeout --kill-after=5 1200 "$EPKIT" test internode --boot tcp --timeout 600
    [[ "$stderr" == *"300 ms"* ]]
}

@test "a stopped rank: the others end after their deadlines, with one code" {
    run --separate-stderr python3 - "$EPKIT" $((20000 + RANDOM % 12000)) <<'END'
import os, signal, subprocess, sys, time
epkit, port = sys.argv[1:]
ranks = []
for rank in range(3):
    env = dict(os.environ, RANK=str(rank), WORLD_SIZE="3", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
               MASTER_PORT=port, EPKIT_TIMEOUT_MS="600000")
    ranks.append(subprocess.Popen([epkit, "test", "internode", "--network", "tcp", "--nodes", "3", "--tokens", "64",
                                   "--repeat", "100000", "--timeout", "2"], env=env, text=True,
                                  stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                                  stderr=subprocess.PIPE))
ranks[0].stdout.readline()  # the cases have started
ranks[2].send_signal(signal.SIGSTOP)
errors = [rank.communicate(timeout=300)[1] for rank in ranks[:2]]
ranks[2].kill()
ranks[2].communicate()
print([rank.returncode for rank in ranks[:2]], "".join(errors))
sys.exit(0 if [rank.returncode for rank in ranks[:2]] == [1, 1] and all("rank 2" in error for error in errors)
         and all(error.count("gathering the exit codes of the job") == 1 for error in errors) else 1)
END
    [ "$status" -eq 0 ]
}

# A second host: process $other in a network namespace of its own, for programs in one of another namespace.
start_other_host() {
    unshare -n sleep 2400 3>&- &
    other=$!
    trap 'kill "$other"' EXIT
    # Until that process has left this namespace, both ends of a link would be here.
    for _ in $(seq 600); do
        [ "$(readlink "/proc/$other/ns/net")" = "$(readlink "/proc/$BASHPID/ns/net")" ] || break
        sleep 0.1
    done
}

# Runs in one of two network namespaces: two hosts with link-local addresses only.
link_local() {
    local address
    start_other_host
    for _ in $(seq 600); do
        ip link add d0 type veth peer name d1 netns "$other" && break
        sleep 0.1
    done
    ip link set lo up
    nsenter -t "$other" -n ip link set d1 name zz9 # another name and another number than here
    ip link set d0 up
    nsenter -t "$other" -n ip link set zz9 up
    for _ in $(seq 1200); do
        [ -z "$(ip -6 -o addr show dev d0 tentative)$(nsenter -t "$other" -n ip -6 -o addr show dev zz9 tentative)" ] &&
            [ -n "$(ip -6 -o addr show dev d0 scope link)" ] && break
        sleep 0.1
    done
    address=$(ip -6 -o addr show dev d0 scope link | awk '{sub("/.*", "", $4); print $4}')
    export WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 MASTER_PORT=29511
    RANK=1 MASTER_ADDR=$address%zz9 nsenter -t "$other" -n "$EPKIT" test internode --network tcp --nodes 2 --tokens 8 \
        --hidden 256 3>&- &
    RANK=0 MASTER_ADDR=$address%d0 "$EPKIT" test internode --network tcp --nodes 2 --tokens 8 --hidden 256
    wait $!
}

@test "two hosts with link-local addresses only" {
    unshare -n ip link add d0 type veth peer name d1 2>/dev/null || skip "no network namespaces or no veth here"
    export -f start_other_host link_local
    EPKIT=$EPKIT run -0 --separate-stderr unshare -n bash -euc link_local
    [[ "$output" == *"internode: 32/32 cases passed (2 ranks on 2 nodes"* ]]
}

# As link_local(), with IPv4, and on each host another interface, which is listed first and leads nowhere.
two_interfaces() {
    local address=198.18.79.1
    start_other_host
    ip link add a0 type veth peer name a1
    ip addr add 198.18.80.1/24 dev a0
    nsenter -t "$other" -n ip link add a0 type veth peer name a1
    nsenter -t "$other" -n ip addr add 198.18.81.1/24 dev a0
    ip link add d0 type veth peer name d1 netns "$other"
    ip addr add "$address/24" dev d0
    nsenter -t "$other" -n ip addr add 198.18.79.2/24 dev d1
    for name in lo a0 a1 d0; do ip link set "$name" up; done
    for name in lo a0 a1 d1; do nsenter -t "$other" -n ip link set "$name" up; done
    export WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 MASTER_ADDR=$address MASTER_PORT=29512
    RANK=1 nsenter -t "$other" -n "$EPKIT" test internode --network tcp --nodes 2 --tokens 8 --hidden 256 3>&- &
    RANK=0 "$EPKIT" test internode --network tcp --nodes 2 --tokens 8 --hidden 256
    wait $!
}

@test "of several wanted interfaces the one that routes to rank 0 is used" {
    unshare -n ip link add d0 type veth peer name d1 2>/dev/null || skip "no network namespaces or no veth here"
    export -f start_other_host two_interfaces
    for wanted in ^docker a,d; do
        EPKIT=$EPKIT EPKIT_TCP_INTERFACE=$wanted EPKIT_TIMEOUT_MS=20000 run -0 --separate-stderr \
            unshare -n bash -euc two_interfaces
        [[ "$output" == *"internode: 32/32 cases passed (2 ranks on 2 nodes"* ]]
    done
}

# Ranks at two addresses of one subnet: the kernel would choose the first of them for both.
second_address() {
    ip link add d0 type veth peer name d1
    ip addr add 198.18.79.1/24 brd + dev d0
    ip addr add 198.18.79.2/24 brd + dev d0
    for name in lo d0 d1; do ip link set "$name" up; done
    export WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 MASTER_ADDR=198.18.79.1 MASTER_PORT=29513
    RANK=1 EPKIT_TCP_INTERFACE=198.18.79.2 "$EPKIT" test internode --network tcp --nodes 2 --only 1 3>&- &
    RANK=0 EPKIT_TCP_INTERFACE=198.18.79.1 "$EPKIT" test internode --network tcp --nodes 2 --only 1
    wait $!
}

@test "the address of a connection may be a secondary one" {
    unshare -n ip link add d0 type veth peer name d1 2>/dev/null || skip "no network namespaces or no veth here"
    export -f second_address
    EPKIT=$EPKIT EPKIT_TIMEOUT_MS=20000 run -0 --separate-stderr unshare -n bash -euc second_address
    [[ "$output" == *"internode: 1/1 cases passed (2 ranks on 2 nodes"* ]]
}

@test "forked ranks over sockets of this host" {
    run -0 --separate-stderr "$EPKIT" bench --quick --no-baselines --ranks 4 --nodes 2 --network tcp --only dispatch --json
    [ "$(jq -r .network <<<"$output")" = tcp ]
}

@test "a document of epkit test says over which network its nodes were connected" {
    local options=(--ranks 2 --only 1 --tokens 8 --hidden 256 --json)
    "$EPKIT" test internode "${options[@]}" --network tcp >"$BATS_TEST_TMPDIR/tcp.json"
    valid test "$BATS_TEST_TMPDIR/tcp.json"
    [ "$(jq -r .parameters.network "$BATS_TEST_TMPDIR/tcp.json")" = tcp ]
    [ "$(EPKIT_NETWORK=tcp "$EPKIT" test internode "${options[@]}" | jq -r .parameters.network)" = tcp ]
    [ "$("$EPKIT" test internode "${options[@]}" | jq -r .parameters.network)" = emulated ]
    [ "$("$EPKIT" test intranode "${options[@]}" | jq -r .parameters.network)" = none ]
}

@test "options that contradict each other" {
    run -2 --separate-stderr "$EPKIT" test internode --boot tcp
    [[ "$stderr" == *"--boot tcp needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment, and WORLD_SIZE is not set"* ]]
    RANK=0 WORLD_SIZE=2 run -2 --separate-stderr "$EPKIT" test internode --boot tcp
    [[ "$stderr" == *"and MASTER_ADDR is not set"* ]]
    run -2 --separate-stderr "$EPKIT" test intranode --network tcp
    [[ "$stderr" == *"--network needs --nodes 2 or more"* ]]
    run -2 --separate-stderr "$EPKIT" test internode --network tcp --net-reorder
    [[ "$stderr" == *"--net-reorder is for the emulated network"* ]]
    RANK=x WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1 run -2 --separate-stderr "$EPKIT" test internode --network tcp
    [[ "$stderr" == *'RANK is "x"'* ]]
}

#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The TCP network between four hosts: results, and the behaviour of the others when one host fails or is disconnected.
#
# shellcheck disable=SC2154,SC2030,SC2031 # $stderr is set by run; each test is a subshell, and sets what it reads

load common

setup_file() {
    hosts_up 4
}

teardown_file() {
    hosts_down
}

# start_ranks SECONDS: a rank on each host, in a test that ends when one of them fails; their deadline is SECONDS.
start_ranks() {
    local i
    work="$HOSTS_DIR/work"
    rm -rf "$work"
    mkdir -p "$work"
    for i in 1 2 3 4; do
        on "h$i" env RANK=$((i - 1)) WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=h1 MASTER_PORT=29517 \
            EPKIT_TIMEOUT_MS=600000 EPKIT_SECRET=of-this-test timeout --kill-after=5 300 "$EPKIT" test internode --network tcp --nodes 4 \
            --timeout "$1" --tokens 8 --hidden 256 --repeat 100000 >"$work/rank$i" 2>&1 3>&- &
        echo $! >"$work/pid$i"
    done
    within 20 grep -q '^\[ *4/.*passed' "$work/rank1"
}

# ended HOST...: the ranks there have ended, with a failure
ended() {
    local i
    for i in "$@"; do
        within 20 not_running "$i"
        ! wait "$(cat "$work/pid$i")"
    done
}

not_running() {
    ! kill -0 "$(cat "$work/pid$1")" 2>/dev/null
}

# named RANK WORDS HOST...: the first failure that the ranks there report names that rank, with these words
named() {
    local rank=$1 words=$2 i
    shift 2
    for i in "$@"; do
        grep -v passed "$work/rank$i"
        [[ "$(grep -m 1 'why:' "$work/rank$i")" =~ why:\ +rank\ $rank\ ($words) ]]
    done
}

end_rank() { # HOST
    "$HOSTS" on "$HOSTS_DIR" "h$1" pkill -9 -x epkit || true
}

@test "16 ranks on 4 hosts: 32 of 32 cases over sockets" {
    run -0 --separate-stderr launch --no-logs --hosts 'h[1-4]' --per-node 4 --checks skip epkit-test internode -- --tokens 8 --hidden 256
    [[ "$output" == *"internode: 32/32 cases passed (16 ranks on 4 nodes"* ]]
    all_clean 10 h1 h2 h3 h4
}

@test "16 ranks on 4 hosts: low latency, 32 of 32 cases over sockets" {
    run -0 --separate-stderr launch --no-logs --hosts 'h[1-4]' --per-node 4 --checks skip epkit-test lowlatency -- --tokens 8 --hidden 512
    [[ "$output" == *"lowlatency: 32/32 cases passed (16 ranks on 4 nodes"* ]]
    all_clean 10 h1 h2 h3 h4
}

@test "the interface of each host sends what the statistics say, and no rows for ranks of the same host" {
    run -0 --separate-stderr launch --no-logs --hosts 'h[1-4]' --per-node 2 --checks skip -- "$EPKIT_BUILD/tests/hosts/wire" eth0 2
    [ "$(grep -c 'bytes sent by eth0' <<<"$output")" -eq 4 ]
}

@test "nodes are derived from the hosts by default" {
    local i
    work="$HOSTS_DIR/found"
    mkdir -p "$work"
    for i in 1 2 3 4; do
        on "h$(((i + 1) / 2))" env -u LOCAL_WORLD_SIZE RANK=$((i - 1)) WORLD_SIZE=4 MASTER_ADDR=h1 MASTER_PORT=29518 \
            EPKIT_SECRET=of-this-test timeout --kill-after=5 300 "$EPKIT" test internode --boot tcp --only 3 \
            --tokens 8 --hidden 256 >"$work/rank$i" 2>&1 3>&- &
        echo $! >"$work/pid$i"
    done
    for i in 1 2 3 4; do wait "$(cat "$work/pid$i")" || cat "$work/rank$i"; done
    cat "$work/rank1"
    grep -q "1/1 cases passed (4 ranks on 2 nodes" "$work/rank1"
}

# on_places PORT "HOST..." ARGUMENT...: runs an epkit for each rank on the given host; all succeed
on_places() {
    local port=$1 rank=0 host
    local -a places
    read -ra places <<<"$2"
    shift 2
    work="$HOSTS_DIR/places"
    rm -rf "$work"
    mkdir -p "$work"
    for host in "${places[@]}"; do
        on "$host" env -u LOCAL_WORLD_SIZE RANK=$rank WORLD_SIZE=${#places[@]} MASTER_ADDR=h1 MASTER_PORT="$port" \
            EPKIT_SECRET=of-this-test timeout --kill-after=5 300 "$EPKIT" "$@" >"$work/rank$rank" 2>"$work/errors$rank" 3>&- &
        echo $! >"$work/pid$rank"
        rank=$((rank + 1))
    done
    for rank in "${!places[@]}"; do
        wait "$(cat "$work/pid$rank")" || { cat "$work/rank$rank" "$work/errors$rank" && return 1; }
    done
    cat "$work/rank0"
}

@test "hosts with different numbers of ranks, and ranks alternating between hosts: each rank is a node" {
    on_places 29521 "h1 h1 h1 h2" test internode --boot tcp --only 3 --tokens 8 --hidden 256
    grep -q "1/1 cases passed (4 ranks on 4 nodes" "$work/rank0"
    on_places 29522 "h1 h2 h1 h2" test lowlatency --boot tcp --only 3 --tokens 8 --hidden 512
    grep -q "1/1 cases passed (4 ranks on 4 nodes" "$work/rank0"
    on_places 29523 "h1 h1 h1 h2" bench --boot tcp --quick --only dispatch --no-baselines --json
    [ "$(jq .parameters.nodes "$work/rank0")" = 4 ]
}

@test "a benchmark uses the nodes that the hosts form" {
    on_places 29524 "h1 h1 h2 h2" bench --boot tcp --quick --only dispatch --no-baselines --json
    [ "$(jq .parameters.nodes "$work/rank0")" = 2 ]
}

@test "a number of nodes that does not fit the hosts is refused, with the ranks" {
    work="$HOSTS_DIR/places" # what run starts sets none
    run ! on_places 29525 "h1 h1 h1 h2" test internode --boot tcp --nodes 2 --tokens 8 --hidden 256
    grep -q "rank [23] and rank [23] belong to one node" "$work"/errors*
    grep -q "(ranks_per_node is 2) but" "$work"/errors*
}

@test "the same with every routing, over links of 50 Mbit/s" {
    local routing
    long
    for routing in zipf grouped one dropped empty; do
        run -0 --separate-stderr launch --no-logs --hosts 'h[1-4]' --per-node 4 --checks skip epkit-test internode -- \
            --tokens 16 --hidden 512 --routing "$routing"
        [[ "$output" == *"internode: 32/32 cases passed (16 ranks on 4 nodes"* ]]
    done
    for i in 1 2 3 4; do
        on "h$i" tc qdisc add dev eth0 root tbf rate 50mbit burst 32k latency 200ms || skip "no tbf in this kernel"
    done
    run --separate-stderr launch --no-logs --hosts 'h[1-4]' --per-node 1 --checks skip epkit-test internode -- --tokens 64 --hidden 2048
    for i in 1 2 3 4; do on "h$i" tc qdisc del dev eth0 root; done
    [ "$status" -eq 0 ]
    [[ "$output" == *"internode: 32/32 cases passed (4 ranks on 4 nodes"* ]]
}

@test "a host whose cable is pulled: the others end by their deadline and name its rank" {
    start_ranks 5
    "$HOSTS" cut "$HOSTS_DIR" h3
    ended 1 2 4
    "$HOSTS" plug "$HOSTS_DIR" h3
    named 2 "did not answer within 5000 ms|cannot be reached" 1 2 4
    end_rank 3
    ended 3
    all_clean 10 h1 h2 h3 h4
}

@test "a rank that is killed: the others end at once and name it" {
    start_ranks 60
    end_rank 3
    ended 1 2 3 4
    named 2 "died while|cannot be reached" 1 2 4
    all_clean 10 h1 h2 h3 h4
}

@test "a rank that is stopped: the others end by their deadline and name it" {
    long
    start_ranks 5
    on h3 pkill -STOP -x epkit
    ended 1 2 4
    named 2 "did not answer within 5000 ms" 1 2 4
    end_rank 3
    ended 3
    all_clean 10 h1 h2 h3 h4
}

@test "a host that is switched off" {
    long
    start_ranks 5
    # Nothing of it says any more that its processes have ended.
    "$HOSTS" cut "$HOSTS_DIR" h3
    "$HOSTS" kill "$HOSTS_DIR" h3
    ended 1 2 3 4
    "$HOSTS" start "$HOSTS_DIR" h3
    named 2 "did not answer within 5000 ms|cannot be reached" 1 2 4
    all_clean 10 h1 h2 h4
}

@test "a cable that is unplugged briefly, within the deadline, has no effect" {
    local before i
    long
    start_ranks 60
    "$HOSTS" cut "$HOSTS_DIR" h3
    sleep 2
    "$HOSTS" plug "$HOSTS_DIR" h3
    before=$(passed)
    within 60 has_passed_more "$before"
    for i in 1 2 3 4; do
        ! grep 'why:' "$work/rank$i"
        end_rank "$i"
    done
    ended 1 2 3 4
    all_clean 10 h1 h2 h3 h4
}

passed() {
    grep -c passed "$work/rank1"
}

has_passed_more() { # than N, by some rounds
    [ "$(passed)" -gt $(($1 + 8)) ]
}

@test "two halves without a connection: each names a rank of the other, and all end" {
    long
    start_ranks 5
    "$HOSTS" part "$HOSTS_DIR" h3 h4
    ended 1 2 3 4
    "$HOSTS" join "$HOSTS_DIR" h3 h4
    named '[23]' "did not answer within 5000 ms|cannot be reached" 1 2
    named '[01]' "did not answer within 5000 ms|cannot be reached" 3 4
    all_clean 10 h1 h2 h3 h4
}

@test "a host that cannot be reached during the rendezvous is named on all" {
    local i
    long
    "$HOSTS" cut "$HOSTS_DIR" h3
    work="$HOSTS_DIR/meet"
    mkdir -p "$work"
    for i in 1 2 3 4; do
        on "h$i" env RANK=$((i - 1)) WORLD_SIZE=4 LOCAL_WORLD_SIZE=1 MASTER_ADDR=h1 MASTER_PORT=29519 EPKIT_TIMEOUT_MS=8000 \
            EPKIT_SECRET=of-this-test timeout --kill-after=5 300 "$EPKIT" test internode --boot tcp --nodes 4 --only 1 \
            >"$work/rank$i" 2>&1 3>&- &
        echo $! >"$work/pid$i"
    done
    ended 1 2 3 4
    "$HOSTS" plug "$HOSTS_DIR" h3
    for i in 1 2 4; do
        cat "$work/rank$i"
        grep -q 'why:.*1 of 4 ranks did not arrive within 8000 ms: rank 2' "$work/rank$i"
    done
    grep -q 'why:.*rank 2 could not reach rank 0 at h1 port 29519' "$work/rank3"
    all_clean 10 h1 h2 h3 h4
}

@test "deep_ep: layers of four ranks on two hosts, which find each other by torch's process group" {
    local python rank
    [ -e "$EPKIT_BUILD/python/epkit/_C.abi3.so" ] || skip "this build has no Python packages"
    python=$("$EPKIT_SOURCE/scripts/torch_venv.sh" 2>/dev/null) || skip "there is no torch"
    work="$HOSTS_DIR/layers"
    mkdir -p "$work"
    for rank in 0 1 2 3; do
        on "h$((rank / 2 + 1))" env RANK=$rank WORLD_SIZE=4 MASTER_ADDR=h1 MASTER_PORT=29526 EPKIT_SECRET=of-this-test \
            EPKIT_BACKEND=host OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPYCACHEPREFIX= \
            PYTHONPATH="$EPKIT_BUILD/python:$EPKIT_SOURCE/tests/python" timeout --kill-after=5 300 "$python" -c "
import torch.distributed as dist
import case_nodes
dist.init_process_group('gloo')
case_nodes.layer($rank, 4, 'tcp')
case_nodes.domains($rank, 4, True)
" >"$work/rank$rank" 2>&1 3>&- &
        echo $! >"$work/pid$rank"
    done
    for rank in 0 1 2 3; do
        wait "$(cat "$work/pid$rank")" || { cat "$work/rank$rank" && false; }
    done
    all_clean 10 h1 h2
}

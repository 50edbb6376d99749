#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit test with small groups of ranks.
#
# shellcheck disable=SC2154 # $stderr is set by run

load common

@test "intranode: 24 cases on two ranks, a line each, and the seed" {
    run -0 --separate-stderr epkit test intranode "${SMALL[@]}"
    [ "$(grep -c ' \.\.\. passed ' <<<"$output")" -eq 24 ]
    [[ "${lines[0]}" == "[ 1/24] "* ]]
    [[ "${lines[-1]}" =~ ^intranode:\ 24/24\ cases\ passed\ \(2\ ranks,\ seed\ [0-9]+, ]]
}

@test "internode: two nodes of two ranks" {
    run -0 --separate-stderr epkit test internode "${SMALL[@]}" --ranks 4
    [[ "${lines[-1]}" =~ ^internode:\ 32/32\ cases\ passed\ \(4\ ranks\ on\ 2\ nodes,\ seed\ [0-9]+, ]]
}

@test "internode with every kind of routing, four nodes of four ranks" {
    for routing in uniform zipf grouped one dropped empty repeated; do
        run --separate-stderr epkit test internode --ranks 16 --nodes 4 --tokens 32 --hidden 512 --timeout 120 \
            --routing "$routing"
        echo "$routing: $output$stderr"
        [ "$status" -eq 0 ]
        [[ "${lines[-1]}" == "internode: 32/32 cases passed (16 ranks on 4 nodes, "* ]]
    done
}

@test "internode over a network with injected faults" {
    run -0 --separate-stderr epkit test internode "${SMALL[@]}" --net-delay-us 100 --net-reorder --net-ring 64K \
        --net-split 1000 --dtype bf16
    [[ "${lines[-1]}" == *"16/16 cases passed"* ]]
}

@test "a bit that changes on the network fails the check, of a dispatch, a combine and low latency" {
    local options
    for options in "internode --net-flip 40" "internode --net-flip 100 --net-reorder" \
        "internode --partial bf16 --net-flip 70" "lowlatency --nodes 2 --net-flip 5" \
        "lowlatency --nodes 2 --net-flip 40 --no-partial-reduce"; do
        # shellcheck disable=SC2086 # words
        run --separate-stderr epkit test $options --ranks 4 --tokens 16 --hidden 512
        echo "$options: $output$stderr"
        [ "$status" -eq 1 ]
        # Some writes hold more than rows, which the ranks check themselves.
        [[ "$output" == *"FAILED"* || "$stderr" == *"is damaged"* ]]
        [[ "${lines[-1]}" != *" 32/32 cases passed"* ]]
    done
}

@test "lowlatency: 32 cases on two ranks" {
    run -0 --separate-stderr epkit test lowlatency "${SMALL[@]}"
    [[ "${lines[-1]}" =~ ^lowlatency:\ 32/32\ cases\ passed ]]
}

@test "lowlatency: 32 cases over nodes, on a network with injected faults and over sockets" {
    local options
    for options in "--ranks 6 --nodes 3 --net-delay-us 100 --net-reorder --net-ring 512" "--ranks 4 --nodes 2 --network tcp"; do
        # shellcheck disable=SC2086 # words
        run -0 --separate-stderr epkit test lowlatency $options --tokens 8 --hidden 512
        [[ "${lines[-1]}" =~ ^lowlatency:\ 32/32\ cases\ passed\ \([46]\ ranks\ on\ [23]\ nodes ]]
    done
}

@test "lowlatency: 36 ranks, on one node and over nodes: more than a 32-bit mask, and values that fp8 cannot represent" {
    local options
    for options in "" "--nodes 3"; do
        # shellcheck disable=SC2086 # words
        run -0 --separate-stderr epkit test lowlatency --ranks 36 $options --experts 36 --tokens 4 --hidden 512
        [[ "${lines[-1]}" =~ ^lowlatency:\ 32/32\ cases\ passed\ \(36\ ranks ]]
    done
}

@test "ranks as threads" {
    run -0 --separate-stderr epkit test intranode "${SMALL[@]}" --boot threads --dtype fp8
    [[ "${lines[-1]}" == *"8/8 cases passed"* ]]
}

@test "--json: one document that is valid by its schema" {
    epkit test intranode "${SMALL[@]}" --json --seed 5 >"$BATS_TEST_TMPDIR/out.json"
    valid test "$BATS_TEST_TMPDIR/out.json"
    [ "$(jq -r '.result, .passed, .total, (.cases | length), .parameters.seed' "$BATS_TEST_TMPDIR/out.json" | xargs)" = \
        "passed 24 24 24 5" ]
}

@test "lowlatency: --no-partial-reduce passes as well, and is in the report" {
    epkit test lowlatency "${SMALL[@]}" --no-partial-reduce --json >"$BATS_TEST_TMPDIR/out.json"
    valid test "$BATS_TEST_TMPDIR/out.json"
    [ "$(jq -r '.passed, .parameters.no_partial_reduce' "$BATS_TEST_TMPDIR/out.json" | xargs)" = "32 true" ]
    [ "$(epkit test lowlatency "${SMALL[@]}" --only 1 --json | jq .parameters.no_partial_reduce)" = false ]
}

@test "--only runs that case alone" {
    run -0 --separate-stderr epkit test intranode "${SMALL[@]}" --only 7 --seed 1
    [ "${#lines[@]}" -eq 2 ]
    [[ "${lines[0]}" == "[ 7/24] "* ]]
    [[ "${lines[1]}" == "intranode: 1/1 cases passed (2 ranks, seed 1,"* ]]
}

@test "--repeat: each time with the next seed" {
    epkit test intranode "${SMALL[@]}" --only 1 --seed 41 --repeat 3 --json >"$BATS_TEST_TMPDIR/out.json"
    valid test "$BATS_TEST_TMPDIR/out.json"
    [ "$(jq -c '[.cases[].seed]' "$BATS_TEST_TMPDIR/out.json")" = "[41,42,43]" ]
    [ "$(jq .parameters.seed "$BATS_TEST_TMPDIR/out.json")" = 41 ]
}

@test "each run has a new seed by default" {
    [ "$(for _ in 1 2 3; do
        epkit test intranode "${SMALL[@]}" --only 1 --json | jq .parameters.seed
    done | sort -u | wc -l)" -gt 1 ]
}

@test "a routing file gives tokens and top-k" {
    for i in {0..19}; do
        echo "$((i % 16)) $(((i + 1) % 16)) $(((i + 2) % 16)) $(((i + 3) % 16))"
    done >"$BATS_TEST_TMPDIR/routing.txt"
    run -0 --separate-stderr epkit test intranode --ranks 2 --hidden 512 --experts 16 --dtype bf16 \
        --routing "$BATS_TEST_TMPDIR/routing.txt"
    [[ "${lines[-1]}" == *"16/16 cases passed"* ]]
}

@test "a backend that is not available: exit code 4, and the reason once for all ranks" {
    run --separate-stderr epkit test intranode "${SMALL[@]}" --backend cuda
    if [ "$status" -eq 0 ]; then
        skip "there is one"
    fi
    [ "$status" -eq 4 ]
    [ "$(grep -c 'creating the communicator' <<<"$stderr")" -eq 1 ]
    [[ "$stderr" == *"where: ranks 0-1"* ]]
    epkit test intranode "${SMALL[@]}" --backend cuda --json 2>/dev/null >"$BATS_TEST_TMPDIR/out.json" || true
    valid test "$BATS_TEST_TMPDIR/out.json"
    [ "$(jq -r .result "$BATS_TEST_TMPDIR/out.json")" = unsupported ]
}

@test "no colour and no progress line without a terminal" {
    run epkit test intranode "${SMALL[@]}" --only 1
    [[ "$output" != *$'\033'* ]]
    [[ "$output" != *$'\r'* ]]
}

@test "on a terminal: colour, unless NO_COLOR is set" {
    script --version 2>/dev/null | grep -q util-linux || skip "no script(1) of util-linux"
    TERM=xterm NO_COLOR='' script --quiet --return --command "'$EPKIT' test intranode ${SMALL[*]} --only 1" \
        "$BATS_TEST_TMPDIR/colour" </dev/null >/dev/null
    grep -q $'\033\\[32mpassed\033\\[0m' "$BATS_TEST_TMPDIR/colour"
    TERM=xterm NO_COLOR=1 script --quiet --return --command "'$EPKIT' test intranode ${SMALL[*]} --only 1" \
        "$BATS_TEST_TMPDIR/plain" </dev/null >/dev/null
    grep -q 'passed' "$BATS_TEST_TMPDIR/plain"
    run ! grep -q $'\033' "$BATS_TEST_TMPDIR/plain"
}

@test "closed standard streams: the ranks run to their end, and the lost output is exit code 1" {
    limited 60 bash -c 'exec "$@" <&- 2>&-' bash "$EPKIT" test intranode "${SMALL[@]}" --only 1
    run -1 limited 60 bash -c 'exec "$@" <&- >&- 2>&-' bash "$EPKIT" test intranode "${SMALL[@]}" --only 1
}

@test "many ranks" {
    run -0 --separate-stderr epkit test intranode --ranks 48 --tokens 4 --hidden 512 --only 2
    [[ "${lines[-1]}" == "intranode: 1/1 cases passed (48 ranks,"* ]]
}

@test "a network that is not available: exit code 4, and the reason" {
    [ -z "$(ls /sys/class/infiniband 2>/dev/null)" ] || skip "this machine has RDMA devices"
    run -4 --separate-stderr epkit test internode --ranks 2 --nodes 2 --network verbs
    [[ "$stderr" == *"why:   ep_comm_new: network verbs: "* ]]
    [[ "$output$stderr" == *"internode: 0/32 cases passed, 32 did not run"* ]]
}

@test "a small stack: 256 KiB are enough, and less is refused before anything is called" {
    ! nm "$EPKIT" | grep -q __asan_init || skip 'a build with sanitizers: its frames are larger'
    for matrix in intranode internode lowlatency; do
        (ulimit -s 256 && epkit test $matrix "${SMALL[@]}" --only 7)
    done
    (ulimit -s 160 && run -1 epkit test intranode "${SMALL[@]}" && [[ "$output" == *'the stack has at most 160 KiB (ulimit -Hs), and epkit needs 256'* ]])
}

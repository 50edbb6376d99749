#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit bench. $EPKIT: the command; $EPKIT_SOURCE: the source tree.

load common

bench() {
    limited 100 "$EPKIT" bench --boot fork "$@"
}

valid() {
    python3 -S "$EPKIT_SOURCE/tests/cli/validate.py" "$EPKIT_SOURCE/cmd/bench/schema.json" "$1"
}

@test "bench: --quick measures everything, in seconds" {
    run -0 limited 30 "$EPKIT" bench --quick --boot fork
    grep -q "^host, 4 ranks: dispatch runs at" <<<"$output"
    for op in dispatch combine plan first-dispatch ll-dispatch ll-combine; do
        grep -qE "^host +$op " <<<"$output"
    done
    grep -q "All results verified" <<<"$output"
}

@test "bench: --json fits its schema and has every measurement" {
    bench --quick --json >"$BATS_TEST_TMPDIR/bench.json"
    valid "$BATS_TEST_TMPDIR/bench.json"
    run jq -r '[.rows[] | "\(.op)/\(.type)"] | join(" ")' "$BATS_TEST_TMPDIR/bench.json"
    [ "$output" = "dispatch/bf16 dispatch/fp8 combine/bf16 plan/ first-dispatch/bf16 ll-dispatch/bf16 ll-dispatch/fp8 ll-combine/bf16" ]
    run jq '[.rows[] | select(.rounds != 5)] | length' "$BATS_TEST_TMPDIR/bench.json"
    [ "$output" -eq 0 ]
}

@test "bench: rates follow from rows and times" {
    bench --quick --only dispatch --dtype bf16 --json >"$BATS_TEST_TMPDIR/bench.json"
    jq -e '.rows[0] | ((.rows * .row_bytes / .time_us / 1000 / .logical_gbps - 1) | fabs) < 1e-6
        and ((.wire_rows * .row_bytes / .time_us / 1000 / .wire_gbps - 1) | fabs) < 1e-6
        and .row_bytes == 2048 and ((.memcpy.time_us / .time_us / .vs_memcpy - 1) | fabs) < 1e-6' \
        "$BATS_TEST_TMPDIR/bench.json"
}

@test "bench: a low-latency combine sends a row per token and rank, and with --no-partial-reduce one per choice" {
    rows() {
        bench --quick --only ll --dtype bf16 --no-baselines --json "$@" >"$BATS_TEST_TMPDIR/bench.json"
        valid "$BATS_TEST_TMPDIR/bench.json"
        jq -c '[.parameters.no_partial_reduce, (.rows[] | .rows, .wire_rows | floor)]' "$BATS_TEST_TMPDIR/bench.json"
    }
    # Top-8 over both ranks: a token has one row on the other rank, and as many choices as that rank has experts.
    [ "$(rows --ranks 2 --experts 8 --ll-tokens 10)" = "[false,80,10,80,10]" ]
    [ "$(rows --ranks 2 --experts 8 --ll-tokens 10 --no-partial-reduce)" = "[true,80,10,80,40]" ]
}

@test "bench: the same seed gives the same rows, another seed others" {
    rows() {
        bench --quick --only dispatch --dtype bf16 --json --seed "$1" | jq '.rows[0].rows'
    }
    [ "$(rows 5)" = "$(rows 5)" ]
    [ "$(rows 5)" != "$(rows 6)" ]
}

@test "bench: --engine-calls measures both layouts, both kinds of memory, and three kinds of routing, and checks each" {
    bench --quick --engine-calls --ranks 2 --json >"$BATS_TEST_TMPDIR/bench.json"
    valid "$BATS_TEST_TMPDIR/bench.json"
    jq -e '.verdict | test("a layer with new routing takes [0-9]+ us in symmetric and [0-9]+ us in ordinary memory")' "$BATS_TEST_TMPDIR/bench.json"
    jq -r '.rows[] | [.op, .type, .routing] | join(" ")' "$BATS_TEST_TMPDIR/bench.json" | sort | uniq -c | sed 's/^ *//' | diff - <(
        echo "4 call-combine bf16 cached"
        for op in "call-dispatch bf16" "call-dispatch fp8" "layer bf16"; do
            for routing in cached plan update; do echo "4 $op $routing"; done
        done)
    [ "$(jq -r '.rows[] | .memory + " " + .layout' "$BATS_TEST_TMPDIR/bench.json" | sort -u | wc --lines)" -eq 4 ]
    for routing in empty one dropped; do
        run -0 bench --quick --engine-calls --ranks 4 --iters 1 --routing $routing
    done
    run -0 bench --quick --engine-calls --nodes 2 --iters 1 --dtype bf16
    [[ "$output" == *"call-dispatch bf16 expanded ordinary  update"* && "$output" != *fp8* ]]
}

@test "bench: lists of ranks and tokens give a row each" {
    bench --quick --only dispatch --dtype fp8 --ranks 1,2,4 --tokens 8,16 --json >"$BATS_TEST_TMPDIR/bench.json"
    [ "$(jq -c '[.rows[] | [.op, .type, .ranks, .nodes, .tokens]] | [length, .[0], .[5]]' "$BATS_TEST_TMPDIR/bench.json")" = \
        '[6,["dispatch","fp8",1,1,8],["dispatch","fp8",4,1,16]]' ]
}

@test "bench: two nodes have a network rate, and low latency too" {
    bench --quick --nodes 2 --json >"$BATS_TEST_TMPDIR/bench.json"
    valid "$BATS_TEST_TMPDIR/bench.json"
    jq -e '[.rows[] | select(.op == "dispatch" or .op == "combine") | .net_gbps > 0 and .net_printed_gbps > 0] | all' \
        "$BATS_TEST_TMPDIR/bench.json"
    jq -e '[.rows[] | select(.op | startswith("ll"))] | length > 0 and all(.net_gbps > 0)' "$BATS_TEST_TMPDIR/bench.json"
}

@test "bench: the library uses little memory in addition to the data" {
    bench --ranks 4 --tokens 256 --hidden 4096 --only combine --iters 1 --json >"$BATS_TEST_TMPDIR/bench.json"
    jq -e '.memory[0].share < 0.05 and .memory[0].library_bytes > 0' "$BATS_TEST_TMPDIR/bench.json"
}

@test "bench: threads are ranks as well" {
    run -0 limited 60 "$EPKIT" bench --quick --boot threads --only dispatch,combine
    [[ "$output" == *"All results verified"* ]]
}

@test "bench: a routing that leaves ranks without rows is measured" {
    run -0 bench --quick --routing empty
    run -0 bench --quick --routing one --only dispatch,combine
}

@test "bench: without baselines there are no columns for them" {
    bench --quick --no-baselines --only combine --json | jq -e '.rows[0].memcpy == null and .rows[0].vs_memcpy == null'
    bench --quick --only combine | grep -q 'x memcpy'
    run bench --quick --no-baselines --only combine
    [[ "$output" == *"LOGICAL GB/s"* ]]
    [[ "$output" != *"x memcpy"* && "$output" != *"x alltoallv"* ]]
}

@test "bench: wrong usage is 2, and says what is wrong" {
    usage() {
        run -2 bench "${@:2}"
        [[ "$output" == *"$1"* ]] || { printf '%s\n' "$output"; return 1; }
    }
    usage "256 experts cannot be spread evenly over 7 ranks" --ranks 4,7
    usage "a token cannot select 64 of 8 experts" --topk 64 --experts 8
    usage "multiple of 128" --hidden 1000 --dtype fp8
    usage "no routing of that name" --routing nonsense
    usage "--nodes" --ranks 8 --nodes 3
    usage "--tokens: 0 is out of range 1..1048576" --tokens 0
    usage "--iters: 'many' is not a whole number" --iters many
    usage "--only: 'nothing' is none of dispatch, combine, plan, ll" --only nothing
    usage "give it without --only" --engine-calls --only ll
}

@test "bench: a group that does not fit into memory is refused before it starts" {
    run -1 limited 10 "$EPKIT" bench --boot fork --ranks 1024 --tokens 1048576 --hidden 65536 \
        --topk 64 --experts 1024
    [[ "$output" == *"GiB of memory"* ]]
}

@test "between nodes: low latency counts the bytes on the network" {
    epkit bench --quick --ranks 2 --nodes 2 --network tcp --boot fork --only ll --dtype bf16 --json >"$BATS_TEST_TMPDIR/out.json"
    valid "$BATS_TEST_TMPDIR/out.json"
    # With a rank on each node all rows for other ranks are for other nodes.
    jq -e '[.rows[] | select(.op | startswith("ll-"))] | length > 0 and
        all(.nodes == 2 and .net_gbps > 0 and (.net_gbps - .wire_gbps | fabs) < 1e-9)' "$BATS_TEST_TMPDIR/out.json"
}

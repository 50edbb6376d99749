#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Ranks started by mpirun: for epkit, and with epkit as the program.
#
# shellcheck disable=SC2154 # $stderr is set by run

load common

setup() {
    [ -e "$EPKIT_BUILD/libepkit-mpi.so" ] || skip "libepkit-mpi is not built"
    command -v mpirun >/dev/null || skip "mpirun is not installed"
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 EPKIT_TEST_MARK="$BATS_TEST_TMPDIR"
    # The session folder of mpirun, which it must remove.
    export TMPDIR="$BATS_TEST_TMPDIR/tmp"
    mkdir "$TMPDIR"
}

teardown() {
    living | xargs --no-run-if-empty kill -KILL
}

world() {
    limited 100 mpirun -n "$1" --oversubscribe --bind-to none "$EPKIT" "${@:2}"
}

# Processes ended by mpirun may take a moment to exit.
nothing_is_left() {
    local try
    for ((try = 0; try < 100; try++)); do
        [ -n "$(living)" ] || [ -n "$(find "$TMPDIR" -path '*/pid.*')" ] || return 0
        sleep 0.1
    done
    return 1
}

# Two ranks whose MPI_Finalize does not return. Open MPI's mpirun sometimes keeps waiting for ranks that ended without
# it, or crashes in its own end (PMIx_server_finalize): then repeat.
kept_finalize() {
    local try
    for ((try = 0; try < 3; try++)); do
        run --separate-stderr timeout --kill-after=10 120 mpirun -n 2 --oversubscribe --bind-to none \
            -x LD_PRELOAD="$EPKIT_BUILD/tests/cli/libkept-finalize.so" "$@"
        echo "$output$stderr"
        case $status in 124 | 137 | 139) ;; *) return 0 ;; esac
        living | xargs --no-run-if-empty kill -KILL
        rm -rf "${TMPDIR:?}"/*
    done
}

@test "intranode with --boot mpi" {
    run --separate-stderr epkit test intranode "${SMALL[@]}" --boot mpi
    echo "$output$stderr"
    [ "$status" -eq 0 ]
    [[ "${lines[-1]}" == "intranode: 24/24 cases passed (2 ranks"* ]]
    # Only progress, which appears if mpirun takes seconds to start.
    [ "$(grep -cv -e '^epkit: test [0-9]' -e '^$' <<<"$stderr")" -eq 0 ]
    nothing_is_left
}

@test "internode with --boot mpi, over MPI and over the emulated network" {
    for network in "--timeout=120" "--net-delay-us=100"; do
        run --separate-stderr epkit test internode "${SMALL[@]}" --ranks 4 --boot mpi --dtype bf16 "$network"
        echo "$output$stderr"
        [ "$status" -eq 0 ]
        [[ "${lines[-1]}" == "internode: 16/16 cases passed (4 ranks on 2 nodes"* ]]
    done
}

@test "internode with every kind of routing, over MPI" {
    # Ranks of MPI spin while they wait: sixteen of them for one routing, two per node for the others.
    for routing in uniform:16 zipf:8 grouped:8 one:8 dropped:8 empty:8; do
        run --separate-stderr epkit test internode --ranks "${routing#*:}" --nodes 4 --tokens 32 --hidden 512 \
            --timeout 120 --boot mpi --routing "${routing%:*}"
        echo "$routing: $output$stderr"
        [ "$status" -eq 0 ]
        [[ "${lines[-1]}" == "internode: 32/32 cases passed (${routing#*:} ranks on 4 nodes, "* ]]
    done
}

@test "--json with --boot mpi" {
    epkit test lowlatency "${SMALL[@]}" --boot mpi --json >"$BATS_TEST_TMPDIR/out.json"
    valid test "$BATS_TEST_TMPDIR/out.json"
    [ "$(jq -r '.parameters.boot, .passed' "$BATS_TEST_TMPDIR/out.json" | xargs)" = "mpi 32" ]
}

@test "errors of ranks are printed once, without the banners of mpirun" {
    run --separate-stderr epkit test intranode "${SMALL[@]}" --boot mpi --backend cuda
    [ "$status" -ne 0 ] || skip "there is a cuda backend"
    echo "$output$stderr"
    [ "$status" -eq 4 ]
    [ "$(grep -c 'creating the communicator' <<<"$stderr")" -eq 1 ]
    [[ "$stderr" == *"where: ranks 0-1"* ]]
    [[ "$stderr" != *---* ]]
}

# start COMMAND...: in the background; returns when a case has passed. $launcher: its process ID.
start() {
    "$@" >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" &
    launcher=$!
    within 20 grep -q passed "$BATS_TEST_TMPDIR/out"
}

LONG=(test intranode --ranks 2 --tokens 512 --hidden 4096 --repeat 1000 --timeout 120 --boot mpi)

@test "SIGTERM to the launcher: exit code 143, and mpirun and its ranks have exited" {
    local code=0
    start "$EPKIT" "${LONG[@]}"
    kill -TERM "$launcher"
    wait "$launcher" || code=$?
    cat "$BATS_TEST_TMPDIR/err"
    [ "$code" -eq 143 ]
    nothing_is_left
}

@test "SIGKILL of the launcher ends mpirun and its ranks" {
    start "$EPKIT" "${LONG[@]}"
    kill -KILL "$launcher"
    wait "$launcher" || true
    within 10 nothing_is_left
}

@test "a rank that is killed is named" {
    local code=0
    start "$EPKIT" test intranode --ranks 2 --tokens 512 --hidden 4096 --timeout 120 --boot mpi
    kill -KILL "$(pgrep --parent "$(pgrep --parent "$launcher")" | tail -1)"
    wait "$launcher" || code=$?
    cat "$BATS_TEST_TMPDIR/err"
    [ "$code" -eq 1 ]
    grep -Eq 'where: rank [01]$' "$BATS_TEST_TMPDIR/err"
    grep -q 'why:   killed by SIGKILL (Killed)' "$BATS_TEST_TMPDIR/err"
    nothing_is_left
}

@test "mpirun epkit test: the world's ranks, one report" {
    run --separate-stderr world 2 test internode --tokens 16 --hidden 512 --seed 1
    echo "$output$stderr"
    [ "$status" -eq 0 ]
    [ "${#lines[@]}" -eq 33 ]
    [[ "${lines[-1]}" == "internode: 32/32 cases passed (2 ranks on 2 nodes, seed 1,"* ]]
    [[ "$output" != *$'\033'* ]]
}

@test "mpirun epkit test --repeat: several jobs in one world" {
    world 3 test intranode --tokens 16 --hidden 512 --experts 24 --only 2 --repeat 4 --seed 8 --json \
        >"$BATS_TEST_TMPDIR/out.json"
    valid test "$BATS_TEST_TMPDIR/out.json"
    [ "$(jq -c '[.cases[].seed], .parameters.ranks' "$BATS_TEST_TMPDIR/out.json" | xargs)" = "[8,9,10,11] 3" ]
}

@test "mpirun epkit: usage errors are reported once" {
    run --separate-stderr world 3 test intranode --ranks 2
    [ "$status" -eq 2 ]
    [ "$(grep -c 'mpirun started 3 ranks' <<<"$stderr")" -eq 1 ]
    run --separate-stderr world 3 test intranode --rnaks 2
    [ "$status" -eq 2 ]
    [ "$(grep -c "did you mean '--ranks'" <<<"$stderr")" -eq 1 ]
}

@test "mpirun epkit: MPI_Init that waits for a missing rank ends at EPKIT_TIMEOUT_MS" {
    # Rank 1 never calls MPI_Init.
    # shellcheck disable=SC2016 # expanded by the rank
    run --separate-stderr limited 100 env EPKIT_TIMEOUT_MS=2500 mpirun -n 2 --oversubscribe --bind-to none sh -c \
        '[ "$OMPI_COMM_WORLD_RANK" = 0 ] || exec sleep 30; exec "$0" test intranode --timeout=90' "$EPKIT"
    [ "$status" -eq 1 ]
    [[ $stderr == *"MPI_Init did not return within 2500 ms"* ]]
}

@test "mpirun epkit: a short --timeout does not apply to MPI_Init" {
    # Rank 1 is later than that.
    # shellcheck disable=SC2016 # expanded by the rank
    run --separate-stderr limited 100 mpirun -n 2 --oversubscribe --bind-to none sh -c \
        '[ "$OMPI_COMM_WORLD_RANK" = 0 ] || sleep 4; exec "$0" test intranode --tokens 16 --hidden 512 --timeout=2' "$EPKIT"
    echo "$output$stderr"
    [[ $stderr != *"MPI_Init did not return"* ]]
    [[ "${lines[-1]}" == "intranode: "*" cases passed (2 ranks"* ]]
}

@test "--boot mpi: MPI_Init that does not return is reported, and the ranks end" {
    [ "$EPKIT_SANITIZED" = "" ] || skip "a sanitizer wants to be loaded first"
    run --separate-stderr env EPKIT_TIMEOUT_MS=3000 LD_PRELOAD="$EPKIT_BUILD/tests/cli/libkept-init.so" \
        timeout --kill-after=10 100 "$EPKIT" test intranode "${SMALL[@]}" --boot mpi
    echo "$output$stderr"
    [ "$status" -eq 1 ]
    [[ "$stderr" == *"epkit: error: MPI_Init did not return within 3000 ms"* ]]
    nothing_is_left
}

@test "mpirun epkit: MPI_Finalize that does not return is reported, and the rank ends" {
    [ "$EPKIT_SANITIZED" = "" ] || skip "a sanitizer wants to be loaded first"
    kept_finalize "$EPKIT" test intranode "${SMALL[@]:2}" --timeout 10
    [ "$status" -eq 1 ]
    [[ "${lines[-1]}" == "intranode: 24/24 cases passed (2 ranks"* ]]
    [[ "$stderr" == *"epkit: error: rank 0: MPI_Finalize did not return within 20000 ms (--timeout plus 10 s)"* ]]
    nothing_is_left
    # A command that failed before has written its document.
    kept_finalize -x PMI_RANK=0 -x PMI_SIZE=7 "$EPKIT" test intranode "${SMALL[@]:2}" --timeout 1 --json
    [[ "$stderr" == *"MPI_Finalize did not return"* ]]
    [ "$(jq -r '.verb, .exit_code' <<<"$output" | xargs)" = "test 2" ]
    nothing_is_left
}

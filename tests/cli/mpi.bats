#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Ranks started by mpirun, and the baseline that needs MPI.
#
# shellcheck disable=SC2154 # $stderr is set by run

load common

setup() {
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

needs_module() {
    [ -e "$EPKIT_BUILD/libepkit-bench-mpi.so" ] || skip "epkit is built without MPI"
}

# An mpirun that sets the variables of MPICH, or whatever $1 makes of its ranks.
fake_mpirun() {
    mkdir -p "$BATS_TEST_TMPDIR/bin"
    cat >"$BATS_TEST_TMPDIR/bin/mpirun" <<END
#!/bin/bash
while [ "\$1" != -n ]; do shift; done
n=\$2
shift 2
$1
for ((rank = 0; rank < n; rank++)); do PMI_RANK=\$rank PMI_SIZE=\$n MPI_LOCALNRANKS=\$n "\$@" & done
wait
END
    chmod +x "$BATS_TEST_TMPDIR/bin/mpirun"
    PATH="$BATS_TEST_TMPDIR/bin:$PATH"
}

@test "mpirun epkit test: the world's ranks, one report" {
    run -0 --separate-stderr world 2 test internode --tokens 16 --hidden 512 --seed 1
    [ "${#lines[@]}" -eq 33 ]
    [[ "${lines[-1]}" == "internode: 32/32 cases passed (2 ranks on 2 nodes, seed 1,"* ]]
    [[ "$output" != *$'\033'* ]]
    nothing_is_left
}

@test "mpirun epkit test: sockets between nodes, or the emulated network" {
    for network in tcp emulated; do
        world 4 test internode --tokens 16 --hidden 512 --dtype bf16 --network "$network" --json >"$BATS_TEST_TMPDIR/out.json"
        valid test "$BATS_TEST_TMPDIR/out.json"
        [ "$(jq -r '.passed, .parameters.ranks, .parameters.boot, .parameters.network' "$BATS_TEST_TMPDIR/out.json" | xargs)" = \
            "16 4 tcp $network" ]
    done
    run -0 world 2 test internode --tokens 16 --hidden 512 --net-delay-us 100 --only 1
}

@test "mpirun epkit test --repeat: several jobs in one world" {
    world 3 test intranode --tokens 16 --hidden 512 --experts 24 --only 2 --repeat 4 --seed 8 --json \
        >"$BATS_TEST_TMPDIR/out.json"
    valid test "$BATS_TEST_TMPDIR/out.json"
    [ "$(jq -c '[.cases[].seed], .parameters.ranks' "$BATS_TEST_TMPDIR/out.json" | xargs)" = "[8,9,10,11] 3" ]
}

@test "two mpiruns at the same time do not meet" {
    world 2 test intranode --tokens 16 --hidden 512 >"$BATS_TEST_TMPDIR/a" &
    run world 3 test intranode --tokens 16 --hidden 512 --experts 24
    wait $!
    [[ "${lines[-1]}" == "intranode: 24/24 cases passed (3 ranks"* ]]
    [[ "$(tail -n 1 "$BATS_TEST_TMPDIR/a")" == "intranode: 24/24 cases passed (2 ranks"* ]]
}

@test "mpirun epkit: usage errors are reported once" {
    run -2 --separate-stderr world 3 test intranode --ranks 2
    [ "$(grep -c 'mpirun started 3 ranks' <<<"$stderr")" -eq 1 ]
    run -2 --separate-stderr world 3 test intranode --boot fork
    [ "$(grep -c 'these ranks were started by mpirun' <<<"$stderr")" -eq 1 ]
    run -2 --separate-stderr world 3 test intranode --rnaks 2
    [ "$(grep -c "did you mean '--ranks'" <<<"$stderr")" -eq 1 ]
}

@test "mpirun epkit: a rank that does not come is named at EPKIT_TIMEOUT_MS" {
    # shellcheck disable=SC2016 # expanded by the rank
    run -1 --separate-stderr limited 100 env EPKIT_TIMEOUT_MS=2500 mpirun -n 2 --oversubscribe --bind-to none sh -c \
        '[ "$OMPI_COMM_WORLD_RANK" = 0 ] || exec sleep 30; exec "$0" test intranode --timeout=90' "$EPKIT"
    [[ $stderr == *"1 of 2 ranks did not arrive within 2500 ms"*"rank 1"* ]]
}

@test "mpirun epkit: a short --timeout does not apply to the start" {
    # Rank 1 is later than that.
    # shellcheck disable=SC2016 # expanded by the rank
    run --separate-stderr limited 100 mpirun -n 2 --oversubscribe --bind-to none sh -c \
        '[ "$OMPI_COMM_WORLD_RANK" = 0 ] || sleep 4; exec "$0" test intranode --tokens 16 --hidden 512 --timeout=2' "$EPKIT"
    [[ "${lines[-1]}" == "intranode: "*" cases passed (2 ranks"* ]]
}

@test "the variables of MPICH" {
    fake_mpirun ""
    run -0 --separate-stderr limited 100 mpirun -n 3 "$EPKIT" test intranode --tokens 16 --hidden 512 --experts 24
    [[ "${lines[-1]}" == "intranode: 24/24 cases passed (3 ranks"* ]]
}

@test "epkit bench under mpirun has MPI_Alltoallv as a baseline; alone it says how to get it" {
    needs_module
    world 4 bench --quick --json >"$BATS_TEST_TMPDIR/world.json"
    valid bench "$BATS_TEST_TMPDIR/world.json"
    jq -e '(.mpi | type) == "string" and .parameters.boot == "tcp"
        and ([.rows[] | select(.op == "dispatch" or .op == "combine") | .vs_alltoallv > 0] | length == 3 and all)' \
        "$BATS_TEST_TMPDIR/world.json"
    nothing_is_left
    run -0 epkit bench --quick --only combine
    [[ "$output" == *"No column for MPI_Alltoallv: mpirun has not started the ranks, as in mpirun -n 8 epkit bench."* ]]
}

@test "epkit bench: an mpirun of another MPI" {
    needs_module
    fake_mpirun ""
    run -0 --separate-stderr limited 100 mpirun -n 2 "$EPKIT" bench --quick --only combine --json
    [[ "$stderr" == *"MPI_Alltoallv is not measured: MPI has rank 0 of 1, and mpirun rank 0 of 2"* ]]
    [ "$(jq .mpi <<<"$output")" = null ]
}

@test "epkit run starts its ranks itself: under mpirun it says what runs on those of mpirun" {
    run -2 --separate-stderr world 3 run --quick --output "$BATS_TEST_TMPDIR/here"
    grep -q 'run: it starts ranks itself, and OMPI_.* say that this is one of several: use epkit test or epkit bench' <<<"$stderr"
    [ ! -e "$BATS_TEST_TMPDIR/here" ]
}

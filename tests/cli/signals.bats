#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The launcher or a rank is ended in any way: no process remains, and the reason is reported.

load common

# A test that runs until it is ended.
LONG=(test intranode --ranks 3 --tokens 512 --hidden 4096 --repeat 1000 --timeout 120)

setup() {
    export EPKIT_TEST_MARK="$BATS_TEST_TMPDIR"
}

teardown() {
    living | xargs --no-run-if-empty kill -KILL
}

# start ARGUMENT...: in the background; returns when the ranks have started. $launcher: its process ID.
start() {
    # SIGHUP may be ignored in the environment of the tests, as by nohup.
    env --default-signal=HUP "$EPKIT" "$@" >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" &
    launcher=$!
    within 10 grep -q passed "$BATS_TEST_TMPDIR/out"
}

ranks_live() {
    [ "$(living | wc -l)" -ge 2 ]
}

nobody_lives() {
    [ -z "$(living)" ]
}

# ends_with CODE: the launcher ends with that code, within a deadline
ends_with() {
    local code=0
    limited 20 tail --pid="$launcher" -f /dev/null
    wait "$launcher" || code=$?
    echo "exit code $code"
    cat "$BATS_TEST_TMPDIR/err"
    [ "$code" -eq "$1" ]
}

@test "SIGTERM: exit code 143, no process remains" {
    start "${LONG[@]}"
    kill -TERM "$launcher"
    ends_with 143
    nobody_lives
    grep -q 'epkit: interrupted' "$BATS_TEST_TMPDIR/err"
}

@test "SIGINT: exit code 130, no process remains" {
    # Shells start background processes with SIGINT ignored; epkit handles it nevertheless.
    start "${LONG[@]}"
    kill -INT "$launcher"
    ends_with 130
    nobody_lives
}

@test "SIGINT to all of them at once, as from a terminal" {
    start "${LONG[@]}"
    # A rank may have ended because of another one before it gets the signal.
    living | xargs kill -INT 2>"$BATS_TEST_TMPDIR/kill" || [ -s "$BATS_TEST_TMPDIR/kill" ]
    run ! grep -v 'No such process' "$BATS_TEST_TMPDIR/kill"
    ends_with 130
    nobody_lives
    run ! grep -q 'a rank died' "$BATS_TEST_TMPDIR/err"
}

@test "SIGKILL of the launcher ends the ranks" {
    start "${LONG[@]}"
    within 5 ranks_live # between two repetitions there are none
    kill -KILL "$launcher"
    wait "$launcher" || true
    within 5 nobody_lives
}

@test "SIGTERM with ranks as threads" {
    start "${LONG[@]}" --boot threads
    kill -TERM "$launcher"
    ends_with 143
    nobody_lives
}

# kill_a_rank SIGNAL: the child of the launcher that started last
kill_a_rank() {
    local rank tries
    # Between two repetitions there are no ranks.
    for tries in $(seq 3000); do
        rank=$(pgrep --parent "$launcher" | tail -1)
        [ -n "$rank" ] && kill "-$1" "$rank" 2>/dev/null && return
        sleep 0.02
    done
    echo "no rank after $tries tries"
    return 1
}

@test "a rank that is killed: exit code 1, rank, signal and the command that repeats it" {
    start test intranode --ranks 3 --tokens 512 --hidden 4096 --timeout 120 --seed 9
    kill_a_rank KILL
    ends_with 1
    nobody_lives
    grep -q 'error: a rank died' "$BATS_TEST_TMPDIR/err"
    grep -Eq 'where: rank [0-2]$' "$BATS_TEST_TMPDIR/err"
    grep -q 'why:   killed by SIGKILL (Killed)' "$BATS_TEST_TMPDIR/err"
    grep -q 'did not run' "$BATS_TEST_TMPDIR/out"
    grep -q '    epkit test intranode --tokens 512 --hidden 4096 --ranks 3 --timeout 120 --seed 9' "$BATS_TEST_TMPDIR/out"
}

@test "a rank that crashes: the same" {
    start test intranode --ranks 3 --tokens 512 --hidden 4096 --timeout 120
    kill_a_rank SEGV
    ends_with 1
    nobody_lives
    grep -Eq 'killed by SIGSEGV|ended early' "$BATS_TEST_TMPDIR/err"
}

@test "a rank that stops: the others name it within the deadline" {
    start test intranode --ranks 3 --tokens 512 --hidden 4096 --timeout 10
    kill_a_rank STOP
    ends_with 1
    nobody_lives
    grep -q 'error: a rank did not finish' "$BATS_TEST_TMPDIR/err"
    grep -Eq 'where: rank [0-2]$' "$BATS_TEST_TMPDIR/err"
}

#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit run, ended by a signal in any phase: no process or file remains, and the exit code is that of the signal.

load common

setup() {
    cd "$BATS_TEST_TMPDIR" || return 1
    export EPKIT_TEST_MARK="$BATS_TEST_TMPDIR"
}

teardown() {
    living | xargs --no-run-if-empty kill -KILL
}

# interrupt SIGNAL CODE: sends the signal to $launcher, which must end with the code
interrupt() {
    local code=0
    kill -"$1" "$launcher"
    wait "$launcher" || code=$?
    cat err
    echo "exit code $code"
    [ "$code" -eq "$2" ]
    [ "$(grep -c '^epkit: interrupted$' err)" -eq 1 ]
}

start() {
    # The full run, so that it cannot end before the signal. SIGHUP may be ignored in the environment of the tests.
    env --default-signal=HUP "$EPKIT" run "$@" >out 2>err &
    launcher=$!
}

# Before the ranks, one child at a time queries the machine.
ranks_live() {
    [ "$(living | wc -l)" -gt 2 ]
}

@test "at the start: the folder is created only with the complete report" {
    for phase in TERM:143 HUP:129; do
        start --output fresh
        within 20 ranks_live
        interrupt "${phase%:*}" "${phase#*:}"
        [ ! -e fresh ]
        [ -z "$(living)" ]
    done
}

@test "while ranks run: no new folder remains, and an existing one is unchanged" {
    mkdir old
    echo precious >old/report.json
    start --output old
    within 20 ranks_live
    interrupt TERM 143
    [ "$(find old -mindepth 1 -printf '%f ')" = "report.json " ]
    [ "$(cat old/report.json)" = precious ]
    [ -z "$(living)" ]
}

@test "a preloaded library has a thread that receives SIGCHLD" {
    local preload
    cat >thread.c <<'C'
#include <pthread.h>
#include <unistd.h>
static void *rest(void *unused)
{
    for (;;)
        pause();
    return unused;
}
__attribute__((constructor)) static void begin(void)
{
    pthread_t thread;
    pthread_create(&thread, NULL, rest, NULL);
}
C
    cc -shared -fPIC -pthread -o thread.so thread.c
    # A sanitizer of the command must be loaded first.
    preload=$(ldd "$EPKIT" | sed -n 's/.*=> \(.*lib[at]san[^ ]*\) .*/\1/p')
    LD_PRELOAD="$preload $PWD/thread.so" limited 60 "$EPKIT" test intranode --ranks 2 --tokens 16 --hidden 128 --only 1
}

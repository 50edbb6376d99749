#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit run, ended by a signal in whichever phase: nothing of it is left, and the exit code says which signal.

load common

setup() {
    cd "$BATS_TEST_TMPDIR" || return 1
    export EPKIT_TEST_MARK="$BATS_TEST_TMPDIR"
}

teardown() {
    living | xargs --no-run-if-empty kill -KILL
}

# interrupt SIGNAL CODE: of $launcher, which must end with the code
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
    # The whole run, so that it cannot be over before the signal; whoever runs the tests may ignore SIGHUP.
    env --default-signal=HUP "$EPKIT" run "$@" >out 2>err &
    launcher=$!
}

# Before them, one child at a time looks at the machine.
ranks_live() {
    [ "$(living | wc -l)" -gt 2 ]
}

@test "at once: the folder is made when the report is complete" {
    for phase in TERM:143 HUP:129; do
        start --output fresh
        within 20 ranks_live
        interrupt "${phase%:*}" "${phase#*:}"
        [ ! -e fresh ]
        [ -z "$(living)" ]
    done
}

@test "while ranks run: the folder goes, one that was there stays as it was" {
    mkdir old
    echo precious >old/report.json
    start --output old
    within 20 ranks_live
    interrupt TERM 143
    [ "$(find old -mindepth 1 -printf '%f ')" = "report.json " ]
    [ "$(cat old/report.json)" = precious ]
    [ -z "$(living)" ]
}

@test "a preloaded library has a thread that takes SIGCHLD" {
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
    # A sanitizer of the command has to be loaded before.
    preload=$(ldd "$EPKIT" | sed -n 's/.*=> \(.*lib[at]san[^ ]*\) .*/\1/p')
    LD_PRELOAD="$preload $PWD/thread.so" limited 60 "$EPKIT" test intranode --ranks 2 --tokens 16 --hidden 128 --only 1
}

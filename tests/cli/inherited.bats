#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Inherited signals, streams, limits and variables do not change the output of the command.
#
# shellcheck disable=SC2154 # $stderr is set by run
# shellcheck disable=SC2030,SC2031,SC2317 # each test is a subshell, with functions of its own

load common

ONE=(test intranode --ranks 2 --tokens 16 --hidden 512 --timeout 120 --only 1 --seed 1)
LONG=(test intranode --ranks 2 --tokens 512 --hidden 4096 --repeat 1000 --timeout 20)

setup() {
    cd "$BATS_TEST_TMPDIR" || return 1
    export EPKIT_TEST_MARK="$BATS_TEST_TMPDIR"
}

teardown() {
    local process
    living | xargs --no-run-if-empty kill -KILL
    [ -s pids ] || return 0
    # Where numbers of processes are used again within a minute, one of these may be another's by now.
    while read -r process; do
        grep -qsF "EPKIT_TEST_MARK=$BATS_TEST_TMPDIR" "/proc/$process/environ" || continue
        kill -KILL "$process" 2>/dev/null || true
    done <pids
}

# with STATE... -- ARGUMENT...: epkit with this state
with() {
    local states=()
    while [ "$1" != -- ]; do
        states+=("$1")
        shift
    done
    shift
    timeout --kill-after=5 1200 python3 -S "$EPKIT_SOURCE/tests/cli/inherited.py" "${states[@]}" -- "$EPKIT" "$@"
}

# start STATE... -- ARGUMENT...: the same in the background, without a limit; $launcher: its process ID. Truncates its
# output files, so that waiting for output waits for this process, which ignores signals until it has started.
start() {
    local states=()
    rm -f out err
    while [ "$1" != -- ]; do
        states+=("$1")
        shift
    done
    shift
    python3 -S "$EPKIT_SOURCE/tests/cli/inherited.py" "${states[@]}" -- "$EPKIT" "$@" >out 2>err 3>&- &
    launcher=$!
}

# ends_with CODE: $launcher ends with that exit code
ends_with() {
    local code=0
    timeout 1200 tail --pid="$launcher" -f /dev/null
    wait "$launcher" || code=$?
    echo "exit code $code"
    cat err
    [ "$code" -eq "$1" ]
}

nobody_lives() {
    [ -z "$(living)" ]
}

somebody_lives() {
    [ -n "$(living)" ]
}

gone() {
    local pid
    while read -r pid; do
        # Zombies are reaped by init.
        if [ -e "/proc/$pid/stat" ] && ! grep -q ') Z ' "/proc/$pid/stat"; then
            return 1
        fi
    done <"$1"
}

@test "SIGCHLD is ignored, or everything blocked: ranks are reaped nevertheless" {
    for state in ignore=SIGCHLD block=SIGCHLD block=all; do
        for boot in fork threads; do
            run --separate-stderr with "$state" -- "${ONE[@]}" --boot "$boot"
            echo "$state $boot: $status $output$stderr"
            [ "$status" -eq 0 ]
            [[ "$output" == *"1/1 cases passed"* ]]
        done
    done
}

@test "SIGTERM ends it, whatever was ignored or blocked" {
    for state in ignore=SIGCHLD ignore=SIGTERM block=SIGTERM block=all; do
        start "$state" -- "${LONG[@]}"
        within 40 grep -q passed out
        kill -TERM "$launcher"
        ends_with 143
        within 5 nobody_lives
    done
    start ignore=SIGTERM block=all -- "${LONG[@]}"
    within 40 grep -q passed out
    kill -TERM "$launcher"
    ends_with 143
    grep -qx 'epkit: interrupted' err
}

@test "a signal ends it by that signal, not with an exit code, even if the command handles it" {
    for arguments in --interval "--json --interval"; do
        # shellcheck disable=SC2086 # words
        python3 - "$EPKIT" nics --devices lo $arguments 3600 <<'EOF'
import signal
import subprocess
import sys
import time

for number in (signal.SIGTERM, signal.SIGINT):
    for seconds in (0.3, 1, 4, 16, 64):
        process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        time.sleep(seconds)
        process.send_signal(number)
        _, said = process.communicate(timeout=1200)
        assert process.returncode == -number, (sys.argv, process.returncode, said)
        if said:
            break
        # The command may not have installed its handler yet, which cannot be observed.
    assert said == "epkit: interrupted\n", said
EOF
    done
}

@test "SIGTERM ends it while its output is not read" {
    mkfifo pipe
    tail -f /dev/null 6<pipe 3>&- &
    echo $! >pids
    # More lines than fit into a pipe.
    "$EPKIT" test intranode --ranks 1 --tokens 1 --hidden 128 --topk 1 --experts 1 --repeat 1000 >pipe 2>err 3>&- &
    launcher=$!
    # It may have blocked on the full pipe before reaping a rank.
    ranks_run() {
        pgrep --parent "$launcher" --runstates D,R,S,T >/dev/null
    }
    is_full() {
        ! ranks_run && sleep 0.3 && ! ranks_run
    }
    within 60 is_full
    kill -0 "$launcher"
    kill -TERM "$launcher"
    ends_with 143
}

@test "nohup: SIGHUP does not end it" {
    start ignore=SIGHUP -- "${LONG[@]}"
    within 40 grep -q passed out
    kill -HUP "$launcher"
    passed=$(grep -c passed out)
    more() {
        [ "$(grep -c passed out)" -gt $((passed + 3)) ]
    }
    within 20 more
    kill -TERM "$launcher"
    ends_with 143
}

@test "an inherited timer ends it by SIGALRM, and no process remains" {
    run -142 with alarm=0.7 -- "${LONG[@]}"
    within 5 nobody_lives
}

@test "PID 1 of a container: SIGTERM and SIGINT end it" {
    unshare --pid --fork --mount-proc true 2>/dev/null || skip "no right to make PID namespaces"
    for number in TERM:143 INT:130; do
        unshare --pid --fork --mount-proc "$EPKIT" "${LONG[@]}" >out 2>err 3>&- &
        launcher=$!
        within 20 [ -s out ]
        kill "-${number%:*}" "$(pgrep --parent "$launcher")"
        ends_with "${number#*:}"
        rm out
    done
}

@test "closed standard streams: nothing is written elsewhere, and lost output is a failure" {
    for closed in 1 "0 1 2" "0 2"; do
        states=()
        for fd in $closed; do
            states+=("close=$fd")
        done
        for arguments in "version" "topo --from /nowhere" "${ONE[*]}" "doctor --list" "nics --devices lo -- true"; do
            printf 'precious' >file
            # The file has a descriptor above those of the closed streams.
            # shellcheck disable=SC2086 # words
            run with "${states[@]}" -- $arguments 5<>file
            echo "$closed: $arguments: $status"
            [ "$(cat file)" = precious ]
            case "$arguments:$closed" in
            topo*) [ "$status" -eq 2 ] ;;
            *:"0 2") [ "$status" -eq 0 ] ;;
            *) [ "$status" -eq 1 ] ;;
            esac
        done
    done
    run -1 with close=1 -- help
    [[ "$output" == *"writing to standard output: it is closed"* ]]
}

@test "a command under nics and env gets the streams and signals that epkit got" {
    for front in "nics --devices lo" "env --from a4"; do
        [[ "$front" == nics* ]] || python3 -S "$EPKIT_SOURCE/tests/machines/machines.py" a4 a4
        # Shells change signal dispositions; grep does not.
        # shellcheck disable=SC2086 # words
        run with close=0 ignore=SIGPIPE block=SIGUSR1 -- $front -- grep ^Sig /proc/self/status
        [[ "$output" == *SigBlk:*0000000200* ]]
        [[ "$output" == *SigIgn:*0000001000* ]]
        # shellcheck disable=SC2086 # words
        run -0 with close=0 -- $front -- sh -c '[ ! -e /proc/self/fd/0 ]'
    done
}

@test "a full disk: ENOSPC and exit code 1, never success" {
    [ -e /dev/full ] || skip "no /dev/full"
    for arguments in version help "help topo" "completion bash" "doctor --list" "doctor --list --json" "topo --json" \
        "env" "nics --devices lo" "nics --devices lo --json" "nics --devices lo --prometheus" "${ONE[*]}" \
        "${ONE[*]} --json" "bench --ranks 2 --tokens 8 --hidden 128 --topk 1 --experts 2 --only dispatch --iters 1 --boot fork"; do
        status=0
        # shellcheck disable=SC2086 # words
        timeout 1200 "$EPKIT" $arguments >/dev/full 2>err || status=$?
        echo "$arguments: $status $(cat err)"
        [ "$status" -eq 1 ]
        grep -q "No space left on device" err
        run ! grep -Eq "Inappropriate|Success|Invalid|Illegal" err
    done
    # shellcheck disable=SC2016
    status=0
    "$EPKIT" nics --devices lo --output /dev/full >out 2>err || status=$?
    cat err
    [ "$status" -eq 1 ]
    grep -q "/dev/full: No space left on device" err
}

@test "a full file system: report and snapshot name ENOSPC, and leave nothing" {
    mkdir small
    mount -t tmpfs -o size=4k,nr_inodes=20 tmpfs small 2>/dev/null || skip "no right to mount"
    dd if=/dev/zero of=small/filler bs=4096 count=1 status=none
    status=0
    "$EPKIT" topo --from "$BATS_TEST_TMPDIR" --save small/snapshot.json >out 2>err || status=$?
    cat err
    umount_later=1
    [ "$status" -eq 1 ] && grep -q "No space left on device" err && [ "$(ls small)" = filler ] || umount_later=0
    umount small
    [ "$umount_later" -eq 1 ]
}

@test "the limit of file sizes is reported, without a signal" {
    # Applies to shared memory and to the output file.
    status=0
    with fsize=0 -- version 2> >(cat >err) >out || status=$?
    within 10 [ -s err ]
    cat err
    [ "$status" -eq 1 ]
    grep -q "limit of the file size" err
    run --separate-stderr with fsize=4096 -- "${ONE[@]}"
    echo "$status $stderr"
    [ "$status" -eq 1 ] || [ "$status" -eq 0 ]
    run ! grep -q SIGXFSZ <<<"$stderr"
}

@test "few descriptors: an error that says so, or the usual result" {
    # With fewer descriptors the dynamic linker cannot open libraries.
    for n in 4 6 10 20; do
        for arguments in version "${ONE[*]}" "doctor --json" "nics --devices lo"; do
            # shellcheck disable=SC2086 # words
            # shellcheck disable=SC2086 # words
            with "nofile=$n" -- $arguments >out 2>err || code=$?
            echo "$n: $arguments: ${code:-0} $(cat err)"
            [ "${code:-0}" -le 4 ] || grep -q "loading shared libraries" err
            nobody_lives
            code=0
        done
    done
}

@test "few descriptors with --from: not a usage error" {
    python3 -S "$EPKIT_SOURCE/tests/machines/machines.py" a4 a4
    local said=
    for n in 4 5 6 7; do # the test's own descriptors are some of them, and libraries need one
        for arguments in "topo --from a4" "env --check --from a4" "doctor --from a4"; do
            code=0
            # shellcheck disable=SC2086 # words
            with "nofile=$n" -- $arguments >out 2>err || code=$?
            echo "$n: $arguments: $code $(cat err)"
            [ "$code" -le 1 ] || [ "$code" -eq 127 ]
            if grep -q -- '--from\|a4.*Too many open files' err; then
                said=1
                [ "$code" -eq 1 ]
                [ "$(grep -c -- --help err)" -eq 0 ]
            fi
        done
    done
    [ "$said" ]
}

@test "no /dev/null: programs are started nevertheless" {
    unshare --mount true 2>/dev/null || skip "no mount namespaces here"
    # Only /dev/null, because the folders of tests may be below /dev.
    folder=$(mktemp -d /var/tmp/epkit-test.XXXXXX)
    # shellcheck disable=SC2016 # expanded by the inner shell
    printf '#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n' >"$folder/ssh"
    chmod +x "$folder/ssh"
    # shellcheck disable=SC2016 # expanded by the inner shell
    run --separate-stderr timeout 1200 unshare --mount sh -c 'mount -t tmpfs none /dev && exec "$@"' sh \
        "$EPKIT" launch --ssh "$folder/ssh" --connect-timeout 60 --checks skip --no-logs --hosts a -- sh -c 'cat && echo read'
    rm -r "$folder"
    echo "$status $output $stderr"
    [ "$status" -eq 0 ]
    [[ "$output" == *"a: read"* ]]
}

@test "the limit of descriptors is lowered while ranks run" {
    command -v prlimit >/dev/null || skip "no prlimit"
    "$EPKIT" "${LONG[@]}" --ranks 4 --only 2 --repeat 30 >out 2>err &
    launcher=$!
    within 40 grep -q passed out
    prlimit --pid "$launcher" --nofile=3
    # It continues or reports why it cannot; it never hangs.
    wait "$launcher" || status=$?
    cat err
    [ "${status:-0}" -le 1 ]
    nobody_lives
}

@test "a small stack" {
    for kb in 256 512 1024; do
        for arguments in "${ONE[*]}" "${ONE[*]} --boot threads" "topo" "doctor"; do
            # shellcheck disable=SC2086 # words
            run --separate-stderr with "stack=$kb" -- $arguments
            echo "$kb: $arguments: $status $stderr"
            [ "$status" -le 4 ]
        done
    done
    for kb in 32 255; do
        run -1 with "stack=$kb" -- topo
        [[ "$output" == *"at most $kb KiB (ulimit -Hs), and epkit needs 256" ]]
    done
}

@test "umask: files are readable by their owner, and writable only by the owner" {
    for mask in 0777 0000 0077 0022; do
        with "umask=$mask" -- topo --from / --save "snapshot.$mask" >out 2>err || [ $? -eq 4 ]
        [ "$(jq .epkit_snapshot "snapshot.$mask")" = 1 ]
        mode=$(stat -c %a "snapshot.$mask")
        echo "$mask: $mode"
        [[ "$mode" == 6?? ]]
        [[ "$mode" != *[2367]? && "$mode" != *[2367] ]] || [ "$mode" = 600 ]
    done
}

@test "no HOME, TMPDIR, PATH, TERM: as usual" {
    for variables in "-u HOME -u TMPDIR" "-u PATH" "PATH=" "-i" "TERM= COLUMNS=0" "COLUMNS=-1" "POSIXLY_CORRECT=1" \
        "LC_ALL=nonsense" "LIBSMARTCOLS_DEBUG=all" "TZ=:/dev/zero"; do
        # shellcheck disable=SC2086 # words
        run --separate-stderr env $variables "$EPKIT" "${ONE[@]}"
        echo "$variables: $status $output $stderr"
        [ "$status" -eq 0 ]
        [[ "$output" == *"1/1 cases passed"* ]]
    done
}

@test "other locales: numbers have decimal points, and texts do not change" {
    locale -a | grep -qi 'de_DE.utf' || skip "no German locale"
    for locale in $(locale -a | grep -Ei '^(de_DE|tr_TR)'); do
        LC_ALL=$locale "$EPKIT" "${ONE[@]}" --json >"$locale.json"
        valid test "$locale.json"
    done
}

@test "the working folder is deleted or cannot be entered" {
    mkdir gone
    cd gone
    rmdir "$BATS_TEST_TMPDIR/gone"
    "$EPKIT" "${ONE[@]}"
    run -2 --separate-stderr epkit run
    [[ "$stderr" == *"No such file or directory"* ]]
    run -2 --separate-stderr epkit topo --save x.json
    cd "$BATS_TEST_TMPDIR"
}

@test "a pipe that is set to O_NONBLOCK loses nothing" {
    with nonblock -- completion bash | (sleep 1 && cat) >through
    "$EPKIT" completion bash >plain
    cmp through plain
}

@test "epkit is killed: its child processes end with it" {
    # shellcheck disable=SC2016 # is for the shells that are run
    script='trap "" TERM; echo $$ >>pids; setsid sh -c "echo \$\$ >>pids; exec sleep 3000" & sleep 3000 & echo $! >>pids; touch up; wait'
    printf '#!/bin/sh\n%s\n' "$script" >ssh
    chmod +x ssh
    echo node1 >hosts
    for arguments in "nics --devices lo -- ./ssh" "doctor --hosts hosts --ssh ./ssh"; do
        rm -f up pids
        # shellcheck disable=SC2086 # words
        "$EPKIT" $arguments >out 2>err &
        launcher=$!
        within 20 [ -e up ]
        kill -KILL "$launcher"
        wait "$launcher" || true
        [ "$(wc -l <pids)" -ge 2 ]
        within 30 gone pids
    done
}

@test "a command under nics may leave background processes, and its exit code is returned" {
    # shellcheck disable=SC2016
    run -41 epkit nics --devices lo -- sh -c 'sleep 3000 >/dev/null 2>&1 3>&- & echo $! >>pids; exit 41'
    kill -0 "$(cat pids)"
    # shellcheck disable=SC2016
    run -139 epkit nics --devices lo -- sh -c 'kill -SEGV $$'
}

@test "epkit run is ended by any signal: no folder remains" {
    for number in QUIT KILL ALRM USR1 XCPU; do
        start -- run --output fresh
        within 20 somebody_lives
        sleep 0.3
        kill "-$number" "$launcher"
        wait "$launcher" || true
        [ "$(find . -name 'fresh*')" = "" ]
        within 10 nobody_lives
    done
}

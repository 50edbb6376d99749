#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# A command with --json writes one JSON document even if it is refused or fails early. Standard output is empty only after
# a usage error; if a signal ended the command, it is one document or empty.
#
# shellcheck disable=SC2154 # $stderr is set by run

load common

setup() {
    cd "$BATS_TEST_TMPDIR" || return
    export EPKIT_TEST_MARK="$BATS_TEST_TMPDIR"
    # Without variables of a cluster or launcher that runs the tests.
    unset "${!SLURM_@}" "${!OMPI_@}" "${!PMI_@}" RANK WORLD_SIZE MASTER_ADDR EPKIT_BACKEND
    export EPKIT_SSH_PORT=0
    : >file
    mkdir empty run hang root
    : >root/file
    echo '[Cluster 0] 1: 2 ms' >run/worker-a.log
    printf '#!/bin/sh\nexec sleep 600\n' >slow
    printf '#!/bin/sh\necho "ssh: Could not resolve hostname: Name or service not known" >&2\nexit 255\n' >noname
    printf '#!/bin/sh\necho "Unable to connect to the server: no such host" >&2\nexit 1\n' >nocluster
    chmod +x slow noname nocluster
    mkfifo fifo
}

teardown() {
    living | xargs --no-run-if-empty kill -KILL
    umount -l hang 2>/dev/null || true
}

# judged COMMAND CODE FILE: one document of that command, valid by its schema or by ending.json, with that exit code.
# No report has both errors and an exit code. Errors have all details, unless a signal ended the command.
judged() {
    local schema="cmd/$1/schema.json" ending
    ending=$(jq -s --arg command "$1" --argjson code "$2" '
        if length != 1 then "not one document" else .[0] |
            (has("errors") and has("exit_code")) as $ending |
            if .subcommand != $command then "another command"
            elif .schema_version != 1 then "another version"
            elif $ending and .exit_code != $code then "another exit code"
            elif $ending and $code <= 128 and (.errors | length == 0 or
                any(.what == "" or (has("where") and has("why") and has("hint") | not))) then "an error without details"
            elif (.verdict // .result // "" | length) == 0 then "no verdict"
            else $ending end
        end' "$3")
    [[ "$ending" == true || "$ending" == false ]] || { echo "$3: $ending" && return 1; }
    [ "$ending" = false ] || schema=common/ending.json
    python3 -S "$EPKIT_SOURCE/tests/cli/validate.py" "$EPKIT_SOURCE/$schema" "$3"
}

# ends CODE ARGUMENT...: one document, with the same errors as on standard error
ends() {
    local code="$1"
    shift
    run --separate-stderr epkit "$@"
    echo "epkit $*: $status: $output$stderr"
    [ "$status" -eq "$code" ]
    echo "$output" >document
    judged "$1" "$code" document
}

# empty ARGUMENT...: a usage error
empty() {
    run --separate-stderr epkit "$@"
    echo "epkit $*: $status: $output$stderr"
    [ "$status" -eq 2 ]
    [ -z "$output" ]
    [ -n "$stderr" ]
}

# Command lines of COMMAND for an early failure of KIND: "CODE ARGUMENT...", one per line; "-": not applicable. Each
# command with --json and each kind needs a row: the test fails without one.
early() {
    case $1:$2 in
        bench:unreadable | test:unreadable | run:unreadable) echo - ;; # read nothing that a user names
        deploy:unreadable)
            echo "2 check -f none.yaml --from none.json"
            echo "2 check -f empty"
            echo "2 check --gpus 8 --from none.json"
            ;;
        doctor:unreadable)
            echo "2 --from none"
            echo "2 --hosts none"
            ;;
        env:unreadable | nics:unreadable | topo:unreadable) echo "2 --from none" ;;
        install:unreadable)
            echo "2 plan none.yaml"
            echo "2 plan ./empty"
            echo "2 status --root root"
            echo "2 verify --root root"
            ;;
        launch:unreadable)
            echo "2 --hostfile none hostname"
            echo "2 --hosts a --workload none"
            ;;
        parse:unreadable)
            echo "2 none"
            echo "2 empty"
            echo "2 --reference none file"
            ;;
        watch:unreadable)
            echo "2 empty"
            echo "2 --timeout 1 none"
            echo "2 --reference none file"
            ;;
        report:unreadable)
            echo "2 none"
            echo "2 --compare none run"
            ;;
        triangulate:unreadable)
            echo "2 --hosts @none --run x{hosts}"
            ;;

        bench:unwritable | doctor:unwritable | env:unwritable | parse:unwritable | test:unwritable | watch:unwritable) echo - ;;
        triangulate:unwritable) echo - ;;
        deploy:unwritable) echo "1 check --gpus 8 --kubectl ./nocluster --save file/x" ;;
        install:unwritable) echo "1 apply ./recipe.yaml --state /file/x --root $PWD/root" ;;
        launch:unwritable) echo "1 --out file/run --checks skip --hosts localhost hostname" ;;
        nics:unwritable) echo "1 --devices lo --output file/x" ;;
        report:unwritable) echo "1 run --output file/x" ;;
        run:unwritable)
            echo "2 --output file"
            echo "2 --output file/x/y"
            ;;
        topo:unwritable) echo "2 --save file/x" ;;

        bench:host | test:host | run:host) echo - ;; # below, by variables
        env:host | install:host | nics:host | parse:host | report:host | topo:host | watch:host) echo - ;;
        deploy:host) echo "1 check --gpus 8 --kubectl ./nocluster" ;;
        doctor:host) echo "1 --hosts a,b --ssh ./noname" ;;
        launch:host)
            echo "1 --no-logs --ssh ./noname --hosts a,b hostname"
            echo "2 --no-logs hostname"
            ;;
        triangulate:host) echo "3 --hosts a,b --run false{hosts}" ;;

        bench:gpu) echo "4 --backend cuda" ;;
        test:gpu) echo "4 intranode --backend cuda" ;;
        run:gpu) echo - ;; # chooses itself
        doctor:gpu | topo:gpu | env:gpu) echo "4 --from empty" ;;
        nics:gpu)
            echo "4 --from empty"
            echo "2 --devices mlx5_77"
            ;;
        deploy:gpu | install:gpu | launch:gpu | parse:gpu | report:gpu | triangulate:gpu | watch:gpu) echo - ;;
        *) false ;;
    esac
}

json_commands() {
    local command
    for command in $(all_commands); do
        if epkit help "$command" | grep -q -- '--json ' && [ "$command" != version ]; then # version cannot fail
            echo "$command"
        fi
    done
}

# every KIND: the rows of all commands
every() {
    local command code words n=0
    cat >recipe.yaml <<'END'
recipe: tiny
title: a file
steps:
  - id: before
    type: file
    title: a file
    why: for the test
    budget: 5s
    path: /etc/epkit-test-tiny
    content: x
END
    for command in $(json_commands); do
        early "$command" "$1" >rows
        while read -r code words; do
            [ "$code" != - ] || continue
            # shellcheck disable=SC2086 # words
            ends "$code" "$command" --json $words
            n=$((n + 1))
        done <rows
    done
    echo "$n command lines"
    [ "$n" -ge 4 ]
}

nobody_lives() {
    [ -z "$(living)" ]
}

@test "input that cannot be read: one document of every command" {
    every unreadable
}

@test "output that cannot be written" {
    every unwritable
}

@test "hosts that do not exist" {
    every host
    # Ranks whose launcher names a host that cannot be resolved.
    for words in "test intranode" bench; do
        # shellcheck disable=SC2086 # words
        RANK=1 WORLD_SIZE=2 MASTER_ADDR=none.invalid MASTER_PORT=29999 EPKIT_SECRET=x EPKIT_TIMEOUT_MS=1000 \
            run --separate-stderr epkit $words --json --boot tcp --timeout 1
        echo "$status: $output$stderr"
        [ "$status" -eq 1 ] || [ "$status" -eq 2 ]
        [ -z "$output" ] # it is rank 0 that writes
        # shellcheck disable=SC2086 # words
        RANK=0 WORLD_SIZE=2 MASTER_ADDR=none.invalid MASTER_PORT=29999 EPKIT_SECRET=x EPKIT_TIMEOUT_MS=1000 \
            run --separate-stderr epkit $words --json --boot tcp --timeout 1
        echo "$status: $output$stderr"
        [ "$status" -ne 0 ]
        echo "$output" >document
        judged "${words%% *}" "$status" document
    done
}

@test "no GPUs and NICs" {
    [ "$(EPKIT_BACKEND=cuda "$EPKIT" test intranode "${SMALL[@]}" --only 2 >/dev/null 2>&1; echo $?)" -eq 4 ] ||
        skip "there is a cuda backend"
    every gpu
}

@test "a deadline that expires" {
    printf 'a\n' >hosts
    ends 1 doctor --json --hosts hosts --ssh ./slow --timeout 1
    ends 1 launch --json --no-logs --hosts a --ssh ./slow --connect-timeout 1 hostname
    ends 1 deploy --json check --gpus 8 --kubectl ./slow --timeout 1
    ends 3 triangulate --json --hosts a,b --run 'sleep 600; echo {hosts}' --timeout 1
    ends 4 watch --json --idle 1 file
    for words in "test intranode" bench; do
        # shellcheck disable=SC2086 # words
        RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 10000)) EPKIT_SECRET=x EPKIT_TIMEOUT_MS=1000 \
            ends 1 $words --json --boot tcp --timeout 1
    done
}

@test "a machine on a file system that does not answer: its deadline, and one document" {
    why=$("$EPKIT_SOURCE/tests/cli/hang.py" --check 2>&1) || skip "$why"
    for command in doctor env nics topo; do
        run --separate-stderr "$EPKIT_SOURCE/tests/cli/hang.py" hang timeout 120 "$EPKIT" "$command" --json --timeout 1 --from hang
        echo "$command: $status: $output$stderr"
        [ "$status" -eq 1 ]
        [[ "$stderr" == *"reading hang took longer than 1 s"* ]]
        echo "$output" >document
        judged "$command" 1 document
        [ "$(jq -r '.errors[0].where' document)" = hang ]
    done
}

# whole_or_empty COMMAND CODE: the file "document" is one document, or empty
whole_or_empty() {
    [ ! -s document ] || judged "$1" "$2" document
}

# struck SIGNAL ARGUMENT...: sends the signal to the command while it waits for input that never arrives
struck() {
    local signal="$1" code=0
    shift
    env --default-signal=HUP,INT,QUIT,TERM "$EPKIT" "$@" >document 2>err <fifo &
    struck=$!
    exec 9>fifo
    # Wait until the command has opened its standard input and is blocked.
    within 10 waits "$struck"
    kill "-$signal" "$struck"
    limited 20 tail --pid="$struck" -f /dev/null
    wait "$struck" || code=$?
    exec 9>&-
    echo "SIG$signal: epkit $*: $code: $(cat document err)"
    [ "$code" -eq $((128 + $(kill -l "$signal"))) ]
    whole_or_empty "$1" "$code"
}

# It waits for a child, or it sleeps and has used no CPU time for 0.3 s.
waits() {
    local before after
    ! pgrep --parent "$1" >/dev/null || return 0
    before=$(cut -d' ' -f3,14,15 "/proc/$1/stat") || return
    sleep 0.3
    after=$(cut -d' ' -f3,14,15 "/proc/$1/stat") || return
    [ "$before" = "$after" ] && [ "${after%% *}" = S ] && grep -q epkit "/proc/$1/comm"
}

@test "a signal: a whole document or none, and the exit code is that of the signal" {
    printf 'a\n' >hosts
    for signal in TERM INT HUP; do
        struck "$signal" parse --json -
        struck "$signal" watch --json -
        struck "$signal" deploy --json check --file - --from file
        struck "$signal" deploy --json check --gpus 8 --kubectl ./slow
        struck "$signal" doctor --json --hosts hosts --ssh ./slow --timeout 600
        struck "$signal" launch --json --no-logs --hosts a --ssh ./slow --connect-timeout 600 hostname
        struck "$signal" triangulate --json --hosts a,b --run 'sleep 600; echo {hosts}'
        struck "$signal" nics --json --devices lo --interval 600
    done
    # No child process remains.
    [ -z "$(living)" ]
}

@test "a signal while the document is written to a slow reader: the whole document" {
    limited 20 python3 - "$EPKIT" <<'END'
import fcntl, json, os, signal, subprocess, sys, time

for number in signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT:
    reader, writer = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    command = subprocess.Popen(["env", "--default-signal", sys.argv[1], "doctor", "--list", "--json"], stdout=writer)
    os.close(writer)
    text = os.read(reader, 1)
    command.send_signal(number)
    while piece := os.read(reader, 2048):
        text += piece
        time.sleep(0.01)
    assert command.wait() == -number, command.returncode
    assert json.loads(text)["subcommand"] == "doctor" and len(text) > 20000
END
}

@test "a signal to ranks that run: a whole document of test, bench and run, or none" {
    for words in "test intranode --ranks 3 --tokens 512 --hidden 4096 --repeat 1000" "bench --ranks 2 --iters 100000" \
        "run --output none"; do
        # shellcheck disable=SC2086 # words
        env --default-signal=HUP "$EPKIT" $words --json >document 2>err &
        struck=$!
        within 20 pgrep --parent "$struck" >/dev/null
        sleep 0.2
        kill -TERM "$struck"
        code=0
        wait "$struck" || code=$?
        echo "$words: $code: $(cat document err)"
        [ "$code" -eq 143 ]
        whole_or_empty "${words%% *}" 143
    done
    # mpirun, which bench starts, has three seconds to end.
    within 20 nobody_lives
}

@test "a signal while a machine is read" {
    why=$("$EPKIT_SOURCE/tests/cli/hang.py" --check 2>&1) || skip "$why"
    for command in doctor env nics topo; do
        "$EPKIT_SOURCE/tests/cli/hang.py" hang timeout 120 "$EPKIT" "$command" --json --from hang >document 2>err &
        hanging=$!
        within 10 pgrep -f "^$EPKIT $command --json --from hang" >number
        sleep 0.3
        kill -TERM "$(cat number)"
        wait "$hanging" || true
        cat document err
        whole_or_empty "$command" 143
    done
}

@test "a launch that cannot start: hosts, variables, files" {
    : >none
    printf 'a slots=x\n' >bad
    ends 2 launch --json --hostfile bad hostname
    ends 2 launch --json --hostfile none hostname
    ends 2 launch --json --hosts 'a[' hostname
    ends 2 launch --json --hosts a ib-write-bw
    EPKIT_SSH_PORT=x ends 2 launch --json --hosts a hostname
    # The error names the missing secret.
    ends 2 launch --json --hosts a --env HF_TOKEN_OF_NOBODY hostname
    [[ "$(jq -r '.errors[0].what' <<<"$output")" == *HF_TOKEN_OF_NOBODY* ]]
    # A folder of logs that cannot be created.
    ends 1 launch --json --out file/run --checks skip --hosts localhost hostname
    [[ "$(jq -r .verdict <<<"$output")" == *file/run* ]]
    # Nodes that do not answer are in the report.
    ends 1 launch --json --no-logs --checks skip --ssh ./noname --hosts a hostname
    [ "$(jq -r '.hosts[0].failed_at' <<<"$output")" != null ]
}

@test "a usage error leaves standard output empty" {
    empty launch --json --nonsense
    empty launch --json --hosts a --hostfile file hostname
    empty launch --json --hosts a
    empty launch --json --hosts a --env RANK=1 hostname
    empty doctor --json --fix
    empty doctor --json --only nothing
    empty env --json --format sh
    empty test --json intranode --nodes 2
    empty bench --json --routing nonsense
    empty report --json --compare a
    empty triangulate --json
    empty deploy --json check
    empty nics --json --prometheus
    empty install --json plan
    empty install --json show debian-tools
    [[ "$stderr" == *"--json does not apply to show"* ]]
}

@test "what, where, why and hint are separate" {
    ends 2 topo --json --from none
    [ "$(jq -r '.errors[0].where' <<<"$output")" = --from ]
    [[ "$(jq -r '.errors[0].why' <<<"$output")" == "none: "* ]]
    [ "$(jq -r '.errors[0].hint' <<<"$output")" = "'epkit topo --help' explains it" ]
    [[ "$stderr" == *"$(jq -r .verdict <<<"$output")"*"$(jq -r '.errors[0].hint' <<<"$output")"* ]]
    # Names with line breaks and invalid UTF-8 still result in one document.
    ends 2 parse --json $'none\n{"a": \xff\xfe'
}

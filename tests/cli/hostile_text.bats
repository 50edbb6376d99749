#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Untrusted text in names, options, answers and files never reaches the terminal unfiltered.
#
# shellcheck disable=SC2154,SC2094 # $stderr is set by run; no file is read and written

load common

# A terminal title, colours, bidirectional overrides, isolates, a line separator, invalid UTF-8, and a line that looks
# like one of epkit.
EVIL=$'\e]0;x\a\e[31mred\u202eevil\u2066\u200b\ufeff\u2028\u0085\x7f\U000e0041\xff\xe2\x80\nepkit: all is well'

setup() {
    cd "$BATS_TEST_TMPDIR" || return 1
    export EPKIT_TEST_MARK="$BATS_TEST_TMPDIR"
}

# clean FILE...: valid UTF-8, without invisible characters except newlines and tabs
clean() {
    python3 -S "$EPKIT_SOURCE/tests/cli/hidden.py" "$@"
}

# say ARGUMENT...: runs epkit. At the end of the test both streams of all runs are clean, and no line is an injected one.
say() {
    status=0
    timeout 1200 "$EPKIT" "$@" >out 2>err </dev/null || status=$?
    cat out err >>"$BATS_TEST_TMPDIR/said"
}

teardown() {
    cd "$BATS_TEST_TMPDIR" || return 1
    touch said
    clean said
    ! grep --text '^epkit: all is well' said || return 1
}

@test "commands, options and arguments" {
    for command in $(all_commands); do
        say "$command" "--$EVIL" "$EVIL"
        [ "$status" -eq 2 ]
        say "$command" "$EVIL" "$EVIL"
        [ "$status" -ne 0 ]
        for option in $(options "$command"); do
            case "$command $option" in
            *--help | *--output) ;;
            *) say "$command" "$option=$EVIL" --json ;;
            esac
        done
    done
    say "$EVIL"
    [ "$status" -eq 2 ]
    say "--$EVIL"
}

@test "names of files" {
    say run --output "no/such$EVIL"
    [ "$status" -eq 2 ]
    say topo --save "no/such$EVIL"
    say topo --from "no$EVIL"
    say doctor --hosts "no$EVIL"
    say nics --devices lo --output "no/such$EVIL"
    say nics --devices lo -- "./no$EVIL"
    [ "$status" -eq 127 ]
    say env --from / -- "./no$EVIL"
    say topo --save "snap$EVIL"
    [ -e "snap$EVIL" ] || [ "$status" -ne 0 ]
}

@test "variables" {
    for name in EPKIT_BACKEND EPKIT_HOST_ISA TERM LANG PMI_RANK LD_LIBRARY_PATH NCCL_IB_HCA; do
        (
            export "$name=$EVIL"
            say test intranode "${SMALL[@]}" --only 1
            say doctor
        )
    done
}

@test "a machine whose devices have such names" {
    name=$(printf '%s' "$EVIL" | tr -d '\n')
    python3 -S "$EPKIT_SOURCE/tests/machines/machines.py" a4 a4
    # File names have no slash.
    mv a4/sys/class/infiniband/mlx5_0 "a4/sys/class/infiniband/m$name"
    mv a4/sys/class/net/gpu1rdma0 "a4/sys/class/net/g$name"
    for command in topo "topo --json" "doctor --verbose" "doctor --json" env "env --json" nics "nics --json" \
        "nics --prometheus"; do
        # shellcheck disable=SC2086 # words
        say $command --from a4
        echo "$command: $status"
        [ "$status" -eq 0 ] || [ "$status" -eq 3 ]
        [[ "$command" != *json* ]] || jq . out >/dev/null
    done
    # All rows are printed.
    [ "$(epkit topo --from a4 --json | jq '.nics | length')" -eq 8 ]
    say topo --from a4 --save snapshot.json
    clean snapshot.json
}

# answer TEXT ERROR: a fake ssh with that output
answer() {
    printf '%s' "$1" >answer
    printf '%s' "$2" >error
    # shellcheck disable=SC2016 # is for the script
    printf '#!/bin/sh\ncat answer\ncat error >&2\nexit 255\n' >ssh
    chmod +x ssh
}

@test "answers and errors of other nodes; what JSON escapes as well" {
    python3 -S "$EPKIT_SOURCE/tests/cli/hidden.py" --answer >document.json
    printf 'node1\nnode2\n' >hosts
    answer "$(cat document.json)" "$EVIL"
    say doctor --hosts hosts --ssh ./ssh
    cat out err
    [ "$status" -eq 3 ]
    say doctor --hosts hosts --ssh ./ssh --json
    jq . out >/dev/null
    answer "no document" "$EVIL"
    say doctor --hosts hosts --ssh ./ssh
    [ "$status" -eq 1 ]
    say doctor --hosts hosts --ssh ./ssh --json
    [ "$(jq '.hosts | length' out)" -eq 2 ]
    say doctor --hosts hosts --ssh "./no$EVIL"
    [ "$status" -eq 1 ]
    printf 'node1\n%s\n' "$EVIL" >hosts
    say doctor --hosts hosts --ssh ./ssh
    [ "$status" -eq 2 ]
}

@test "the folder of a run, and what is written of it" {
    unset JOBSET_NAME LWS_LEADER_ADDRESS JOB_COMPLETION_INDEX SLURM_JOB_NODELIST
    mkdir run
    jq -n --arg e "$EVIL" '{schema_version: 1, epkit: $e, job: $e, command: $e, argv: [$e], reason: $e, exit_code: 1, failed_host: $e,
        hosts: [{name: $e, why: $e, gpu: $e}], environment: {($e): $e}, findings: [{id: $e, severity: $e, text: $e, nodes: [$e]}]}' >run/run.json
    printf '%s\n' "$EVIL" "a: NCCL WARN $EVIL" >run/worker-a.log
    for words in 'parse run' 'report run --history history --output page'; do
        # shellcheck disable=SC2086 # words
        say $words
        # shellcheck disable=SC2086 # words
        say $words --json
    done
    printf '#!/bin/sh\n' >ssh
    chmod +x ssh
    valid_utf8=$(printf '%s' "$EVIL" | iconv -c -f UTF-8 -t UTF-8) || true
    say launch --ssh ./ssh --hosts a --checks skip --out new -x "NAME=$valid_utf8" -- true "$valid_utf8"
    [ -s new/testbed-logs/run.json ]
    clean history page/* new/testbed-logs/*
}

@test "values truncated within a character: all rows are printed" {
    printf 'node1\nnode2\n' >hosts
    # shellcheck disable=SC2016 # is for the script
    printf '#!/bin/sh\nfor word; do case $word in node*) cat "$word" ;; esac; done\n' >ssh
    chmod +x ssh
    # Values longer than a cell, truncated at each byte of a character.
    for pad in "" a ab; do
        for node in node1 node2; do
            python3 -S "$EPKIT_SOURCE/tests/cli/hidden.py" --long "$pad" "$node" >"$node"
        done
        say doctor --hosts hosts --ssh ./ssh --json
        expected=$(jq '[.differences[].others | length] | add' out)
        say doctor --hosts hosts --ssh ./ssh
        cat out
        [ "$expected" -ge 3 ]
        [ "$(sed -n '/^Differences:/,/^$/p' out | grep -c ' node[12] ')" -eq "$expected" ]
        [ "$(sed -n '/^Findings:/,$p' out | grep -c '^warning')" -eq 2 ]
    done
}

@test "endless and strange files of hosts: an immediate error" {
    mkfifo fifo
    printf 'node1\0node2\n' >zero
    truncate --size=9M holes
    truncate --size=1T huge
    head -c 9000000 <(yes '# a comment') >comments
    head -c 2000 /dev/zero | tr '\0' x >line
    ln -s loop loop
    for file in /dev/zero /dev/full fifo . zero holes huge comments line loop /dev/stdin /proc/self/mem ""; do
        status=0
        timeout 1200 "$EPKIT" doctor --hosts "$file" --ssh /bin/true >out 2>err </dev/zero || status=$?
        echo "$file: $status $(cat err)"
        [ "$status" -eq 2 ]
        [ ! -s out ]
    done
    mkdir logs
    echo 'a: NCCL WARN' >logs/worker-a.log
    run -2 --separate-stderr thrifty 5 "$EPKIT" report logs --history huge
    [[ "$stderr" == *"--history huge: File too large"* ]]
}

@test "a terminal gets only the control sequences of epkit" {
    command -v script >/dev/null || skip "no script(1)"
    TERM=xterm script -qec "timeout 1200 $EPKIT test intranode --ranks 2 --tokens 16 --hidden 512 --only 1 --seed 1" \
        /dev/null >typescript </dev/null
    grep -q $'\e\\[32mpassed\e\\[0m' typescript
    TERM=xterm script -qec "timeout 1200 $EPKIT topo --from '/no"$'\e'"[5m'" /dev/null >typescript </dev/null || true
    grep -qF '/no?[5m' typescript
    NO_COLOR=1 TERM=xterm script -qec "timeout 1200 $EPKIT test intranode --ranks 2 --tokens 16 --hidden 512 --only 1" \
        /dev/null >typescript </dev/null
    run ! grep -q $'\e' typescript
}

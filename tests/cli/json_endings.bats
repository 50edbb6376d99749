#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# A command with --json writes one JSON document also when it cannot begin: what reads it need not know why.
#
# shellcheck disable=SC2154 # $stderr is set by run

load common

setup() {
    cd "$BATS_TEST_TMPDIR" || return
}

# ends SCHEMA CODE ARGUMENT...: one document that fits the schema and says why; its exit code is that of the command
ends() {
    local schema="$1" code="$2"
    shift 2
    run --separate-stderr epkit "$@"
    echo "epkit $*: $status: $output$stderr"
    [ "$status" -eq "$code" ]
    valid "$schema" <(echo "$output")
    [ "$(jq -r .verb <<<"$output")" = "$1" ]
    [ "$(jq -r .exit_code <<<"$output")" -eq "$code" ]
    [ -n "$(jq -r .verdict <<<"$output")" ]
    if [ "$schema" = ending ]; then
        # What a person reads is what a program reads.
        [[ "$stderr" == *"$(jq -r .verdict <<<"$output")"* ]]
    fi
}

# What each verb is asked for that it refuses with exit code 2, one word a line. A new verb with --json needs a row.
impossible() {
    case $1 in
        bench | run) ;; # EPKIT_BACKEND
        deploy) printf '%s\n' check -f none.yaml --from none.json ;;
        doctor | env | nics | topo) printf '%s\n' --from none ;;
        install) printf '%s\n' plan none.yaml ;;
        launch) printf '%s\n' --hostfile none hostname ;;
        parse | report) echo none ;;
        test) echo intranode ;; # EPKIT_BACKEND
        triangulate) printf '%s\n' --hosts a,a --run 'x {hosts}' ;;
        *) false ;;
    esac
}

@test "every verb with --json that cannot begin says so in one document" {
    local n=0
    export EPKIT_BACKEND=none
    for verb in $(verbs); do
        epkit help "$verb" | grep -q -- '--json ' || continue
        [ "$verb" != version ] || continue # cannot fail
        impossible "$verb" >words
        mapfile -t words <words
        ends ending 2 "$verb" --json "${words[@]}"
        n=$((n + 1))
    done
    [ "$n" -ge 10 ]
}

@test "a launch that cannot begin: hosts, options, variables, files" {
    : >empty
    printf 'a slots=x\n' >bad
    ends ending 2 launch --json --hostfile none hostname
    ends ending 2 launch --json --hostfile bad hostname
    ends ending 2 launch --json --hostfile empty hostname
    ends ending 2 launch --json --hosts a --hostfile bad hostname
    ends ending 2 launch --json --hosts 'a[' hostname
    ends ending 2 launch --json --hosts a
    ends ending 2 launch --json --hosts a --env HF_TOKEN_OF_NOBODY hostname
    ends ending 2 launch --json --hosts a --env RANK=1 hostname
    ends ending 2 launch --json --hosts a --workload none
    ends ending 2 launch --json --hosts a --topology none hostname
    ends ending 2 launch --json --hosts a ib-write-bw
    EPKIT_SSH_PORT=x ends ending 2 launch --json --hosts a hostname
    # The secret that was not found is named, and no value is.
    run --separate-stderr epkit launch --json --hosts a --env HF_TOKEN_OF_NOBODY hostname
    [[ "$(jq -r '.errors[0]' <<<"$output")" == *HF_TOKEN_OF_NOBODY* ]]
}

@test "a launch whose nodes do not answer has its report" {
    printf '#!/bin/sh\nexit 255\n' >ssh
    chmod +x ssh
    ends launch 1 launch --json --no-logs --checks skip --ssh ./ssh --hosts localhost --port 1 hostname
    [ "$(jq -r '.hosts[0].failed_at' <<<"$output")" != null ]
}

@test "a folder that cannot be made for the logs" {
    : >file
    run --separate-stderr epkit launch --json --out file/run --checks skip --hosts localhost --port 1 hostname
    [ "$status" -eq 1 ]
    valid ending <(echo "$output")
    [[ "$(jq -r .verdict <<<"$output")" == *file/run* ]]
}

@test "words that are no options leave standard output empty: no --json was understood" {
    run --separate-stderr epkit launch --json --nonsense
    [ "$status" -eq 2 ]
    [ -z "$output" ]
}

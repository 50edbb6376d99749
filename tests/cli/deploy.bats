#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit deploy check without a cluster: files, refusals, kubectl that is absent, silent or broken. What it says about real
# clusters is compared with them in tests/deploy/cluster.bats.
#
# shellcheck disable=SC2154,SC2030,SC2031 # set by run

load common

setup() {
    cd "$BATS_TEST_TMPDIR" || exit 1
    # The job and the cluster of the fuzz target's corpus: they fit each other.
    tr '\0' '\n' <"$EPKIT_SOURCE/tests/fuzz/corpus/deploy/job" >both
    sed '$d' both >job.yaml
    tail -n 1 both >cluster.json
}

@test "a job that fits its saved cluster: one line, exit code 0" {
    run --separate-stderr epkit deploy check -f job.yaml --from cluster.json
    [ "$status" -eq 0 ]
    [ "$output" = "Job j can run on this cluster (v1.33.5-gke.1162000): 2 pods." ]
    [ -z "$stderr" ]
    epkit deploy check -f - --from cluster.json <job.yaml
    epkit deploy check -f job.yaml --from cluster.json --json | tee json | valid deploy
    [ "$(jq -c '[.will_run, .findings]' json)" = '[true,[]]' ]
}

@test "a finding: verdict, table, reason, what to do; exit code 3" {
    jq '.items.secrets = []' cluster.json >changed.json
    run --separate-stderr epkit deploy check -f job.yaml --from changed.json
    [ "$status" -eq 3 ]
    [ "${lines[0]}" = "Job j will not run: the kubelet will say 'secret \"keys\" not found'." ]
    [[ "$output" == *"do:  create the Secret pull in namespace ns"* ]]
    code=0
    epkit deploy check -f job.yaml --from changed.json --json >json || code=$?
    [ "$code" -eq 3 ]
    valid deploy json
    [ "$(jq '.findings | length' json)" -eq 2 ]
}

@test "what was not read is named, and nothing is promised" {
    jq 'del(.items.nodes) | .unread.nodes = "forbidden"' cluster.json >changed.json
    run --separate-stderr epkit deploy check -f job.yaml --from changed.json
    [ "$status" -eq 1 ]
    [[ "$output" == "Nothing can be said about Job j: nodes were not read."* ]]
    [[ "$stderr" == *"nodes could not be read"*"forbidden"* ]]
    code=0
    epkit deploy check -f job.yaml --from changed.json --json >json || code=$?
    [ "$code" -eq 1 ]
    valid deploy json
    [ "$(jq .will_run json)" = null ]
}

@test "quotas: what they count, what containers must state, scopes, defaults of the namespace" {
    # with FILTER: findings about a cluster that is changed so
    with() {
        jq "$1" cluster.json >changed.json
        epkit deploy check -f job.yaml --from changed.json --json >json || [ $? -eq 3 ]
        jq -r '.findings[] | .id + ": " + .says' json
    }
    quota() { echo ".items.limitranges = ${2:-[]} | .items.resourcequotas = [{metadata: {name: \"q\", namespace: \"ns\"}, spec: $1}]"; }
    [ "$(with "$(quota '{hard: {"requests.cpu": "8", "limits.memory": "8Gi", memory: "8Gi"}}')")" = \
        "quota-unstated: failed quota: q: must specify limits.memory for: c; memory for: c" ]
    # A LimitRange states it for them; the job states its CPU itself.
    [ -z "$(with "$(quota '{hard: {"limits.memory": "8Gi"}}' '[{metadata: {name: "l", namespace: "ns"}, spec: {limits: [{type: "Container", default: {memory: "1Gi"}}]}}]')")" ]
    [ -z "$(with "$(quota '{hard: {"requests.cpu": "8", "limits.cpu": "8"}}')")" ]
    # The short name means requests.
    [ "$(with "$(quota '{hard: {cpu: "700m"}}')")" = \
        "namespace-quota: exceeded quota: q, requested: cpu=500m, used: cpu=500m, limited: cpu=700m" ]
    # Only pods in the scope of a quota count.
    [ -z "$(with "$(quota '{hard: {cpu: "700m"}, scopes: ["Terminating"]}')")" ]
    [ -n "$(with "$(quota '{hard: {cpu: "700m"}, scopes: ["NotTerminating"]}')")" ]
    [ -z "$(with "$(quota '{hard: {pods: "0"}, scopeSelector: {matchExpressions: [{scopeName: "PriorityClass", operator: "In", values: ["high"]}]}}')")" ]
    # Saved before LimitRanges were read: nothing is guessed.
    [ -z "$(with "$(quota '{hard: {memory: "8Gi"}}') | del(.items.limitranges)")" ]
}

# refused TEXT ARGUMENT...
refused() {
    local text=$1
    shift
    run --separate-stderr epkit deploy "$@"
    echo "$stderr"
    [ "$status" -eq 2 ]
    [ -z "$output" ]
    [[ "$stderr" == *"$text"* ]]
}

@test "wrong usage and files that cannot be used" {
    refused "either --file MANIFEST or --gpus N" check
    refused "either --file MANIFEST or --gpus N" check -f job.yaml --gpus 8
    refused "not a multiple of 8" check --gpus 12
    refused "--required needs --topology" check --gpus 8 --required
    refused "--topology needs --queue" check --gpus 8 --topology rack
    refused "--from reads a file" check --gpus 8 --from cluster.json --context c
    refused "No such file" check -f nothing.yaml --from cluster.json
    refused "No such file" check -f job.yaml --from nothing.json
    printf 'a: 1\na: 2\n' >twice.yaml
    refused "twice.yaml: line 2: key 'a' is there twice" check -f twice.yaml --from cluster.json
    printf 'kind: ConfigMap\n' >none.yaml
    refused "no JobSet, no LeaderWorkerSet and no Job" check -f none.yaml --from cluster.json
    # More groups of pods than are compared: refused, for nothing would be said of the rest.
    jq -n '{kind: "JobSet", metadata: {name: "big"}, spec: {replicatedJobs: [range(17) | {name: "g\(.)", template: {spec: {template: {spec: {}}}}}]}}' >big.json
    refused "JobSet big has more than 16 groups of pods" check -f big.json --from cluster.json
    jq -n '{kind: "JobSet", metadata: {name: "big"}, spec: {replicatedJobs: [{name: "a", template: {spec: {}}}, {name: "b", replicas: 2000000, template: {spec: {}}}]}}' >big.json
    refused "more than 1000000 pods in one" check -f big.json --from cluster.json
    echo '{' >broken.json
    refused "broken.json is no JSON: line " check -f job.yaml --from broken.json
    echo '{"a": 1}' >other.json
    refused "other.json is no snapshot of a cluster" check -f job.yaml --from other.json
    echo '{"epkit_cluster": 99, "items": {}}' >newer.json
    refused "version 99, and this epkit reads version 1" check -f job.yaml --from newer.json
}

@test "no kubectl: exit code 4; one that fails or does not answer: exit code 1, within its deadline" {
    run --separate-stderr epkit deploy check --gpus 8 --kubectl ./no-such-program
    [ "$status" -eq 4 ]
    [[ "$stderr" == *"there is no './no-such-program'"*"--from FILE"* ]]
    run --separate-stderr epkit deploy check --gpus 8 --kubectl false
    [ "$status" -eq 1 ]
    [[ "$stderr" == *"the cluster does not answer"* ]]
    # A server that is not there; kubectl's own words reach the user.
    printf '#!/bin/sh\necho "The connection to the server was refused" >&2\nexit 1\n' >refusing
    printf '#!/bin/sh\nexec sleep 1000\n' >silent
    chmod +x refusing silent
    run --separate-stderr epkit deploy check --gpus 8 --kubectl ./refusing
    [ "$status" -eq 1 ]
    [[ "$stderr" == *"the cluster does not answer: The connection to the server was refused"* ]]
    run --separate-stderr epkit deploy check --gpus 8 --kubectl ./silent --timeout 1
    [ "$status" -eq 1 ]
    [[ "$stderr" == *"the cluster does not answer: no answer in time"* ]]
}

@test "hostile names do not reach the terminal as they are" {
    sed "s/^metadata: {name: j,/metadata: {name: \"j\\\\u001b[31m\",/" job.yaml >hostile.yaml
    jq '.items.secrets = []' cluster.json >changed.json
    run --separate-stderr epkit deploy check -f hostile.yaml --from changed.json
    [ "$status" -eq 3 ]
    [[ "$output" != *$'\e[31m'* ]]
}

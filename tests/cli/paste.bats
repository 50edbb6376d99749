#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Every command that epkit prints about hostile input is pasted into a shell. Only the command itself may run: here it
# is a stand-in that records its arguments.
#
# shellcheck disable=SC2154,SC2016 # $stderr is set by run; programs of inner shells

load common

# Without quotes, in single and in double ones something of it runs.
EVIL=$'a$(touch PWNED)`touch PWNED`\'$(touch PWNED)\';touch PWNED|touch PWNED&&touch PWNED\ntouch PWNED\n\e[201~touch PWNED\r\u202e'
DASH='--kubeconfig=evil'

setup() {
    cd "$BATS_TEST_TMPDIR" || exit 1
    mkdir bin box
    for name in kubectl sudo ssh epkit helm gcloud mpirun; do
        printf '%s\n' '#!/bin/sh' 'printf "%s\n" "$@" >>"$ASKED"' >"bin/$name"
    done
    chmod +x bin/*
    ln -s "$(command -v touch)" bin/touch
    export ASKED=$PWD/asked
    shell=$(command -v bash)
    tr '\0' '\n' <"$EPKIT_SOURCE/tests/fuzz/corpus/deploy/job" >both
    sed '$d' both | python3 -c 'import json, sys, yaml; json.dump(yaml.safe_load(sys.stdin), sys.stdout)' >job.json
    tail -n 1 both >cluster.json
}

# commands FILE: of a document, its texts for users to run; what looks like a command in a text, to the end of the line
# or to the last quote, which may be around it
commands() {
    jq -r '.. | objects | (.fix?, .hint?, .command?, .commands?[]?, .repeat_commands?[]?) | strings' "$1" 2>/dev/null ||
        (sed -n 's/^  do:  //p' "$1" && grep -oP "(?<![\w/.-])(kubectl|sudo|ssh|epkit|helm|gcloud|mpirun|EPKIT_\w+=\S+) .*" "$1" | sed "p;s/' [^']*$//;t;d") || true
}

# harmless FILE: pastes the commands in it, line by line and as a whole
harmless() {
    local line
    commands "$1" >list
    [ -s list ] || { echo "no command in:" && cat "$1" && return 1; }
    while IFS= read -r line; do
        (cd box && PATH="$BATS_TEST_TMPDIR/bin" "$shell" -c "$line" </dev/null >/dev/null 2>&1) || true
    done <list
    (cd box && PATH="$BATS_TEST_TMPDIR/bin" "$shell" <../list >/dev/null 2>&1) || true
    if [ -n "$(ls -A box)" ]; then
        cat -v list
        return 1
    fi
}

@test "the sandbox notices what runs" {
    local evil=${EVIL%%$'\n'*} text
    for text in "kubectl get $EVIL" "kubectl get \"$evil\"" "kubectl get '$evil'" "'kubectl get $evil' shows it"; do
        printf '%s\n' "$text" >text
        run ! harmless text
        rm -f box/PWNED
    done
    echo "kubectl get 'a b'" >text
    harmless text
    grep -qx 'a b' asked
}

# checked MANIFEST-FILTER SNAPSHOT-FILTER: findings as text and as a document
checked() {
    jq --arg evil "$EVIL" --arg dash "$DASH" "$1" job.json >changed.yaml
    jq --arg evil "$EVIL" --arg dash "$DASH" "$2" cluster.json >changed.json
    epkit deploy check -f changed.yaml --from changed.json >text 2>&1 || [ $? -eq 3 ] || return 1
    harmless text
    epkit deploy check -f changed.yaml --from changed.json --json >json || [ $? -eq 3 ] || return 1
    harmless json
}

@test "deploy check: names of manifests and snapshots" {
    queue='.metadata.labels["kueue.x-k8s.io/queue-name"]'
    kueue='.groups += ["kueue.x-k8s.io/v1beta2"] | .items += {localqueues: [], clusterqueues: [], resourceflavors: [], topologies: []}'
    cluster="$kueue"' | .items.localqueues = [{metadata: {name: "q", namespace: "ns"}, spec: {clusterQueue: $evil}}]'
    flavor='.items.clusterqueues = [{metadata: {name: $evil}, spec: {resourceGroups: [{coveredResources: ["nvidia.com/gpu"], flavors: [{name: "f", resources: [{name: "nvidia.com/gpu", nominalQuota: 8}]}]}]}}]'
    checked '.metadata.namespace = $evil' .
    checked '.metadata.namespace = $evil | '"$queue"' = "q"' "$kueue"
    checked '.metadata.namespace = $dash | '"$queue"' = $evil' "$kueue"
    grep -qx -e -- asked
    checked "$queue"' = "q"' "$cluster"
    checked "$queue"' = "q"' "$cluster | $flavor"
    checked "$queue"' = "q"' "$cluster | $flavor"' | .items.clusterqueues[0].spec.resourceGroups = []'
    checked "$queue"' = "q" | .spec.template.metadata.annotations["kueue.x-k8s.io/podset-required-topology"] = $evil' \
        "$cluster | $flavor"' | .items.resourceflavors = [{metadata: {name: "f"}, spec: {topologyName: $dash}}] | .items.topologies = [{metadata: {name: $dash}, spec: {levels: [{nodeLabel: "x"}]}}] | .items.clusterqueues[0].spec.resourceGroups[0].flavors[0].resources[0].nominalQuota = 64'
    # An operand that would be an option.
    grep -A1 -x -e -- asked | grep -qx -e "$DASH"
    checked '.spec.template.spec.volumes = [{name: "s", secret: {secretName: $evil}}, {name: "d", csi: {driver: $evil}}, {name: "p", persistentVolumeClaim: {claimName: $evil}}] | .metadata.namespace = $evil' .
    checked '.spec.template.metadata.annotations["networking.gke.io/default-interface"] = $evil' .
    checked '.apiVersion = $evil + "/v1"' '.groups += [$evil] | .items.secrets = []'
    checked . '.items.resourcequotas = [{metadata: {name: $evil, namespace: "ns"}, spec: {hard: {"requests.nvidia.com/gpu": 1}}}]'
}

@test "deploy why: the namespace" {
    jq '.items += {jobs: [], jobsets: [], leaderworkersets: [], workloads: [], events: []}' cluster.json >why.json
    for space in "$EVIL" "$DASH"; do
        run -2 --separate-stderr epkit deploy why "$EVIL" "--namespace=$space" --from why.json
        printf '%s\n' "$stderr" >text
        harmless text
    done
}

@test "files, recipes, variables and programs in hints" {
    for file in "$EVIL" "./$DASH"; do
        run --separate-stderr epkit topo --save "$file"
        printf '%s\n' "$stderr" >text
        harmless text
    done
    run --separate-stderr epkit env "$EVIL"
    printf '%s\n' "$stderr" >text
    harmless text
    EPKIT_NETWORK=$EVIL run --separate-stderr epkit test intranode "${SMALL[@]}"
    printf '%s\n' "$stderr" >text
    harmless text
}

@test "launch: the command line of a run" {
    printf '#!/bin/sh\nexit 255\n' >nossh
    chmod +x nossh
    epkit launch --hosts a,b --ssh "$PWD/nossh" --out run -x "NAME=$EVIL" --location-cmd "$EVIL" -- "$EVIL" "$DASH" >text 2>&1 || true
    jq -r .command run/testbed-logs/run.json >text
    harmless text
}

#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Every command that epkit prints about hostile input is pasted into a shell. Only the command itself may run: here it
# is a stand-in that records its arguments.
#
# shellcheck disable=SC2154,SC2016,SC2030,SC2031 # $stderr is set by run; programs of inner shells

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

# pasted CODES ARGUMENT...: commands in what is printed, as text and as a document, are harmless. The document of another
# node is that node's: who runs what is in it trusts its writer.
pasted() {
    local codes=$1 form
    shift
    for form in "" --json; do
        run --separate-stderr epkit "$1" ${form:+"$form"} "${@:2}"
        echo "$* $form -> $status: $stderr" | cat -v
        [[ "$codes" == *"$status"* ]]
        printf '%s\n%s\n' "$output" "$stderr" >text
        [ -z "$form" ] || jq 'del(.hosts[]?.document)' <<<"$output" >text
        [ -z "$(commands text)" ] || harmless text
    done
}

@test "doctor --hosts, triangulate, nics, launch: names and answers of nodes" {
    evil=${EVIL//[$'\n/']/}
    jq -n --arg e "$EVIL" '{schema_version: 1, epkit: $e, subcommand: "doctor", facts: {kernel: $e, gpus: [$e], nics: [{name: $e, state: $e}], environment: {($e): $e}},
        checks: [{id: $e, outcome: "found", severity: "serious", text: $e, fix: $e}, {id: "memlock", outcome: "found", severity: "serious", text: $e, fix: $e}]}' >answer
    printf '#!/bin/sh\ncat %q\n' "$PWD/answer" >answers
    printf '#!/bin/sh\ncat %q >&2\nexit 255\n' "$PWD/answer" >refuses
    chmod +x answers refuses
    for ssh in answers refuses; do
        pasted '1 3 5' doctor --hosts a,b --ssh "$PWD/$ssh"
        pasted '1 2 3 4 7' launch --hosts a,b --ssh "$PWD/$ssh" --connect-timeout 60 --out run -- "$EVIL"
    done
    pasted '1 3' triangulate --hosts a,b --run "printf '%s\n' {hosts} \"\$(cat answer)\""
    python3 -S "$EPKIT_SOURCE/tests/machines/machines.py" a4 a4
    mv a4/sys/class/infiniband/mlx5_0 "a4/sys/class/infiniband/m$evil"
    mv a4/sys/class/net/gpu1rdma0 "a4/sys/class/net/g$evil"
    pasted '0 3 4' nics --from a4
    pasted '0 3 4' nics --from a4 --devices "$EVIL" || [ "$status" -eq 2 ]
    pasted '0 3' doctor --from a4 --verbose
    # A script that is evaluated as a whole.
    for format in sh slurm; do
        epkit env --from a4 --format $format >text
        (cd box && PATH="$BATS_TEST_TMPDIR/bin" "$shell" <../text >/dev/null 2>&1) || true
        [ -z "$(ls -A box)" ]
    done
}

@test "report: the page and the documents of a foreign folder" {
    jq -n --arg e "$EVIL" '{schema_version: 1, epkit: $e, job: $e, command: ("epkit launch " + $e), argv: [$e], reason: $e, exit_code: 1, failed_host: $e, environment: {A: $e},
        hosts: [{name: $e, why: $e, gpu: $e}], findings: [{id: $e, severity: $e, text: $e, nodes: [$e]}]}' >run.json
    mkdir run
    mv run.json run
    printf '%s\n' "$EVIL" "a: NCCL WARN $EVIL" >run/worker-a.log
    pasted 1 report run
    pasted '1 4' parse run
    # The command line of a run, unless it is written as epkit writes its own.
    for command in "epkit launch $EVIL" 'epkit launch a;touch PWNED' $'epkit run \'a\ntouch PWNED\n\'' 'epkit x "$(touch PWNED)"' 'touch PWNED' 'epkitx; a'; do
        jq --arg c "$command" '.command = $c | .results = {command: $c}' run/run.json >new
        mv new run/run.json
        pasted '1 2 4' report run
        [ "$(jq -c '[.command, .results.command]' run/report.json)" = '["(left out)","(left out)"]' ]
        run ! grep -F 'was started by' run/report.html
    done
    own="epkit launch 'a; b'\\''c' --x=(left out) d"
    jq --arg c "$own" '.command = $c | del(.results)' run/run.json >new
    mv new run/run.json
    run -1 epkit report run
    [ "$(jq -r .command run/report.json)" = "$own" ]
}

@test "install, test, bench, run: recipes, files and variables" {
    mkdir m
    for name in "$EVIL" "one$EVIL"; do
        jq -n --arg e "$EVIL" --arg name "$name" '{recipe: $name, title: $e, steps: [{id: "one", type: "file", title: $e, why: $e, budget: "5s", path: "/etc/one", content: "x"}]}' >one.yaml
        pasted 2 install plan ./one.yaml --root m
    done
    jq -n --arg e "$EVIL" '{recipe: "one", title: "t", steps: [{id: "one", type: "command", title: "t", why: "w", budget: "5s", run: "echo \"$0\"; exit 1", check: "false"}]}' >one.yaml
    pasted '1 2 3' install apply ./one.yaml --root m
    for command in test\ intranode bench run; do
        # shellcheck disable=SC2086 # words
        EPKIT_BACKEND=$EVIL pasted 2 $command
    done
    # A command that does not fit ends with a whole word.
    long=$(head -c 1000 /dev/zero | tr '\0' x)
    printf '#!/bin/sh\nexit 255\n' >nossh
    chmod +x nossh
    epkit launch --hosts a,b --ssh "$PWD/nossh" --out long --checks skip -- "$long "{1..6} >text 2>&1 || true
    command=$(jq -r .command long/testbed-logs/run.json)
    printf '%s\n' "$command" "epkit parse '\$(touch PWNED)'" "$command" >list
    (cd box && PATH="$BATS_TEST_TMPDIR/bin" "$shell" <../list >/dev/null 2>&1) || true
    [ -z "$(ls -A box)" ]
}

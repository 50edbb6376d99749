#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The chart and 'epkit deploy check' against a real API server with JobSet, LeaderWorkerSet and Kueue: what helm installs
# is queued, admitted and run; each refusal that epkit predicts is the one that the cluster reports, and 'epkit deploy why'
# quotes it after the submission.
#
# shellcheck disable=SC2154,SC2030,SC2031,SC2317 # set by run; functions are called by name

load common

setup_file() {
    # shellcheck disable=SC2034 # for not_here
    local whole_file=1
    [ -n "${EPKIT_TEST_LONG:-}" ] ||
        not_here "a control plane with its controllers: minutes of processor time, only with EPKIT_TEST_LONG=1" || return 0
    need helm kube-apiserver kubectl kueue jobset lws kwok kube-scheduler kube-controller-manager || return 0
    command -v etcd >/dev/null || not_here "etcd is not installed (Debian and Ubuntu: etcd-server)" || return 0
    cluster_up 8 64
    kubectl apply -f "$EPKIT_SOURCE/tests/deploy/queues.yaml" >/dev/null
}

teardown_file() {
    cluster_down
}

setup() {
    skip_file
    M=$BATS_TEST_TMPDIR/manifest.yaml
}

teardown() {
    [ ! -s "$BATS_TEST_TMPDIR/manifest.yaml" ] ||
        kubectl delete -f "$BATS_TEST_TMPDIR/manifest.yaml" --ignore-not-found --wait=true >/dev/null 2>&1 || true
}

# predict ID ARGUMENT...: renders the chart with the arguments, and runs epkit; the finding's text is in $says
predict() {
    local id=$1
    shift
    template "$@" >"$M"
    predict_manifest "$id"
}

predict_manifest() {
    run --separate-stderr "$EPKIT" deploy check -f "$M" --json --kubectl "kubectl${CONFIG:+ --kubeconfig=$CONFIG}"
    echo "$output $stderr"
    [ "$status" -eq 3 ]
    python3 -S "$EPKIT_SOURCE/tests/cli/validate.py" "$EPKIT_SOURCE/cmd/deploy/schema.json" <(echo "$output")
    says=$(jq -r --arg id "$1" 'first(.findings[] | select(.id == $id)).says' <<<"$output")
    [ -n "$says" ]
}

# As `predict`, with pods that no scheduler takes: one that has completed would give its quota back before the next comes.
predict_waiting() {
    local id=$1
    shift
    template "$@" | sed 's/^\( *\)restartPolicy: Never/&\n\1schedulerName: nobody/' >"$M"
    grep -q 'schedulerName: nobody' "$M"
    predict_manifest "$id"
}

# explained STATE [ARGUMENT...]: what epkit says of the job r in this state; in $why
explained() {
    local state=$1
    shift
    run --separate-stderr "$EPKIT" deploy why r --json "$@"
    python3 -S "$EPKIT_SOURCE/tests/cli/validate.py" "$EPKIT_SOURCE/cmd/deploy/schema.json" <(echo "$output")
    why=$(jq -r .verdict <<<"$output")
    [ "$(jq -r .state <<<"$output")" = "$state" ]
}

# explain [ARGUMENT...]: what the cluster said is what epkit quotes as the reason
explain() {
    within 60 explained waiting "$@" || {
        echo "$output $stderr"
        return 1
    }
    echo "$why"
    [ "$status" -eq 3 ]
    jq -e --arg says "$says" '.reasons[0].message | contains($says)' <<<"$output"
}

# The messages of the Workloads, events and pods of a namespace.
kueue_says() { kubectl get workloads -A -o json | jq -r '.items[].status.conditions[]?.message' | grep -F -- "$says"; }
events_say() { kubectl get events -A -o json | jq -r '.items[].message' | grep -F -- "$says"; }
pods_say() { kubectl get pods -A -o json | jq -r '.items[].status.conditions[]?.message' | grep -F -- "$says"; }

# confirm SOURCE: creates it, and waits until the cluster reports the same
confirm() {
    kubectl create -f "$M" >/dev/null
    within 120 "$1" || {
        echo "predicted: $says"
        kubectl get workloads -A -o json | jq -r '.items[].status.conditions[]?.message'
        kubectl get events -A -o json | jq -r '.items[].message' | tail -n 20
        kubectl get pods -A -o json | jq -r '.items[].status.conditions[]?.message'
        return 1
    }
}

# refuse: kubectl itself reports it
refuse() {
    run kubectl ${CONFIG:+--kubeconfig="$CONFIG"} create -f "$M"
    [ "$status" -ne 0 ]
    [[ "$output" == *"$says"* ]]
    # What comes before the refused object in the manifest is there now.
    kubectl delete -f "$M" --ignore-not-found >/dev/null 2>&1 || true
}

@test "the guide's command: queued, admitted, pods, completed; two releases in two namespaces; nothing stays" {
    cd "$EPKIT_SOURCE/deploy"
    kubectl create namespace team-b
    kubectl create -n team-b -f - <<<'{"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": {"name": "a4"}, "spec": {"clusterQueue": "a4"}}'
    for namespace in default team-b; do
        helm install -n $namespace -f gke-runtime/values.yaml \
            --set-file workload_launcher=gke-runtime/launchers/torchrun-stratup.sh \
            --set "workload.image"="$IMAGE" \
            --set "workload.gpus"=16 \
            --set "queue=a4" \
            --set "volumes.gcsMounts[0].bucketName"=logs-bucket \
            user-deepep \
            gke-runtime/jobset >"$BATS_TEST_TMPDIR/notes"
        grep -q 'kubectl .*exec -it .COORD_POD -c workload' "$BATS_TEST_TMPDIR/notes"
    done
    # The Workload of a job that has ended is soon deleted; its events stay.
    admitted() { [ "$(kubectl get events -A -o json | jq '[.items[] | select(.reason == "Admitted").metadata.namespace] | unique | length')" = 2 ]; }
    within 120 admitted
    completed() { [ "$(kubectl get jobsets -A -o json | jq '[.items[].status.terminalState] | map(select(. == "Completed")) | length')" = 2 ]; }
    within 120 completed
    # The guide's way to the first pod, and the name of its container.
    for namespace in default team-b; do
        POD=$(kubectl get pods -n $namespace -l jobset.sigs.k8s.io/jobset-name=user-deepep --sort-by=.metadata.name -o jsonpath='{.items[0].metadata.name}')
        [[ "$POD" == user-deepep-workload-0-0-* ]]
        [ "$(kubectl get pod -n $namespace "$POD" -o jsonpath='{.spec.containers[*].name}')" = workload ]
        helm uninstall -n $namespace user-deepep --wait
    done
    gone() { [ -z "$(kubectl get jobsets,configmaps,secrets,persistentvolumes,pods -A -l app.kubernetes.io/instance=user-deepep -o name)" ]; }
    within 120 gone
}

# A PersistentVolume has no namespace: releases of one name, and releases and namespaces whose names join to the same text.
@test "concurrent releases: two names in a namespace, one name in two namespaces; each uninstalls its own alone" {
    local at name objects before=$BATS_TEST_TMPDIR/before
    kubectl create namespace beside >/dev/null
    kubectl create namespace beside-one >/dev/null
    for at in 'beside one' 'beside two' 'beside one-two' 'beside-one one' 'beside-one two'; do
        helm install -n "${at% *}" "${at#* }" "$CHART" --set workload.image="$IMAGE",HF_TOKEN=t,networkPolicy.create=true \
            --set workload.gpus=8,volumes.nfs.ip=192.0.2.1,volumes.nfs.volume=v --set network.mode=dranet >/dev/null
    done
    objects=jobsets,configmaps,secrets,persistentvolumes,persistentvolumeclaims,networkpolicies,resourceclaimtemplates
    listed() { kubectl get $objects -A -l app.kubernetes.io/name=epkit --no-headers -o 'custom-columns=A:.kind,B:.metadata.namespace,C:.metadata.name,D:.metadata.labels.app\.kubernetes\.io/instance' | sort; }
    listed >"$before"
    [ "$(wc -l <"$before")" -eq 40 ]
    [ "$(awk '{print $1, $2, $3}' "$before" | sort -u | wc -l)" -eq 40 ]
    helm uninstall -n beside one --wait >/dev/null
    # The others keep all that they had, and nothing of this one is left.
    left() { listed | diff <(awk '!($4 == "one" && ($2 == "beside" || $3 ~ /^beside[.]/))' "$before") -; }
    within 120 left
    for at in 'beside two' 'beside one-two' 'beside-one one' 'beside-one two'; do
        helm uninstall -n "${at% *}" "${at#* }" --wait >/dev/null
    done
    none() { [ -z "$(listed)" ]; }
    within 120 none
    kubectl delete namespace beside beside-one --wait=false >/dev/null
}

@test "a job that fits: nothing is found, and it is admitted" {
    template --set queue=a4 --set network.mode=host >"$M"
    run --separate-stderr "$EPKIT" deploy check -f "$M"
    echo "$output $stderr"
    [ "$status" -eq 0 ]
    [[ "${lines[0]}" == "JobSet r can run on this cluster (v1."*"): 2 pods by queue a4." ]]
    run -0 "$EPKIT" deploy check --gpus 64 --queue a4 --topology cloud.google.com/gce-topology-block
    kubectl create -f "$M"
    says="The workload is admitted"
    within 120 kueue_says
    # The pods of these nodes end at once.
    within 120 explained complete
    [ "$status" -eq 0 ]
    [ "$why" = "JobSet r is complete." ]
}

@test "Kueue: a queue that is missing, stopped, or refers to a missing one" {
    predict queue-missing --set queue=a5
    confirm kueue_says
    explain
    kubectl delete -f "$M" >/dev/null
    predict cluster-queue-missing --set queue=nowhere
    confirm kueue_says
    kubectl delete -f "$M" >/dev/null
    predict cluster-queue-inactive --set queue=broken
    confirm kueue_says
}

# What check does not compute, why quotes: a queue that is stopped or for others, a flavor of other nodes.
@test "Kueue: what holds up a job that was submitted" {
    # submitted MESSAGE ARGUMENT...
    submitted() {
        says=$1
        template "${@:2}" >"$M"
        confirm kueue_says
        explain
        kubectl delete -f "$M" --wait=true >/dev/null
    }
    submitted "LocalQueue held is inactive" --set queue=held
    submitted "Workload namespace doesn't match ClusterQueue selector" --set queue=elsewhere
    submitted "doesn't match node affinity" --set queue=a4 --set 'nodeSelector.cloud\.google\.com/gke-accelerator=other'
}

# admit NAME ARGUMENT...: a job that is admitted, and whose pods no scheduler takes
admit() {
    local name=$1
    shift
    template "$@" >"$BATS_TEST_TMPDIR/$name.yaml"
    sed -i "s/^\\(  name: \"\\?\\)r\\b/\\1$name/; s/^\( *\)restartPolicy: Never/&\n\1schedulerName: nobody/" "$BATS_TEST_TMPDIR/$name.yaml"
    grep -q 'schedulerName: nobody' "$BATS_TEST_TMPDIR/$name.yaml"
    kubectl create -f "$BATS_TEST_TMPDIR/$name.yaml" >/dev/null
    says="The workload is admitted"
    within 120 kueue_says
}

@test "Kueue: quota" {
    predict quota --set queue=a4 --set workload.gpus=72
    confirm kueue_says
    explain
}

@test "Kueue: quota that others use: the job waits" {
    admit first --set queue=plain --set workload.gpus=24 --set-json tasSettings.topologyRequest=null
    predict quota-in-use --set queue=plain --set workload.gpus=16 --set-json tasSettings.topologyRequest=null
    [[ "$output" == *'"will_run": true'* ]]
    confirm kueue_says
    explain
    kubectl delete -f "$BATS_TEST_TMPDIR/first.yaml" >/dev/null
}

@test "Kueue: topology" {
    block=cloud.google.com/gce-topology-block
    required='tasSettings.topologyRequest={"kueue.x-k8s.io/podset-preferred-topology":null,"kueue.x-k8s.io/podset-required-topology":"'
    # Blocks have four nodes.
    predict topology --set queue=a4 --set workload.gpus=40 --set-json "$required$block\"}"
    [ "$says" = "couldn't assign flavors to pod set workload: topology \"gke-default\" allows to fit only 4 out of 5 pod(s)" ]
    confirm kueue_says
    kubectl delete -f "$M" >/dev/null
    predict topology --set queue=big --set workload.gpus=72
    confirm kueue_says
    explain
    kubectl delete -f "$M" >/dev/null
    predict topology --set queue=a4 --set 'targetNodes={other-0,other-1}'
    confirm kueue_says
    kubectl delete -f "$M" >/dev/null
    predict topology-level --set queue=a4 --set-json "$required"'example.com/rack"}'
    confirm kueue_says
    kubectl delete -f "$M" >/dev/null
    predict topology-unsupported --set queue=plain
    confirm kueue_says
}

@test "the API server: kinds, namespaces, rights, names" {
    template --set queue=a4 | sed 's#^apiVersion: jobset.*#apiVersion: jobset.x-k8s.io/v9#' >"$M"
    predict_manifest api-missing
    refuse
    template --namespace nobody-made-this >"$M"
    predict_manifest namespace-missing
    refuse
    template >"$M"
    kubectl create -f "$M" >/dev/null
    predict_manifest refused
    refuse
    predict refused --set workload.priorityClassName=urgent
    confirm events_say
}

@test "the API server: a user without rights" {
    # May read, but not create.
    kubectl create clusterrolebinding guest-view --clusterrole=view --user=guest >/dev/null
    kubectl create clusterrole guest-nodes --verb=get,list --resource=nodes,clusterqueues.kueue.x-k8s.io >/dev/null
    kubectl create clusterrolebinding guest-nodes --clusterrole=guest-nodes --user=guest >/dev/null
    CONFIG=${KUBECONFIG}guest
    predict forbidden
    # It lists what it may not read, and makes no guesses about it.
    [[ "$(jq -r '.cluster.unread | keys[]' <<<"$output")" == *secrets* ]]
    refuse
}

@test "pods: quotas and safety of the namespace, accounts" {
    kubectl create namespace small
    kubectl create quota tight -n small --hard=requests.nvidia.com/gpu=8 >/dev/null
    within 60 sh -c 'kubectl get quota tight -n small -o jsonpath={.status.used} | grep -q gpu'
    predict_waiting namespace-quota --namespace small
    confirm events_say
    explain -n small
    kubectl create namespace unstated
    kubectl create quota mem -n unstated --hard=limits.memory=8Ti,requests.cpu=100 >/dev/null
    kubectl delete -f "$M" >/dev/null
    predict refused --namespace unstated
    confirm events_say
    kubectl create namespace safe
    kubectl label namespace safe pod-security.kubernetes.io/enforce=baseline >/dev/null
    kubectl delete -f "$M" >/dev/null
    predict refused --namespace safe --set stack=host
    confirm events_say
    kubectl delete -f "$M" >/dev/null
    predict refused --set workload.serviceAccountName=runner
    confirm events_say
}

@test "pods: volumes, claims for devices, nodes" {
    predict claim-missing --set 'volumes.pvcMounts[0].claimName=data,volumes.pvcMounts[0].mountPath=/data'
    confirm pods_say
    explain
    kubectl delete -f "$M" >/dev/null
    predict device-class-missing --set network.mode=dranet
    confirm pods_say
    kubectl delete -f "$M" >/dev/null
    predict nodes --set workload.gpus=80 --set nodeSelector.type=other
    confirm pods_say
    explain
}

# Messages that only the log of JobSet's or Kueue's controller has.
log_says() { sed 's/\\"/"/g' "$CLUSTER/jobset.log" "$CLUSTER/kueue.log" | grep -qF -- "$says"; }

@test "LimitRanges of the namespace" {
    # limited NAMESPACE ENTRIES: a namespace with a LimitRange
    limited() {
        kubectl create namespace "$1" >/dev/null
        kubectl create -n "$1" -f - >/dev/null <<<"{\"apiVersion\": \"v1\", \"kind\": \"LimitRange\", \"metadata\": {\"name\": \"lr\"}, \"spec\": {\"limits\": $2}}"
    }
    limited bounded '[{"type": "Container", "max": {"memory": "1Gi"}}]'
    predict refused --namespace bounded --set workload.resources.limits.memory=2Gi
    [ "$says" = "maximum memory usage per Container is 1Gi, but limit is 2Gi" ]
    confirm events_say
    explain -n bounded
    kubectl delete -f "$M" >/dev/null
    limited pods '[{"type": "Pod", "max": {"nvidia.com/gpu": "4"}}]'
    predict refused --namespace pods
    confirm events_say
}

@test "dry runs by the API server: objects, those that controllers create, and nothing is created" {
    template | sed 's/^  name: "r"$/  name: Run_1/' >"$M"
    predict_manifest refused
    refuse
    template --set workload.labels.a=bc | sed 's/^\( *\)a: bc$/\1a: b c/' >"$M"
    grep -q 'a: b c' "$M"
    predict_manifest refused
    confirm log_says
    kubectl delete -f "$M" >/dev/null
    predict refused --set workload.resources.requests.memory=4Gi,workload.resources.limits.memory=2Gi
    confirm log_says
    kubectl delete -f "$M" >/dev/null
    kubectl create namespace counted >/dev/null
    kubectl create quota none -n counted --hard=count/jobs.batch=0 >/dev/null
    within 60 sh -c 'kubectl get quota none -n counted -o jsonpath={.status.used} | grep -q jobs'
    predict refused --namespace counted
    confirm log_says
    kubectl delete -f "$M" >/dev/null
    kubectl create namespace taken >/dev/null
    kubectl create configmap r-launcher -n taken >/dev/null
    predict refused --namespace taken
    [ "$(kubectl get jobsets,jobs,pods -n taken -o name | wc -l)" -eq 0 ]
    refuse
    template | sed 's/^\( *\)restartPolicy: Never/&\n\1runtimeClassName: absent/' >"$M"
    predict_manifest refused
    confirm events_say
    kubectl delete -f "$M" >/dev/null
    kubectl create namespace strict >/dev/null
    kubectl label namespace strict pod-security.kubernetes.io/enforce=restricted >/dev/null
    cat >"$M" <<'END'
apiVersion: batch/v1
kind: Job
metadata: {name: r, namespace: strict}
spec: {template: {spec: {restartPolicy: Never, tolerations: [{operator: Exists}], containers: [{name: a, image: x, resources: {limits: {nvidia.com/gpu: 8}}}]}}}
END
    predict_manifest refused
    [[ "$says" == *'runAsNonRoot != true'* ]] # the server's own list
    confirm events_say
    kubectl delete -f "$M" >/dev/null
    kubectl create namespace ending >/dev/null
    kubectl create -n ending -f - >/dev/null <<<'{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "held", "finalizers": ["epkit.dev/test"]}}'
    kubectl delete namespace ending --wait=false >/dev/null
    predict refused --namespace ending
    refuse
    kubectl patch configmap held -n ending --type=merge -p '{"metadata": {"finalizers": null}}' >/dev/null
}

@test "a saved cluster gives the same answer" {
    template --set queue=a5 --set workload.gpus=800 >"$M"
    run --separate-stderr "$EPKIT" deploy check -f "$M" --save "$BATS_TEST_TMPDIR/cluster.json" --json
    live=$output
    [ "$status" -eq 3 ]
    run -3 --separate-stderr "$EPKIT" deploy check -f "$M" --from "$BATS_TEST_TMPDIR/cluster.json" --json \
        --timeout 5
    [ "$output" = "$live" ]
    [ "$(stat -c %a "$BATS_TEST_TMPDIR/cluster.json")" = 600 ]
    # Names of Secrets, without their contents.
    jq -e '.items.secrets | all(keys == ["metadata"])' "$BATS_TEST_TMPDIR/cluster.json"
    rm "$M"
}

@test "stack x network x queue x volumes is created" {
    python3 "$EPKIT_SOURCE/tests/deploy/values.py" matrix "$BATS_TEST_TMPDIR" "$CHART"
    kubectl create namespace matrix
    kubectl create -f "$BATS_TEST_TMPDIR/objects.json" >/dev/null
    # One of each cell, by its name: of JobSets a Job, of LeaderWorkerSets a StatefulSet; no other.
    made() {
        kubectl get jobs.batch,statefulsets -n matrix -o name | LC_ALL=C sort |
            diff <(LC_ALL=C sort "$BATS_TEST_TMPDIR/expected") - >"$BATS_TEST_TMPDIR/differs"
    }
    within 600 made || {
        cat "$BATS_TEST_TMPDIR/differs"
        return 1
    }
    kubectl delete namespace matrix --wait=false >/dev/null
}

@test "every value changes an object of the cluster" {
    python3 "$EPKIT_SOURCE/tests/deploy/values.py" objects "$CHART" "$BATS_TEST_TMPDIR"
    kubectl create namespace values
    kubectl create namespace gpu-operator
    kubectl create -f "$BATS_TEST_TMPDIR/objects.json" >/dev/null
    kubectl get jobsets,leaderworkersets,configmaps,secrets,persistentvolumes,persistentvolumeclaims,networkpolicies,resourceclaimtemplates \
        -A -o json >"$BATS_TEST_TMPDIR/got.json"
    python3 "$EPKIT_SOURCE/tests/deploy/values.py" compare "$BATS_TEST_TMPDIR/got.json"
    kubectl delete namespace values --wait=false >/dev/null
}

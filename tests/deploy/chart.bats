#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The Helm chart as helm renders it: the commands that users know, what is refused, and that no value is dead.
#
# shellcheck disable=SC2154,SC2030,SC2031,SC2016 # set by run; texts of templates and of jq

load common

export GOGC=off GOMAXPROCS=1 # for programs that start helm themselves

setup() {
    need helm
}

# The commands of the guides, word for word. Only 'install' needs a cluster: 'template' takes its place.
helm_install() {
    helm template "$@"
}

# shellcheck disable=SC2086 # word for word
@test "the command of the DeepEP guide renders" {
    cd "$EPKIT_SOURCE/deploy"
    WORKLOAD_IMAGE=$IMAGE GCS_BUCKET=logs-bucket USER=somebody
    helm_install -f gke-runtime/values.yaml \
        --set-file workload_launcher=gke-runtime/launchers/torchrun-stratup.sh \
        --set "workload.image"=$WORKLOAD_IMAGE \
        --set "workload.gpus"=16 \
        --set "queue=a4" \
        --set "volumes.gcsMounts[0].bucketName"=${GCS_BUCKET} \
        --set "volumes.nfs.ip"=192.0.2.7 \
        --set "volumes.nfs.region"=us-central1-b \
        --set "volumes.nfs.instance"=store \
        --set "volumes.nfs.volume"=share \
        --set "volumes.nfs.storage"=1024Gi \
        $USER-deepep \
        gke-runtime/jobset >"$BATS_TEST_TMPDIR/out"
    yaml_to_json <"$BATS_TEST_TMPDIR/out" >"$BATS_TEST_TMPDIR/json"
    jq -se '
        (map(select(.kind == "JobSet"))[0]) as $job | $job.spec.replicatedJobs[0] as $r | $r.template.spec as $s |
        $s.template.spec as $p | $p.containers[0] as $c |
        $job.apiVersion == "jobset.x-k8s.io/v1alpha2" and $job.metadata.name == "somebody-deepep" and
        $job.metadata.labels["kueue.x-k8s.io/queue-name"] == "a4" and $job.spec.suspend and
        $r.name == "workload" and $r.replicas == 1 and $s.parallelism == 2 and $s.completions == 2 and
        $s.completionMode == "Indexed" and $s.backoffLimit == 0 and $s.ttlSecondsAfterFinished == 43200 and
        $p.restartPolicy == "Never" and $c.name == "workload" and $c.resources.limits["nvidia.com/gpu"] == 8 and
        ($p.volumes | map(select(.name == "shared-memory"))[0].emptyDir) == {medium: "Memory", sizeLimit: "250Gi"} and
        ($p.volumes | map(select(.csi))[0].csi.volumeAttributes.bucketName) == "logs-bucket" and
        $s.template.metadata.annotations["kueue.x-k8s.io/podset-preferred-topology"] ==
            "cloud.google.com/gce-topology-block" and
        (map(select(.kind == "PersistentVolume"))[0].spec |
            .csi.volumeHandle == "modeInstance/us-central1-b/store/share" and .capacity.storage == "1024Gi") and
        ([.[] | select(.kind == "ConfigMap") | .data["launch-workload.sh"]][0] | contains("epkit launch"))
        ' "$BATS_TEST_TMPDIR/json"
}

# shellcheck disable=SC2086 # word for word
@test "the command of the testbed guide renders" {
    mkdir -p "$BATS_TEST_TMPDIR/training/a4"
    ln -s "$EPKIT_SOURCE/deploy" "$BATS_TEST_TMPDIR/training/a4/testbed"
    REPO_ROOT=$BATS_TEST_TMPDIR RECIPE_ROOT=$BATS_TEST_TMPDIR/training/a4/testbed
    WORKLOAD_IMAGE=$IMAGE GCS_BUCKET=logs-bucket USER=somebody
    cd "$RECIPE_ROOT"
    helm_install -f $RECIPE_ROOT/gke-runtime/values.yaml \
        --set-file workload_launcher=$REPO_ROOT/training/a4/testbed/gke-runtime/launchers/torchrun-stratup.sh \
        --set "workload.image"=$WORKLOAD_IMAGE \
        --set "volumes.gcsMounts[0].bucketName"=${GCS_BUCKET} \
        $USER-testbed \
        $REPO_ROOT/training/a4/testbed/gke-runtime/jobset >"$BATS_TEST_TMPDIR/out"
    # Off unless asked for: NFS, and what waits for a queue.
    run ! grep -E 'PersistentVolume|suspend|queue-name' "$BATS_TEST_TMPDIR/out"
    grep -q 'name: SLEEP_INFINITY' "$BATS_TEST_TMPDIR/out"
    yaml_to_json <"$BATS_TEST_TMPDIR/out" | jq -se '
        map(select(.kind == "JobSet"))[0].spec.replicatedJobs[0].template.spec.template.spec.containers[0].env |
        map(select(.name == "SLEEP_INFINITY"))[0].value == "true"'
}

# refused TEXT ARGUMENT...: helm says this text, and renders nothing
refused() {
    local text=$1
    shift
    run --separate-stderr template "$@"
    echo "$* -> $stderr"
    [ "$status" -ne 0 ]
    [ -z "$output" ]
    [[ "$stderr" == *"$text"* ]]
}

@test "nonsense is refused, with the value's name" {
    refused "'/workload/gpus': " --set workload.gpus=12
    # Scripts that would not start in the pods.
    printf '#!/bin/bash\r\necho hi\r\n' >"$BATS_TEST_TMPDIR/crlf.sh"
    refused "workload_launcher: its lines end in CR LF: sed -i 's/\\r\$//' FILE" --set-file workload_launcher="$BATS_TEST_TMPDIR/crlf.sh"
    printf '\xef\xbb\xbf#!/bin/bash\necho hi\n' >"$BATS_TEST_TMPDIR/mark.sh"
    refused "workload_launcher: a byte order mark precedes its first line" --set-file workload_launcher="$BATS_TEST_TMPDIR/mark.sh"
    printf '\xef\xbb\xbfecho hi\n' >"$BATS_TEST_TMPDIR/mark.sh"
    refused "workload_launcher: a byte order mark precedes its first line" --set-file workload_launcher="$BATS_TEST_TMPDIR/mark.sh"
    refused "'/workload/gpus': " --set workload.gpus=0
    refused "'/workload/gpus': " --set workload.gpus=-8
    refused "'/workload/gpus': " --set-string workload.gpus=16
    refused "additional properties 'gpu' not allowed" --set workload.gpu=16
    refused "additional properties 'hostNetwork' not allowed" --set network.hostNetwork=true
    refused "additional properties 'quue' not allowed" --set quue=a4
    refused "'/workload/image': " --set workload.image=registry.example/Team/nemo:1
    refused "'/workload/image': " --set workload.image=registry.example/nemo:
    refused "'/network/gibImage': " --set network.gibImage=registry.example//gib
    template --set workload.image=R.example:5000/a/b__c-d.e:V1@sha256:"$(printf 'a%.0s' $(seq 64))" >/dev/null
    refused "'/stack': value must be one of 'image', 'host', 'managed'" --set stack=docker
    refused "'/network/mode'" --set network.mode=bridge
    refused "'/orchestrator'" --set orchestrator=job
    refused "'/queue'" --set queue='A 4'
    refused "'/volumes/gcsMounts/0/bucketName'" --set 'volumes.gcsMounts[0].bucketName=No Bucket'
    refused "missing property 'bucketName'" --set 'volumes.gcsMounts[0].mountPath=/gcs'
    refused "'/volumes/nfs/storage'" --set volumes.nfs.storage=lots
    refused "'/workload/sharedMemory'" --set workload.sharedMemory=-1Gi
    refused "'/ssh/port'" --set ssh.port=70000
    refused "'/workload/completion'" --set workload.completion=never
    refused "'/SSH_PUBLIC_KEY'" --set SSH_PUBLIC_KEY=preconfigured
    refused "'/targetNodes'" --set 'targetNodes={a,a}'
    refused "'/workload/envs/0'" --set-json 'workload.envs=[{"name":"A","value":"1","valueFrom":{}}]'
    # A section of a file of values with nothing in it takes away the defaults.
    for section in workload volumes network ssh stack; do refused "missing property '$section'" --set $section=null; done
    refused "'/workload': missing property 'gpus'" --set workload.gpus=null
    refused "'/volumes': missing property 'nfs'" --set volumes.nfs=null
    template --set targetNodes=null,workload.envs=null,volumes.gcsMounts=null,tolerations=null >/dev/null
    # What the API server takes as the value of a label, or as a quantity.
    local long
    long=$(printf 'a%.0s' $(seq 64))
    refused "'/queue'" --set queue="$long"
    refused "'/accelerator'" --set accelerator="$long"
    refused "'/targetNodes/0'" --set "targetNodes={$long}"
    refused "'/avoidNodes/0'" --set "avoidNodes={$long}"
    refused "'/nodeSelector/pool'" --set 'nodeSelector.pool=a b'
    refused "'/workload/labels/team'" --set workload.labels.team="$long"
    refused "'/workload/resources/limits/memory'" --set workload.resources.limits.memory=-1Gi
    refused "'/workload/resources/requests/cpu'" --set workload.resources.requests.cpu=0x10
    refused "'/workload/resources/requests/cpu'" --set workload.resources.requests.cpu=true
    refused "'/workload/resources/requests/cpu'" --set workload.resources.requests.cpu=-1
    template --set workload.resources.requests.cpu=0.5,workload.resources.limits.memory=1.5e12 >/dev/null
    refused "'/volumes/nfs/ip'" --set-json 'volumes.nfs={"ip":"1{{.}}","volume":"v"}'
    refused "'/volumes/nfs/volume'" --set-json 'volumes.nfs={"ip":"192.0.2.1","volume":"v:w#"}'
    template --set-json 'volumes.nfs={"ip":"2001:db8::1","volume":"/a/b_c.d"}' >/dev/null
    refused "'/network/nccl': additional properties 'nccl_debug' not allowed" --set network.nccl.nccl_debug=INFO
}

# Odd characters arrive as they are; the last newline is that of the file.
@test "a token is in its Secret and nowhere else, nor are private keys" {
    local odd='hf_"$(id)`{{ .Values.queue }}\x' at=$BATS_TEST_TMPDIR
    odd=${odd// /_}
    printf '%s\n' "$odd" >"$at/token"
    template --set-file HF_TOKEN="$at/token" --set queue=q,network.mode=dranet >"$at/out"
    run ! grep -F hf_ "$at/out"
    [ "$(grep -cF "$(printf %s "$odd" | base64 -w 0)" "$at/out")" -eq 1 ]
    yaml_to_json <"$at/out" | jq -se --arg odd "$odd" '
        (map(select(.kind == "Secret" and .metadata.name == "r-tokens"))[0].data.HF_TOKEN | @base64d) == $odd and
        (map(select(.kind == "Secret" and .metadata.name == "r-ssh"))[0].data | map_values(@base64d | contains("PRIVATE KEY")) | all) and
        (map(select(.kind != "Secret")) | tostring | contains("PRIVATE KEY") | not)'
    # Nonsense is refused without being shown.
    printf 'hf_secret and more\n' >"$at/token"
    refused "HF_TOKEN is not one word" --set-file HF_TOKEN="$at/token"
    [[ "$stderr" != *hf_secret* ]]
    printf 'hf_a\nhf_b' >"$at/token"
    refused "HF_TOKEN is not one word" --set-file HF_TOKEN="$at/token"
    # As ssh-keygen writes it.
    ssh-keygen -q -t ed25519 -N '' -C "some body's \$(id) \"key\"" -f "$at/key"
    template --set-file SSH_PUBLIC_KEY="$at/key.pub" | yaml_to_json |
        jq -se --arg key "$(cat "$at/key.pub")" '[.. | objects | select(.name? == "SSH_PUBLIC_KEY").value] | map(rtrimstr("\n")) == [$key]'
    refused "'/SSH_PUBLIC_KEY'" --set-file SSH_PUBLIC_KEY="$at/key"
}

@test "contradictions are refused, with what to do" {
    refused "node a4-1 is both in targetNodes and in avoidNodes" --set 'targetNodes={a4-0,a4-1}' --set 'avoidNodes={a4-1}'
    refused "workload.gpus=32 needs 4 nodes, and targetNodes names 2" --set workload.gpus=32 --set 'targetNodes={a,b}'
    refused "dwsSettings.maxRunDurationSeconds needs a queue" --set dwsSettings.maxRunDurationSeconds=60
    refused "volumes.nfs.ip without volumes.nfs.volume" --set volumes.nfs.ip=192.0.2.1
    refused "volumes.nfs.region and volumes.nfs.instance belong together" --set volumes.nfs.ip=192.0.2.1 \
        --set volumes.nfs.volume=v --set volumes.nfs.region=r
    refused "without volumes.nfs.ip" --set volumes.nfs.volume=v
    refused "two volumes are mounted at /gcs: gcs-0 and gcs-1" --set 'volumes.gcsMounts[0].bucketName=one' \
        --set 'volumes.gcsMounts[1].bucketName=two,volumes.gcsMounts[1].mountPath=/gcs'
    refused "two volumes are mounted at /dev/shm" --set volumes.ssdMountPath=/dev/shm/
    refused "volumes.ssdHostPath needs volumes.ssdMountPath" --set volumes.ssdHostPath=/ssd
    refused "are of a JobSet" --set orchestrator=leaderworkerset --set workload.restarts=1
    refused "keep one" --set queue=a4 \
        --set 'tasSettings.topologyRequest.kueue\.x-k8s\.io/podset-required-topology=kubernetes.io/hostname'
    refused "workload.envs sets NNODES" --set-json 'workload.envs=[{"name":"NNODES","value":"1"}]'
    refused "is the port of the node's own sshd" --set network.mode=host --set ssh.port=22
    refused "workload.labels sets app.kubernetes.io/name" --set 'workload.labels.app\.kubernetes\.io/name=x'
    refused "workload.envs sets A twice" --set-json 'workload.envs=[{"name":"A","value":"1"},{"name":"A","value":"2"}]'
    refused "network.nccl sets MASTER_ADDR" --set network.nccl.MASTER_ADDR=a
    refused "workload.resources.limits sets nvidia.com/gpu" --set 'workload.resources.limits.nvidia\.com/gpu=4'
    refused "accelerator is nvidia-b200, and nodeSelector wants nvidia-h200-141gb" --set accelerator=nvidia-b200 \
        --set 'nodeSelector.cloud\.google\.com/gke-accelerator=nvidia-h200-141gb'
    run --separate-stderr helm template r "$CHART"
    [ "$status" -ne 0 ]
    [[ "$stderr" == *"workload.image is empty: name the image"* ]]
}

@test "a release name that does not fit into the names of its pods is refused" {
    local name
    name=$(printf 'a%.0s' $(seq 44))
    run -0 --separate-stderr helm template "$name" "$CHART" --set workload.image="$IMAGE"
    run --separate-stderr helm template "${name}a" "$CHART" --set workload.image="$IMAGE"
    [ "$status" -ne 0 ]
    [[ "$stderr" == *"at most 44 fit into the names of the pods"* ]]
    run --separate-stderr helm template 0x10 "$CHART" --set workload.image="$IMAGE"
    [ "$status" -ne 0 ]
    [[ "$stderr" == *"the release name '0x10' begins with a digit"* ]]
}

@test "all names belong to the release, all objects to its namespace" {
    template --namespace team-a --set queue=a4 --set HF_TOKEN=t --set network.mode=dranet --set networkPolicy.create=true \
        --set volumes.nfs.ip=192.0.2.1,volumes.nfs.volume=v | yaml_to_json >"$BATS_TEST_TMPDIR/json"
    jq -se 'length == 8 and all(.metadata.namespace == "team-a" or .kind == "PersistentVolume") and
        all(.metadata.name | test("^(r|r-.*|team-a\\.r\\.nfs)$"))' "$BATS_TEST_TMPDIR/json"
    run ! grep -E '"default"' <(jq -c '.metadata' "$BATS_TEST_TMPDIR/json")
}

# Releases b-c of namespace a and c of namespace a-b would share a volume that is named with hyphens alone.
@test "two releases never share an object that has no namespace" {
    local names
    names=$(for at in 'a b-c' 'a-b c'; do
        helm template "${at#* }" "$CHART" --namespace "${at% *}" --set workload.image="$IMAGE" \
            --set volumes.nfs.ip=192.0.2.1,volumes.nfs.volume=v | yaml_to_json |
            jq -r 'select(.kind == "PersistentVolume").metadata.name'
    done)
    [ "$(wc -l <<<"$names")" -eq 2 ]
    [ "$(sort -u <<<"$names" | wc -l)" -eq 2 ]
}

@test "names that look like numbers or truth values stay text, and numbers of a file keep their digits" {
    python3 "$EPKIT_SOURCE/tests/deploy/values.py" odd "$CHART"
}

@test "every value changes what is rendered, and there is a case for each" {
    python3 "$EPKIT_SOURCE/tests/deploy/values.py" list "$CHART"
    python3 "$EPKIT_SOURCE/tests/deploy/values.py" render "$CHART"
}

# The comparison that the long test makes of a cluster's objects, on rendered ones with what a server adds to them.
@test "a value without an effect is noticed among a cluster's objects, and so is a difference that the cluster made" {
    local values="$EPKIT_SOURCE/tests/deploy/values.py" at=$BATS_TEST_TMPDIR bound
    python3 "$values" objects "$CHART" "$at" volumes.nfs.v
    # As a cluster gives them back: each with an identity of its own, and some volumes bound already.
    bound='.items |= (to_entries | map(.key as $n | .value | .metadata += {uid: "u\($n)", resourceVersion: "\($n)"} |
        if .kind == "PersistentVolume" and $n % 2 == 0 then
            .spec.claimRef += {uid: "c\($n)", resourceVersion: "\($n)", kind: "PersistentVolumeClaim", apiVersion: "v1"} |
            .metadata.annotations["pv.kubernetes.io/bound-by-controller"] = "yes" else . end))'
    jq "$bound" "$at/objects.json" >"$at/got.json"
    python3 "$values" compare "$at/got.json" volumes.nfs.v
    # The change has no effect.
    jq "$bound" "$at/objects.json" | sed 's,"/other","/share",' >"$at/got.json"
    run -1 python3 "$values" compare "$at/got.json" volumes.nfs.v
    [[ "$output" == *"volumes.nfs.volume changes no object of the cluster"* ]]
    # A field that differs by itself would hide it.
    jq "$bound"' | .items |= (to_entries | map(.key as $n | .value | .spec.serial = $n))' "$at/objects.json" >"$at/got.json"
    run -1 python3 "$values" compare "$at/got.json" volumes.nfs.v
    [[ "$output" == *"two releases differ all the same, in "*.spec.serial* ]]
    # Nothing was created.
    echo '{"items": []}' >"$at/got.json"
    run -1 python3 "$values" compare "$at/got.json" volumes.nfs.v
}

@test "helm lint has no complaint" {
    helm lint --strict "$CHART" --set workload.image="$IMAGE"
}

@test "the prerequisites: objects by name, and what is empty is refused" {
    local gke="$EPKIT_SOURCE/deploy/gke"
    helm lint --strict "$gke" --set prefix=a4,accelerator=nvidia-b200,gpus=16
    helm template p "$gke" --set prefix=a4,accelerator=nvidia-b200,gpus=16 --set 'namespaces={default,team}' | yaml_to_json >"$BATS_TEST_TMPDIR/json"
    jq -se '
        def names(k): [.[] | select(.kind == k).metadata.name] | sort;
        def one(k; n): .[] | select(.kind == k and .metadata.name == n).spec;
        names("Network") == ["gvnic-1"] + [range(8) | "rdma-\(.)"] and names("GKENetworkParamSet") == names("Network") and
        one("GKENetworkParamSet"; "gvnic-1") == {vpc: "a4-gvnic-net", vpcSubnet: "a4-gvnic-sub", deviceMode: "NetDevice"} and
        one("GKENetworkParamSet"; "rdma-7") == {vpc: "a4-rdma-net", vpcSubnet: "a4-rdma-sub-7", deviceMode: "RDMA"} and
        one("ResourceFlavor"; "a4").nodeLabels == {"cloud.google.com/gke-accelerator": "nvidia-b200"} and
        one("ResourceFlavor"; "a4").topologyName == names("Topology")[0] and
        one("ClusterQueue"; "a4").resourceGroups[0].flavors[0].resources == [{name: "nvidia.com/gpu", nominalQuota: 16}] and
        [.[] | select(.kind == "LocalQueue") | [.metadata.namespace, .spec.clusterQueue]] == [["default", "a4"], ["team", "a4"]]
        ' "$BATS_TEST_TMPDIR/json"
    # The networks of the chart's pods are these.
    [ "$(template | yaml_to_json | jq -r 'select(.kind == "JobSet").spec.replicatedJobs[0].template.spec.template.metadata.annotations["networking.gke.io/interfaces"] | fromjson | .[1:][].network')" = \
        "$(jq -r 'select(.kind == "Network").metadata.name' "$BATS_TEST_TMPDIR/json" | sort)" ]
    [ "$(helm template p "$gke" --set accelerator=nvidia-b200,gpus=16,networks=false | grep -c '^kind: .*Network')" -eq 0 ]
    local missing
    for missing in prefix accelerator gpus; do
        run ! helm template p "$gke" --set prefix=a4,accelerator=nvidia-b200,gpus=16 --set "$missing="
        [[ "$output" == *"$missing"* ]]
    done
}

@test "an upgrade of a JobSet is refused in a line; a bucket gets the runs; without gIB the notes say so" {
    refused "the pods of a JobSet cannot be changed: helm -n default uninstall r, then helm install" --is-upgrade
    template --is-upgrade --set orchestrator=leaderworkerset >/dev/null
    logs() { template --set 'volumes.gcsMounts[0].bucketName=logs' "$@" | yaml_to_json | jq -r 'select(.kind == "JobSet") | .. | objects | select(.name? == "EPKIT_LOGS").value'; }
    [ "$(logs)" = /gcs/testbed-logs ]
    [ "$(logs --set 'volumes.gcsMounts[0].mountPath=/data')" = /data/testbed-logs ]
    [ -z "$(logs --set 'volumes.gcsMounts[0].readOnly=true')" ]
    # helm shows notes only of a release: here they are a template as the others.
    cp -r "$CHART" "$BATS_TEST_TMPDIR/chart"
    { echo '{{- define "notes" -}}'; cat "$CHART/templates/NOTES.txt"; printf '{{- end }}\nnotes: {{ include "notes" . | quote }}\n'; } \
        >"$BATS_TEST_TMPDIR/chart/templates/notes.yaml"
    notes() { helm template r "$BATS_TEST_TMPDIR/chart" --set workload.image="$IMAGE" --show-only templates/notes.yaml "$@"; }
    notes | grep -q 'network.gibImage is empty: unless the image contains gIB, NCCL uses TCP'
    run ! grep -q 'gibImage is empty' <(notes -f "$EPKIT_SOURCE/deploy/gke-runtime/values.yaml")
}

# The blocks of the page for GKE, run from the first to the last: helm renders what it would install, kubectl and gcloud stop
# where they ask for a cluster or an account, and what only a node has does nothing. Flags, paths, values and patches are
# real. gcloud runs without a network and without the user's configuration.
write_page() { # PAGE
    cat >"$BATS_TEST_TMPDIR/page.sh" <<'END'
set -eu
helm() {
    local verb=$1
    shift
    echo "helm $verb $*" >>"$ASKED"
    case $verb in
    install | upgrade | template) command helm template "$@" ;;
    *) command helm "$verb" --help | grep -q "^  helm $verb" ;;
    esac
}
kubectl() {
    local said=0 word words=(--kubeconfig=/dev/null --server=http://127.0.0.1:1 --request-timeout=1s)
    echo "kubectl $*" >>"$ASKED"
    if [ "$1 ${2:-}" = 'apply -k' ] || [ "$1 ${2:-}" = 'delete -k' ]; then command kubectl kustomize "$3" >"$ASKED.kustomize"; fi
    for word in "$@"; do
        case $word in
        https://*) words+=(/dev/null) ;; # nothing is fetched here
        *) words+=("$word") ;;
        esac
    done
    said=$(command kubectl "${words[@]}" 2>&1 </dev/null) || true
    case $said in
    *'refused'* | *'no objects passed'*) ;; # there is no cluster; the file was not fetched
    *)
        echo "kubectl $*: $said" >>"$ASKED.refused" # the command may be in a pipe
        ;;
    esac
    [[ "$*" != *jsonpath* ]] || echo pod-0
}
gcloud() {
    local form=${*//[0-9]/}
    grep -qxF "gcloud $form" "$ASKED" && return
    echo "gcloud $form" >>"$ASKED"
    jq -nc '$ARGS.positional' --args -- "$@" >>"$ASKED.gcloud"
}
for program in epkit srun sbatch sudo; do eval "$program() { cat >/dev/null <&0 || true; }"; done
exec </dev/null
END
    awk '/^```/ { block = /^```sh$/ && gke; next } /^#/ && !block { gke = /GKE/ || /^## 7/; next } block' "$1" >>"$BATS_TEST_TMPDIR/page.sh"
}

@test "the commands of the quickstart are taken by helm, kubectl and gcloud, one after the other" {
    command -v jq >/dev/null || skip "jq is not installed"
    need kubectl
    cp -r "$EPKIT_SOURCE/deploy" "$BATS_TEST_TMPDIR/"
    export ASKED="$BATS_TEST_TMPDIR/asked" USER=somebody
    : >"$ASKED"
    : >"$ASKED.refused"
    write_page "$EPKIT_SOURCE/docs/quickstart.md"
    sed -i -E 's/^export ZONE=""/export ZONE=us-central1-b/; s/^export ([A-Z_]+)=""/export \1=my-name/' "$BATS_TEST_TMPDIR/page.sh"
    (cd "$BATS_TEST_TMPDIR" && bash page.sh >page.out)
    if command -v gcloud >/dev/null && unshare --net true 2>/dev/null; then
        cd "$BATS_TEST_TMPDIR" # where the page's files are
        CLOUDSDK_CONFIG="$BATS_TEST_TMPDIR/gcloud" CLOUDSDK_CORE_PROJECT=my-name \
            CLOUDSDK_PYTHON_ARGS="-S $EPKIT_SOURCE/tests/deploy/gcloud_all.py" unshare --net gcloud "$ASKED.gcloud" >>"$ASKED.refused"
    fi
    cat "$ASKED.refused"
    [ ! -s "$ASKED.refused" ]
    [ "$(grep -c '^helm' "$ASKED")" -ge 4 ]
    grep -q '^kubectl' "$ASKED"
    grep -q '^gcloud container node-pools create my-name .*--additional-node-network=network=my-name-rdma-net,subnetwork=my-name-rdma-sub- ' "$ASKED"
}

@test "each variable of the quickstart is set before it is used, and refused when it is empty" {
    local name
    write_page "$EPKIT_SOURCE/docs/quickstart.md"
    sed -i 's/^helm() {$/helm() { return; }\nkubectl() { return; }\ngcloud() { return; }\nunused() {/; /^kubectl() {$/,/^for program/{/^for program/!d}' "$BATS_TEST_TMPDIR/page.sh"
    cp -r "$EPKIT_SOURCE/deploy" "$BATS_TEST_TMPDIR/"
    mapfile -t names < <(sed -n 's/^export \([A-Z_]*\)="".*/\1/p' "$BATS_TEST_TMPDIR/page.sh")
    [ "${#names[@]}" -eq 7 ]
    for name in "${names[@]}" none; do
        sed -E "/^export $name=/! s/^export ([A-Z_]+)=\"\"/export \1=us-x/" "$BATS_TEST_TMPDIR/page.sh" >"$BATS_TEST_TMPDIR/one.sh"
        cd "$BATS_TEST_TMPDIR"
        if [ "$name" = none ]; then
            USER=somebody bash one.sh
        else
            run ! env USER=somebody bash one.sh
            [[ "$output" == *"$name"* || ("$name" = ZONE && "$output" == *REGION*) ]]
        fi
    done
}

@test "what a user's environment variable sets wins over the chart's own" {
    template --set-json 'workload.envs=[{"name":"RUN_DEEPEP_TEST","value":"true"},{"name":"NCCL_SOCKET_IFNAME","value":"eth9"}]' |
        yaml_to_json | jq -se 'map(select(.kind == "JobSet"))[0].spec.replicatedJobs[0].template.spec.template.spec
            .containers[0].env | map(select(.name | IN("RUN_DEEPEP_TEST", "NCCL_SOCKET_IFNAME"))) |
            map(.value) == ["true", "eth9"]'
}

#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit deploy check without a cluster: files, refusals, kubectl that is missing, silent or broken.
# tests/deploy/cluster.bats compares its predictions with real clusters.
#
# shellcheck disable=SC2154,SC2030,SC2031,SC2016 # set by run; variables of jq

load common

setup() {
    cd "$BATS_TEST_TMPDIR" || exit 1
    # The job and the cluster of the fuzz target's corpus: the job fits the cluster.
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
    # Output of other programs and editors.
    epkit deploy check -f <(cat job.yaml) --from <(sleep 0.5; cat cluster.json)
    epkit deploy check -f <(printf '\xef\xbb\xbf'; sed 's/$/\r/' job.yaml) --from cluster.json
    epkit deploy check -f job.yaml --from <(printf '\xef\xbb\xbf'; cat cluster.json)
    # Nobody writes to it: that is said, and does not look like a hang.
    mkfifo pipe
    run --separate-stderr timeout 5 "$EPKIT" deploy check -f pipe --from cluster.json
    [ "$stderr" = "epkit: pipe is a pipe: waiting for data, at most 60 s" ]
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

@test "resources that were not read are listed, and there is no verdict" {
    jq 'del(.items.nodes) | .unread.nodes = "forbidden"' cluster.json >changed.json
    run --separate-stderr epkit deploy check -f job.yaml --from changed.json
    [ "$status" -eq 1 ]
    [[ "$output" == "No verdict on Job j: nodes were not read."* ]]
    [[ "$stderr" == *"nodes could not be read"*"forbidden"* ]]
    code=0
    epkit deploy check -f job.yaml --from changed.json --json >json || code=$?
    [ "$code" -eq 1 ]
    valid deploy json
    [ "$(jq .will_run json)" = null ]
}

# found FILTER [SED]: IDs and messages for a cluster changed by jq and a job changed by sed
found() {
    jq "$1" cluster.json >changed.json
    sed "${2:-}" job.yaml >changed.yaml
    epkit deploy check -f changed.yaml --from changed.json --json >json || [ $? -eq 3 ] || echo "no answer"
    jq -r '.findings[] | .severity + " " + .id + ": " + .says' json
}

@test "claims for one node or one pod, and several pods" {
    mode() { echo "(.items.persistentvolumeclaims[] | select(.metadata.name == \"data\").spec) |= {accessModes: [\"$1\"], storageClassName: \"c\"} | .items.storageclasses = [{metadata: {name: \"c\"}, provisioner: \"p\"}]"; }
    driver() { echo "| .items.csidrivers += [{metadata: {name: \"p\"}, spec: {attachRequired: $1}}]"; }
    [ "$(found "$(mode ReadWriteOnce)$(driver true)")" = "error claim-access: Multi-Attach error for volume" ]
    [ "$(found "$(mode ReadWriteOnce)")" = "warning claim-access: Multi-Attach error for volume" ]
    [ -z "$(found "$(mode ReadWriteOnce)$(driver false)")" ]
    [ -z "$(found "$(mode ReadWriteMany)$(driver true)")" ]
    # One pod, or pods that may share a node.
    [ -z "$(found "$(mode ReadWriteOnce)$(driver true)" 's/parallelism: 2/parallelism: 1/')" ]
    [ -z "$(found "$(mode ReadWriteOnce)$(driver true)" 's,nvidia.com/gpu: 8,nvidia.com/gpu: 1,')" ]
    [[ "$(found "$(mode ReadWriteOncePod)$(driver false)")" == "error claim-access: node has pod using PersistentVolumeClaim"* ]]
}

@test "images: names that no kubelet can parse, and images that other pods cannot pull, also in init containers" {
    image() { found . "s|image: .*|image: \"$1\"|"; }
    local name
    for name in r.example/Team/nemo:1 Nemo r.example//a:1 r.example/a: r.example/a:-1 a@sha256 -a; do
        [ "$(image "$name")" = "error image-name: couldn't parse image name \"$name\"" ]
    done
    for name in nemo nemo:25.11 R.Example:5000/a/b-c_d.e:V1 localhost/a:1 r.example/a:1@sha256:$(printf 'a%.0s' $(seq 64)); do
        [ -z "$(image "$name")" ]
    done
    [ "$(found '.items.pods += [{metadata: {name: "x", namespace: "y"}, status: {initContainerStatuses: [{image: "r.example/gib:2", state: {waiting: {reason: "ErrImagePull", message: "denied"}}}]}}]' \
        's,^      containers:,      initContainers: [{name: i\, image: "r.example/gib:1"}]\n&,')" = "error image-pull: ImagePullBackOff: denied" ]
}

@test "a dry run of an object does not see the namespace that the manifest brings" {
    printf -- '---\n{apiVersion: v1, kind: Namespace, metadata: {name: ns}}\n' >>job.yaml
    jq '.items.namespaces = []' cluster.json >changed.json
    printf '%s\n' '#!/bin/sh' 'case "$*" in' '*create*) echo "Error from server (NotFound): namespaces \"ns\" not found" >&2; exit 1 ;;' \
        '*version*) echo "{\"serverVersion\": {\"gitVersion\": \"v1.33.5-gke.1162000\"}}" ;;' \
        '*/apis*) echo "{\"groups\": [{\"versions\": [{\"groupVersion\": \"batch/v1\"}, {\"groupVersion\": \"networking.gke.io/v1\"}]}]}" ;;' \
        '*template*) exit 0 ;;' "*) echo '{\"items\": []}' ;;" 'esac' >kube
    chmod +x kube
    epkit deploy check -f job.yaml --kubectl ./kube --json >json || [ $? -eq 3 ]
    [ "$(jq '[.findings[] | select(.says | test("namespaces"))] | length' json)" -eq 0 ]
    sed -i '/^---/,$d' job.yaml
    epkit deploy check -f job.yaml --kubectl ./kube --json >json || [ $? -eq 3 ]
    [ "$(jq '[.findings[] | select(.says | test("namespaces"))] | length' json)" -gt 0 ]
}

@test "nodes with a taint: the finding names it" {
    found '.items.nodes[].spec.taints += [{key: "dedicated", value: "ml", effect: "NoExecute"}]' | grep '^error nodes: 0/'
    jq -r '.findings[].why' json | grep -F 'have a taint that is not tolerated (dedicated:NoExecute)'
    [ -z "$(found '.items.nodes[].spec.taints += [{key: "dedicated", value: "ml", effect: "NoExecute"}]' \
        's,operator: Exists}\],operator: Exists}\, {key: dedicated\, value: ml}],')" ]
}

@test "pods that keep others off a node: ports of the host, anti-affinity of either side" {
    local two
    two='.items.nodes[0].metadata.labels["kubernetes.io/hostname"] = "n0" | .items.nodes += [.items.nodes[0] |
         .metadata.name = "n1" | .metadata.labels["kubernetes.io/hostname"] = "n1"]'
    # other NAMESPACE SPEC: a pod on node n1
    other() {
        echo "$two | .items.pods = [{metadata: {name: \"x\", namespace: \"$1\", labels: {app: \"x\"}}, spec: ({nodeName: \"n1\"} + $2), status: {phase: \"Running\"}}]"
    }
    # why CLUSTER JOB: of the nodes, or nothing if there is no finding
    why() {
        found "$1" "$2" >/dev/null
        jq -re 'if .findings then [.findings[] | select(.id == "nodes").why] | join("\n") else "no answer" end' json ||
            echo "no answer"
    }
    # In the network of the host, as with network.mode=host of the chart, sshd takes a port of the host.
    local host='s/^      volumes:/      hostNetwork: true\n&/; s/^        env:/        ports: [{containerPort: 222}]\n&/; s/gpu: 8/gpu: 4/'
    [[ "$(why . "$host")" == "1 of 2 pods find a node: "*"; a node takes one of them, because of port 222 of the host" ]]
    [ -z "$(why "$two" "$host")" ]
    [[ "$(why "$(other o '{containers: [{ports: [{hostPort: 222}]}]}')" "$host")" == "1 of 2 pods find a node: "*", 1 have a pod that keeps them off (by a port of the host, or by anti-affinity); "* ]]
    [ -z "$(why "$(other o '{containers: [{ports: [{containerPort: 222}, {hostPort: 222, protocol: "UDP"}, {hostPort: 22}]}]}')" "$host")" ]
    [ -z "$(why "$(other o '{containers: [{ports: [{hostPort: 222}]}]}') | .items.pods[].status.phase = \"Succeeded\"" "$host")" ]
    # A sidecar runs as long as the pod; to the scheduler only 0.0.0.0 is any address.
    [[ "$(why "$(other o '{initContainers: [{restartPolicy: "Always", ports: [{hostPort: 222}]}]}')" "$host")" == "1 of 2 pods find a node: "* ]]
    [ -z "$(why "$(other o '{initContainers: [{ports: [{hostPort: 222}]}]}')" "$host")" ]
    local addressed="${host/containerPort: 222/containerPort: 222, hostIP: 127.0.0.1}"
    [ -z "$(why "$(other o '{containers: [{ports: [{hostPort: 222, hostIP: "::"}]}]}')" "$addressed")" ]
    [[ "$(why "$(other o '{containers: [{ports: [{hostPort: 222, hostIP: "0.0.0.0"}]}]}')" "$addressed")" == "1 of 2 pods find a node: "* ]]
    # term LABEL KEY
    term() { echo "{podAntiAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{labelSelector: {matchLabels: {$1}}, topologyKey: $2}]}}"; }
    anti() { printf '%s\n' "s|^      volumes:|      affinity: $(term "$@")\\n&|; s/gpu: 8/gpu: 4/"; }
    # Of the job itself, by a label that the Job controller adds.
    found "$two | del(.items.nodes[1])" "$(anti '"batch.kubernetes.io/job-name": j' kubernetes.io/hostname)" | grep '^error nodes: 0/1'
    [[ "$(jq -r '.findings[].why' json)" == *"; a node takes one of them, because of their anti-affinity" ]]
    [ -z "$(why "$two" "$(anti '"batch.kubernetes.io/job-name": j' kubernetes.io/hostname)")" ]
    # Against a pod that is there: in the same namespace, on the node or in its zone.
    local one='; s/parallelism: 2/parallelism: 3/; s/gpu: 4/gpu: 8/'
    [[ "$(why "$(other ns '{}')" "$(anti 'app: x' kubernetes.io/hostname)$one")" == "2 of 3 pods find a node: "* ]]
    [ -z "$(why "$(other o '{}')" "$(anti 'app: x' kubernetes.io/hostname)$one")" ]
    [[ "$(why "$(other ns '{}') | .items.nodes[].metadata.labels.zone = \"z\"" "$(anti 'app: x' zone)$one")" == "0 of 3 pods find a node: "* ]]
    # Of a pod that is there, against the pods of the job.
    [[ "$(why "$(other ns "{affinity: $(term 'app: "j"' '"kubernetes.io/hostname"')}")" 's/parallelism: 2/parallelism: 3/')" == "2 of 3 pods find a node: "* ]]
    [ -z "$(why "$(other o "{affinity: $(term 'app: "j"' '"kubernetes.io/hostname"')}")" 's/parallelism: 2/parallelism: 3/')" ]
}

@test "amounts that the API server refuses, where it was not asked" {
    local gpus='nvidia.com/gpu: 8, cpu: 500m'
    # of LIMITS: the finding for these
    of() { found . "s|limits: {$gpus}|$1|" | grep -e '^error amount: ' -e '^no answer' | cut -d ' ' -f 3-; }
    [ "$(of 'requests: {nvidia.com/gpu: 8}')" = "spec.containers[0].resources.limits: Required value: Limit must be set for non overcommitable resources" ]
    [ "$(of 'limits: {nvidia.com/gpu: 8}, requests: {nvidia.com/gpu: 4}')" = \
        'spec.containers[0].resources.requests: Invalid value: "4": must be equal to nvidia.com/gpu limit of 8' ]
    [ "$(of 'limits: {nvidia.com/gpu: 0.5}')" = 'spec.containers[0].resources.limits[nvidia.com/gpu]: Invalid value: "0.5": must be an integer' ]
    [ "$(of 'limits: {nvidia.com/gpu: 8, memory: -1Gi}')" = 'spec.containers[0].resources.limits[memory]: Invalid value: "-1Gi": must be greater than or equal to 0' ]
    # Devices and huge pages equal their limits, others are at most their limits.
    [ "$(of 'limits: {nvidia.com/gpu: 8, memory: 1Gi, cpu: 1}, requests: {memory: 2Gi, cpu: 500m}')" = \
        'spec.containers[0].resources.requests: Invalid value: "2Gi": must be less than or equal to memory limit of 1Gi' ]
    [ "$(of 'limits: {nvidia.com/gpu: 8, cpu: 1}, requests: {cpu: 2}')" = \
        'spec.containers[0].resources.requests: Invalid value: "2": must be less than or equal to cpu limit of 1' ]
    [ "$(of 'limits: {nvidia.com/gpu: 8, hugepages-2Mi: 1Gi}, requests: {hugepages-2Mi: 512Mi}')" = \
        'spec.containers[0].resources.requests: Invalid value: "512Mi": must be equal to hugepages-2Mi limit of 1Gi' ]
    for resources in 'limits: {nvidia.com/gpu: 8, cpu: 1}, requests: {cpu: 1000m, memory: 2Gi}' \
        'limits: {nvidia.com/gpu: 8, hugepages-2Mi: 1Gi}, requests: {hugepages-2Mi: 1024Mi}'; do
        [ -z "$(of "$resources")" ]
    done
    for amount in 10Mi5 1e 1K; do
        [ "$(of "limits: {nvidia.com/gpu: 8, memory: $amount}")" = "unable to parse quantity's suffix" ]
    done
    for amount in 1GB 1gb 1KI '"1 Gi"' three true; do
        [[ "$(of "limits: {nvidia.com/gpu: 8, memory: $amount}")" == 'quantities must match the regular expression '* ]]
        jq -e '.findings[0].why | startswith("spec.containers[0].resources.limits: memory is ")' json
    done
    for amount in 1G 1Gi 1.5Gi .5Gi 5. 1e9 1E6 12345 '"12345"' 100m 0 null; do
        [ -z "$(of "limits: {nvidia.com/gpu: 8, memory: $amount}")" ]
    done
}

@test "quotas: counted resources, what containers must specify, scopes, defaults of the namespace" {
    # with FILTER: findings for a cluster changed by FILTER
    with() {
        jq "$1" cluster.json >changed.json
        epkit deploy check -f job.yaml --from changed.json --json >json || [ $? -eq 3 ]
        jq -r '.findings[] | .id + ": " + .says' json
    }
    quota() { echo ".items.limitranges = ${2:-[]} | .items.resourcequotas = [{metadata: {name: \"q\", namespace: \"ns\"}, spec: $1}]"; }
    [ "$(with "$(quota '{hard: {"requests.cpu": "8", "limits.memory": "8Gi", memory: "8Gi"}}')")" = \
        "quota-unstated: failed quota: q: must specify limits.memory for: c; memory for: c" ]
    # A LimitRange specifies it for them; the job specifies its CPU itself.
    [ -z "$(with "$(quota '{hard: {"limits.memory": "8Gi"}}' '[{metadata: {name: "l", namespace: "ns"}, spec: {limits: [{type: "Container", default: {memory: "1Gi"}}]}}]')")" ]
    [ -z "$(with "$(quota '{hard: {"requests.cpu": "8", "limits.cpu": "8"}}')")" ]
    # The short name means requests.
    [ "$(with "$(quota '{hard: {cpu: "700m"}}')")" = \
        "namespace-quota: exceeded quota: q, requested: cpu=500m, used: cpu=500m, limited: cpu=700m" ]
    # Only pods in the scope of a quota count.
    [ -z "$(with "$(quota '{hard: {cpu: "700m"}, scopes: ["Terminating"]}')")" ]
    [ -n "$(with "$(quota '{hard: {cpu: "700m"}, scopes: ["NotTerminating"]}')")" ]
    [ -z "$(with "$(quota '{hard: {pods: "0"}, scopeSelector: {matchExpressions: [{scopeName: "PriorityClass", operator: "In", values: ["high"]}]}}')")" ]
    # A snapshot from before LimitRanges were read: no guesses.
    [ -z "$(with "$(quota '{hard: {memory: "8Gi"}}') | del(.items.limitranges)")" ]
}

@test "LimitRanges: bounds of containers and pods, and defaults that count as if the job specified them" {
    with() {
        jq ".items.limitranges = [{metadata: {name: \"l\", namespace: \"ns\"}, spec: {limits: [$1]}}] | ${2:-.}" cluster.json >changed.json
        epkit deploy check -f job.yaml --from changed.json --json >json || [ $? -eq 3 ]
        jq -r '.findings[] | .id + ": " + .says' json
    }
    [ -z "$(with '{type: "Container", max: {cpu: "1"}, min: {cpu: "100m"}}')" ]
    [ "$(with '{type: "Container", max: {cpu: "400m"}}')" = "limit-range: maximum cpu usage per Container is 400m, but limit is 500m" ]
    [ "$(with '{type: "Container", min: {cpu: "1"}}')" = "limit-range: minimum cpu usage per Container is 1, but request is 500m" ]
    [ "$(with '{type: "Container", max: {memory: "1Gi"}}')" = "limit-range: maximum memory usage per Container is 1Gi.  No limit is specified" ]
    [ -z "$(with '{type: "Container", max: {memory: "1Gi"}, default: {memory: "1Gi"}}')" ]
    [ "$(with '{type: "Pod", max: {"nvidia.com/gpu": "4"}}')" = "limit-range: maximum nvidia.com/gpu usage per Pod is 4, but limit is 8" ]
    # Two pods; the second one does not fit any more.
    [ "$(with '{type: "Container", default: {memory: "3Gi"}}' \
        '.items.resourcequotas = [{metadata: {name: "q", namespace: "ns"}, spec: {hard: {"limits.memory": "4Gi", "requests.cpu": "8"}}}]')" = \
        "namespace-quota: exceeded quota: q, requested: limits.memory=3Gi, used: limits.memory=3Gi, limited: limits.memory=4Gi" ]
}

@test "answers of the API server apply only to their object, and replace less exact predictions" {
    # answered TEXT FILTER: the API server gave this answer for a pod of the job
    answered() {
        python3 - "$1" >answers <<'END'
import json, sys, yaml
job = yaml.safe_load(open("job.yaml"))
pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"generateName": "j-main-", "namespace": "ns",
       **job["spec"]["template"]["metadata"]}, "spec": job["spec"]["template"]["spec"]}
digest = 14695981039346656037
for byte in json.dumps(pod, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode():
    digest = (digest ^ byte) * 1099511628211 % (1 << 64)
print(json.dumps({f"{digest:016x}": sys.argv[1]}))
END
        jq --slurpfile answers answers ".answers = \$answers[0] | ${2:-.}" cluster.json >changed.json
        epkit deploy check -f "${3:-job.yaml}" --from changed.json --json >json || [ $? -eq 3 ]
        jq -r '.findings[] | .id + ": " + .says' json
    }
    [ -z "$(answered '')" ]
    [ "$(answered 'pods "j-main-x2z9k" is forbidden: pod rejected: RuntimeClass "r" not found')" = \
        'refused: pod rejected: RuntimeClass "r" not found' ]
    [ "$(answered 'pods "j-main-x2z9k" is forbidden: violates PodSecurity "restricted:latest": seccompProfile (pod must set it)' \
        '.items.namespaces[0].metadata.labels["pod-security.kubernetes.io/enforce"] = "restricted"')" = \
        'pod-security: violates PodSecurity "restricted:latest": seccompProfile (pod must set it)' ]
    # A controller creates pods, whatever rights the user has.
    [ -z "$(answered 'pods is forbidden: User "me" cannot create resource "pods" in API group "" in the namespace "ns"')" ]
    sed 's/8, cpu/4, cpu/' job.yaml >other.yaml
    [ -z "$(answered 'pods "j-main-x2z9k" is forbidden: no' . other.yaml)" ]
}

# queues FILTER: the cluster with Kueue: queue q of ClusterQueue a, flavor f, 8 nodes with 8 GPUs, changed by FILTER
queues() {
    jq --arg gpu nvidia.com/gpu '
        def quota(n; more): [{coveredResources: [$gpu], flavors: [{name: "f", resources: [{name: $gpu, nominalQuota: (n | tostring)} + more]}]}];
        def reserved(n): [{name: "f", resources: [{name: $gpu, total: (n | tostring)}]}];
        def node(n): .items.nodes[0] | .metadata.name = "n\(n)" | .metadata.labels["kubernetes.io/hostname"] = "n\(n)" |
            .metadata.labels.block = "b\(n / 4 | floor)" | .status.allocatable = {($gpu): "8", cpu: "100", memory: "1000Gi", pods: "110"};
        . as $c | .groups += ["kueue.x-k8s.io/v1beta2", "jobset.x-k8s.io/v1alpha2"] | .rights["jobsets.jobset.x-k8s.io"] = true |
        .items += {jobsets: [], topologies: [], cohorts: [], workloads: [], nodes: [range(8) as $n | $c | node($n)],
            localqueues: [{metadata: {name: "q", namespace: "ns"}, spec: {clusterQueue: "a"}}],
            resourceflavors: [{metadata: {name: "f"}, spec: {tolerations: [{operator: "Exists"}]}}],
            clusterqueues: [{metadata: {name: "a"}, spec: {namespaceSelector: {}, resourceGroups: quota(64; {})}}]} |
        '"$1" cluster.json >changed.json
}

# asks GPUS [ARGUMENT...]: messages of Kueue and the scheduler for a job of so many GPUs in queue q
asks() {
    epkit deploy check --gpus "$1" --queue q --namespace ns "${@:2}" --from changed.json --json >json || [ $? -eq 3 ]
    jq -r '.findings[] | select(.id | test("^(quota|topology|nodes)")) | .says' json
}

@test "Cohorts: quota of their own, lent and borrowed within limits, through parents" {
    queues '.items.clusterqueues = [
            {metadata: {name: "a"}, spec: {namespaceSelector: {}, cohortName: "team", resourceGroups: quota(8; {})}},
            {metadata: {name: "b"}, spec: {namespaceSelector: {}, cohortName: "team", resourceGroups: quota(16; {lendingLimit: "8"})},
                status: {flavorsReservation: reserved(12)}}] |
        .items.cohorts = [
            {metadata: {name: "team"}, spec: {parentName: "org", resourceGroups: quota(8; {borrowingLimit: "8"})}},
            {metadata: {name: "org"}, spec: {resourceGroups: quota(16; {})}}]'
    # 8 and 8 of the queues that are lent, 8 of team, 8 that team may borrow of the 16 of org; 4 of them are in use.
    [ "$(asks 40)" = "couldn't assign flavors to pod set workload: insufficient quota for nvidia.com/gpu in flavor f, previously considered podsets requests (0) + current podset request (40) > maximum capacity (32)" ]
    [ "$(asks 32)" = "couldn't assign flavors to pod set workload: insufficient unused quota for nvidia.com/gpu in flavor f, 4 more needed" ]
    [ -z "$(asks 24)" ]
    # Without the objects, Cohorts are only names.
    jq '.items.cohorts = []' changed.json >less.json && mv less.json changed.json
    [[ "$(asks 24)" == *"maximum capacity (16)" ]]
    # A cycle ends.
    jq '.items.cohorts = [{metadata: {name: "team"}, spec: {parentName: "org"}}, {metadata: {name: "org"}, spec: {parentName: "team"}}]' \
        changed.json >less.json && mv less.json changed.json
    asks 24 >/dev/null
    jq '.items.cohorts = [{metadata: {name: "team"}, spec: {parentName: "team"}}]' changed.json >less.json && mv less.json changed.json
    asks 24 >/dev/null
}

@test "objects that the manifest brings itself are there" {
    jq '.groups += ["kueue.x-k8s.io/v1beta2", "jobset.x-k8s.io/v1alpha2", "scheduling.k8s.io/v1"] | .items.namespaces = [] |
        .items += {priorityclasses: [], localqueues: [], clusterqueues: [], resourceflavors: [], topologies: [], cohorts: []}' \
        cluster.json >changed.json
    sed 's/name: j, namespace: ns/&, labels: {kueue.x-k8s.io\/queue-name: q}/; s/^      containers:/      priorityClassName: high\n&/' job.yaml >job
    run --separate-stderr epkit deploy check -f job --from changed.json --json
    [ "$(jq -c '[.findings[].id] | sort' <<<"$output")" = '["namespace-missing","priority-missing","queue-missing"]' ]
    brings() {
        cat job
        echo '---'
        echo '{apiVersion: v1, kind: List, items: [{apiVersion: v1, kind: Namespace, metadata: {name: ns}},
            {apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: high}},
            {apiVersion: kueue.x-k8s.io/v1beta2, kind: LocalQueue, metadata: {name: q}, spec: {clusterQueue: a}},
            {apiVersion: kueue.x-k8s.io/v1beta2, kind: ResourceFlavor, metadata: {name: f}},
            {apiVersion: kueue.x-k8s.io/v1beta2, kind: ClusterQueue, metadata: {name: a}, spec: {namespaceSelector: {}, resourceGroups: [
                {coveredResources: [nvidia.com/gpu, cpu], flavors: [{name: f, resources: [{name: nvidia.com/gpu, nominalQuota: '"$1"'}, {name: cpu, nominalQuota: 9}]}]}]}}]}'
    }
    brings 16 >with
    epkit deploy check -f with --from changed.json
    brings 8 >with
    run --separate-stderr epkit deploy check -f with --from changed.json --json
    [ "$(jq -r '.findings[].id' <<<"$output")" = quota ]
}

@test "the quota is for all groups of pods of a JobSet together" {
    queues .
    sets() {
        jq -n '{apiVersion: "jobset.x-k8s.io/v1alpha2", kind: "JobSet", metadata: {name: "two", namespace: "ns", labels: {"kueue.x-k8s.io/queue-name": "q"}},
            spec: {replicatedJobs: [range(2) | {name: "g\(.)", template: {spec: {parallelism: '"$1"', template: {spec: {
            tolerations: [{operator: "Exists"}], containers: [{name: "c", resources: {limits: {"nvidia.com/gpu": 8}}}]}}}}}]}}' >two.json
        epkit deploy check -f two.json --from changed.json --json >json || [ $? -eq 3 ]
        jq -r '.findings[] | select(.id == "quota").says' json
    }
    [ -z "$(sets 4)" ]
    jq '.items.resourcequotas = [{metadata: {name: "r", namespace: "ns"}, spec: {hard: {"requests.nvidia.com/gpu": "60"}}}]' \
        changed.json >less.json
    sets 4 >/dev/null
    epkit deploy check -f two.json --from less.json --json >json || [ $? -eq 3 ]
    [ "$(jq -r '.findings[].says' json)" = "exceeded quota: r, requested: requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=56, limited: requests.nvidia.com/gpu=60" ]
    [ "$(sets 5)" = "couldn't assign flavors to pod set g1: insufficient quota for nvidia.com/gpu in flavor f, previously considered podsets requests (40) + current podset request (40) > maximum capacity (64)" ]
}

@test "all groups of a LeaderWorkerSet need quota and nodes" {
    groups() {
        jq -n '{apiVersion: "leaderworkerset.x-k8s.io/v1", kind: "LeaderWorkerSet", metadata: {name: "serve", namespace: "ns",
            labels: {"kueue.x-k8s.io/queue-name": "q"}}, spec: {replicas: '"$1"', leaderWorkerTemplate: {size: 2, workerTemplate: {spec: {
            tolerations: [{operator: "Exists"}], containers: [{name: "c", resources: {limits: {"nvidia.com/gpu": 8}}}]}}}}} |
            '"${2:-.}" >serve.json
        epkit deploy check -f serve.json --from changed.json --json >json || [ $? -eq 3 ]
        jq -r '.findings[] | select(.id | test("^(quota|nodes)")) | .severity + ": " + .why' json
    }
    queues '.groups += ["leaderworkerset.x-k8s.io/v1"] | .rights["leaderworkersets.leaderworkerset.x-k8s.io"] = true'
    [ -z "$(groups 4)" ]
    [ "$(jq .job.pods json)" -eq 8 ]
    groups 5 >whys
    grep -Fx "warning: ClusterQueue a has room for 4 of 5 groups: the others wait" whys
    grep "^warning: 8 of 10 pods find a node" whys
    [[ "$(groups 5 'del(.metadata.labels)')" == "error: 8 of 10 pods find a node"* ]]
    # Leaders and workers do not get the same nodes.
    leaders='del(.metadata.labels) | .spec.leaderWorkerTemplate |= (.leaderTemplate = .workerTemplate)'
    [ -z "$(groups 4 "$leaders")" ]
    [[ "$(groups 5 "$leaders")" == "error: 3 of 5 pods find a node"*" 5 have too little left" ]]
}

@test "admitted jobs without pods use their resources" {
    workload='{metadata: {name: "w", namespace: "other"}, spec: {podSets: [{name: "main", count: 6, template: {spec: {tolerations:
        [{operator: "Exists"}], containers: [{name: "c", resources: {limits: {($gpu): "8"}}}]}}}]}, status: {conditions:
        [{type: "QuotaReserved", status: "True"}], admission: {clusterQueue: "a", podSetAssignments: [{name: "main", count: 6,
        flavors: {($gpu): "f"}}]}}}'
    queues ".items.workloads = [$workload]"
    [ -z "$(asks 16)" ]
    [ "$(asks 24)" = "0/8 nodes are available" ]
    [[ "$(jq -r '.findings[] | select(.id == "nodes").why' json)" == *"2 of 3 pods find a node"*"(6 pods of jobs that are admitted are still to come)" ]]
    # Existing pods are not counted twice; an ended job uses nothing.
    queues ".items.workloads = [$workload] | .items.pods = [range(6) | {metadata: {name: \"p\\(.)\", namespace: \"other\", labels: {\"kueue.x-k8s.io/podset\": \"main\"},
        annotations: {\"kueue.x-k8s.io/workload\": \"w\"}}, spec: {nodeName: \"n\\(.)\", containers: [{name: \"c\", resources: {limits: {(\$gpu): \"8\"}}}]}, status: {phase: \"Running\"}}]"
    [ -z "$(asks 16)" ]
    [ "$(asks 24)" = "0/8 nodes are available" ]
    queues ".items.workloads = [$workload | .status.conditions += [{type: \"Finished\", status: \"True\"}]]"
    [ -z "$(asks 64)" ]
    # With a topology the Workload lists their domains: the last node of each block is free.
    for assigned in '{levels: ["block", "kubernetes.io/hostname"], slices: [{domainCount: 3, valuesPerLevel: [{universal: "b0"}, {individual: {prefix: "n", roots: ["0", "1", "2"]}}],
            podCounts: {universal: 1}}, {domainCount: 3, valuesPerLevel: [{universal: "b1"}, {individual: {roots: ["n4", "n5", "n6"]}}], podCounts: {individual: [1, 1, 1]}}]}' \
        '{levels: ["kubernetes.io/hostname"], domains: [range(8) | select(. % 4 != 3) | {values: ["n\(.)"], count: 1}]}'; do
        queues ".items.workloads = [$workload | .status.admission.podSetAssignments[0].topologyAssignment = $assigned] |
            .items.topologies = [{metadata: {name: \"t\"}, spec: {levels: [{nodeLabel: \"block\"}, {nodeLabel: \"kubernetes.io/hostname\"}]}}] |
            .items.resourceflavors[0].spec.topologyName = \"t\""
        [ -z "$(asks 8 --topology block --required)" ]
        [ "$(asks 16 --topology block --required)" = "couldn't assign flavors to pod set workload: topology \"t\" allows to fit only 1 out of 2 pod(s)" ]
        [ -z "$(asks 16 --topology block)" ]
    done
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
    # Braces in a text, as of Argo or a dashboard, are no reason for another fault.
    printf 'kind: Job\ndata:\n  a: "{{x}}"\n  a: "{{y}}"\n' >twice.yaml
    refused "twice.yaml: line 4: key 'a' is there twice" check -f twice.yaml --from cluster.json
    [[ "$stderr" != *"helm template"* ]]
    printf '{{- if .Values.x }}\nkind: Job\n{{- end }}\n' >template.yaml
    refused "template.yaml: line 1: did not find expected node content; a template with {{ }} has to be rendered first" check -f template.yaml --from cluster.json
    printf 'kind: ConfigMap\n' >none.yaml
    refused "no JobSet, no LeaderWorkerSet and no Job" check -f none.yaml --from cluster.json
    # More groups of pods than are checked: refused, because the rest would not be checked.
    jq -n '{kind: "JobSet", metadata: {name: "big"}, spec: {replicatedJobs: [range(17) | {name: "g\(.)", template: {spec: {template: {spec: {}}}}}]}}' >big.json
    refused "JobSet big has more than 16 groups of pods" check -f big.json --from cluster.json
    jq -n '{kind: "JobSet", metadata: {name: "big"}, spec: {replicatedJobs: [{name: "a", template: {spec: {}}}, {name: "b", replicas: 2000000, template: {spec: {}}}]}}' >big.json
    refused "more than 1000000 pods in one" check -f big.json --from cluster.json
    # A value that the API server cannot decode is refused, not ignored.
    printf 'kind: Job\nmetadata: {name: x}\nspec: hello\n' >typed.yaml
    refused "typed.yaml: Job x: spec is a text and has to be a mapping" check -f typed.yaml --from cluster.json
    printf 'kind: Job\nmetadata: {name: x}\nspec: {parallelism: 1e9, template: {spec: {containers: []}}}\n' >typed.yaml
    refused "spec.parallelism is a" check -f typed.yaml --from cluster.json
    printf 'kind: Job\nmetadata: {name: x}\nspec: {template: {spec: {containers: {name: a}}}}\n' >typed.yaml
    refused "spec.template.spec.containers is a mapping and has to be a list" check -f typed.yaml --from cluster.json
    printf 'kind: JobSet\nmetadata: {name: x}\nspec: {replicatedJobs: [{template: {spec: {template: {spec: {tolerations: [a]}}}}}]}\n' >typed.yaml
    refused "spec.replicatedJobs[0].template.spec.template.spec.tolerations[0] has to be a mapping" check -f typed.yaml --from cluster.json
    printf 'kind: LeaderWorkerSet\nmetadata: {name: x}\nspec: {leaderWorkerTemplate: {size: "2"}}\n' >typed.yaml
    refused "spec.leaderWorkerTemplate.size is a text and has to be a whole number" check -f typed.yaml --from cluster.json
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
    # An unreachable server; the message of kubectl reaches the user.
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

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
    run -0 --separate-stderr epkit deploy check -f job.yaml --from cluster.json
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
    run -3 --separate-stderr epkit deploy check -f job.yaml --from changed.json
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
    run -1 --separate-stderr epkit deploy check -f job.yaml --from changed.json
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

@test "images that other pods cannot pull, also in init containers" {
    [ "$(found '.items.pods += [{metadata: {name: "x", namespace: "y"}, status: {initContainerStatuses: [{image: "r.example/gib:2", state: {waiting: {reason: "ErrImagePull", message: "denied"}}}]}}]' \
        's,^      containers:,      initContainers: [{name: i\, image: "r.example/gib:1"}]\n&,')" = "error image-pull: ImagePullBackOff: denied" ]
}

@test "a dry run of an object does not see the namespace that the manifest brings" {
    printf -- '---\n{apiVersion: v1, kind: Namespace, metadata: {name: ns}}\n' >>job.yaml
    jq '.items.namespaces = []' cluster.json >changed.json
    printf '%s\n' '#!/bin/sh' 'case "$*" in' '*create*) echo "Error from server (NotFound): namespaces \"ns\" not found" >&2; exit 1 ;;' \
        '*version*) echo "{\"serverVersion\": {\"gitVersion\": \"v1.33.5-gke.1162000\"}}" ;;' \
        '*/apis*) echo "{\"groups\": [{\"versions\": [{\"groupVersion\": \"batch/v1\"}, {\"groupVersion\": \"networking.gke.io/v1\"}]}]}" ;;' \
        "*) echo '{\"items\": []}' ;;" 'esac' >kube
    chmod +x kube
    epkit deploy check -f job.yaml --kubectl ./kube --json >json || [ $? -eq 3 ]
    [ "$(jq '[.findings[] | select(.says | test("namespaces"))] | length' json)" -eq 0 ]
    sed -i '/^---/,$d' job.yaml
    epkit deploy check -f job.yaml --kubectl ./kube --json >json || [ $? -eq 3 ]
    [ "$(jq '[.findings[] | select(.says | test("namespaces"))] | length' json)" -gt 0 ]
    # Nor does the user need the rights of the controllers, but those for the objects.
    says='jobs.batch is forbidden: User "me" cannot create resource "jobs" in API group "batch" in the namespace "ns"'
    sed -i "s/^\*create.*/*create*) cat refusal >\&2; exit 1 ;;/" kube
    echo "Error from server (Forbidden): error when creating \"/tmp/0.json\": $says" >refusal
    epkit deploy check -f job.yaml --kubectl ./kube --json >json || [ $? -eq 3 ]
    [ "$(jq -r '.findings[] | select(.id == "forbidden").says' json)" = "$says" ]
}

@test "answers of the API server apply only to their object" {
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
    # The quota of GPUs is found without a dry run, for all pods.
    [ "$(answered 'pods "j-main-x2z9k" is forbidden: exceeded quota: q, requested: requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=0, limited: requests.nvidia.com/gpu=4' \
        '.items.resourcequotas = [{metadata: {name: "q", namespace: "ns"}, spec: {hard: {"requests.nvidia.com/gpu": "4"}}}]')" = \
        'namespace-quota: exceeded quota: q, requested: requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=0, limited: requests.nvidia.com/gpu=4' ]
    # Several causes are one list.
    [ "$(answered $'The Pod "j-main-x2z9k" is invalid: \n* spec.a: bad\n* spec.b: worse')" = 'refused: [spec.a: bad, spec.b: worse]' ]
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
        . as $c | .groups += ["kueue.x-k8s.io/v1beta2", "jobset.x-k8s.io/v1alpha2"] |
        .items += {jobsets: [], topologies: [], nodes: [range(8) as $n | $c | node($n)],
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

@test "a queue of a Cohort borrows within its limit; without one, nothing is said about its quota" {
    cohort() { queues ".items.clusterqueues = [{metadata: {name: \"a\"}, spec: {namespaceSelector: {}, cohortName: \"team\", resourceGroups: quota(8; $1)}, status: {flavorsReservation: reserved(8)}}]"; }
    cohort '{borrowingLimit: "24"}'
    [ "$(asks 40)" = "couldn't assign flavors to pod set workload: insufficient quota for nvidia.com/gpu in flavor f, previously considered podsets requests (0) + current podset request (40) > maximum capacity (32)" ]
    [ "$(asks 32)" = "couldn't assign flavors to pod set workload: insufficient unused quota for nvidia.com/gpu in flavor f, 8 more needed" ]
    [ -z "$(asks 24)" ]
    cohort '{}'
    [ -z "$(asks 64)" ]
}

@test "topology: none of the flavor, a level that is unknown, a block that is too small, nodes in use" {
    with='.items.resourceflavors[0].spec.topologyName = "t" |
        .items.topologies = [{metadata: {name: "t"}, spec: {levels: [{nodeLabel: "block"}, {nodeLabel: "kubernetes.io/hostname"}]}}]'
    queues .
    [ "$(asks 8 --topology block)" = "couldn't assign flavors to pod set workload: Flavor \"f\" does not support TopologyAwareScheduling" ]
    queues "$with"
    [ "$(asks 8 --topology rack)" = "couldn't assign flavors to pod set workload: Flavor \"f\" does not contain the requested level" ]
    [ -z "$(asks 32 --topology block --required)" ]
    [ -z "$(asks 40 --topology block)" ]
    [ "$(asks 40 --topology block --required)" = "couldn't assign flavors to pod set workload: topology \"t\" allows to fit only 4 out of 5 pod(s)" ]
    jq -e '.findings[0] | .why == "the largest block has room for 4 pods; all of them together for 8" and (.fix | test("prefer the level"))' json
    queues "$with"' | .items.pods = [range(8) | {metadata: {name: "p\(.)"}, spec: {nodeName: "n\(.)", containers: [{resources: {limits: {($gpu): 1}}}]}, status: {phase: "Running"}}]'
    asks 8 --topology block | grep -xF "couldn't assign flavors to pod set workload: topology \"t\" doesn't allow to fit any of 1 pod(s)"
}

@test "a queue that is missing or inactive, or has no quota of GPUs; no Kueue" {
    # id FILTER: of the finding about the queue
    id() { queues "$1" && { asks 8 >/dev/null; jq -r '.findings[] | select(.by == "Kueue") | .id + ": " + .says' json; }; }
    [ "$(id '.items.localqueues = []')" = "queue-missing: LocalQueue q doesn't exist" ]
    [ "$(id '.items.clusterqueues = []')" = "cluster-queue-missing: ClusterQueue a doesn't exist" ]
    [ "$(id '.items.clusterqueues[0].status.conditions = [{type: "Active", status: "False", message: "no flavor"}]')" = "cluster-queue-inactive: ClusterQueue a is inactive" ]
    [ "$(id '.items.clusterqueues[0].spec.resourceGroups[0].coveredResources = ["cpu"]')" = "resource-uncovered: couldn't assign flavors to pod set workload: resource nvidia.com/gpu unavailable in ClusterQueue" ]
    [ "$(id '.groups = ["v1", "jobset.x-k8s.io/v1alpha2"]')" = "kueue-missing: the job stays suspended: nothing reads kueue.x-k8s.io/queue-name" ]
}

@test "objects that the manifest brings itself are there" {
    jq '.groups += ["kueue.x-k8s.io/v1beta2", "jobset.x-k8s.io/v1alpha2", "scheduling.k8s.io/v1"] | .items.namespaces = [] |
        .items += {localqueues: [], clusterqueues: [], resourceflavors: [], topologies: []}' \
        cluster.json >changed.json
    sed 's/name: j, namespace: ns/&, labels: {kueue.x-k8s.io\/queue-name: q}/; s/^      containers:/      priorityClassName: high\n&/' job.yaml >job
    run --separate-stderr epkit deploy check -f job --from changed.json --json
    [ "$(jq -c '[.findings[].id] | sort' <<<"$output")" = '["namespace-missing","queue-missing"]' ]
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
    [[ "$output" == *"or ask for at most 8"* ]]
    # Nobody can ask for 0 GPUs.
    brings 0 >with
    run --separate-stderr epkit deploy check -f with --from changed.json --json
    [[ "$output" == *"raise nominalQuota"* && "$output" != *"at most 0"* ]]
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
    queues '.groups += ["leaderworkerset.x-k8s.io/v1"]'
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

# refused TEXT ARGUMENT...
refused() {
    local text=$1
    shift
    run -2 --separate-stderr epkit deploy "$@"
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
    # Braces in a text, as of Argo or a dashboard, are no reason for another fault.
    printf 'kind: Job\ndata:\n  a: "{{x}}"\n  a: "{{y}}"\n' >twice.yaml
    refused "twice.yaml:4: 'a' is a duplicate" check -f twice.yaml --from cluster.json
    [[ "$stderr" != *"helm template"* && "$stderr" == *"--file takes what 'kubectl apply -f' takes"* ]]
    printf '{{- if .Values.x }}\nkind: Job\n{{- end }}\n' >template.yaml
    refused "template.yaml:1: a key must be a plain word" check -f template.yaml --from cluster.json
    [[ "$stderr" == *"a template with {{ }} has to be rendered first: helm template"* ]]
    # More groups of pods than are checked: refused, because the rest would not be checked.
    jq -n '{kind: "JobSet", metadata: {name: "big"}, spec: {replicatedJobs: [range(17) | {name: "g\(.)", template: {spec: {template: {spec: {}}}}}]}}' >big.json
    refused "JobSet big has more than 16 groups of pods" check -f big.json --from cluster.json
    refused "--kubectl is empty" check --gpus 8 --kubectl ' '
    echo '{' >broken.json
    refused "broken.json is no JSON: line " check -f job.yaml --from broken.json
    echo '{"a": 1}' >other.json
    refused "other.json is no snapshot of a cluster" check -f job.yaml --from other.json
    echo '{"epkit_cluster": 99, "items": {}}' >newer.json
    refused "version 99, and this epkit reads version 1" check -f job.yaml --from newer.json
}

@test "no kubectl: exit code 4; one that fails or does not answer: exit code 1, within its deadline" {
    run -4 --separate-stderr epkit deploy check --gpus 8 --kubectl ./no-such-program
    [[ "$stderr" == *"there is no './no-such-program'"*"--from FILE"* ]]
    run -1 --separate-stderr epkit deploy check --gpus 8 --kubectl false
    [[ "$stderr" == *"the cluster does not answer"* ]]
    # An unreachable server; the message of kubectl reaches the user.
    printf '#!/bin/sh\necho "The connection to the server was refused" >&2\nexit 1\n' >refusing
    printf '#!/bin/sh\nexec sleep 1000\n' >silent
    chmod +x refusing silent
    run -1 --separate-stderr epkit deploy check --gpus 8 --kubectl ./refusing
    [[ "$stderr" == *"the cluster does not answer: The connection to the server was refused"* ]]
    run -1 --separate-stderr epkit deploy check --gpus 8 --kubectl ./silent --timeout 1
    [[ "$stderr" == *"the cluster does not answer: no answer in time"* ]]
}

@test "hostile names do not reach the terminal as they are" {
    sed "s/^metadata: {name: j,/metadata: {name: \"j\\\\u001b[31m\",/" job.yaml >hostile.yaml
    jq '.items.secrets = []' cluster.json >changed.json
    run -3 --separate-stderr epkit deploy check -f hostile.yaml --from changed.json
    [[ "$output" != *$'\e[31m'* ]]
}

# recorded: a kubectl that answers from files RESOURCE.json and groups, and a gcloud that does from cluster and networks
recorded() {
    mkdir bin
    cat >bin/kubectl <<'END'
#!/bin/bash
case "$*" in
*version*) echo '{"serverVersion": {"gitVersion": "v1.34.1-gke.1829001"}}' ;;
*/apis*) sed 's/.*/{"versions": [{"groupVersion": "&"}]}/' groups | paste -sd, | sed 's/.*/{"groups": [&]}/' ;;
"config current-context") cat context ;;
*create*) ;;
*"-o name") cat "${2%%.*}.names" 2>/dev/null || true ;;
*) if [ -e "${2%%.*}.json" ]; then jq -s '{items: .}' "${2%%.*}.json"; else echo '{"items": []}'; fi ;;
esac
END
    cat >bin/gcloud <<'END'
#!/bin/bash
echo "$*" >>gcloud.calls
case "$*" in *describe*) cat cluster ;; *) cat networks ;; esac
END
    chmod +x bin/*
    PATH=$PWD/bin:$PATH
    echo gke_my-project_us-central1_my-cluster >context
    printf '%s\n' networking.k8s.io/v1 storage.k8s.io/v1 >groups
    echo '{"metadata": {"name": "default"}}' >namespaces.json
    echo '{"name": "my-cluster", "networkConfig": {"datapathProvider": "ADVANCED_DATAPATH"}}' >cluster
    echo '[]' >networks
}

# lacks [ARGUMENT...]: IDs of the prerequisites that are missing
lacks() {
    epkit deploy check --prerequisites "$@" --json >json || [ $? -eq 3 ]
    valid deploy json >/dev/null
    jq -r '[.findings[] | select(.severity == "error").id] | join(" ")' json
}

@test "prerequisites: each step of the quickstart takes its rows away, until the job can run" {
    recorded
    [ "$(lacks)" = "api-missing gpu-nodes rdma-vpc csi-missing kueue-missing" ]
    grep -x 'container clusters describe my-cluster --location us-central1 --project my-project --format=json --quiet' gcloud.calls
    run -3 --separate-stderr epkit deploy check --prerequisites
    [ "${lines[0]}" = "JobSet epkit will not run: 5 prerequisites are missing, the first: the cluster (v1.34.1-gke.1829001) does not serve jobset.x-k8s.io/v1alpha2." ]
    # What a cluster is made with.
    jq '.networkConfig = {}' cluster >cluster.old
    mv cluster.old cluster
    [ "$(lacks)" = "api-missing gpu-nodes dataplane rdma-vpc csi-missing kueue-missing" ]
    jq '.networkConfig.datapathProvider = "ADVANCED_DATAPATH"' cluster >new && mv new cluster
    # VPCs.
    jq -n '[{name: "a4-rdma-net", networkProfile: "https://x/us-central1-b-vpc-roce", subnetworks: [range(7) | "s"]}]' >networks
    [ "$(lacks)" = "api-missing gpu-nodes rdma-subnets csi-missing kueue-missing" ]
    jq -n '[{name: "a4-rdma-net", networkProfile: "https://x/us-central1-b-vpc-roce", subnetworks: [range(8) | "s"]}]' >networks
    [ "$(lacks)" = "api-missing gpu-nodes csi-missing kueue-missing" ]
    # A pool, first without its networks.
    jq '.nodePools = [{name: "cpu"}, {name: "a4-pool", config: {accelerators: [{}]}, networkConfig: {additionalNodeNetworkConfigs: [{}]}}]' cluster >new && mv new cluster
    jq -n 'range(2) | {metadata: {name: "n\(.)", labels: {"kubernetes.io/hostname": "n\(.)", "cloud.google.com/gke-accelerator": "nvidia-b200", "cloud.google.com/gce-topology-block": "b", "iam.gke.io/gke-metadata-server-enabled": "true"}},
        status: {conditions: [{type: "Ready", status: "True"}], nodeInfo: {osImage: "Container-Optimized OS from Google"}}}' >nodes.json
    [ "$(lacks)" = "api-missing gpu-driver multi-network node-networks csi-missing kueue-missing" ]
    jq '.nodePools[1].networkConfig.additionalNodeNetworkConfigs = [range(9) | {}]' cluster >new && mv new cluster
    jq '.status += {allocatable: {"nvidia.com/gpu": "8"}, capacity: {"nvidia.com/gpu": "8"}}' nodes.json >new && mv new nodes.json
    printf '%s\n' jobset.x-k8s.io/v1alpha2 kueue.x-k8s.io/v1beta2 networking.gke.io/v1 >>groups
    echo csidriver.storage.k8s.io/gcsfuse.csi.storage.gke.io >csidrivers.names
    [ "$(lacks)" = "network-missing queue-missing" ]
    jq -e '.findings[0].why | test("^9 of the 9 networks of the chart are missing: gvnic-1, rdma-0, .*rdma-7$")' json
    # deploy/gke, of which one subnet has another name than the pool's; an Ubuntu pool and DRANET need none of it.
    for name in gvnic-1 rdma-{0..7}; do
        echo "{\"metadata\": {\"name\": \"$name\"}, \"spec\": {\"parametersRef\": {\"name\": \"$name\"}}}" >>networks.json
        [ "$name" = rdma-7 ] || echo "{\"metadata\": {\"name\": \"$name\"}, \"status\": {\"conditions\": [{\"type\": \"Ready\", \"status\": \"True\"}]}}" >>gkenetworkparamsets.json
    done
    [ "$(lacks)" = "network-parameters queue-missing" ]
    sed -i 's/Container-Optimized OS from Google/Ubuntu 24.04/' nodes.json
    [ "$(lacks)" = "queue-missing" ]
    sed -i 's/Ubuntu 24.04/Container-Optimized OS/' nodes.json
    echo '{"metadata": {"name": "rdma-7"}, "status": {"conditions": [{"type": "Ready", "status": "False", "message": "subnet s not found"}]}}' >>gkenetworkparamsets.json
    [ "$(lacks)" = "network-parameters queue-missing" ]
    [ "$(jq -r '.findings[0].says' json)" = "subnet s not found" ]
    sed -i '$d' gkenetworkparamsets.json
    echo '{"metadata": {"name": "rdma-7"}}' >>gkenetworkparamsets.json
    echo '{"metadata": {"name": "a4", "namespace": "default"}, "spec": {"clusterQueue": "a4"}}' >localqueues.json
    echo '{"metadata": {"name": "a4"}, "spec": {"namespaceSelector": {}, "resourceGroups": [{"coveredResources": ["nvidia.com/gpu"], "flavors": [{"name": "a4", "resources": [{"name": "nvidia.com/gpu", "nominalQuota": "16"}]}]}]}}' >clusterqueues.json
    echo '{"metadata": {"name": "a4"}, "spec": {"topologyName": "gke-default"}}' >resourceflavors.json
    echo '{"metadata": {"name": "gke-default"}, "spec": {"levels": [{"nodeLabel": "cloud.google.com/gce-topology-block"}, {"nodeLabel": "kubernetes.io/hostname"}]}}' >topologies.json
    [ -z "$(lacks)" ]
    run -0 --separate-stderr epkit deploy check --prerequisites --save saved.json
    [ "$output" = "JobSet epkit can run on this cluster (v1.34.1-gke.1829001): 2 pods by queue a4." ]
    run -0 --separate-stderr epkit deploy check --prerequisites --from saved.json
    # More than there is, and another queue.
    [ "$(lacks --gpus 24)" = quota ]
    [ "$(lacks --queue a4-high)" = queue-missing ]
    # Only gcloud knows which networks the pool has.
    printf '#!/bin/sh\nexit 1\n' >bin/gcloud
    run -1 --separate-stderr epkit deploy check --prerequisites
    [ "$output" = "No verdict on JobSet epkit: answers of gcloud were not read." ]
}

@test "prerequisites without an answer of gcloud: said, and the rest is checked" {
    recorded
    printf '#!/bin/sh\necho "ERROR: (gcloud) You do not have an active account" >&2\nexit 1\n' >bin/gcloud
    run -3 --separate-stderr epkit deploy check --prerequisites
    [[ "$stderr" == *"answers of gcloud could not be read and were not checked: ERROR: (gcloud) You do not have an active account"* ]]
    echo kind-kind >context
    run -3 --separate-stderr epkit deploy check --prerequisites
    [[ "$stderr" == *"the context of kubectl, 'kind-kind', is not of the form gke_PROJECT_LOCATION_CLUSTER"* ]]
    run -2 --separate-stderr epkit deploy why j --prerequisites
}

#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit deploy why without a cluster: what real clusters say, as conditions and events, and what is quoted of it.
# tests/deploy/cluster.bats does the same with a real cluster.
#
# shellcheck disable=SC2154,SC2016,SC2030,SC2031 # set by run; variables of jq

load common

# A JobSet of two pods in a queue, admitted and running; the functions change it.
setup() {
    cd "$BATS_TEST_TMPDIR" || exit 1
    cat >functions.jq <<'END'
def at(t): "2026-01-01T00:\(t)Z";
def cond(type; status; reason; message): {type: type, status: status, reason: reason, message: message, lastTransitionTime: at("10:00")};
def owner(kind; name): [{kind: kind, name: name, uid: "uid-\(name)"}];
def meta(name): {name: name, namespace: "ns", uid: "uid-\(name)"};
def pod(n): {metadata: (meta("r-w-0-\(n)") + {labels: {"jobset.sigs.k8s.io/jobset-name": "r"}, ownerReferences: owner("Job"; "r-w-0")}),
    spec: {nodeName: "n\(n)"}, status: {phase: "Running", startTime: at("05:00"), conditions: [cond("PodScheduled"; "True"; ""; "")],
    containerStatuses: [{name: "workload", state: {running: {}}}]}};
def node(n): {metadata: {name: "n\(n)"}, status: {conditions: [cond("MemoryPressure"; "False"; "KubeletHasSufficientMemory"; ""), cond("Ready"; "True"; "KubeletReady"; "kubelet is posting ready status")]}};
def event(kind; name; type; reason; message): .items.events += [{involvedObject: {kind: kind, name: name, namespace: "ns", uid: "uid-\(name)"}, type: type, reason: reason, message: message, firstTimestamp: at("06:00"), lastTimestamp: at("19:00")}];
def warn(kind; name; reason; message): event(kind; name; "Warning"; reason; message);
def workload(conditions): .items.workloads = [{metadata: (meta("jobset-r-1b2c3") + {ownerReferences: owner("JobSet"; "r")}), status: {conditions: conditions}}];
# Not admitted: the JobSet is suspended, and has no pods.
def queued(conditions): workload(conditions) | .items.pods = [] | .items.jobsets[0].status.conditions = [cond("Suspended"; "True"; "SuspendedJobs"; "jobset is suspended")];
# Both pods are where these containers are.
def waits(reason; message): .items.pods[].status |= (.phase = "Pending" | .containerStatuses = [{name: "workload", state: {waiting: ({reason: reason} + if message then {message: message} else {} end)}}]);
def unplaced(message): .items.pods[] |= (.spec = {} | .status = {phase: "Pending", conditions: [cond("PodScheduled"; "False"; "Unschedulable"; message)]});
END
    jq -n "$(cat functions.jq)"' {epkit_cluster: 1, version: "v1.34.4", time: at("20:00"), groups: ["v1"], unread: {}, items: {
        jobsets: [{metadata: (meta("r") + {labels: {"kueue.x-k8s.io/queue-name": "a4"}}), spec: {replicatedJobs: [{name: "w", template: {spec: {parallelism: 2, template: {spec: {}}}}}]}, status: {conditions: []}}],
        leaderworkersets: [], jobs: [{metadata: (meta("r-w-0") + {ownerReferences: owner("JobSet"; "r")}), status: {}}],
        workloads: [], pods: [pod(0), pod(1)], events: [], nodes: [node(0), node(1)]}} | workload([cond("Admitted"; "True"; "Admitted"; "The workload is admitted")])' >base.json
}

# why CODE FILTER: the verdict for the job, changed by the filter
why() {
    local code=0
    jq "$(cat functions.jq) $2" base.json >changed.json
    epkit deploy why r -n ns --from changed.json --json >json || code=$?
    [ "$code" -eq "$1" ] || echo "exit code $code"
    valid deploy json
    jq -r .verdict json
}

@test "a job that runs, one that is complete" {
    [ "$(why 0 .)" = "JobSet r is running: 2 pods." ]
    [ "$(jq -c '[.state, .job.pods, .job.running, .job.workload, .reasons]' json)" = '["running",2,2,true,[]]' ]
    # What was before does not hold it up, nor does an old event of a pod that runs.
    [ "$(why 0 'warn("Pod"; "r-w-0-0"; "FailedScheduling"; "0/2 nodes are available") | event("JobSet"; "r"; "Normal"; "ResumeJobs"; "jobset is resumed")')" = "JobSet r is running: 2 pods." ]
    [ "$(why 0 '.items.pods = [] | .items.jobsets[0].status.conditions = [cond("Completed"; "True"; "AllJobsCompleted"; "jobset completed successfully")]')" = "JobSet r is complete." ]
    # One pod has ended, the other one runs.
    [ "$(why 0 '.items.pods[0].status.phase = "Succeeded"')" = "JobSet r is running: 1 pod." ]
    # A Job by itself, and a LeaderWorkerSet.
    jq "$(cat functions.jq)"' .items.jobs += [{metadata: meta("plain"), spec: {parallelism: 1, template: {spec: {}}}, status: {conditions: [cond("Complete"; "True"; "CompletionsReached"; "Reached expected number of succeeded pods")]}}] |
        .items.leaderworkersets = [{metadata: meta("serve"), spec: {replicas: 1, leaderWorkerTemplate: {size: 2, workerTemplate: {spec: {}}}}}] |
        .items.pods[].metadata.labels = {"leaderworkerset.sigs.k8s.io/name": "serve"}' base.json >others.json
    [ "$(epkit deploy why plain -n ns --from others.json)" = "Job plain is complete." ]
    [ "$(epkit deploy why serve -n ns --from others.json)" = "LeaderWorkerSet serve is running: 2 pods." ]
    jq "$(cat functions.jq)"' .items.pods = [] | warn("StatefulSet"; "serve"; "FailedCreate"; "create Pod serve-0 failed")' others.json >changed.json
    run --separate-stderr epkit deploy why serve -n ns --from changed.json
    [ "${lines[0]}" = "LeaderWorkerSet serve is held up: StatefulSet serve: FailedCreate: create Pod serve-0 failed." ]
}

@test "Kueue: quota, topology, flavors, preemption, admission checks, no Workload" {
    local held="JobSet r is held up: Workload jobset-r-1b2c3"
    for message in "couldn't assign flavors to pod set w: insufficient unused quota for nvidia.com/gpu in flavor a4, 16 more needed" \
        "couldn't assign flavors to pod set w: topology \\\"default\\\" allows to fit only 4 out of 5 pod(s)" \
        "LocalQueue a5 doesn't exist" "ClusterQueue a4 is inactive"; do
        [ "$(why 3 "queued([cond(\"QuotaReserved\"; \"False\"; \"Pending\"; \"$message\")])")" = "$held: Pending: ${message//\\/}." ]
    done
    # Later versions have other reasons.
    [ "$(why 3 'queued([cond("QuotaReserved"; "False"; "ExceedsMaxQuota"; "request exceeds maximum capacity")])')" = "$held: ExceedsMaxQuota: request exceeds maximum capacity." ]
    # Pods that are being removed after the preemption explain nothing.
    preempted='Preempted to accommodate a workload (UID: 9f542104, JobUID: a20d0a6a) due to prioritization in the ClusterQueue'
    [ "$(why 3 "workload([cond(\"Admitted\"; \"True\"; \"Admitted\"; \"\"), cond(\"Evicted\"; \"True\"; \"Preempted\"; \"$preempted\")]) |
        .items.pods[].status |= (.phase = \"Failed\" | .containerStatuses[0].state = {terminated: {exitCode: 143, reason: \"Error\"}})")" = "$held: Preempted: $preempted." ]
    [ "$(why 3 'queued([cond("QuotaReserved"; "False"; "Pending"; "Exceeded the PodsReady timeout ns/jobset-r-1b2c3"), cond("Requeued"; "False"; "PodsReadyTimeout"; "Exceeded the PodsReady timeout ns/jobset-r-1b2c3")])')" = \
        "$held: Pending: Exceeded the PodsReady timeout ns/jobset-r-1b2c3." ]
    [ "$(why 3 'queued([cond("QuotaReserved"; "True"; "QuotaReserved"; "Quota reserved in ClusterQueue a4")]) |
        .items.workloads[0].status.admissionChecks = [{name: "dws", state: "Pending", message: "Waiting for resources. Currently there are not enough resources available to fulfill the request.", lastTransitionTime: at("11:00")}]')" = \
        "$held: dws: Pending: Waiting for resources. Currently there are not enough resources available to fulfill the request." ]
    [ "$(why 3 'queued([]) | .items.workloads = []')" = "JobSet r is held up: JobSet r: SuspendedJobs: jobset is suspended; Kueue has made no Workload for it." ]
}

@test "controllers that cannot create pods; no word at all" {
    forbidden='Error creating: pods \"r-w-0-0-x\" is forbidden: exceeded quota: q, requested: requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=8, limited: requests.nvidia.com/gpu=8'
    [ "$(why 3 ".items.pods = [] | warn(\"Job\"; \"r-w-0\"; \"FailedCreate\"; \"$forbidden\") | event(\"JobSet\"; \"r\"; \"Normal\"; \"ResumeJobs\"; \"jobset is resumed\")")" = \
        "JobSet r is held up: Job r-w-0: FailedCreate: ${forbidden//\\/}." ]
    # Of a Job of the same name before this one.
    [ "$(why 5 '.items.pods = [] | warn("Job"; "r-w-0"; "FailedCreate"; "no") | .items.events[0].involvedObject.uid = "old"')" = \
        "JobSet r has 0 of 2 pods running, and the cluster gives no reason." ]
    [ "$(jq -r .state json)" = unknown ]
    [ "$(why 3 '.items.pods = [] | .items.jobs = [] | warn("JobSet"; "r"; "JobCreationFailed"; "job creation failed with error: jobs.batch \"r-w-0\" already exists")')" = \
        'JobSet r is held up: JobSet r: JobCreationFailed: job creation failed with error: jobs.batch "r-w-0" already exists.' ]
}

@test "the scheduler: no node for two pods, counted once; gated pods; the last of its messages" {
    few='0/8 nodes are available: 2 Insufficient nvidia.com/gpu, 6 node(s) had untolerated taint {dedicated: ml}. preemption: 0/8 nodes are available: 8 Preemption is not helpful for scheduling.'
    [ "$(why 3 "unplaced(\"$few\") | warn(\"Pod\"; \"r-w-0-0\"; \"FailedScheduling\"; \"$few\")")" = "JobSet r is held up: Pod r-w-0-0 and 1 other: Unschedulable: $few" ]
    [ "$(jq -c '[.reasons[] | [.object, .others, .since]]' json)" = '[["Pod r-w-0-0",1,"2026-01-01T00:10:00Z"]]' ]
    [ "$(why 3 '.items.pods[0].status = {phase: "Pending", conditions: [cond("PodScheduled"; "False"; "SchedulingGated"; "Scheduling is blocked due to non-empty scheduling gates")]}')" = \
        "JobSet r is held up: Pod r-w-0-0: SchedulingGated: Scheduling is blocked due to non-empty scheduling gates." ]
    # Two events of one reason: the later one counts, in whatever order they are listed.
    for order in . reverse; do
        why 3 ".items.pods[0].status = {phase: \"Pending\"} | warn(\"Pod\"; \"r-w-0-0\"; \"FailedScheduling\"; \"old\") | .items.events[0].lastTimestamp = at(\"07:00\") | warn(\"Pod\"; \"r-w-0-0\"; \"FailedScheduling\"; \"new\") | .items.events |= $order"
        [ "$(jq -c '[.reasons[].message]' json)" = '["new"]' ]
    done
    # events.k8s.io: another time, and no count.
    why 3 '.items.pods[0].status = {phase: "Pending"} | warn("Pod"; "r-w-0-0"; "FailedScheduling"; "x") | .items.events[0] |= (.firstTimestamp = null | .lastTimestamp = null | .eventTime = "2026-01-01T00:15:00.123456Z")'
    [ "$(jq -r '.reasons[0].since' json)" = 2026-01-01T00:15:00.123456Z ]
}

@test "the kubelet: images, volumes, configuration, network, crashes, memory, evictions" {
    local pod="JobSet r is held up: Pod r-w-0-0 and 1 other"
    back='Back-off pulling image \"r.example/nemo:1\": ErrImagePull: rpc error: code = NotFound desc = failed to pull and unpack image'
    [ "$(why 3 "waits(\"ImagePullBackOff\"; \"$back\")")" = "$pod: ImagePullBackOff: container workload: ${back//\\/}." ]
    [ "$(why 3 'waits("CreateContainerConfigError"; "secret \"hf\" not found")')" = "$pod: CreateContainerConfigError: container workload: secret \"hf\" not found." ]
    [ "$(why 3 'waits("InvalidImageName"; "Failed to apply default image tag \"R\": couldn'"'"'t parse image name")' | cut -c 1-62)" = "$pod: InvalidImageName" ]
    # A container that is being created: the events say what for.
    mount='MountVolume.SetUp failed for volume \"keys\" : secret \"r-ssh\" not found'
    [ "$(why 3 "waits(\"ContainerCreating\"; null) | warn(\"Pod\"; \"r-w-0-0\"; \"FailedMount\"; \"$mount\") | warn(\"Pod\"; \"r-w-0-1\"; \"FailedMount\"; \"$mount\") | event(\"Pod\"; \"r-w-0-0\"; \"Normal\"; \"Scheduled\"; \"assigned\")")" = \
        "$pod: FailedMount: ${mount//\\/}." ]
    [ "$(why 3 'waits("ContainerCreating"; null) | warn("Pod"; "r-w-0-1"; "FailedAttachVolume"; "Multi-Attach error for volume \"pvc-1\" Volume is already used by pod(s) r-w-0-0")')" = \
        'JobSet r is held up: Pod r-w-0-1: FailedAttachVolume: Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) r-w-0-0.' ]
    [ "$(why 3 'waits("PodInitializing"; null) | warn("Pod"; "r-w-0-0"; "FailedCreatePodSandBox"; "Failed to create pod sandbox: rpc error: code = Unknown desc = failed to setup network for sandbox")')" = \
        "JobSet r is held up: Pod r-w-0-0: FailedCreatePodSandBox: Failed to create pod sandbox: rpc error: code = Unknown desc = failed to setup network for sandbox." ]
    # Nothing is wrong yet: the last thing that happened.
    [ "$(why 3 'waits("ContainerCreating"; null) | event("Pod"; "r-w-0-0"; "Normal"; "Scheduled"; "assigned") | .items.events[0].lastTimestamp = at("05:00") | event("Pod"; "r-w-0-0"; "Normal"; "Pulling"; "Pulling image \"r.example/nemo:1\"")')" = \
        'JobSet r is held up: Pod r-w-0-0: Pulling: Pulling image "r.example/nemo:1".' ]
    # It runs and ends, again and again.
    [ "$(why 3 'waits("CrashLoopBackOff"; "back-off 5m0s restarting failed container=workload pod=r-w-0-0_ns(1b)") | .items.pods[].status |= (.phase = "Running" | .containerStatuses[0].lastState = {terminated: {exitCode: 137, reason: "OOMKilled"}})')" = \
        "$pod: CrashLoopBackOff: container workload: back-off 5m0s restarting failed container=workload pod=r-w-0-0_ns(1b); it ended with exit code 137 (OOMKilled)." ]
    [ "$(why 3 '.items.pods[0].status |= (.phase = "Failed" | .containerStatuses[0].state = {terminated: {exitCode: 137, reason: "OOMKilled", finishedAt: at("12:00")}})')" = \
        "JobSet r is held up: Pod r-w-0-0: OOMKilled: container workload ended with exit code 137 (OOMKilled)." ]
    [ "$(why 3 '.items.pods[0].status |= (.phase = "Failed" | .reason = "Evicted" | .message = "The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi, available: 9Gi." | del(.containerStatuses))')" = \
        "JobSet r is held up: Pod r-w-0-0: Evicted: The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi, available: 9Gi." ]
    [ "$(why 3 '.items.pods[0].status |= (.phase = "Failed" | .conditions = [cond("DisruptionTarget"; "True"; "PreemptionByScheduler"; "default-scheduler: preempting to accommodate a higher priority pod")])')" = \
        "JobSet r is held up: Pod r-w-0-0: PreemptionByScheduler: default-scheduler: preempting to accommodate a higher priority pod." ]
}

@test "nodes: one that does not answer explains its pods; pressure" {
    [ "$(why 3 '.items.nodes[1].status.conditions[1] = cond("Ready"; "Unknown"; "NodeStatusUnknown"; "Kubelet stopped posting node status.")')" = \
        "JobSet r is held up: Node n1: NodeStatusUnknown: Kubelet stopped posting node status." ]
    [ "$(jq .job.running json)" -eq 1 ]
    why 0 '.items.nodes[0].status.conditions[0] = cond("MemoryPressure"; "True"; "KubeletHasInsufficientMemory"; "kubelet has insufficient memory available")'
    [ "$(jq -c '[.reasons[] | [.object, .reason]]' json)" = '[["Node n0","KubeletHasInsufficientMemory"]]' ]
    # A user who may not read nodes is told so, and the rest is said.
    jq 'del(.items.nodes) | .unread.nodes = "nodes is forbidden"' base.json >changed.json
    run -0 --separate-stderr epkit deploy why r -n ns --from changed.json
    [[ "$stderr" == *"nodes could not be read"*"nodes is forbidden"* ]]
}

@test "a job that failed: its message, and how its pods ended" {
    failed='.items.jobsets[0].status.conditions = [cond("Failed"; "True"; "FailedJobs"; "jobset failed due to one or more job failures (first failed job: r-w-0)")]'
    [ "$(why 3 "$failed | .items.pods = []")" = "JobSet r failed: JobSet r: FailedJobs: jobset failed due to one or more job failures (first failed job: r-w-0)." ]
    [ "$(why 3 "$failed"' | .items.pods[1].status |= (.phase = "Failed" | .containerStatuses[0].state = {terminated: {exitCode: 1, reason: "Error", message: "RuntimeError"}})')" = \
        "JobSet r failed: Pod r-w-0-1: Error: container workload ended with exit code 1 (Error) RuntimeError." ]
    [ "$(jq -r .state json)" = failed ]
}

@test "a table: object, reason, since when, message; no control characters" {
    jq "$(cat functions.jq)"' waits("ImagePullBackOff"; "de\u001b[31mnied")' base.json >changed.json
    run -3 --separate-stderr epkit deploy why r -n ns --from changed.json
    [[ "$output" != *$'\e[31m'* ]]
    [[ "${lines[1]}" =~ ^OBJECT\ +OTHERS\ +REASON\ +SINCE\ +MESSAGE ]]
    [[ "${lines[2]}" =~ ^"Pod r-w-0-0"\ +1\ +ImagePullBackOff\ +15m\ +"container workload: de?[31mnied" ]]
}

# refused CODE TEXT ARGUMENT...
refused() {
    run --separate-stderr epkit deploy why "${@:3}"
    echo "$stderr"
    [ "$status" -eq "$1" ]
    [ -z "$output" ]
    [[ "$stderr" == *"$2"* ]]
}

@test "wrong usage, jobs that are not there, what could not be read" {
    refused 2 "name the job: epkit deploy why JOB"
    refused 2 "'jobset/r' is not a name: names of jobs have a-z, 0-9, '-' and '.'" jobset/r
    refused 2 "--gpus applies only to check" r --gpus 8
    refused 2 "--from reads a file" r --from base.json --save x
    refused 2 "namespace ns has no JobSet, LeaderWorkerSet or Job other" other -n ns --from base.json
    refused 2 "namespace default has no JobSet" r --from base.json
    echo '{"epkit_cluster": 1, "items": {}}' >check.json
    refused 2 "it has no jobs: 'epkit deploy why JOB --save FILE' writes such a file" r --from check.json
    jq 'del(.items.pods) | .unread.pods = "pods is forbidden"' base.json >changed.json
    refused 1 "pods of namespace ns could not be read: pods is forbidden" r -n ns --from changed.json
    jq 'del(.items.jobsets) | .unread.jobsets = "no"' base.json >changed.json
    refused 1 "jobsets of namespace ns could not be read: no" r -n ns --from changed.json
    run -2 --separate-stderr epkit deploy other
}

@test "kubectl reads the namespace; what is saved explains the same, and has no variables of containers" {
    jq "$(cat functions.jq)"' waits("ImagePullBackOff"; "denied") | .items.pods[].spec.containers = [{env: [{name: "HF_TOKEN", value: "hf_secret"}]}]' base.json >changed.json
    cat >kube <<'END'
#!/bin/sh
echo "$*" >>calls
case "$*" in
*version*) echo '{"serverVersion": {"gitVersion": "v1.34.4"}}' ;;
*/apis*) echo '{"groups": [{"versions": [{"groupVersion": "jobset.x-k8s.io/v1alpha2"}, {"groupVersion": "kueue.x-k8s.io/v1beta2"}]}]}' ;;
*) resource=${2%%.*}; jq -c "{items: .items.$resource}" changed.json ;;
esac
END
    chmod +x kube
    run -3 --separate-stderr epkit deploy why r -n ns --kubectl ./kube --save saved.json
    [[ "${lines[0]}" == "JobSet r is held up: Pod r-w-0-0 and 1 other: ImagePullBackOff: container workload: denied." ]]
    grep -q '^get pods -o json -n ns$' calls
    [ "$(grep -c leaderworkersets calls)" -eq 0 ]
    [ "$(stat -c %a saved.json)" = 600 ]
    run ! grep -q hf_secret saved.json
    run -3 --separate-stderr epkit deploy why r -n ns --from saved.json
    [[ "${lines[0]}" == "JobSet r is held up: Pod r-w-0-0 and 1 other: ImagePullBackOff: container workload: denied." ]]
}

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# kube.sh ACTION FOLDER [...] - a real Kubernetes control plane on loopback: etcd, kube-apiserver, controller-manager,
# scheduler, kwok for nodes that exist in the API alone; the controllers of JobSet, LeaderWorkerSet and Kueue with their
# webhooks, their charts installed by helm. Everything is kept below FOLDER; FOLDER/kubeconfig leads to it.
#
#   up                    the control plane
#   nodes N               N nodes like GKE A4: 8 nvidia.com/gpu, labels of pool, accelerator and topology
#   jobset | lws | kueue  definitions, rights and webhooks by the chart; the controller as a process
#   queue GPUS            the queue "a4" of deploy/gke, with that quota
#   down                  ends all processes that were started here
#
# PORT (default 16443) is the first of 40 ports in use. PER_BLOCK (default 4) nodes share a topology block.
set -euo pipefail
action=$1
dir=$(realpath -m "$2")
shift 2
here=$(cd "$(dirname "$0")" && pwd)
programs=$("$here/programs.sh" path)
PATH=$programs/bin:$PATH
export KUBECONFIG=$dir/kubeconfig
port=${PORT:-16443}
address=${ADDRESS:-127.0.0.1} # of the API server
etcd_port=$((port + 1)) etcd_peer=$((port + 2)) manager_port=$((port + 3)) scheduler_port=$((port + 4))
jobset_port=$((port + 5)) kueue_port=$((port + 6)) kwok_port=$((port + 7)) lws_port=$((port + 8))

# start NAME COMMAND...: in the background, with its output in a file; else the pipes of a caller would never close.
start() {
    local name=$1
    shift
    setsid "$@" >"$dir/$name.log" 2>&1 </dev/null &
    echo $! >"$dir/$name.pid"
}

# wait_for WHAT COMMAND...: by the second, since a loaded machine may take minutes.
wait_for() {
    local what=$1 end=$((SECONDS + 300))
    shift
    while [ "$SECONDS" -lt "$end" ]; do
        if "$@" >/dev/null 2>&1; then return 0; fi
        sleep 0.1
    done
    echo "kube.sh: $what did not come up; the logs are in $dir" >&2
    "$@" >&2 || true
    return 1
}

# certificates NAME: an authority, and a certificate of this machine, in FOLDER/NAME
certificates() {
    mkdir -p "$dir/$1"
    (
        cd "$dir/$1"
        new=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes)
        openssl req -x509 "${new[@]}" -keyout ca.key -out ca.crt -days 2 -subj "/CN=$1-ca"
        openssl req "${new[@]}" -keyout tls.key -out tls.csr -subj "/CN=127.0.0.1"
        openssl x509 -req -in tls.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -out tls.crt -extfile \
            <(echo "subjectAltName=IP:127.0.0.1,IP:$address,DNS:localhost,DNS:kubernetes.default.svc")
    ) 2>/dev/null
}

control_plane() {
    local token
    mkdir -p "$dir"
    chmod 700 "$dir"
    certificates apiserver
    (
        # What the API server shows to kubelets, for logs and exec.
        cd "$dir/apiserver"
        openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout kc.key -out kc.csr \
            -subj "/O=system:masters/CN=kube-apiserver"
        openssl x509 -req -in kc.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -out kc.crt \
            -extfile <(echo extendedKeyUsage=clientAuth)
        openssl genrsa -out "$dir/sa.key" 2048
    ) 2>/dev/null
    token=$(openssl rand -hex 16)
    # The second one has no rights but those that a test gives it.
    printf '%s,admin,admin,system:masters\n%s,guest,guest\n' "$token" "guest-$token" >"$dir/tokens.csv"
    for user in admin guest; do
        cat >"$dir/kubeconfig${user#admin}" <<END
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://$address:$port", certificate-authority: $dir/apiserver/ca.crt}}]
users: [{name: u, user: {token: $([ "$user" = admin ] || printf 'guest-')$token}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
END
    done
    local etcd="http://127.0.0.1:$etcd_port" own=("--kubeconfig=$KUBECONFIG" --leader-elect=false)
    start etcd etcd --data-dir "$dir/etcd" --listen-client-urls "$etcd" --advertise-client-urls "$etcd" \
        --listen-peer-urls "http://127.0.0.1:$etcd_peer" --unsafe-no-fsync --log-level warn
    start apiserver kube-apiserver --etcd-servers "$etcd" --bind-address 0.0.0.0 --advertise-address "$address" \
        --secure-port "$port" --tls-cert-file "$dir/apiserver/tls.crt" \
        --tls-private-key-file "$dir/apiserver/tls.key" --token-auth-file "$dir/tokens.csv" \
        --authorization-mode Node,RBAC --service-account-issuer https://kubernetes.default.svc \
        --service-account-key-file "$dir/sa.key" --service-account-signing-key-file "$dir/sa.key" \
        --service-cluster-ip-range 10.96.0.0/16 --allow-privileged=true --endpoint-reconciler-type=none \
        --kubelet-client-certificate "$dir/apiserver/kc.crt" --kubelet-client-key "$dir/apiserver/kc.key" \
        --kubelet-preferred-address-types=InternalIP --client-ca-file "$dir/apiserver/ca.crt" \
        --max-requests-inflight=2000 --max-mutating-requests-inflight=1000
    wait_for kube-apiserver kubectl get --raw /readyz
    start manager kube-controller-manager "${own[@]}" --secure-port "$manager_port" --bind-address 127.0.0.1 \
        --service-account-private-key-file "$dir/sa.key" --root-ca-file "$dir/apiserver/ca.crt" \
        --use-service-account-credentials=true --node-monitor-grace-period=3600s --kube-api-qps=500 --kube-api-burst=500
    start scheduler kube-scheduler "${own[@]}" --secure-port "$scheduler_port" --bind-address 127.0.0.1
    wait_for 'the account of the namespace default' kubectl get serviceaccount default
}

nodes() {
    local i
    if ! { [ -s "$dir/kwok.pid" ] && kill -0 "$(cat "$dir/kwok.pid")" 2>/dev/null; }; then
        start kwok kwok --kubeconfig "$KUBECONFIG" --manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake \
            --node-lease-duration-seconds=40 --server-address "127.0.0.1:$kwok_port"
    fi
    local resources='{cpu: "224", memory: 3900Gi, pods: "110", nvidia.com/gpu: "8", ephemeral-storage: 10Ti}'
    for i in $(seq 0 $(($1 - 1))); do
        cat <<END
---
apiVersion: v1
kind: Node
metadata:
  name: a4-$i
  annotations: {kwok.x-k8s.io/node: fake, node.alpha.kubernetes.io/ttl: "0"}
  labels:
    kubernetes.io/hostname: a4-$i
    kubernetes.io/os: linux
    kubernetes.io/arch: amd64
    type: kwok
    cloud.google.com/gke-nodepool: a4-pool
    cloud.google.com/gke-accelerator: nvidia-b200
    cloud.google.com/gke-os-distribution: ubuntu
    cloud.google.com/gce-topology-block: block-$((i / ${PER_BLOCK:-4}))
    cloud.google.com/gce-topology-subblock: sub-$((i / 2))
    cloud.google.com/gce-topology-host: host-$i
spec:
  taints: [{key: nvidia.com/gpu, value: present, effect: NoSchedule}]
status: {allocatable: $resources, capacity: $resources}
END
    done | kubectl apply -f - >/dev/null
    wait_for 'nodes' kubectl wait --for=condition=Ready node --all --timeout=5s
}

# answers PORT: somebody listens there
answers() {
    exec 3<>"/dev/tcp/127.0.0.1/$1"
}

# chart NAME NAMESPACE OPTION...
chart() {
    local name=$1 namespace=$2
    shift 2
    helm status "$name" -n "$namespace" >/dev/null 2>&1 ||
        helm install "$name" "$programs/charts/$name" -n "$namespace" --create-namespace "$@" >/dev/null
}

jobset() {
    certificates jobset-cert
    chart jobset jobset-system --set controller.replicas=0
    "$here/webhooks.py" jobset "$dir/jobset-cert" "$jobset_port"
    cat >"$dir/jobset.yaml" <<END
apiVersion: config.jobset.x-k8s.io/v1alpha1
kind: Configuration
leaderElection: {leaderElect: false}
internalCertManagement: {enable: false}
health: {healthProbeBindAddress: "127.0.0.1:$((port + 15))"}
metrics: {bindAddress: "0"}
webhook: {port: $jobset_port, host: 127.0.0.1, certDir: $dir/jobset-cert}
clientConnection: {qps: 500, burst: 500}
END
    start jobset jobset --config "$dir/jobset.yaml" --kubeconfig "$KUBECONFIG"
    wait_for 'the webhook of JobSet' answers "$jobset_port"
}

lws() {
    certificates lws-cert
    chart lws lws-system --set replicaCount=0
    "$here/webhooks.py" 'lws|leaderworkerset' "$dir/lws-cert" "$lws_port"
    cat >"$dir/lws.yaml" <<END
apiVersion: config.lws.x-k8s.io/v1alpha1
kind: Configuration
leaderElection: {leaderElect: false}
internalCertManagement: {enable: false}
health: {healthProbeBindAddress: "127.0.0.1:$((port + 18))"}
metrics: {bindAddress: "0"}
webhook: {port: $lws_port, host: 127.0.0.1, certDir: $dir/lws-cert}
clientConnection: {qps: 500, burst: 500}
END
    start lws lws --config "$dir/lws.yaml" --kubeconfig "$KUBECONFIG"
    wait_for 'the webhook of LeaderWorkerSet' answers "$lws_port"
}

kueue() {
    local frameworks='"batch/job", "jobset.x-k8s.io/jobset"'
    certificates kueue-cert
    chart kueue kueue-system --set controllerManager.replicas=0
    { kubectl get apiservice -o name | grep visibility.kueue || true; } | xargs -r kubectl delete >/dev/null
    "$here/webhooks.py" kueue "$dir/kueue-cert" "$kueue_port"
    cat >"$dir/kueue.yaml" <<END
apiVersion: config.kueue.x-k8s.io/v1beta2
kind: Configuration
leaderElection: {leaderElect: false}
internalCertManagement: {enable: false}
health: {healthProbeBindAddress: "127.0.0.1:$((port + 16))"}
metrics: {bindAddress: "127.0.0.1:$((port + 26))"}
webhook: {port: $kueue_port, host: 127.0.0.1, certDir: $dir/kueue-cert}
clientConnection: {qps: 500, burst: 500}
integrations: {frameworks: [$frameworks]}
END
    # Kueue reads the certificate of its metrics from a fixed place: that is laid over /etc, for this process alone.
    mkdir -p "$dir/kueue-etc/kueue/metrics"
    ln -sfn "$dir/kueue-cert" "$dir/kueue-etc/kueue/metrics/certs"
    # shellcheck disable=SC2016
    POD_NAMESPACE=kueue-system start kueue unshare --mount bash -c \
        'mount -t overlay overlay -o "lowerdir=$1:/etc" /etc && shift && exec "$@"' - "$dir/kueue-etc" \
        kueue --config "$dir/kueue.yaml" --kubeconfig "$KUBECONFIG" --feature-gates=VisibilityOnDemand=false
    wait_for 'the webhook of Kueue' answers "$kueue_port"
}

queue() {
    helm template prerequisites "$here/../../deploy/gke" --set networks=false,accelerator=nvidia-b200,gpus="$1" >"$dir/queue.yaml"
    wait_for 'the API of Kueue' kubectl apply -f "$dir/queue.yaml"
    wait_for 'the queue' kubectl wait --for=condition=Active clusterqueue/a4 --timeout=5s
}

down() {
    local file pid
    for file in "$dir"/{kueue,lws,jobset,kwok,scheduler,manager,apiserver,etcd}.pid; do
        [ -s "$file" ] || continue
        pid=$(cat "$file")
        kill "$pid" 2>/dev/null || true
        for _ in $(seq 100); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null || true
        rm -f "$file"
    done
}

case "$action" in
up) control_plane ;;
nodes | jobset | lws | kueue | queue | down) "$action" "$@" ;;
*)
    echo "usage: kube.sh up|nodes|jobset|lws|kueue|queue|down FOLDER [NUMBER]" >&2
    exit 2
    ;;
esac

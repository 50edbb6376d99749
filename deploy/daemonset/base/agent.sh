#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# agent.sh - runs next to the installer and talks to Kubernetes for it. Before the installer may change the node, it
# acquires one of MAX_UNAVAILABLE turns (a Lease each), and cordons and drains the node. When the installer is done, it
# uncordons the node and releases the turn. A label and events of the node show the progress.
#
# A turn is acquired by creating a Lease, which only one node can do, and released by deleting it. It does not expire,
# since a node that reboots, or whose installation failed, must keep its turn. The turn of a deleted node is taken over.
set -euo pipefail

node=${NODE_NAME:?}
namespace=${NAMESPACE:?}
turns=${MAX_UNAVAILABLE:-1}
most=8 # Leases that rbac.yaml names
shared=${EPKIT_SHARED:-/run/epkit-agent}
label=epkit.dev/install
cordoned=epkit.dev/cordoned # annotation: we closed the node, and not somebody else

say() { printf '%s epkit-agent: %s\n' "$(date -u +%H:%M:%S)" "$*"; }

# The functions below are called where a failure is retried, and 'set -e' has no effect there: every command whose
# failure matters has '|| return 1'.
if ! [[ $turns =~ ^[1-8]$ ]]; then
    say "MAX_UNAVAILABLE is '$turns': it must be a number from 1 to $most" >&2
    exit 2
fi

# kubectl uses the pod's own account only if no option is given, so it is named here.
account=/var/run/secrets/kubernetes.io/serviceaccount
KUBECONFIG=$(mktemp)
export KUBECONFIG
trap 'rm -f "$KUBECONFIG"' EXIT
cat >"$KUBECONFIG" <<END
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://$KUBERNETES_SERVICE_HOST:$KUBERNETES_SERVICE_PORT", certificate-authority: $account/ca.crt}}]
users: [{name: u, user: {tokenFile: $account/token}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
END

# --foreground: otherwise timeout creates a process group, which does not get the TERM for this script.
kube() {
    timeout --foreground 120 kubectl --request-timeout=30s "$@"
}

# event REASON TEXT: an event of the node. A failure to create it is ignored.
event() {
    local now
    now=$(date -u +%Y-%m-%dT%H:%M:%SZ)
    say "$2"
    kube create -f - >/dev/null <<END || say "the event was not accepted"
apiVersion: v1
kind: Event
metadata: {generateName: "epkit-$node-", namespace: default}
involvedObject: {kind: Node, name: "$node", apiVersion: v1}
reason: $1
message: "$2"
type: ${3:-Normal}
source: {component: epkit-installer, host: "$node"}
firstTimestamp: $now
lastTimestamp: $now
count: 1
END
}

# lease NAME [VERSION]: a turn of this node. A version is a string: without quotes YAML reads it as a number, and bash
# removes quotes that are written inside ${...}.
lease() {
    local version=${2:+"resourceVersion: '$2'"}
    cat <<END
apiVersion: coordination.k8s.io/v1
kind: Lease
metadata: {name: $1, namespace: "$namespace"${version:+, $version}}
spec: {holderIdentity: "$node", acquireTime: "$(date -u +%Y-%m-%dT%H:%M:%S.000000Z)"}
END
}

holder_of() {
    kube -n "$namespace" get lease "$1" --ignore-not-found -o jsonpath='{.spec.holderIdentity} {.metadata.resourceVersion}'
}

# The name of this node's turn, if it has one, even one beyond the current MAX_UNAVAILABLE.
turn=
waits= # said that kured is waited for
find_turn() {
    local names=() list name holder i
    turn=
    for i in $(seq 0 $((most - 1))); do names+=("epkit-installer-$i"); done
    list=$(kube -n "$namespace" get lease "${names[@]}" --ignore-not-found --no-headers \
        -o custom-columns=NAME:.metadata.name,HOLDER:.spec.holderIdentity) || return 1
    while read -r name holder; do
        if [ "$holder" = "$node" ]; then turn=$name; fi
    done <<<"$list"
}

# Whether kured has another node down. It reboots the node whose name is in the lock, an annotation of its DaemonSet. A
# lock with a time to live (nanoseconds) ends after it. No answer does not mean that the lock is free.
kured_is_busy() {
    local lock ttl created
    lock=$(kube -n "${KURED_NAMESPACE:-kube-system}" get daemonset "${KURED_NAME:-kured}" --ignore-not-found \
        -o jsonpath='{.metadata.annotations.weave\.works/kured-node-lock}') || return 0
    grep -oE '"nodeID":"[^"]*"' <<<"$lock" | grep -qvxF "\"nodeID\":\"$node\"" || return 1
    ttl=$(grep -oE '"TTL":[0-9]+' <<<"$lock" | head -n 1 | cut -d: -f2) || ttl=0
    created=$(grep -oE '"created":"[^"]*"' <<<"$lock" | head -n 1 | cut -d'"' -f4) || created=
    [ "${ttl:-0}" -gt 0 ] && [ -n "$created" ] || return 0
    created=$(date -d "$created" +%s) || return 0
    [ "$(date +%s)" -lt $((created + ttl / 1000000000)) ]
}

take_turn() {
    local i name holder there
    find_turn || return 1
    [ -z "$turn" ] || return 0
    if kured_is_busy; then
        [ -n "$waits" ] || say "kured has another node down, or cannot be asked: waiting"
        waits=yes
        return 1
    fi
    waits=
    for i in $(seq 0 $((turns - 1))); do
        name=epkit-installer-$i
        if lease "$name" | kube create -f - >/dev/null 2>&1; then
            turn=$name
            event TurnTaken "this node may install now ($name of $turns)"
            return 0
        fi
        holder=$(holder_of "$name") || continue
        [ -n "${holder% *}" ] || continue
        # A deleted node never releases its turn. No answer does not mean that the node is deleted. The version ensures
        # that only one node takes it over.
        there=$(kube get node "${holder% *}" --ignore-not-found -o name) || continue
        if [ -z "$there" ] &&
            lease "$name" "${holder#* }" | kube replace -f - >/dev/null 2>&1; then
            turn=$name
            event TurnTaken "this node may install now ($name, taken over from ${holder% *}, which is gone)"
            return 0
        fi
    done
    return 1
}

# mark_node CORDONED [VERSION]: true or null, for the cordon and the annotation that it is ours, in one request. An
# agent killed between two requests would leave a cordon that looks like somebody else's, or later undo one that is.
mark_node() {
    local version=${2:+"\"resourceVersion\":\"$2\","} note=null
    [ "$1" = null ] || note='"true"'
    kube patch node "$node" --type=merge -p \
        "{\"metadata\":{${version}\"annotations\":{\"$cordoned\":$note}},\"spec\":{\"unschedulable\":$1}}" >/dev/null
}

close_node() {
    local state
    state=$(kube get node "$node" \
        -o jsonpath="{.metadata.resourceVersion}/{.spec.unschedulable}/{.metadata.annotations.epkit\.dev/cordoned}") ||
        return 1
    case ${state#*/} in
    true/true) ;;
    true/*)
        # Cordoned by somebody else: keep it afterwards.
        ;;
    *)
        # Refused if somebody else has cordoned it meanwhile: the version differs.
        mark_node true "${state%%/*}" || return 1
        event Cordoned "cordoned to install $EPKIT_RECIPE"
        ;;
    esac
}

drain_node() {
    if timeout --foreground $((${DRAIN_SECONDS:-600} + 60)) kubectl drain "$node" --ignore-daemonsets \
        --delete-emptydir-data --timeout="${DRAIN_SECONDS:-600}s" >"$shared/drain.log" 2>&1; then
        event Drained "drained to install $EPKIT_RECIPE"
        return 0
    fi
    event DrainFailed "the node cannot be drained: $(tail -n 1 "$shared/drain.log" | tr -d '\042\134')" Warning
    return 1
}

open_node() {
    local ours
    find_turn || return 1
    ours=$(kube get node "$node" -o jsonpath='{.metadata.annotations.epkit\.dev/cordoned}') || return 1
    if [ "$ours" = true ]; then
        mark_node null || return 1
        event Uncordoned "uncordoned: $EPKIT_RECIPE is installed"
    fi
    if [ -n "$turn" ]; then
        kube -n "$namespace" delete lease "$turn" --ignore-not-found >/dev/null || return 1
        turn=
    fi
}

shown=
show_phase() {
    [ "$1" != "$shown" ] || return 0
    kube label node "$node" --overwrite "$label=$1" >/dev/null || return 1
    case $1 in
    failed) event InstallFailed "installing $EPKIT_RECIPE failed: kubectl -n $namespace logs -l k8s-app=deepep-installer-ubuntu -c deepep-installer" Warning ;;
    rebooting) event Rebooting "rebooting to load driver and modules" ;;
    done) event Installed "$EPKIT_RECIPE is installed" ;;
    esac
    shown=$1
}

# One check of what the installer requests. Failures are retried.
step() {
    local phase boot
    phase=$(cat "$shared/phase" 2>/dev/null || echo starting)
    show_phase "$phase" || return 0
    boot=$(cat "$shared/boot" 2>/dev/null || true)
    [ -n "$boot" ] || return 0
    case $phase in
    waiting)
        [ "$(cat "$shared/grant" 2>/dev/null || true)" != "$boot" ] || return 0
        take_turn || return 0
        close_node || return 0
        drain_node || return 0
        printf '%s\n' "$boot" >"$shared/grant.new"
        mv "$shared/grant.new" "$shared/grant"
        ;;
    done)
        [ -e "$shared/opened" ] && [ "$(cat "$shared/opened")" = "$boot" ] && return 0
        open_node || return 0
        printf '%s\n' "$boot" >"$shared/opened"
        ;;
    esac
}

trap 'exit 0' TERM INT
rm -f "$shared/opened"
say "node $node; at most $turns nodes at a time"
while :; do
    step
    sleep 2 &
    wait $!
done

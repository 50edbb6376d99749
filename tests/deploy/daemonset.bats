#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The DaemonSet: what it is made of, what its account may do; and (long) on nodes that really reboot.
#
# shellcheck disable=SC2154,SC2016,SC2030,SC2031,SC2317 # set by run; texts of scripts; functions are called by name

load common
load ../page

DAEMONSET=$EPKIT_SOURCE/deploy/daemonset
REAL=$EPKIT_SOURCE/tests/cluster/real.sh

setup() {
    need kubectl
}

teardown() {
    end_agent
}

# As the pod's end: TERM for the first process of the container, which ends all that it has started.
end_agent() {
    [ -n "${AGENT:-}" ] || return 0
    kill -TERM "$AGENT" 2>/dev/null || true
    wait "$AGENT" 2>/dev/null || true
    AGENT=
}

# A control plane for the tests that need no nodes; the first one starts it.
api_up() {
    need kube-apiserver
    command -v etcd >/dev/null || skip "etcd is not installed (Debian and Ubuntu: etcd-server)"
    PORT=$((30000 + $(cksum <<<"$BATS_FILE_TMPDIR" | cut -d' ' -f1) % 200 * 50))
    export PORT CLUSTER="$BATS_FILE_TMPDIR/cluster" KUBECONFIG="$BATS_FILE_TMPDIR/cluster/kubeconfig"
    [ -d "$CLUSTER" ] || "$EPKIT_SOURCE/tests/cluster/kube.sh" up "$CLUSTER"
}

teardown_file() {
    [ ! -d "$BATS_FILE_TMPDIR/cluster" ] || "$EPKIT_SOURCE/tests/cluster/kube.sh" down "$BATS_FILE_TMPDIR/cluster"
    if [ -d "$BATS_FILE_TMPDIR/nodes" ]; then
        "$REAL" down "$BATS_FILE_TMPDIR/nodes" || true
    fi
}

@test "the overlays name recipe and accelerator, and keep the guide's names and switches" {
    local overlay accelerator
    for overlay in b200:nvidia-b200 h200:nvidia-h200-141gb; do
        accelerator=${overlay#*:} overlay=${overlay%:*}
        kubectl kustomize "$DAEMONSET/overlays/$overlay" | yaml_to_json >"$BATS_TEST_TMPDIR/json"
        jq -se --arg accelerator "$accelerator" --arg recipe "gcp-$overlay-ubuntu2404 gke-driver-copy" '
            map(select(.kind == "DaemonSet"))[0] as $set | $set.spec.template as $pod |
            ($pod.spec.initContainers | map(select(.name == "deepep-installer"))[0]) as $installer |
            $set.metadata.name == "deepep-installer-ubuntu" and $set.metadata.namespace == "kube-system" and
            $pod.metadata.labels["k8s-app"] == "deepep-installer-ubuntu" and
            ($installer.env | map({(.name): .value}) | add) == {
                NODE_NAME: null, EPKIT_RECIPE: $recipe, NVSHMEM_IBGDA_SUPPORT: "1", NVSHMEM_USE_GDRCOPY: "0",
                GDRCOPY_HOME: "/opt/deepep/gdrcopy", NVSHMEM_HOME: "/opt/deepep/nvshmem", USE_NVPEERMEM: "1",
                CUDA_HOME: "/usr/local/cuda", TORCH_CUDA_ARCH_LIST_B200: "10.0", TORCH_CUDA_ARCH_LIST_H200: "9.0",
                REBOOT_BY: "epkit"} and
            # What only the user can know has a place, which the installer reads.
            (map(select(.kind == "ConfigMap" and (.data | has("EPKIT_DOCA_KEY"))))[0].metadata.name) ==
                $installer.envFrom[0].configMapRef.name and
            ($pod.spec.affinity | tostring | contains($accelerator)) and
            ($pod.spec.initContainers[0] | .name == "agent" and .restartPolicy == "Always" and
                any(.env[]; .name == "EPKIT_RECIPE" and .value == $recipe)) and
            # The privileged container has no access to the API; the one that has some is not privileged.
            $installer.securityContext.privileged and $pod.spec.automountServiceAccountToken == false and
            all($installer.volumeMounts[]; .name != "token") and
            ($pod.spec.initContainers[0].securityContext.privileged // false) == false' "$BATS_TEST_TMPDIR/json"
    done
}

@test "the component kured changes who reboots, and nothing else" {
    local overlay tree=$BATS_TEST_TMPDIR/tree
    mkdir -p "$tree"
    cp -a "$DAEMONSET/." "$tree/"
    for overlay in b200 h200; do
        kubectl kustomize "$tree/overlays/$overlay" >"$tree/before"
        # As its own comment says.
        sed -n 's/^#     \(components: .*\)/\1/p' "$tree/components/kured/kustomization.yaml" >>"$tree/overlays/$overlay/kustomization.yaml"
        kubectl kustomize "$tree/overlays/$overlay" >"$tree/after"
        grep -A1 'name: REBOOT_BY' "$tree/after" | grep -q 'value: kured'
        run diff "$tree/before" "$tree/after"
        [ "$(grep -c '^[<>]' <<<"$output")" -eq 2 ]
    done
}

@test "the agent's account may do what it does, and nothing else" {
    api_up
    kubectl apply -f "$DAEMONSET/base/rbac.yaml" >/dev/null
    may() { kubectl auth can-i --as system:serviceaccount:kube-system:deepep-installer "$@" >/dev/null; }
    may get nodes && may patch nodes && may list pods -A && may create pods/eviction -A && may get daemonsets.apps -A
    may create leases.coordination.k8s.io -n kube-system && may delete leases.coordination.k8s.io/epkit-installer-0 -n kube-system
    may create events -n default
    run ! may delete nodes
    run ! may list nodes
    run ! may update nodes
    run ! may delete pods -A
    run ! may create pods -A
    run ! may get secrets -A
    run ! may get configmaps -A
    run ! may create pods/exec -A
    run ! may delete leases.coordination.k8s.io/kube-controller-manager -n kube-system
    run ! may update leases.coordination.k8s.io -n kube-node-lease
    run ! may create events -n kube-system
    run ! may '*' '*' -A
    # Count the rules, so that additional verbs are noticed.
    [ "$(kubectl get clusterrole deepep-installer -o json | jq '[.rules[].verbs[]] | length')" = 6 ]
}

# agent NODE: agent.sh in the background against the test's API server. A call of kubectl whose arguments match the
# extended expression in the first line of $FAULTS fails once, and the line goes.
agent() {
    local bin=$BATS_TEST_TMPDIR/bin
    SHARED=$BATS_TEST_TMPDIR/$1 FAULTS=$BATS_TEST_TMPDIR/faults
    mkdir -p "$bin" "$SHARED"
    touch "$FAULTS"
    cat >"$bin/kubectl" <<END
#!/usr/bin/env bash
export GOGC=off GOMAXPROCS=1
line=\$(head -n 1 "$FAULTS")
if [ -n "\$line" ] && grep -qE -- "\$line" <<<"\$*"; then
    sed -i 1d "$FAULTS"
    echo "the server was unable to return a response in time" >&2
    exit 1
fi
KUBECONFIG=$KUBECONFIG exec $("$PROGRAMS" path)/bin/kubectl "\$@"
END
    chmod +x "$bin/kubectl"
    echo boot-1 >"$SHARED/boot"
    setsid env PATH="$bin:$PATH" NODE_NAME="$1" NAMESPACE=kube-system EPKIT_RECIPE=r EPKIT_SHARED="$SHARED" \
        MAX_UNAVAILABLE="${TURNS:-1}" KUBERNETES_SERVICE_HOST=127.0.0.1 KUBERNETES_SERVICE_PORT=1 \
        bash "$DAEMONSET/base/group.sh" bash "$DAEMONSET/base/agent.sh" >"$SHARED.log" 2>&1 3>&- &
    AGENT=$!
}

node() {
    kubectl delete node "$1" --ignore-not-found >/dev/null
    printf 'apiVersion: v1\nkind: Node\nmetadata: {name: %s}\n' "$1" | kubectl create -f - >/dev/null
}
granted() { [ "$(cat "$SHARED/grant" 2>/dev/null)" = boot-1 ]; }
opened() { [ "$(cat "$SHARED/opened" 2>/dev/null)" = boot-1 ]; }
closed() { kubectl get node "$1" -o jsonpath='{.spec.unschedulable} {.metadata.annotations.epkit\.dev/cordoned}'; }

@test "no call of the API that fails leaves a node cordoned, or a turn taken" {
    api_up
    node n1
    agent n1
    # Each is tried again: the cordon of the start.
    printf '%s\n' 'patch node n1 .*"unschedulable":true' >"$FAULTS"
    echo waiting >"$SHARED/phase"
    within 600 granted
    [ ! -s "$FAULTS" ]
    [ "$(closed n1)" = "true true" ]
    # And those of the end.
    printf '%s\n' 'patch node n1 .*"unschedulable":null' 'delete lease' >"$FAULTS"
    echo "done" >"$SHARED/phase"
    within 600 opened
    [ ! -s "$FAULTS" ]
    [ "$(closed n1)" = " " ]
    [ -z "$(kubectl get leases -n kube-system -o name | grep epkit-installer || true)" ]
}

@test "a cordon by others stays, also one that is set while the agent reads the node" {
    api_up
    node n1
    kubectl cordon n1 >/dev/null
    agent n1
    echo waiting >"$SHARED/phase"
    within 600 granted
    [ "$(closed n1)" = "true " ]
    echo "done" >"$SHARED/phase"
    within 600 opened
    [ "$(closed n1)" = "true " ]
    [ -z "$(kubectl get leases -n kube-system -o name | grep epkit-installer || true)" ]
    end_agent
    # The cordon is set between the agent's read of the node and its request.
    node n2
    agent n2
    sed -i "2i if grep -q 'patch node n2 .*\"unschedulable\":true' <<<\"\$*\"; then KUBECONFIG=$KUBECONFIG $("$PROGRAMS" path)/bin/kubectl cordon n2 >/dev/null; fi" "$BATS_TEST_TMPDIR/bin/kubectl"
    echo waiting >"$SHARED/phase"
    within 600 granted
    [ "$(closed n2)" = "true " ]
    echo "done" >"$SHARED/phase"
    within 600 opened
    [ "$(closed n2)" = "true " ]
}

@test "the quickstart's clean-up takes from nodes what an installation leaves that was not completed" {
    command -v jq >/dev/null || skip "jq is not installed"
    api_up
    node n1
    agent n1
    echo waiting >"$SHARED/phase"
    within 600 granted
    pkill -KILL -s "$AGENT" # the agent is in a group of its own
    wait "$AGENT" || AGENT=
    [ "$(closed n1)" = "true true" ]
    run -0 bash -euo pipefail -c "$(page_commands '7. Clean up' | sed -n '/^kubectl get leases/,/^helm uninstall prerequisites/{/^helm/!p}')"
    [ "$(closed n1)" = " " ]
    [ -z "$(kubectl get leases -n kube-system -o name | grep epkit-installer || true)" ]
    [ -z "$(kubectl get nodes -l epkit.dev/install -o name)" ]
}

@test "a node keeps its turn while the API does not answer, and loses it when it is deleted" {
    api_up
    node n1
    node n2
    kubectl create -f - >/dev/null <<<'{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "epkit-installer-0", "namespace": "kube-system"}, "spec": {"holderIdentity": "n2"}}'
    agent n1
    holder() { kubectl get lease -n kube-system epkit-installer-0 -o jsonpath='{.spec.holderIdentity}'; }
    printf '%s\n' 'get node n2' 'get node n2' 'get node n2' >"$FAULTS"
    echo waiting >"$SHARED/phase"
    asked() { [ ! -s "$FAULTS" ]; }
    within 600 asked
    [ "$(holder)" = n2 ]
    run ! granted
    kubectl delete node n2 >/dev/null
    within 600 granted
    [ "$(holder)" = n1 ]
    kubectl delete lease -n kube-system epkit-installer-0 >/dev/null
}

# kured LOCK: kured's DaemonSet with this lock; nothing of it runs here
kured() {
    kubectl apply -f - >/dev/null <<END
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: kured, namespace: kube-system, annotations: {weave.works/kured-node-lock: '$1'}}
spec:
  selector: {matchLabels: {name: kured}}
  template: {metadata: {labels: {name: kured}}, spec: {nodeSelector: {none: none}, containers: [{name: kured, image: kured}]}}
END
}

@test "no node is closed while kured has another one down" {
    api_up
    node n1
    waits() { grep -q 'kured has another node down' "$SHARED.log"; }
    # Not: a lock of our own node, and one that is over.
    for lock in '{"nodeID":"n2","metadata":{"unschedulable":false},"created":"2025-01-01T00:00:00Z","TTL":0}' \
        '{"maxOwners":2,"locks":[{"nodeID":"n1","TTL":0},{"nodeID":"n2","TTL":0}]}'; do
        kured "$lock"
        agent n1
        echo waiting >"$SHARED/phase"
        within 600 waits
        run ! granted
        [ "$(closed n1)" = " " ]
        [ -z "$(kubectl get leases -n kube-system -o name | grep epkit-installer || true)" ]
        # It goes on when kured is done, and again where no kured is.
        kured '{"nodeID":"n1","metadata":{"unschedulable":true},"created":"2025-01-01T00:00:00Z","TTL":0}'
        within 600 granted
        end_agent
        rm -f "$SHARED"/* "$SHARED.log"
        kubectl delete lease -n kube-system epkit-installer-0 >/dev/null
        node n1
    done
    kured '{"nodeID":"n2","metadata":{},"created":"2025-01-01T00:00:00Z","TTL":60000000000}'
    agent n1
    echo waiting >"$SHARED/phase"
    within 600 granted
    run ! waits
    kubectl delete daemonset -n kube-system kured >/dev/null
    kubectl delete lease -n kube-system epkit-installer-0 >/dev/null
}

@test "a turn that MAX_UNAVAILABLE does not have any more is given back; a number that rights forbid is refused" {
    api_up
    node n1
    kubectl create -f - >/dev/null <<<'{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "epkit-installer-5", "namespace": "kube-system"}, "spec": {"holderIdentity": "n1"}}'
    agent n1
    echo "done" >"$SHARED/phase"
    within 600 opened
    [ -z "$(kubectl get leases -n kube-system -o name | grep epkit-installer || true)" ]
    end_agent
    for TURNS in 0 9 many -1; do
        agent n1
        status=0
        wait "$AGENT" || status=$?
        AGENT=
        [ "$status" -eq 2 ]
        grep -q "MAX_UNAVAILABLE is '$TURNS': it must be a number from 1 to 8" "$SHARED.log"
    done
}

@test "TERM ends what the agent waits for, and what hangs there" {
    api_up
    node n1
    agent n1
    # The drain hangs, and ignores TERM.
    cat >"$BATS_TEST_TMPDIR/bin/kubectl.new" <<END
#!/usr/bin/env bash
if [ "\$1" = drain ]; then
    trap '' TERM
    echo \$\$ >"$BATS_TEST_TMPDIR/drain"
    while :; do sleep 0.2; done
fi
KUBECONFIG=$KUBECONFIG exec $("$PROGRAMS" path)/bin/kubectl "\$@"
END
    chmod +x "$BATS_TEST_TMPDIR/bin/kubectl.new"
    mv "$BATS_TEST_TMPDIR/bin/kubectl.new" "$BATS_TEST_TMPDIR/bin/kubectl"
    echo waiting >"$SHARED/phase"
    within 600 test -s "$BATS_TEST_TMPDIR/drain"
    kill -TERM "$AGENT"
    status=0
    wait "$AGENT" || status=$?
    # The session belongs to the agent: no process of it is left.
    [ -z "$(ps -o pid= -s "$AGENT")" ]
    AGENT=
    [ "$status" -eq 143 ]
    # It did not consider the node drained.
    run ! granted
}

in_cluster() { "$REAL" in "$BATS_FILE_TMPDIR/nodes" "$@"; }
of_node() { in_cluster kubectl get pods -n kube-system -l k8s-app=deepep-installer-ubuntu --field-selector "spec.nodeName=$1" -o name; }

# nodes_up COUNT: a cluster of nodes that really reboot, with the images, instead of that of an earlier test
nodes_up() {
    [ -n "${EPKIT_TEST_LONG:-}" ] || skip "boots and reboots nodes: only with EPKIT_TEST_LONG=1"
    for command in systemd-nspawn mmdebstrap containerd runc buildah etcd; do
        command -v $command >/dev/null || skip "$command is not installed"
    done
    [ "$(id -u)" -eq 0 ] || skip "needs root"
    "$EPKIT" help install >/dev/null 2>&1 || skip "this epkit has no 'install'"
    need kubelet coredns kube-apiserver
    local work=$BATS_FILE_TMPDIR file
    if [ -e "$work/epkit.tar" ]; then
        "$REAL" down "$work/nodes"
        rm -rf "$work/nodes"
    else
        images
    fi
    "$REAL" up "$work/nodes" "$work/base.tar" "$1" "$work/pause.tar" "$work/epkit.tar"
    kubectl kustomize --load-restrictor LoadRestrictionsNone "$EPKIT_SOURCE/tests/deploy/daemonset" >"$work/set.yaml"
}

# The sandbox, and epkit with the libraries of this build.
images() {
    "$REAL" base "$work/base.tar"
    mkdir -p "$work/pause" "$work/image/opt/epkit/bin"
    cc -static -O1 -o "$work/pause/pause" "$EPKIT_SOURCE/tests/cluster/pause.c"
    printf 'FROM scratch\nCOPY pause /pause\nENTRYPOINT ["/pause"]\n' >"$work/pause/Dockerfile"
    "$REAL" image localhost/pause:1 "$work/pause.tar" "$work/pause/Dockerfile" "$work/pause"
    cp "$EPKIT" "$work/image/opt/epkit/bin/"
    ldd "$EPKIT" | awk '/=> \//{print $3}' | grep -vE '/(libc|libm|libdl|libpthread)[.]so' | while read -r file; do
        cp -L "$file" "$work/image/opt/epkit/bin/"
    done
    cp "$work/base.tar" "$("$PROGRAMS" path)/bin/kubectl" "$work/image/"
    printf 'FROM scratch\nADD base.tar /\nCOPY kubectl /usr/local/bin/kubectl\nCOPY opt/epkit /opt/epkit\n' >"$work/image/Dockerfile"
    "$REAL" image localhost/epkit:1 "$work/epkit.tar" "$work/image/Dockerfile" "$work/image"
}

@test "two nodes: one after the other, cordoned, drained, rebooted, resumed, uncordoned; a pod deleted amid a step" {
    local work=$BATS_FILE_TMPDIR nodes=$BATS_FILE_TMPDIR/nodes pod
    nodes_up 2
    # Record every state of the nodes, to check that never two are closed.
    in_cluster kubectl get nodes --watch -o json 2>/dev/null |
        jq --unbuffered -r '[.metadata.name, (.spec.unschedulable // false)] | @tsv' >"$work/states" &
    watch=$!
    in_cluster kubectl apply -f "$work/set.yaml" >/dev/null
    in_cluster kubectl create deployment bystander --image=localhost/pause:1 --replicas=2 >/dev/null

    # The pod whose installer changes its node is deleted while a step runs.
    amid_step() {
        for i in 1 2; do
            [ -z "$("$REAL" on "$nodes" "real-$i" sh -c 'ls /etc/epkit-test-starts /etc/epkit-test-slow 2>/dev/null')" ] || victim=real-$i
        done
        [ -n "$victim" ]
    }
    victim=
    within 600 amid_step
    pod=$(of_node "$victim")
    in_cluster kubectl delete -n kube-system "$pod" --wait=false >/dev/null

    finished() { [ "$(in_cluster kubectl get nodes -l epkit.dev/install=done --no-headers 2>/dev/null | grep -cw Ready)" = 2 ]; }
    within 1200 finished
    opened() { ! in_cluster kubectl get nodes --no-headers | grep -q SchedulingDisabled; }
    within 120 opened
    kill "$watch" 2>/dev/null || true
    for i in 1 2; do
        [ "$("$REAL" boots "$nodes" "real-$i")" = 2 ]
        # The step that was running went on, once.
        [ "$("$REAL" on "$nodes" "real-$i" sh -c 'wc -l </etc/epkit-test-starts')" -eq 1 ]
        pod=$(of_node "real-$i")
        in_cluster kubectl logs -n kube-system "$pod" -c deepep-installer >"$work/log-$i"
        # The guide's three.
        grep -qE "(complete|success|installed)" "$work/log-$i"
        grep "NVSHMEM_IBGDA_SUPPORT" "$work/log-$i" | grep -qFx "NVSHMEM_IBGDA_SUPPORT is enabled correctly."
        grep -q "DeepEP installation complete" "$work/log-$i"
        # In this order, for this node.
        in_cluster kubectl get events -n default --field-selector "involvedObject.name=real-$i" -o json |
            jq -r '.items | sort_by(.firstTimestamp)[].reason' | grep -xE 'Cordoned|Drained|Rebooting|Uncordoned' | uniq >"$work/reasons-$i"
        # Once more drained after the reboot: nothing of others must have come back meanwhile.
        grep -qxE 'Cordoned Drained Rebooting (Drained )?Uncordoned ' <(tr '\n' ' ' <"$work/reasons-$i"; echo)
    done
    # Never two: replay the states.
    awk '{closed[$1] = $2 == "true"; n = 0; for (i in closed) n += closed[i]; if (n > most) most = n} END {exit most != 1}' "$work/states"
    [ -z "$(in_cluster kubectl get leases -n kube-system -o name | grep epkit-installer || true)" ]
}

# What the user mallory does on the node, from each boot on: takes the names that the scripts use where everybody may
# write, puts links, pipes and locks wherever that is possible, and reads what the pods keep.
attack() {
    cat <<'END'
mkdir -p ~/evil/bin
for name in epkit sh cat env tar mv rm mkdir find systemctl; do
    printf '#!/bin/bash\nid -un >>/home/mallory/ran\nexec /bin/%s "$@"\n' $name >~/evil/bin/$name
done
chmod -R 755 ~ ~/evil
trap '' TERM
shopt -s nullglob
for ((round = 0; ; round++)); do
    for at in /opt/epkit-installer{,.new,.old} /opt/epkit /opt/epkit-test; do
        case $((RANDOM % 4)) in
        0) ln -sn ~/evil $at ;;
        1) ln -sn /nowhere $at ;;
        2) mkfifo $at ;;
        3) cp -r ~/evil $at ;;
        esac 2>/dev/null && echo $at >>~/planted
    done
    for at in {/tmp,/var/tmp,/dev/shm,/run/lock}/*; do
        [ -O $at ] || [ -L $at ] || { ln -s /etc/passwd $at.new; mkfifo $at.epkit-new; } 2>/dev/null
    done
    for at in /opt/epkit-installer/bin/* /{var/lib,var/log,run}/epkit*/{,*/,*/*/,*/*/*/}* /etc/epkit-test* \
        /proc/[0-9]*/root/{run/epkit-agent,scripts,var/run/secrets/kubernetes.io/serviceaccount}/* /var/lib/kubelet/*/*/*/*/*/*; do
        [ ! -f $at ] || [ -O $at ] || { echo x >>$at && echo $at >>~/written; } 2>/dev/null
        case $at in */scripts/*.sh | */token | */grant | */settings.json) head -c1 $at >/dev/null 2>&1 && echo $at >>~/read ;; esac
        case " $locked " in *" $at "*) ;; *) [ ! -f $at ] || { exec {held}<$at && flock -n $held && locked="$locked $at"; } 2>/dev/null ;; esac
    done
    for at in /proc/[0-9]*/environ; do grep -qsz EPKIT_RECIPE $at && echo $at >>~/read; done
    echo $round >~/round
    # The scripts are refused, and begin again, as often as it is faster than they: not for ever.
    [ $round -lt 150 ] || sleep 1
done
END
}

@test "a node whose /opt everybody may write to: what a user of it plants, locks and reads does not reach the installation" {
    local work=$BATS_FILE_TMPDIR nodes=$BATS_FILE_TMPDIR/nodes pod
    nodes_up 1
    on() { "$REAL" on "$nodes" real-1 "$@"; }
    on useradd --create-home --shell /bin/bash mallory
    attack | on sh -c 'cat >/home/mallory/attack && chown mallory /home/mallory/attack'
    printf '[Service]\nUser=mallory\nExecStart=/bin/bash /home/mallory/attack\nKillMode=mixed\nTimeoutStopSec=5\n[Install]\nWantedBy=sysinit.target\n' |
        on sh -c 'cat >/etc/systemd/system/mallory.service; chmod 1777 /opt; systemctl enable --now mallory' 2>/dev/null
    within 300 on test -s /home/mallory/planted
    in_cluster kubectl apply -f "$work/set.yaml" >/dev/null
    finished() { [ "$(in_cluster kubectl get node -l epkit.dev/install=done --no-headers 2>/dev/null | grep -cw Ready)" = 1 ]; }
    within 1800 finished || {
        in_cluster kubectl get pods -A -o wide
        in_cluster kubectl logs -n kube-system "$(of_node real-1)" -c deepep-installer
        return 1
    }
    [ "$("$REAL" boots "$nodes" real-1)" = 2 ]
    # It was there in both boots, and tried.
    on systemctl is-active mallory
    on test -s /home/mallory/round
    on sh -c 'cd /home/mallory && sort planted | uniq -c; for file in ran written read; do [ ! -e $file ] || { echo "$file:"; sort -u $file; }; done' >"$work/seen"
    cat "$work/seen"
    run ! grep -E '^(ran|written|read):' "$work/seen"
    on sh -c 'test "$(cat /etc/epkit-test-last)" = last && test "$(stat -c %u /opt/epkit-installer /opt/epkit-installer/bin/epkit | sort -u)" = 0'
    [ "$(on sh -c 'wc -l </etc/epkit-test-starts')" -eq 1 ]
}

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# real.sh ACTION FOLDER [...] - a cluster of its own network whose nodes are real: containers with their own systemd,
# containerd and kubelet, which really reboot (new boot id) and lose power. The control plane is that of kube.sh.
#
#   base FILE              a root folder for nodes and images, as a tar file (mmdebstrap)
#   image FOLDER NAME TAR DOCKERFILE CONTEXT   builds an image with buildah and writes it to TAR
#   up FOLDER BASE N [IMAGE...]   control plane, CoreDNS, N nodes real-1.. with 8 nvidia.com/gpu each
#   in FOLDER COMMAND...   runs a command in the network of the cluster, with its kubeconfig
#   on FOLDER NODE COMMAND...   runs a command on a node
#   cut FOLDER NODE        power cut
#   boots FOLDER NODE      how often it has booted
#   down FOLDER
#
# Needs root; apt: systemd-container mmdebstrap containerd runc containernetworking-plugins buildah etcd-server.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
programs=$("$here/programs.sh" path)/bin
net=198.18.80
action=$1
shift

setup() {
    dir=$(realpath -m "$1")
    ns=epk$(printf %s "$dir" | cksum | cut -c1-6)
}

# Not "ip netns exec": it lays a new /sys over the control groups that nspawn needs.
inside() {
    nsenter --net="/run/netns/$ns" env PATH="$programs:$PATH" KUBECONFIG="$dir/kube/kubeconfig" ADDRESS=$net.1 "$@"
}

# --- a node: folder FOLDER/NAME, state beside it ---

# The first process of the container: the child of nspawn in another PID namespace.
leader() {
    local process
    for process in $(pgrep -P "$(cat "$dir/$1.state/pid")"); do
        if [ "$(readlink "/proc/$process/ns/pid")" != "$(readlink /proc/self/ns/pid)" ]; then
            echo "$process"
            return
        fi
    done
    return 1
}

on_node() {
    local node=$1
    shift
    nsenter -t "$(leader "$node")" -a -- /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "$@"
}

# With --keep-unit nspawn leaves with 133 when the inside reboots, and who started it starts it again.
boot_node() {
    local node=$1 state=$dir/$1.state
    mkdir -p "$state"
    # shellcheck disable=SC2016
    SYSTEMD_NSPAWN_API_VFS_WRITABLE=network inside setsid "$here/../own_cgroup.sh" bash -c '
        while :; do
            echo boot >>"$1/boots"
            systemd-nspawn --capability=all --system-call-filter=@keyring --system-call-filter=bpf --bind=/dev/kmsg \
                -q -D "$2" --register=no --keep-unit --console=pipe -b >>"$1/console" 2>&1 </dev/null &
            echo $! >"$1/pid"
            wait $!
            [ $? = 133 ] || break
        done' - "$state" "$dir/$node" >/dev/null 2>&1 </dev/null &
    echo $! >"$state/loop"
}

cut_power() {
    local first process
    [ -s "$dir/$1.state/pid" ] || return 0
    process=$(cat "$dir/$1.state/pid")
    first=$(leader "$1" || true)
    kill -KILL "$process" 2>/dev/null || true
    [ -z "$first" ] || kill -KILL "$first" 2>/dev/null || true
}

make_node() {
    local root=$dir/$1 number=${1##*-} library
    shift
    mkdir -p "$root"
    tar -xf "$base" -C "$root"
    install -D -t "$root/usr/bin" /usr/bin/containerd /usr/bin/containerd-shim* /usr/bin/ctr
    install -D -t "$root/usr/sbin" /usr/sbin/runc
    ldd /usr/bin/containerd /usr/sbin/runc | awk '/=> \//{print $3}' | sort -u | while read -r library; do
        [ -e "$root$library" ] || install -D "$library" "$root$library"
    done
    install -D "$programs/kubelet" "$root/usr/local/bin/kubelet"
    install -D -t "$root/usr/lib/cni" /usr/lib/cni/{bridge,loopback,host-local}
    echo '127.0.0.1 localhost' >"$root/etc/hosts" # the runtime copies it into pods
    mkdir -p "$root/etc/node" "$root/var/lib/ctd/cni"
    cat >"$root/etc/node/prepare" <<'END'
#!/bin/sh
mount --make-rshared /
for c in cpu cpuacct cpuset memory devices freezer blkio pids; do
    if [ -d /sys/fs/cgroup/$c ]; then mount -o remount,rw,bind /sys/fs/cgroup/$c; fi
done
# The kubelet wants these values and would set them, on the whole machine: it sees them without that.
for v in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
    f=/run/sysctl-$(echo "${v%=*}" | tr / -)
    echo "${v#*=}" >"$f"
    mount --bind "$f" "/proc/sys/${v%=*}"
done
exit 0
END
    cat >"$root/etc/node/images" <<'END'
#!/bin/sh
for _ in $(seq 100); do
    ctr -a /var/lib/ctd/c.sock version >/dev/null 2>&1 && break
    sleep 0.3
done
for f in /etc/node/*.tar; do
    [ -e "$f.done" ] || { ctr -a /var/lib/ctd/c.sock -n k8s.io images import "$f" && : >"$f.done"; }
done
exit 0
END
    chmod +x "$root/etc/node/prepare" "$root/etc/node/images"
    cat >"$root/etc/node/containerd.toml" <<'END'
version = 2
root = "/var/lib/ctd/root"
state = "/run/ctd"
[grpc]
  address = "/var/lib/ctd/c.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/var/lib/ctd/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
END
    # All nodes share one bridge; each hands out its own part of the range.
    cat >"$root/var/lib/ctd/cni/10-bridge.conflist" <<END
{"cniVersion": "0.4.0", "name": "b", "plugins": [{"type": "bridge", "bridge": "epbr0", "isGateway": false,
  "ipMasq": false, "ipam": {"type": "host-local", "ranges": [[{"subnet": "$net.0/24", "gateway": "$net.1",
  "rangeStart": "$net.$((number * 20 + 10))", "rangeEnd": "$net.$((number * 20 + 29))"}]]}}, {"type": "loopback"}]}
END
    cat >"$root/etc/systemd/system/ctd.service" <<'END'
[Service]
ExecStartPre=/etc/node/prepare
ExecStart=/usr/bin/containerd -c /etc/node/containerd.toml
Delegate=yes
KillMode=process
[Install]
WantedBy=multi-user.target
END
    cat >"$root/etc/systemd/system/kubelet.service" <<END
[Unit]
After=ctd.service
Requires=ctd.service
[Service]
ExecStartPre=/etc/node/images
TimeoutStartSec=600
ExecStart=/usr/local/bin/kubelet --config /etc/node/kubelet.yaml --kubeconfig /etc/node/kubeconfig \\
    --hostname-override real-$number --root-dir /var/lib/kubelet --cert-dir /var/lib/kubelet/pki --node-ip $net.1
Restart=on-failure
RestartSec=2
[Install]
WantedBy=multi-user.target
END
    for unit in ctd kubelet; do
        ln -sf "/etc/systemd/system/$unit.service" "$root/etc/systemd/system/multi-user.target.wants/$unit.service"
    done
    ln -sf /dev/null "$root/etc/systemd/system/ssh.service"
    cp "$dir/kube/apiserver/ca.crt" "$root/etc/node/"
    sed "s#$dir/kube/apiserver/ca.crt#/etc/node/ca.crt#" "$dir/kube/kubeconfig" >"$root/etc/node/kubeconfig"
    for image in "$@"; do cp "$image" "$root/etc/node/"; done
    cat >"$root/etc/node/kubelet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
port: $((16600 + number))
healthzPort: 0
authentication: {anonymous: {enabled: false}, x509: {clientCAFile: /etc/node/ca.crt}, webhook: {enabled: true}}
authorization: {mode: Webhook}
clusterDNS: [$net.1]
clusterDomain: cluster.local
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failSwapOn: false
failCgroupV1: false
oomScoreAdj: 0
containerRuntimeEndpoint: unix:///var/lib/ctd/c.sock
evictionHard: {nodefs.available: 1%, imagefs.available: 1%, memory.available: 50Mi}
imageGCHighThresholdPercent: 100
nodeStatusUpdateFrequency: 2s
END
}

wait_for() {
    local what=$1 end=$((SECONDS + 300))
    shift
    while [ "$SECONDS" -lt "$end" ]; do
        if "$@" >/dev/null 2>&1; then return 0; fi
        sleep 0.3
    done
    echo "real.sh: $what did not come; see $dir" >&2
    return 1
}

ready() {
    [ "$(inside kubectl get node "$1" -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}')" = True ]
}

up() {
    local n=$1 i gpus='{"nvidia.com/gpu":"8"}'
    shift
    mkdir -p "$dir"
    ip netns add "$ns"
    inside ip link set lo up
    inside ip link add epbr0 type bridge
    inside ip addr add $net.1/24 dev epbr0
    inside ip link set epbr0 up
    inside "$here/kube.sh" up "$dir/kube"
    cat >"$dir/Corefile" <<END
.:53 {
  bind $net.1
  errors
  ready 127.0.0.1:16490
  kubernetes cluster.local {
    kubeconfig $dir/kube/kubeconfig
    endpoint_pod_names
  }
  cache 1
}
END
    # shellcheck disable=SC2016
    inside setsid bash -c 'echo $$ >"$1"; exec coredns -conf "$2"' - "$dir/coredns.pid" "$dir/Corefile" \
        >"$dir/coredns.log" 2>&1 </dev/null &
    for i in $(seq "$n"); do
        make_node "real-$i" "$@"
        boot_node "real-$i"
    done
    for i in $(seq "$n"); do
        wait_for "node real-$i" ready "real-$i"
        inside kubectl label node "real-$i" --overwrite cloud.google.com/gke-nodepool=a4-pool \
            cloud.google.com/gke-accelerator=nvidia-b200 cloud.google.com/gke-os-distribution=ubuntu \
            cloud.google.com/gce-topology-block=b0 cloud.google.com/gce-topology-subblock=s0 \
            "cloud.google.com/gce-topology-host=h$i" >/dev/null
        inside kubectl patch node "real-$i" --subresource=status --type=merge \
            -p "{\"status\":{\"capacity\":$gpus,\"allocatable\":$gpus}}" >/dev/null
    done
}

down() {
    local state root
    for state in "$dir"/*.state; do
        [ -d "$state" ] || continue
        root=$(basename "$state" .state)
        kill "$(cat "$state/loop")" 2>/dev/null || true
        cut_power "$root"
    done
    "$here/kube.sh" down "$dir/kube" || true
    [ ! -s "$dir/coredns.pid" ] || kill "$(cat "$dir/coredns.pid")" 2>/dev/null || true
    # What nspawn and containers left mounted below the folder.
    awk -v at="$dir/" 'index($2, at) == 1 {print $2}' /proc/mounts | sort -r | while read -r mount; do
        umount -l "$mount" || true
    done
    ip netns del "$ns" 2>/dev/null || true
}

case "$action" in
base)
    mmdebstrap --quiet --variant=minbase \
        --include=systemd,systemd-sysv,dbus,udev,kmod,iproute2,openssh-server,openmpi-bin,procps,ca-certificates \
        bookworm "$1"
    ;;
image)
    # image NAME TAR DOCKERFILE CONTEXT
    buildah bud --isolation chroot --storage-driver vfs --root "$2.storage" --runroot "$2.run" -q -t "$1" -f "$3" "$4" >/dev/null
    rm -f "$2"
    buildah push --storage-driver vfs --root "$2.storage" --runroot "$2.run" -q "$1" "docker-archive:$2:$1"
    rm -rf "$2.storage" "$2.run"
    ;;
up)
    setup "$1"
    base=$(realpath "$2")
    shift 2
    up "$@"
    ;;
in)
    setup "$1"
    shift
    inside "$@"
    ;;
on | cut | boots | down)
    setup "$1"
    shift
    case "$action" in
    on) on_node "$@" ;;
    cut) cut_power "$1" ;;
    boots) wc -l <"$dir/$1.state/boots" ;;
    down) down ;;
    esac
    ;;
*)
    echo "usage: real.sh base|image|up|in|on|cut|boots|down ..." >&2
    exit 2
    ;;
esac

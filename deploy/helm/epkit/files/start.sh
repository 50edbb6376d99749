#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# start.sh [ARGUMENT...] - first process of every pod of the chart: fixes what image and node leave broken, starts sshd,
# and runs the launcher with the arguments. The pod exits with the launcher's exit code.
set -euo pipefail

say() { printf 'epkit: %s\n' "$*"; }
fail() {
    printf 'epkit: %s\n' "$*" >&2
    exit 1
}

keys=/etc/epkit/ssh
launcher=/workload/launcher/launch-workload.sh
port=${EPKIT_SSH_PORT:-}
index=${JOB_COMPLETION_INDEX:?is set by the chart}

# libibverbs loads its mlx5 driver by a name that ends in the number of its private interface. If the node's libibverbs
# precedes the image's, that file is missing from its search folder. A variable is not sufficient: child processes can
# lose it.
mend_verbs() {
    local node=/usr/local/nvidia/lib64 suffix provider folder target
    [ -e "$node/libibverbs.so.1" ] || return 0
    suffix=$(grep -aoE -m 1 'rdmav[0-9]+' "$node/libibverbs.so.1" | head -n 1) || return 0
    provider=$(find "$node" -maxdepth 1 -name 'libmlx5.so.1.*' | sort -V | tail -n 1)
    folder=/usr/lib/$(uname -m)-linux-gnu/libibverbs
    target=$folder/libmlx5-$suffix.so
    [ -n "$provider" ] && ! cmp -s "$provider" "$target" || return 0
    mkdir -p "$folder"
    cp "$provider" "$target.new"
    chmod 755 "$target.new"
    mv "$target.new" "$target"
    say "copied $provider to $target, where libibverbs of $node looks for it"
}

# add_line FILE LINE: unless the file contains it
add_line() {
    grep -qxsF -e "$2" "$1" || printf '%s\n' "$2" >>"$1"
}

start_sshd() {
    local sshd home=${HOME:-/root} banner=
    sshd=$(command -v sshd || true)
    [ -n "$sshd" ] || [ ! -x /usr/sbin/sshd ] || sshd=/usr/sbin/sshd
    [ -n "$sshd" ] || fail "there is no sshd in the image: build it with deploy/docker, or set ssh.enabled=false"
    # An existing Secret may have any owner and mode; ssh and sshd require files that only their user can read.
    mkdir -p /run/sshd /run/epkit "$home/.ssh"
    chmod 700 "$home/.ssh" /run/epkit
    install -m 600 "$keys/id" "$home/.ssh/epkit_id"
    install -m 600 "$keys/host_key" /run/epkit/host_key
    ssh-keygen -y -f "$home/.ssh/epkit_id" >/run/epkit/id.pub
    ssh-keygen -y -f /run/epkit/host_key >/run/epkit/host_key.pub
    touch "$home/.ssh/authorized_keys"
    chmod 600 "$home/.ssh/authorized_keys"
    add_line "$home/.ssh/authorized_keys" "$(cat /run/epkit/id.pub)"
    while read -r line; do
        [ -z "$line" ] || add_line "$home/.ssh/authorized_keys" "$line"
    done <<<"${SSH_PUBLIC_KEY:-}"
    # All pods of the release have the same host key, under any name.
    printf '* %s\n' "$(cut -d' ' -f1,2 /run/epkit/host_key.pub)" >/run/epkit/known_hosts
    if ! grep -qsF '# epkit' "$home/.ssh/config"; then
        {
            printf '# epkit: the pods of this release\nHost %s* *.%s\n' "$HOSTNAME_PREFIX" "$DOMAIN_NAME"
            printf '    Port %s\n    IdentityFile %s/.ssh/epkit_id\n' "$port" "$home"
            printf '    UserKnownHostsFile /run/epkit/known_hosts\n    StrictHostKeyChecking yes\n    BatchMode yes\n'
            if [ "${HOSTNAME_PREFIX%-0-}" != "$HOSTNAME_PREFIX" ]; then
                # The leader of a LeaderWorkerSet has a shorter name than its workers.
                printf 'Host %s\n    Port %s\n    IdentityFile %s/.ssh/epkit_id\n' "${HOSTNAME_PREFIX%-}" "$port" "$home"
                printf '    UserKnownHostsFile /run/epkit/known_hosts\n    BatchMode yes\n'
            fi
            printf 'Host *\n'
        } >"/run/epkit/config"
        # First in the file, since ssh uses the first value that it finds.
        [ ! -e "$home/.ssh/config" ] || cat "$home/.ssh/config" >>/run/epkit/config
        install -m 600 /run/epkit/config "$home/.ssh/config"
    fi
    "$sshd" -p "$port" -h /run/epkit/host_key -E /run/epkit/sshd.log -o PidFile=/run/epkit/sshd.pid \
        -o PermitRootLogin=prohibit-password -o PasswordAuthentication=no -o MaxStartups=1000 -o MaxSessions=100 ||
        fail "sshd did not start on port $port: $(tail -n 1 /run/epkit/sshd.log 2>/dev/null)"
    for _ in $(seq 50); do
        if exec 3<>"/dev/tcp/127.0.0.1/$port"; then
            IFS= read -r -t 5 -u 3 banner || true
            exec 3>&-
            break
        fi 2>/dev/null
        sleep 0.1
    done
    [[ $banner == SSH-* ]] || fail "sshd on port $port does not answer: $(tail -n 1 /run/epkit/sshd.log 2>/dev/null)"
    say "sshd listens on port $port"
}

# What the launcher has, for shells that mpirun starts by ssh; but no secrets, and nothing of this shell's own.
write_environment() {
    local name
    for name in $(compgen -e); do
        case $name in
        HF_TOKEN | *_KEY | HOME | PWD | OLDPWD | SHLVL | _) ;;
        *) printf 'export %s=%q\n' "$name" "${!name}" ;;
        esac
    done >/tmp/export_init_env.sh
}

# Process 1 gets only the signals that it handles, so what it waits for is a child, to which it passes them on.
child=
pending=
stopped=
# shellcheck disable=SC2317,SC2329 # called by trap
stop() {
    stopped=yes
    if [ -n "$child" ]; then
        kill -TERM "$child" 2>/dev/null || true
    else
        pending=yes
    fi
}
trap stop TERM INT

# start COMMAND...: as the child; a signal that came before its number was known reaches it too
start() {
    child=
    "$@" &
    child=$!
    [ -z "$pending" ] || kill -TERM "$child" 2>/dev/null || true
}

run_launcher() {
    local code=0
    start bash "$launcher" "$@"
    wait "$child" || code=$?
    # A trapped signal ends the first wait; the next one returns the exit code of the child.
    while kill -0 "$child" 2>/dev/null; do
        code=0
        wait "$child" || code=$?
    done
    return "$code"
}

keep_pod() {
    say "$1; the pod stays for kubectl exec"
    child=
    [ -z "$stopped" ] || return 0
    start sleep infinity
    wait "$child" || true
}

say "pod $index of ${NNODES:-?} on node ${NODE_NAME:-?}, host name $(hostname)"
export JOB_TIMESTAMP
JOB_TIMESTAMP=$(date -u +%Y-%m-%d-%H-%M-%S)
# Images whose LD_LIBRARY_PATH contains the node's libraries (as NVIDIA's) also load the node's libibverbs.
case "${EPKIT_STACK:-image}:${LD_LIBRARY_PATH:-}:" in
image:*:/usr/local/nvidia/lib64:* | image:/usr/local/nvidia/lib64:* | host:* | managed:*) mend_verbs ;;
esac
# gIB refuses to start if this is set, to any value.
unset TORCH_NCCL_USE_COMM_NONBLOCKING
[ -z "$port" ] || start_sshd
if [ -r /usr/local/gib/scripts/set_nccl_env.sh ]; then
    interfaces=${NCCL_SOCKET_IFNAME:-}
    set +eu
    # shellcheck disable=SC1091
    source /usr/local/gib/scripts/set_nccl_env.sh
    set -eu
    [ -z "$interfaces" ] || export NCCL_SOCKET_IFNAME=$interfaces
fi
# NCCL loads the plug-in by its name alone.
case ":${LD_LIBRARY_PATH:-}:" in
*:/usr/local/gib/lib64:*) ;;
*) [ ! -d /usr/local/gib/lib64 ] || export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/gib/lib64" ;;
esac
write_environment

code=0
run_launcher "$@" || code=$?
say "the launcher ended with exit code $code"
# A test that was asked for frees the GPUs when it has ended.
if [ "${SLEEP_INFINITY:-false}" = true ] && [ "${RUN_DEEPEP_TEST:-false}" != true ]; then
    keep_pod "SLEEP_INFINITY is true"
elif [ "${JOB_ORCHESTRATOR:-}" = leaderworkerset ] && [ "$code" = 0 ]; then
    keep_pod "a LeaderWorkerSet would start it again"
fi
exit "$code"

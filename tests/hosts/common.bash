# SPDX-License-Identifier: Apache-2.0
# Shared by the tests on several hosts. The hosts exist as long as a test file runs.
bats_require_minimum_version 1.5.0

EPKIT="${EPKIT_BUILD:?the build tree}/epkit"
HOSTS="${EPKIT_SOURCE:?the source tree}/tests/hosts/hosts.sh"
# Deadline of each layer: generous where it must not be reached, for a loaded machine.
# shellcheck disable=SC2034
PATIENT=(--connect-timeout 60)

# Why a test file has no hosts, if it has none.
export HOSTS_WHY="${HOSTS_WHY:-}"

setup() {
    [ -z "$HOSTS_WHY" ] || skip "$HOSTS_WHY"
}

# hosts_up N: starts N hosts, unless HOSTS_WHY is set; this machine may not be able to run them.
hosts_up() {
    [ -n "$HOSTS_WHY" ] || HOSTS_WHY=$("$HOSTS" check) || true
    [ -z "$HOSTS_WHY" ] || return 0
    HOSTS_DIR=$(mktemp -d "$EPKIT_BUILD/hosts-XXXXXX")
    export HOSTS_DIR
    "$HOSTS" up "$HOSTS_DIR" "$1"
}

# The same with Slurm on the hosts, in the long tier: its daemons take a while to start.
hosts_up_slurm() {
    HOSTS_WHY=$("$EPKIT_SOURCE/tests/hosts/slurm.sh" check) || true
    [ -n "${EPKIT_TEST_LONG:-}" ] || HOSTS_WHY="in the long tier only"
    hosts_up "$1"
    [ -z "$HOSTS_WHY" ] || return 0
    "$EPKIT_SOURCE/tests/hosts/slurm.sh" up "$HOSTS_DIR" "$1"
    mkdir -p "$HOSTS_DIR/work"
}

hosts_down() {
    [ -n "${HOSTS_DIR:-}" ] || return 0
    "$HOSTS" down "$HOSTS_DIR"
    rm -rf "$HOSTS_DIR"
}

on() {
    "$HOSTS" on "$HOSTS_DIR" "$@"
}

# launch ARGUMENT...: runs on the host login, in a folder of this test.
launch() {
    mkdir -p "$HOSTS_DIR/work"
    on login env -C "$HOSTS_DIR/work" timeout --kill-after=20 600 "$EPKIT" launch "${PATIENT[@]}" "$@"
}

# within SECONDS COMMAND...: repeats the command until it succeeds; six times as long on a loaded machine.
within() {
    local tries=$(($1 * 30))
    shift
    while ! "$@"; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || return 1
        sleep 0.2
    done
}

# No new process runs on a host.
is_clean() {
    [ -z "$("$HOSTS" ps "$HOSTS_DIR" "$1")" ]
}

# all_clean SECONDS HOST...
all_clean() {
    local seconds=$1 host
    shift
    for host in "$@"; do
        within "$seconds" is_clean "$host" || {
            echo "left on $host:"
            "$HOSTS" ps "$HOSTS_DIR" "$host"
            return 1
        }
    done
}

# is_running HOST TEXT: a process with TEXT in its command line
is_running() {
    "$HOSTS" ps "$HOSTS_DIR" "$1" | grep -qF -- "$2"
}

long() {
    [ -n "${EPKIT_TEST_LONG:-}" ] || skip "in the long tier only"
}

valid() {
    python3 -S "$EPKIT_SOURCE/tests/cli/validate.py" "$EPKIT_SOURCE/cmd/launch/schema.json" "$@"
}

# --- nodes with GPUs, NVSHMEM and DeepEP, as far as epkit sees them ---

# deepep_tree MACHINE: in $HOSTS_DIR/node, a synthetic machine with what a recipe leaves in /opt, and a stand-in for
# DeepEP's internode test: it says how it was started, judges its own environment, and prints what the test prints.
deepep_tree() {
    local tree=$HOSTS_DIR/node library
    command -v cc >/dev/null || skip "there is no C compiler"
    rm -rf "$tree" "$HOSTS_DIR/blank"
    # The synthetic A4X has no software. Programs here are of this processor.
    python3 -c 'import sys
sys.path.insert(0, sys.argv[1])
import machines, software
tree = machines.build(sys.argv[2])
if not any(path.startswith("/opt/deepep") for path in tree.entries):
    tree.remove("/usr/local")
    software.cuda(tree, software.X86_64)
    software.nvshmem(tree, software.X86_64)
    software.torch(tree, software.X86_64)
    software.deepep(tree, software.X86_64, archs=[100])
tree.write(sys.argv[3])' "$EPKIT_SOURCE/tests/machines" "$1" "$tree"
    mkdir -p "$tree/opt/deepep/DeepEP/tests" "$tree/opt/epkit/bin" "$tree/usr/local" "$tree/proc/driver" "$HOSTS_DIR/blank"
    # Its NVSHMEM is made up, and the linker would not load it.
    library=$(realpath "$tree/opt/deepep/nvshmem/lib/libnvshmem_host.so.3")
    rm "$library"
    echo 'int nothing;' >"$HOSTS_DIR/nothing.c"
    cc -shared -fPIC -Wl,-soname,libnvshmem_host.so.3 -o "$library" "$HOSTS_DIR/nothing.c"
    ln -sf "$EPKIT" "$tree/opt/epkit/bin/epkit"
    "$EPKIT" install plan gcp-b200-ubuntu2404 --root "$HOSTS_DIR/blank" --json |
        jq -r '.steps[] | select(.id == "environment").args.content' >"$tree/opt/deepep/unified-env.sh"
    deepep_output >"$tree/opt/deepep/output"
    cat >"$tree/opt/deepep/DeepEP/tests/test_internode.py" <<END
import os, subprocess
preload = os.environ.pop("LD_PRELOAD", "none")
print("started", os.environ.get("RANK"), preload, os.environ.get("NVSHMEM_SYMMETRIC_SIZE"), flush=True)
os.environ["EPKIT_PRELOAD"] = preload
for command in ["env", "--check"], ["doctor", "--only", "nvshmem,nccl,deepep"]:
    subprocess.run(["$EPKIT", *command])
if os.environ.get("RANK") == "0":
    print(open("/opt/deepep/output").read(), flush=True)
END
}

# What DeepEP 1 prints between two nodes, 32 cases.
deepep_output() {
    python3 -c 'import random, sys
sys.path.insert(0, sys.argv[1])
import samples
print("\n".join(samples.internode(random.Random(1), 1)[0]))' "$EPKIT_SOURCE/tests/parse"
}

DEEPEP_PARTS=(sys proc/driver opt usr/local etc/ld.so.conf.d)

# deepep_mount HOST..., deepep_umount HOST...: the hosts are such nodes
deepep_mount() {
    local host part
    for host in "$@"; do
        for part in "${DEEPEP_PARTS[@]}"; do on "$host" mount --bind "$HOSTS_DIR/node/$part" "/$part"; done
    done
}

deepep_umount() {
    local host part
    for host in "$@"; do
        for part in "${DEEPEP_PARTS[@]}"; do on "$host" umount "/$part"; done
    done
}

# deepep_is_right OUTPUT HOST...: on each host the test was started with the NVSHMEM that it was built with, in an
# environment in which neither `epkit env` nor the doctor finds a fault
deepep_is_right() {
    local text=$1 host rank=0
    shift
    for host in "$@"; do
        [[ "$text" == *"$host: started $rank /opt/deepep/nvshmem/lib/libnvshmem_host.so.3 "* ]] || return 1
        rank=$((rank + 1))
    done
    [ "$(grep -c ': The environment is right for this machine' <<<"$text")" -eq $# ] || return 1
    ! grep -qE '(nvshmem|nccl|deepep), failure mode' <<<"$text"
}

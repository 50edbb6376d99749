#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# start.sh, the first process of the chart's pods, run as in a pod: in a root folder of its own, as process 1's child.
#
# shellcheck disable=SC2154,SC2016 # set by run; texts of scripts

load common

setup() {
    [ "$(id -u)" -eq 0 ] || skip "needs root, for a root folder of its own"
    unshare --mount true 2>/dev/null || skip "mount namespaces are not allowed here"
    printf '%s\n' "$BASH_VERSION" >"$BATS_TEST_TMPDIR/launcher"
}

# pod PREPARE [NAME=VALUE...]: start.sh in a copy of this root folder that PREPARE changes first; ssh is off
pod() {
    local prepare=$1
    shift
    unshare --mount --pid --fork bash -euc '
        base=$1 chart=$2 launcher=$3 prepare=$4
        shift 4
        mount -t tmpfs tmpfs "$base"
        mkdir "$base/upper" "$base/work" "$base/root"
        mount -t overlay overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" "$base/root"
        cd "$base/root"
        mount -t proc proc proc
        mount --bind /dev dev
        mkdir -p workload/launcher usr/local/nvidia/lib64
        cp "$chart/files/start.sh" workload/launcher/
        cp "$launcher" workload/launcher/launch-workload.sh
        eval "$prepare"
        exec chroot . env JOB_COMPLETION_INDEX=0 NNODES=1 "$@" bash /workload/launcher/start.sh' - \
        "$(mktemp -d -p "$BATS_TEST_TMPDIR")" "$CHART" "$BATS_TEST_TMPDIR/launcher" "$prepare" "$@"
}

@test "the node's driver for mlx5 is copied to where the node's libibverbs looks for it" {
    # As on A4: private interface 57 of the node next to 34 of the image.
    local node='printf "x\0-rdmav57.so\0y" >usr/local/nvidia/lib64/libibverbs.so.1; echo old >usr/local/nvidia/lib64/libmlx5.so.1.9.0.0; echo driver >usr/local/nvidia/lib64/libmlx5.so.1.25.56.0'
    echo 'cat /usr/lib/$(uname -m)-linux-gnu/libibverbs/libmlx5-rdmav57.so' >"$BATS_TEST_TMPDIR/launcher"
    run -0 pod "$node" EPKIT_STACK=host
    [[ "$output" == *"epkit: copied /usr/local/nvidia/lib64/libmlx5.so.1.25.56.0 to "*"/libmlx5-rdmav57.so"*$'\n'driver$'\n'* ]]
    # NVIDIA's images lead the loader to the node's libraries, whatever the stack.
    run -0 pod "$node" EPKIT_STACK=image LD_LIBRARY_PATH=/opt/lib:/usr/local/nvidia/lib64
    [[ "$output" == *"epkit: copied "*$'\n'driver$'\n'* ]]
    # Not with a stack that only the image has; and nothing to do without a libibverbs of the node.
    run pod "$node" EPKIT_STACK=image
    [ "$status" -ne 0 ]
    echo 'exit 0' >"$BATS_TEST_TMPDIR/launcher"
    run -0 pod : EPKIT_STACK=host
    [[ "$output" != *copied* ]]
}

@test "the launcher gets its arguments' environment, without what gIB refuses; its exit code is the pod's" {
    echo 'echo "nonblocking=${TORCH_NCCL_USE_COMM_NONBLOCKING-unset} index=$JOB_COMPLETION_INDEX"; exit 9' >"$BATS_TEST_TMPDIR/launcher"
    run -9 pod : TORCH_NCCL_USE_COMM_NONBLOCKING=0
    [[ "$output" == *"nonblocking=unset index=0"*"the launcher ended with exit code 9"* ]]
}

@test "a pod that is ended passes it on to the launcher, and ends" {
    printf 'trap "echo saved; exit 3" TERM\nkill -TERM $PPID\nwhile :; do sleep 0.1; done\n' >"$BATS_TEST_TMPDIR/launcher"
    run -3 timeout 100 bash -c "$(declare -f pod); CHART='$CHART' BATS_TEST_TMPDIR='$BATS_TEST_TMPDIR'; pod :"
    [[ "$output" == *saved* ]]
}

@test "a pod that is ended before its launcher runs ends too" {
    echo 'exec sleep 300' >"$BATS_TEST_TMPDIR/launcher"
    run -143 timeout 100 bash -c "$(declare -f pod); CHART='$CHART' BATS_TEST_TMPDIR='$BATS_TEST_TMPDIR'
        pod 'printf \"#!/bin/sh\\nkill -TERM 1\\n\" >usr/local/bin/hostname; chmod +x usr/local/bin/hostname'"
    [[ "$output" == *"the launcher ended with exit code 143"* ]]
}

@test "shells that mpirun starts get the launcher's environment from /tmp/export_init_env.sh, without secrets" {
    echo 'env -i bash -c "source /tmp/export_init_env.sh; echo \"[\$ODD] [\${HF_TOKEN-none}] [\$NNODES] [\$LD_LIBRARY_PATH]\""' >"$BATS_TEST_TMPDIR/launcher"
    run -0 pod 'mkdir -p usr/local/gib/lib64' "ODD=a 'b\" \$c" HF_TOKEN=hf_x LD_LIBRARY_PATH=/opt/lib
    [[ "$output" == *"[a 'b\" \$c] [none] [1] [/opt/lib:/usr/local/gib/lib64]"* ]]
}

@test "a pod with RUN_DEEPEP_TEST ends with the test, also with SLEEP_INFINITY" {
    echo 'exit 5' >"$BATS_TEST_TMPDIR/launcher"
    run -5 timeout 100 bash -c "$(declare -f pod); CHART='$CHART' BATS_TEST_TMPDIR='$BATS_TEST_TMPDIR'; pod : SLEEP_INFINITY=true RUN_DEEPEP_TEST=true"
    [[ "$output" != *"the pod stays"* ]]
}

@test "the default launcher: hostname by MPI, then all_reduce, with their folders in the bucket; or the job that was asked for" {
    mkdir "$BATS_TEST_TMPDIR/bin"
    printf '#!/bin/sh\necho "$@"\ncase "$*" in *$FAIL) exit 3 ;; esac\n' >"$BATS_TEST_TMPDIR/bin/epkit"
    chmod +x "$BATS_TEST_TMPDIR/bin/epkit"
    launch() { env PATH="$BATS_TEST_TMPDIR/bin:$PATH" FAIL=none "$@"; }
    run -0 launch EPKIT_LOGS=/gcs/testbed-logs JOB_IDENTIFIER=r JOB_TIMESTAMP=t GPUS_PER_NODE=8 bash "$CHART/files/launch.sh" -- -b 1M
    [ "$output" = "launch --out /gcs/testbed-logs/r-t-hostname --with mpirun --per-node 8 hostname
launch --out /gcs/testbed-logs/r-t-nccl nccl all_reduce -- -b 1M" ]
    run -3 launch FAIL=hostname bash "$CHART/files/launch.sh"
    [ "$output" = "launch --with mpirun --per-node 8 hostname" ]
    run -0 launch EPKIT_JOB=nccl-init bash "$CHART/files/launch.sh"
    [ "$output" = "launch nccl-init" ]
    run -0 launch RUN_DEEPEP_TEST=true bash "$CHART/files/launch.sh"
    [ "$output" = "launch deepep-internode" ]
    # The users' commands name this copy.
    cmp "$CHART/files/launch.sh" "$EPKIT_SOURCE/deploy/gke-runtime/launchers/torchrun-stratup.sh"
}

# SPDX-License-Identifier: Apache-2.0
# A machine with fake GPUs: the command next to a fake libepkit-cuda.so (fake_cuda.c describes its GPUs).

machine_with_gpus() {
    local here="$BATS_TEST_TMPDIR/build"
    mkdir "$here"
    cp -P "$EPKIT" "$EPKIT_BUILD"/libepkit.so* "$EPKIT_BUILD/tests/cli/fake/libepkit-cuda.so" "$here"
    EPKIT="$here/epkit"
    unset CUDA_VISIBLE_DEVICES EPKIT_BACKEND
    export FAKE_GPUS="$1"
}

# The group chosen by a test: "<backend> <ranks> <why>".
chosen() {
    jq -r '.parameters | "\(.backend) \(.ranks) \(.backend_why)"' "$1"
}

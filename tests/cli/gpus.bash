# SPDX-License-Identifier: Apache-2.0
# A machine with made-up GPUs: the command beside a libepkit-cuda.so that is none (fake_cuda.c says which there are).

machine_with_gpus() {
    local here="$BATS_TEST_TMPDIR/build"
    mkdir "$here"
    cp -P "$EPKIT" "$EPKIT_BUILD"/libepkit.so* "$EPKIT_BUILD/tests/cli/fake/libepkit-cuda.so" "$here"
    if [ -e "$EPKIT_BUILD/libepkit-mpi.so" ]; then
        cp -P "$EPKIT_BUILD"/libepkit-mpi.so* "$here"
    fi
    EPKIT="$here/epkit"
    unset CUDA_VISIBLE_DEVICES EPKIT_BACKEND
    export FAKE_GPUS="$1"
}

# What a test said: "<backend> <ranks> <why>".
chosen() {
    jq -r '.parameters | "\(.backend) \(.ranks) \(.backend_why)"' "$1"
}

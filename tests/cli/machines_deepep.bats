#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Faults of DeepEP, and whole environments, on made-up machines. Each yields its finding and no other.

load common
load machines

setup_file() {
    # shellcheck disable=SC2046
    make_trees $(variants_of_file "$BATS_TEST_FILENAME")
}

@test "a4/mapping-inactive: defined and never called" {
    fault a4/mapping-inactive
}

@test "a4/mapping-inactive-decorator: decorator stolen" {
    fault a4/mapping-inactive-decorator
}

@test "a4/stale-copy: copied before it was patched" {
    fault a4/stale-copy
}

@test "a4/other-nvshmem: built against another NVSHMEM" {
    fault a4/other-nvshmem
}

@test "a4/deepep-too-old: older than what NVSHMEM 3.5 needs" {
    fault a4/deepep-too-old
}

@test "a4/gpu-arch: built for another GPU" {
    fault a4/gpu-arch
}

@test "a4/build-files: link for the linker is missing" {
    fault a4/build-files
}

@test "a4/build-files-cccl: header of CCCL is missing" {
    fault a4/build-files-cccl
}

@test "a4/testbed-env: environment of the testbed" {
    fault a4/testbed-env
}

@test "a4/job-env: environment of the job" {
    fault a4/job-env
}

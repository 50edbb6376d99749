#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Faults of NVSHMEM, NCCL and gIB, on made-up machines. Each yields its finding and no other.

load common
load machines

setup_file() {
    # shellcheck disable=SC2046
    make_trees $(variants_of_file "$BATS_TEST_FILENAME")
}

@test "a4/one-nic: mapping by PE" {
    fault a4/one-nic
}

@test "a4/shared-nic: two GPUs on one NIC" {
    fault a4/shared-nic
}

@test "a4/shared-nic-by-default: left to NVSHMEM" {
    fault a4/shared-nic-by-default
}

@test "a4/no-env: DeepEP is found, and nothing is set" {
    fault a4/no-env
}

@test "a3u/no-env: DeepEP is found, nothing is set, and NICs have other names" {
    fault a3u/no-env
}

@test "a4/nic-handler: handler on the CPU" {
    fault a4/nic-handler
}

@test "a4/nic-handler-fallback: handler falls back" {
    fault a4/nic-handler-fallback
}

@test "a4/nic-handler-beside: other options are configured" {
    fault a4/nic-handler-beside
}

@test "a4/two-nvshmem: PyTorch brings its own" {
    fault a4/two-nvshmem
}

@test "a4/two-nvshmem-dangling: preload of nothing" {
    fault a4/two-nvshmem-dangling
}

@test "a4/ibgda-transport: built without IBGDA" {
    fault a4/ibgda-transport
}

@test "a4/ibgda-transport-unloadable: transport does not load" {
    fault a4/ibgda-transport-unloadable
}

@test "a4/gdrcopy: handler on the CPU without GDRCopy" {
    fault a4/gdrcopy
}

@test "a4/home: homes that are not there" {
    fault a4/home
}

@test "a4/home-preload: one of several libraries to preload is gone" {
    fault a4/home-preload
}

@test "a3u/hca-prefix: prefix of other names" {
    fault a3u/hca-prefix
}

@test "a4/void-variables: variables that do nothing" {
    fault a4/void-variables
}

@test "a4/net-plugin: plugin does not load" {
    fault a4/net-plugin
}

@test "a4/net-plugin-missing: plugin not installed" {
    fault a4/net-plugin-missing
}

@test "a4/gib-settings: variable that must not be set" {
    fault a4/gib-settings
}

@test "a4/gib-settings-value: value that gIB does not expect" {
    fault a4/gib-settings-value
}

@test "a4/two-nccl: another NCCL on the path" {
    fault a4/two-nccl
}

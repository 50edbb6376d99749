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

@test "a4/gdrcopy-device: GDRCopy without its device file" {
    fault a4/gdrcopy-device
}

@test "a4/gdrcopy-denied: GDRCopy for other users" {
    fault a4/gdrcopy-denied
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

@test "a4/gib-settings-script: script of another release" {
    fault a4/gib-settings-script
}

@test "a4/two-nccl: another NCCL on the path" {
    fault a4/two-nccl
}

@test "a4/two-nccl-system: another NCCL in the system's folder" {
    fault a4/two-nccl-system
}

@test "a4/two-nccl-system: epkit env puts PyTorch's in front, and clears it" {
    cd "$BATS_FILE_TMPDIR" || return 1
    python3 "$MACHINES/machines.py" a4/two-nccl-system cleared
    epkit env --from cleared --json |
        jq -r '.variables[] | select(.name == "LD_LIBRARY_PATH").value' >path.txt
    cat path.txt
    grep -q '^[^:]*/nvidia/nccl/lib:/usr/lib/x86_64-linux-gnu:' path.txt
    sed --in-place --null-data "s|^LD_LIBRARY_PATH=.*|LD_LIBRARY_PATH=$(cat path.txt)|" cleared/proc/self/environ
    epkit doctor --from cleared
}

@test "a4/no-env: epkit env --check names a fault as well" {
    cd "$BATS_FILE_TMPDIR" || return 1
    run epkit env --check --from a4.no-env
    [ "$status" -eq 3 ]
    [[ "${lines[0]}" == "The environment has one fault: DEEP_EP_DEVICE_TO_HCA_MAPPING (missing). "*" could be better." ]]
    epkit env --check --from a4.no-env --json >env.json || [ $? -eq 3 ]
    jq -e '.findings == 1 and (.audit | length) == 1 and (.advice | length) > 1' env.json
}

#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Machines of the kinds that clusters have: what a NIC is for, which device is meant, what a process may use, what could
# not be told, one GPU a task. Each yields its findings and no other; the healthy ones beside them yield none.
#
# shellcheck disable=SC2154 # $stderr is set by run

load common
load machines

setup_file() {
    # shellcheck disable=SC2046
    make_trees $(variants_of_file "$BATS_TEST_FILENAME")
}

# said TREE ID MEMBER: a member of a finding; after fault TREE
said() {
    jq -r --arg id "$2" --arg member "$3" '.checks[] | select(.id == $id) | .[$member] // "null"' \
        "${1/\//.}.doctor.tree"
}

# map_is TREE MAP: all ports of each GPU, and NCCL_IB_HCA of 'epkit env' has the same
map_is() {
    local tree="${1/\//.}"
    epkit topo --from "$tree" --json >"$tree.topo"
    jq -r '[.map[] | "\(.gpu):\(.devices | map(sub(":1$"; "")) | join("+"))"] | join(" ")' "$tree.topo"
    [ "$(jq -r '[.map[] | "\(.gpu):\(.devices | map(sub(":1$"; "")) | join("+"))"] | join(" ")' "$tree.topo")" = "$2" ]
    epkit env --from "$tree" --json |
        jq --exit-status --slurpfile topo "$tree.topo" '[.variables[] | select(.name == "NCCL_IB_HCA").value]
            | . == [] or . == [$topo[0].forms.NCCL_IB_HCA]'
}

# role_is TREE NIC ROLE
role_is() {
    [ "$(epkit topo --from "${1/\//.}" --json | jq -r --arg nic "$2" '.nics[] | select(.name == $nic).role')" = "$3" ]
}

@test "h100-4nic/uplinks: two uplinks beside four hcas" {
    fault h100-4nic/uplinks
    map_is h100-4nic/uplinks "0:mlx5_0 1:mlx5_0 2:mlx5_1 3:mlx5_1 4:mlx5_4 5:mlx5_4 6:mlx5_5 7:mlx5_5"
    role_is h100-4nic/uplinks mlx5_2 uplink
    role_is h100-4nic/uplinks mlx5_3 uplink
}

@test "h100-4nic/uplinks-same-rate: uplinks as fast as hcas" {
    fault h100-4nic/uplinks-same-rate
    map_is h100-4nic/uplinks-same-rate "0:mlx5_0 1:mlx5_0 2:mlx5_1 3:mlx5_1 4:mlx5_4 5:mlx5_4 6:mlx5_5 7:mlx5_5"
    role_is h100-4nic/uplinks-same-rate mlx5_2 uplink
}

@test "vm-flat/uplink: uplink on a flat bus" {
    fault vm-flat/uplink
    map_is vm-flat/uplink "0:mlx5_1 1:mlx5_1 2:mlx5_2 3:mlx5_2"
}

@test "vm-flat/uplink-ipv6: uplink by an IPv6 route" {
    fault vm-flat/uplink-ipv6
    map_is vm-flat/uplink-ipv6 "0:mlx5_1 1:mlx5_1 2:mlx5_2 3:mlx5_2"
}

@test "vm-flat/rail-with-route: rail that carries the default route" {
    fault vm-flat/rail-with-route
    map_is vm-flat/rail-with-route "0:mlx5_0 1:mlx5_1 2:mlx5_2 3:mlx5_3"
}

@test "h100/vlan-uplink: uplinks below a vlan on a bond" {
    fault h100/vlan-uplink
    role_is h100/vlan-uplink mlx5_4 uplink
    role_is h100/vlan-uplink mlx5_5 uplink
}

@test "h100/link-layer-route: odd port with an address" {
    fault h100/link-layer-route
    # Not certain: no command.
    [ "$(said h100/link-layer-route link-layer fix)" = null ]
}

@test "h100/rail-gone: rail gone from the bus" {
    fault h100/rail-gone
    [[ "$(said h100/rail-gone port-down text)" == "GPU 5 (0000:c3:00.0) has 0 NICs near it"* ]]
    map_is h100/rail-gone "0:mlx5_0 1:mlx5_1 2:mlx5_2 3:mlx5_3 4:mlx5_6 5:mlx5_6 6:mlx5_8 7:mlx5_9"
}

@test "h100/storage-infiniband: storage of the same make" {
    fault h100/storage-infiniband
}

@test "h100/bluefield: bluefield for storage" {
    fault h100/bluefield
    role_is h100/bluefield mlx5_5 storage
}

@test "h100-16nic/efa: two efa for each gpu" {
    fault h100-16nic/efa
    map_is h100-16nic/efa "0:mlx5_0+mlx5_1 1:mlx5_2+mlx5_3 2:mlx5_4+mlx5_5 3:mlx5_6+mlx5_7 4:mlx5_10+mlx5_11 5:mlx5_12+mlx5_13 6:mlx5_14+mlx5_15 7:mlx5_16+mlx5_17"
}

@test "h100/subnet-manager: no subnet manager" {
    fault h100/subnet-manager
    [[ "$(said h100/subnet-manager port-down text)" == *"no subnet manager"* ]]
}

@test "h100/subnet-manager-one: one port is not managed" {
    fault h100/subnet-manager-one
    [[ "$(said h100/subnet-manager-one port-down text)" == "mlx5_2 has a link, but no subnet manager"* ]]
}

@test "h100/gpu-lost: gpu 3 off the bus" {
    fault h100/gpu-lost
    [[ "$(said h100/gpu-lost gpu-errors text)" == "the GPU at 0000:61:00.0"* ]]
    [ "$(said h100/gpu-lost gpu-errors fix)" = "sudo reboot" ]
    [ "$(said h100/gpu-lost gpu-errors fix_class)" = restart ]
}

@test "h100/gpu-ecc-renumbered: error of a gpu whose numbers differ" {
    fault h100/gpu-ecc-renumbered
    [ "$(said h100/gpu-ecc-renumbered gpu-errors fix)" = "sudo nvidia-smi --gpu-reset -i 0000:df:00.0" ]
}

@test "a4/closed-driver: closed driver on blackwell" {
    fault a4/closed-driver
}

@test "h100/closed-driver: closed driver on hopper" {
    fault h100/closed-driver
}

@test "h100/nouveau: nouveau has all gpus" {
    fault h100/nouveau
}

@test "h100/no-gres: job without gpus" {
    fault h100/no-gres
}

@test "h100/device-mode: device files of another user" {
    fault h100/device-mode
}

@test "vm-flat/ethernet-only: card that is a network interface only" {
    fault vm-flat/ethernet-only
}

@test "h100/no-gres-nvml: job that may not even ask" {
    fault h100/no-gres-nvml
}

@test "h100/nvml-dead: nvml does not answer" {
    fault h100/nvml-dead
    run epkit doctor --from h100.nvml-dead
    echo "$output"
    [ "$status" -eq 5 ]
    [[ "${lines[0]}" == "Not known whether h100.nvml-dead is healthy: "* ]]
    [[ "$output" == *"do        Run nvidia-smi"* ]]
}

@test "h100/mlx5-ib: mlx5 ib is not loaded" {
    fault h100/mlx5-ib
    [ "$(said h100/mlx5-ib rdma-device fix)" = "sudo modprobe mlx5_ib" ]
}

@test "h100/mlx5-unbound: one function is not bound" {
    fault h100/mlx5-unbound
    [ "$(said h100/mlx5-unbound rdma-device fix)" = null ]
}

@test "h100/uplinks-without-rdma: uplinks without rdma" {
    fault h100/uplinks-without-rdma
}

@test "a4/efa: deepep on efa" {
    fault a4/efa
}

@test "a4/broadcom: deepep on broadcom" {
    fault a4/broadcom
}

@test "h100/hca-list: list of one nic beside uplinks" {
    fault h100/hca-list
    [ "$(said h100/hca-list nccl-hca fix)" = "export NCCL_IB_HCA='=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,mlx5_6:1,mlx5_7:1,mlx5_8:1,mlx5_9:1'" ]
}

@test "a4/two-makers: half of the rails of another maker" {
    fault a4/two-makers
    [[ "$(said a4/two-makers ibgda-nic text)" == *"and that of 4 of 8 GPUs is of Broadcom" ]]
}

@test "a4/two-makers-mapped: mapping to nics of another maker" {
    fault a4/two-makers-mapped
    [[ "$(said a4/two-makers-mapped ibgda-nic fix)" == "export DEEP_EP_DEVICE_TO_HCA_MAPPING=0:mlx5_0:1,1:mlx5_0:1,2:mlx5_2:1,3:mlx5_2:1,"* ]]
}

@test "h100-16nic/two-makers: one rail of each maker for each gpu" {
    fault h100-16nic/two-makers
    run --separate-stderr "$EPKIT" topo --json --only map --from h100-16nic.two-makers
    [ "$(jq -r .forms.DEEP_EP_DEVICE_TO_HCA_MAPPING <<<"$output")" = 0:mlx5_1:1,1:mlx5_3:1,2:mlx5_5:1,3:mlx5_7:1,4:mlx5_11:1,5:mlx5_13:1,6:mlx5_15:1,7:mlx5_17:1 ]
    [[ "$(jq -r .forms.EPKIT_VERBS_DEVICE <<<"$output")" == bnxt_re0:1,* ]]
}

@test "a4/three-nics: five nics missing" {
    fault a4/three-nics
}

@test "a4/unknown-nics: makers are not shown" {
    fault a4/unknown-nics
}

@test "a4/no-nics: the pod has no NICs" {
    fault a4/no-nics
}

@test "a4/no-nics-unwanted: no NICs, and none wanted" {
    fault a4/no-nics-unwanted
}

@test "a4/broadcom-nccl: nccl on broadcom" {
    fault a4/broadcom-nccl
}

@test "h100/libcuda: libcuda off the path" {
    fault h100/libcuda
    [[ "$(said h100/libcuda libcuda fix)" == "export LD_LIBRARY_PATH=/usr/local/nvidia/lib64"* ]]
}

@test "h100/libcuda-path: libcuda on the path" {
    fault h100/libcuda-path
}

@test "h100/half-node: pod with half a node" {
    fault h100/half-node
    map_is h100/half-node "0:mlx5_0 1:mlx5_1 2:mlx5_2 3:mlx5_3"
}

@test "h100/half-nics: pod with all gpus and half of the nics" {
    fault h100/half-nics
}

@test "h100/sriov: pod with virtual functions" {
    fault h100/sriov
    map_is h100/sriov "0:mlx5_20 1:mlx5_21 2:mlx5_22 3:mlx5_23 4:mlx5_24 5:mlx5_25 6:mlx5_26 7:mlx5_27"
}

@test "a4/pod-network: pod without the hosts network" {
    fault a4/pod-network
    [[ "$(said a4/pod-network gid text)" == *"in another network namespace"* ]]
}

@test "h100/pod-network-unasked: pod without the hosts network and without rdma" {
    fault h100/pod-network-unasked
}

@test "a4/one-task-mapping: mapping by number in each task" {
    fault a4/one-task-mapping
    map_is a4/one-task-mapping "0:mlx5_5"
}

@test "a4/one-task-own-mapping: mapping for this task" {
    fault a4/one-task-own-mapping
}

@test "a4/one-task-list: list for this task" {
    fault a4/one-task-list
}

@test "a4/one-task-list-of-another: list from the batch script" {
    fault a4/one-task-list-of-another
}

@test "a4/one-task-default: nothing said in each task" {
    fault a4/one-task-default
}

@test "a4/fabric-manager-version: fabric manager of another version" {
    fault a4/fabric-manager-version
    [[ "$(said a4/fabric-manager-version nvlink fix)" == "sudo apt-get install nvidia-fabricmanager-580=580."* ]]
}

@test "a4/memlock-hard: locked memory below a hard limit" {
    fault a4/memlock-hard
    [ "$(said a4/memlock-hard memlock fix)" = null ]
}

@test "a4/provider-of-another-set: provider in another folder" {
    fault a4/provider-of-another-set
    [[ "$(said a4/provider-of-another-set provider-missing fix)" != *"ln -s"* ]]
}

@test "h100/gpu-lost-silently: gpu gone without an xid" {
    fault h100/gpu-lost-silently
    [[ "$(said h100/gpu-lost-silently gpu-errors text)" == "the GPU at 0000:61:00.0: "* ]]
    map_is h100/gpu-lost-silently "0:mlx5_0 1:mlx5_1 2:mlx5_2 3:mlx5_6 4:mlx5_7 5:mlx5_8 6:mlx5_9"
}

@test "h100/nvml-dead-one: nvml hangs" {
    fault h100/nvml-dead-one
}

@test "h100/container-without-gpus: container without gpus" {
    fault h100/container-without-gpus
}

@test "h100/device-files: device files are not made" {
    fault h100/device-files
}

@test "a4/one-task-uuid: mapping by number and uuids" {
    fault a4/one-task-uuid
}

@test "a4/one-task-uuid-list: list and uuids" {
    fault a4/one-task-uuid-list
}

@test "a4/one-task-mig-list: list of another and mig" {
    fault a4/one-task-mig-list
}

@test "a4/one-task-visible: one visible of all" {
    fault a4/one-task-visible
}

@test "a4/verbs-mixed-unloadable: transport that mixed sets keep from loading" {
    fault a4/verbs-mixed-unloadable
}

@test "vm-flat/bond-of-all: bond of all nics" {
    fault vm-flat/bond-of-all
    role_is vm-flat/bond-of-all mlx5_0 data
}

@test "vm-flat/lone-down: lone nic is down" {
    fault vm-flat/lone-down
}

@test "a4/libcuda-stub: stub in front" {
    fault a4/libcuda-stub
    [[ "$(said a4/libcuda-stub libcuda fix)" == "export LD_LIBRARY_PATH="* ]]
    [[ "$(said a4/libcuda-stub libcuda fix)" != *stubs* ]]
}

@test "a4/libcuda-stub-behind: stub behind" {
    fault a4/libcuda-stub-behind
}

@test "a4/libcuda-older: compat of an old image" {
    fault a4/libcuda-older
    [[ "$(said a4/libcuda-older libcuda text)" == *"535.104.05, older"* ]]
    [[ "$(said a4/libcuda-older libcuda fix)" != *compat* ]]
}

@test "a4/libcuda-newer: compat for this driver" {
    fault a4/libcuda-newer
}

@test "h100/nouveau-one: nouveau has one gpu" {
    fault h100/nouveau-one
    [ "$(said h100/nouveau-one driver-skew fix_class)" = restart ]
}

@test "h100/unbound-one: nobody has one gpu" {
    fault h100/unbound-one
    [[ "$(said h100/unbound-one driver-skew text)" == "the GPU at 0000:52:00.0 has no driver"* ]]
    [ "$(said h100/unbound-one driver-skew fix)" = null ]
}

@test "h100/vfio-one: virtual machine has one gpu" {
    fault h100/vfio-one
}

@test "h100/vgpu: functions of a gpu" {
    fault h100/vgpu
}

@test "h100/screen: card for a screen" {
    fault h100/screen
}

@test "h100/gpu-lost-minors: minor numbers are not indices" {
    fault h100/gpu-lost-minors
    [[ "$(said h100/gpu-lost-minors gpu-errors text)" == "the GPU at 0000:52:00.0: "* ]]
}

@test "h100/nics-of-others: pod with nics of other gpus" {
    fault h100/nics-of-others
    [[ "$(said h100/nics-of-others nic-access text)" == *"none near GPU 0 (0000:1b:00.0)" ]]
}

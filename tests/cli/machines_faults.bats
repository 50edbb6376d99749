#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Faults of synthetic machines, and machines that look as if they had one: each yields its findings and no other, live
# and from its snapshot. tests/machines/collection.py compares; here is what single findings say and advise.

load common
load machines

setup_file() {
    # shellcheck disable=SC2046 # names without blanks
    make_trees $(sed -n -E 's/^ +(says|says_not|role_is|map_is|trees) ([a-z0-9-]+\/[^ ]*).*/\2/p' "$BATS_TEST_FILENAME" | sort -u)
}

setup() {
    cd "$BATS_FILE_TMPDIR" || return 1
}

# faults MACHINE: of each of its variants
faults() {
    python3 -S "$MACHINES/collection.py" "$EPKIT" variants --only "$1/"
}

@test "faults of A4" {
    faults a4
}

@test "faults of A3 Ultra" {
    faults a3u
}

@test "faults of 8 H100" {
    faults h100
    faults h100-4nic
    faults h100-16nic
}

@test "faults of GB200, of a virtual machine with one bus and of a laptop" {
    faults gb200
    faults vm-flat
    faults laptop
}

# member NAME ID MEMBER: of a finding
member() {
    trees "$1"
    [ -e "${1/\//.}.json" ] || epkit doctor --from "${1/\//.}" --json >"${1/\//.}.json" || true
    jq -r --arg id "$2" --arg member "$3" '.checks[] | select(.id == $id) | .[$member] // "null"' "${1/\//.}.json"
}

# says NAME ID MEMBER PATTERN
says() {
    local text
    text=$(member "$1" "$2" "$3")
    echo "$1: $2: $3: $text"
    # shellcheck disable=SC2053
    [[ "$text" == $4 ]]
}

# says_not NAME ID MEMBER PATTERN
says_not() {
    ! says "$@" || return 1
}

# map_is NAME MAP: all ports of each GPU, and NCCL_IB_HCA of 'epkit env' has the same
map_is() {
    local tree="${1/\//.}"
    trees "$1"
    epkit topo --from "$tree" --json >"$tree.topo"
    jq -r '[.map[] | "\(.gpu):\(.devices | map(sub(":1$"; "")) | join("+"))"] | join(" ")' "$tree.topo" >"$tree.map"
    diff "$tree.map" - <<<"$2"
    epkit env --from "$tree" --json |
        jq --exit-status --slurpfile topo "$tree.topo" '[.variables[] | select(.name == "NCCL_IB_HCA").value]
            | . == [] or . == [$topo[0].forms.NCCL_IB_HCA]'
}

# role_is NAME NIC ROLE
role_is() {
    trees "$1"
    [ "$(epkit topo --from "${1/\//.}" --json | jq -r --arg nic "$2" '.nics[] | select(.name == $nic).role')" = "$3" ]
}

@test "what NICs are for" {
    role_is h100-4nic/uplinks mlx5_2 uplink
    role_is h100-4nic/uplinks mlx5_3 uplink
    role_is h100-4nic/uplinks-same-rate mlx5_2 uplink
    role_is h100/vlan-uplink mlx5_4 uplink
    role_is h100/vlan-uplink mlx5_5 uplink
    role_is h100/bluefield mlx5_5 storage
    role_is vm-flat/bond-of-all mlx5_0 data
}

@test "the NICs of each GPU" {
    map_is h100-4nic/uplinks "0:mlx5_0 1:mlx5_0 2:mlx5_1 3:mlx5_1 4:mlx5_4 5:mlx5_4 6:mlx5_5 7:mlx5_5"
    map_is h100-4nic/uplinks-same-rate "0:mlx5_0 1:mlx5_0 2:mlx5_1 3:mlx5_1 4:mlx5_4 5:mlx5_4 6:mlx5_5 7:mlx5_5"
    map_is vm-flat/uplink "0:mlx5_1 1:mlx5_1 2:mlx5_2 3:mlx5_2"
    map_is vm-flat/uplink-ipv6 "0:mlx5_1 1:mlx5_1 2:mlx5_2 3:mlx5_2"
    map_is vm-flat/rail-with-route "0:mlx5_0 1:mlx5_1 2:mlx5_2 3:mlx5_3"
    map_is h100/rail-gone "0:mlx5_0 1:mlx5_1 2:mlx5_2 3:mlx5_3 4:mlx5_6 5:mlx5_6 6:mlx5_8 7:mlx5_9"
    map_is h100-16nic/efa "0:mlx5_0+mlx5_1 1:mlx5_2+mlx5_3 2:mlx5_4+mlx5_5 3:mlx5_6+mlx5_7 4:mlx5_10+mlx5_11 5:mlx5_12+mlx5_13 6:mlx5_14+mlx5_15 7:mlx5_16+mlx5_17"
    map_is h100/half-node "0:mlx5_0 1:mlx5_1 2:mlx5_2 3:mlx5_3"
    map_is h100/sriov "0:mlx5_20 1:mlx5_21 2:mlx5_22 3:mlx5_23 4:mlx5_24 5:mlx5_25 6:mlx5_26 7:mlx5_27"
    map_is a4/one-task-mapping "0:mlx5_5"
    map_is h100/gpu-lost-silently "0:mlx5_0 1:mlx5_1 2:mlx5_2 3:mlx5_6 4:mlx5_7 5:mlx5_8 6:mlx5_9"
}

@test "one rail of each maker for each GPU: DeepEP gets those that it supports" {
    trees h100-16nic/two-makers
    epkit topo --json --only map --from h100-16nic.two-makers >two-makers.map
    [ "$(jq -r .forms.DEEP_EP_DEVICE_TO_HCA_MAPPING two-makers.map)" = \
        0:mlx5_1:1,1:mlx5_3:1,2:mlx5_5:1,3:mlx5_7:1,4:mlx5_11:1,5:mlx5_13:1,6:mlx5_15:1,7:mlx5_17:1 ]
    [[ "$(jq -r .forms.EPKIT_VERBS_DEVICE two-makers.map)" == bnxt_re0:1,* ]]
}

@test "findings of NICs" {
    # Certain: a rail on a switch with its GPU, without an address, and seven like it of the other kind.
    says h100/link-layer link-layer fix "sudo mlxconfig -d 0000:5e:00.0 set LINK_TYPE_P1=IB"
    says h100/link-layer link-layer fix_class cuts-off
    # Not certain: no command.
    says h100/link-layer-route link-layer fix null
    says h100/rail-gone port-down text "GPU 5 (0000:c3:00.0) has 0 NICs near it*"
    says h100/subnet-manager port-down text "*no subnet manager*"
    says h100/subnet-manager-one port-down text "mlx5_2 has a link, but no subnet manager*"
    says h100/mlx5-ib rdma-device fix "sudo modprobe mlx5_ib"
    says h100/mlx5-unbound rdma-device fix null
    says h100/hca-list nccl-hca fix "export NCCL_IB_HCA='=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,mlx5_6:1,mlx5_7:1,mlx5_8:1,mlx5_9:1'"
    says a4/two-makers ibgda-nic text "*and that of 4 of 8 GPUs is of Broadcom"
    says a4/two-makers-mapped ibgda-nic fix "export DEEP_EP_DEVICE_TO_HCA_MAPPING=0:mlx5_0:1,1:mlx5_0:1,2:mlx5_2:1,3:mlx5_2:1,*"
    says a4/pod-network gid text "*in another network namespace*"
    says h100/nics-of-others nic-access text "*none near GPU 0 (0000:1b:00.0)"
    says a4/memlock-hard memlock fix null
    says_not a4/provider-of-another-set provider-missing fix "*ln -s*"
}

@test "findings of GPUs and of the driver" {
    says h100/gpu-lost gpu-errors text "the GPU at 0000:61:00.0*"
    says h100/gpu-lost gpu-errors fix "sudo reboot"
    says h100/gpu-lost gpu-errors fix_class restart
    says h100/gpu-lost-silently gpu-errors text "the GPU at 0000:61:00.0: *"
    says h100/gpu-lost-minors gpu-errors text "the GPU at 0000:52:00.0: *"
    says h100/gpu-ecc-renumbered gpu-errors fix "sudo nvidia-smi --gpu-reset -i 0000:df:00.0"
    says a4/fabric-manager-version nvlink fix "sudo apt-get install nvidia-fabricmanager-580=580.*"
    says h100/nouveau-one driver-skew fix_class restart
    says h100/unbound-one driver-skew text "the GPU at 0000:52:00.0 has no driver*"
    says h100/unbound-one driver-skew fix null
    # No reboot corrects LD_LIBRARY_PATH.
    says a4/driver-skew-library driver-skew fix "export LD_LIBRARY_PATH=*"
    says_not a4/driver-skew-library driver-skew fix "*/usr/local/nvidia*"
    says a4/driver-skew-library driver-skew fix_class safe
    says h100/libcuda libcuda fix "export LD_LIBRARY_PATH=/usr/local/nvidia/lib64*"
    says a4/libcuda-stub libcuda fix "export LD_LIBRARY_PATH=*"
    says_not a4/libcuda-stub libcuda fix "*stubs*"
    says a4/libcuda-older libcuda text "*535.104.05, older*"
    says_not a4/libcuda-older libcuda fix "*compat*"
}

@test "clocks: heat and the power supply are told apart, and hardware counts as an error" {
    # GPU 5 is worse than GPU 2, and is named first; both are evidence.
    says gcp-a4-mig-off/hot clocks text "*the hardware lowers the clocks to half or less because it is too hot, and other*"
    says gcp-a4-mig-off/hot clocks severity serious
    [ "$(member gcp-a4-mig-off/hot clocks evidence | jq length)" -eq 2 ]
    says gcp-a4-mig-off/hot clocks advice "*fans*"
    says gcp-a4-mig-off/warm clocks severity warning
    says gcp-a4-mig-off/power-brake clocks text "*[(]power brake[)]"
    says gcp-a4-mig-off/power-brake clocks advice "*power supplies*"
    says gcp-a4-mig-off/clocks-untold clocks outcome not_here
}

@test "a driver that does not answer: what is not known, and what to do" {
    trees h100/nvml-dead
    run -5 epkit doctor --from h100.nvml-dead
    [[ "${lines[0]}" == "Not known whether h100.nvml-dead is healthy: "* ]]
    [[ "$output" == *"do        Run nvidia-smi"* ]]
}

/* SPDX-License-Identifier: Apache-2.0 */
/* doctor_cases_nic.c - checks of NICs. */
#include "doctor_cases.h"

/* --- NICs --- */

CHANGE(half_rate, nic(made, 1)->ports[0].rate_gbps = 200)

static void so_slow_that_it_looks_like_management(struct made *made)
{
    nic(made, 1)->ports[0].rate_gbps = 25;
    nic(made, 1)->role = TOPO_ROLE_MANAGEMENT;
}

static void management_far_from_gpus(struct made *made)
{
    struct topo_nic *slow = machine_nic(&made->hardware, "mlx5_9", 1, -1, 0, 0);

    slow->hca = "MT4129";
    slow->role = TOPO_ROLE_MANAGEMENT;
    slow->ports[0].rate_gbps = 25;
}

/* A storage NIC as near to GPUs as the data NICs, of another model. */
static void slower_of_another_make(struct made *made)
{
    struct topo_nic *other =
        machine_nic(&made->hardware, "mlx5_9", 1, made->hardware.pci[nic_pci(made, 0)->parent].parent, 0, 0);

    other->hca = "MT4125";
    other->ports[0].rate_gbps = 200;
    other->ports[0].gids_state = SOURCE_OK;
    made->hardware.pci[other->pci].vendor = 0x15b3;
    made->hardware.pci[other->pci].device = 0x101d;
}

/* The slower NIC is of the same model as the data NICs, in another slot. */
static void slower_and_farther(struct made *made)
{
    struct topo_nic *other = machine_nic(&made->hardware, "mlx5_9", 1, -1, 0, 0);

    other->hca = "MT4129";
    other->ports[0].rate_gbps = 200;
    made->hardware.pci[other->pci].vendor = 0x15b3;
    made->hardware.pci[other->pci].device = 0x1021;
}

CHANGE(half_lanes, nic_pci(made, 2)->link_width = 8)

static void older_slots_that_suffice(struct made *made)
{
    for (int i = 0; i < 4; i++) {
        nic_pci(made, i)->link_gts = 16;
        nic(made, i)->ports[0].rate_gbps = 200;
    }
}

static void older_slots_that_do_not(struct made *made)
{
    for (int i = 0; i < 4; i++)
        nic_pci(made, i)->link_gts = 16;
}

static void links_not_known(struct made *made)
{
    for (int i = 0; i < 4; i++) {
        nic_pci(made, i)->link_gts = nic_pci(made, i)->link_gts_max = 0;
        nic_pci(made, i)->link_width = nic_pci(made, i)->link_width_max = 0;
    }
}

CHANGE(gpu_speed_drops_when_idle, gpu_pci(made, 0)->link_gts = 2.5)
CHANGE(narrow_gpu, gpu_pci(made, 0)->link_width = 8)

static void laptop_with_eight_lanes(struct made *made)
{
    no_nics(made);
    made->hardware.topo.n_gpus = 1;
    narrow_gpu(made);
}

CHANGE(no_ipv4, nic(made, 3)->ports[0].n_gids = 2)

static void ipv6_only(struct made *made)
{
    for (int i = 0; i < 4; i++)
        made->gids[i][3].kind = TOPO_GID_OTHER;
}

static void ipv6_only_and_configured(struct made *made)
{
    ipv6_only(made);
    made_env(made, "NVSHMEM_IB_ADDR_FAMILY=AF_INET6");
    made_env(made, "NCCL_IB_ADDR_FAMILY=AF_INET6");
}

/* Without NVSHMEM, its variable does not matter. */
static void ipv6_only_and_nccl_configured(struct made *made)
{
    ipv6_only(made);
    made->software.nvshmem.host.state = SOURCE_ABSENT;
    made_env(made, "NCCL_IB_ADDR_FAMILY=AF_INET6");
}

static void ipv6_only_and_half_configured(struct made *made)
{
    ipv6_only(made);
    made->software.nvshmem.home = "/opt/nvshmem";
    made_env(made, "NCCL_IB_ADDR_FAMILY=AF_INET6");
}

CHANGE_OF(ipv6_only_and_wrong_index, ipv6_only_and_configured, made_env(made, "NCCL_IB_GID_INDEX=0"))
CHANGE(gids_hidden, nic(made, 0)->ports[0].gids_state = SOURCE_DENIED)
CHANGE(index_3, made_env(made, "NVSHMEM_IB_GID_INDEX=3"))
CHANGE(index_of_roce_1, made_env(made, "NCCL_IB_GID_INDEX=2"))
CHANGE(index_link_local, made_env(made, "NVSHMEM_IB_GID_INDEX=1"))
CHANGE(index_empty, made_env(made, "NVSHMEM_IB_GID_INDEX=7"))
CHANGE(index_automatic, made_env(made, "NVSHMEM_IB_GID_INDEX=-1"))
CHANGE(index_nonsense, made_env(made, "NVSHMEM_IB_GID_INDEX=three"))

static void infiniband(struct made *made)
{
    for (int i = 0; i < 4; i++)
        nic(made, i)->ports[0].link_layer = TOPO_LINK_INFINIBAND;
}

static void one_port_ethernet(struct made *made)
{
    infiniband(made);
    nic(made, 3)->ports[0].link_layer = TOPO_LINK_ETHERNET;
    no_ipv4(made);
}

static void software_device(struct made *made)
{
    for (int i = 0; i < 4; i++)
        nic(made, i)->pci = -1;
}

static void down(struct made *made)
{
    nic(made, 1)->role = TOPO_ROLE_DOWN;
    nic(made, 1)->ports[0].active = false;
    nic(made, 1)->ports[0].state = "DOWN";
    nic(made, 1)->ports[0].phys_state = "Polling";
}

static void state_unreadable(struct made *made)
{
    down(made);
    nic(made, 1)->ports[0].state = "";
    nic(made, 1)->ports[0].phys_state = "";
}

/* The address of another function of the card. Copied aside first: gcc -O3 takes the two for one array. */
static void second_function(struct topo_pci *pci, const struct topo_pci *card)
{
    struct topo_pci first = *card;

    snprintf(pci->address, sizeof(pci->address), "%.11s1", first.address);
}

static void spare_port_of_a_card(struct made *made)
{
    struct topo_nic *spare =
        machine_nic(&made->hardware, "mlx5_9", 1, made->hardware.pci[nic_pci(made, 0)->parent].parent, 0, 0);

    spare->hca = "MT4129";
    spare->role = TOPO_ROLE_DOWN;
    spare->ports[0].active = false;
    second_function(&made->hardware.pci[spare->pci], nic_pci(made, 0));
    made->hardware.pci[spare->pci].device = 0x1021;
}

/* All on one bus: nothing is on a switch with a GPU. */
static void flat(struct made *made)
{
    for (int i = 0; i < 4; i++) {
        gpu_pci(made, i)->parent = nic_pci(made, i)->parent = -1;
        gpu_pci(made, i)->host_bridge = nic_pci(made, i)->host_bridge = 0;
    }
}

static void unplugged(struct made *made, int i)
{
    nic(made, i)->role = TOPO_ROLE_DOWN;
    nic(made, i)->ports[0].active = false;
    nic(made, i)->ports[0].state = "DOWN";
    nic(made, i)->ports[0].phys_state = "Disabled";
}

/* Two GPUs, a card with two ports and one cable. */
static void workstation(struct made *made)
{
    flat(made);
    unplugged(made, 1);
    made->hardware.topo.n_gpus = made->hardware.topo.n_nics = 2;
    nic_pci(made, 2)->vendor = nic_pci(made, 3)->vendor = 0;
    made->map.n = 1;
    second_function(nic_pci(made, 1), nic_pci(made, 0));
}

/* Two cards with two ports each, and a single cable. */
static void one_cable_of_four(struct made *made)
{
    flat(made);
    unplugged(made, 1);
    for (int i = 1; i < 4; i += 2)
        second_function(nic_pci(made, i), nic_pci(made, i - 1));
}

static void one_gpu_and_no_cable(struct made *made)
{
    flat(made);
    unplugged(made, 0);
    made->hardware.topo.n_gpus = made->hardware.topo.n_nics = 1;
    for (int i = 1; i < 4; i++)
        nic_pci(made, i)->vendor = 0;
    made->map.n = 0;
}

CHANGE_OF(one_gpu_and_no_cable_for_nccl, one_gpu_and_no_cable, made_env(made, "NCCL_IB_HCA=mlx5_0"))

static void storage_far_away_down(struct made *made)
{
    struct topo_nic *storage = machine_nic(&made->hardware, "mlx5_9", 1, -1, 0, 0);

    storage->role = TOPO_ROLE_DOWN;
    storage->hca = "MT4125";
    storage->ports[0].active = false;
    snprintf(made->hardware.pci[storage->pci].address, sizeof(made->hardware.pci[0].address), "0000:f0:00.0");
    made->hardware.pci[storage->pci].device = 0x101d;
}

static void one_nic_missing(struct made *made)
{
    nic_pci(made, 3)->vendor = 0;
    made->hardware.topo.n_nics = 3;
    made->map.n = 3;
    /* Two GPUs of four see fewer: the others, with both, have to be more than half. */
    gpu_pci(made, 2)->parent = gpu_pci(made, 0)->parent;
    gpu_pci(made, 2)->host_bridge = 0;
}

static void function_without_rdma(struct made *made)
{
    made->hardware.topo.n_nics = 3;
    made->map.n = 3;
}

static void half_as_many_nics(struct made *made)
{
    made->hardware.topo.n_nics = 2;
    nic_pci(made, 2)->vendor = nic_pci(made, 3)->vendor = 0;
    made->map.n = 0;
}

static void flat_bus_one_nic_missing(struct made *made)
{
    flat(made);
    made->hardware.topo.n_nics = 3;
    nic_pci(made, 3)->vendor = 0;
    made->map.n = 3;
}

CHANGE(uverbs_denied, made_stat(made, "/dev/infiniband/uverbs1", "char", "---"))
CHANGE(uverbs_absent, made_state(made, "stats", "/dev/infiniband/uverbs1", "absent"))

static void no_uverbs_in_a_container(struct made *made)
{
    made_state(made, "stats", "/dev/infiniband/uverbs0", "absent");
    made_state(made, "stats", "/dev/infiniband/uverbs1", "absent");
}

CHANGE_OF(no_uverbs_for_nccl, no_uverbs_in_a_container, made_env(made, "NCCL_IB_HCA=mlx5_0"))
CHANGE_OF(no_uverbs_for_deepep, no_uverbs_in_a_container, made->software.deepep.imported = 0)
CHANGE_OF(no_uverbs_for_nvshmem, no_uverbs_in_a_container, made_env(made, "NVSHMEM_HCA_LIST=mlx5_0:1"))

static void no_uverbs_and_sockets(struct made *made)
{
    no_uverbs_in_a_container(made);
    made_env(made, "NCCL_IB_DISABLE=1");
    made_env(made, "NCCL_NET=Socket");
}

static void uverbs_not_asked(struct made *made)
{
    made_state(made, "stats", "/dev/infiniband/uverbs0", NULL);
    made_state(made, "stats", "/dev/infiniband/uverbs1", NULL);
}

CHANGE(no_uverbs, nic(made, 2)->uverbs = "")

/* --- the table --- */

static const struct doctor_case rows[] = {
    CASE("slow-link", nothing, OK, ""),
    CASE("slow-link", half_rate, FOUND, "mlx5_1:1: runs at 200"),
    CASE("slow-link", so_slow_that_it_looks_like_management, FOUND, "mlx5_1:1"),
    CASE("slow-link", management_far_from_gpus, OK, ""),
    CASE("slow-link", slower_of_another_make, OK, ""),
    CASE("slow-link", slower_and_farther, OK, ""),
    CASE("slow-link", half_lanes, FOUND, "mlx5_2"),
    CASE("slow-link", older_slots_that_suffice, OK, ""),
    CASE("slow-link", older_slots_that_do_not, FOUND, "16 GT/s"),
    CASE("slow-link", links_not_known, OK, ""),
    CASE("slow-link", gpu_speed_drops_when_idle, OK, ""),
    CASE("slow-link", narrow_gpu, FOUND, "GPU 0"),
    CASE("slow-link", laptop_with_eight_lanes, OK, ""),

    CASE("gid", nothing, OK, ""),
    CASE("gid", no_ipv4, FOUND, "mlx5_3:1"),
    CASE("gid", ipv6_only, FOUND, "IPv6"),
    CASE("gid", ipv6_only_and_configured, OK, ""),
    CASE("gid", ipv6_only_and_nccl_configured, OK, ""),
    CASE("gid", ipv6_only_and_half_configured, FOUND, "IPv6"),
    CASE("gid", ipv6_only_and_wrong_index, FOUND, "NCCL_IB_GID_INDEX=0"),
    CASE("gid", slower_of_another_make, OK, ""),
    CASE("gid", gids_hidden, UNKNOWN, "Permission denied"),
    CASE("gid", index_3, OK, ""),
    CASE("gid", index_of_roce_1, FOUND, "NCCL_IB_GID_INDEX=2"),
    CASE("gid", index_link_local, FOUND, "link-local"),
    CASE("gid", index_empty, FOUND, "empty"),
    CASE("gid", index_automatic, OK, ""),
    CASE("gid", index_nonsense, OK, ""),
    CASE("gid", infiniband, ABSENT, "no RoCE port"),
    CASE("gid", one_port_ethernet, ABSENT, "no RoCE port"),
    CASE("gid", software_device, ABSENT, "no RDMA NIC"),

    CASE("port-down", nothing, OK, ""),
    CASE("port-down", no_gpus, ABSENT, "no NVIDIA GPU"),
    CASE("port-down", down, FOUND, "mlx5_1"),
    CASE("port-down", state_unreadable, UNKNOWN, "1 of 4 NICs"),
    CASE("port-down", all_states_unreadable, UNKNOWN, "4 of 4 NICs"),
    CASE("port-down", spare_port_of_a_card, OK, ""),
    CASE("port-down", workstation, OK, ""),
    CASE("port-down", one_cable_of_four, FOUND, "mlx5_1"),
    CASE("port-down", one_gpu_and_no_cable, OK, ""),
    CASE("port-down", one_gpu_and_no_cable_for_nccl, FOUND, "mlx5_0"),
    CASE("port-down", storage_far_away_down, OK, ""),
    CASE("port-down", one_nic_missing, FOUND, "GPU 3 (0000:11:00.0) has 1 NIC"),
    CASE("port-down", function_without_rdma, OK, ""),
    CASE("port-down", half_as_many_nics, OK, ""),
    CASE("port-down", flat, OK, ""),
    CASE("port-down", flat_bus_one_nic_missing, FOUND, "3 NICs for 4 GPUs"),
    CASE("port-down", so_slow_that_it_looks_like_management, OK, ""),

    CASE("link-layer", nothing, OK, ""),
    CASE("link-layer", infiniband, OK, ""),
    CASE("link-layer", one_port_ethernet, FOUND, "mlx5_3 is Ethernet"),

    CASE("rdma-device", nothing, OK, ""),
    CASE("rdma-device", function_without_rdma, FOUND, "has no RDMA device"),

    CASE("nic-access", nothing, OK, ""),
    CASE("nic-access", uverbs_denied, FOUND, "uverbs1 is not accessible"),
    CASE("nic-access", uverbs_absent, FOUND, "uverbs1 is not there"),
    CASE("nic-access", no_uverbs_in_a_container, ABSENT, "nothing needs"),
    CASE("nic-access", no_uverbs_and_sockets, ABSENT, "nothing needs"),
    CASE("nic-access", no_uverbs_for_nccl, FOUND, "uverbs0 is not there"),
    CASE("nic-access", no_uverbs_for_deepep, FOUND, "uverbs0 is not there"),
    CASE("nic-access", no_uverbs_for_nvshmem, FOUND, "uverbs0 is not there"),
    CASE("nic-access", uverbs_not_asked, UNKNOWN, "snapshot"),
    CASE("nic-access", no_uverbs, FOUND, "mlx5_2 has no uverbs"),
};

const struct doctor_case *doctor_cases_nic(size_t *ret_n)
{
    *ret_n = sizeof(rows) / sizeof(rows[0]);
    return rows;
}

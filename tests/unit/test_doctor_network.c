/* SPDX-License-Identifier: Apache-2.0 */
/* The network that epkit uses between nodes, on synthetic machines. */
#include "doctor_cases.h"
#include "unit.h"

#include "machine/doctor/network.h"

static void library(struct made *made, enum source_state state)
{
    made->software.verbs.ibverbs.state = state;
    made->software.verbs.ibverbs.path = "/usr/lib/libibverbs.so.1";
}

CHANGE(no_library, library(made, SOURCE_ABSENT))
CHANGE(damaged_library, library(made, SOURCE_FAILED))
CHANGE(library_not_asked, library(made, SOURCE_NOT_RECORDED))
CHANGE(no_device, no_nics(made))
CHANGE_OF(lists_unreadable, no_nics, made->hardware.topo.not_read = "/sys/class/infiniband: Permission denied")

static void access_to(struct made *made, enum topo_access access)
{
    for (int i = 0; i < 4; i++) {
        nic(made, i)->access = access;
        nic(made, i)->access_why = access == TOPO_ACCESS_NO ? "/dev/infiniband/uverbs0 is not here" : "";
    }
}

CHANGE(devices_not_here, access_to(made, TOPO_ACCESS_NO))
CHANGE(access_not_known, access_to(made, TOPO_ACCESS_UNKNOWN))

static void one_device_left(struct made *made)
{
    access_to(made, TOPO_ACCESS_NO);
    nic(made, 2)->access = TOPO_ACCESS_YES;
}

static void ports_down(struct made *made)
{
    for (int i = 0; i < 4; i++) {
        nic(made, i)->ports[0].active = false;
        nic(made, i)->ports[0].state = TOPO_PORT_DOWN;
    }
}

CHANGE(ports_unreadable, all_states_unreadable(made))

static void no_addresses(struct made *made)
{
    for (int i = 0; i < 4; i++)
        nic(made, i)->ports[0].n_gids = 1; /* RoCE v1 */
}

static void addresses_denied(struct made *made)
{
    for (int i = 0; i < 4; i++)
        nic(made, i)->ports[0].gids_state = SOURCE_DENIED;
}

static void infiniband(struct made *made)
{
    for (int i = 0; i < 4; i++) {
        nic(made, i)->ports[0].link_layer = TOPO_LINK_INFINIBAND;
        nic(made, i)->ports[0].n_gids = 0;
    }
}

static void efa(struct made *made)
{
    for (int i = 0; i < 4; i++)
        nic_pci(made, i)->vendor = 0x1d0f;
}

CHANGE(index_that_is_none, made_env(made, "EPKIT_VERBS_GID_INDEX=three"))
CHANGE(index_without_address, made_env(made, "EPKIT_VERBS_GID_INDEX=7"))
CHANGE(index_with_address, made_env(made, "EPKIT_VERBS_GID_INDEX=3"))
CHANGE(named_device, made_env(made, "EPKIT_VERBS_DEVICE=mlx5_3,mlx5_1:1"))
CHANGE(named_device_that_is_none, made_env(made, "EPKIT_VERBS_DEVICE=mlx5_7"))

static void named_device_that_is_down(struct made *made)
{
    nic(made, 1)->ports[0].active = false;
    nic(made, 1)->ports[0].state = TOPO_PORT_DOWN;
    named_device(made);
}

static void limits(struct made *made, const char *soft)
{
    char text[256];

    snprintf(text, sizeof(text),
             "Limit                     Soft Limit           Hard Limit           Units     \n"
             "Max locked memory         %-20s 67108864             bytes     \n",
             soft);
    made_file(made, "/proc/self/limits", text);
}

CHANGE(little_memory, limits(made, "8388608"))
CHANGE(enough_memory, limits(made, "67108864"))

static void little_memory_and_a_capability(struct made *made)
{
    little_memory(made);
    made_file(made, "/proc/self/status", "Name:\tx\nCapEff:\t0000000000004000\n");
}

CHANGE(memory_not_known, made_state(made, "files", "/proc/self/limits", "denied"))

/* Not usable takes precedence over not known. */
CHANGE_OF(little_memory_and_no_access_known, little_memory, access_not_known(made))

static void interfaces_down(struct made *made)
{
    made_folder(made, "/sys/class/net", json_pack("[s, s]", "eth0", "lo"));
    made_file(made, "/sys/class/net/eth0/operstate", "down\n");
}

CHANGE(only_loopback, made_folder(made, "/sys/class/net", json_pack("[s]", "lo")))
CHANGE(network_verbs, made_env(made, "EPKIT_NETWORK=verbs"))
CHANGE_OF(network_verbs_without_library, network_verbs, no_library(made))
CHANGE_OF(network_verbs_not_known, network_verbs, ports_unreadable(made))
CHANGE(network_of_another_name, made_env(made, "EPKIT_NETWORK=TCP"))
CHANGE(network_tcp, made_env(made, "EPKIT_NETWORK=tcp"))

static const struct {
    const char *name;
    void (*change)(struct made *made);
    bool has_tcp;
    enum network_usable verbs;
    int n_ports;
    const char *text; /* part of it */
    const char *used; /* NULL: "tcp" if has_tcp; "": none */
} cases[] = {
#define ROW_USED(change, tcp, verbs, n, text, used)                                                                    \
    {                                                                                                                  \
#change, change, tcp, verbs, n, text, used                                                                     \
    }
#define ROW(change, tcp, verbs, n, text) ROW_USED(change, tcp, verbs, n, text, NULL)
    ROW(nothing, true, NETWORK_USABLE, 4,
        "can be used: --network verbs or EPKIT_NETWORK=verbs, over mlx5_0:1 and 3 more"),
    ROW(infiniband, true, NETWORK_USABLE, 4, "over mlx5_0:1 and 3 more"),
    ROW(one_device_left, true, NETWORK_USABLE, 1, "over mlx5_2:1"),
    ROW(index_with_address, true, NETWORK_USABLE, 4, "over mlx5_0:1"),
    ROW(named_device, true, NETWORK_USABLE, 2, "over mlx5_1:1 and 1 more"),
    ROW(enough_memory, true, NETWORK_USABLE, 4, ""),
    ROW(little_memory_and_a_capability, true, NETWORK_USABLE, 4, ""),
    ROW(no_library, true, NETWORK_NOT_USABLE, 0,
        "tcp (sockets); verbs (RDMA), which is faster, cannot be used: "
        "libibverbs.so.1 is not installed"),
    ROW(damaged_library, true, NETWORK_NOT_USABLE, 0, "/usr/lib/libibverbs.so.1 is damaged"),
    ROW(no_device, true, NETWORK_NOT_USABLE, 0, "there is no RDMA device"),
    ROW(devices_not_here, true, NETWORK_NOT_USABLE, 0, "mlx5_0:1: /dev/infiniband/uverbs0 is not here"),
    ROW(ports_down, true, NETWORK_NOT_USABLE, 0, "mlx5_0:1: the port is DOWN"),
    ROW(no_addresses, true, NETWORK_NOT_USABLE, 0, "mlx5_0:1: no RoCE v2 address"),
    ROW(efa, true, NETWORK_NOT_USABLE, 0, "mlx5_0:1: EFA has no reliable connections"),
    ROW(index_that_is_none, true, NETWORK_NOT_USABLE, 0, "EPKIT_VERBS_GID_INDEX is no number"),
    ROW(index_without_address, true, NETWORK_NOT_USABLE, 0, "no address at index 7"),
    ROW(named_device_that_is_none, true, NETWORK_NOT_USABLE, 0, "there is no device \"mlx5_7\""),
    ROW(named_device_that_is_down, true, NETWORK_NOT_USABLE, 0, "mlx5_1:1: the port is DOWN"),
    ROW(little_memory, true, NETWORK_NOT_USABLE, 0, "may lock 8192 KiB"),
    ROW(little_memory_and_no_access_known, true, NETWORK_NOT_USABLE, 0, "may lock 8192 KiB"),
    ROW(library_not_asked, true, NETWORK_NOT_KNOWN, 0,
        "not known whether verbs (RDMA), which is faster, can be used: "
        "libibverbs.so.1: the snapshot does not say"),
    ROW(lists_unreadable, true, NETWORK_NOT_KNOWN, 0, "/sys/class/infiniband: Permission denied"),
    ROW(access_not_known, true, NETWORK_NOT_KNOWN, 0, "mlx5_0:1: whether /dev/infiniband/uverbs0 may be opened"),
    ROW(ports_unreadable, true, NETWORK_NOT_KNOWN, 0, "mlx5_0:1: the state of the port"),
    ROW(addresses_denied, true, NETWORK_NOT_KNOWN, 0, "mlx5_0:1: its addresses: Permission denied"),
    ROW(memory_not_known, true, NETWORK_NOT_KNOWN, 0, "how much memory the process may lock"),
    ROW(interfaces_down, false, NETWORK_USABLE, 4, "none: of tcp, no interface besides the loopback is up"),
    ROW_USED(network_verbs, true, NETWORK_USABLE, 4, "verbs (RDMA), by EPKIT_NETWORK, over mlx5_0:1 and 3 more",
             "verbs"),
    ROW_USED(network_verbs_without_library, true, NETWORK_NOT_USABLE, 0,
             "none: EPKIT_NETWORK is verbs (RDMA), which cannot be used: libibverbs.so.1 is not installed", ""),
    ROW_USED(network_verbs_not_known, true, NETWORK_NOT_KNOWN, 0,
             "verbs (RDMA), by EPKIT_NETWORK; not known whether it can be used: mlx5_0:1: the state of the port",
             "verbs"),
    ROW(network_tcp, true, NETWORK_USABLE, 4, "tcp (sockets), by EPKIT_NETWORK; verbs (RDMA), which is faster"),
    ROW_USED(network_of_another_name, true, NETWORK_USABLE, 4, "none: EPKIT_NETWORK is \"TCP\", which is no network",
             ""),
    ROW(only_loopback, false, NETWORK_USABLE, 4, "there is no interface besides the loopback"),
#undef ROW
#undef ROW_USED
};

TEST(test_each_machine_has_its_network)
{
    static struct made made;
    static struct network network;
    const char *used;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        made_init(&made);
        made.hardware.topo.not_read = "";
        library(&made, SOURCE_OK);
        access_to(&made, TOPO_ACCESS_YES);
        cases[i].change(&made);
        made_open(&made);
        used = cases[i].used ? cases[i].used : cases[i].has_tcp ? "tcp" : "";
        network_read(&made.doctor, &network);
        if (network.verbs != cases[i].verbs || network.n_ports != cases[i].n_ports ||
            !strstr(network.text, cases[i].text))
            fail_msg("%s: verbs %d, %d ports: %s", cases[i].name, (int)network.verbs, network.n_ports, network.text);
        assert_string_equal(network.used ? network.used : "", used);
        assert_true(!*network.why == (network.verbs == NETWORK_USABLE));
        made_done(&made);
    }
}

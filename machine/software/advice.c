/* SPDX-License-Identifier: Apache-2.0 */
/*
 * advice.c - recommended values of the variables of NVSHMEM, DeepEP and NCCL.
 *
 * Variables that DeepEP sets itself before it starts NVSHMEM are not advised (deep_ep/buffer.py: NVSHMEM_DISABLE_P2P,
 * NVSHMEM_QP_DEPTH, NVSHMEM_IBGDA_NUM_RC_PER_PE, NVSHMEM_MAX_TEAMS, NVSHMEM_CUMEM_GRANULARITY, ...).
 */
#include "read_software.h"

#include "common/env_variables.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

struct advice_row *advice_add(struct advice_work *work, const char *name, const char *reason)
{
    struct advice *advice = work->advice;
    struct advice_row *row = &advice->rows[advice->n < ADVICE_MAX ? advice->n++ : ADVICE_MAX - 1];

    *row = (struct advice_row){.name = name, .scope = ADVICE_NODE, .value = "", .reason = reason};
    return row;
}

static void advice_set(struct advice_work *work, const char *name, const char *value, const char *reason)
{
    advice_add(work, name, reason)->value = value;
}

static void advice_unset(struct advice_work *work, const char *name, const char *reason)
{
    advice_add(work, name, reason)->unset = true;
}

const struct advice_row *advice_find(const struct advice *advice, const char *name)
{
    int i = FIRST_OF(k, advice->n, strcmp(advice->rows[k].name, name) == 0);

    return i < 0 ? NULL : &advice->rows[i];
}

/* --- NICs --- */

bool advice_is_mlx5(const struct topo *topo, int nic)
{
    const struct topo_nic *it = &topo->nics[nic];

    return it->role == TOPO_ROLE_DATA && it->pci >= 0 && topo->pci[it->pci].vendor == PCI_VENDOR_MELLANOX;
}

bool advice_has_mlx5(const struct topo *topo)
{
    return ANY_OF(i, topo->n_nics, advice_is_mlx5(topo, i));
}

bool advice_is_single_nic(const char *list)
{
    return list && *list && *list != '^' && !strchr(list, ',');
}

bool advice_prefix_matches(const char *prefix, const char *name)
{
    bool is_exclusion = prefix[0] == '^';

    return (strstr(name, prefix + is_exclusion) != NULL) != is_exclusion;
}

static bool map_is_whole(const struct map *map)
{
    return map->n > 0 && !ANY_OF(i, map->n, map->choices[i].nic < 0);
}

/* --- NVSHMEM --- */

static void advise_hca_list(struct advice_work *work)
{
    const struct map *map = work->ibgda;
    const char **values = source_alloc(work->source, (size_t)map->n * sizeof(*values));
    struct advice_row *row;

    for (int gpu = 0; gpu < map->n; gpu++)
        values[gpu] = map_hca_list(work->topo, map, gpu);
    row = advice_add(work, "NVSHMEM_HCA_LIST",
                     map->n_shared ? "There are fewer ports than GPUs: this spreads the ranks evenly over them, "
                                     "each near its GPU."
                                   : "With a single candidate NVSHMEM has nothing to choose: each rank has the "
                                     "NIC nearest to its GPU for itself.");
    row->scope = ADVICE_RANK;
    row->n_values = map->n;
    row->values = values;
}

/* The common prefix of the names of all NICs that IBGDA supports, at least two letters; "" if there is none. */
static const char *common_prefix(struct advice_work *work)
{
    const struct topo *topo = work->topo;
    const char *first = NULL;
    size_t n = 0;

    for (int i = 0; i < topo->n_nics; i++) {
        const char *name = topo->nics[i].name;
        size_t same = 0;

        if (!advice_is_mlx5(topo, i))
            continue;
        if (!first) {
            first = name;
            n = strlen(name);
        }
        while (same < n && name[same] == first[same])
            same++;
        n = same;
    }
    while (n > 0 && !isalpha((unsigned char)first[n - 1]))
        n--;
    return n >= 2 ? source_printf(work->source, "%.*s", (int)n, first) : "";
}

static void advise_hca_prefix(struct advice_work *work)
{
    const struct topo *topo = work->topo;
    const char *prefix, *unmatched = NULL;
    char name[64];

    for (int i = 0; i < topo->n_nics && !unmatched; i++)
        if (advice_is_mlx5(topo, i) && !strstr(topo->nics[i].name, "mlx5"))
            unmatched = topo->nics[i].name;
    prefix = unmatched ? common_prefix(work) : "";
    if (!*prefix)
        return;
    text_clean(unmatched, name, sizeof(name));
    advice_set(
        work, "NVSHMEM_HCA_PREFIX", prefix,
        source_printf(work->source, "NVSHMEM looks for names with mlx5 in them, and NICs here have others: %s.", name));
}

static bool is_right_gid(const struct topo_gid *gid)
{
    return gid->type == TOPO_GID_ROCE2 && gid->kind == TOPO_GID_IPV4;
}

static bool port_has_right_gid(const struct topo_port *port, int index)
{
    for (int i = 0; i < port->n_gids; i++)
        if (port->gids[i].index == index)
            return is_right_gid(&port->gids[i]);
    return false;
}

/* NVSHMEM selects the RoCE v2 GID with an IPv4 address by itself; an index is needed only if a port has several. */
static void advise_gid_index(struct advice_work *work)
{
    const struct topo_port *ports[TOPO_MAX_DATA_PORTS], *ambiguous = NULL;
    int n_ports = topo_data_ports(work->topo, ports), index = -1;

    for (int i = 0; i < n_ports && !ambiguous; i++) {
        int n = 0;

        for (int g = 0; g < ports[i]->n_gids && ports[i]->link_layer == TOPO_LINK_ETHERNET; g++)
            n += is_right_gid(&ports[i]->gids[g]);
        if (n > 1)
            ambiguous = ports[i];
    }
    for (int g = 0; ambiguous && g < ambiguous->n_gids && index < 0; g++) {
        bool is_everywhere = is_right_gid(&ambiguous->gids[g]);

        for (int i = 0; i < n_ports; i++)
            if (ports[i]->link_layer == TOPO_LINK_ETHERNET)
                is_everywhere = is_everywhere && port_has_right_gid(ports[i], ambiguous->gids[g].index);
        index = is_everywhere ? ambiguous->gids[g].index : -1;
    }
    if (index >= 0)
        advice_set(
            work, "NVSHMEM_IB_GID_INDEX", source_printf(work->source, "%d", index),
            "Ports have several RoCE v2 GIDs with IPv4 addresses; this is the first one that all ports have. Check "
            "that it is in the network that connects the nodes.");
}

/* Do all RoCE data ports have GIDs with IPv6 addresses, and none with an IPv4 address? */
static bool is_ipv6_only(const struct topo *topo)
{
    const struct topo_port *ports[TOPO_MAX_DATA_PORTS];
    int n_ports = topo_data_ports(topo, ports), n = 0;

    for (int i = 0; i < n_ports; i++) {
        bool ipv6 = false;

        if (ports[i]->link_layer != TOPO_LINK_ETHERNET)
            continue;
        for (int g = 0; g < ports[i]->n_gids; g++) {
            const struct topo_gid *gid = &ports[i]->gids[g];

            if (gid->kind == TOPO_GID_IPV4)
                return false;
            ipv6 = ipv6 || (gid->type == TOPO_GID_ROCE2 && gid->kind == TOPO_GID_OTHER);
        }
        if (!ipv6)
            return false;
        n++;
    }
    return n > 0;
}

static void advise_family(struct advice_work *work, const char *name)
{
    if (is_ipv6_only(work->topo))
        advice_set(work, name, "AF_INET6",
                   "Ports have only IPv6 addresses; the default is to look for an IPv4 address.");
}

/* IBGDA, and the NIC of each process. NVIDIA's NICs only: others (EFA, bnxt) use other transports. */
static void advise_ibgda(struct advice_work *work)
{
    const struct software_nvshmem *nvshmem = &work->software->nvshmem;
    const struct software_driver *driver = &work->software->driver;
    char path[256];

    if (!advice_has_mlx5(work->topo))
        return;
    if (topo_is_confidential(work->topo)) {
        advice_unset(work, "NVSHMEM_IB_ENABLE_IBGDA",
                     "Confidential computing blocks NICs from GPU memory, and GPUs from the NICs' doorbells.");
        return;
    }
    if (*nvshmem->transport_ibgda) {
        text_clean(nvshmem->transport_ibgda, path, sizeof(path));
        advice_set(work, "NVSHMEM_IB_ENABLE_IBGDA", "1",
                   source_printf(work->source, "The switch for IBGDA; its transport is %s.", path));
        /* Without the driver's option, a newer NVSHMEM that may choose works, and one that is told "gpu" does not. */
        if (!software_has_cpu_assisted_ibgda(nvshmem) || strtoll(driver->peer_mapping_override.live, NULL, 0) != 0 ||
            *driver->peer_mapping_override.configured)
            advice_set(
                work, "NVSHMEM_IBGDA_NIC_HANDLER", "gpu",
                "GPUs ring the NICs' doorbells themselves; the CPU as handler needs GDRCopy, and dispatches have been seen "
                "to hang with it.");
    }
    if (map_is_whole(work->ibgda))
        advise_hca_list(work);
    if (topo_data_ports(work->topo, NULL) > 1)
        advice_unset(
            work, "NVSHMEM_ENABLE_NIC_PE_MAPPING",
            "It counts PEs per NVSHMEM job; DeepEP makes a job for each GPU of a node, so all of them would take the "
            "first NIC.");
    advise_hca_prefix(work);
}

/* Has the environment switched off the heap that grows, and not said how large it is? */
static bool has_fixed_heap(struct source *source)
{
    const char *off = source_env(source, "NVSHMEM_DISABLE_CUDA_VMM");

    return off && !text_is_any(off, TEXTS("", "0", "false", "no", "n", "f")) &&
           !source_env(source, "NVSHMEM_SYMMETRIC_SIZE");
}

static void advise_nvshmem(struct advice_work *work)
{
    const struct software_driver *driver = &work->software->driver;
    const struct software_nvshmem *nvshmem = &work->software->nvshmem;

    if (nvshmem->host.state != SOURCE_OK && !*nvshmem->home && !*nvshmem->bundled)
        return;
    advise_ibgda(work);
    advise_gid_index(work);
    advise_family(work, "NVSHMEM_IB_ADDR_FAMILY");
    if (driver->dmabuf == SOURCE_ABSENT && driver->peermem == SOURCE_OK) {
        advice_set(
            work, "NVSHMEM_DISABLE_CUDA_VMM", "1",
            "GPU memory is registered through nvidia_peermem here, not by dma-buf: with a heap from cudaMalloc that "
            "is one registration, not one for each piece that a growing heap adds.");
    }
    if (advice_find(work->advice, "NVSHMEM_DISABLE_CUDA_VMM") || has_fixed_heap(work->source))
        advice_set(
            work, "NVSHMEM_SYMMETRIC_SIZE", "4G",
            "The heap cannot grow without CUDA's virtual memory, and the default of 1 GiB is less than the 1.9 GB that "
            "DeepEP's low-latency test takes.");
}

/* For the copy that Python imports once PYTHONPATH is as advised. */
static void advise_deepep(struct advice_work *work)
{
    const struct software_deepep *deepep = &work->software->deepep;
    int copy = advice_deepep_copy(deepep);
    char folder[256];

    if (copy < 0 || !software_maps_devices(&deepep->copies[copy]) || !map_is_whole(work->ibgda) ||
        !advice_has_mlx5(work->topo))
        return;
    text_clean(deepep->copies[copy].folder, folder, sizeof(folder));
    advice_set(
        work, "DEEP_EP_DEVICE_TO_HCA_MAPPING", map_deepep(work->topo, work->ibgda),
        source_printf(
            work->source,
            "DeepEP in %s converts it to NVSHMEM_HCA_LIST for each of its processes, also if a program starts its "
            "ranks itself.",
            folder));
}

/* --- NCCL --- */

/* The values that Google's set_nccl_env.sh for gIB sets and its shim expects. */
static const struct {
    const char *name, *value, *reason;
} gib_settings[] = {
    {"NCCL_NET", "gIB", "The network plugin of Google Cloud, which is installed here."},
    {"NCCL_CROSS_NIC", "0", "gIB expects it: the network is built in rails, one for each NIC."},
    {"NCCL_NET_GDR_LEVEL", "PIX", "gIB expects it: a GPU uses the NICs on its own PCIe switch."},
    {"NCCL_P2P_NET_CHUNKSIZE", "131072", "gIB expects it: bytes of a message of send and receive."},
    {"NCCL_NVLS_CHUNKSIZE", "524288", "gIB expects it: bytes of a piece of a reduction in the NVLink switch."},
    {"NCCL_IB_ADAPTIVE_ROUTING", "1", "gIB expects it: packets may take several paths; off by default on RoCE."},
    {"NCCL_IB_QPS_PER_CONNECTION", "4", "gIB expects it: several queue pairs take several paths."},
    {"NCCL_IB_TC", "52", "gIB expects it: the traffic class of data."},
    {"NCCL_IB_FIFO_TC", "84", "gIB expects it: the traffic class of control messages."},
};

static const char *gib_reason(struct advice_work *work, const char *name)
{
    for (size_t i = 0; i < COUNT(gib_settings); i++)
        if (strcmp(gib_settings[i].name, name) == 0)
            return gib_settings[i].reason;
    return source_printf(work->source, "%s sets it.", work->software->nccl.script);
}

/* Values from the installed script; if it sets none, the known ones. */
static void advise_gib_settings(struct advice_work *work)
{
    const struct software_nccl *nccl = &work->software->nccl;
    const char *gpu = work->topo->n_gpus ? work->topo->gpus[0].name : "";
    /* The known ones are those of A3 Ultra and A4. Without a switch between GPUs and NICs, as in A4X, they do harm. */
    size_t n_known = strstr(gpu, "GB200") || strstr(gpu, "GB300") ? 1 : COUNT(gib_settings);

    FOR_EACH (setting, nccl->settings, nccl->n_settings) {
        if (strcmp(setting->name, "NCCL_TUNER_CONFIG_PATH") == 0 ||
            strcmp(setting->name, "TORCH_NCCL_USE_COMM_NONBLOCKING") == 0)
            continue;
        if (setting->value)
            advice_set(work, setting->name, setting->value, gib_reason(work, setting->name));
        else
            advice_unset(work, setting->name, source_printf(work->source, "%s unsets it.", nccl->script));
    }
    /* The other settings have no effect without the name of the network. */
    for (size_t i = 0; i < (*nccl->script ? 1 : n_known); i++)
        if (!advice_find(work->advice, gib_settings[i].name))
            advice_set(work, gib_settings[i].name, gib_settings[i].value, gib_settings[i].reason);
}

static void advise_gib(struct advice_work *work)
{
    const char *config = work->software->nccl.tuner_config;
    char shown[1024];

    advise_gib_settings(work);
    text_clean(config, shown, sizeof(shown));
    if (*config && strcmp(config, shown) == 0)
        advice_set(work, "NCCL_TUNER_CONFIG_PATH", config, "What gIB's tuner knows about this type of machine.");
    advice_unset(work, "TORCH_NCCL_USE_COMM_NONBLOCKING",
                 "gIB's shim requires it to be unset and stops with a mismatch otherwise, whatever the value.");
}

/* Is there an active NIC that NCCL should not use? */
static bool has_others(const struct topo *topo)
{
    return ANY_OF(
        i, topo->n_nics,
        ANY_OF(p, topo->nics[i].n_ports, topo->nics[i].ports[p].active && topo->nics[i].role != TOPO_ROLE_DATA));
}

static void advise_nccl(struct advice_work *work)
{
    if (*work->software->nccl.gib) {
        advise_gib(work);
        return;
    }
    advise_family(work, "NCCL_IB_ADDR_FAMILY");
    if (has_others(work->topo))
        advice_set(work, "NCCL_IB_HCA", map_nccl(work->topo),
                   "NCCL would use all NICs, also those for management and storage, which are not in this list.");
}

/* --- the network verbs --- */

static void advise_verbs(struct advice_work *work)
{
    if (work->topo->n_gpus > 1 && *map_verbs(work->topo, work->map))
        advice_set(
            work, "EPKIT_VERBS_DEVICE", map_verbs(work->topo, work->map),
            "Programs with libepkit over the network verbs: each rank uses the entry of its local rank, the port of "
            "its GPU. The commands of epkit do so by default.");
}

/* --- what is set and should not be --- */

/* Why a value that is a path has no effect here; NULL if it has one, or is not a path. */
static const char *useless_path(const struct advice_work *work, const struct variable *known,
                                const struct source_variable *variable)
{
    bool is_provider = text_is_any(variable->name, TEXTS("RDMAV_DRIVERS", "IBV_DRIVERS"));
    const char *value = variable->value;
    int number = work->software->verbs.private_version;
    char path[256];

    if (value[0] != '/')
        return NULL;
    text_clean(value, path, sizeof(path));
    if (known->values && strcmp(known->values, "path") == 0 &&
        source_stat(work->source, "%s", value).state == SOURCE_ABSENT)
        return source_printf(work->source, "It names a path that does not exist: %s.", path);
    if (is_provider && number > 0 && !strchr(value, ':') &&
        source_stat(work->source, "%s-rdmav%d.so", value, number).state == SOURCE_ABSENT)
        return source_printf(work->source, "It has no effect: libibverbs looks for %s-rdmav%d.so, which is not there.",
                             path, number);
    return NULL;
}

static void advise_against(struct advice_work *work, const struct source_variable *variable)
{
    const struct variable *known = variable_find(variable->name);
    char why[256], value[128];
    const char *useless;

    if (!known || advice_find(work->advice, variable->name))
        return;
    useless = useless_path(work, known, variable);
    text_clean(variable->value, value, sizeof(value));
    if (known->effect == VARIABLE_VOID)
        advice_unset(work, variable->name, source_printf(work->source, "It does nothing: %s.", known->text));
    else if (known->effect == VARIABLE_BUILD_ONLY && strcmp(known->values, "path") != 0)
        advice_unset(work, variable->name,
                     source_printf(work->source, "It does nothing in a running program: %s.", known->text));
    else if (variable_has_known_prefix(variable->name) && !variable_accepts(known, variable->value, why, sizeof(why)))
        advice_unset(work, variable->name, source_printf(work->source, "Its value here, '%s', %s.", value, why));
    else if (useless)
        advice_unset(work, variable->name, useless);
}

struct advice *advice_make(const struct topo *topo, const struct software *software, const struct map *map,
                           const struct map *ibgda)
{
    struct advice *advice = source_alloc(software->source, sizeof(*advice));
    struct advice_work work = {software->source, topo, software, map, ibgda, advice};
    struct source_environment environment = source_environment(software->source);

    if (topo->n_gpus == 0 && topo->n_nics == 0)
        return advice;
    if (topo->n_gpus > 0 && topo_data_ports(topo, NULL) > 0) {
        advise_nvshmem(&work);
        advise_deepep(&work);
        advise_nccl(&work);
        advise_verbs(&work);
    }
    advice_paths(&work);
    for (size_t i = 0; i < environment.n && advice->n < ADVICE_MAX; i++)
        advise_against(&work, &environment.variables[i]);
    return advice;
}

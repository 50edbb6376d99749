/* SPDX-License-Identifier: Apache-2.0 */
#include "net/verbs_net.h"

#include "base/array.h"
#include "base/log.h"
#include "net/verbs_near.h"

#include <dlfcn.h>
#include <errno.h>
#include <net/if.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PORTS_MAX 64
#define GIDS_MAX 512

#define LIBRARY "libibverbs.so.1"

#define ENV_DEVICE "EPKIT_VERBS_DEVICE"
#define ENV_GID_INDEX "EPKIT_VERBS_GID_INDEX"
#define ENV_TRAFFIC_CLASS "EPKIT_VERBS_TRAFFIC_CLASS"
#define ENV_SERVICE_LEVEL "EPKIT_VERBS_SERVICE_LEVEL"
#define ENV_GPU_MEMORY "EPKIT_VERBS_GPU_MEMORY"

/* A port; `why` is "" if it is usable. */
struct port {
    struct ibv_device *device;
    const char *device_name;
    uint8_t number;
    int nearness; /* to the rank's GPU; -1: no GPU was named */
    char why[160];
};

struct search {
    const struct verbs_library *library;
    const char *gpu;
    int gid_index; /* -1: the best by rate_gid() */
    struct port ports[PORTS_MAX];
    int n;
};

/* --- library --- */

/* Set once. No lock: a process may fork while another thread is here. */
static struct verbs_library *_Atomic loaded;

static ep_status load(struct verbs_library *into)
{
    const struct {
        const char *name;
        void *pointer; /* to the function pointer */
    } symbols[] = {{"ibv_query_port", &into->query_port},
                   {"_ibv_query_gid_table", &into->query_gid_table},
#define VERBS_SYMBOL(name) {"ibv_" #name, &into->name},
                   VERBS_FUNCTIONS(VERBS_SYMBOL)
#undef VERBS_SYMBOL
    };
    void *module = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL), *symbol;

    if (!module) {
        const char *why = dlerror();

        return ep_fail(EP_E_UNSUPPORTED, "network verbs: %s; it comes with rdma-core (libibverbs1)",
                       why ? why : LIBRARY);
    }
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        symbol = dlsym(module, symbols[i].name);
        if (!symbol) {
            dlclose(module);
            return ep_fail(EP_E_UNSUPPORTED, "network verbs: " LIBRARY " has no %s: rdma-core 32 or later is needed",
                           symbols[i].name);
        }
        memcpy(symbols[i].pointer, &symbol, sizeof(symbol));
    }
    symbol = dlsym(module, "ibv_reg_dmabuf_mr");
    memcpy(&into->reg_dmabuf_mr, &symbol, sizeof(symbol));
    /* Keeps registered pages intact in the parent after fork(); kernels before 5.12 need it. */
    into->fork_init();
    return EP_OK;
}

/* It stays loaded until the process ends. EP_E_UNSUPPORTED with the reason. */
static ep_status load_library(const struct verbs_library **ret_library)
{
    struct verbs_library *library = atomic_load(&loaded), *before = NULL;
    ep_status status;

    if (!library) {
        library = malloc(sizeof(*library));
        status = library ? load(library) : ep_fail(EP_E_MEMORY, "network verbs: no memory");
        if (status != EP_OK) {
            free(library);
            return status;
        }
        if (!atomic_compare_exchange_strong(&loaded, &before, library)) {
            free(library);
            library = before;
        }
    }
    *ret_library = library;
    return EP_OK;
}

/* --- options --- */

static ep_status read_number(const char *name, int low, int high, int otherwise, int *ret_value)
{
    const char *text = getenv(name);
    char *end;
    long value;

    *ret_value = otherwise;
    if (!text || !*text)
        return EP_OK;
    errno = 0;
    value = strtol(text, &end, 10);
    if (errno || end == text || *end || value < low || value > high)
        return ep_fail(EP_E_ARG, "network verbs: %s is \"%.40s\", not a number of %d..%d", name, text, low, high);
    *ret_value = (int)value;
    return EP_OK;
}

bool verbs_uses_gpu_memory(void)
{
    const char *value = getenv(ENV_GPU_MEMORY);

    return !value || strcmp(value, "0") != 0;
}

/* --- addresses --- */

/* Lower is better; -1: none. */
static int rate_gid(const struct ibv_gid_entry *entry)
{
    const uint8_t *raw = entry->gid.raw;
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
    char interface[IF_NAMESIZE];

    if (entry->gid_type != IBV_GID_TYPE_ROCE_V2)
        return -1;
    /* An interface of another network namespace: visible in a pod without the host's network, but not usable. */
    if (entry->ndev_ifindex && !if_indextoname(entry->ndev_ifindex, interface))
        return -1;
    if (memcmp(raw, mapped, sizeof(mapped)) == 0)
        return raw[12] == 169 && raw[13] == 254 ? 2 : 0;
    return raw[0] == 0xfe && (raw[1] & 0xc0) == 0x80 ? 2 : 1;
}

/* For a RoCE port. false: it has no usable GID, for the reason in port->why. */
static bool find_gid(const struct search *search, struct port *port, struct ibv_context *context,
                     struct verbs_device *device)
{
    struct ibv_gid_entry *entries = calloc(GIDS_MAX, sizeof(*entries));
    ssize_t n = entries ? search->library->query_gid_table(context, entries, GIDS_MAX, 0, sizeof(*entries)) : -1;
    int best = -1;

    for (ssize_t i = 0; i < n; i++) {
        int rating = rate_gid(&entries[i]);

        if (entries[i].port_num != port->number || entries[i].gid_index > UINT8_MAX)
            continue;
        if (search->gid_index >= 0)
            rating = (int)entries[i].gid_index == search->gid_index ? 0 : -1;
        if (rating < 0 || (best >= 0 && rating >= best))
            continue;
        best = rating;
        device->gid = entries[i].gid;
        device->gid_index = (uint8_t)entries[i].gid_index;
    }
    free(entries);
    if (best >= 0)
        return true;
    if (n < 0) {
        snprintf(port->why, sizeof(port->why), "its GID table cannot be read: %s", strerror((int)-n));
        return false;
    }
    if (search->gid_index >= 0)
        snprintf(port->why, sizeof(port->why), "no GID at index %d (" ENV_GID_INDEX ")", search->gid_index);
    else
        snprintf(port->why, sizeof(port->why),
                 "no RoCE v2 GID of an interface in this network namespace: give its interface an IP address");
    return false;
}

/* --- ports --- */

static bool read_port(const struct search *search, struct port *port, struct ibv_context *context,
                      struct verbs_device *device)
{
    struct ibv_port_attr attributes;
    int error;

    memset(&attributes, 0, sizeof(attributes));
    error = search->library->query_port(context, port->number, &attributes);
    if (error) {
        snprintf(port->why, sizeof(port->why), "ibv_query_port: %s", strerror(error));
        return false;
    }
    if (attributes.state != IBV_PORT_ACTIVE) {
        snprintf(port->why, sizeof(port->why), "the port is %s",
                 attributes.state == IBV_PORT_INIT ? "in INIT: no subnet manager has set it up" : "not active");
        return false;
    }
    device->port = port->number;
    device->mtu = attributes.active_mtu;
    device->max_message = attributes.max_msg_sz;
    device->lid = attributes.lid;
    device->is_ethernet = attributes.link_layer == IBV_LINK_LAYER_ETHERNET;
    snprintf(device->name, sizeof(device->name), "%.64s:%u", port->device_name, (unsigned)port->number);
    return !device->is_ethernet || find_gid(search, port, context, device);
}

/* All ports of all devices. If a device cannot be opened, `why` of its port has the reason. */
static void list_ports(struct search *search, struct ibv_device **devices)
{
    for (int i = 0; devices[i]; i++) {
        struct ibv_context *context = search->library->open_device(devices[i]);
        const char *name = search->library->get_device_name(devices[i]);
        int nearness = search->gpu ? verbs_nearness("/sys", name, search->gpu) : -1;
        struct ibv_device_attr limits = {.phys_port_cnt = 1};
        int error = errno;

        if (context)
            search->library->query_device(context, &limits);
        for (uint8_t number = 1; number <= limits.phys_port_cnt && search->n < PORTS_MAX; number++) {
            struct port *port = &search->ports[search->n++];
            struct verbs_device unused;

            *port = (struct port){.device = devices[i], .device_name = name, .number = number, .nearness = nearness};
            if (context)
                read_port(search, port, context, &unused);
            else
                snprintf(port->why, sizeof(port->why), "the device cannot be opened: %s", strerror(error));
        }
        if (context)
            search->library->close_device(context);
    }
}

static int compare_ports(const void *a, const void *b)
{
    const struct port *first = a, *second = b;
    int order = strverscmp(first->device_name, second->device_name);

    return order ? order : first->number - second->number;
}

static ep_status none_usable(const struct search *search)
{
    char seen[512] = "";
    size_t length = 0;

    for (int i = 0; i < search->n && length < sizeof(seen); i++)
        length +=
            (size_t)snprintf(seen + length, sizeof(seen) - length, "%s%s:%u: %s", i ? "; " : "",
                             search->ports[i].device_name, (unsigned)search->ports[i].number, search->ports[i].why);
    return ep_fail(EP_E_UNSUPPORTED, "network verbs: no port of an RDMA device can be used here: %s",
                   search->n ? seen : "there is no RDMA device");
}

/* The port named by `text`: "NAME" or "NAME:PORT". */
static ep_status find_named(struct search *search, const char *text, size_t length, struct port **ret_port)
{
    for (int i = 0; i < search->n; i++) {
        char full[VERBS_NAME_BYTES];
        struct port *port = &search->ports[i];

        snprintf(full, sizeof(full), "%.64s:%u", port->device_name, (unsigned)port->number);
        if ((strlen(full) != length || strncmp(full, text, length) != 0) &&
            (strlen(port->device_name) != length || strncmp(port->device_name, text, length) != 0))
            continue;
        if (port->why[0])
            return ep_fail(EP_E_UNSUPPORTED, "network verbs: %s, which " ENV_DEVICE " names: %s", full, port->why);
        *ret_port = port;
        return EP_OK;
    }
    return ep_fail(EP_E_ARG, "network verbs: there is no device \"%.*s\", which " ENV_DEVICE " names; there are%s%s",
                   length < 64 ? (int)length : 64, text, search->n ? " others, the first is " : " none",
                   search->n ? search->ports[0].device_name : "");
}

/* The entry of the list for this rank: entries are assigned round-robin. */
static ep_status choose_listed(struct search *search, const char *list, int local_rank, struct port **ret_port)
{
    int n = 1, at;
    const char *entry = list;

    for (const char *c = list; *c; c++)
        n += *c == ',';
    for (at = local_rank % n; at > 0; at--)
        entry = strchr(entry, ',') + 1;
    return find_named(search, entry, strcspn(entry, ","), ret_port);
}

static ep_status choose(struct search *search, int local_rank, struct port **ret_port)
{
    const char *list = getenv(ENV_DEVICE);
    struct port unusable = {.nearness = -1}; /* the nearest one */
    const char *names[PORTS_MAX];
    int usable = 0, most = -1, index = -1;

    if (list && *list)
        return choose_listed(search, list, local_rank, ret_port);
    FOR_EACH (port, search->ports, search->n) {
        if (port->why[0] && port->nearness > unusable.nearness)
            unusable = *port;
        if (port->why[0] || port->nearness < most)
            continue;
        usable = port->nearness > most ? 0 : usable;
        most = port->nearness;
        search->ports[usable++] = *port;
    }
    if (!usable)
        return none_usable(search);
    if (unusable.nearness > most)
        ep_log(EP_LOG_WARNING, "network verbs: %s:%u is nearest to GPU %s, but cannot be used: %s",
               unusable.device_name, (unsigned)unusable.number, search->gpu, unusable.why);
    for (int i = 0; i < usable; i++)
        names[i] = search->ports[i].device_name;
    if (search->gpu)
        index = verbs_gpu_index("/sys", names, usable, search->gpu);
    *ret_port = &search->ports[(index < 0 ? local_rank : index) % usable];
    return EP_OK;
}

/* --- opening --- */

static ep_status open_port(const struct search *search, struct port *port, struct verbs_device *device)
{
    device->context = search->library->open_device(port->device);
    if (!device->context)
        return ep_fail_errno(EP_E_SYSTEM, errno, "network verbs: opening %s", port->device_name);
    if (!read_port(search, port, device->context, device) ||
        search->library->query_device(device->context, &device->limits) != 0) {
        verbs_device_close(device);
        return ep_fail(EP_E_SYSTEM, "network verbs: %s: %s", port->device_name,
                       port->why[0] ? port->why : "ibv_query_device failed");
    }
    return EP_OK;
}

ep_status verbs_device_open(int local_rank, const char *gpu, struct verbs_device *ret_device)
{
    struct search search = {.gpu = gpu};
    struct ibv_device **devices;
    struct port *port = NULL;
    ep_status status;

    memset(ret_device, 0, sizeof(*ret_device));
    EP_TRY(read_number(ENV_GID_INDEX, -1, 255, -1, &search.gid_index));
    EP_TRY(read_number(ENV_TRAFFIC_CLASS, 0, 255, 0, &ret_device->traffic_class));
    EP_TRY(read_number(ENV_SERVICE_LEVEL, 0, 15, 0, &ret_device->service_level));
    EP_TRY(read_number(ENV_GPU_MEMORY, 0, 1, -1, &ret_device->gpu_memory));
    EP_TRY(load_library(&search.library));
    ret_device->library = search.library;
    devices = search.library->get_device_list(NULL);
    if (!devices && errno == ENOSYS)
        return ep_fail(EP_E_UNSUPPORTED, "network verbs: the kernel has no RDMA support here (module ib_uverbs, "
                                         "/sys/class/infiniband_verbs)");
    if (!devices)
        return ep_fail_errno(EP_E_SYSTEM, errno, "network verbs: listing the RDMA devices");
    list_ports(&search, devices);
    qsort(search.ports, (size_t)search.n, sizeof(search.ports[0]), compare_ports);
    status = choose(&search, local_rank, &port);
    if (status == EP_OK && port) {
        ret_device->nearness = port->nearness;
        status = open_port(&search, port, ret_device);
    }
    search.library->free_device_list(devices);
    return status;
}

bool verbs_device_is_down(const struct verbs_device *device)
{
    struct ibv_port_attr port;

    memset(&port, 0, sizeof(port));
    return device->library->query_port(device->context, device->port, &port) == 0 && port.state != IBV_PORT_ACTIVE;
}

void verbs_device_close(struct verbs_device *device)
{
    if (device->context)
        device->library->close_device(device->context);
    device->context = NULL;
}

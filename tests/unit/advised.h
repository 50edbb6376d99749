/* SPDX-License-Identifier: Apache-2.0 */
/*
 * advised.h - a synthetic machine for advice: hardware and software structs, a folder as its source, an environment.
 * Two GPUs and two NICs on each of two switches.
 */
#ifndef EP_TESTS_ADVISED_H
#define EP_TESTS_ADVISED_H

#include "machine/software/advice.h"
#include "map_machine.h"
#include "temp.h"
#include "tree.h"

#define ADVISED_NVSHMEM "/opt/x/nvshmem"

/* What a case changes, if that is one statement. */
#define CHANGE(name, ...)                                                                                              \
    static void name(void)                                                                                             \
    {                                                                                                                  \
        __VA_ARGS__;                                                                                                   \
    }

/* One more than another change makes. */
#define CHANGE_OF(name, other, ...) CHANGE(name, other(); __VA_ARGS__)

struct advised {
    struct tree tree;
    struct machine hardware;
    struct topo_gid gids[2 * TOPO_MAX_NICS];
    struct software software;
    struct source *source;
    struct map *map, *ibgda;
    struct advice *advice;
    struct audit *audit;
    char environment[8192];
    size_t bytes;
};

static inline struct lib_location advised_nowhere(void)
{
    return (struct lib_location){.state = SOURCE_ABSENT, .path = "", .real = "", .found_by = ""};
}

static inline void advised_software(struct software *software)
{
    static const struct software_option option = {"", "", "", "", ""};
    struct lib_location nowhere = advised_nowhere();

    software->driver = (struct software_driver){.version = "",
                                                .module_version = "",
                                                .installed_version = "",
                                                .peer_mapping_override = option,
                                                .dwords_with_override = "",
                                                .peermem = SOURCE_OK,
                                                .dmabuf = SOURCE_OK,
                                                .dmabuf_why = "",
                                                .gdrdrv = SOURCE_ABSENT,
                                                .kernel = "",
                                                .doca = ""};
    software->verbs =
        (struct software_verbs){.ibverbs = nowhere, .mlx5 = nowhere, .provider = "", .provider_folders = ""};
    software->nvshmem =
        (struct software_nvshmem){.host = nowhere,
                                  .version = "3.5.19",
                                  .home = ADVISED_NVSHMEM,
                                  .transport_ibgda = ADVISED_NVSHMEM "/lib/nvshmem_transport_ibgda.so.3",
                                  .bundled = "",
                                  .bundled_version = "",
                                  .gdrapi = nowhere};
    software->nccl = (struct software_nccl){.lib = nowhere,
                                            .version = "",
                                            .bundled = "",
                                            .bundled_version = "",
                                            .gib = "",
                                            .plugin = nowhere,
                                            .plugin_name = "",
                                            .tuner_config = "",
                                            .script = ""};
    software->deepep.imported = -1;
    software->cuda_home = software->python_paths = software->torch = software->torch_version = "";
}

static inline void advised_init(struct advised *advised)
{
    static const char *const names[] = {"mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"};

    memset(advised, 0, sizeof(*advised));
    tree_init(&advised->tree);
    machine_init(&advised->hardware);
    for (int s = 0; s < 2; s++) {
        int at = machine_switch(&advised->hardware, s, s);

        machine_gpu(&advised->hardware, at, s, s);
        machine_gpu(&advised->hardware, at, s, s);
        for (int i = 2 * s; i < 2 * s + 2; i++) {
            struct topo_port *port = &machine_nic(&advised->hardware, names[i], 1, at, s, s)->ports[0];

            advised->gids[2 * i] = (struct topo_gid){1, TOPO_GID_ROCE2, TOPO_GID_LINK_LOCAL};
            advised->gids[2 * i + 1] = (struct topo_gid){3, TOPO_GID_ROCE2, TOPO_GID_IPV4};
            port->gids = &advised->gids[2 * i];
            port->n_gids = 2;
        }
    }
    for (int i = 0; i < advised->hardware.topo.n_gpus; i++) {
        static const char *const uuids[] = {
            "GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-000000000002",
            "GPU-00000000-0000-0000-0000-000000000003", "GPU-00000000-0000-0000-0000-000000000004"};

        advised->hardware.gpus[i].name = "NVIDIA B200";
        advised->hardware.gpus[i].uuid = uuids[i];
    }
    advised_software(&advised->software);
}

/* Adds a variable to the inspected environment: "NAME=value". */
static inline void advised_env(struct advised *advised, const char *setting)
{
    size_t n = strlen(setting) + 1;

    assert_true(advised->bytes + n < sizeof(advised->environment));
    memcpy(advised->environment + advised->bytes, setting, n);
    advised->bytes += n;
}

/* Creates advice and audit; call it after all changes. */
static inline void advised_make(struct advised *advised)
{
    tree_put_bytes(&advised->tree, "/proc/self/environ", advised->environment, advised->bytes);
    assert_int_equal(source_open(advised->tree.place, &advised->source), EP_OK);
    advised->hardware.topo.source = advised->software.source = advised->source;
    advised->map = map_best(&advised->hardware.topo);
    advised->ibgda = map_ibgda(&advised->hardware.topo);
    advised->advice = advice_make(&advised->hardware.topo, &advised->software, advised->map, advised->ibgda);
    advised->audit = audit_make(&advised->hardware.topo, &advised->software, advised->advice);
}

static inline void advised_done(struct advised *advised)
{
    map_free(advised->ibgda);
    map_free(advised->map);
    source_free(advised->source);
    tree_done(&advised->tree);
}

#endif

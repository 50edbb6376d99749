/* SPDX-License-Identifier: Apache-2.0 */
/*
 * made.h - a synthetic healthy machine that the cases of checks modify: four GPUs and four NICs in pairs on two
 * switches, with their software. What checks read themselves comes from a snapshot that a case can edit.
 */
#ifndef EP_TESTS_MADE_H
#define EP_TESTS_MADE_H

#include "machine/doctor/doctor.h"
#include "map_machine.h"
#include "temp.h"

#include <jansson.h>
#include <unistd.h>

struct made {
    struct machine hardware;
    struct software software;
    struct map map;
    struct advice advice;
    struct audit audit;
    struct topo_gid gids[TOPO_MAX_NICS][4];
    json_t *snapshot;
    char environment[4096];
    size_t environment_bytes;
    struct doctor_machine doctor;
};

/* A change of one statement: its name in the cases, and what it does to `made`. */
#define CHANGE(name, ...)                                                                                              \
    static void name(struct made *made)                                                                                \
    {                                                                                                                  \
        __VA_ARGS__;                                                                                                   \
    }

/* One more than another change makes. */
#define CHANGE_OF(name, other, ...) CHANGE(name, other(made); __VA_ARGS__)

static inline json_t *made_kind(struct made *made, const char *kind)
{
    json_t *entries = json_object_get(made->snapshot, kind);

    if (!entries) {
        entries = json_object();
        json_object_set_new(made->snapshot, kind, entries);
    }
    return entries;
}

static inline void made_file(struct made *made, const char *path, const char *text)
{
    json_object_set_new(made_kind(made, "files"), path, json_string(text));
}

static inline void made_bytes(struct made *made, const char *path, const void *bytes, size_t n)
{
    json_object_set_new(made_kind(made, "files"), path, json_stringn(bytes, n));
}

/* "absent", "denied", "failed" for a kind of question; NULL as state: not asked. */
static inline void made_state(struct made *made, const char *kind, const char *key, const char *state)
{
    if (state)
        json_object_set_new(made_kind(made, kind), key, json_pack("{s:s, s:s}", "state", state, "why", "made so"));
    else
        json_object_del(made_kind(made, kind), key);
}

static inline void made_lines(struct made *made, const char *path, const char *needle, const char *text)
{
    char key[512];

    snprintf(key, sizeof(key), "%s\t%s", path, needle);
    json_object_set_new(made_kind(made, "lines"), key, json_string(text));
}

static inline void made_folder(struct made *made, const char *path, json_t *names)
{
    json_object_set_new(made_kind(made, "folders"), path, names);
}

static inline void made_stat(struct made *made, const char *path, const char *kind, const char *access)
{
    json_object_set_new(made_kind(made, "stats"), path,
                        json_pack("{s:s, s:i, s:s}", "kind", kind, "bytes", 0, "access", access));
}

static inline void made_env(struct made *made, const char *setting)
{
    size_t n = strlen(setting) + 1;

    assert_true(made->environment_bytes + n < sizeof(made->environment));
    memcpy(made->environment + made->environment_bytes, setting, n);
    made->environment_bytes += n;
}

static inline void made_hardware(struct made *made)
{
    struct machine *hardware = &made->hardware;
    int numa;

    machine_init(hardware);
    for (int i = 0; i < 4; i++) {
        static int at;
        static const char *const names[] = {"mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"};
        struct topo_nic *nic;

        numa = i / 2;
        if (i % 2 == 0)
            at = machine_switch(hardware, numa, numa);
        machine_gpu(hardware, at, numa, numa);
        nic = machine_nic(hardware, names[i], 1, at, numa, numa);
        nic->hca = "MT4129";
        nic->firmware = "28.43.2026";
        nic->uverbs = i == 0 ? "/dev/infiniband/uverbs0" : "/dev/infiniband/uverbs1";
        made->gids[i][0] = (struct topo_gid){0, TOPO_GID_ROCE1, TOPO_GID_LINK_LOCAL};
        made->gids[i][1] = (struct topo_gid){1, TOPO_GID_ROCE2, TOPO_GID_LINK_LOCAL};
        made->gids[i][2] = (struct topo_gid){2, TOPO_GID_ROCE1, TOPO_GID_IPV4};
        made->gids[i][3] = (struct topo_gid){3, TOPO_GID_ROCE2, TOPO_GID_IPV4};
        nic->ports[0].gids = made->gids[i];
        nic->ports[0].n_gids = 4;
        made->map.choices[i] = (struct map_choice){.gpu = i, .nic = i, .port = 1};
    }
    for (int i = 0; i < hardware->topo.n_pci; i++) {
        struct topo_pci *pci = &hardware->pci[i];

        snprintf(pci->address, sizeof(pci->address), "0000:%02x:00.0", i);
        pci->vendor = 0x1000;
        pci->class_code = 0x060400;
        pci->link_gts = pci->link_gts_max = 32;
        pci->link_width = pci->link_width_max = 16;
        pci->local_cpus = pci->numa_node ? "4-7" : "0-3";
        pci->driver = "pcieport";
    }
    for (int i = 0; i < 4; i++) {
        struct topo_gpu *gpu = &hardware->gpus[i];
        static const char *const uuids[] = {
            "GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-000000000002",
            "GPU-00000000-0000-0000-0000-000000000003", "GPU-00000000-0000-0000-0000-000000000004"};

        gpu->name = "NVIDIA B200";
        gpu->uuid = uuids[i];
        gpu->answered = true;
        gpu->nvlinks = gpu->nvlinks_up = 18;
        gpu->fabric = TOPO_FABRIC_READY;
        hardware->pci[gpu->pci].vendor = 0x10de;
        hardware->pci[gpu->pci].device = 0x2901;
        hardware->pci[gpu->pci].class_code = 0x030200;
        hardware->pci[gpu->pci].driver = "nvidia";
        hardware->pci[hardware->nics[i].pci].vendor = 0x15b3;
        hardware->pci[hardware->nics[i].pci].device = 0x1021;
        hardware->pci[hardware->nics[i].pci].class_code = 0x020000;
        hardware->pci[hardware->nics[i].pci].driver = "mlx5_core";
    }
    hardware->topo.nvml = true;
    hardware->topo.nvml_why = "";
    hardware->topo.driver = "580.126.09";
}

static inline void made_software(struct made *made)
{
    struct software_driver *driver = &made->software.driver;

    driver->version = driver->module_version = driver->installed_version = "580.126.09";
    driver->peer_mapping_override = (struct software_option){"", "", "", "", ""};
    driver->dwords_with_override = "";
    driver->peermem = SOURCE_OK;
    driver->dmabuf = SOURCE_OK;
    driver->dmabuf_why = "";
    driver->kernel = "6.8.0-87-generic";
    driver->doca = "";
    driver->fabric_manager = "";
    driver->fabric_manager_from = "/var/lib/dpkg/status";
    made->software.nvshmem.version = made->software.nccl.version = made->software.nccl.bundled_version = "";
    made->software.deepep.imported = -1;
}

static inline void made_files(struct made *made)
{
    made->snapshot = json_pack("{s:i}", "epkit_snapshot", 1);
    made_file(made, "/proc/self/limits",
              "Limit                     Soft Limit           Hard Limit           Units     \n"
              "Max locked memory         unlimited            unlimited            bytes     \n");
    made_file(made, "/proc/self/status", "Name:\tx\nCapEff:\t0000000000000000\nCpus_allowed_list:\t0-7\n");
    made_file(made, "/proc/self/mounts", "/dev/root / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0\n");
    made_file(made, "/proc/meminfo", "MemTotal:       1073741824 kB\n");
    made_file(made, "/proc/cmdline", "root=/dev/sda1 ro\n");
    made_file(made, "/proc/driver/nvidia/version", "NVRM version: x\n");
    made_file(made, "/proc/driver/nvidia/params", "RegistryDwords: \"\"\n");
    made_state(made, "files", "/sys/class/dmi/id/product_name", "absent");
    made_lines(made, "/proc/cpuinfo", " hypervisor", "");
    made_lines(made, "/dev/kmsg", "NVRM: Xid", "");
    made_stat(made, "/dev/shm", "folder", "rwx");
    made_stat(made, "/dev/infiniband/uverbs0", "char", "rw-");
    made_stat(made, "/dev/infiniband/uverbs1", "char", "rw-");
    made_state(made, "folders", "/sys/kernel/iommu_groups", "absent");
    made_folder(made, "/sys/class/infiniband", json_pack("[s, s, s, s]", "mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"));
}

static inline void made_init(struct made *made)
{
    memset(made, 0, sizeof(*made));
    made_hardware(made);
    made_software(made);
    made_files(made);
    made->map.n = 4;
    made->doctor.topo = &made->hardware.topo;
    made->doctor.software = &made->software;
    made->doctor.map = &made->map;
    made->doctor.advice = &made->advice;
    made->doctor.audit = &made->audit;
}

/* Opens the snapshot; call it after all changes. */
static inline void made_open(struct made *made)
{
    char path[PATH_MAX];
    int fd;

    if (made->environment_bytes)
        made_bytes(made, "/proc/self/environ", made->environment, made->environment_bytes);
    else if (!json_object_get(made_kind(made, "files"), "/proc/self/environ"))
        made_bytes(made, "/proc/self/environ", "HOME=/root", sizeof("HOME=/root"));
    temp_template("made", path);
    fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(json_dump_file(made->snapshot, path, 0), 0);
    if (source_open(path, &made->doctor.source) != EP_OK)
        fail_msg("%s", ep_last_error());
    unlink(path);
    made->hardware.topo.source = made->software.source = made->doctor.source;
}

static inline void made_done(struct made *made)
{
    source_free(made->doctor.source);
    json_decref(made->snapshot);
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* doctor_cases_topology.c - checks of limits and topology. */
#include "doctor_cases.h"

/* --- limits --- */

static void limit(struct made *made, const char *value)
{
    char text[256];

    snprintf(text, sizeof(text), "Limit  Soft\nMax locked memory         %-20s %-20s bytes     \n", value, value);
    made_file(made, "/proc/self/limits", text);
}

CHANGE(locked_8_mib, limit(made, "8388608"))
CHANGE(locked_512_mib, limit(made, "536870912"))
CHANGE(locked_128_gib, limit(made, "137438953472"))

static void locked_little_with_capability(struct made *made)
{
    locked_8_mib(made);
    made_file(made, "/proc/self/status", "CapEff:\t0000000000004000\n");
}

CHANGE(limits_hidden, made_state(made, "files", "/proc/self/limits", "denied"))
CHANGE(limits_truncated, made_file(made, "/proc/self/limits", "Max locked memory"))

static void mounts(struct made *made, const char *text)
{
    made_file(made, "/proc/self/mounts", text);
}

CHANGE(shm_64_mib,
       mounts(made, "overlay / overlay rw 0 0\nshm /dev/shm tmpfs rw,nosuid,nodev,size=65536k,inode64 0 0\n"))

CHANGE_OF(shm_64_mib_for_one_gpu, shm_64_mib, made->hardware.topo.n_gpus = 1)
CHANGE_OF(shm_64_mib_for_a_rank_of_two, shm_64_mib_for_one_gpu, made_env(made, "WORLD_SIZE=2"))
CHANGE(shm_512_mib, mounts(made, "shm /dev/shm tmpfs rw,size=512m 0 0\n"))
CHANGE(shm_by_percent, mounts(made, "shm /dev/shm tmpfs rw,size=50% 0 0\n"))
CHANGE(shm_unlimited, mounts(made, "shm /dev/shm tmpfs rw,size=0 0 0\n"))
CHANGE(shm_covered_by_a_larger_one,
       mounts(made, "shm /dev/shm tmpfs rw,size=65536k 0 0\ntmpfs /dev/shm tmpfs rw,size=16g 0 0\n"))
CHANGE(shm_on_dev, mounts(made, "overlay / overlay rw 0 0\ntmpfs /dev tmpfs rw,size=65536k,mode=755 0 0\n"))
CHANGE(shm_on_disk, mounts(made, "/dev/sda1 / ext4 rw 0 0\n"))
CHANGE(shm_absent, made_state(made, "stats", "/dev/shm", "absent"))
CHANGE(mounts_hidden, made_state(made, "files", "/proc/self/mounts", "failed"))
CHANGE(mounts_of_nonsense, mounts(made, "\n\n x \n/dev/shm\n"))
CHANGE(memory_not_known, made_state(made, "files", "/proc/meminfo", "denied"))

/* --- topology --- */

CHANGE_OF(grace_without_channels, grace, made_state(made, "folders", "/dev/nvidia-caps-imex-channels", "absent"))
CHANGE_OF(grace_channels_hidden, grace, made_state(made, "folders", "/dev/nvidia-caps-imex-channels", "denied"))

static void grace_channel_of_another_user(struct made *made)
{
    grace(made);
    made_stat(made, "/dev/nvidia-caps-imex-channels/channel0", "char", "---");
}

#define MAPPING "DEEP_EP_DEVICE_TO_HCA_MAPPING=0:mlx5_0:1"
#define VISIBLE(name, value)                                                                                           \
    static void visible_##name(struct made *made)                                                                      \
    {                                                                                                                  \
        made_env(made, "CUDA_VISIBLE_DEVICES=" value);                                                                 \
    }

VISIBLE(all, "0,1,2,3")
VISIBLE(some, "2, 3")
VISIBLE(none, "")
VISIBLE(minus, "-1")
VISIBLE(no_dev_files, "NoDevFiles")
VISIBLE(twice, "0,1,0")
VISIBLE(beyond, "0,4")
VISIBLE(nonsense, "0,one")
VISIBLE(huge, "99999999999999999999")
VISIBLE(permuted, "1,0,2,3")
VISIBLE(uuid, "GPU-00000000-0000-0000-0000-000000000002")
VISIBLE(foreign_uuid, "GPU-00000000-0000-0000-0000-000000000009")
VISIBLE(mig, "MIG-00000000-0000-0000-0000-000000000001")

static void permuted_with_mapping(struct made *made)
{
    made_env(made, MAPPING);
    visible_permuted(made);
}

static void some_with_mapping(struct made *made)
{
    made_env(made, MAPPING);
    visible_some(made);
}

static void uuid_with_mapping(struct made *made)
{
    made_env(made, MAPPING);
    visible_uuid(made);
}

static void uuid_without_nvml(struct made *made)
{
    nvml_silent(made);
    for (int i = 0; i < 4; i++)
        gpu(made, i)->uuid = "";
    visible_uuid(made);
}

CHANGE(environment_hidden, made_state(made, "files", "/proc/self/environ", "denied"))

/* Configuration space of a bridge with one extended capability. */
static void put_config(struct made *made, int pci, unsigned capability, unsigned control, unsigned next, size_t bytes)
{
    unsigned char config[4096] = {0};
    char path[128];

    config[0x100] = (unsigned char)capability;
    config[0x101] = (unsigned char)(capability >> 8);
    config[0x102] = (unsigned char)(1 | next << 4);
    config[0x103] = (unsigned char)(next >> 4);
    config[0x106] = (unsigned char)control;
    snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/config", made->hardware.pci[pci].address);
    made_bytes(made, path, config, bytes);
}

static void put_configs(struct made *made, unsigned capability, unsigned control, unsigned next, size_t bytes)
{
    for (int i = 0; i < made->hardware.topo.n_pci; i++)
        put_config(made, i, capability, control, next, bytes);
}

CHANGE(acs_off, put_configs(made, 0x0d, 0, 0, 4096))
CHANGE_OF(acs_redirects, acs_off, put_config(made, gpu_pci(made, 1)->parent, 0x0d, 0x1d, 0, 4096))
CHANGE(acs_validates_only, put_configs(made, 0x0d, 0x11, 0, 4096))
CHANGE(acs_for_root_only, put_configs(made, 0x0d, 0x1d, 0, 64))
CHANGE(acs_list_in_a_circle, put_configs(made, 0x01, 0x1d, 0x100, 4096))
CHANGE(acs_list_leads_out, put_configs(made, 0x01, 0x1d, 0x777, 0x77e))
CHANGE(acs_truncated, put_configs(made, 0x0d, 0x1d, 0, 0x105))
CHANGE_OF(acs_in_a_guest, acs_redirects, made_lines(made, "/proc/cpuinfo", " hypervisor", "flags : fpu hypervisor\n"))
CHANGE_OF(guest_by_name, acs_redirects, made_file(made, "/sys/class/dmi/id/product_name", "Google Compute Engine\n"))
CHANGE(guest_not_known, made_state(made, "lines", "/proc/cpuinfo\t hypervisor", "denied"))

static void groups(struct made *made, const char *type)
{
    made_folder(made, "/sys/kernel/iommu_groups", json_pack("[s]", "7"));
    for (int i = 0; i < made->hardware.topo.n_pci; i++) {
        char path[128];

        snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/iommu_group", made->hardware.pci[i].address);
        json_object_set_new(made_kind(made, "links"), path, json_string("/sys/kernel/iommu_groups/7"));
    }
    if (type)
        made_file(made, "/sys/kernel/iommu_groups/7/type", type);
    else
        made_state(made, "files", "/sys/kernel/iommu_groups/7/type", "denied");
}

CHANGE(iommu_identity, groups(made, "identity\n"))
CHANGE(iommu_translates, groups(made, "DMA-FQ\n"))

/* A workstation: the IOMMU has no effect on a single device. */
static void alone(struct made *made)
{
    made->hardware.topo.n_gpus = 1;
    no_nics(made);
}

static void acs_above_one_gpu(struct made *made)
{
    acs_redirects(made);
    put_config(made, gpu_pci(made, 0)->parent, 0x0d, 0x1d, 0, 4096);
    alone(made);
}

CHANGE_OF(iommu_translates_one_gpu, iommu_translates, alone(made))
CHANGE_OF(iommu_translates_a_gpu_with_a_nic, iommu_translates, made->hardware.topo.n_gpus = 1)
CHANGE(iommu_type_hidden, groups(made, NULL))
CHANGE_OF(iommu_translates_on_grace, grace, iommu_translates(made))

static void bound(struct made *made, const char *cpus)
{
    char text[128];

    snprintf(text, sizeof(text), "Name:\tx\nCpus_allowed_list:\t%s\n", cpus);
    made_file(made, "/proc/self/status", text);
}

static void rank_bound_well(struct made *made)
{
    made_env(made, "LOCAL_RANK=3");
    bound(made, "4-5");
}

static void rank_bound_badly(struct made *made)
{
    made_env(made, "OMPI_COMM_WORLD_LOCAL_RANK=3");
    bound(made, "0-3");
}

CHANGE(rank_not_bound, made_env(made, "SLURM_LOCALID=3"))

/* A shell that is a single task of Slurm: it may start the ranks itself, on all GPUs. */
static void only_task_bound(struct made *made)
{
    made_env(made, "CUDA_VISIBLE_DEVICES=0,1,2,3");
    made_env(made, "SLURM_LOCALID=0");
    made_env(made, "SLURM_STEP_TASKS_PER_NODE=1");
    bound(made, "4-5");
}

static void task_of_four_bound_badly(struct made *made)
{
    made_env(made, "SLURM_LOCALID=2");
    made_env(made, "SLURM_STEP_TASKS_PER_NODE=4(x2)");
    bound(made, "0-3");
}

static void visible_gpu_of_no_rank_bound_badly(struct made *made)
{
    made_env(made, "CUDA_VISIBLE_DEVICES=2");
    bound(made, "1");
}

static void single_visible_gpu_bound_badly(struct made *made)
{
    made_env(made, "CUDA_VISIBLE_DEVICES=2");
    made_env(made, "LOCAL_RANK=0");
    bound(made, "1");
}

static void rank_without_gpu(struct made *made)
{
    made_env(made, "LOCAL_RANK=17");
    bound(made, "1");
}

static void rank_with_status_hidden(struct made *made)
{
    made_env(made, "LOCAL_RANK=1");
    made_state(made, "files", "/proc/self/status", "denied");
}

static void rank_with_nonsense(struct made *made)
{
    made_env(made, "LOCAL_RANK=1");
    bound(made, "some");
}

static void rank_without_local_cpus(struct made *made)
{
    made_env(made, "LOCAL_RANK=1");
    gpu_pci(made, 1)->local_cpus = "";
}

/* --- the table --- */

static const struct doctor_case rows[] = {
    CASE("memlock", nothing, OK, ""),
    CASE("memlock", no_nics, ABSENT, "no RDMA NIC"),
    CASE("memlock", locked_8_mib, FOUND, "8192 KiB"),
    CASE("memlock", locked_512_mib, FOUND, "524288 KiB"),
    CASE("memlock", locked_128_gib, OK, ""),
    CASE("memlock", locked_little_with_capability, OK, ""),
    CASE("memlock", limits_hidden, UNKNOWN, "made so"),
    CASE("memlock", limits_truncated, UNKNOWN, "no line"),

    CASE("shm", nothing, OK, ""),
    CASE("shm", no_gpus, ABSENT, "no NVIDIA GPU"),
    CASE("shm", shm_64_mib, FOUND, "64 MiB"),
    CASE("shm", shm_64_mib_for_one_gpu, ABSENT, "one GPU"),
    CASE("shm", shm_64_mib_for_a_rank_of_two, FOUND, "64 MiB"),
    CASE("shm", shm_512_mib, FOUND, "512 MiB"),
    CASE("shm", shm_by_percent, OK, ""),
    CASE("shm", shm_unlimited, OK, ""),
    CASE("shm", shm_covered_by_a_larger_one, OK, ""),
    CASE("shm", shm_on_dev, FOUND, "64 MiB"),
    CASE("shm", shm_on_disk, OK, ""),
    CASE("shm", shm_absent, FOUND, "no /dev/shm"),
    CASE("shm", mounts_hidden, UNKNOWN, "made so"),
    CASE("shm", mounts_of_nonsense, UNKNOWN, "no file system"),
    CASE("shm", memory_not_known, UNKNOWN, "MemTotal"),

    CASE("imex", nothing, ABSENT, "other nodes"),
    CASE("imex", grace, OK, ""),
    CASE("imex", grace_without_channels, FOUND, "no IMEX channel"),
    CASE("imex", grace_channels_hidden, UNKNOWN, "made so"),
    CASE("imex", grace_channel_of_another_user, FOUND, "channel0 is not accessible"),
    CASE("imex", grace_fabric_starting, FOUND, "1 of 4 GPUs"),

    CASE("visible-devices", nothing, ABSENT, "not set"),
    CASE("visible-devices", visible_all, OK, ""),
    CASE("visible-devices", visible_some, OK, ""),
    CASE("visible-devices", visible_none, ABSENT, "hides all"),
    CASE("visible-devices", visible_minus, ABSENT, "hides all"),
    CASE("visible-devices", visible_no_dev_files, ABSENT, "hides all"),
    CASE("visible-devices", visible_twice, FOUND, "GPU 0 is named twice"),
    CASE("visible-devices", visible_beyond, FOUND, "no GPU 4"),
    CASE("visible-devices", visible_nonsense, FOUND, "'one'"),
    CASE("visible-devices", visible_huge, FOUND, "99999"),
    CASE("visible-devices", visible_permuted, OK, ""),
    CASE("visible-devices", permuted_with_mapping, FOUND, "another order"),
    CASE("visible-devices", some_with_mapping, OK, ""),
    CASE("visible-devices", visible_uuid, OK, ""),
    CASE("visible-devices", uuid_with_mapping, FOUND, "holds UUIDs"),
    CASE("visible-devices", visible_foreign_uuid, FOUND, "no GPU here has the UUID"),
    CASE("visible-devices", uuid_without_nvml, UNKNOWN, "NVML"),
    CASE("visible-devices", visible_mig, OK, ""),
    CASE("visible-devices", environment_hidden, UNKNOWN, "made so"),

    CASE("acs", acs_off, OK, ""),
    CASE("acs", acs_redirects, FOUND, "1 of 12 PCIe bridges"),
    CASE("acs", acs_above_one_gpu, ABSENT, "one GPU"),
    CASE("acs", acs_validates_only, OK, ""),
    CASE("acs", acs_for_root_only, UNKNOWN, "only root"),
    CASE("acs", acs_list_in_a_circle, OK, ""),
    CASE("acs", acs_list_leads_out, OK, ""),
    CASE("acs", acs_truncated, OK, ""),
    CASE("acs", acs_in_a_guest, ABSENT, "virtual machine"),
    CASE("acs", guest_by_name, ABSENT, "virtual machine"),
    CASE("acs", guest_not_known, UNKNOWN, "virtual machine"),

    CASE("iommu", nothing, ABSENT, "IOMMU is off"),
    CASE("iommu", iommu_identity, OK, ""),
    CASE("iommu", iommu_translates, FOUND, "8 of 8"),
    CASE("iommu", iommu_translates_one_gpu, ABSENT, "one GPU"),
    CASE("iommu", iommu_translates_a_gpu_with_a_nic, FOUND, "5 of 5"),
    CASE("iommu", iommu_type_hidden, UNKNOWN, "made so"),
    CASE("iommu", iommu_translates_on_grace, ABSENT, "Grace"),

    CASE("affinity", nothing, ABSENT, "not known which GPU"),
    CASE("affinity", rank_bound_well, OK, ""),
    CASE("affinity", rank_bound_badly, FOUND, "GPU 3"),
    CASE("affinity", rank_not_bound, ABSENT, "not known which GPU"),
    CASE("affinity", only_task_bound, ABSENT, "not known which GPU"),
    CASE("affinity", task_of_four_bound_badly, FOUND, "GPU 2"),
    CASE("affinity", visible_gpu_of_no_rank_bound_badly, FOUND, "GPU 2"),
    CASE("affinity", single_visible_gpu_bound_badly, FOUND, "GPU 2"),
    CASE("affinity", rank_without_gpu, ABSENT, "not known which GPU"),
    CASE("affinity", rank_with_status_hidden, UNKNOWN, "made so"),
    CASE("affinity", rank_with_nonsense, UNKNOWN, "Cpus_allowed_list"),
    CASE("affinity", rank_without_local_cpus, UNKNOWN, "GPU 1"),
};

const struct doctor_case *doctor_cases_topology(size_t *ret_n)
{
    *ret_n = sizeof(rows) / sizeof(rows[0]);
    return rows;
}

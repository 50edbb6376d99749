/* SPDX-License-Identifier: Apache-2.0 */
/* The checks of driver, NICs, limits and topology: a healthy machine, changes to it, and how a check then ends. */
#include "made.h"

struct test_case {
    const char *check, *name;
    void (*change)(struct made *made);
    enum doctor_outcome outcome;
    const char *text; /* part of the result's sentence or reason */
};

static struct topo_gpu *gpu(struct made *made, int i)
{
    return &made->hardware.gpus[i];
}

static struct topo_nic *nic(struct made *made, int i)
{
    return &made->hardware.nics[i];
}

static struct topo_pci *gpu_pci(struct made *made, int i)
{
    return &made->hardware.pci[gpu(made, i)->pci];
}

static struct topo_pci *nic_pci(struct made *made, int i)
{
    return &made->hardware.pci[nic(made, i)->pci];
}

static void nothing(struct made *made)
{
    (void)made;
}

static void no_gpus(struct made *made)
{
    made_state(made, "folders", "/sys/bus/pci/devices", "absent");
    made->hardware.topo.n_gpus = 0;
    made->map.n = 0;
}

static void no_nics(struct made *made)
{
    made_state(made, "folders", "/sys/class/infiniband", "absent");
    made->hardware.topo.n_nics = 0;
    made->map.n = 0;
}

static void no_driver(struct made *made)
{
    made_state(made, "files", "/proc/driver/nvidia/version", "absent");
    made->stack.driver.version = "";
}

static void rename_gpus(struct made *made, const char *name)
{
    for (int i = 0; i < 4; i++)
        gpu(made, i)->name = name;
}

/* --- driver --- */

static void no_peermem(struct made *made)
{
    made->stack.driver.peermem = ROOT_ABSENT;
}

static void neither_peermem_nor_dmabuf(struct made *made)
{
    made->stack.driver.peermem = made->stack.driver.dmabuf = ROOT_ABSENT;
}

static void dmabuf_not_known(struct made *made)
{
    made->stack.driver.peermem = ROOT_ABSENT;
    made->stack.driver.dmabuf = ROOT_UNASKED;
}

static void peermem_hidden(struct made *made)
{
    made->stack.driver.peermem = ROOT_DENIED;
    made->stack.driver.dmabuf = ROOT_ABSENT;
}

static struct stack_option *option(struct made *made)
{
    return &made->stack.driver.peer_mapping_override;
}

static void option_live_as_hexadecimal(struct made *made)
{
    option(made)->configured = "1";
    option(made)->configured_in = "/etc/modprobe.d/a.conf";
    option(made)->live = "0x1";
}

static void option_not_live(struct made *made)
{
    option_live_as_hexadecimal(made);
    option(made)->live = "";
}

static void option_live_not_known(struct made *made)
{
    option_not_live(made);
    made_state(made, "files", "/proc/driver/nvidia/params", "denied");
}

static void option_overruled(struct made *made)
{
    option(made)->overruled = "1";
    option(made)->overruled_in = "/etc/modprobe.d/a.conf";
}

static void old_doca(struct made *made)
{
    made->stack.driver.doca = "3.0.0-058000";
    made->stack.driver.kernel = "6.14.0-1021-gcp";
}

static void old_doca_not_built(struct made *made)
{
    old_doca(made);
    made_folder(made, "/lib/modules/6.14.0-1021-gcp/updates/dkms", json_pack("[s]", "nvidia.ko"));
}

static void old_doca_but_built(struct made *made)
{
    old_doca(made);
    made_folder(made, "/lib/modules/6.14.0-1021-gcp/updates/dkms", json_pack("[s]", "mlx5_core.ko.zst"));
}

static void old_doca_old_kernel(struct made *made)
{
    old_doca_not_built(made);
    made->stack.driver.kernel = "6.8.0-87-generic";
}

static void new_doca(struct made *made)
{
    old_doca_not_built(made);
    made->stack.driver.doca = "3.2.1-044000";
}

static void kernel_not_known(struct made *made)
{
    old_doca(made);
    made->stack.driver.kernel = "";
}

static void module_of_another_version(struct made *made)
{
    made->stack.driver.module_version = "570.124.06";
}

static void package_of_another_version(struct made *made)
{
    made->stack.driver.installed_version = "580.140.02-1ubuntu1";
}

static void package_revision(struct made *made)
{
    made->stack.driver.installed_version = "580.126.09-1ubuntu1";
}

static void nobody_drives_gpus(struct made *made)
{
    no_driver(made);
    for (int i = 0; i < 4; i++)
        gpu_pci(made, i)->driver = "";
}

static void nouveau_drives_gpus(struct made *made)
{
    nobody_drives_gpus(made);
    for (int i = 0; i < 4; i++)
        gpu_pci(made, i)->driver = "nouveau";
}

static void driver_version_hidden(struct made *made)
{
    no_driver(made);
    made_state(made, "files", "/proc/driver/nvidia/version", "denied");
}

static void grace(struct made *made)
{
    rename_gpus(made, "NVIDIA GB200");
    made_folder(made, "/dev/nvidia-caps-imex-channels", json_pack("[s]", "channel0"));
    made_stat(made, "/dev/nvidia-caps-imex-channels/channel0", "char", "rw-");
}

static void grace_passthrough(struct made *made)
{
    grace(made);
    made_file(made, "/proc/cmdline", "ro iommu.passthrough=1 quiet\n");
}

static void grace_without_command_line(struct made *made)
{
    grace(made);
    made_state(made, "files", "/proc/cmdline", "failed");
}

static void grace_by_device_number(struct made *made)
{
    rename_gpus(made, "");
    for (int i = 0; i < 4; i++)
        gpu_pci(made, i)->device = 0x2941;
    made_file(made, "/proc/cmdline", "ro iommu.passthrough=1 quiet\n");
}

static void x86_passthrough(struct made *made)
{
    made_file(made, "/proc/cmdline", "ro iommu=pt\n");
}

static void ecc(struct made *made)
{
    gpu(made, 2)->ecc_uncorrected = 3;
}

static void ecc_not_known(struct made *made)
{
    gpu(made, 2)->ecc_uncorrected = gpu(made, 2)->remap_pending = gpu(made, 2)->remap_failed = -1;
}

static void remap_pending(struct made *made)
{
    gpu(made, 1)->remap_pending = 1;
}

static void xid(struct made *made)
{
    made_lines(made, "/dev/kmsg", "NVRM: Xid",
               "3,1,5,-;NVRM: Xid (PCI:0000:05:00): 79, pid=1, GPU has fallen off the bus.\n"
               "3,2,6,-;NVRM: Xid (PCI:0000:05:00): 79, pid=2, GPU has fallen off the bus.\n");
}

static void xid_of_a_program(struct made *made)
{
    made_lines(made, "/dev/kmsg", "NVRM: Xid", "3,1,5,-;NVRM: Xid (PCI:0000:03:00): 31, pid=1, MMU Fault\n");
}

static void xid_damaged(struct made *made)
{
    made_lines(made, "/dev/kmsg", "NVRM: Xid",
               "NVRM: Xid\nNVRM: Xid (\nNVRM: Xid (PCI:0000:03:00\nNVRM: Xid (PCI:0000:03:00):\n"
               "NVRM: Xid (PCI:0000:03:00): x\nNVRM: Xid (PCI:0000:03:00): 99999999999\n"
               "NVRM: Xid (PCI:00000000000000000000000000000000000000000000000000000000): 79\n");
}

static void log_hidden(struct made *made)
{
    made_lines(made, "/dev/kmsg", "NVRM: Xid", "");
    made_state(made, "lines", "/dev/kmsg\tNVRM: Xid", "denied");
}

static void xid_of_an_earlier_boot(struct made *made)
{
    log_hidden(made);
    made_lines(made, "/var/log/kern.log", "NVRM: ",
               "NVRM: Xid (PCI:0000:03:00): 79, pid=1\nNVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.126.09\n");
}

static void xid_of_this_boot_in_a_file(struct made *made)
{
    log_hidden(made);
    made_lines(made, "/var/log/kern.log", "NVRM: ",
               "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.126.09\nNVRM: Xid (PCI:0000:03:00): 63, pid=1\n");
}

static void ecc_although_log_hidden(struct made *made)
{
    log_hidden(made);
    ecc(made);
}

static void nvml_silent(struct made *made)
{
    made->hardware.topo.nvml = false;
    made->hardware.topo.nvml_why = "no answer within 3000 ms";
    for (int i = 0; i < 4; i++)
        gpu(made, i)->answered = false;
}

static void links_down(struct made *made)
{
    gpu(made, 3)->nvlinks_up = 16;
}

static void all_links_down(struct made *made)
{
    for (int i = 0; i < 4; i++)
        gpu(made, i)->nvlinks_up = 0;
}

static void fabric_failed(struct made *made)
{
    gpu(made, 1)->fabric = TOPO_FABRIC_FAILED;
}

static void cards_without_bridges(struct made *made)
{
    all_links_down(made);
    rename_gpus(made, "NVIDIA H100 PCIe");
}

static void a_card_with_a_loose_bridge(struct made *made)
{
    rename_gpus(made, "NVIDIA H100 NVL");
    gpu(made, 0)->nvlinks_up = 0;
}

static void one_gpu_lent(struct made *made)
{
    made->hardware.topo.n_gpus = 1;
    gpu(made, 0)->nvlinks_up = 0;
}

static void no_nvlink(struct made *made)
{
    rename_gpus(made, "NVIDIA L40S");
    for (int i = 0; i < 4; i++)
        gpu(made, i)->nvlinks = gpu(made, i)->nvlinks_up = 0;
}

/* --- NICs --- */

static void half_rate(struct made *made)
{
    nic(made, 1)->ports[0].rate_gbps = 200;
}

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

static void half_lanes(struct made *made)
{
    nic_pci(made, 2)->link_width = 8;
}

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

static void gpu_speed_drops_when_idle(struct made *made)
{
    gpu_pci(made, 0)->link_gts = 2.5;
}

static void narrow_gpu(struct made *made)
{
    gpu_pci(made, 0)->link_width = 8;
}

static void laptop_with_eight_lanes(struct made *made)
{
    no_nics(made);
    made->hardware.topo.n_gpus = 1;
    narrow_gpu(made);
}

static void no_ipv4(struct made *made)
{
    nic(made, 3)->ports[0].n_gids = 2;
}

static void ipv6_only(struct made *made)
{
    for (int i = 0; i < 4; i++)
        made->gids[i][3].kind = TOPO_GID_OTHER;
}

static void gids_hidden(struct made *made)
{
    nic(made, 0)->ports[0].gids_state = ROOT_DENIED;
}

static void index_3(struct made *made)
{
    made_env(made, "NVSHMEM_IB_GID_INDEX=3");
}

static void index_of_roce_1(struct made *made)
{
    made_env(made, "NCCL_IB_GID_INDEX=2");
}

static void index_link_local(struct made *made)
{
    made_env(made, "NVSHMEM_IB_GID_INDEX=1");
}

static void index_empty(struct made *made)
{
    made_env(made, "NVSHMEM_IB_GID_INDEX=7");
}

static void index_automatic(struct made *made)
{
    made_env(made, "NVSHMEM_IB_GID_INDEX=-1");
}

static void index_nonsense(struct made *made)
{
    made_env(made, "NVSHMEM_IB_GID_INDEX=three");
}

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
    nic(made, 1)->ports[0].state = nic(made, 1)->ports[0].phys_state = "";
}

static void all_states_unreadable(struct made *made)
{
    for (int i = 0; i < 4; i++) {
        nic(made, i)->role = TOPO_ROLE_DOWN;
        nic(made, i)->ports[0].active = false;
        nic(made, i)->ports[0].state = "?????";
    }
    made->map.n = 0;
}

static void bus_hidden(struct made *made)
{
    no_gpus(made);
    made_state(made, "folders", "/sys/bus/pci/devices", "denied");
}

static void mute_devices(struct made *made)
{
    no_gpus(made);
    made_folder(made, "/sys/bus/pci/devices", json_pack("[s, s]", "0000:00:00.0", "0000:00:01.0"));
    made_file(made, "/sys/bus/pci/devices/0000:00:00.0/vendor", "0x8086\n");
    made_file(made, "/sys/bus/pci/devices/0000:00:01.0/vendor", "");
}

static void rdma_hidden(struct made *made)
{
    no_nics(made);
    made_state(made, "folders", "/sys/class/infiniband", "failed");
}

static void rdma_devices_that_lead_nowhere(struct made *made)
{
    no_nics(made);
    made_folder(made, "/sys/class/infiniband", json_pack("[s]", "mlx5_0"));
}

static void driver_hidden(struct made *made)
{
    no_driver(made);
    made_state(made, "files", "/proc/driver/nvidia/version", "denied");
}

static void spare_port_of_a_card(struct made *made)
{
    struct topo_nic *spare =
        machine_nic(&made->hardware, "mlx5_9", 1, made->hardware.pci[nic_pci(made, 0)->parent].parent, 0, 0);

    spare->hca = "MT4129";
    spare->role = TOPO_ROLE_DOWN;
    spare->ports[0].active = false;
    snprintf(made->hardware.pci[spare->pci].address, sizeof(made->hardware.pci[0].address), "%.11s1",
             nic_pci(made, 0)->address);
    made->hardware.pci[spare->pci].device = 0x1021;
}

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

static void flat_bus(struct made *made)
{
    for (int i = 0; i < 4; i++) {
        gpu_pci(made, i)->parent = nic_pci(made, i)->parent = -1;
        gpu_pci(made, i)->host_bridge = nic_pci(made, i)->host_bridge = 0;
    }
}

static void flat_bus_one_nic_missing(struct made *made)
{
    flat_bus(made);
    made->hardware.topo.n_nics = 3;
    nic_pci(made, 3)->vendor = 0;
    made->map.n = 3;
}

static void uverbs_denied(struct made *made)
{
    made_stat(made, "/dev/infiniband/uverbs1", "char", "---");
}

static void uverbs_absent(struct made *made)
{
    made_state(made, "stats", "/dev/infiniband/uverbs1", "absent");
}

static void uverbs_not_asked(struct made *made)
{
    made_state(made, "stats", "/dev/infiniband/uverbs0", NULL);
    made_state(made, "stats", "/dev/infiniband/uverbs1", NULL);
}

static void no_uverbs(struct made *made)
{
    nic(made, 2)->uverbs = "";
}

/* --- limits --- */

static void limit(struct made *made, const char *value)
{
    char text[256];

    snprintf(text, sizeof(text), "Limit  Soft\nMax locked memory         %-20s %-20s bytes     \n", value, value);
    made_file(made, "/proc/self/limits", text);
}

static void locked_8_mib(struct made *made)
{
    limit(made, "8388608");
}

static void locked_512_mib(struct made *made)
{
    limit(made, "536870912");
}

static void locked_128_gib(struct made *made)
{
    limit(made, "137438953472");
}

static void locked_little_with_capability(struct made *made)
{
    locked_8_mib(made);
    made_file(made, "/proc/self/status", "CapEff:\t0000000000004000\n");
}

static void limits_hidden(struct made *made)
{
    made_state(made, "files", "/proc/self/limits", "denied");
}

static void limits_truncated(struct made *made)
{
    made_file(made, "/proc/self/limits", "Max locked memory");
}

static void mounts(struct made *made, const char *text)
{
    made_file(made, "/proc/self/mounts", text);
}

static void shm_64_mib(struct made *made)
{
    mounts(made, "overlay / overlay rw 0 0\nshm /dev/shm tmpfs rw,nosuid,nodev,size=65536k,inode64 0 0\n");
}

static void shm_512_mib(struct made *made)
{
    mounts(made, "shm /dev/shm tmpfs rw,size=512m 0 0\n");
}

static void shm_by_percent(struct made *made)
{
    mounts(made, "shm /dev/shm tmpfs rw,size=50% 0 0\n");
}

static void shm_unlimited(struct made *made)
{
    mounts(made, "shm /dev/shm tmpfs rw,size=0 0 0\n");
}

static void shm_covered_by_a_larger_one(struct made *made)
{
    mounts(made, "shm /dev/shm tmpfs rw,size=65536k 0 0\ntmpfs /dev/shm tmpfs rw,size=16g 0 0\n");
}

static void shm_on_dev(struct made *made)
{
    mounts(made, "overlay / overlay rw 0 0\ntmpfs /dev tmpfs rw,size=65536k,mode=755 0 0\n");
}

static void shm_on_disk(struct made *made)
{
    mounts(made, "/dev/sda1 / ext4 rw 0 0\n");
}

static void shm_absent(struct made *made)
{
    made_state(made, "stats", "/dev/shm", "absent");
}

static void mounts_hidden(struct made *made)
{
    made_state(made, "files", "/proc/self/mounts", "failed");
}

static void mounts_of_nonsense(struct made *made)
{
    mounts(made, "\n\n x \n/dev/shm\n");
}

static void memory_not_known(struct made *made)
{
    made_state(made, "files", "/proc/meminfo", "denied");
}

/* --- topology --- */

static void grace_without_channels(struct made *made)
{
    grace(made);
    made_state(made, "folders", "/dev/nvidia-caps-imex-channels", "absent");
}

static void grace_channels_hidden(struct made *made)
{
    grace(made);
    made_state(made, "folders", "/dev/nvidia-caps-imex-channels", "denied");
}

static void grace_channel_of_another_user(struct made *made)
{
    grace(made);
    made_stat(made, "/dev/nvidia-caps-imex-channels/channel0", "char", "---");
}

static void grace_fabric_starting(struct made *made)
{
    grace(made);
    gpu(made, 2)->fabric = TOPO_FABRIC_STARTING;
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

static void environment_hidden(struct made *made)
{
    made_state(made, "files", "/proc/self/environ", "denied");
}

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

static void acs_off(struct made *made)
{
    put_configs(made, 0x0d, 0, 0, 4096);
}

static void acs_redirects(struct made *made)
{
    acs_off(made);
    put_config(made, gpu_pci(made, 1)->parent, 0x0d, 0x1d, 0, 4096);
}

static void acs_validates_only(struct made *made)
{
    put_configs(made, 0x0d, 0x11, 0, 4096);
}

static void acs_for_root_only(struct made *made)
{
    put_configs(made, 0x0d, 0x1d, 0, 64);
}

static void acs_list_in_a_circle(struct made *made)
{
    put_configs(made, 0x01, 0x1d, 0x100, 4096);
}

static void acs_list_leads_out(struct made *made)
{
    put_configs(made, 0x01, 0x1d, 0xffc, 4096);
}

static void acs_truncated(struct made *made)
{
    put_configs(made, 0x0d, 0x1d, 0, 0x105);
}

static void acs_in_a_guest(struct made *made)
{
    acs_redirects(made);
    made_lines(made, "/proc/cpuinfo", " hypervisor", "flags : fpu hypervisor\n");
}

static void guest_by_name(struct made *made)
{
    acs_redirects(made);
    made_file(made, "/sys/class/dmi/id/product_name", "Google Compute Engine\n");
}

static void guest_not_known(struct made *made)
{
    made_state(made, "lines", "/proc/cpuinfo\t hypervisor", "denied");
}

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

static void iommu_identity(struct made *made)
{
    groups(made, "identity\n");
}

static void iommu_translates(struct made *made)
{
    groups(made, "DMA-FQ\n");
}

static void iommu_type_hidden(struct made *made)
{
    groups(made, NULL);
}

static void iommu_translates_on_grace(struct made *made)
{
    grace(made);
    iommu_translates(made);
}

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

static void rank_not_bound(struct made *made)
{
    made_env(made, "SLURM_LOCALID=3");
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

#define ABSENT DOCTOR_NOT_HERE
#define FOUND DOCTOR_FOUND
#define UNKNOWN DOCTOR_UNKNOWN
#define OK DOCTOR_FINE
#define CASE(check, change, outcome, text)                                                                             \
    {                                                                                                                  \
        check, #change, change, outcome, text                                                                          \
    }

static const struct test_case cases[] = {
    CASE("peermem", nothing, OK, ""),
    CASE("peermem", no_gpus, ABSENT, "no NVIDIA GPU"),
    CASE("peermem", no_nics, ABSENT, "no RDMA NIC"),
    CASE("peermem", no_driver, ABSENT, "driver is not loaded"),
    CASE("peermem", bus_hidden, UNKNOWN, "/sys/bus/pci/devices"),
    CASE("peermem", mute_devices, UNKNOWN, "1 of 2 PCI devices"),
    CASE("peermem", rdma_hidden, UNKNOWN, "/sys/class/infiniband"),
    CASE("peermem", rdma_devices_that_lead_nowhere, UNKNOWN, "1 of 1"),
    CASE("peermem", all_states_unreadable, UNKNOWN, "do not tell their state"),
    CASE("peermem", driver_hidden, UNKNOWN, "/proc/driver/nvidia/version"),
    CASE("peermem", no_peermem, OK, ""),
    CASE("peermem", neither_peermem_nor_dmabuf, FOUND, "cannot reach GPU memory"),
    CASE("peermem", dmabuf_not_known, UNKNOWN, "dma-buf"),
    CASE("peermem", peermem_hidden, UNKNOWN, "nvidia_peermem"),

    CASE("driver-option", nothing, ABSENT, "not configured"),
    CASE("driver-option", option_live_as_hexadecimal, OK, ""),
    CASE("driver-option", option_not_live, FOUND, "does not have it"),
    CASE("driver-option", option_live_not_known, UNKNOWN, "made so"),
    CASE("driver-option", option_overruled, FOUND, "a later line"),

    CASE("doca-kernel", nothing, ABSENT, "not installed"),
    CASE("doca-kernel", old_doca, FOUND, "3.0.0"),
    CASE("doca-kernel", old_doca_not_built, FOUND, "6.14.0-1021-gcp"),
    CASE("doca-kernel", old_doca_but_built, OK, ""),
    CASE("doca-kernel", old_doca_old_kernel, OK, ""),
    CASE("doca-kernel", new_doca, OK, ""),
    CASE("doca-kernel", kernel_not_known, UNKNOWN, "kernel"),

    CASE("driver-skew", nothing, OK, ""),
    CASE("driver-skew", module_of_another_version, FOUND, "570.124.06"),
    CASE("driver-skew", package_of_another_version, FOUND, "580.140.02"),
    CASE("driver-skew", package_revision, OK, ""),
    CASE("driver-skew", nobody_drives_gpus, FOUND, "4 GPUs"),
    CASE("driver-skew", nouveau_drives_gpus, ABSENT, "not in use"),
    CASE("driver-skew", driver_version_hidden, UNKNOWN, "made so"),

    CASE("iommu-gb200", nothing, ABSENT, "no board with Grace"),
    CASE("iommu-gb200", x86_passthrough, ABSENT, "no board with Grace"),
    CASE("iommu-gb200", grace, OK, ""),
    CASE("iommu-gb200", grace_passthrough, FOUND, "iommu.passthrough=1"),
    CASE("iommu-gb200", grace_by_device_number, FOUND, "iommu.passthrough=1"),
    CASE("iommu-gb200", grace_without_command_line, UNKNOWN, "/proc/cmdline"),

    CASE("gpu-errors", nothing, OK, ""),
    CASE("gpu-errors", ecc, FOUND, "GPU 2: uncorrected ECC"),
    CASE("gpu-errors", ecc_not_known, OK, ""),
    CASE("gpu-errors", remap_pending, FOUND, "GPU 1"),
    CASE("gpu-errors", xid, FOUND, "Xid 79"),
    CASE("gpu-errors", xid_of_a_program, OK, ""),
    CASE("gpu-errors", xid_damaged, OK, ""),
    CASE("gpu-errors", log_hidden, UNKNOWN, "/dev/kmsg"),
    CASE("gpu-errors", ecc_although_log_hidden, FOUND, "ECC"),
    CASE("gpu-errors", xid_of_an_earlier_boot, OK, ""),
    CASE("gpu-errors", xid_of_this_boot_in_a_file, FOUND, "Xid 63"),
    CASE("gpu-errors", nvml_silent, UNKNOWN, "no answer within"),

    CASE("nvlink", nothing, OK, ""),
    CASE("nvlink", links_down, FOUND, "2 of 18 NVLinks of GPU 3"),
    CASE("nvlink", all_links_down, FOUND, "4 of 4 GPUs"),
    CASE("nvlink", fabric_failed, FOUND, "failed"),
    CASE("nvlink", cards_without_bridges, OK, ""),
    CASE("nvlink", a_card_with_a_loose_bridge, FOUND, "GPU 0"),
    CASE("nvlink", one_gpu_lent, ABSENT, "single GPU"),
    CASE("nvlink", no_nvlink, ABSENT, "without NVLink"),
    CASE("nvlink", nvml_silent, UNKNOWN, "NVML"),
    CASE("nvlink", grace_fabric_starting, OK, ""),

    CASE("slow-link", nothing, OK, ""),
    CASE("slow-link", half_rate, FOUND, "mlx5_1:1: runs at 200"),
    CASE("slow-link", so_slow_that_it_looks_like_management, FOUND, "mlx5_1:1"),
    CASE("slow-link", management_far_from_gpus, OK, ""),
    CASE("slow-link", half_lanes, FOUND, "mlx5_2"),
    CASE("slow-link", older_slots_that_suffice, OK, ""),
    CASE("slow-link", older_slots_that_do_not, FOUND, "16 GT/s"),
    CASE("slow-link", links_not_known, OK, ""),
    CASE("slow-link", gpu_speed_drops_when_idle, OK, ""),
    CASE("slow-link", narrow_gpu, FOUND, "GPU 0"),
    CASE("slow-link", laptop_with_eight_lanes, OK, ""),

    CASE("gid", nothing, OK, ""),
    CASE("gid", no_ipv4, FOUND, "mlx5_3:1"),
    CASE("gid", ipv6_only, FOUND, "IPv4"),
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
    CASE("port-down", storage_far_away_down, OK, ""),
    CASE("port-down", one_nic_missing, FOUND, "GPU 3 has 1 NIC"),
    CASE("port-down", function_without_rdma, FOUND, "no RDMA device"),
    CASE("port-down", half_as_many_nics, OK, ""),
    CASE("port-down", flat_bus, OK, ""),
    CASE("port-down", flat_bus_one_nic_missing, FOUND, "3 NICs for 4 GPUs"),
    CASE("port-down", so_slow_that_it_looks_like_management, OK, ""),

    CASE("link-layer", nothing, OK, ""),
    CASE("link-layer", infiniband, OK, ""),
    CASE("link-layer", one_port_ethernet, FOUND, "mlx5_3 is Ethernet"),

    CASE("nic-access", nothing, OK, ""),
    CASE("nic-access", uverbs_denied, FOUND, "uverbs1 is not accessible"),
    CASE("nic-access", uverbs_absent, FOUND, "uverbs1 is not there"),
    CASE("nic-access", uverbs_not_asked, UNKNOWN, "snapshot"),
    CASE("nic-access", no_uverbs, FOUND, "mlx5_2 has no uverbs"),

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
    CASE("acs", acs_validates_only, OK, ""),
    CASE("acs", acs_for_root_only, UNKNOWN, "root only"),
    CASE("acs", acs_list_in_a_circle, OK, ""),
    CASE("acs", acs_list_leads_out, OK, ""),
    CASE("acs", acs_truncated, OK, ""),
    CASE("acs", acs_in_a_guest, ABSENT, "virtual machine"),
    CASE("acs", guest_by_name, ABSENT, "virtual machine"),
    CASE("acs", guest_not_known, UNKNOWN, "virtual machine"),

    CASE("iommu", nothing, ABSENT, "IOMMU is off"),
    CASE("iommu", iommu_identity, OK, ""),
    CASE("iommu", iommu_translates, FOUND, "8 of 8"),
    CASE("iommu", iommu_type_hidden, UNKNOWN, "made so"),
    CASE("iommu", iommu_translates_on_grace, ABSENT, "Grace"),

    CASE("affinity", nothing, ABSENT, "nothing tells"),
    CASE("affinity", rank_bound_well, OK, ""),
    CASE("affinity", rank_bound_badly, FOUND, "GPU 3"),
    CASE("affinity", rank_not_bound, OK, ""),
    CASE("affinity", single_visible_gpu_bound_badly, FOUND, "GPU 2"),
    CASE("affinity", rank_without_gpu, ABSENT, "nothing tells"),
    CASE("affinity", rank_with_status_hidden, UNKNOWN, "made so"),
    CASE("affinity", rank_with_nonsense, UNKNOWN, "Cpus_allowed_list"),
    CASE("affinity", rank_without_local_cpus, UNKNOWN, "GPU 1"),
};

/* What every result has to be, whatever the check. */
static void assert_whole(const struct doctor_result *result)
{
    if (result->outcome == DOCTOR_FINE)
        assert_string_equal(result->text, "");
    else
        assert_true(*result->text);
    assert_in_range(result->n_evidence, 0, 8);
    for (int i = 0; i < result->n_evidence; i++)
        assert_true(*result->evidence[i].where && *result->evidence[i].what);
    if (result->outcome != DOCTOR_FOUND)
        return;
    assert_true(result->n_evidence > 0);
    assert_true(*result->fix || *result->advice);
    assert_false(result->fix_is_safe && !*result->fix);
}

static void test_each_case_ends_as_it_should(void **state)
{
    static struct made made;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct doctor_check *check = doctor_find(cases[i].check);
        struct doctor_result result;

        assert_non_null(check);
        made_init(&made);
        cases[i].change(&made);
        made_open(&made);
        doctor_run(&made.doctor, check, &result);
        if (result.outcome != cases[i].outcome || !strstr(result.text, cases[i].text))
            fail_msg("%s, %s: outcome %d instead of %d: '%s'", cases[i].check, cases[i].name, (int)result.outcome,
                     (int)cases[i].outcome, result.text);
        assert_whole(&result);
        assert_ptr_equal(result.check, check);
        made_done(&made);
    }
}

/* A change that one check reports is not reported by any other: each has its own faults. */
static void test_a_fault_is_of_one_check(void **state)
{
    static struct made made;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        if (cases[i].outcome != DOCTOR_FOUND)
            continue;
        made_init(&made);
        cases[i].change(&made);
        made_open(&made);
        for (size_t k = 0; k < sizeof(cases) / sizeof(cases[0]); k++) {
            struct doctor_result result;

            if (strcmp(cases[k].check, cases[i].check) == 0 ||
                (k > 0 && strcmp(cases[k].check, cases[k - 1].check) == 0))
                continue;
            doctor_run(&made.doctor, doctor_find(cases[k].check), &result);
            if (result.outcome == DOCTOR_FOUND)
                fail_msg("%s is the matter of %s, and %s reports it as well: %s", cases[i].name, cases[i].check,
                         cases[k].check, result.text);
        }
        made_done(&made);
    }
}

static struct doctor_result result_of(struct made *made, const char *check, void (*change)(struct made *made))
{
    struct doctor_result result;

    made_init(made);
    change(made);
    made_open(made);
    doctor_run(&made->doctor, doctor_find(check), &result);
    return result;
}

/* Only what a reboot undoes is run by --fix. */
static void test_fixes_that_are_safe(void **state)
{
    static const struct {
        const char *check;
        void (*change)(struct made *made);
        const char *fix;
    } safe[] = {
        {"peermem", neither_peermem_nor_dmabuf, "sudo modprobe nvidia-peermem"},
        {"nic-access", no_uverbs, "sudo modprobe ib_uverbs"},
        {"shm", shm_64_mib, "sudo mount -o remount,size=524288M /dev/shm"},
    };
    static struct made made;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct doctor_result result = result_of(&made, cases[i].check, cases[i].change);
        bool is_listed = false;

        for (size_t k = 0; k < sizeof(safe) / sizeof(safe[0]); k++)
            is_listed = is_listed || strcmp(result.fix, safe[k].fix) == 0;
        if (result.fix_is_safe && !is_listed)
            fail_msg("%s, %s: '%s' is said to be safe", cases[i].check, cases[i].name, result.fix);
        made_done(&made);
    }
    for (size_t i = 0; i < sizeof(safe) / sizeof(safe[0]); i++) {
        struct doctor_result result = result_of(&made, safe[i].check, safe[i].change);

        assert_true(result.fix_is_safe);
        assert_string_equal(result.fix, safe[i].fix);
        made_done(&made);
    }
}

static void assert_severity(const char *check, void (*change)(struct made *made), enum doctor_severity severity)
{
    static struct made made;
    struct doctor_result result = result_of(&made, check, change);

    assert_int_equal(result.outcome, DOCTOR_FOUND);
    assert_int_equal(result.severity, severity);
    made_done(&made);
}

static void test_severity_is_earned(void **state)
{
    (void)state;
    assert_severity("gpu-errors", ecc, DOCTOR_ERROR);
    assert_severity("gpu-errors", remap_pending, DOCTOR_WARNING);
    assert_severity("gpu-errors", xid_of_this_boot_in_a_file, DOCTOR_WARNING);
    assert_severity("gpu-errors", xid, DOCTOR_ERROR);
    assert_severity("memlock", locked_8_mib, DOCTOR_ERROR);
    assert_severity("memlock", locked_512_mib, DOCTOR_WARNING);
    assert_severity("shm", shm_64_mib, DOCTOR_ERROR);
    assert_severity("shm", shm_512_mib, DOCTOR_WARNING);
    assert_severity("gid", no_ipv4, DOCTOR_ERROR);
    assert_severity("gid", ipv6_only, DOCTOR_WARNING);
    assert_severity("slow-link", half_rate, DOCTOR_ERROR);
    assert_severity("slow-link", narrow_gpu, DOCTOR_WARNING);
    assert_severity("visible-devices", permuted_with_mapping, DOCTOR_WARNING);
    assert_severity("visible-devices", uuid_with_mapping, DOCTOR_ERROR);
    assert_severity("acs", acs_redirects, DOCTOR_WARNING);
    assert_severity("affinity", rank_bound_badly, DOCTOR_WARNING);
}

/* Xids of one kind are counted, and named for the GPU at their address. */
static void test_xids_are_counted(void **state)
{
    static struct made made;
    struct doctor_result result = result_of(&made, "gpu-errors", xid);

    (void)state;
    assert_int_equal(result.n_evidence, 1);
    assert_non_null(strstr(result.evidence[0].what, "2 x NVRM: Xid (PCI:0000:05:00): 79"));
    made_done(&made);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_case_ends_as_it_should),
        cmocka_unit_test(test_a_fault_is_of_one_check),
        cmocka_unit_test(test_fixes_that_are_safe),
        cmocka_unit_test(test_severity_is_earned),
        cmocka_unit_test(test_xids_are_counted),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

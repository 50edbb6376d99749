/* SPDX-License-Identifier: Apache-2.0 */
/* doctor_cases_driver.c - checks of the driver and of GPUs. */
#include "doctor_cases.h"

/* --- driver --- */

CHANGE(no_peermem, made->software.driver.peermem = SOURCE_ABSENT)
CHANGE(neither_peermem_nor_dmabuf, made->software.driver.peermem = made->software.driver.dmabuf = SOURCE_ABSENT)

static void dmabuf_not_known(struct made *made)
{
    made->software.driver.peermem = SOURCE_ABSENT;
    made->software.driver.dmabuf = SOURCE_NOT_RECORDED;
}

static void peermem_hidden(struct made *made)
{
    made->software.driver.peermem = SOURCE_DENIED;
    made->software.driver.dmabuf = SOURCE_ABSENT;
}

static struct software_option *option(struct made *made)
{
    return &made->software.driver.peer_mapping_override;
}

static void option_live_as_hexadecimal(struct made *made)
{
    option(made)->configured = "1";
    option(made)->configured_in = "/etc/modprobe.d/a.conf";
    option(made)->live = "0x1";
}

CHANGE_OF(option_not_live, option_live_as_hexadecimal, option(made)->live = "")
CHANGE_OF(option_live_not_known, option_not_live, made_state(made, "files", "/proc/driver/nvidia/params", "denied"))

static void option_overruled(struct made *made)
{
    option(made)->overruled = "1";
    option(made)->overruled_in = "/etc/modprobe.d/a.conf";
}

static void old_doca(struct made *made)
{
    made->software.driver.doca = "3.0.0-058000";
    made->software.driver.kernel = "6.14.0-1021-gcp";
}

#define MODULES "/lib/modules/6.14.0-1021-gcp"

static void old_doca_not_built(struct made *made)
{
    old_doca(made);
    made_folder(made, MODULES "/updates/dkms", json_pack("[s]", "nvidia.ko"));
    made_file(made, MODULES "/modules.dep",
              "kernel/drivers/net/ethernet/mellanox/mlx5/core/mlx5_core.ko.zst: kernel/drivers/net/mlxfw.ko.zst\n"
              "updates/dkms/nvidia.ko: kernel/drivers/net/ethernet/mellanox/mlx5/core/mlx5_core.ko.zst\n");
}

static void old_doca_built_as_packages(struct made *made)
{
    old_doca_not_built(made);
    made_file(
        made, MODULES "/modules.dep",
        "kernel/a.ko:\nextra/mlnx-ofa_kernel/drivers/net/ethernet/mellanox/mlx5/core/mlx5_core.ko.xz: kernel/a.ko\n");
}

CHANGE_OF(old_doca_loaded, old_doca_not_built, made_file(made, "/sys/module/mlx5_core/version", "25.04-0.6.1\n"))

static void old_doca_module_of_the_kernel(struct made *made)
{
    old_doca_not_built(made);
    made_file(made, "/sys/module/mlx5_core/version", "6.14.0-1021-gcp\n");
}

static void old_doca_without_modules(struct made *made)
{
    old_doca(made);
    made_state(made, "files", MODULES "/modules.dep", "absent");
    made_state(made, "folders", MODULES "/updates/dkms", "absent");
    made_state(made, "folders", MODULES, "absent");
}

CHANGE_OF(old_doca_nothing_of_it, old_doca_without_modules, made_folder(made, MODULES, json_pack("[s]", "kernel")))

static void old_doca_but_built(struct made *made)
{
    old_doca(made);
    made_folder(made, "/lib/modules/6.14.0-1021-gcp/updates/dkms", json_pack("[s]", "mlx5_core.ko.zst"));
}

CHANGE_OF(old_doca_old_kernel, old_doca_not_built, made->software.driver.kernel = "6.8.0-87-generic")
CHANGE_OF(new_doca, old_doca_not_built, made->software.driver.doca = "3.2.1-044000")
CHANGE_OF(kernel_not_known, old_doca, made->software.driver.kernel = "")
CHANGE(module_of_another_version, made->software.driver.module_version = "570.124.06")
CHANGE(package_of_another_version, made->software.driver.installed_version = "580.140.02-1ubuntu1")
CHANGE(package_revision, made->software.driver.installed_version = "580.126.09-1ubuntu1")

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

CHANGE_OF(driver_version_hidden, no_driver, made_state(made, "files", "/proc/driver/nvidia/version", "denied"))
CHANGE_OF(grace_passthrough, grace, made_file(made, "/proc/cmdline", "ro iommu.passthrough=1 quiet\n"))
CHANGE_OF(grace_without_command_line, grace, made_state(made, "files", "/proc/cmdline", "failed"))

static void grace_by_device_number(struct made *made)
{
    rename_gpus(made, "");
    for (int i = 0; i < 4; i++)
        gpu_pci(made, i)->device = 0x2941;
    made_file(made, "/proc/cmdline", "ro iommu.passthrough=1 quiet\n");
}

CHANGE(x86_passthrough, made_file(made, "/proc/cmdline", "ro iommu=pt\n"))
CHANGE(ecc, gpu(made, 2)->ecc_uncorrected = 3)
CHANGE(ecc_not_known, gpu(made, 2)->ecc_uncorrected = gpu(made, 2)->remap_pending = gpu(made, 2)->remap_failed = -1)
CHANGE(remap_pending, gpu(made, 1)->remap_pending = 1)

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

CHANGE(xid_damaged, made_lines(made, "/dev/kmsg", "NVRM: Xid",
                               "NVRM: Xid\nNVRM: Xid (\nNVRM: Xid (PCI:0000:03:00\nNVRM: Xid (PCI:0000:03:00):\n"
                               "NVRM: Xid (PCI:0000:03:00): x\nNVRM: Xid (PCI:0000:03:00): 99999999999\n"
                               "NVRM: Xid (PCI:00000000000000000000000000000000000000000000000000000000): 79\n"))

#define RECOVERY(from, to) "): 154, GPU recovery action changed from " from " to " to "\n"

CHANGE(xid_recovered,
       made_lines(made, "/dev/kmsg", "NVRM: Xid",
                  "NVRM: Xid (PCI:0000:01:00): 95, pid=1, Uncontained\n"
                  "NVRM: Xid (PCI:0000:01:00" RECOVERY(
                      "0x0 (None)",
                      "0x1 (GPU Reset Required)") "NVRM: Xid (PCI:0000:01:00" RECOVERY("0x1 (GPU Reset Required)",
                                                                                       "0x0 (None)")))
CHANGE(xid_recovered_on_another,
       made_lines(made, "/dev/kmsg", "NVRM: Xid",
                  "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n"
                  "NVRM: Xid (PCI:0000:03:00" RECOVERY("0x1 (GPU Reset Required)", "0x0 (None)")))
CHANGE(xid_after_a_recovery,
       made_lines(made, "/dev/kmsg", "NVRM: Xid",
                  "NVRM: Xid (PCI:0000:01:00" RECOVERY(
                      "0x1 (GPU Reset Required)",
                      "0x0 (None)") "NVRM: Xid (PCI:0000:01:00" RECOVERY("0x0 (None)", "0x1 (GPU Reset Required)")))

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

CHANGE_OF(ecc_although_log_hidden, log_hidden, ecc(made))
CHANGE(links_down, gpu(made, 3)->nvlinks_up = 16)

static void all_links_down(struct made *made)
{
    for (int i = 0; i < 4; i++)
        gpu(made, i)->nvlinks_up = 0;
}

CHANGE(fabric_failed, gpu(made, 1)->fabric = TOPO_FABRIC_FAILED)
CHANGE_OF(cards_without_bridges, all_links_down, rename_gpus(made, "NVIDIA H100 PCIe"))

static void cards_of_any_name_without_bridges(struct made *made)
{
    all_links_down(made);
    rename_gpus(made, "NVIDIA A40");
    for (int i = 0; i < 4; i++)
        gpu(made, i)->fabric = TOPO_FABRIC_NONE;
}

static void boards_behind_switches(struct made *made)
{
    rename_gpus(made, "NVIDIA of a name to come");
    for (int i = 0; i < 4; i++)
        gpu(made, i)->fabric = TOPO_FABRIC_NONE;
    gpu(made, 0)->nvlinks_switch = 18;
    gpu(made, 3)->nvlinks_up = 4;
}

static void a_card_with_a_loose_bridge(struct made *made)
{
    rename_gpus(made, "NVIDIA H100 NVL");
    gpu(made, 0)->nvlinks_up = 0;
}

static void one_gpu_of_board(struct made *made)
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

CHANGE_OF(bus_hidden, no_gpus, made_state(made, "folders", "/sys/bus/pci/devices", "denied"))

static void unreadable_devices(struct made *made)
{
    no_gpus(made);
    made_folder(made, "/sys/bus/pci/devices", json_pack("[s, s]", "0000:00:00.0", "0000:00:01.0"));
    made_file(made, "/sys/bus/pci/devices/0000:00:00.0/vendor", "0x8086\n");
    made_file(made, "/sys/bus/pci/devices/0000:00:01.0/vendor", "");
}

CHANGE_OF(rdma_hidden, no_nics, made_state(made, "folders", "/sys/class/infiniband", "failed"))

static void rdma_devices_that_lead_nowhere(struct made *made)
{
    no_nics(made);
    made_folder(made, "/sys/class/infiniband", json_pack("[s]", "mlx5_0"));
}

CHANGE_OF(driver_hidden, no_driver, made_state(made, "files", "/proc/driver/nvidia/version", "denied"))

/* --- the table --- */

static const struct doctor_case rows[] = {
    CASE("peermem", nothing, OK, ""),
    CASE("peermem", no_gpus, ABSENT, "no NVIDIA GPU"),
    CASE("peermem", no_nics, ABSENT, "no RDMA NIC"),
    CASE("peermem", no_driver, ABSENT, "driver is not loaded"),
    CASE("peermem", bus_hidden, UNKNOWN, "/sys/bus/pci/devices"),
    CASE("peermem", unreadable_devices, UNKNOWN, "1 of 2 PCI devices"),
    CASE("peermem", rdma_hidden, UNKNOWN, "/sys/class/infiniband"),
    CASE("peermem", rdma_devices_that_lead_nowhere, UNKNOWN, "1 of 1"),
    CASE("peermem", all_states_unreadable, UNKNOWN, "is not known"),
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
    CASE("doca-kernel", old_doca, UNKNOWN, "the snapshot does not say"),
    CASE("doca-kernel", old_doca_built_as_packages, OK, ""),
    CASE("doca-kernel", old_doca_loaded, OK, ""),
    CASE("doca-kernel", old_doca_module_of_the_kernel, FOUND, "3.0.0"),
    CASE("doca-kernel", old_doca_without_modules, UNKNOWN, "not in this file system"),
    CASE("doca-kernel", old_doca_nothing_of_it, FOUND, "3.0.0"),
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
    CASE("driver-skew", nouveau_drives_gpus, FOUND, "4 GPUs are driven by nouveau"),
    CASE("driver-skew", driver_version_hidden, UNKNOWN, "made so"),

    CASE("iommu-gb200", nothing, ABSENT, "no board with Grace"),
    CASE("iommu-gb200", x86_passthrough, ABSENT, "no board with Grace"),
    CASE("iommu-gb200", grace, OK, ""),
    CASE("iommu-gb200", grace_passthrough, FOUND, "iommu.passthrough=1"),
    CASE("iommu-gb200", grace_by_device_number, FOUND, "iommu.passthrough=1"),
    CASE("iommu-gb200", grace_without_command_line, UNKNOWN, "/proc/cmdline"),

    CASE("gpu-errors", nothing, OK, ""),
    CASE("gpu-errors", ecc, FOUND, "GPU 2 (0000:0d:00.0): uncorrected ECC"),
    CASE("gpu-errors", ecc_not_known, OK, ""),
    CASE("gpu-errors", remap_pending, FOUND, "GPU 1"),
    CASE("gpu-errors", xid, FOUND, "Xid 79"),
    CASE("gpu-errors", xid_of_a_program, OK, ""),
    CASE("gpu-errors", xid_damaged, OK, ""),
    CASE("gpu-errors", xid_recovered, OK, ""),
    CASE("gpu-errors", xid_recovered_on_another, FOUND, "Xid 79"),
    CASE("gpu-errors", xid_after_a_recovery, FOUND, "Xid 154 (GPU Reset Required)"),
    CASE("gpu-errors", log_hidden, UNKNOWN, "/dev/kmsg"),
    CASE("gpu-errors", ecc_although_log_hidden, FOUND, "ECC"),
    CASE("gpu-errors", xid_of_an_earlier_boot, OK, ""),
    CASE("gpu-errors", xid_of_this_boot_in_a_file, FOUND, "Xid 63"),
    CASE("gpu-errors", nvml_silent, UNKNOWN, "no answer within"),

    CASE("nvlink", nothing, OK, ""),
    CASE("nvlink", links_down, FOUND, "2 of 18 NVLinks of GPU 3"),
    CASE("nvlink", all_links_down, FOUND, "4 of 4 GPUs"),
    CASE("nvlink", fabric_failed, FOUND, "failed"),
    CASE("nvlink", cards_without_bridges, ABSENT, "need a bridge"),
    CASE("nvlink", cards_of_any_name_without_bridges, ABSENT, "need a bridge"),
    CASE("nvlink", boards_behind_switches, FOUND, "GPU 3"),
    CASE("nvlink", a_card_with_a_loose_bridge, FOUND, "GPU 0"),
    CASE("nvlink", one_gpu_of_board, ABSENT, "single GPU"),
    CASE("nvlink", no_nvlink, ABSENT, "without NVLink"),
    CASE("nvlink", nvml_silent, UNKNOWN, "NVML"),
    CASE("nvlink", grace_fabric_starting, OK, ""),
};

const struct doctor_case *doctor_cases_driver(size_t *ret_n)
{
    *ret_n = sizeof(rows) / sizeof(rows[0]);
    return rows;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Commands in findings of driver and topology: right for the operating system, and safe to paste. */
#include "doctor_cases.h"

static struct made made;

/* Runs one check on the healthy machine after `change`; texts live until made_done(). */
static struct doctor_result result_of(const char *check, void (*change)(struct made *made))
{
    struct doctor_result result;

    made_init(&made);
    change(&made);
    made_open(&made);
    doctor_run(&made.doctor, doctor_find(check), &result);
    assert_int_equal(result.outcome, DOCTOR_FOUND);
    return result;
}

static void assert_has(const char *text, const char *part)
{
    if (!strstr(text, part))
        fail_msg("no '%s' in '%s'", part, text);
}

static void assert_has_not(const char *text, const char *part)
{
    if (strstr(text, part))
        fail_msg("'%s' in '%s'", part, text);
}

static enum os_family family;
static bool in_container;

static void of_os(struct made *m)
{
    m->software.os.family = family;
    m->software.os.in_container = in_container;
}

/* --- driver options --- */

static void not_live(struct made *m)
{
    of_os(m);
    m->software.driver.peer_mapping_override = (struct software_option){"1", "/etc/modprobe.d/a.conf", "", "", ""};
}

static void overruled(struct made *m)
{
    of_os(m);
    m->software.driver.peer_mapping_override =
        (struct software_option){"", "/etc/modprobe.d/zz site.conf", "1", "/etc/modprobe.d/a.conf", ""};
    m->software.driver.dwords_with_override = "RMx=0x0;PeerMappingOverride=1;";
}

static void overruled_by_a_package(struct made *m)
{
    overruled(m);
    m->software.driver.peer_mapping_override.configured_in = "/lib/modprobe.d/zz.conf";
}

static void overruled_by_the_command_line(struct made *m)
{
    overruled(m);
    m->software.driver.peer_mapping_override.configured_in = "/proc/cmdline";
}

TEST(options_come_into_effect_by_family)
{
    static const struct {
        enum os_family family;
        bool in_container;
        const char *fix, *advice;
    } rows[] = {
        {OS_DEBIAN, false, "sudo update-initramfs -u\nsudo reboot", "without sudo update-initramfs -u"},
        {OS_RHEL, false, "sudo dracut --force\nsudo reboot", "without sudo dracut"},
        {OS_SUSE, false, "sudo dracut --force\nsudo reboot", "without sudo dracut"},
        {OS_OSTREE, false, "", "driver.kernelModuleConfig"},
        {OS_COS, false, "", "--module-arg"},
        {OS_OTHER, false, "", "rebuild the initramfs"},
        {OS_DEBIAN, true, "", "On the node, not in this container"},
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct doctor_result result;

        family = rows[i].family;
        in_container = rows[i].in_container;
        result = result_of("driver-option", not_live);
        assert_string_equal(result.fix, rows[i].fix);
        assert_has(result.advice, rows[i].advice);
        made_done(&made);
    }
}

/* The effective line keeps its other options; a second line would replace it, or be replaced by it. */
TEST(options_are_merged)
{
    struct doctor_result result;

    family = OS_DEBIAN;
    in_container = false;
    result = result_of("driver-option", overruled);
    assert_string_equal(result.fix, "sudoedit '/etc/modprobe.d/zz site.conf'\nsudo update-initramfs -u\nsudo reboot");
    assert_has(result.advice, "zz site.conf");
    assert_has(result.advice, "NVreg_RegistryDwords=\"RMx=0x0;PeerMappingOverride=1;\"");
    made_done(&made);
    result = result_of("driver-option", overruled_by_a_package);
    assert_has(result.fix, "sudo cp /lib/modprobe.d/zz.conf /etc/modprobe.d/\nsudoedit /etc/modprobe.d/zz.conf\n");
    made_done(&made);
    result = result_of("driver-option", overruled_by_the_command_line);
    assert_string_equal(result.fix, "");
    assert_has(result.advice, "nvidia.NVreg_RegistryDwords=\"RMx=0x0;PeerMappingOverride=1;\" to GRUB_CMDLINE_LINUX");
    made_done(&made);
    /* Names are quoted as one word of a shell. */
    family = OS_RHEL;
    result = result_of("driver-option", overruled_by_the_command_line);
    assert_has(result.advice, "--args='nvidia.NVreg_RegistryDwords=\"RMx=0x0;PeerMappingOverride=1;\"', then reboot");
    made_done(&made);
    family = OS_DEBIAN;
    in_container = true;
    result = result_of("driver-option", overruled);
    assert_string_equal(result.fix, "");
    assert_has(result.advice, "RMx=0x0;PeerMappingOverride=1;");
    made_done(&made);
}

/* --- kernel arguments --- */

static void passthrough(struct made *m)
{
    of_os(m);
    grace(m);
    made_file(m, "/proc/cmdline", "ro iommu.passthrough=1 quiet\n");
}

static void translates(struct made *m)
{
    of_os(m);
    made_folder(m, "/sys/kernel/iommu_groups", json_pack("[s]", "7"));
    made_folder(m, "/sys/kernel/iommu_groups/7/devices", json_pack("[s]", gpu_pci(m, 0)->address));
    made_file(m, "/sys/kernel/iommu_groups/7/type", "DMA-FQ\n");
}

TEST(kernel_arguments_by_family)
{
    in_container = false;
    family = OS_RHEL;
    assert_has(result_of("iommu", translates).advice, "grubby --update-kernel=ALL --args=iommu=pt");
    made_done(&made);
    assert_has(result_of("iommu-gb200", passthrough).advice, "--remove-args=iommu.passthrough=1");
    made_done(&made);
    family = OS_DEBIAN;
    assert_has(result_of("iommu-gb200", passthrough).advice, "out of GRUB_CMDLINE_LINUX in /etc/default/grub (and");
    made_done(&made);
    in_container = true;
    assert_has(result_of("iommu", translates).advice, "On the node, not in this container: add iommu=pt");
    made_done(&made);
}

/* --- shared memory --- */

static void small_shm(struct made *m)
{
    of_os(m);
    made_file(m, "/proc/self/mounts", "/dev/root / ext4 rw 0 0\nshm /dev/shm tmpfs rw,size=65536k 0 0\n");
}

/* --fix remounts it only on a host: the limit of a container is intended. */
TEST(shm_is_remounted_on_hosts_only)
{
    struct doctor_result result;

    in_container = false;
    result = result_of("shm", small_shm);
    assert_has(result.fix, "sudo mount -o remount,size=");
    assert_true(result.fix_is_safe);
    made_done(&made);
    in_container = true;
    result = result_of("shm", small_shm);
    assert_string_equal(result.fix, "");
    assert_false(result.fix_is_safe);
    assert_has(result.advice, "--shm-size=16g");
    made_done(&made);
}

/* --- GPUs --- */

static void fallen_off(struct made *m)
{
    made_lines(m, "/dev/kmsg", "NVRM: Xid", "");
    made_state(m, "lines", "/dev/kmsg\tNVRM: Xid", "denied");
    made_lines(m, "/var/log/kern.log", "NVRM: ",
               "2026-01-01T00:10:00.5+00:00 node7 kernel: NVRM: Xid (PCI:0000:01:00): 79, pid=1\n"
               "Nov 21 12:00:00 node7 kernel: NVRM: Xid (PCI:0000:01:00): 48, pid=1\n"
               "[  12.345678] NVRM: Xid (PCI:0000:01:00): 95, pid=1\n"
               "node7 NVRM: Xid (PCI:0000:01:00): 119, pid=1\n");
}

static void reboot_wanted(struct made *m)
{
    made_lines(m, "/dev/kmsg", "NVRM: Xid",
               "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot "
               "Required)\n");
}

/* The finding shows the time of the line, and says that the line remains after the advised reset. */
TEST(lines_of_the_log_stay)
{
    struct doctor_result result;

    result = result_of("gpu-errors", fallen_off);
    assert_int_equal(result.n_evidence, 4);
    assert_has(result.evidence[0].what, "1 x 2026-01-01T00:10:00.5+00:00 NVRM: Xid");
    assert_has(result.evidence[1].what, "1 x Nov 21 12:00:00 NVRM: Xid");
    assert_has(result.evidence[2].what, "1 x [  12.345678] NVRM: Xid");
    assert_has(result.evidence[3].what, "1 x NVRM: Xid");
    assert_has(result.advice, "until the next reboot");
    made_done(&made);
    result = result_of("gpu-errors", reboot_wanted);
    assert_int_equal(result.severity, DOCTOR_WARNING);
    assert_string_equal(result.fix, "sudo reboot");
    made_done(&made);
}

static void loose_bridge(struct made *m)
{
    rename_gpus(m, "NVIDIA A40");
    for (int i = 0; i < 4; i++)
        gpu(m, i)->fabric = TOPO_FABRIC_NONE;
    gpu(m, 0)->nvlinks_up = gpu(m, 1)->nvlinks_up = 0;
}

/* Cards may intentionally have no bridge. */
TEST(a_bridge_may_be_missing)
{
    struct doctor_result result = result_of("nvlink", loose_bridge);

    assert_int_equal(result.severity, DOCTOR_WARNING);
    assert_string_equal(result.fix, "");
    made_done(&made);
}

/* --- hostile names --- */

#define EVIL "$(reboot);'x"

static void evil_processors(struct made *m)
{
    made_env(m, "LOCAL_RANK=0");
    made_file(m, "/proc/self/status", "Cpus_allowed_list:\t4-7\n");
    gpu_pci(m, 0)->local_cpus = "0-3;reboot";
}

static void evil_bridge(struct made *m)
{
    static unsigned char config[0x110];
    int bridge = gpu_pci(m, 0)->parent;
    char path[128];

    config[0x100] = 0x0d;
    config[0x102] = 1;
    config[0x106] = 0x1d;
    snprintf(m->hardware.pci[bridge].address, sizeof(m->hardware.pci[bridge].address), "%s", EVIL);
    snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/config", EVIL);
    made_bytes(m, path, config, sizeof(config));
}

static void evil_port(struct made *m)
{
    for (int i = 0; i < 4; i++) {
        nic(m, i)->role = TOPO_ROLE_DOWN;
        nic(m, i)->ports[0].active = false;
        nic(m, i)->ports[0].state = "DOWN";
    }
    nic(m, 0)->name = EVIL;
}

static void evil_layer(struct made *m)
{
    nic(m, 2)->ports[0].link_layer = TOPO_LINK_INFINIBAND;
    snprintf(nic_pci(m, 2)->address, sizeof(nic_pci(m, 2)->address), "%s", EVIL);
}

static void reset_in_a_container(struct made *m)
{
    of_os(m);
    reboot_wanted(m);
}

static void updated_driver(struct made *m)
{
    of_os(m);
    m->software.driver.module_version = "570.124.06";
}

static void fabric_off(struct made *m)
{
    of_os(m);
    gpu(m, 1)->fabric = TOPO_FABRIC_FAILED;
    m->software.driver.fabric_manager = m->software.driver.version;
}

static void no_peermem(struct made *m)
{
    of_os(m);
    m->software.driver.peermem = m->software.driver.dmabuf = SOURCE_ABSENT;
}

/* In a container, no command is given for what belongs to the node. */
TEST(the_node_is_not_the_container)
{
    static const struct {
        const char *check;
        void (*change)(struct made *m);
    } rows[] = {{"gpu-errors", reset_in_a_container}, {"driver-skew", updated_driver}, {"nvlink", fabric_off}};

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        in_container = false;
        assert_true(*result_of(rows[i].check, rows[i].change).fix);
        made_done(&made);
        in_container = true;
        assert_string_equal(result_of(rows[i].check, rows[i].change).fix, "");
        made_done(&made);
    }
    assert_false(result_of("peermem", no_peermem).fix_is_safe);
    made_done(&made);
    in_container = false;
    assert_true(result_of("peermem", no_peermem).fix_is_safe);
    made_done(&made);
}

TEST(names_are_quoted)
{
    assert_has(result_of("port-down", evil_port).advice, "mlxlink -d '$(reboot);'\\''x' -m");
    made_done(&made);
    assert_has(result_of("link-layer", evil_layer).fix, "mlxconfig -d '$(reboot);'\\''x' set");
    made_done(&made);
    assert_string_equal(result_of("acs", evil_bridge).fix, "sudo setpci -s '$(reboot);'\\''x' ECAP_ACS+0x6.w=0000");
    made_done(&made);
    /* topo_parse_cpus() rejects text that is not a list, so none of it reaches a command. */
    made_init(&made);
    evil_processors(&made);
    made_open(&made);
    {
        struct doctor_result result;

        doctor_run(&made.doctor, doctor_find("affinity"), &result);
        assert_int_equal(result.outcome, DOCTOR_UNKNOWN);
        assert_has_not(result.text, "reboot");
    }
    made_done(&made);
}

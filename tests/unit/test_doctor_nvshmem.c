/* SPDX-License-Identifier: Apache-2.0 */
/* The checks of the groups nvshmem and nccl, on a synthetic machine: each case yields its finding and no other. */
#include "advised.h"
#include "machine/doctor/checks.h"

static const struct doctor_check *const checks[] = {
    &check_one_nic,         &check_shared_nic, &check_nic_handler,  &check_two_nvshmem,
    &check_ibgda_transport, &check_gdrcopy,    &check_home,         &check_hca_prefix,
    &check_void_variables,  &check_net_plugin, &check_gib_settings, &check_two_nccl,
};

#define N_CHECKS (sizeof(checks) / sizeof(checks[0]))
#define TORCH "/usr/lib/python3/dist-packages/nvidia"

static struct advised advised;

static void put_host(const char *path)
{
    tree_put(&advised.tree, path, "");
}

static void map_files(const char *a, const char *b)
{
    char text[512];

    snprintf(text, sizeof(text),
             "7f0000000000-7f0000001000 r-xp 00000000 08:01 1 %s\n7f0000002000-7f0000003000 r-xp 00000000 08:01 2 %s\n",
             a, b);
    tree_put(&advised.tree, "/proc/self/maps", text);
}

/* --- what cases change --- */

static void two_mapped(void)
{
    map_files(ADVISED_NVSHMEM "/lib/libnvshmem_host.so.3.5.19", TORCH "/nvshmem/lib/libnvshmem_host.so.3");
}

CHANGE(two_nccl_mapped, map_files("/usr/lib/libnccl.so.2.21.5", TORCH "/nccl/lib/libnccl.so.2"))

static void bundle(void)
{
    put_host(ADVISED_NVSHMEM "/lib/libnvshmem_host.so.3");
    advised.software.nvshmem.bundled = TORCH "/nvshmem/lib/libnvshmem_host.so.3";
    advised.software.nvshmem.bundled_version = "3.4.5";
}

CHANGE_OF(bundle_and_mapped, bundle, map_files(ADVISED_NVSHMEM "/lib/libnvshmem_host.so.3", "/usr/lib/libc.so.6"))
CHANGE(preload_there, put_host("/proc/libnvshmem_host.so.3"))
CHANGE(option_off, advised.software.driver.peer_mapping_override.live = "0")

static void option_configured(void)
{
    advised.software.driver.peer_mapping_override = (struct software_option){"1", "/etc/modprobe.d/x.conf", "", "", ""};
}

static void no_params(void)
{
    char path[PATH_MAX];

    tree_path(&advised.tree, "/proc/driver/nvidia/params", path);
    unlink(path);
    option_off();
}

static void gdrcopy(void)
{
    advised.software.nvshmem.gdrapi.state = SOURCE_OK;
    advised.software.driver.gdrdrv = SOURCE_OK;
    tree_put(&advised.tree, "/dev/gdrdrv", "");
}

static void gdrcopy_without_its_device(void)
{
    char path[PATH_MAX];

    gdrcopy();
    tree_path(&advised.tree, "/dev/gdrdrv", path);
    unlink(path);
}

CHANGE(no_transport, advised.software.nvshmem.transport_ibgda = "")

static void mapping_active(void)
{
    advised.software.deepep.n = 1;
    advised.software.deepep.imported = 0;
    advised.software.deepep.mapping_active = true;
    advised.software.deepep.copies[0] =
        (struct software_copy){.folder = "/opt/x/python/deep_ep", .version = "", .extension = "", .on_path = true};
}

CHANGE_OF(mapping_inactive, mapping_active, advised.software.deepep.mapping_active = false)

static void mapping_and_dead_port(void)
{
    mapping_active();
    advised.hardware.nics[2].ports[0].active = false;
    advised.hardware.nics[2].role = TOPO_ROLE_DOWN;
}

static void other_names(void)
{
    for (int i = 0; i < 4; i++)
        snprintf(advised.hardware.names[i], sizeof(advised.hardware.names[i]), "rocep%ds0", 140 + i);
}

/* A shell without variables, on a node where Python finds DeepEP, which enables IBGDA. */
CHANGE_OF(deepep_and_bundle, mapping_active, bundle())
CHANGE_OF(deepep_and_other_names, mapping_active, other_names())

/* An extension that was built for one node, without NVSHMEM. */
static void deepep_without_nvshmem(void)
{
    deepep_and_bundle();
    advised.software.deepep.copies[0].extension = "/opt/x/python/deep_ep_cpp.so";
    tree_put(&advised.tree, "/" SOURCE_OVERLAY,
             "{\"epkit_snapshot\": 1, \"elf\": {\"/opt/x/python/deep_ep_cpp.so\": {\"needed\": [\"libc.so.6\"]}}}");
}

static void efa(void)
{
    mapping_active();
    for (int i = 0; i < 4; i++) {
        snprintf(advised.hardware.names[i], sizeof(advised.hardware.names[i]), "rdmap%ds0", 140 + i);
        advised.hardware.pci[advised.hardware.nics[i].pci].vendor = 0x1d0f;
        advised.hardware.nics[i].ports[0].link_layer = TOPO_LINK_UNKNOWN;
    }
    option_off();
    no_transport();
}

CHANGE(one_other_name, snprintf(advised.hardware.names[3], sizeof(advised.hardware.names[3]), "rocep143s0"))
CHANGE(one_gpu, advised.hardware.topo.n_gpus = 1)

static void gib(void)
{
    advised.software.nccl.gib = "/usr/local/gib";
    advised.software.nccl.plugin = (struct lib_location){SOURCE_OK, "/usr/local/gib/lib64/libnccl-net.so",
                                                         "/usr/local/gib/lib64/libnccl-net.so", "LD_LIBRARY_PATH"};
    advised.software.nccl.plugin_name = "libnccl-net.so";
}

static void gib_does_not_load(void)
{
    gib();
    tree_put(&advised.tree, "/" SOURCE_OVERLAY,
             "{\"epkit_snapshot\": 1, \"answers\": {\"load:/usr/local/gib/lib64/libnccl-net.so\": {\"value\": {\"ok\": "
             "false, \"error\": \"libprotobuf.so.32: cannot open shared object file\"}}}}");
}

/* Reported by the group verbs. */
static void gib_meets_other_verbs(void)
{
    gib();
    tree_put(&advised.tree, "/" SOURCE_OVERLAY,
             "{\"epkit_snapshot\": 1, \"answers\": {\"load:/usr/local/gib/lib64/libnccl-net.so\": {\"value\": {\"ok\": "
             "false, \"error\": \"libmlx5.so.1: version `IBVERBS_PRIVATE_34' not found\"}}}}");
}

static void transport_crashes(void)
{
    tree_put(&advised.tree, "/" SOURCE_OVERLAY,
             "{\"epkit_snapshot\": 1, \"answers\": {\"load:" ADVISED_NVSHMEM
             "/lib/nvshmem_transport_ibgda.so.3\": {\"state\": \"failed\", \"why\": \"killed by signal 11\"}}}");
}

/* Reported by no other check. */
static void gib_without_libibverbs(void)
{
    gib();
    advised.software.verbs.ibverbs.state = SOURCE_OK;
    tree_put(&advised.tree, "/" SOURCE_OVERLAY,
             "{\"epkit_snapshot\": 1, \"answers\": {\"load:/usr/local/gib/lib64/libnccl-net.so\": {\"value\": {\"ok\": "
             "false, \"error\": \"libibverbs.so.1: cannot open shared object file\"}}}}");
}

CHANGE(no_plugin, advised.software.nccl.plugin_name = "libnccl-net.so")

static void torch_nccl(void)
{
    advised.software.nccl.bundled = TORCH "/nccl/lib/libnccl.so.2";
    advised.software.nccl.bundled_version = "2.27.5";
    tree_put(&advised.tree, "/opt/nccl/lib/libnccl.so.2.21.5", "");
    tree_link(&advised.tree, "/opt/nccl/lib/libnccl.so.2", "libnccl.so.2.21.5");
    tree_put(&advised.tree, "/opt/same/lib/libnccl.so.2.27.5", "");
    tree_link(&advised.tree, "/opt/same/lib/libnccl.so.2", "libnccl.so.2.27.5");
}

#define IBGDA "NVSHMEM_IB_ENABLE_IBGDA=1"
#define ONE "NVSHMEM_HCA_LIST=mlx5_0"
#define GOOD "DEEP_EP_DEVICE_TO_HCA_MAPPING=0:mlx5_0:1,1:mlx5_1:1,2:mlx5_2:1,3:mlx5_3:1"

/* "id: text" for a finding, "?id: text" for an unknown result, "" for neither */
static const struct {
    const char *settings[4];
    void (*change)(void);
    const char *said;
} cases[] = {
    {{NULL}, NULL, ""},
    {{GOOD, IBGDA}, mapping_active, ""},
    {{IBGDA}, one_gpu, ""},
    /* one-nic */
    {{"NVSHMEM_ENABLE_NIC_PE_MAPPING=1"}, NULL, "one-nic: all 4 GPUs take one NIC, mlx5_0, because"},
    {{"NVSHMEM_ENABLE_NIC_PE_MAPPING=1", IBGDA}, NULL, "one-nic: all 4 GPUs"},
    {{"NVSHMEM_ENABLE_NIC_PE_MAPPING=1", GOOD},
     mapping_active,
     "one-nic: all 4 GPUs take one NIC, mlx5_0, in every program"},
    {{"NVSHMEM_ENABLE_NIC_PE_MAPPING=1", "DEEP_EP_DEVICE_TO_HCA_MAPPING=x"},
     mapping_active,
     "one-nic: all 4 GPUs take one NIC, mlx5_0, because+shared-nic: DEEP_EP_DEVICE_TO_HCA_MAPPING does not fit"},
    {{"NVSHMEM_ENABLE_NIC_PE_MAPPING=1", "NVSHMEM_HCA_LIST=mlx5_2,mlx5_3"},
     NULL,
     "one-nic: all 4 GPUs take one NIC, mlx5_2"},
    {{"NVSHMEM_ENABLE_NIC_PE_MAPPING=1", "NVSHMEM_HCA_LIST=mlx5_2:1"}, NULL, ""},
    {{"NVSHMEM_ENABLE_NIC_PE_MAPPING=0"}, NULL, ""},
    {{"NVSHMEM_ENABLE_NIC_PE_MAPPING=1"}, one_gpu, ""},
    /* shared-nic */
    {{IBGDA}, NULL, "shared-nic: GPUs 0 and 1 share mlx5_0 while mlx5_1 is idle"},
    {{IBGDA, "NVSHMEM_HCA_LIST=mlx5_1:1"}, NULL, ""},
    {{IBGDA, GOOD}, mapping_inactive, ""},
    {{NULL}, mapping_active, "shared-nic: GPUs 0 and 1 share mlx5_0 while mlx5_1 is idle"},
    {{NULL}, mapping_inactive, "shared-nic: GPUs 0 and 1 share"},
    {{"NVSHMEM_HCA_LIST=mlx5_1:1"}, mapping_active, ""},
    {{"NVSHMEM_REMOTE_TRANSPORT=libfabric"}, mapping_active, ""},
    {{"NVSHMEM_REMOTE_TRANSPORT=libfabric", IBGDA}, mapping_active, "shared-nic: GPUs 0 and 1 share"},
    {{"NVSHMEM_REMOTE_TRANSPORT=libfabric", "NVSHMEM_LIBFABRIC_PROVIDER=efa"}, efa, ""},
    {{NULL}, efa, ""},
    {{NULL}, deepep_without_nvshmem, ""},
    {{"DEEP_EP_DEVICE_TO_HCA_MAPPING=0:mlx5_0,1:mlx5_1,2:mlx5_2,3:mlx5_2"},
     mapping_active,
     "shared-nic: GPUs 2 and 3 share mlx5_2 while mlx5_3 is idle"},
    {{"DEEP_EP_DEVICE_TO_HCA_MAPPING=0:mlx5_2,1:mlx5_1,2:mlx5_0,3:mlx5_3"},
     mapping_active,
     "shared-nic: GPU 0 uses mlx5_2, which is SYS away; mlx5_0 is PIX"},
    {{"DEEP_EP_DEVICE_TO_HCA_MAPPING=0:mlx5_0,1:mlx5_1,2:mlx5_2"},
     mapping_active,
     "shared-nic: DEEP_EP_DEVICE_TO_HCA_MAPPING names no NIC for GPU 3"},
    {{"DEEP_EP_DEVICE_TO_HCA_MAPPING=0:mlx5_0,1:mlx5_1,2:mlx5_2,3:mlx5_9"},
     mapping_active,
     "shared-nic: DEEP_EP_DEVICE_TO_HCA_MAPPING does not fit this machine: entry 4, '3:mlx5_9'"},
    {{GOOD},
     mapping_and_dead_port,
     "shared-nic: DEEP_EP_DEVICE_TO_HCA_MAPPING gives GPU 2 port 1 of mlx5_2, which is down"},
    /* nic-handler and gdrcopy */
    {{"NVSHMEM_IBGDA_NIC_HANDLER=gpu", ONE}, option_off, "nic-handler: GPUs may not ring"},
    {{NULL}, option_off, ""},
    {{"NVSHMEM_IBGDA_NIC_HANDLER=auto", ONE}, option_configured, ""},
    {{"NVSHMEM_IBGDA_NIC_HANDLER=gpu", ONE}, no_params, "?nic-handler: /proc/driver/nvidia/params"},
    {{"NVSHMEM_IBGDA_NIC_HANDLER=CPU", ONE}, gdrcopy, "nic-handler: the CPU rings"},
    {{"NVSHMEM_IBGDA_NIC_HANDLER=cpu", ONE},
     NULL,
     "gdrcopy: NVSHMEM_IBGDA_NIC_HANDLER=cpu needs GDRCopy, and libgdrapi.so.2 is not there"},
    {{"NVSHMEM_IBGDA_NIC_HANDLER=cpu", ONE},
     gdrcopy_without_its_device,
     "gdrcopy: NVSHMEM_IBGDA_NIC_HANDLER=cpu needs GDRCopy, and /dev/gdrdrv is not there"},
    {{"NVSHMEM_IBGDA_NIC_HANDLER=cpu", ONE, "NVSHMEM_DISABLE_GDRCOPY=1"},
     gdrcopy,
     "gdrcopy: NVSHMEM_IBGDA_NIC_HANDLER=cpu needs GDRCopy, and NVSHMEM_DISABLE_GDRCOPY switches it off"},
    /* two-nvshmem */
    {{NULL}, two_mapped, "two-nvshmem: the process has loaded 2 copies of NVSHMEM"},
    {{NULL}, bundle, ""},
    {{GOOD}, deepep_and_bundle, "two-nvshmem: PyTorch loads NVSHMEM 3.4.5"},
    {{"NVSHMEM_DEBUG=INFO"}, bundle, "two-nvshmem: PyTorch loads NVSHMEM 3.4.5"},
    {{"NVSHMEM_DEBUG=INFO", "LD_PRELOAD=" ADVISED_NVSHMEM "/lib/libnvshmem_host.so.3"}, bundle, ""},
    {{"NVSHMEM_DEBUG=INFO", "EPKIT_PRELOAD=" ADVISED_NVSHMEM "/lib/libnvshmem_host.so.3"}, bundle, ""},
    {{"NVSHMEM_DEBUG=INFO", "EPKIT_PRELOAD=/gone.so"},
     bundle,
     "two-nvshmem: PyTorch loads+home: EPKIT_PRELOAD names a path that does not exist: /gone.so"},
    {{"NVSHMEM_DEBUG=INFO"}, bundle_and_mapped, ""},
    {{"LD_PRELOAD=/gone/libnvshmem_host.so.3"}, NULL, "two-nvshmem: LD_PRELOAD names an NVSHMEM that is not there"},
    {{"LD_PRELOAD=liba.so /gone/libnvshmem_host.so.3"},
     NULL,
     "two-nvshmem: LD_PRELOAD names an NVSHMEM that is not there: /gone"},
    /* ibgda-transport */
    {{IBGDA, "NVSHMEM_HCA_LIST=mlx5_0"}, no_transport, "ibgda-transport: NVSHMEM 3.5.19 has no transport"},
    {{NULL}, no_transport, ""},
    {{IBGDA, "NVSHMEM_HCA_LIST=mlx5_0"}, transport_crashes, "?ibgda-transport: loading " ADVISED_NVSHMEM},
    /* home */
    {{"NVSHMEM_HOME=/gone", "GDRCOPY_HOME=/gone"},
     NULL,
     "home: several variables name paths that do not exist: GDRCOPY_HOME NVSHMEM_HOME"},
    {{"LD_PRELOAD=/gone/libx.so"}, NULL, "home: LD_PRELOAD names a path that does not exist: /gone/libx.so"},
    {{"LD_PRELOAD=/gone/libx.so:/proc/libnvshmem_host.so.3"},
     preload_there,
     "home: LD_PRELOAD names a path that does not exist"},
    {{"LD_PRELOAD=/gone/libnvshmem_host.so.3 /gone/libx.so"},
     NULL,
     "two-nvshmem: LD_PRELOAD names+home: LD_PRELOAD names a path that does not exist: /gone/libx.so"},
    {{"NVSHMEM_HOME=/proc"}, NULL, ""},
    /* hca-prefix */
    {{"NVSHMEM_HCA_PREFIX=roce"}, NULL, "hca-prefix: IBGDA leaves out 4 of 4 NICs"},
    {{NULL}, other_names, ""},
    {{IBGDA}, other_names, "hca-prefix: IBGDA leaves out 4 of 4 NICs: their names do not have 'mlx5'"},
    {{NULL}, deepep_and_other_names, "hca-prefix: IBGDA leaves out 4 of 4 NICs"},
    {{"NVSHMEM_HCA_PREFIX=rocep"}, other_names, ""},
    {{"NVSHMEM_HCA_PREFIX=mlx5"}, one_other_name, "hca-prefix: IBGDA leaves out 1 of 4 NICs"},
    {{"NVSHMEM_HCA_LIST=mlx5_7"}, NULL, "hca-prefix: NVSHMEM_HCA_LIST leaves no NIC"},
    /* void-variables */
    {{"NVSHMEM_REMOTE_TRANSPORT=ibgda", GOOD}, mapping_active, "void-variables: NVSHMEM_REMOTE_TRANSPORT does not do"},
    {{"NVSHMEM_IBGDA_SUPPORT=1", "NVSHMEM_HCA_LISTS=x"},
     NULL,
     "void-variables: 2 variables do not do what they seem to, among them NVSHMEM_HCA_LISTS"},
    {{"NCCL_IB_TC=high"}, NULL, "void-variables: NCCL_IB_TC"},
    /* net-plugin */
    {{"NCCL_NET=gIB"}, no_plugin, "net-plugin: NCCL's network plugin libnccl-net.so is not found"},
    {{"NCCL_NET=ib"}, no_plugin, ""},
    {{"NCCL_NET_PLUGIN=none"}, no_plugin, ""},
    {{"NCCL_NET=gIB", "NCCL_NET_PLUGIN=none"}, no_plugin, "net-plugin: NCCL_NET=gIB needs a plugin"},
    {{"NCCL_NET_PLUGIN=/usr/local/gib/lib64/libnccl-net.so"},
     gib_does_not_load,
     "net-plugin: NCCL's network plugin does not load: libprotobuf"},
    {{"NCCL_NET_PLUGIN=/usr/local/gib/lib64/libnccl-net.so"},
     gib_meets_other_verbs,
     /* Its file, which would show whose fault it is, is not readable. */
     "net-plugin: NCCL's network plugin does not load: libmlx5.so.1: version"},
    {{"NCCL_NET_PLUGIN=/usr/local/gib/lib64/libnccl-net.so"},
     gib_without_libibverbs,
     "net-plugin: NCCL's network plugin does not load: libibverbs.so.1"},
    /* gib-settings */
    {{NULL}, gib, ""},
    {{"TORCH_NCCL_USE_COMM_NONBLOCKING=0"}, gib, "gib-settings: TORCH_NCCL_USE_COMM_NONBLOCKING is set"},
    {{"TORCH_NCCL_USE_COMM_NONBLOCKING=0"}, NULL, ""},
    {{"NCCL_IB_TC=0"}, gib, "gib-settings: NCCL_IB_TC is not what gIB expects"},
    {{"NCCL_IB_TC=high"}, gib, "gib-settings: NCCL_IB_TC is not"},
    {{"NCCL_NET=gIB"}, gib, "gib-settings: NCCL_CROSS_NIC and others are not"},
    {{"NCCL_NET=IB", "NCCL_IB_TC=0"}, gib, ""},
    /* two-nccl */
    {{NULL}, two_nccl_mapped, "two-nccl: the process has loaded 2 copies of NCCL"},
    {{"LD_LIBRARY_PATH=/opt/nccl/lib"},
     torch_nccl,
     "two-nccl: LD_LIBRARY_PATH leads to NCCL 2.21.5 before PyTorch's 2.27.5, "
     "and the import of PyTorch stops where it needs a function that is missing"},
    {{"LD_LIBRARY_PATH=/opt/same/lib"}, torch_nccl, ""},
    {{"LD_LIBRARY_PATH=/opt/same/lib:/opt/nccl/lib"}, torch_nccl, ""},
    {{"LD_LIBRARY_PATH=/opt/nccl/lib", "LD_PRELOAD=/opt/same/lib/libnccl.so.2"}, torch_nccl, ""},
    {{"LD_PRELOAD=/gone/libnccl.so.2"}, NULL, "two-nccl: LD_PRELOAD names an NCCL that is not there"},
};

static void check_result(const struct doctor_result *result, size_t i)
{
    if (result->outcome == DOCTOR_FOUND && result->n_evidence == 0)
        fail_msg("case %zu: %s shows no evidence", i, result->check->id);
    if (result->outcome == DOCTOR_FOUND && !*result->fix && !*result->advice)
        fail_msg("case %zu: %s says nothing to do", i, result->check->id);
    if (result->outcome == DOCTOR_FOUND && result->fix_is_safe)
        fail_msg("case %zu: %s: a variable cannot be set by --fix", i, result->check->id);
}

static void make_case(size_t i)
{
    advised_init(&advised);
    advised.software.driver.peer_mapping_override.live = "1";
    tree_put(&advised.tree, "/proc/driver/nvidia/params", "RegistryDwords: \"\"\n");
    for (size_t s = 0; s < 4 && cases[i].settings[s]; s++)
        advised_env(&advised, cases[i].settings[s]);
    if (cases[i].change)
        cases[i].change();
    advised_make(&advised);
}

/* The expected text contains the results of the checks in order, or the beginnings of them, separated by '+'. */
static void run_case(size_t i)
{
    struct doctor_machine machine;
    const char *expected = cases[i].said;

    make_case(i);
    machine = (struct doctor_machine){advised.source, &advised.hardware.topo, &advised.software, advised.map,
                                      advised.map,    advised.advice,         advised.audit,     NULL};
    for (size_t c = 0; c < N_CHECKS; c++) {
        struct doctor_result result;
        char said[1024];
        size_t n = strcspn(expected, "+");

        doctor_run(&machine, checks[c], &result);
        check_result(&result, i);
        if (result.outcome != DOCTOR_FOUND && result.outcome != DOCTOR_UNKNOWN)
            continue;
        snprintf(said, sizeof(said), "%s%s: %s", result.outcome == DOCTOR_UNKNOWN ? "?" : "", checks[c]->id,
                 result.text);
        if (n == 0 || strncmp(said, expected, n) != 0)
            fail_msg("case %zu: '%s', expected '%s' of '%s'", i, said, expected, cases[i].said);
        expected += n + (expected[n] == '+');
    }
    if (*expected)
        fail_msg("case %zu: '%s' was not said", i, expected);
    advised_done(&advised);
}

static struct doctor_result result_of(const struct doctor_check *check)
{
    struct doctor_machine machine;
    struct doctor_result result;

    advised_make(&advised);
    machine = (struct doctor_machine){advised.source, &advised.hardware.topo, &advised.software, advised.map,
                                      advised.map,    advised.advice,         advised.audit,     NULL};
    doctor_run(&machine, check, &result);
    return result;
}

/* Other preloaded libraries are kept; invalid names of variables are not unset; values are quoted. */
TEST(test_fixes)
{
    static const struct {
        const struct doctor_check *check;
        const char *setting;
        void (*change)(void);
        const char *fix;
    } fixes[] = {
        {&check_home, "LD_PRELOAD=/gone/liba.so:/x/libb.so libc.so", NULL, "export LD_PRELOAD=/x/libb.so:libc.so"},
        {&check_home, "LD_PRELOAD=/gone/liba.so", NULL, "unset LD_PRELOAD"},
        {&check_two_nccl, "LD_PRELOAD=/x/libb.so:/gone/libnccl.so.2", NULL, "export LD_PRELOAD=/x/libb.so"},
        {&check_two_nvshmem, "LD_PRELOAD=/x/lib$(id).so:/gone/libnvshmem_host.so.3", NULL,
         "export LD_PRELOAD='/x/lib$(id).so'"},
        {&check_void_variables, "NVSHMEM_X$(touch /tmp/x)=1", NULL, ""},
        {&check_void_variables, "NVSHMEM_Y;reboot=1", NULL, ""},
        {&check_void_variables, "NVSHMEM_NOBODY=1", NULL, "unset NVSHMEM_NOBODY"},
        {&check_two_nccl, "LD_LIBRARY_PATH=/opt/nccl/lib", torch_nccl,
         "export LD_LIBRARY_PATH=" TORCH "/nccl/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"},
    };

    for (size_t i = 0; i < sizeof(fixes) / sizeof(fixes[0]); i++) {
        struct doctor_result result;

        advised_init(&advised);
        tree_put(&advised.tree, "/x/libb.so", "");
        advised_env(&advised, fixes[i].setting);
        if (fixes[i].change)
            fixes[i].change();
        result = result_of(fixes[i].check);
        assert_int_equal(result.outcome, DOCTOR_FOUND);
        assert_string_equal(result.fix, fixes[i].fix);
        advised_done(&advised);
    }
}

/* According to doctor.h, what does not work or is several times slower is an error. */
TEST(test_severities)
{
    static const struct {
        const struct doctor_check *check;
        const char *setting;
        void (*change)(void);
        enum doctor_severity severity;
    } severities[] = {
        {&check_nic_handler, "NVSHMEM_IBGDA_NIC_HANDLER=gpu", option_off, DOCTOR_WARNING},
        {&check_two_nvshmem, "NVSHMEM_DEBUG=INFO", bundle, DOCTOR_WARNING},
        {&check_two_nvshmem, GOOD, deepep_and_bundle, DOCTOR_ERROR},
        {&check_shared_nic, IBGDA, NULL, DOCTOR_WARNING},
        {&check_shared_nic, "DEEP_EP_DEVICE_TO_HCA_MAPPING=0:mlx5_0,1:mlx5_0,2:mlx5_0,3:mlx5_0", mapping_active,
         DOCTOR_ERROR},
    };

    for (size_t i = 0; i < sizeof(severities) / sizeof(severities[0]); i++) {
        struct doctor_result result;

        advised_init(&advised);
        tree_put(&advised.tree, "/proc/driver/nvidia/params", "RegistryDwords: \"\"\n");
        advised_env(&advised, severities[i].setting);
        if (severities[i].change)
            severities[i].change();
        result = result_of(severities[i].check);
        assert_int_equal(result.outcome, DOCTOR_FOUND);
        assert_int_equal(result.severity, severities[i].severity);
        advised_done(&advised);
    }
}

TEST(test_cases)
{
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        run_case(i);
}

/* For --explain: full sentences, and links. */
TEST(test_texts)
{
    for (size_t i = 0; i < N_CHECKS; i++) {
        const char *const texts[] = {checks[i]->symptom, checks[i]->cause, checks[i]->remedy};

        for (size_t t = 0; t < sizeof(texts) / sizeof(texts[0]); t++)
            assert_int_equal(texts[t][strlen(texts[t]) - 1], '.');
        assert_non_null(checks[i]->links[0]);
        assert_true(strcmp(checks[i]->group, "nvshmem") == 0 || strcmp(checks[i]->group, "nccl") == 0);
    }
}

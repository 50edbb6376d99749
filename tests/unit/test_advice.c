/* SPDX-License-Identifier: Apache-2.0 */
/* The advised environment, on a synthetic machine. */
#include "advised.h"

static struct advised advised;

static int setup(void **state)
{
    (void)state;
    advised_init(&advised);
    advised.software.driver.peer_mapping_override.live = "1";
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    advised_done(&advised);
    return 0;
}

static const struct advice_row *row(const char *name)
{
    return advice_find(advised.advice, name);
}

/* --- what cases change --- */

CHANGE(no_transport, advised.software.nvshmem.transport_ibgda = "")
CHANGE(no_nvshmem, advised.software.nvshmem.home = advised.software.nvshmem.transport_ibgda = "")
CHANGE(other_gib, advised.software.nccl.gib = "/usr/local/gib")
CHANGE(no_devices, advised.hardware.topo.n_nics = advised.hardware.topo.n_gpus = 0)
CHANGE(management_nic, advised.hardware.nics[1].role = TOPO_ROLE_MANAGEMENT)
CHANGE(no_dmabuf, advised.software.driver.dmabuf = SOURCE_ABSENT)
CHANGE_OF(no_nics, other_gib, advised.hardware.topo.n_nics = 0)

static void mapping_is_read(void)
{
    advised.software.deepep.n = 1;
    advised.software.deepep.imported = 0;
    advised.software.deepep.mapping_active = true;
    advised.software.deepep.copies[0] = (struct software_copy){.folder = "/opt/x/python/deep_ep",
                                                               .version = "",
                                                               .extension = "",
                                                               .on_path = true,
                                                               .defines_mapping = true,
                                                               .calls_mapping = true};
}

static void name_nic(int i, const char *name)
{
    snprintf(advised.hardware.names[i], sizeof(advised.hardware.names[i]), "%s", name);
}

static void one_prefix(void)
{
    static const char *const names[] = {"rocep140s0", "rocep141s0", "rocep142s0", "rocep143s0"};

    for (int i = 0; i < 4; i++)
        name_nic(i, names[i]);
}

static void two_prefixes(void)
{
    name_nic(0, "ibp1s0");
    name_nic(1, "rocep1s0");
}

static void ambiguous_gid(void)
{
    static struct topo_gid ambiguous[] = {{1, TOPO_GID_ROCE2, TOPO_GID_LINK_LOCAL},
                                          {3, TOPO_GID_ROCE2, TOPO_GID_IPV4},
                                          {5, TOPO_GID_ROCE2, TOPO_GID_IPV4}};

    advised.hardware.nics[2].ports[0].gids = ambiguous;
    advised.hardware.nics[2].ports[0].n_gids = 3;
}

static void one_ipv4(void)
{
    for (int i = 1; i < 4; i++)
        advised.gids[2 * i + 1].kind = TOPO_GID_OTHER;
}

CHANGE_OF(no_ipv4, one_ipv4, advised.gids[1].kind = TOPO_GID_OTHER)

static void gib(void)
{
    other_gib();
    advised.software.nccl.tuner_config = "/usr/local/gib/configs/tuner_config_a4.txtpb";
    tree_put(&advised.tree, "/usr/local/gib/lib64/libnccl-net.so", "");
}

static void nvshmem(void)
{
    tree_put(&advised.tree, ADVISED_NVSHMEM "/lib/libnvshmem_host.so.3.5.19", "");
    tree_link(&advised.tree, ADVISED_NVSHMEM "/lib/libnvshmem_host.so.3", "libnvshmem_host.so.3.5.19");
}

/* PyTorch's own copy would be loaded first. */
static void bundled(const char *version)
{
    nvshmem();
    advised.software.nvshmem.bundled = "/usr/lib/python3/dist-packages/nvidia/nvshmem/lib/libnvshmem_host.so.3";
    advised.software.nvshmem.bundled_version = version;
}

CHANGE(other_bundled, bundled("3.4.5"))
CHANGE(same_bundled, bundled("3.5.19"))

/* ld.so separates LD_PRELOAD at spaces and LD_LIBRARY_PATH at colons; control characters must not reach a shell. */
static void blank_in_path(void)
{
    other_bundled();
    advised.software.nvshmem.home = "/opt/a b";
    tree_put(&advised.tree, "/opt/a b/lib/libnvshmem_host.so.3", "");
}

static void control_in_path(void)
{
    other_gib();
    advised.software.nvshmem.home = "/opt/a\033[2J";
    advised.software.nccl.tuner_config = "/usr/local/gib/\n";
    tree_put(&advised.tree, "/opt/a\033[2J/lib/libnvshmem_host.so.3", "");
}

static void source_before_package(void)
{
    advised.software.deepep.n = 2;
    advised.software.deepep.copies[0] =
        (struct software_copy){.folder = "/opt/x/source/deep_ep", .version = "", .extension = "", .is_source = true};
    advised.software.deepep.copies[1] = (struct software_copy){
        .folder = "/opt/x/python/deep_ep", .version = "", .extension = "/opt/x/python/deep_ep_cpp.so"};
}

static void providers(void)
{
    tree_put(&advised.tree, "/opt/there/file", "");
    tree_put(&advised.tree, "/usr/lib/libibverbs/libmlx5-rdmav57.so", "");
    advised.software.verbs.private_version = 57;
}

enum { NONE = -1 };

static const struct {
    void (*change)(void);
    int n; /* rows in all; 0: any number */
    /* Said: "NAME=value", with += in front of what is there, with := for the program alone; "-NAME": to be unset;
     * "!NAME": nothing. */
    const char *said[20];
    const char *environment[8];
} advised_cases[] = {
    /* What must not be advised does nothing, is set by DeepEP itself, or is harmful. */
    {NULL,
     0,
     {"NVSHMEM_IB_ENABLE_IBGDA=1",
      "NVSHMEM_IBGDA_NIC_HANDLER=gpu",
      "-NVSHMEM_ENABLE_NIC_PE_MAPPING",
      "!NVSHMEM_REMOTE_TRANSPORT",
      "!NVSHMEM_QP_DEPTH",
      "!NVSHMEM_IBGDA_NUM_RC_PER_PE",
      "!NVSHMEM_IBGDA_NUM_DCI",
      "!NVSHMEM_IB_GID_INDEX",
      "!NVSHMEM_HCA_PREFIX",
      "!NVSHMEM_DISABLE_CUDA_VMM",
      "!NVSHMEM_SYMMETRIC_SIZE",
      "!NVSHMEM_DISABLE_P2P",
      "!CUDA_HOME",
      "!NVSHMEM_HOME",
      "!LD_PRELOAD",
      "!LD_LIBRARY_PATH",
      "!PYTHONPATH",
      "!NCCL_IB_HCA",
      "!NCCL_NET",
      "!DEEP_EP_DEVICE_TO_HCA_MAPPING"},
     {NULL}},
    {mapping_is_read, 0, {"DEEP_EP_DEVICE_TO_HCA_MAPPING=0:mlx5_0:1,1:mlx5_1:1,2:mlx5_2:1,3:mlx5_3:1"}, {NULL}},
    {no_transport, 0, {"!NVSHMEM_IB_ENABLE_IBGDA", "!NVSHMEM_IBGDA_NIC_HANDLER"}, {NULL}},
    /* epkit's own, which needs no NVSHMEM */
    {no_nvshmem, 1, {"EPKIT_VERBS_DEVICE=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1"}, {NULL}},
    {no_nics, NONE, {NULL}, {NULL}},
    {no_devices, NONE, {NULL}, {"NVSHMEM_IBGDA_SUPPORT=1"}},
    {one_prefix, 0, {"NVSHMEM_HCA_PREFIX=rocep"}, {NULL}},
    {two_prefixes, 0, {"!NVSHMEM_HCA_PREFIX"}, {NULL}},
    {management_nic, 0, {"NCCL_IB_HCA==mlx5_0:1,mlx5_2:1,mlx5_3:1"}, {NULL}},
    {ambiguous_gid, 0, {"NVSHMEM_IB_GID_INDEX=3"}, {NULL}},
    {no_ipv4, 0, {"NVSHMEM_IB_ADDR_FAMILY=AF_INET6", "NCCL_IB_ADDR_FAMILY=AF_INET6"}, {"NVSHMEM_IB_GID_INDEX=3"}},
    {one_ipv4, 0, {"!NVSHMEM_IB_ADDR_FAMILY", "!NCCL_IB_ADDR_FAMILY"}, {NULL}},
    {no_dmabuf, 0, {"NVSHMEM_DISABLE_CUDA_VMM=1", "NVSHMEM_SYMMETRIC_SIZE=4G"}, {NULL}},
    {gib,
     0,
     {"NCCL_NET=gIB", "NCCL_IB_TC=52", "NCCL_IB_FIFO_TC=84", "NCCL_IB_ADAPTIVE_ROUTING=1",
      "NCCL_IB_QPS_PER_CONNECTION=4", "NCCL_CROSS_NIC=0", "NCCL_NET_GDR_LEVEL=PIX", "NCCL_P2P_NET_CHUNKSIZE=131072",
      "NCCL_NVLS_CHUNKSIZE=524288", "NCCL_TUNER_CONFIG_PATH=/usr/local/gib/configs/tuner_config_a4.txtpb",
      "-TORCH_NCCL_USE_COMM_NONBLOCKING", "LD_LIBRARY_PATH+=/usr/local/gib/lib64"},
     {NULL}},
    {nvshmem, 0, {"LD_LIBRARY_PATH+=" ADVISED_NVSHMEM "/lib", "!LD_PRELOAD"}, {NULL}},
    {other_bundled, 0, {"LD_PRELOAD:=" ADVISED_NVSHMEM "/lib/libnvshmem_host.so.3"}, {NULL}},
    {same_bundled, 0, {"!LD_PRELOAD"}, {NULL}},
    {blank_in_path, 0, {"LD_LIBRARY_PATH+=/opt/a b/lib", "!LD_PRELOAD"}, {NULL}},
    {control_in_path, 0, {"!LD_LIBRARY_PATH", "!NCCL_TUNER_CONFIG_PATH"}, {NULL}},
    {source_before_package, 0, {"PYTHONPATH+=/opt/x/python"}, {NULL}},
    /* Variables without effect or with an invalid value; unknown names are ignored. */
    {NULL,
     0,
     {"-NVSHMEM_REMOTE_TRANSPORT", "-NVSHMEM_USE_GDRCOPY", "-NVSHMEM_DEBUG", "-NVSHMEM_DISABLED_GDRCOPY",
      "!NVSHMEM_FUTURE", "!NVSHMEM_DEBUG_SUBSYS", "!CUDA_DEVICE_ORDER"},
     {"NVSHMEM_REMOTE_TRANSPORT=ibgda", "NVSHMEM_USE_GDRCOPY=1", "NVSHMEM_DEBUG=WARN,INFO",
      "NVSHMEM_DISABLED_GDRCOPY=true", "NVSHMEM_FUTURE=1", "NVSHMEM_DEBUG_SUBSYS=INIT", "CUDA_DEVICE_ORDER=sideways"}},
    /* Homes that do not exist, and providers of libibverbs that are given as a folder. */
    {providers,
     0,
     {"-NVSHMEM_HOME", "-RDMAV_DRIVERS", "!GDRCOPY_HOME", "!IBV_DRIVERS"},
     {"NVSHMEM_HOME=/nowhere", "GDRCOPY_HOME=/opt/there", "RDMAV_DRIVERS=/usr/lib/libibverbs",
      "IBV_DRIVERS=/usr/lib/libibverbs/libmlx5"}},
};

static void check_said(size_t number, const char *said)
{
    bool unset = *said == '-', silent = *said == '!', prepend = false, program = false;
    char name[64];
    const struct advice_row *found;

    said += unset || silent;
    snprintf(name, sizeof(name), "%.*s", (int)strcspn(said, "+:="), said);
    said += strlen(name);
    prepend = *said == '+';
    program = *said == ':';
    said += prepend || program;
    found = row(name);
    if (silent ? found != NULL : !found || found->unset != unset)
        fail_msg("case %zu: what is said of %s", number, name);
    if (silent || unset)
        return;
    if (strcmp(found->value, said + 1) != 0 || (!program && found->prepend != prepend) ||
        (found->scope == ADVICE_PROGRAM) != program)
        fail_msg("case %zu: %s is '%s', for scope %d", number, name, found->value, (int)found->scope);
    assert_true(*found->reason);
    assert_int_equal(found->reason[strlen(found->reason) - 1], '.');
}

TEST(test_each_case_is_advised)
{
    for (size_t i = 0; i < sizeof(advised_cases) / sizeof(advised_cases[0]); i++) {
        setup(NULL);
        if (advised_cases[i].change)
            advised_cases[i].change();
        for (int k = 0; k < 8 && advised_cases[i].environment[k]; k++)
            advised_env(&advised, advised_cases[i].environment[k]);
        advised_make(&advised);
        for (int k = 0; k < 20 && advised_cases[i].said[k]; k++)
            check_said(i, advised_cases[i].said[k]);
        if (advised_cases[i].n)
            assert_int_equal(advised.advice->n, advised_cases[i].n == NONE ? 0 : advised_cases[i].n);
        /* What is advised is right as well where it was set by hand. */
        for (int k = 0; k < advised.audit->n && advised_cases[i].change == no_ipv4; k++)
            assert_string_not_equal(advised.audit->rows[k].name, "NVSHMEM_IB_GID_INDEX");
        teardown(NULL);
    }
}

TEST_WITH(test_hca_list, setup, teardown)
{
    const struct advice_row *list;

    no_transport();
    advised_make(&advised);
    list = row("NVSHMEM_HCA_LIST");
    assert_non_null(list);
    assert_int_equal(list->scope, ADVICE_RANK);
    assert_int_equal(list->n_values, 4);
    assert_string_equal(list->values[0], "mlx5_0:1");
    assert_string_equal(list->values[3], "mlx5_3:1");
}

TEST_WITH(test_prepend, setup, teardown)
{
    static const struct {
        const char *value, *path, *expected;
    } cases[] = {
        {"/a", "", "/a"},
        {"/a", "/b", "/a:/b"},
        {"/a", "/a", "/a"},
        {"/a", "/a:/b", "/a:/b"},
        {"/a", "/b:/a", "/a:/b"},
        {"/a", "/b:/a:/c", "/a:/b:/c"},
        {"/a:/b", "/c:/a:/b", "/a:/b:/c"},
        {"/a", "/aa:/b", "/a:/aa:/b"},
        {"", "/b", "/b"},
    };

    advised_make(&advised);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        assert_string_equal(advice_prepend(advised.source, cases[i].value, cases[i].path), cases[i].expected);
}

/* --- ranks --- */

struct setting {
    const char *name, *value;
};

static const char *get(void *context, const char *name)
{
    for (const struct setting *setting = context; setting->name; setting++)
        if (strcmp(setting->name, name) == 0)
            return setting->value;
    return NULL;
}

TEST_WITH(test_ranks, setup, teardown)
{
    static struct {
        struct setting settings[5];
        int gpu;
    } cases[] = {
        {{{NULL, NULL}}, -1},
        {{{"LOCAL_RANK", "2"}}, 2},
        {{{"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "4"}}, 2},
        {{{"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}}, -1},
        {{{"LOCAL_RANK", "4"}}, -1},
        {{{"LOCAL_RANK", "-1"}}, -1},
        {{{"LOCAL_RANK", "two"}}, -1},
        {{{"LOCAL_RANK", "1x"}}, -1},
        {{{"LOCAL_RANK", ""}}, -1},
        {{{"LOCAL_RANK", "99999999999999999999"}}, -1},
        {{{"OMPI_COMM_WORLD_LOCAL_RANK", "3"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}}, 3},
        {{{"OMPI_COMM_WORLD_LOCAL_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}}, -1},
        {{{"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "4"}}, 1},
        {{{"PMI_LOCAL_RANK", "1"}}, 1},
        /* torchrun started by srun with one task per node */
        {{{"SLURM_LOCALID", "0"}, {"SLURM_STEP_TASKS_PER_NODE", "1"}, {"LOCAL_RANK", "3"}, {"LOCAL_WORLD_SIZE", "4"}},
         3},
        /* a batch script is not a rank */
        {{{"SLURM_LOCALID", "0"}}, -1},
        {{{"SLURM_LOCALID", "1"}, {"SLURM_STEP_TASKS_PER_NODE", "4(x2)"}}, 1},
        {{{"SLURM_LOCALID", "0"}, {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"}}, -1},
        {{{"SLURM_LOCALID", "0"}, {"SLURM_STEP_TASKS_PER_NODE", "1,1(x3)"}}, -1},
        {{{"SLURM_LOCALID", "1"}, {"SLURM_STEP_TASKS_PER_NODE", "1(x12),4"}}, 1},
        {{{"SLURM_LOCALID", "1"}, {"SLURM_STEP_TASKS_PER_NODE", "nonsense("}}, 1},
        {{{"LOCAL_RANK", "1"}, {"CUDA_VISIBLE_DEVICES", "3,2,1,0"}}, 2},
        {{{"LOCAL_RANK", "1"}, {"CUDA_VISIBLE_DEVICES", "3"}}, 3},
        {{{"LOCAL_RANK", "2"}, {"CUDA_VISIBLE_DEVICES", "0,1"}}, -1},
        {{{"LOCAL_RANK", "0"}, {"CUDA_VISIBLE_DEVICES", ""}}, 0},
        {{{"LOCAL_RANK", "0"}, {"CUDA_VISIBLE_DEVICES", "9"}}, -1},
        {{{"LOCAL_RANK", "1"}, {"CUDA_VISIBLE_DEVICES", "0,,1"}}, -1},
        {{{"LOCAL_RANK", "0"}, {"CUDA_VISIBLE_DEVICES", "GPU-00000000-0000-0000-0000-000000000003"}}, 2},
        {{{"LOCAL_RANK", "0"}, {"CUDA_VISIBLE_DEVICES", "GPU-ffffffff"}}, -1},
    };

    advised_make(&advised);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int gpu = advice_gpu_of(&advised.hardware.topo, get, cases[i].settings);

        if (gpu != cases[i].gpu)
            fail_msg("case %zu (%s): GPU %d, expected %d", i, cases[i].settings[0].name, gpu, cases[i].gpu);
    }
}

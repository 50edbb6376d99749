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

/* Asserts that this value is advised, with a sentence as reason. */
static void is_set(const char *name, const char *value)
{
    const struct advice_row *found = row(name);

    if (!found || found->unset)
        fail_msg("%s is not advised", name);
    assert_string_equal(found->value, value);
    assert_true(*found->reason);
    assert_int_equal(found->reason[strlen(found->reason) - 1], '.');
}

static void is_unset(const char *name)
{
    if (!row(name) || !row(name)->unset)
        fail_msg("%s is not advised to be unset", name);
}

static void is_silent(const char *name)
{
    if (row(name))
        fail_msg("%s: nothing was to be said", name);
}

/* Variables that must not be advised: they do nothing, DeepEP sets them itself, or they are harmful. */
TEST_WITH(test_nothing_useless, setup, teardown)
{
    static const char *const useless[] = {"NVSHMEM_REMOTE_TRANSPORT",
                                          "NVSHMEM_QP_DEPTH",
                                          "NVSHMEM_IBGDA_NUM_RC_PER_PE",
                                          "NVSHMEM_IBGDA_NUM_DCI",
                                          "NVSHMEM_IB_GID_INDEX",
                                          "NVSHMEM_HCA_PREFIX",
                                          "NVSHMEM_DISABLE_CUDA_VMM",
                                          "NVSHMEM_SYMMETRIC_SIZE",
                                          "NVSHMEM_DISABLE_P2P",
                                          "CUDA_HOME",
                                          "NVSHMEM_HOME",
                                          "LD_PRELOAD",
                                          "LD_LIBRARY_PATH",
                                          "PYTHONPATH",
                                          "NCCL_IB_HCA",
                                          "NCCL_NET",
                                          "DEEP_EP_DEVICE_TO_HCA_MAPPING"};

    advised_make(&advised);
    is_set("NVSHMEM_IB_ENABLE_IBGDA", "1");
    is_set("NVSHMEM_IBGDA_NIC_HANDLER", "gpu");
    is_unset("NVSHMEM_ENABLE_NIC_PE_MAPPING");
    for (size_t i = 0; i < sizeof(useless) / sizeof(useless[0]); i++)
        is_silent(useless[i]);
}

TEST_WITH(test_hca_list, setup, teardown)
{
    const struct advice_row *list;

    advised_make(&advised);
    list = row("NVSHMEM_HCA_LIST");
    assert_non_null(list);
    assert_int_equal(list->scope, ADVICE_RANK);
    assert_int_equal(list->n_values, 4);
    assert_string_equal(list->values[0], "mlx5_0:1");
    assert_string_equal(list->values[3], "mlx5_3:1");
}

TEST_WITH(test_mapping_only_where_it_is_read, setup, teardown)
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
    advised_make(&advised);
    is_set("DEEP_EP_DEVICE_TO_HCA_MAPPING", "0:mlx5_0:1,1:mlx5_1:1,2:mlx5_2:1,3:mlx5_3:1");
}

TEST_WITH(test_without_transport, setup, teardown)
{
    advised.software.nvshmem.transport_ibgda = "";
    advised_make(&advised);
    is_silent("NVSHMEM_IB_ENABLE_IBGDA");
    is_silent("NVSHMEM_IBGDA_NIC_HANDLER");
    assert_non_null(row("NVSHMEM_HCA_LIST"));
}

TEST_WITH(test_without_nvshmem, setup, teardown)
{
    advised.software.nvshmem.home = advised.software.nvshmem.transport_ibgda = "";
    advised_make(&advised);
    assert_int_equal(advised.advice->n, 1);
    is_set("EPKIT_VERBS_DEVICE", "mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1"); /* epkit's own, which needs no NVSHMEM */
}

TEST_WITH(test_without_nics, setup, teardown)
{
    advised.hardware.topo.n_nics = 0;
    advised.software.nccl.gib = "/usr/local/gib";
    advised_make(&advised);
    assert_int_equal(advised.advice->n, 0);
}

TEST_WITH(test_without_anything, setup, teardown)
{
    advised.hardware.topo.n_nics = advised.hardware.topo.n_gpus = 0;
    advised_env(&advised, "NVSHMEM_IBGDA_SUPPORT=1");
    advised_make(&advised);
    assert_int_equal(advised.advice->n, 0);
}

TEST_WITH(test_prefix, setup, teardown)
{
    for (int i = 0; i < 4; i++)
        snprintf(advised.hardware.names[i], sizeof(advised.hardware.names[i]), "rocep%ds0", 140 + i);
    advised_make(&advised);
    is_set("NVSHMEM_HCA_PREFIX", "rocep");
}

/* Without a common prefix nothing is advised. */
TEST_WITH(test_no_prefix, setup, teardown)
{
    snprintf(advised.hardware.names[0], sizeof(advised.hardware.names[0]), "ibp1s0");
    snprintf(advised.hardware.names[1], sizeof(advised.hardware.names[1]), "rocep1s0");
    advised_make(&advised);
    is_silent("NVSHMEM_HCA_PREFIX");
}

TEST_WITH(test_management_nics, setup, teardown)
{
    advised.hardware.nics[1].role = TOPO_ROLE_MANAGEMENT;
    advised_make(&advised);
    is_set("NCCL_IB_HCA", "=mlx5_0:1,mlx5_2:1,mlx5_3:1");
}

TEST_WITH(test_gid_index, setup, teardown)
{
    static struct topo_gid ambiguous[] = {{1, TOPO_GID_ROCE2, TOPO_GID_LINK_LOCAL},
                                          {3, TOPO_GID_ROCE2, TOPO_GID_IPV4},
                                          {5, TOPO_GID_ROCE2, TOPO_GID_IPV4}};

    advised.hardware.nics[2].ports[0].gids = ambiguous;
    advised.hardware.nics[2].ports[0].n_gids = 3;
    advised_make(&advised);
    is_set("NVSHMEM_IB_GID_INDEX", "3");
}

TEST_WITH(test_address_family, setup, teardown)
{
    for (int i = 0; i < 4; i++)
        advised.gids[2 * i + 1].kind = TOPO_GID_OTHER;
    advised_env(&advised, "NVSHMEM_IB_GID_INDEX=3");
    advised_make(&advised);
    is_set("NVSHMEM_IB_ADDR_FAMILY", "AF_INET6");
    is_set("NCCL_IB_ADDR_FAMILY", "AF_INET6");
    for (int i = 0; i < advised.audit->n; i++)
        assert_string_not_equal(advised.audit->rows[i].name, "NVSHMEM_IB_GID_INDEX");
}

TEST_WITH(test_address_family_with_one_ipv4, setup, teardown)
{
    for (int i = 1; i < 4; i++)
        advised.gids[2 * i + 1].kind = TOPO_GID_OTHER;
    advised_make(&advised);
    is_silent("NVSHMEM_IB_ADDR_FAMILY");
    is_silent("NCCL_IB_ADDR_FAMILY");
}

TEST_WITH(test_static_heap, setup, teardown)
{
    advised.software.driver.dmabuf = SOURCE_ABSENT;
    advised_make(&advised);
    is_set("NVSHMEM_DISABLE_CUDA_VMM", "1");
    is_set("NVSHMEM_SYMMETRIC_SIZE", "4G");
}

TEST_WITH(test_gib, setup, teardown)
{
    advised.software.nccl.gib = "/usr/local/gib";
    advised.software.nccl.tuner_config = "/usr/local/gib/configs/tuner_config_a4.txtpb";
    tree_put(&advised.tree, "/usr/local/gib/lib64/libnccl-net.so", "");
    advised_make(&advised);
    is_set("NCCL_NET", "gIB");
    is_set("NCCL_IB_TC", "52");
    is_set("NCCL_IB_FIFO_TC", "84");
    is_set("NCCL_IB_ADAPTIVE_ROUTING", "1");
    is_set("NCCL_IB_QPS_PER_CONNECTION", "4");
    is_set("NCCL_CROSS_NIC", "0");
    is_set("NCCL_NET_GDR_LEVEL", "PIX");
    is_set("NCCL_P2P_NET_CHUNKSIZE", "131072");
    is_set("NCCL_NVLS_CHUNKSIZE", "524288");
    is_set("NCCL_TUNER_CONFIG_PATH", "/usr/local/gib/configs/tuner_config_a4.txtpb");
    is_unset("TORCH_NCCL_USE_COMM_NONBLOCKING");
    is_set("LD_LIBRARY_PATH", "/usr/local/gib/lib64");
    assert_true(row("LD_LIBRARY_PATH")->prepend);
}

static void install_nvshmem(void)
{
    tree_put(&advised.tree, ADVISED_NVSHMEM "/lib/libnvshmem_host.so.3.5.19", "");
    tree_link(&advised.tree, ADVISED_NVSHMEM "/lib/libnvshmem_host.so.3", "libnvshmem_host.so.3.5.19");
}

TEST_WITH(test_library_path, setup, teardown)
{
    install_nvshmem();
    advised_make(&advised);
    is_set("LD_LIBRARY_PATH", ADVISED_NVSHMEM "/lib");
    is_silent("LD_PRELOAD");
}

/* PyTorch's own copy would be loaded first, and has another version. */
TEST_WITH(test_preload, setup, teardown)
{
    install_nvshmem();
    advised.software.nvshmem.bundled = "/usr/lib/python3/dist-packages/nvidia/nvshmem/lib/libnvshmem_host.so.3";
    advised.software.nvshmem.bundled_version = "3.4.5";
    advised_make(&advised);
    is_set("LD_PRELOAD", ADVISED_NVSHMEM "/lib/libnvshmem_host.so.3");
    assert_int_equal(row("LD_PRELOAD")->scope, ADVICE_PROGRAM);
}

TEST_WITH(test_no_preload_of_the_same_version, setup, teardown)
{
    install_nvshmem();
    advised.software.nvshmem.bundled = "/usr/lib/python3/dist-packages/nvidia/nvshmem/lib/libnvshmem_host.so.3";
    advised.software.nvshmem.bundled_version = "3.5.19";
    advised_make(&advised);
    is_silent("LD_PRELOAD");
}

/* ld.so separates LD_PRELOAD at spaces and LD_LIBRARY_PATH at colons; control characters must not reach a shell. */
TEST_WITH(test_paths_that_cannot_be_listed, setup, teardown)
{
    advised.software.nvshmem.home = "/opt/a b";
    advised.software.nvshmem.bundled = "/x/libnvshmem_host.so.3";
    advised.software.nvshmem.bundled_version = "3.4.5";
    tree_put(&advised.tree, "/opt/a b/lib/libnvshmem_host.so.3", "");
    advised_make(&advised);
    is_set("LD_LIBRARY_PATH", "/opt/a b/lib");
    is_silent("LD_PRELOAD");
}

TEST_WITH(test_paths_with_control_characters, setup, teardown)
{
    advised.software.nvshmem.home = "/opt/a\033[2J";
    advised.software.nccl.gib = "/usr/local/gib";
    advised.software.nccl.tuner_config = "/usr/local/gib/\n";
    tree_put(&advised.tree, "/opt/a\033[2J/lib/libnvshmem_host.so.3", "");
    advised_make(&advised);
    is_silent("LD_LIBRARY_PATH");
    is_silent("NCCL_TUNER_CONFIG_PATH");
}

TEST_WITH(test_python_path, setup, teardown)
{
    advised.software.deepep.n = 2;
    advised.software.deepep.copies[0] =
        (struct software_copy){.folder = "/opt/x/source/deep_ep", .version = "", .extension = "", .is_source = true};
    advised.software.deepep.copies[1] = (struct software_copy){
        .folder = "/opt/x/python/deep_ep", .version = "", .extension = "/opt/x/python/deep_ep_cpp.so"};
    advised_make(&advised);
    is_set("PYTHONPATH", "/opt/x/python");
}

/* Variables without effect or with an invalid value are advised to be unset; unknown names are ignored. */
TEST_WITH(test_unset, setup, teardown)
{
    advised_env(&advised, "NVSHMEM_REMOTE_TRANSPORT=ibgda");
    advised_env(&advised, "NVSHMEM_USE_GDRCOPY=1");
    advised_env(&advised, "NVSHMEM_DEBUG=WARN,INFO");
    advised_env(&advised, "NVSHMEM_DISABLED_GDRCOPY=true");
    advised_env(&advised, "NVSHMEM_FUTURE=1");
    advised_env(&advised, "NVSHMEM_DEBUG_SUBSYS=INIT");
    advised_env(&advised, "CUDA_DEVICE_ORDER=sideways");
    advised_make(&advised);
    is_unset("NVSHMEM_REMOTE_TRANSPORT");
    is_unset("NVSHMEM_USE_GDRCOPY");
    is_unset("NVSHMEM_DEBUG");
    is_unset("NVSHMEM_DISABLED_GDRCOPY");
    is_silent("NVSHMEM_FUTURE");
    is_silent("NVSHMEM_DEBUG_SUBSYS");
    is_silent("CUDA_DEVICE_ORDER");
}

/* Homes that do not exist, and providers of libibverbs that are given as a folder. */
TEST_WITH(test_unset_paths, setup, teardown)
{
    tree_put(&advised.tree, "/opt/there/file", "");
    tree_put(&advised.tree, "/usr/lib/libibverbs/libmlx5-rdmav57.so", "");
    advised.software.verbs.private_version = 57;
    advised_env(&advised, "NVSHMEM_HOME=/nowhere");
    advised_env(&advised, "GDRCOPY_HOME=/opt/there");
    advised_env(&advised, "RDMAV_DRIVERS=/usr/lib/libibverbs");
    advised_env(&advised, "IBV_DRIVERS=/usr/lib/libibverbs/libmlx5");
    advised_make(&advised);
    is_unset("NVSHMEM_HOME");
    is_unset("RDMAV_DRIVERS");
    is_silent("GDRCOPY_HOME");
    is_silent("IBV_DRIVERS");
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

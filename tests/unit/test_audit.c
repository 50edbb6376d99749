/* SPDX-License-Identifier: Apache-2.0 */
/* The audit of single variables and of whole environments. */
#include "advised.h"

#include "common/text.h"

static struct advised advised;

static const struct audit_row *find(const char *name)
{
    for (int i = 0; i < advised.audit->n; i++)
        if (strcmp(advised.audit->rows[i].name, name) == 0)
            return &advised.audit->rows[i];
    return NULL;
}

#define FINE (-1)

/* Each variable alone in an environment: its row, or none; and part of the text. */
TEST(test_variables)
{
    static const struct {
        const char *setting;
        int kind;
        const char *text;
    } cases[] = {
        {"NVSHMEM_ENABLE_NIC_PE_MAPPING=1", AUDIT_HARMFUL, "All GPUs take the first NIC"},
        {"NVSHMEM_ENABLE_NIC_PE_MAPPING=true", AUDIT_HARMFUL, "Unset it"},
        {"NVSHMEM_ENABLE_NIC_PE_MAPPING=0", FINE, NULL},
        {"NVSHMEM_ENABLE_NIC_PE_MAPPING=off", AUDIT_VALUE, "is read as true"},
        {"NVSHMEM_IBGDA_NIC_HANDLER=gpu", FINE, NULL},
        {"NVSHMEM_IBGDA_NIC_HANDLER=auto", FINE, NULL},
        {"NVSHMEM_IBGDA_NIC_HANDLER=cpu", AUDIT_HARMFUL, "GDRCopy"},
        {"NVSHMEM_IBGDA_NIC_HANDLER=cpu_host_memory", AUDIT_DIFFERS, "slower"},
        {"NVSHMEM_IBGDA_NIC_HANDLER=nic", AUDIT_VALUE, "auto, gpu, cpu"},
        {"NVSHMEM_IB_ENABLE_IBGDA=true", FINE, NULL},
        {"NVSHMEM_IB_ENABLE_IBGDA=0", AUDIT_DIFFERS, "It should be 1"},
        {"NVSHMEM_REMOTE_TRANSPORT=ibrc", FINE, NULL},
        {"NVSHMEM_REMOTE_TRANSPORT=ibgda", AUDIT_VALUE, "not one of"},
        {"NVSHMEM_DEBUG=WARN,INFO", AUDIT_VALUE, "one word"},
        {"NVSHMEM_IBGDA_SUPPORT=1", AUDIT_VOID, "builds NVSHMEM"},
        {"NVSHMEM_USE_GDRCOPY=1", AUDIT_VOID, "does nothing"},
        {"USE_NVPEERMEM=1", AUDIT_VOID, "does nothing"},
        {"NVSHMEM_DISABLED_GDRCOPY=true", AUDIT_VOID, "NVSHMEM_DISABLE_GDRCOPY"},
        {"NCCL_IB_CUDA_SUPPORT=1", AUDIT_VOID, "removed"},
        {"NVSHMEM_HCA_LISTS=mlx5_0", AUDIT_UNKNOWN, "Is NVSHMEM_HCA_LIST meant?"},
        {"NVHSMEM_DEBUG=INFO", AUDIT_UNKNOWN, "Is NVSHMEM_DEBUG meant?"},
        {"DEEPEP_DEVICE_TO_HCA_MAPPING=0:mlx5_0:1", AUDIT_UNKNOWN, "Is DEEP_EP_DEVICE_TO_HCA_MAPPING meant?"},
        {"DEEPEP_HOME=/opt/deepep", AUDIT_PATH, "does not exist"},
        {"NODE_RANK=1", FINE, NULL},
        {"DOCKER_CONFIG_HOME=/x", FINE, NULL},
        {"NVSHMEM_FUTURE=1", AUDIT_UNKNOWN, "up to 3.5"},
        {"NCCL_FASTRAK_CTRL_DEV=eth0", FINE, NULL},
        {"NVSHMEM_HOME=/opt/x/nvshmem", FINE, NULL},
        {"NVSHMEM_HOME=/opt/gone", AUDIT_PATH, "names a path that does not exist"},
        {"GDRCOPY_HOME=/opt/gone", AUDIT_PATH, "names a path"},
        {"CUDA_HOME=/opt/gone", AUDIT_PATH, "names a path"},
        {"NCCL_TOPO_FILE=/opt/gone.xml", AUDIT_PATH, "names a path"},
        {"NVSHMEM_HCA_LIST=mlx5_1:1", FINE, NULL},
        {"NVSHMEM_HCA_LIST=mlx5_0:1,mlx5_9:1", AUDIT_HARMFUL, "mlx5_9"},
        {"NVSHMEM_HCA_LIST=^mlx5_9", FINE, NULL},
        {"NVSHMEM_IB_GID_INDEX=3", FINE, NULL},
        {"NVSHMEM_IB_GID_INDEX=-1", FINE, NULL},
        {"NVSHMEM_DISABLE_CUDA_VMM=1", AUDIT_DIFFERS, "1 GiB"},
        {"NVSHMEM_DISABLE_CUDA_VMM=0", FINE, NULL},
        {"NVSHMEM_QP_DEPTH=1000", AUDIT_VALUE, "power of two"},
        {"DEEP_EP_DEVICE_TO_HCA_MAPPING=0:mlx5_0:1,1:mlx5_1:1,2:mlx5_2:1,3:mlx5_3:1", FINE, NULL},
        {"DEEP_EP_DEVICE_TO_HCA_MAPPING=0:mlx5_7", AUDIT_VALUE, "not a valid mapping of the GPUs here"},
        {"RDMAV_DRIVERS=/opt/x/nvshmem/libmlx5", FINE, NULL},
        {"LD_PRELOAD=/opt/gone/libx.so", AUDIT_PATH, "does not exist"},
        {"LD_PRELOAD=libx.so", FINE, NULL},
        {"LD_LIBRARY_PATH=/opt/gone", FINE, NULL},
        {"PATH=/bin", FINE, NULL},
        {"CUDA_DEVICE_ORDER=sideways", FINE, NULL},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char name[64];
        const struct audit_row *row;

        snprintf(name, sizeof(name), "%.*s", (int)strcspn(cases[i].setting, "="), cases[i].setting);
        advised_init(&advised);
        advised.software.driver.peer_mapping_override.live = "1";
        tree_folder(&advised.tree, "/opt/x/nvshmem");
        advised_env(&advised, cases[i].setting);
        advised_make(&advised);
        row = find(name);
        if (row && row->kind == AUDIT_MISSING)
            fail_msg("%s: is said to be missing", cases[i].setting);
        if ((row ? (int)row->kind : FINE) != cases[i].kind)
            fail_msg("%s: kind %d (%s), expected %d", cases[i].setting, row ? (int)row->kind : FINE,
                     row ? row->text : "", cases[i].kind);
        if (row && !strstr(row->text, cases[i].text))
            fail_msg("%s: '%s' does not say '%s'", cases[i].setting, row->text, cases[i].text);
        advised_done(&advised);
    }
}

static void make(const char *const *settings)
{
    advised_init(&advised);
    advised.software.driver.peer_mapping_override.live = "1";
    for (; *settings; settings++)
        advised_env(&advised, *settings);
    advised_make(&advised);
}

/* Harmful ones first, then by name; missing ones are included; one row for each variable. */
TEST(test_order)
{
    make((const char *const[]){"NVSHMEM_USE_GDRCOPY=1", "NVSHMEM_REMOTE_TRANSPORT=ibgda",
                               "NVSHMEM_ENABLE_NIC_PE_MAPPING=1", NULL});
    assert_int_equal(advised.audit->n, 5);
    assert_string_equal(advised.audit->rows[0].name, "NVSHMEM_ENABLE_NIC_PE_MAPPING");
    assert_string_equal(advised.audit->rows[1].name, "NVSHMEM_IBGDA_NIC_HANDLER");
    assert_int_equal(advised.audit->rows[1].kind, AUDIT_MISSING);
    assert_string_equal(advised.audit->rows[1].advised, "gpu");
    assert_string_equal(advised.audit->rows[1].value, "");
    assert_string_equal(advised.audit->rows[2].name, "NVSHMEM_IB_ENABLE_IBGDA");
    assert_string_equal(advised.audit->rows[3].name, "NVSHMEM_REMOTE_TRANSPORT");
    assert_string_equal(advised.audit->rows[4].name, "NVSHMEM_USE_GDRCOPY");
    assert_true(advised.audit->uses_software);
    advised_done(&advised);
}

/*
 * Variables of epkit are in the same table; not setting them is not reported, and setting them does not count as use of
 * NVSHMEM, NCCL or DeepEP.
 */
TEST(test_own)
{
    make((const char *const[]){"EPKIT_BACKEND=gpu", "EPKIT_VERBS_DEVCE=mlx5_0", "EPKIT_VERBS_GID_INDEX=256",
                               "EPKIT_VERBS_DEVICE=mlx5_0,mlx5_9:1", "EPKIT_TIMEOUT_MS=", "EPKIT_LAUNCH=1",
                               "EPKIT_SECRET=x", "NO_COLOR=1", NULL});
    assert_int_equal(find("EPKIT_BACKEND")->kind, AUDIT_VALUE);
    assert_non_null(strstr(find("EPKIT_BACKEND")->text, "is not one of host, cuda"));
    assert_int_equal(find("EPKIT_VERBS_DEVCE")->kind, AUDIT_UNKNOWN);
    assert_non_null(strstr(find("EPKIT_VERBS_DEVCE")->text, "Is EPKIT_VERBS_DEVICE meant?"));
    assert_int_equal(find("EPKIT_VERBS_GID_INDEX")->kind, AUDIT_VALUE);
    assert_int_equal(find("EPKIT_VERBS_DEVICE")->kind, AUDIT_VALUE);
    assert_non_null(strstr(find("EPKIT_VERBS_DEVICE")->text, "no RDMA device \"mlx5_9:1\" here"));
    assert_non_null(find("EPKIT_TIMEOUT_MS"));
    assert_null(find("EPKIT_LAUNCH"));
    assert_null(find("EPKIT_SECRET"));
    assert_null(find("NO_COLOR"));
    assert_false(advised.audit->uses_software);
    advised_done(&advised);
    make((const char *const[]){NULL});
    assert_null(find("EPKIT_VERBS_DEVICE"));
    advised_done(&advised);
    /* A device with one port means that port; ranks use the ports in their order. */
    make((const char *const[]){"EPKIT_VERBS_DEVICE=mlx5_0,mlx5_1:1,mlx5_2,mlx5_3", NULL});
    assert_null(find("EPKIT_VERBS_DEVICE"));
    advised_done(&advised);
    make((const char *const[]){"EPKIT_VERBS_DEVICE=mlx5_1,mlx5_0,mlx5_2,mlx5_3", NULL});
    assert_int_equal(find("EPKIT_VERBS_DEVICE")->kind, AUDIT_DIFFERS);
    advised_done(&advised);
}

/* With a list of one NIC the mapping has no effect, as there is a single candidate. */
TEST(test_mapping_with_list)
{
    make((const char *const[]){"NVSHMEM_ENABLE_NIC_PE_MAPPING=1", "NVSHMEM_HCA_LIST=mlx5_2:1", NULL});
    assert_null(find("NVSHMEM_ENABLE_NIC_PE_MAPPING"));
    advised_done(&advised);
    make((const char *const[]){"NVSHMEM_ENABLE_NIC_PE_MAPPING=1", "NVSHMEM_HCA_LIST=mlx5_2:1,mlx5_3:1", NULL});
    assert_int_equal(find("NVSHMEM_ENABLE_NIC_PE_MAPPING")->kind, AUDIT_HARMFUL);
    advised_done(&advised);
}

TEST(test_ranks)
{
    make((const char *const[]){"LOCAL_RANK=2", "LOCAL_WORLD_SIZE=4", "NVSHMEM_HCA_LIST=mlx5_2", NULL});
    assert_null(find("NVSHMEM_HCA_LIST"));
    advised_done(&advised);
    make((const char *const[]){"LOCAL_RANK=2", "LOCAL_WORLD_SIZE=4", "NVSHMEM_HCA_LIST=mlx5_0:1", NULL});
    assert_int_equal(find("NVSHMEM_HCA_LIST")->kind, AUDIT_DIFFERS);
    assert_non_null(strstr(find("NVSHMEM_HCA_LIST")->text, "mlx5_2:1"));
    advised_done(&advised);
    make((const char *const[]){"LOCAL_RANK=1", "LOCAL_WORLD_SIZE=4", NULL});
    assert_int_equal(find("NVSHMEM_HCA_LIST")->kind, AUDIT_MISSING);
    assert_string_equal(find("NVSHMEM_HCA_LIST")->advised, "mlx5_1:1");
    assert_false(advised.audit->uses_software);
    advised_done(&advised);
}

/* The variables that 'epkit env' sets pass the audit. */
TEST(test_advised)
{
    make((const char *const[]){"NVSHMEM_IB_ENABLE_IBGDA=1", "NVSHMEM_IBGDA_NIC_HANDLER=gpu", NULL});
    assert_int_equal(advised.audit->n, 0);
    advised_done(&advised);
}

TEST(test_net_without_its_plugin)
{
    advised_init(&advised);
    advised.software.driver.peer_mapping_override.live = "1";
    advised.software.nccl.plugin.state = SOURCE_ABSENT;
    advised_env(&advised, "NCCL_NET=Socket");
    advised_make(&advised);
    assert_null(find("NCCL_NET"));
    advised_done(&advised);
}

TEST(test_gib)
{
    advised_init(&advised);
    advised.software.driver.peer_mapping_override.live = "1";
    advised.software.nccl.gib = "/usr/local/gib";
    advised.software.nccl.plugin.state = SOURCE_OK;
    advised_env(&advised, "NCCL_NET=gib");
    advised_env(&advised, "NCCL_IB_TC=0");
    advised_env(&advised, "TORCH_NCCL_USE_COMM_NONBLOCKING=0");
    advised_make(&advised);
    assert_null(find("NCCL_NET"));
    assert_int_equal(find("NCCL_IB_TC")->kind, AUDIT_DIFFERS);
    assert_string_equal(find("NCCL_IB_TC")->advised, "52");
    assert_int_equal(find("NCCL_IB_FIFO_TC")->kind, AUDIT_MISSING);
    assert_int_equal(find("TORCH_NCCL_USE_COMM_NONBLOCKING")->kind, AUDIT_HARMFUL);
    advised_done(&advised);
}

/* A mapping that the installed DeepEP does not read, and one that shares NICs. */
TEST(test_mapping)
{
    advised_init(&advised);
    advised.software.driver.peer_mapping_override.live = "1";
    advised.software.deepep.n = 1;
    advised.software.deepep.copies[0] =
        (struct software_copy){.folder = "/opt/x/python/deep_ep", .version = "", .extension = "", .on_path = true};
    advised_env(&advised, "DEEP_EP_DEVICE_TO_HCA_MAPPING=0:mlx5_0,1:mlx5_0,2:mlx5_2,3:mlx5_3");
    advised.software.deepep.imported = 0;
    advised_make(&advised);
    assert_int_equal(find("DEEP_EP_DEVICE_TO_HCA_MAPPING")->kind, AUDIT_VOID);
    advised.software.deepep.mapping_active = true;
    advised.software.deepep.copies[0].defines_mapping = advised.software.deepep.copies[0].calls_mapping = true;
    advised.advice = advice_make(&advised.hardware.topo, &advised.software, advised.map, advised.ibgda);
    advised.audit = audit_make(&advised.hardware.topo, &advised.software, advised.advice);
    assert_int_equal(find("DEEP_EP_DEVICE_TO_HCA_MAPPING")->kind, AUDIT_DIFFERS);
    advised_done(&advised);
}

/* Later versions of NVSHMEM may have unknown variables. */
TEST(test_later_nvshmem)
{
    advised_init(&advised);
    advised.software.driver.peer_mapping_override.live = "1";
    advised.software.nvshmem.version = "3.6.0";
    advised_env(&advised, "NVSHMEM_FUTURE=1");
    advised_make(&advised);
    assert_null(find("NVSHMEM_FUTURE"));
    advised_done(&advised);
}

/* Values are untrusted text: they are made safe to print, and truncated. */
TEST(test_hostile)
{
    char long_value[4000] = "NVSHMEM_REMOTE_TRANSPORT=";

    memset(long_value + strlen(long_value), 'x', sizeof(long_value) - strlen(long_value) - 1);
    advised_init(&advised);
    advised.software.driver.peer_mapping_override.live = "1";
    advised_env(&advised, "NVSHMEM_DEBUG=\033[2J\xff\n");
    advised_env(&advised, "NVSHMEM_\033[2JFOO=1");
    advised_env(&advised, long_value);
    advised_env(&advised, "NVSHMEM_HCA_LIST=,,,:::,mlx5_0:1:1:1,\001");
    advised_env(&advised, "DEEP_EP_DEVICE_TO_HCA_MAPPING=\001:\002,");
    advised_env(&advised, "NVSHMEM_HCA_PREFIX=");
    advised_make(&advised);
    for (int i = 0; i < advised.audit->n; i++) {
        const struct audit_row *row = &advised.audit->rows[i];
        const char *const texts[] = {row->name, row->value, row->text, row->advised};

        for (size_t t = 0; t < sizeof(texts) / sizeof(texts[0]); t++) {
            char shown[2048];

            text_clean(texts[t], shown, sizeof(shown));
            assert_string_equal(texts[t], shown);
        }
        assert_true(strlen(row->value) < 300);
    }
    advised_done(&advised);
}

/* Many unknown variables: the number of rows and the time are bounded. */
TEST(test_many)
{
    char *environment;
    size_t n = 0, bytes = 1 << 20;

    advised_init(&advised);
    advised.software.driver.peer_mapping_override.live = "1";
    environment = malloc(bytes);
    assert_non_null(environment);
    for (int i = 0; n + 64 < bytes; i++)
        n += (size_t)snprintf(environment + n, bytes - n, "NVSHMEM_NOBODY_KNOWS_%06d=1", i) + 1;
    tree_put_bytes(&advised.tree, "/proc/self/environ", environment, n);
    free(environment);
    assert_int_equal(source_open(advised.tree.place, &advised.source), EP_OK);
    advised.hardware.topo.source = advised.software.source = advised.source;
    advised.map = map_best(&advised.hardware.topo);
    advised.ibgda = map_ibgda(&advised.hardware.topo);
    advised.advice = advice_make(&advised.hardware.topo, &advised.software, advised.map, advised.ibgda);
    advised.audit = audit_make(&advised.hardware.topo, &advised.software, advised.advice);
    assert_int_equal(advised.audit->n, AUDIT_MAX);
    advised_done(&advised);
}

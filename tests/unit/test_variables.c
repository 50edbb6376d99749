/* SPDX-License-Identifier: Apache-2.0 */
/* The table of environment variables, and how values are judged by it. */
#include "common/env_variables.h"
#include "common/text.h"
#include "temp.h"

TEST(test_table)
{
    size_t n = 0;

    for (const struct variable *variable = variables; variable->names; variable++) {
        bool is_path = variable->values && strcmp(variable->values, "path") == 0;

        for (const char *left = variable->names; *left; n++) {
            char name[VARIABLE_NAME_BYTES];
            struct piece word = text_take(&left, " ");

            assert_true(word.n > 0 && word.n < sizeof(name));
            snprintf(name, sizeof(name), "%.*s", (int)word.n, word.text);
            if (variable_find(name) != variable)
                fail_msg("%s has two rows", name);
            if (!variable->text && (is_path || variable->effect != VARIABLE_WORKS || variable_is_epkit(name)))
                fail_msg("%s: the text is shown", name);
        }
        if (variable->text && variable->text[strlen(variable->text) - 1] == '.')
            fail_msg("%s: the text is a phrase, without a full stop", variable->names);
        if (variable->effect == VARIABLE_BUILD_ONLY && !variable->values)
            fail_msg("%s: a variable of a build needs to say whether it is a path", variable->names);
    }
    assert_int_equal(n, 375);
    assert_null(variable_find("NVSHMEM_"));
    assert_null(variable_find(""));
    assert_null(variable_find("ZZZ"));
    assert_null(variable_find("nvshmem_debug"));
}

TEST(test_facts)
{
    static const struct {
        const char *name;
        enum variable_effect effect;
    } facts[] = {
        {"NVSHMEM_REMOTE_TRANSPORT", VARIABLE_WORKS},  {"NVSHMEM_IB_ENABLE_IBGDA", VARIABLE_WORKS},
        {"NVSHMEM_IBGDA_NIC_HANDLER", VARIABLE_WORKS}, {"NVSHMEM_HCA_PREFIX", VARIABLE_WORKS},
        {"NVSHMEM_IB_GID_INDEX", VARIABLE_WORKS},      {"NVSHMEM_IBGDA_NUM_RC_PER_PE", VARIABLE_WORKS},
        {"NVSHMEM_QP_DEPTH", VARIABLE_WORKS},          {"NVSHMEM_IBGDA_SUPPORT", VARIABLE_BUILD_ONLY},
        {"NVSHMEM_USE_GDRCOPY", VARIABLE_BUILD_ONLY},  {"NVSHMEM_DISABLED_GDRCOPY", VARIABLE_VOID},
        {"NCCL_IB_CUDA_SUPPORT", VARIABLE_VOID},       {"NCCL_CROSS_NIC", VARIABLE_WORKS},
    };

    for (size_t i = 0; i < sizeof(facts) / sizeof(facts[0]); i++) {
        const struct variable *variable = variable_find(facts[i].name);

        if (!variable)
            fail_msg("%s is not in the table", facts[i].name);
        assert_int_equal(variable->effect, facts[i].effect);
    }
}

TEST(test_values)
{
    static const struct {
        const char *name, *value;
        const char *why; /* NULL: it is taken */
    } cases[] = {
        {"NVSHMEM_REMOTE_TRANSPORT", "ibrc", NULL},
        {"NVSHMEM_REMOTE_TRANSPORT", "IBRC", NULL},
        {"NVSHMEM_REMOTE_TRANSPORT", "none", NULL},
        {"NVSHMEM_REMOTE_TRANSPORT", "ibgda", "is not one of ibrc, ucx, ibdevx, libfabric, none"},
        {"NVSHMEM_REMOTE_TRANSPORT", "ib", "is not one of"},
        {"NVSHMEM_REMOTE_TRANSPORT", "", "is not one of"},
        {"NVSHMEM_REMOTE_TRANSPORT", "ibrc|ucx", "is not one of"},
        {"NVSHMEM_DEBUG", "INFO", NULL},
        {"NVSHMEM_DEBUG", "WARN,INFO", "is a list"},
        {"NVSHMEM_IB_ENABLE_IBGDA", "1", NULL},
        {"NVSHMEM_IB_ENABLE_IBGDA", "true", NULL},
        {"NVSHMEM_IB_ENABLE_IBGDA", "No", NULL},
        {"NVSHMEM_IB_ENABLE_IBGDA", "12", NULL},
        {"NVSHMEM_IB_ENABLE_IBGDA", "off", "is read as true"},
        {"NVSHMEM_IB_ENABLE_IBGDA", "", "is read as true"},
        {"NVSHMEM_IB_ENABLE_IBGDA", "never", "is read as false"},
        {"NVSHMEM_IB_ENABLE_IBGDA", "01", "is read as false"},
        {"NVSHMEM_QP_DEPTH", "4096", NULL},
        {"NVSHMEM_QP_DEPTH", "0x400", NULL},
        {"NVSHMEM_QP_DEPTH", "1000", "is not a power of two"},
        {"NVSHMEM_QP_DEPTH", "64", "is not within 128 and 32768"},
        {"NVSHMEM_QP_DEPTH", "65536", "is not within 128 and 32768"},
        {"NVSHMEM_QP_DEPTH", "many", "is not a number"},
        {"NVSHMEM_QP_DEPTH", "1024 ", "is not a number"},
        {"NVSHMEM_QP_DEPTH", " 1024", "is not a number"},
        {"NVSHMEM_QP_DEPTH", "99999999999999999999", "is not a number"},
        {"NVSHMEM_IB_GID_INDEX", "-1", NULL},
        {"NVSHMEM_IB_GID_INDEX", "-2", "is not within"},
        {"NVSHMEM_SYMMETRIC_SIZE", "2g", NULL},
        {"NVSHMEM_SYMMETRIC_SIZE", "3.1M", NULL},
        {"NVSHMEM_SYMMETRIC_SIZE", ".5m", NULL},
        {"NVSHMEM_SYMMETRIC_SIZE", "1073741824", NULL},
        {"NVSHMEM_SYMMETRIC_SIZE", "2GB", "is not a size"},
        {"NVSHMEM_SYMMETRIC_SIZE", "nan", "is not a size"},
        {"NVSHMEM_SYMMETRIC_SIZE", "", "is not a size"},
        {"NVSHMEM_HOME", "", "names no file"},
        {"NVSHMEM_HOME", "/opt", NULL},
        {"NVSHMEM_HCA_LIST", "", NULL},
        {"NVSHMEM_VERSION", "3.5.19", NULL},
        {"NCCL_IB_ADAPTIVE_ROUTING", "true", "is not a number"},
        {"NCCL_NET_GDR_LEVEL", "pix", NULL},
        {"NCCL_NTHREADS", "300", "is not one of 64, 128, 256, 512"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct variable *variable = variable_find(cases[i].name);
        char why[256] = "";
        bool taken;

        assert_non_null(variable);
        taken = variable_accepts(variable, cases[i].value, why, sizeof(why));
        if (taken != !cases[i].why || (cases[i].why && !strstr(why, cases[i].why)))
            fail_msg("%s=%s: '%s', expected '%s'", cases[i].name, cases[i].value, taken ? "taken" : why,
                     cases[i].why ? cases[i].why : "taken");
    }
}

/* A reason that does not fit is cut, whatever its parts are. */
TEST(test_small_reasons)
{
    for (const struct variable *variable = variables; variable->names; variable++) {
        for (size_t bytes = 1; bytes < 24; bytes++) {
            char *why = malloc(bytes);

            assert_non_null(why);
            why[0] = '\0';
            variable_accepts(variable, "no,such\xff value", why, bytes);
            assert_true(strlen(why) < bytes);
            free(why);
        }
    }
}

TEST(test_true)
{
    static const char *const yes[] = {"1", "true", "T", "yes", "on", "off", "", "2", " 0", "-1"};
    static const char *const no[] = {"0", "00", "0x1", "no", "N", "false", "F", "never", "07"};

    for (size_t i = 0; i < sizeof(yes) / sizeof(yes[0]); i++)
        if (!variable_is_true(yes[i]))
            fail_msg("'%s' is true", yes[i]);
    for (size_t i = 0; i < sizeof(no) / sizeof(no[0]); i++)
        if (variable_is_true(no[i]))
            fail_msg("'%s' is false", no[i]);
    assert_false(variable_is_true(NULL));
}

TEST(test_names)
{
    static const struct {
        const char *name, *nearest;
    } cases[] = {
        {"NVSHMEM_HCA_LISTS", "NVSHMEM_HCA_LIST"},
        {"NVSHMEM_IBGDA_NIC_HANDLE", "NVSHMEM_IBGDA_NIC_HANDLER"},
        {"NVSHMEM_IB_ENABEL_IBGDA", "NVSHMEM_IB_ENABLE_IBGDA"},
        {"NCCL_IB_TCC", "NCCL_IB_TC"},
        {"NVSHMEM_SOMETHING_ELSE", NULL},
        {"NCCL_FASTRAK_CTRL_DEV", NULL},
        {"", NULL},
    };
    char longest[5000], nearest[VARIABLE_NAME_BYTES];

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(variable_nearest(cases[i].name, nearest), cases[i].nearest != NULL);
        if (cases[i].nearest)
            assert_string_equal(nearest, cases[i].nearest);
    }
    memset(longest, 'N', sizeof(longest) - 1);
    longest[sizeof(longest) - 1] = '\0';
    assert_false(variable_nearest(longest, nearest));
    assert_true(variable_has_known_prefix("NVSHMEM_X"));
    assert_true(variable_has_known_prefix("NCCL_X"));
    assert_true(variable_has_known_prefix("DEEP_EP_X"));
    assert_false(variable_has_known_prefix("NVSHMEM"));
    assert_false(variable_has_known_prefix("LD_PRELOAD"));
    assert_false(variable_has_known_prefix("MY_NCCL_X"));
}

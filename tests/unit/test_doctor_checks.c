/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of driver, NICs, limits and topology: a healthy machine, changes to it, and the result of a check. */
#include "doctor_cases.h"

#define MAX_CASES 512

static struct doctor_case cases[MAX_CASES];
static size_t n_cases;

static void add_cases(const struct doctor_case *(*of_group)(size_t *ret_n))
{
    size_t n;
    const struct doctor_case *rows = of_group(&n);

    assert_true(n_cases + n <= MAX_CASES);
    memcpy(cases + n_cases, rows, n * sizeof(*rows));
    n_cases += n;
}

static int gather(void **state)
{
    (void)state;
    add_cases(doctor_cases_driver);
    add_cases(doctor_cases_nic);
    add_cases(doctor_cases_topology);
    return 0;
}

/* The change of a row, by the names in it. */
static void (*change_of(const char *check, const char *name))(struct made *made)
{
    for (size_t i = 0; i < n_cases; i++)
        if (strcmp(cases[i].check, check) == 0 && strcmp(cases[i].name, name) == 0)
            return cases[i].change;
    fail_msg("there is no case %s, %s", check, name);
    return NULL;
}

/* Requirements for the results of all checks. */
/* A command that stops something says so, and a command for a device contains its PCI address. */
static void assert_classified(const struct doctor_result *result)
{
    static const char *const restarts[] = {"reboot", "gpu-reset", "systemctl restart", "cos-extensions install"};
    bool stops = strstr(result->fix, "mlxconfig") != NULL;

    for (size_t i = 0; i < sizeof(restarts) / sizeof(restarts[0]); i++)
        stops = stops || strstr(result->fix, restarts[i]);
    assert_int_equal(result->fix_class == DOCTOR_FIX_NONE, !*result->fix);
    assert_int_equal(result->fix_class > DOCTOR_FIX_SAFE, stops);
    assert_false(result->fix_class > DOCTOR_FIX_SAFE && !*result->fix_cost);
    assert_false(result->fix_class > DOCTOR_FIX_SAFE && result->fix_is_safe);
    assert_int_equal(result->fix_class == DOCTOR_FIX_CUTS_OFF, strstr(result->fix, "mlxconfig") != NULL);
    if (strstr(result->fix, "gpu-reset") || strstr(result->fix, "mlxconfig"))
        assert_non_null(strstr(result->fix, ".0"));
}

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
    assert_classified(result);
    assert_false(result->fix_is_safe && !*result->fix);
}

TEST(test_each_case_ends_as_it_should)
{
    static struct made made;

    for (size_t i = 0; i < n_cases; i++) {
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

/* Each fault is reported by exactly one check. */
TEST(test_a_fault_is_of_one_check)
{
    static struct made made;

    for (size_t i = 0; i < n_cases; i++) {
        if (cases[i].outcome != DOCTOR_FOUND)
            continue;
        made_init(&made);
        cases[i].change(&made);
        made_open(&made);
        for (size_t k = 0; k < n_cases; k++) {
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

/* --fix runs only commands that a reboot reverts. */
TEST(test_fixes_that_are_safe)
{
    static const struct {
        const char *check, *change, *fix;
    } safe[] = {
        {"peermem", "neither_peermem_nor_dmabuf", "sudo modprobe nvidia-peermem"},
        {"nic-access", "no_uverbs", "sudo modprobe ib_uverbs"},
        {"shm", "shm_64_mib", "sudo mount -o remount,size=524288M /dev/shm"},
    };
    static struct made made;

    for (size_t i = 0; i < n_cases; i++) {
        struct doctor_result result = result_of(&made, cases[i].check, cases[i].change);
        bool is_listed = false;

        for (size_t k = 0; k < sizeof(safe) / sizeof(safe[0]); k++)
            is_listed = is_listed || strcmp(result.fix, safe[k].fix) == 0;
        if (result.fix_is_safe && !is_listed)
            fail_msg("%s, %s: '%s' is said to be safe", cases[i].check, cases[i].name, result.fix);
        made_done(&made);
    }
    for (size_t i = 0; i < sizeof(safe) / sizeof(safe[0]); i++) {
        struct doctor_result result = result_of(&made, safe[i].check, change_of(safe[i].check, safe[i].change));

        assert_true(result.fix_is_safe);
        assert_string_equal(result.fix, safe[i].fix);
        made_done(&made);
    }
}

static void assert_severity(const char *check, const char *change, enum doctor_severity severity)
{
    static struct made made;
    struct doctor_result result = result_of(&made, check, change_of(check, change));

    assert_int_equal(result.outcome, DOCTOR_FOUND);
    assert_int_equal(result.severity, severity);
    made_done(&made);
}

TEST(test_severity_is_earned)
{
    assert_severity("gpu-errors", "ecc", DOCTOR_ERROR);
    assert_severity("gpu-errors", "remap_pending", DOCTOR_WARNING);
    assert_severity("gpu-errors", "xid_of_this_boot_in_a_file", DOCTOR_WARNING);
    assert_severity("gpu-errors", "xid", DOCTOR_ERROR);
    assert_severity("memlock", "locked_8_mib", DOCTOR_ERROR);
    assert_severity("memlock", "locked_512_mib", DOCTOR_WARNING);
    assert_severity("shm", "shm_64_mib", DOCTOR_ERROR);
    assert_severity("shm", "shm_512_mib", DOCTOR_WARNING);
    assert_severity("gid", "no_ipv4", DOCTOR_ERROR);
    assert_severity("gid", "ipv6_only", DOCTOR_WARNING);
    assert_severity("port-down", "down", DOCTOR_ERROR);
    assert_severity("port-down", "one_cable_of_four", DOCTOR_WARNING);
    assert_severity("slow-link", "half_rate", DOCTOR_ERROR);
    assert_severity("slow-link", "narrow_gpu", DOCTOR_WARNING);
    assert_severity("visible-devices", "permuted_with_mapping", DOCTOR_WARNING);
    assert_severity("visible-devices", "uuid_with_mapping", DOCTOR_ERROR);
    assert_severity("acs", "acs_redirects", DOCTOR_WARNING);
    assert_severity("affinity", "rank_bound_badly", DOCTOR_WARNING);
}

/* Xids with the same number are counted, and attributed to the GPU at their address. */
TEST(test_xids_are_counted)
{
    static struct made made;
    struct doctor_result result = result_of(&made, "gpu-errors", change_of("gpu-errors", "xid"));

    assert_int_equal(result.n_evidence, 1);
    assert_non_null(strstr(result.evidence[0].what, "2 x NVRM: Xid (PCI:0000:05:00): 79"));
    made_done(&made);
}

TEST_GROUP(gather, NULL)

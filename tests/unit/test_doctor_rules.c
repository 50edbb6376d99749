/* SPDX-License-Identifier: Apache-2.0 */
/* The basis of the rules: Xids, outliers of counters, lines of shell scripts, and the preconditions of checks. */
#include "machine/doctor/fixes.h"
#include "machine/doctor/kernel_log.h"
#include "machine/hardware/counters.h"
#include "made.h"

TEST(test_each_xid_has_its_action)
{
    static const struct {
        int number;
        enum xid_action action;
    } rows[] = {
        {13, XID_OF_PROGRAM}, {31, XID_OF_PROGRAM}, {43, XID_OF_PROGRAM}, {45, XID_OF_PROGRAM}, {48, XID_RESET},
        {63, XID_RECOVERED},  {64, XID_RESET},      {74, XID_LINK},       {79, XID_RESTART},    {94, XID_RECOVERED},
        {95, XID_RESET},      {119, XID_RESET},     {149, XID_LINK},      {154, XID_RECOVERED}, {9999, XID_OTHER},
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        const struct xid *xid = xid_find(rows[i].number);

        assert_int_equal(xid->action, rows[i].action);
        assert_true(*xid->text);
    }
    assert_non_null(strstr(xid_action_text(XID_RESTART), "restart"));
    assert_non_null(strstr(xid_action_text(XID_LINK), "NVLink"));
}

TEST(test_a_counter_stands_out_among_others)
{
    const struct counter_limit *limits;
    char text[64];
    size_t n;

    limits = counter_limits(&n);
    assert_true(n >= 3);
    for (size_t i = 0; i < n; i++) {
        assert_false(counter_is_outlier(&limits[i], limits[i].least - 1, 0));
        assert_true(counter_is_outlier(&limits[i], limits[i].least, 0));
        assert_true(counter_is_outlier(&limits[i], limits[i].least * 5, limits[i].least));
        /* Equal on all, within random variation. */
        assert_false(counter_is_outlier(&limits[i], limits[i].least * 4, limits[i].least));
        assert_true(counter_is_outlier(&limits[i], limits[i].always, limits[i].always));
    }
    counter_limit_text(&limits[0], 73, text, sizeof(text));
    assert_string_equal(text, "the link went down 73 times");
}

TEST(test_lines_that_evaluate_the_environment_of_process_1)
{
    static const char *const yes[] = {
        "source /proc/1/environ", ". /proc/1/environ", "  eval \"$(cat /proc/1/environ)\"",
        "export $(tr '\\0' '\\n' </proc/1/environ | xargs)", "cat /proc/1/environ | xargs -0 -n1"};
    static const char *const no[] = {"# source /proc/1/environ", "echo ready # not: source /proc/1/environ",
                                     "grep -z ^NCCL_ /proc/1/environ", "source /etc/profile.d/x.sh",
                                     "tr '\\0' '\\n' </proc/1/environ >/tmp/list"};

    for (size_t i = 0; i < sizeof(yes) / sizeof(yes[0]); i++)
        assert_true(shell_evaluates_environ(yes[i], strlen(yes[i])));
    for (size_t i = 0; i < sizeof(no) / sizeof(no[0]); i++)
        assert_false(shell_evaluates_environ(no[i], strlen(no[i])));
}

/* Without its preconditions no check finds anything, and each says why it was not run. */
TEST(test_checks_without_what_they_need)
{
    static struct made made;

    made_init(&made);
    made_state(&made, "folders", "/sys/bus/pci/devices", "absent");
    made.hardware.topo.n_gpus = 0;
    made.map.n = 0;
    made_open(&made);
    for (size_t i = 0; doctor_checks[i]; i++) {
        struct doctor_result result;

        if (!(doctor_checks[i]->needs & NEEDS_GPUS) && !(doctor_checks[i]->needs & NEEDS_DRIVER))
            continue;
        doctor_run(&made.doctor, doctor_checks[i], &result);
        assert_int_equal(result.outcome, DOCTOR_NOT_APPLICABLE);
        assert_string_equal(result.text, "there is no NVIDIA GPU");
    }
    made_done(&made);
    made_init(&made);
    made.hardware.topo.nvml = false;
    made.hardware.topo.nvml_why = "made so";
    made_open(&made);
    for (size_t i = 0; doctor_checks[i]; i++) {
        struct doctor_result result;

        if (!(doctor_checks[i]->needs & NEEDS_NVML))
            continue;
        doctor_run(&made.doctor, doctor_checks[i], &result);
        assert_int_equal(result.outcome, DOCTOR_UNKNOWN);
    }
    made_done(&made);
}

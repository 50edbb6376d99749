/* SPDX-License-Identifier: Apache-2.0 */
/* The list of checks, and how a check is run. */
#include "made.h"

#include "machine/doctor/queries.h"

#include <ctype.h>

#define MODES 71 /* rows of docs/failure-modes.md */

static const char *const groups[] = {"driver", "nic",    "verbs",    "nvshmem", "nccl",
                                     "deepep", "limits", "topology", "job"};

static int group_index(const char *group)
{
    for (size_t i = 0; i < sizeof(groups) / sizeof(groups[0]); i++)
        if (strcmp(groups[i], group) == 0)
            return (int)i;
    return -1;
}

static void assert_sentence(const char *id, const char *text)
{
    if (!*text || text[strlen(text) - 1] != '.')
        fail_msg("%s: '%s' is no sentence", id, text);
    if (strchr(text, '!') || strchr(text, '\n'))
        fail_msg("%s: '%s' has what texts do not have", id, text);
}

TEST(test_every_check_is_complete)
{
    int last = 0;

    assert_non_null(doctor_checks[0]);
    for (size_t i = 0; doctor_checks[i]; i++) {
        const struct doctor_check *check = doctor_checks[i];

        assert_non_null(check->run);
        assert_true(*check->title && check->title[strlen(check->title) - 1] != '.');
        assert_sentence(check->id, check->symptom);
        assert_sentence(check->id, check->cause);
        assert_sentence(check->id, check->remedy);
        assert_in_range(check->mode, 1, MODES);
        assert_non_null(check->links[0]);
        for (const char *at = check->id; *at; at++)
            assert_true(islower((unsigned char)*at) || isdigit((unsigned char)*at) || *at == '-');
        /* By group, in the order of the groups. */
        assert_true(group_index(check->group) >= last);
        last = group_index(check->group);
    }
}

TEST(test_ids_are_unique_and_found)
{
    for (size_t i = 0; doctor_checks[i]; i++) {
        assert_ptr_equal(doctor_find(doctor_checks[i]->id), doctor_checks[i]);
        assert_int_equal(group_index(doctor_checks[i]->id), -1);
    }
    assert_null(doctor_find("driver"));
    assert_null(doctor_find(""));
}

/* The public table has a row for each mode, and its last column names checks: one row for each, or the build fails. */
TEST(test_the_table_has_every_mode)
{
    bool has_row[MODES + 1] = {false};
    FILE *file = fopen(FAILURE_MODES, "r");
    int mode, n_named = 0, n_checks = 0;
    char line[4096];

    assert_non_null(file);
    while (fgets(line, sizeof(line), file)) {
        char *end = strrchr(line, '|'), *id;

        if (sscanf(line, "| %d |", &mode) != 1)
            continue;
        assert_in_range(mode, 1, MODES);
        has_row[mode] = true;
        *end = '\0';
        id = strrchr(line, '|') + 2;
        if (*id != '`')
            continue;
        id[strcspn(id + 1, "`") + 1] = '\0';
        if (!doctor_find(id + 1))
            fail_msg("a row of mode %d names '%s', which is no check", mode, id + 1);
        n_named++;
    }
    fclose(file);
    for (mode = 1; mode <= MODES; mode++)
        assert_true(has_row[mode]);
    while (doctor_checks[n_checks])
        n_checks++;
    assert_int_equal(n_named, n_checks);
}

/* --- running one --- */

static void run_nothing(const struct doctor_machine *machine, struct doctor_result *result)
{
    (void)machine;
    (void)result;
}

static void run_loud(const struct doctor_machine *machine, struct doctor_result *result)
{
    (void)machine;
    doctor_found(result, DOCTOR_ERROR, "it says \033[31m%s", "red\nand more");
    for (int i = 0; i < 20; i++)
        doctor_evidence(result, "file", "line %d", i);
    doctor_fix(result, true, "true\nfalse");
}

static const char *const no_links[] = {"x", NULL};

TEST(test_a_check_that_says_nothing_is_fine)
{
    static const struct doctor_check check = {.id = "x", .links = no_links, .run = run_nothing};
    static struct made made;
    struct doctor_result result;

    memset(&result, 0xff, sizeof(result));
    made_init(&made);
    made_open(&made);
    doctor_run(&made.doctor, &check, &result);
    assert_int_equal(result.outcome, DOCTOR_FINE);
    assert_string_equal(result.text, "");
    assert_string_equal(result.fix, "");
    assert_string_equal(result.advice, "");
    assert_int_equal(result.n_evidence + result.n_evidence_left_out, 0);
    assert_false(result.fix_is_safe);
    made_done(&made);
}

TEST(test_what_checks_say_is_clean_and_bounded)
{
    static const struct doctor_check check = {.id = "x", .links = no_links, .run = run_loud};
    static struct made made;
    struct doctor_result result;

    made_init(&made);
    made_open(&made);
    doctor_run(&made.doctor, &check, &result);
    assert_string_equal(result.text, "it says ?[31mred?and more");
    assert_int_equal(result.n_evidence, 8);
    assert_int_equal(result.n_evidence_left_out, 12);
    assert_string_equal(result.evidence[7].what, "line 7");
    assert_string_equal(result.fix, "true\nfalse");
    assert_true(result.fix_is_safe);
    made_done(&made);
}

TEST(test_an_empty_machine_has_no_findings)
{
    struct doctor_machine *machine;
    char folder[PATH_MAX];
    struct source *source;

    temp_template("empty", folder);
    assert_non_null(mkdtemp(folder));
    assert_int_equal(source_open(folder, &source), EP_OK);
    machine = doctor_machine_read(source);
    for (size_t i = 0; doctor_checks[i]; i++) {
        struct doctor_result result;

        doctor_run(machine, doctor_checks[i], &result);
        if (result.outcome == DOCTOR_FOUND)
            fail_msg("%s finds something where nothing is: %s", doctor_checks[i]->id, result.text);
    }
    doctor_machine_free(machine);
    doctor_machine_free(NULL);
    assert_int_equal(rmdir(folder), 0);
}

TEST(test_a_library_that_another_process_names_is_not_loaded)
{
    for (int other = 0; other < 2; other++) {
        struct doctor_machine machine = {0};
        struct doctor_result result;
        struct source *source;

        assert_int_equal(source_open(NULL, &source), EP_OK);
        if (other)
            assert_int_equal(source_set_process(source, getppid()), EP_OK);
        machine.source = source;
        doctor_result_init(&machine, doctor_checks[0], &result);
        machine_check_load(&machine, &result, "the plugin", "/not/there.so", "Install it.");
        assert_int_equal(result.outcome, other ? DOCTOR_FINE : DOCTOR_FOUND);
        source_free(source);
    }
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Internals of epkit install: recipes, journals, packages, scripts. */
#include "cmd/install/install.h"
#include "common/shell.h"
#include "temp.h"
#include "unit.h"

#include <epkit/types.h>
#include <fcntl.h>
#include <unistd.h>

static char *temp_folder(void)
{
    char path[PATH_MAX];

    temp_template("install", path);
    assert_non_null(mkdtemp(path));
    return strdup(path);
}

static void temp_remove(char *folder)
{
    char command[PATH_MAX + 16];

    snprintf(command, sizeof(command), "rm -rf '%s'", folder);
    assert_int_equal(system(command), 0);
    free(folder);
}

static const char steps_text[] =
    "recipe: test\n"
    "title: a test\n"
    "reboots: 1\n"
    "versions: {tool: 1.2-3*}\n"
    "variables:\n"
    "  place: {kind: path, default: /opt/x, env: PLACE}\n"
    "  late: {kind: flag, default: \"0\"}\n"
    "steps:\n"
    "  - {id: c, type: file, title: t, why: w, budget: 1s, needs: [b], path: \"@{place}/c\",\n"
    "     content: \"it's @{tool}\"}\n"
    "  - {id: a, type: apt, title: t, why: w, budget: 2m, packages: {tool: \"@{tool}\"}}\n"
    "  - {id: b, type: command, title: t, why: w, budget: 1h, needs: [a], when: late,\n"
    "     run: touch \"$place\", undo: \"true\", creates: [/x], reboot: after,\n"
    "     verify: [{name: v, run: tool -V, expect: \"^@{tool}$\"}]}\n";

static const char *environment(const char *name)
{
    return strcmp(name, "PLACE") == 0 ? "/from/env" : NULL;
}

static const char *bad_environment(const char *name)
{
    return strcmp(name, "PLACE") == 0 ? "here" : NULL;
}

static struct recipe *parsed(const struct recipe_input *input)
{
    struct recipe *recipe;

    if (recipe_parse("test.yaml", steps_text, strlen(steps_text), input, &recipe) != EP_OK)
        fail_msg("%s", ep_last_error());
    return recipe;
}

TEST(test_recipe)
{
    struct recipe_input input = {.kernel = "6.8", .machine = "x86_64"};
    struct recipe *recipe = parsed(&input);

    assert_int_equal(recipe->n_steps, 3);
    assert_string_equal(recipe->steps[recipe->order[0]].id, "a");
    assert_string_equal(recipe->steps[recipe->order[1]].id, "b");
    assert_string_equal(recipe->steps[recipe->order[2]].id, "c");
    assert_string_equal(arg_text(&recipe->steps[0], "path"), "/opt/x/c");
    assert_string_equal(arg_text(&recipe->steps[0], "content"), "it's 1.2-3*");
    assert_true(recipe->steps[2].skipped);
    /* A value matches literally. */
    assert_string_equal(recipe->steps[2].verify[0].expect, "^1\\.2-3\\*$");
    assert_int_equal(recipe->steps[2].budget_s, 3600);
    assert_int_equal(recipe->steps[0].deadline_s, 60);
    assert_int_equal(recipe->steps[1].deadline_s, 480);
    recipe_free(recipe);
}

/* Default, then environment, then command line. */
TEST(test_values)
{
    static const struct recipe_setting settings[] = {{"late", "1"}, {"place", "/from/line"}};
    struct recipe_input input = {.env = environment};
    struct recipe *recipe = parsed(&input);

    assert_string_equal(recipe_variable_find(recipe, "place")->value, "/from/env");
    assert_int_equal(recipe_variable_find(recipe, "place")->source, FROM_ENVIRONMENT);
    assert_null(recipe_variable_find(recipe, "kernel")->value);
    recipe_free(recipe);
    input.settings = settings;
    input.n_settings = 2;
    recipe = parsed(&input);
    assert_string_equal(arg_text(&recipe->steps[0], "path"), "/from/line/c");
    assert_false(recipe->steps[2].skipped);
    recipe_free(recipe);
}

/* Of a setting and of the environment, but not of the recipe itself, however its file is named. */
TEST(test_refused_values)
{
    static const struct recipe_setting bad[] = {{"late", "maybe"}}, unknown[] = {{"nothing", "1"}};
    struct {
        const char *file, *text;
        struct recipe_input input;
        bool is_value_refused;
    } cases[] = {
        {"test.yaml", steps_text, {.settings = bad, .n_settings = 1}, true},
        {"test.yaml", steps_text, {.settings = unknown, .n_settings = 1}, true},
        {"test.yaml", steps_text, {.env = bad_environment}, true},
        {"--set x.yaml", "recipe: X\n", {.settings = bad, .n_settings = 1}, false},
        {"environment variable x.yaml", "recipe: X\n", {.env = bad_environment}, false},
    };
    struct recipe *recipe;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        bool is_value_refused = false;

        cases[i].input.is_value_refused = &is_value_refused;
        assert_int_equal(recipe_parse(cases[i].file, cases[i].text, strlen(cases[i].text), &cases[i].input, &recipe),
                         EP_E_ARG);
        assert_int_equal(is_value_refused, cases[i].is_value_refused);
    }
}

TEST(test_kinds)
{
    assert_null(value_fault(VALUE_PATH, "/opt/deep-ep/1.2_x"));
    assert_non_null(value_fault(VALUE_PATH, "/opt/.."));
    assert_non_null(value_fault(VALUE_PATH, "/opt/a b"));
    assert_non_null(value_fault(VALUE_PATH, "/opt/\xc3\xa4"));
    assert_null(value_fault(VALUE_VERSION, "1:4.1.4-3+b1~rc"));
    assert_non_null(value_fault(VALUE_VERSION, "1 2"));
    assert_non_null(value_fault(VALUE_VERSION, ""));
    assert_null(value_fault(VALUE_URL, "https://h/a?b=c&d"));
    assert_non_null(value_fault(VALUE_URL, "javascript:x"));
    assert_non_null(value_fault(VALUE_FLAG, "yes"));
    assert_non_null(value_fault(VALUE_SHA256, "abc"));
}

/* --- journal --- */

static ep_status open_journal(const char *path, const char *boot, bool writable, struct journal *ret_journal)
{
    char *folder = strndup(path, (size_t)(strrchr(path, '/') - path));
    int fd = open(folder, O_RDONLY | O_DIRECTORY);
    ep_status status = journal_open(fd, folder, boot, writable, ret_journal);

    close(fd);
    free(folder);
    return status;
}

TEST(test_journal)
{
    char *folder = temp_folder(), path[PATH_MAX + 64];
    struct journal journal;
    FILE *file;

    snprintf(path, sizeof(path), "%s/journal.jsonl", folder);
    assert_int_equal(open_journal(path, "boot-1", false, &journal), EP_OK);
    assert_int_equal(json_array_size(journal.events), 0);
    journal_close(&journal);
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(open_journal(path, "boot-1", true, &journal), EP_OK);
    assert_int_equal(journal_add(&journal, "start", "a", NULL), EP_OK);
    assert_int_equal(journal_add(&journal, "reboot", "a", json_pack("{s:i}", "number", 1)), EP_OK);
    journal_close(&journal);
    /* A power cut in the middle of a line. */
    file = fopen(path, "a");
    fputs("{\"v\":1,\"boot\":\"boot-1\",\"eve", file);
    fclose(file);
    assert_int_equal(open_journal(path, "boot-2", true, &journal), EP_OK);
    assert_false(journal.is_rebuilt);
    assert_int_equal(journal_count(&journal, "start", "a"), 1);
    assert_int_equal(journal_count(&journal, "start", "b"), 0);
    assert_int_equal(journal_count(&journal, "reboot", NULL), 1);
    assert_int_equal(journal_count(&journal, "repaired", NULL), 1);
    assert_string_equal(json_string_value(json_object_get(journal_last(&journal, "reboot", "a"), "boot")), "boot-1");
    assert_int_equal(journal_add(&journal, "finished", NULL, NULL), EP_OK);
    assert_int_equal(journal_count(&journal, "reboot", NULL), 0);
    journal_close(&journal);
    assert_int_equal(open_journal(path, "boot-2", true, &journal), EP_OK);
    assert_int_equal(json_array_size(journal.events), 4);
    journal_close(&journal);
    temp_remove(folder);
}

/* Writes a journal's text, opens it, and returns what is left of it; events can be added in any case. */
static size_t reopened(const char *path, const char *text, size_t bytes, bool *ret_rebuilt)
{
    struct journal journal;
    FILE *file = fopen(path, "w");
    size_t n;

    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, bytes, file), bytes);
    fclose(file);
    assert_int_equal(open_journal(path, "boot-2", true, &journal), EP_OK);
    *ret_rebuilt = journal.is_rebuilt;
    n = json_array_size(journal.events);
    assert_int_equal(journal_add(&journal, "begin", NULL, NULL), EP_OK);
    journal_close(&journal);
    /* The repaired journal is valid. */
    assert_int_equal(open_journal(path, "boot-2", false, &journal), EP_OK);
    assert_false(journal.is_rebuilt);
    assert_int_equal(json_array_size(journal.events), n + 1);
    journal_close(&journal);
    return n;
}

/* Cut at each byte, with zeros in place of unwritten data, and with each byte changed. */
TEST(test_journal_bytes)
{
    static const char lines[] = "{\"v\":1,\"boot\":\"b\",\"event\":\"begin\"}\n"
                                "{\"v\":1,\"boot\":\"b\",\"event\":\"start\",\"step\":\"a\"}\n"
                                "{\"v\":1,\"boot\":\"b\",\"event\":\"reboot\",\"step\":\"a\"}\n";
    char *folder = temp_folder(), path[PATH_MAX + 64], text[sizeof(lines)];
    size_t bytes = sizeof(lines) - 1, n_whole = 0;
    bool is_rebuilt;

    snprintf(path, sizeof(path), "%s/journal.jsonl", folder);
    for (size_t at = 0; at <= bytes; at++) {
        bool is_torn = at > 0 && lines[at - 1] != '\n';

        n_whole += at > 0 && !is_torn;
        /* "repaired" is one more event. */
        assert_int_equal(reopened(path, lines, at, &is_rebuilt), n_whole + is_torn);
        assert_false(is_rebuilt);
        memcpy(text, lines, bytes);
        memset(text + at, 0, bytes - at);
        assert_int_equal(reopened(path, text, bytes, &is_rebuilt), n_whole + (at < bytes));
        assert_false(is_rebuilt);
    }
    for (size_t at = 0; at < bytes; at++) {
        memcpy(text, lines, bytes);
        text[at] = text[at] == '}' ? '{' : '}';
        assert_true(reopened(path, text, bytes, &is_rebuilt) <= 4);
    }
    temp_remove(folder);
}

/* --- packages --- */

static struct step_state packages_state(const char *status, const char *name, const char *pin)
{
    char *folder = temp_folder(), path[PATH_MAX + 64];
    struct check_context context = {.state = "/s", .kernel = "6.8"};
    json_t *packages = json_pack("{s:s}", name, pin);
    struct step_state found;
    FILE *file;

    snprintf(path, sizeof(path), "mkdir -p %s/var/lib/dpkg", folder);
    assert_int_equal(system(path), 0);
    snprintf(path, sizeof(path), "%s/var/lib/dpkg/status", folder);
    file = fopen(path, "w");
    fputs(status, file);
    fclose(file);
    assert_int_equal(source_open(folder, &context.source), EP_OK);
    dpkg_check(&context, packages, &found);
    source_free(context.source);
    json_decref(packages);
    temp_remove(folder);
    return found;
}

TEST(test_packages)
{
    static const char status[] = "Package: tool-extra\nStatus: install ok installed\nVersion: 9\n\n"
                                 "Package: tool\nStatus: install ok installed\nVersion: 2.0-1\nDepends: x\n\n"
                                 "Package: half\nStatus: install ok half-configured\nVersion: 1\n\n"
                                 "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n";

    assert_int_equal(packages_state(status, "tool", "2.0-1").now, STEP_DONE);
    assert_int_equal(packages_state(status, "tool", "2.0-*").now, STEP_DONE);
    assert_int_equal(packages_state(status, "tool", "3.0-1").now, STEP_WRONG);
    assert_non_null(strstr(packages_state(status, "tool", "1.*").text, "2.0-1 is installed, expected 1.*"));
    assert_int_equal(packages_state(status, "half", "1").now, STEP_PARTIAL);
    assert_int_equal(packages_state(status, "gone", "1").now, STEP_TODO);
    assert_int_equal(packages_state(status, "too", "1").now, STEP_TODO);
    assert_int_equal(packages_state("", "tool", "*").now, STEP_TODO);
    assert_int_equal(packages_state("Package: tool", "tool", "*").now, STEP_TODO);
}

/* --- scripts --- */

TEST(test_words)
{
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);

    shell_write(out, "it's $(x) `y` \\ \"z\"\n");
    fclose(out);
    assert_string_equal(text, "'it'\\''s $(x) `y` \\ \"z\"\n'");
    free(text);
}

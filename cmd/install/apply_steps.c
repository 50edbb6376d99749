/* SPDX-License-Identifier: Apache-2.0 */
/*
 * apply_steps.c - applies the steps that are not done, in order.
 *
 * After each step its check runs again: a step that ran and is not done has failed, whatever it returned. Steps that
 * need a reboot wait until all steps that do not depend on them are done, so that there is one reboot for all of them.
 */
#include "base/clock.h"
#include "base/error.h"
#include "common/dir.h"
#include "common/memory.h"
#include "common/temporary.h"
#include "common/text.h"
#include "install.h"

#include <ctype.h>
#include <errno.h>
#include <poll.h>
#include <regex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

/*
 * --- a systemd unit that resumes after a reboot or a power cut ---
 *
 * It is there from the first change until the installation is complete or has failed.
 */

#define UNIT_FOLDER "/etc/systemd/system"
#define WANTS_FOLDER UNIT_FOLDER "/multi-user.target.wants"

static void unit_names(const struct install *install, char ret_unit[256], char ret_link[256])
{
    snprintf(ret_unit, 256, UNIT_FOLDER "/epkit-install-%s.service", install->recipe->name);
    snprintf(ret_link, 256, WANTS_FOLDER "/epkit-install-%s.service", install->recipe->name);
}

static ep_status unit_install(struct install *install)
{
    char unit[256], link_path[256], self[1024], *text = NULL;
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    /* "never" applies to later reboots as well. */
    static const char *const reboots[] = {
        [INSTALL_REBOOT_NOW] = "now", [INSTALL_REBOOT_SENTINEL] = "sentinel", [INSTALL_REBOOT_NEVER] = "never"};
    size_t bytes;
    FILE *file;
    int error;

    /* The unit of an earlier run would resume it as well. */
    if (install->options.no_unit)
        unit_remove(install);
    if (!install->has_systemd || install->options.no_unit)
        return EP_OK;
    unit_names(install, unit, link_path);
    if (n <= 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "/proc/self/exe");
    self[n] = '\0';
    if (strpbrk(self, " \t\"'\\%$") || strpbrk(install->options.state, " \t\"'\\%$"))
        return ep_fail(EP_E_ARG, "%s: a systemd unit cannot contain a path with such characters", self);
    file = memory_stream(&text, &bytes);
    fprintf(file,
            "# Written by epkit install; removed when recipe %s is complete.\n[Unit]\n"
            "Description=epkit install: resume recipe %s\nWants=network-online.target\nAfter=network-online.target\n"
            "[Service]\nType=oneshot\nTimeoutStartSec=infinity\n"
            "ExecStart=%s install resume %s --state %s --reboot %s\n"
            "[Install]\nWantedBy=multi-user.target\n",
            install->recipe->name, install->recipe->name, self, install->recipe->name, install->options.state,
            reboots[install->options.reboot]);
    memory_close(file);
    error = temporary_save(unit, text, bytes, 0644);
    free(text);
    if (error)
        return ep_fail_errno(EP_E_SYSTEM, error, "%s", unit);
    error = dir_link(unit, link_path);
    if (error && error != EEXIST)
        return ep_fail_errno(EP_E_SYSTEM, error, "%s", link_path);
    sync();
    return EP_OK;
}

void unit_remove(struct install *install)
{
    const char *reload[] = {"systemctl", "daemon-reload", NULL};
    char unit[256], link_path[256];

    if (!install->has_systemd)
        return;
    unit_names(install, unit, link_path);
    unlink(link_path);
    if (unlink(unit) == 0)
        run_quietly(reload, 60);
}

/* --- the tests of the recipe --- */

#define VERIFY_SECONDS 120
#define OUTPUT_BYTES 65536

static bool matches(const char *pattern, const char *output)
{
    regex_t regex;
    bool found;

    if (regcomp(&regex, pattern, REG_EXTENDED | REG_NOSUB | REG_NEWLINE) != 0)
        return false;
    found = regexec(&regex, output, 0, NULL, 0) == 0;
    regfree(&regex);
    return found;
}

/* The first line with a word, for the report: mpirun's begin with a line of dashes. "" without one. */
static void first_line_of(const char *output, char ret_text[256])
{
    ret_text[0] = '\0';
    FOR_PIECES (line, output, "\n")
        if (ANY_OF(i, line.n, isalnum((unsigned char)line.text[i]) || (line.text[i] & 0x80))) {
            size_t blank = strspn(line.text, " ");

            snprintf(ret_text, 256, "%.*s", (int)(line.n - blank), line.text + blank);
            break;
        }
    text_clean(ret_text, ret_text, 256);
}

enum install_result install_verify(struct install *install, struct verify_result *ret_results, size_t max,
                                   size_t *ret_n)
{
    char *output = memory_new(OUTPUT_BYTES, 1);
    size_t n = 0;
    bool passed = true, is_interrupted = false;

    for (size_t i = 0; i < install->recipe->n_steps && !is_interrupted; i++) {
        const struct recipe_step *step = &install->recipe->steps[install->recipe->order[i]];

        for (size_t k = 0; k < step->n_verify && n < max && !step->skipped && !is_interrupted; k++) {
            struct verify_result *result = &ret_results[n++];
            int status;

            result->step = step;
            result->verify = &step->verify[k];
            observe_begin(install->recipe, step, PHASE_VERIFY, "");
            status = run_probe(install, step, result->verify->run, VERIFY_SECONDS, output, OUTPUT_BYTES);
            first_line_of(output, result->text);
            result->passed = status == 0;
            if (status == 0 && !matches(result->verify->expect, output)) {
                result->passed = false;
                snprintf(result->text, sizeof(result->text), "its output does not match %.150s",
                         result->verify->expect);
            } else if (status < 0) {
                snprintf(result->text, sizeof(result->text), "no answer within %d s", VERIFY_SECONDS);
            } else if (status != 0 && !*result->text) {
                snprintf(result->text, sizeof(result->text), "exit status %d", status);
            }
            passed = passed && result->passed;
            is_interrupted = observe_is_interrupted();
        }
    }
    free(output);
    *ret_n = n;
    if (is_interrupted)
        return INSTALL_INTERRUPTED;
    return passed ? INSTALL_FINE : INSTALL_FAILED;
}

/* --- applying --- */

#define FETCH_TRIES 5
#define FULL_BYTES 65536 /* with less than this free, a disk counts as full */

/* Does a line of apt or dpkg name an address or a package and why it failed? Their last lines name neither. */
static bool is_cause(const char *line)
{
    return strncmp(line, "E: Failed to fetch ", 19) == 0 || strncmp(line, "dpkg: error processing ", 23) == 0;
}

/* The cause of the failure from the log of the last script: its last line, or the cause where this is a summary. */
static void last_message(struct install *install, const struct recipe_step *step, char ret_text[300])
{
    char name[64], line[1024], cause[300] = "";
    int logs = install_open_logs(install, false);
    bool is_summary = false;
    FILE *file;

    ret_text[0] = '\0';
    snprintf(name, sizeof(name), "%.40s.log", step->id);
    file = file_open_within(logs, name);
    dir_close(logs);
    if (!file)
        return;
    while (fgets(line, sizeof(line), file)) {
        line[strcspn(line, "\r\n")] = '\0';
        if (strncmp(line, "=== 2", 5) == 0) /* a date: the beginning of another script */
            ret_text[0] = cause[0] = '\0';
        if (!*line || strncmp(line, "===", 3) == 0)
            continue;
        text_clean(line, is_cause(line) ? cause : ret_text, 300);
        is_summary = is_cause(line) || *line == ' ' || strncmp(line, "E: ", 3) == 0;
    }
    fclose(file);
    if (is_summary && *cause)
        memcpy(ret_text, cause, sizeof(cause));
}

/* Programs say "write error" of a full disk, or nothing at all: names the folder that has no space. */
static void explain_full_disk(const struct install *install, const struct recipe_step *step, char text[300])
{
    const char *const folders[] = {install->state, install->logs, step->path ? step->path : "/", "/tmp"};
    size_t n = strlen(text);

    for (size_t i = 0; i < COUNT(folders); i++) {
        char path[1024];
        struct statvfs stat;
        int failed;

        /* A file that is not there yet counts to its folder. */
        snprintf(path, sizeof(path), "%.400s%.500s", install->root, folders[i]);
        while ((failed = statvfs(path, &stat)) != 0 && strrchr(path, '/') > path)
            *strrchr(path, '/') = '\0';
        if (failed || (uint64_t)stat.f_bavail * stat.f_frsize >= FULL_BYTES)
            continue;
        snprintf(text + (n < 150 ? n : 150), n < 150 ? 300 - n : 150, "%sno space is left in %.100s (%llu KiB)",
                 n ? "; " : "", path, (unsigned long long)(stat.f_bavail * stat.f_frsize / 1024));
        return;
    }
    if (!n)
        snprintf(text, 300, "it wrote nothing");
}

/* --- one step --- */

static enum install_result step_failed(struct install *install, const struct recipe_step *step, const char *what,
                                       enum run_result run, int status)
{
    char words[300], log[1024];
    json_t *more;

    last_message(install, step, words);
    explain_full_disk(install, step, words);
    run_log_path(install, step, log);
    more = json_pack("{s:s,s:i,s:s}", "result", what, "exit", status, "said", words);
    journal_add(&install->journal, "failed", step->id, more);
    snprintf(install->hint, sizeof(install->hint),
             "its log is %.150s; when the cause is fixed: epkit install resume %s", log, install->recipe->name);
    if (run == RUN_NOT_STARTED)
        return install_fail(install, "step '%s' could not be started: %.300s", step->id, ep_last_error());
    if (run == RUN_LATE)
        return install_fail(install,
                            "step '%s' was stopped at its deadline of %d s (%s); the last line of its log: %.300s",
                            step->id, step->deadline_s, what, words);
    return install_fail(install, "step '%s' failed (%s, exit status %d): %.300s", step->id, what, status, words);
}

/* Only downloads are retried: after 2, 4, 8 and 16 seconds. */
static enum install_result fetch(struct install *install, const struct recipe_step *step)
{
    enum run_result run = RUN_FINE;
    int status = 0;

    if (!step->type->has_fetch)
        return INSTALL_FINE;
    for (int attempt = 1; attempt <= FETCH_TRIES; attempt++) {
        run = run_script(install, step, PHASE_FETCH, &status);
        if (run == RUN_FINE)
            return INSTALL_FINE;
        if (run == RUN_INTERRUPTED || observe_is_interrupted())
            return INSTALL_INTERRUPTED;
        if (run != RUN_FAILED || attempt == FETCH_TRIES)
            break;
        observe_line("step '%s': download failed, attempt %d of %d; again in %d s", step->id, attempt, FETCH_TRIES,
                     1 << attempt);
        for (int i = 0; i < (1 << attempt) * 10 && !observe_is_interrupted(); i++)
            poll(NULL, 0, 100);
    }
    return step_failed(install, step, "download", run, status);
}

/* Checks the machine again. Returns whether the step is in its expected state. */
static enum install_result confirm(struct install *install, const struct recipe_step *step, size_t index, int status)
{
    const struct step_state *state = &install->states[index];

    CMD_TRY(install_probe(install));
    /* A missing module may come with the reboot that its step allows. */
    if (step->reboot == REBOOT_IF_NEEDED && state->now == STEP_TODO && strcmp(step->type->name, "module") == 0)
        state_set(&install->states[index], STEP_REBOOT, "loaded by a reboot");
    if (state->now == STEP_DONE || (state->now == STEP_UNKNOWN && !install->is_live) ||
        (state->now == STEP_REBOOT && step->reboot != REBOOT_NEVER))
        return INSTALL_FINE;
    journal_add(&install->journal, "failed", step->id,
                json_pack("{s:s,s:i,s:s}", "result", "check", "exit", status, "said", state->text));
    snprintf(install->hint, sizeof(install->hint), "its log is %.100s%.120s/%s.log", install->root, install->logs,
             step->id);
    return install_fail(install, "step '%s' ran, but its check fails: %.300s", step->id, state->text);
}

static enum install_result apply_step(struct install *install, const struct recipe_step *step, size_t index)
{
    int attempt = journal_count(&install->journal, "start", step->id) + 1, status;
    uint64_t start = ep_now_ns();
    enum run_result run;
    bool waited;

    if (!run_wait_for_orphans(install, step, &waited))
        return observe_is_interrupted() ? INSTALL_INTERRUPTED
                                        : install_fail(install, "step '%s' of an earlier run does not end", step->id);
    /* The earlier run may have completed the step. */
    if (waited)
        CMD_TRY(install_probe(install));
    if (waited && install->states[index].now == STEP_DONE)
        return INSTALL_FINE;
    /* The script before any change: by its undo.sh uninstall recognises that the step is this recipe's. */
    if (journal_add(&install->journal, "start", step->id,
                    json_pack("{s:i,s:s}", "attempt", attempt, "kernel", install->kernel)) != EP_OK ||
        run_write_script(install, step, PHASE_UNDO) != EP_OK)
        return install_fail_status(install);
    sync();
    CMD_TRY(fetch(install, step));
    run = run_script(install, step, PHASE_APPLY, &status);
    if (run == RUN_INTERRUPTED)
        return INSTALL_INTERRUPTED;
    if (run != RUN_FINE)
        return step_failed(install, step, "apply", run, status);
    CMD_TRY(confirm(install, step, index, status));
    if (journal_add(&install->journal, "end", step->id,
                    json_pack("{s:i,s:I,s:s}", "attempt", attempt, "seconds",
                              (json_int_t)((ep_now_ns() - start) / 1000000000u), "kernel", install->kernel)) != EP_OK)
        return install_fail_status(install);
    /* Applied in this boot. */
    if (step->reboot == REBOOT_AFTER && install->is_live && install->states[index].now == STEP_DONE)
        state_set(&install->states[index], STEP_REBOOT, "applied; it takes effect with a reboot");
    return INSTALL_FINE;
}

/* --- rebooting --- */

static enum install_result stop(struct install *install, int n, const char *step_id, const char *text)
{
    journal_add(&install->journal, "stopped", step_id, json_pack("{s:i,s:s}", "reboots", n, "said", text));
    unit_remove(install);
    install_fail(install, "stopped after %d reboot%s: step '%s' still needs one (%.200s)", n, n == 1 ? "" : "s",
                 step_id, text);
    snprintf(install->hint, sizeof(install->hint),
             "find out why it does not take effect, then: epkit install apply %s "
             "--again",
             install->recipe->name);
    return INSTALL_STOPPED;
}

/* Writes the file that kured checks for. The agent drains the node and reboots it. */
static enum install_result write_sentinel(struct install *install, const char *step_id)
{
    static const char path[] = "/run/reboot-required", text[] = "*** System restart required ***\n";
    int error = temporary_save(path, text, sizeof(text) - 1, 0644);

    if (error)
        return install_fail_errno(install, error, path);
    observe_line("%s", INSTALL_REBOOT_TEXT);
    observe_line("waiting for the node's agent to reboot it (step '%s'): /run/reboot-required is there", step_id);
    return INSTALL_NEEDS_REBOOT;
}

static enum install_result reboot_for(struct install *install, const struct recipe_step *step,
                                      const struct step_state *state)
{
    const char *command[] = {"systemctl", "--no-block", "reboot", NULL};
    int n = journal_count(&install->journal, "reboot", NULL);
    const char *boot = json_string_value(json_object_get(journal_last(&install->journal, "reboot", NULL), "boot"));
    /*
     * A reboot was already requested in this boot: an agent takes its time, or epkit was killed before the machine went
     * down.
     */
    bool is_pending = n > 0 && boot && strcmp(boot, install->boot) == 0;

    if (n >= install->recipe->max_reboots && !is_pending)
        return stop(install, n, step->id, state->text);
    if (install->options.reboot == INSTALL_REBOOT_NEVER || !install->has_systemd) {
        observe_line("a reboot is needed for step '%s' (%s): reboot, then 'epkit install resume %s'", step->id,
                     state->text, install->recipe->name);
        return INSTALL_NEEDS_REBOOT;
    }
    if (!is_pending && journal_add(&install->journal, "reboot", step->id,
                                   json_pack("{s:i,s:s}", "number", n + 1, "said", state->text)) != EP_OK)
        return install_fail_status(install);
    if (install->options.reboot == INSTALL_REBOOT_SENTINEL)
        return write_sentinel(install, step->id);
    observe_line("%s", INSTALL_REBOOT_TEXT);
    sync();
    /*
     * The shutdown may end systemctl, and this process, before they return: that is not a failure, and the unit that
     * resumes after the reboot must stay.
     */
    if (run_quietly(command, 60) != 0 && !observe_is_interrupted()) {
        install_fail(install, "'systemctl reboot' failed, or was ended by the shutdown");
        return INSTALL_NEEDS_REBOOT;
    }
    return INSTALL_REBOOTING;
}

/* --- all steps --- */

static bool depends_on_reboot(const struct install *install, const struct recipe_step *step)
{
    for (size_t i = 0; i < step->n_needs; i++) {
        size_t other = step->needs[i];

        if (install->states[other].now == STEP_REBOOT || depends_on_reboot(install, &install->recipe->steps[other]))
            return true;
    }
    return false;
}

/* Can the step be applied to a folder? */
static bool is_possible(const struct install *install, const struct recipe_step *step)
{
    return install->is_live || install->can_chroot || !step->type->needs_live;
}

/* Checks the values without which no step may begin. */
static enum install_result check_values(struct install *install)
{
    FOR_EACH (variable, install->recipe->variables, install->recipe->n_variables) {
        if (!recipe_variable_is_missing(variable))
            continue;
        install_fail(install, "variable '%s' has no value: %.300s", variable->name, variable->help);
        snprintf(install->hint, sizeof(install->hint), "give it by --set %s=VALUE%s%s", variable->name,
                 *variable->env ? " or the environment variable " : "", variable->env);
        return INSTALL_REFUSED;
    }
    for (size_t i = 0; i < install->recipe->n_steps; i++) {
        const struct recipe_step *step = &install->recipe->steps[i];

        if (install->states[i].now == STEP_DONE || install->states[i].now == STEP_SKIPPED || is_possible(install, step))
            continue;
        install_fail(install, "step '%s' of type %s needs the programs of the machine, and %.200s has none", step->id,
                     step->type->name, install->root);
        snprintf(install->hint, sizeof(install->hint),
                 "below a folder without /bin/sh only steps of type file, "
                 "modprobe and copyset can be applied");
        return INSTALL_REFUSED;
    }
    return INSTALL_FINE;
}

static enum install_result apply_all(struct install *install)
{
    const struct recipe_step *waiting = NULL;

    for (size_t i = 0; i < install->recipe->n_steps; i++) {
        size_t index = install->recipe->order[i];
        const struct recipe_step *step = &install->recipe->steps[index];
        struct step_state *state = &install->states[index];

        if (observe_is_interrupted())
            return INSTALL_INTERRUPTED;
        if (depends_on_reboot(install, step))
            continue;
        if (state->now != STEP_DONE && state->now != STEP_SKIPPED && state->now != STEP_REBOOT)
            CMD_TRY(apply_step(install, step, index));
        if (state->now == STEP_REBOOT && step->reboot == REBOOT_NEVER)
            return install_fail(install, "step '%s' needs a reboot, which the recipe does not allow: %.200s", step->id,
                                state->text);
        if (state->now == STEP_REBOOT && !waiting)
            waiting = step;
        if (state->now == STEP_DONE && *step->says)
            observe_line("%s", step->says);
    }
    if (waiting)
        return reboot_for(install, waiting, &install->states[waiting - install->recipe->steps]);
    return INSTALL_FINE;
}

enum install_result install_check(struct install *install)
{
    enum install_result result = check_values(install);

    if (result != INSTALL_FINE || !preflight_refuses(install) || install_changes(install) == 0)
        return result;
    for (size_t i = 0; i < install->n_preflight; i++)
        if (install->preflight[i].result == PREFLIGHT_REFUSE)
            install_fail(install, "%s: %.300s", install->preflight[i].name, install->preflight[i].text);
    return INSTALL_REFUSED;
}

enum install_result install_apply(struct install *install)
{
    enum install_result result;

    CMD_TRY(install_check(install));
    if (install->options.again)
        journal_add(&install->journal, "again", NULL, NULL);
    else if (install_changes(install) > 0 && journal_count(&install->journal, "stopped", NULL) > 0)
        return stop(install, journal_count(&install->journal, "reboot", NULL),
                    json_string_value(json_object_get(journal_last(&install->journal, "stopped", NULL), "step")),
                    "it was stopped before");
    if (install_changes(install) > 0) {
        if (journal_add(&install->journal, "begin", NULL, json_pack("{s:s}", "kernel", install->kernel)) != EP_OK ||
            unit_install(install) != EP_OK)
            return install_fail_status(install);
    }
    result = apply_all(install);
    if (result == INSTALL_FINE && journal_count(&install->journal, "begin", NULL) > 0)
        journal_add(&install->journal, "finished", NULL, NULL);
    if (result == INSTALL_FINE || result == INSTALL_FAILED)
        unit_remove(install);
    return result;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fix.c - --fix: shows a plan, asks for confirmation, runs the safe commands, and checks again.
 *
 * Safe commands load a module or change a limit until the next reboot; everything else (a reboot, a reset, a file in
 * /etc) is listed for the user.
 */
#include "diagnosis.h"

#include "common/capture.h"
#include "common/output.h"

#include "common/text.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define TIMEOUT_MS 60000  /* of a command */
#define OUTPUT_SHOWN 4096 /* bytes of the output of a failed command */

static void show_output(const struct capture_text *text)
{
    const char *at = text->text;

    while (at && *at && at - text->text < OUTPUT_SHOWN) {
        struct piece line = text_take(&at, "\n");
        char shown[512];

        snprintf(shown, sizeof(shown), "%.*s", (int)(line.n < sizeof(shown) ? line.n : sizeof(shown) - 1), line.text);
        text_clean(shown, shown, sizeof(shown));
        out_line("     | %s", shown);
    }
}

/* Why a command failed, "" if it did not. */
static void describe_failure(const struct capture *capture, char *ret_text, size_t bytes)
{
    *ret_text = '\0';
    if (capture->start_error)
        snprintf(ret_text, bytes, "could not be started: %s", strerror(capture->start_error));
    else if (capture->late)
        snprintf(ret_text, bytes, "did not end within its time and was killed");
    else if (WIFSIGNALED(capture->status))
        snprintf(ret_text, bytes, "was killed by signal %d", WTERMSIG(capture->status));
    else if (WEXITSTATUS(capture->status) != 0)
        snprintf(ret_text, bytes, "ended with exit status %d", WEXITSTATUS(capture->status));
}

static bool run_line(const char *line)
{
    char command[1152], failure[256], shell[] = "/bin/sh", option[] = "-c";
    char *argv[] = {shell, option, command, NULL};
    struct capture capture = {.argv = argv};
    bool needs_root = text_begins(line, "sudo "), is_fine;

    /* Root needs no sudo, which may not be installed; others need one that asks for no password. */
    snprintf(command, sizeof(command), "%s%s", needs_root && geteuid() != 0 ? "sudo -n " : "",
             line + (needs_root ? strlen("sudo ") : 0));
    capture_run(&capture, 1, 1, TIMEOUT_MS, NULL, NULL);
    describe_failure(&capture, failure, sizeof(failure));
    is_fine = *failure == '\0';
    out_line("   %s: %s", command, is_fine ? "done" : failure);
    if (!is_fine) {
        show_output(&capture.output);
        show_output(&capture.error);
    }
    capture_done(&capture);
    return is_fine;
}

/* A command may have several lines; execution stops at the first that fails. */
static bool run_fix(const char *fix)
{
    while (*fix) {
        struct piece part = text_take(&fix, "\n");
        char line[1024];

        snprintf(line, sizeof(line), "%.*s", (int)part.n, part.text);
        if (part.n >= sizeof(line) || !run_line(line))
            return false;
    }
    return true;
}

static bool is_planned(const struct doctor_result *result)
{
    return result->outcome == DOCTOR_FOUND && result->fix_is_safe && *result->fix;
}

/* Prints the plan and the commands that are left to the user; returns the number of commands in the plan. */
static int print_plan(const struct diagnosis *diagnosis)
{
    int n = 0, n_left = 0;

    for (int i = 0; i < diagnosis->n; i++) {
        const struct doctor_result *result = &diagnosis->results[i];

        if (!is_planned(result))
            continue;
        if (n++ == 0)
            out_line("\nPlan:");
        out_line("%2d. %s", n, result->fix);
        out_line("    fixes %s: %s", result->check->id, result->text);
    }
    for (int i = 0; i < diagnosis->n; i++) {
        const struct doctor_result *result = &diagnosis->results[i];

        if (result->outcome != DOCTOR_FOUND || is_planned(result))
            continue;
        if (n_left++ == 0)
            out_line("\nTo run manually, because a reboot does not revert it:");
        diagnosis_print_block(result->check->id, *result->fix      ? result->fix
                                                 : *result->advice ? result->advice
                                                                   : result->check->remedy);
    }
    return n;
}

/* Returns true only if the answer begins with y. */
static bool ask(int n)
{
    char answer[64];

    printf("\nRun %s? [y/N] ", n == 1 ? "it" : "them");
    fflush(stdout);
    return fgets(answer, sizeof(answer), stdin) && tolower((unsigned char)answer[0]) == 'y';
}

/* Runs the checks of the plan again, on the machine as it is now. Returns an exit code. */
static int check_again(const struct cmd *cmd, const struct diagnosis *diagnosis, const struct inspect_options *inspect)
{
    struct doctor_machine *machine = NULL;
    int n_left = 0, code = diagnosis_read(cmd, inspect, &machine);

    if (code != CMD_FINE)
        return code;
    out_line("\nChecking again:");
    for (int i = 0; i < diagnosis->n; i++) {
        const struct doctor_check *check = diagnosis->results[i].check;
        struct doctor_result result;

        if (!is_planned(&diagnosis->results[i]))
            continue;
        doctor_run(machine, check, &result);
        n_left += result.outcome == DOCTOR_FOUND;
        if (result.outcome == DOCTOR_FOUND)
            out_line("   %s: still there: %s", check->id, result.text);
        else
            out_line("   %s: fixed%s%s", check->id, *result.text ? ": " : "", result.text);
    }
    inspect_reading_done();
    doctor_machine_free(machine);
    return n_left ? CMD_FINDINGS : CMD_FINE;
}

int fix_run(const struct cmd *cmd, const struct diagnosis *diagnosis, const struct inspect_options *inspect, bool yes)
{
    int n = print_plan(diagnosis), n_failed = 0, step = 0, code;

    if (n == 0) {
        if (diagnosis->n_found)
            out_line("\n--fix cannot fix any of this.");
        return diagnosis_exit(diagnosis);
    }
    if (!yes) {
        if (!isatty(STDIN_FILENO) || !isatty(STDOUT_FILENO))
            return cmd_usage(cmd, "--fix asks before it runs the plan, and there is no terminal to ask on: use --yes");
        if (!ask(n)) {
            out_line("Nothing was run.");
            return CMD_FINDINGS;
        }
    }
    out_line("%s", "");
    for (int i = 0; i < diagnosis->n; i++)
        if (is_planned(&diagnosis->results[i])) {
            out_line("%2d. %s", ++step, diagnosis->results[i].check->id);
            n_failed += !run_fix(diagnosis->results[i].fix);
        }
    code = check_again(cmd, diagnosis, inspect);
    if (code != CMD_FINE && code != CMD_FINDINGS)
        return code;
    if (n_failed) {
        out_error("%d of %d commands failed", n_failed, n);
        if (geteuid() != 0)
            out_hint("they need root: run this command with sudo");
        return CMD_FAILED;
    }
    return code == CMD_FINDINGS || n < diagnosis->n_found ? CMD_FINDINGS : CMD_FINE;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * step_run.c - the script of a step: its text (the keys of the step as variables, calls of the functions in
 * prelude.sh), and running it in a systemd unit or as a child, with a deadline and a log.
 */
#include "base/clock.h"
#include "base/error.h"
#include "common/capture.h"
#include "common/dir.h"
#include "common/memory.h"
#include "common/shell.h"
#include "common/temporary.h"
#include "common/text.h"
#include "install.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* --- the text --- */

static void set_variable(FILE *script, const char *name, const char *value)
{
    fprintf(script, "%s=", name);
    shell_write(script, value);
    fputc('\n', script);
}

static void script_prelude(FILE *script)
{
    fputs("set -eu\numask 022\nexport LC_ALL=C DEBIAN_FRONTEND=noninteractive EPKIT_ROOT=\"${1-}\"\n", script);
    fwrite(builtin_shell[0].text, 1, builtin_shell[0].bytes, script);
}

void script_begin(FILE *script, const struct recipe *recipe, const struct recipe_step *step, const char *state)
{
    fputs("export EPKIT_STATE=\"$EPKIT_ROOT\"", script);
    shell_write(script, state);
    fputs("\nexport ", script);
    set_variable(script, "EPKIT_STEP", step->id);
    fputs("export EPKIT_BEFORE=\"$EPKIT_STATE/before/$EPKIT_STEP\"\n", script);
    for (size_t i = 0; i < recipe->n_variables; i++) {
        if (!recipe->variables[i].value)
            continue;
        fputs("export ", script);
        set_variable(script, recipe->variables[i].name, recipe->variables[i].value);
    }
}

/* Writes shell text of the recipe so that an `exit` in it ends only the text. */
static void script_shell(FILE *script, const char *text)
{
    size_t bytes = strlen(text);

    fprintf(script, "(\n%s%s)\n", text, bytes && text[bytes - 1] == '\n' ? "" : "\n");
}

#define MAKE_FOLDER "mktemp -d 2>/dev/null || TMPDIR='' mktemp -d 2>/dev/null"

/*
 * With a TMPDIR of its own: another user knows the names that programs take in /tmp, and can take them first. Where
 * none can be made, the text runs without: a full disk is no answer to what it asks. A deadline sends SIGTERM, and
 * systemd a second one when the script's shell has ended.
 */
static void script_shell_apart(FILE *script, const char *text)
{
    fputs("(\nexport TMPDIR=\"$(" MAKE_FOLDER ")\"\n"
          "trap 'rm -rf \"$TMPDIR\"' EXIT\ntrap 'trap \"\" TERM; exit 143' TERM\n",
          script);
    script_shell(script, text);
    fputs(")\n", script);
}

/* A text as it is; of a list or a map each entry on a line, as VALUE or NAME=VALUE. */
static void set_arg(FILE *script, const char *key, const json_t *arg)
{
    const char *between = "";

    fprintf(script, "arg_%s=", key);
    if (json_is_string(arg))
        shell_write(script, json_string_value(arg));
    FOR_JSON (value, arg) {
        fputs(between, script);
        shell_write(script, json_string_value(value));
        between = "'\n'";
    }
    FOR_MEMBERS (name, value, arg) {
        fputs(between, script);
        shell_write(script, name);
        fputc('=', script);
        shell_write(script, json_string_value(value));
        between = "'\n'";
    }
    fputc('\n', script);
}

static void set_file(FILE *script, const struct recipe_step *step)
{
    char *content = step->type->content(step);

    set_variable(script, "file_path", step->path);
    set_variable(script, "file_mode", *arg_text(step, "mode") ? arg_text(step, "mode") : "0644");
    set_variable(script, "file_content", content);
    free(content);
}

/* Writes what the step is, for the functions in prelude.sh. */
static void set_step(FILE *script, const struct recipe_step *step)
{
    fprintf(script, "EPKIT_DIGEST=%016" PRIx64 " EPKIT_MAY_REBOOT=%d\n", step_digest(step),
            step->reboot != REBOOT_NEVER);
    for (const struct step_arg *arg = step->type->args; arg->key; arg++)
        if (arg->shape != VALUE_SHELL && arg->shape != VALUE_TEXT)
            set_arg(script, arg->key, json_object_get(step->args, arg->key));
    if (step->type->content)
        set_file(script, step);
    fputs("epkit_inside \"$EPKIT_BEFORE\"\nmkdir -p \"$EPKIT_BEFORE\"\n", script);
}

static void script_fetch(FILE *script, const struct recipe_step *step)
{
    set_step(script, step);
    fprintf(script, "epkit_fetch_%s\n", step->type->name);
}

void script_apply(FILE *script, const struct recipe_step *step)
{
    const char *text = *arg_text(step, "script") ? arg_text(step, "script") : arg_text(step, "run");

    set_step(script, step);
    if (*text) {
        fputs("epkit_script() ", script);
        script_shell_apart(script, text);
    }
    fprintf(script, "epkit_apply_%s\n", step->type->name);
}

void script_undo(FILE *script, const struct recipe_step *step)
{
    if (*arg_text(step, "undo"))
        script_shell(script, arg_text(step, "undo"));
    fputs("epkit_undo\n", script);
}

void stamp_check(const struct check_context *context, const struct recipe_step *step, bool with_kernel,
                 struct step_state *ret_state)
{
    struct source_text text = source_read(context->source, "%s/stamp/%s", context->state, step->id);
    char expected[24];
    const char *line;

    snprintf(expected, sizeof(expected), "%016" PRIx64 "\n", step_digest(step));
    if (text.state != SOURCE_OK) {
        state_set(ret_state, STEP_TODO, "not made by this recipe");
        return;
    }
    if (strncmp(text.text, expected, strlen(expected)) != 0) {
        state_set(ret_state, STEP_WRONG, "made from another version of this step");
        return;
    }
    line = text.text + strlen(expected);
    if (with_kernel && (strncmp(line, context->kernel, strlen(context->kernel)) != 0 ||
                        line[strlen(context->kernel)] != '\n' || !*context->kernel)) {
        state_set(ret_state, STEP_WRONG, "made for kernel %.*s, and %s runs", (int)strcspn(line, "\n"), line,
                  context->kernel);
        return;
    }
    state_set(ret_state, STEP_DONE, "complete");
}

#define TICK_MS 100
#define STOP_GRACE_S 30    /* between SIGTERM and SIGKILL: dpkg finishes what it writes */
#define SYSTEMD_GRACE_S 90 /* systemd ends a unit at its deadline by itself; this is a fallback */

static const char *const phase_names[] = {"fetch", "apply", "undo", "verify"};

void run_log_path(const struct install *install, const struct recipe_step *step, char ret_path[1024])
{
    snprintf(ret_path, 1024, "%.400s%.300s/%s.log", install->root, install->logs, step->id);
}

/* --- the script --- */

static void script_name(const struct recipe_step *step, enum install_phase phase, char ret_name[64])
{
    snprintf(ret_name, 64, phase == PHASE_UNDO ? "undo.sh" : "%.40s.%s.sh", step->id, phase_names[phase]);
}

static void script_path(const struct install *install, const struct recipe_step *step, enum install_phase phase,
                        char ret_path[1024])
{
    char folder[64], name[64];

    snprintf(folder, sizeof(folder), phase == PHASE_UNDO ? "before/%.40s" : "scripts", step->id);
    script_name(step, phase, name);
    install_path(install, folder, name, ret_path);
}

/* Its folder in the state, which is made. */
static int open_script_folder(const struct install *install, const struct recipe_step *step, enum install_phase phase)
{
    int folder = dir_open_in(install->state_fd, phase == PHASE_UNDO ? "before" : "scripts", true), own;

    if (folder < 0 || phase != PHASE_UNDO)
        return folder;
    own = dir_open_in(folder, step->id, true);
    close(folder);
    return own;
}

ep_status run_write_script(const struct install *install, const struct recipe_step *step, enum install_phase phase)
{
    char path[1024], name[64], *text;
    size_t bytes;
    FILE *script = memory_stream(&text, &bytes);
    int error, folder;

    fprintf(script, "#!/bin/sh\n# %s of step %s of recipe %s. Written by epkit install.\n", phase_names[phase],
            step->id, install->recipe->name);
    script_prelude(script);
    script_begin(script, install->recipe, step, install->state);
    if (phase == PHASE_FETCH)
        script_fetch(script, step);
    else if (phase == PHASE_UNDO)
        script_undo(script, step);
    else {
        script_apply(script, step);
        fputs(": >\"$EPKIT_BEFORE/complete\"\n", script);
    }
    memory_close(script);
    script_path(install, step, phase, path);
    script_name(step, phase, name);
    folder = open_script_folder(install, step, phase);
    error = folder < 0 ? errno : temporary_save_in(folder, name, text, bytes, 0600);
    dir_close(folder);
    free(text);
    return error ? ep_fail(EP_E_SYSTEM, "%s: %s", path, write_reason(error)) : EP_OK;
}

static int open_log(struct install *install, const struct recipe_step *step, enum install_phase phase)
{
    int fd, logs = install_open_logs(install, true);
    char name[64], when[TEXT_TIME_BYTES];

    if (logs < 0)
        return -1;
    snprintf(name, sizeof(name), "%.40s.log", step->id);
    fd = dir_append_in(logs, name, 0644);
    dir_close(logs);
    if (fd < 0)
        return -1;
    dprintf(fd, "=== %s %s %s\n", text_time(time(NULL), when), phase_names[phase], step->id);
    return fd;
}

/* --- a child --- */

static void __attribute__((noreturn)) become(const char *const *argv, int output, int keep_fd)
{
    int nothing = open("/dev/null", O_RDONLY);
    sigset_t none;

    /* A new session: an interrupt at the terminal ends epkit, and lets dpkg complete its work. */
    setsid();
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    /* The lock is held as long as the step runs, also after epkit has ended. */
    if (keep_fd >= 0)
        fcntl(keep_fd, F_SETFD, 0);
    if (nothing >= 0 && dup2(nothing, STDIN_FILENO) >= 0 && dup2(output, STDOUT_FILENO) >= 0 &&
        dup2(output, STDERR_FILENO) >= 0)
        execvp(argv[0], (char *const *)argv);
    dprintf(output, "%s cannot be run: %s\n", argv[0], strerror(errno));
    _exit(127);
}

static int status_of(int status)
{
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* Waits for a child until the deadline, then ends its process group. */
static enum run_result wait_for(pid_t pid, int deadline_s, int budget_s, int *ret_status)
{
    uint64_t start = ep_now_ns();
    bool is_late = false;

    for (;;) {
        int64_t seconds = (int64_t)((ep_now_ns() - start) / 1000000000u);
        int status;
        pid_t ended = waitpid(pid, &status, WNOHANG);

        if (ended == pid) {
            *ret_status = status_of(status);
            return is_late ? RUN_LATE : *ret_status == 0 ? RUN_FINE : RUN_FAILED;
        }
        if (observe_is_interrupted())
            return RUN_INTERRUPTED;
        if (seconds >= deadline_s && !is_late) {
            kill(-pid, SIGTERM);
            is_late = true;
        }
        if (seconds >= deadline_s + STOP_GRACE_S) {
            kill(-pid, SIGKILL);
            waitpid(pid, &status, 0);
            *ret_status = 128 + SIGKILL;
            return RUN_LATE;
        }
        observe_tick(seconds, budget_s);
        poll(NULL, 0, TICK_MS);
    }
}

/* `last`: the unique part of the unit's name, or "*" for all units of the step. */
static void unit_name(const struct install *install, const struct recipe_step *step, const char *last,
                      char ret_name[160])
{
    snprintf(ret_name, 160, "epkit-step:%s:%s:%s.service", install->recipe->name, step->id, last);
}

/*
 * A new name for each script: systemd refuses the name of a unit that it has not unloaded yet, which may take long if a
 * process of a package does not end or the machine is slow.
 */
static void new_unit_name(const struct install *install, const struct recipe_step *step, char ret_name[160])
{
    static unsigned n;
    char last[48];

    snprintf(last, sizeof(last), "%d-%u", (int)getpid(), ++n);
    unit_name(install, step, last, ret_name);
}

/* Under systemd the unit has the deadline, and the child that waits for it has a longer one. */
static pid_t start(struct install *install, const struct recipe_step *step, const char *name, const char *path, int log)
{
    char unit[200], limit[64], output[1100], error[1100], stop[64];
    const char *inside = path + strlen(install->root);
    const char *systemd[] = {"systemd-run", "--quiet", "--wait", "--collect", "--service-type=exec",
                             unit,          "-p",      limit,    "-p",        stop,
                             "-p",          output,    "-p",     error,       "/bin/sh",
                             path,          NULL};
    /* After chroot the script sees the root as "/". */
    const char *in_root[] = {"chroot", install->root, "/bin/sh", inside, NULL};
    const char *plain[] = {"/bin/sh", path, install->root, NULL};
    char log_path[1024];
    pid_t pid;

    run_log_path(install, step, log_path);
    snprintf(unit, sizeof(unit), "--unit=%s", name);
    snprintf(limit, sizeof(limit), "RuntimeMaxSec=%d", step->deadline_s);
    snprintf(stop, sizeof(stop), "TimeoutStopSec=%d", STOP_GRACE_S);
    snprintf(output, sizeof(output), "StandardOutput=append:%s", log_path);
    snprintf(error, sizeof(error), "StandardError=append:%s", log_path);
    pid = fork();
    if (pid == 0) {
        if (install->has_systemd)
            become(systemd, log, -1);
        become(install->can_chroot ? in_root : plain, log, install->lock_fd);
    }
    return pid;
}

enum run_result run_script(struct install *install, const struct recipe_step *step, enum install_phase phase,
                           int *ret_status)
{
    char path[1024], log_path[1024], name[160];
    enum run_result result;
    uint64_t started;
    int log;
    pid_t pid;

    *ret_status = -1;
    if (phase != PHASE_UNDO && run_write_script(install, step, phase) != EP_OK)
        return RUN_NOT_STARTED;
    script_path(install, step, phase, path);
    log = open_log(install, step, phase);
    run_log_path(install, step, log_path);
    if (log < 0) {
        ep_fail_errno(EP_E_SYSTEM, errno, "%s", log_path);
        return RUN_NOT_STARTED;
    }
    observe_begin(install->recipe, step, phase, log_path);
    new_unit_name(install, step, name);
    started = ep_now_ns();
    pid = start(install, step, name, path, log);
    if (pid < 0) {
        ep_fail_errno(EP_E_SYSTEM, errno, "a process cannot be started");
        close(log);
        return RUN_NOT_STARTED;
    }
    result = wait_for(pid, step->deadline_s + (install->has_systemd ? SYSTEMD_GRACE_S : 0), step->budget_s, ret_status);
    if (result == RUN_LATE && install->has_systemd) {
        const char *stop[] = {"systemctl", "kill", "--signal=KILL", name, NULL};

        run_quietly(stop, 30);
    }
    /* systemd ends a unit at its deadline, and systemd-run reports that as an ordinary failure. */
    if (result == RUN_FAILED && install->has_systemd &&
        ep_now_ns() - started >= (uint64_t)step->deadline_s * 1000000000u)
        result = RUN_LATE;
    if (result != RUN_FINE && result != RUN_INTERRUPTED)
        dprintf(log, "=== exit status %d\n", *ret_status);
    close(log);
    return result;
}

/* --- small commands --- */

/* Its exit status, and the beginning of its standard output; -1: not started, late, or interrupted (NULL: never). */
static int run_captured(const char *const *argv, int seconds, bool (*is_interrupted)(void), char *ret_output,
                        size_t bytes)
{
    struct capture capture = {.argv = (char *const *)argv, .bytes_max = bytes, .is_interrupted = is_interrupted};
    int status = -1;

    capture_run(&capture, 1, 1, seconds * INT64_C(1000), NULL, NULL);
    if (!capture.start_error && !capture.late)
        status = status_of(capture.status);
    if (bytes)
        snprintf(ret_output, bytes, "%s", capture.output.text ? capture.output.text : "");
    capture_done(&capture);
    return status;
}

int run_quietly(const char *const *argv, int seconds)
{
    return run_captured(argv, seconds, NULL, NULL, 0);
}

int run_probe(struct install *install, const struct recipe_step *step, const char *text, int seconds, char *ret_output,
              size_t bytes)
{
    char *script, folder[1024];
    size_t size;
    FILE *out;
    int status;

    ret_output[0] = '\0';
    /* Not by the text's own shell, as in script_shell_apart(): at its deadline that is killed outright. */
    if (run_captured(TEXTS("/bin/sh", "-c", MAKE_FOLDER), seconds, observe_is_interrupted, folder, sizeof(folder)) < 0)
        return -1;
    folder[strcspn(folder, "\n")] = '\0';
    out = memory_stream(&script, &size);
    fputs("set -eu\nexport LC_ALL=C EPKIT_ROOT=\n", out);
    script_begin(out, install->recipe, step, install->state);
    fputs("exec 2>&1\nexport ", out);
    set_variable(out, "TMPDIR", folder);
    script_shell(out, text);
    memory_close(out);
    status = run_captured((const char *const[]){"/bin/sh", "-c", script, NULL}, seconds, observe_is_interrupted,
                          ret_output, bytes);
    free(script);
    if (*folder)
        run_quietly(TEXTS("rm", "-rf", "--one-file-system", "--", folder), 60);
    return status;
}

/* --- steps that outlived their run --- */

bool run_wait_for_orphans(struct install *install, const struct recipe_step *step, bool *ret_waited)
{
    char pattern[160], output[1024], log[1024];
    const char *list[] = {"systemctl", "list-units", "--plain", "--no-legend", "--state=active,activating,deactivating",
                          pattern,     NULL};
    uint64_t start = ep_now_ns();
    bool is_reported = false;

    *ret_waited = false;
    if (!install->has_systemd)
        return true;
    unit_name(install, step, "*", pattern);
    run_log_path(install, step, log);
    for (;;) {
        int64_t seconds = (int64_t)((ep_now_ns() - start) / 1000000000u);

        if (run_captured(list, 30, NULL, output, sizeof(output)) != 0 || !strstr(output, step->id))
            return true;
        if (!is_reported) {
            observe_begin(install->recipe, step, PHASE_APPLY, log);
            observe_line("a step of an earlier run is still running: waiting for it");
        }
        *ret_waited = is_reported = true;
        if (seconds > step->deadline_s + SYSTEMD_GRACE_S + STOP_GRACE_S || observe_is_interrupted())
            return false;
        observe_tick(seconds, step->budget_s);
        poll(NULL, 0, 500);
    }
}

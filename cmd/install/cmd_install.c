/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_install.c - epkit install: applies recipes to a machine, and undoes them. */
#include "common/output.h"
#include "install_output.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define REBOOT_WAIT_S 180 /* time for the machine to go down */

/* clang-format off */
static const char *const reboot_choices[] = {"now", "sentinel", "never", NULL};

static const struct opt install_table[] = {
    {"root", 0, "DIR", OPT_DIR, offsetof(struct install_cmd_options, install.root),
     .help = "the machine below this folder instead of this one; steps run by chroot if it has a /bin/sh",
     .heading = "Machine"},
    {"state", 0, "DIR", OPT_DIR, offsetof(struct install_cmd_options, install.state),
     .value = INSTALL_STATE, .help = "folder of the journal, downloads and what uninstall needs"},
    {"set", 0, "LIST", OPT_STRING, offsetof(struct install_cmd_options, set),
     .help = "values of the recipe's variables: NAME=VALUE, separated by commas", .heading = "Recipe"},
    {"reboot", 0, "HOW", OPT_CHOICE, offsetof(struct install_cmd_options, install.reboot), .choices = reboot_choices,
     .value = "now",
     .help = "where a step needs a reboot: now reboots; sentinel leaves /run/reboot-required for an agent that drains "
             "the node first; never ends with exit code 3", .heading = "Reboots"},
    {"no-resume-unit", 0, NULL, OPT_FLAG, offsetof(struct install_cmd_options, install.no_unit),
     .help = "install no systemd unit that resumes after a reboot: something else runs apply again"},
    {"again", 0, NULL, OPT_FLAG, offsetof(struct install_cmd_options, install.again),
     .help = "with apply: forget the reboots made so far"},
    OPT_JSON_ROW(struct install_cmd_options, json),
    {0},
};
/* clang-format on */

static const char *const actions[] = {"plan", "apply", "status", "verify", "resume", "uninstall", "list", "show", NULL};

/* One call of the command. */
struct act {
    const struct cmd *cmd;
    struct install_cmd_options options;
    const char *action; /* word of the command line */
    struct install install;
    struct verify_result results[VERIFY_MAX];
    size_t n_results;
    bool is_verified; /* `results` are those of the recipe's tests */
};

/* Writes the report as JSON if that was requested, and returns the exit code: `code`, unless it cannot be written. */
static int end(struct act *act, const char *name, int code)
{
    const struct verify_result *results = act->is_verified ? act->results : NULL;

    if (act->options.json)
        return out_json(report_json(act->cmd, &act->install, act->action, name, results, act->n_results)) == 0
                   ? code
                   : CMD_FAILED;
    return out_finish() == CMD_FINE ? code : CMD_FAILED;
}

/* Reports the end on standard error, and returns the exit code. */
static int finish(struct act *act, enum install_result result)
{
    static const struct {
        const char *name; /* its name in JSON */
        int code;
    } endings[] = {
        [INSTALL_FINE] = {"fine", CMD_FINE},
        [INSTALL_FAILED] = {"failed", CMD_FAILED},
        [INSTALL_REBOOTING] = {"rebooting", CMD_FINDINGS},
        [INSTALL_NEEDS_REBOOT] = {"wants-reboot", CMD_FINDINGS},
        [INSTALL_STOPPED] = {"stopped", CMD_FAILED},
        [INSTALL_REFUSED] = {"refused", CMD_UNSUPPORTED},
        [INSTALL_BUSY] = {"busy", CMD_FAILED},
        [INSTALL_INTERRUPTED] = {"interrupted", CMD_FAILED},
    };
    const struct install *install = &act->install;
    int code = endings[result].code;

    progress_stop();
    if (result == INSTALL_INTERRUPTED) {
        if (install->lock_fd < 0)
            out_error("interrupted; nothing was changed");
        else
            out_error("interrupted; the current step is completed, and 'epkit install %s %s' continues",
                      strcmp(act->action, "uninstall") == 0 ? act->action : "resume", install->recipe->name);
        code = 128 + observed_signal();
    } else if (*install->failure) {
        out_error("%s", install->failure);
        if (*install->hint)
            out_hint("%s", install->hint);
    }
    /* A value is missing. */
    if (result == INSTALL_REFUSED && !preflight_refuses(install))
        code = CMD_USAGE;
    return end(act, endings[result].name, code);
}

/* A node that reboots must not be taken for installed: this process ends when the machine does. */
static enum install_result wait_for_reboot(struct install *install)
{
    for (int i = 0; i < REBOOT_WAIT_S * 10 && !observed_signal(); i++)
        poll(NULL, 0, 100);
    if (observed_signal())
        return INSTALL_REBOOTING;
    return install_fail(install, "the machine did not go down within %d s", REBOOT_WAIT_S);
}

/* --- actions --- */

static int do_plan(struct act *act)
{
    struct install *install = &act->install;

    if (!act->options.json)
        report_plan(install, "plan", true);
    if (install_changes(install) == 0)
        return end(act, "fine", CMD_FINE);
    return preflight_refuses(install) ? end(act, "refused", CMD_UNSUPPORTED) : end(act, "changes", CMD_FINDINGS);
}

static int do_status(struct act *act)
{
    if (!act->options.json)
        report_status(&act->install);
    return install_changes(&act->install) == 0 ? end(act, "fine", CMD_FINE) : end(act, "incomplete", CMD_FINDINGS);
}

/* The step is done, and its tests pass. */
static enum install_result verify(struct act *act)
{
    struct install *install = &act->install;
    enum install_result result = install_verify(install, act->results, VERIFY_MAX, &act->n_results);
    size_t n = act->n_results, n_failed = COUNT_OF(i, n, !act->results[i].passed);

    act->is_verified = true;
    progress_stop();
    if (!act->options.json && result != INSTALL_INTERRUPTED) {
        if (install_changes(install) > 0)
            out_verdict(OUT_BAD,
                        "%zu steps are not done, and %zu of %zu tests fail: 'epkit install apply %s' does them.",
                        install_changes(install), n_failed, n, install->recipe->name);
        else if (n_failed)
            out_verdict(OUT_BAD, "%zu of %zu tests fail.", n_failed, n);
        else
            out_verdict(OUT_GOOD, "All steps are done, and %zu tests pass.", n);
        report_verify(act->results, n);
    }
    return result;
}

/* Prints the lines by which scripts find out that a step is done: only where its tests pass. */
static void print_done(const struct act *act)
{
    const struct install *install = &act->install;

    for (size_t i = 0; i < install->recipe->n_steps; i++) {
        size_t index = install->recipe->order[i];
        const struct recipe_step *step = &install->recipe->steps[index];

        if (install->states[index].now == STEP_DONE && *step->says &&
            !ANY_OF(k, act->n_results, act->results[k].step == step && !act->results[k].passed))
            out_line("%s", step->says);
    }
}

static int do_verify(struct act *act)
{
    enum install_result result;

    if (!act->install.is_live) {
        out_error("tests run on the machine itself, but --root is another one");
        out_hint("leave --root out there; 'plan' and 'status' take it");
        return CMD_UNSUPPORTED;
    }
    result = verify(act);
    if (result == INSTALL_INTERRUPTED)
        return finish(act, result);
    if (!act->options.json)
        print_done(act);
    if (result != INSTALL_FINE || install_changes(&act->install) > 0)
        return end(act, "findings", CMD_FINDINGS);
    return end(act, "fine", CMD_FINE);
}

/* Applies, and tests what was applied. */
static int do_apply(struct act *act)
{
    struct install *install = &act->install;
    enum install_result result = install_check(install);
    bool had_changes;

    if (result == INSTALL_FINE)
        result = install_begin(install);
    if (!act->options.json && (result == INSTALL_FINE || result == INSTALL_REFUSED))
        report_plan(install, "apply", false);
    had_changes = install_changes(install) > 0;
    if (result == INSTALL_FINE)
        result = install_apply(install);
    if (result == INSTALL_FINE && had_changes && install->is_live) {
        result = verify(act);
        if (result == INSTALL_FAILED)
            install_fail(install, "all steps are applied, but not all tests pass");
    }
    if (result == INSTALL_REBOOTING)
        result = wait_for_reboot(install);
    return finish(act, result);
}

/* Reports a successful uninstall. */
static void print_uninstalled(const struct install *install, bool was_known)
{
    char logs[1024];

    snprintf(logs, sizeof(logs), "%.400s%.500s", install->root, install->logs);
    if (!was_known)
        out_verdict(OUT_GOOD, "Nothing to uninstall: recipe %s was not applied here, or is uninstalled already.",
                    install->recipe->name);
    else if (access(logs, F_OK) == 0)
        out_verdict(OUT_GOOD, "Recipe %s is uninstalled; its logs are in %s.", install->recipe->name, logs);
    else
        out_verdict(OUT_GOOD, "Recipe %s is uninstalled; it had changed nothing.", install->recipe->name);
    FOR_JSON (text, install->left)
        out_line("  left     %s", json_string_value(text));
}

static int do_uninstall(struct act *act)
{
    struct install *install = &act->install;
    bool was_known = install_is_known(install);
    enum install_result result = INSTALL_FINE;

    if (was_known) {
        if (!act->options.json)
            out_line("Steps of recipe %s are undone in reverse order, as far as they changed anything.",
                     install->recipe->name);
        result = install_begin(install);
        if (result == INSTALL_FINE)
            result = install_undo(install);
        progress_stop();
        /* The steps are checked again for the report, if there is time. */
        if (act->options.json && result != INSTALL_BUSY && result != INSTALL_INTERRUPTED) {
            enum install_result probed = install_probe(install);

            result = result == INSTALL_FINE ? probed : result;
        }
    }
    if (result == INSTALL_FINE && !act->options.json)
        print_uninstalled(install, was_known);
    return finish(act, result);
}

/* A resume begins nothing: it continues an apply. */
static int do_resume(struct act *act)
{
    const char *name = act->install.recipe->name;

    if (install_is_known(&act->install))
        return do_apply(act);
    out_error("recipe %s was not applied here, or is uninstalled: there is nothing to resume", name);
    out_hint("'epkit install apply %s' starts an installation; nothing was changed", name);
    return CMD_USAGE;
}

/* Actions that check the machine. */
static const struct action {
    const char *name;
    int (*run)(struct act *act);
    bool is_saved; /* for the recipe as it was applied */
    bool changes;  /* changes the machine */
} machine_actions[] = {
    {"plan", do_plan, false, false},    {"apply", do_apply, false, true},  {"status", do_status, true, false},
    {"verify", do_verify, true, false}, {"resume", do_resume, true, true}, {"uninstall", do_uninstall, true, true},
};

static int run(struct act *act, const struct action *action, const char *name)
{
    struct chosen_recipe chosen;
    enum install_result result;
    int code;

    CMD_TRY(recipe_choose(act->cmd, &act->options, name, action->is_saved, &chosen));
    if (action->changes && geteuid() != 0 && !act->options.install.root) {
        out_error("%s changes the machine and must be run as root; 'plan' needs no root", action->name);
        recipe_release(&chosen);
        return CMD_UNSUPPORTED;
    }
    result = install_open(chosen.recipe, &act->options.install, &act->install);
    if (result == INSTALL_FINE)
        result = install_probe(&act->install);
    if (result == INSTALL_FINE)
        result = preflight_run(&act->install);
    code = result == INSTALL_FINE ? action->run(act) : finish(act, result);
    install_close(&act->install);
    recipe_release(&chosen);
    return code;
}

/* The state of all recipes that were applied. The exit code is the worst. */
static int run_status(const struct cmd *cmd, struct act *act, const struct action *action)
{
    char names[SAVED_MAX][64];
    int n = act->options.json || act->options.set ? 0 : recipe_saved(&act->options, SAVED_MAX, names), worst = CMD_FINE;
    struct install_cmd_options options = act->options;

    if (n < 2)
        return run(act, action, NULL);
    for (int i = 0; i < n; i++) {
        int code;

        if (i > 0)
            out_line("%s", "");
        *act = (struct act){.cmd = cmd, .options = options, .action = action->name};
        code = run(act, action, names[i]);
        worst = code > worst ? code : worst;
    }
    return worst;
}

static int cmd_install(const struct cmd *cmd, const struct cmd_call *call)
{
    static struct act act;
    struct install_cmd_options options = *(const struct install_cmd_options *)call->options;
    const char *action = call->args[0], *first = call->n_args > 1 ? call->args[1] : NULL;
    char self[PATH_MAX];
    struct stat info;
    size_t i = 0;

    /* For tests of a recipe that call epkit. */
    if (realpath("/proc/self/exe", self))
        setenv("EPKIT_COMMAND", self, 0);
    if (value_fault(VALUE_PATH, options.install.state))
        return cmd_usage(cmd, "--state: %s", value_fault(VALUE_PATH, options.install.state));
    if (strlen(options.install.state) > INSTALL_STATE_MAX)
        return cmd_usage(cmd, "--state: it is longer than %d characters", INSTALL_STATE_MAX);
    if (options.json && strcmp(action, "show") == 0)
        return cmd_usage(cmd, "--json does not apply to %s, which writes the file itself", action);
    if (call->n_args > 1 && strcmp(action, "list") == 0)
        return cmd_usage(cmd, "list takes no recipe; 'show' prints one");
    if (options.install.root && stat(options.install.root, &info) != 0)
        return cmd_refuse(cmd, "--root", "%s: %s", options.install.root, strerror(errno));
    if (options.install.root && !S_ISDIR(info.st_mode))
        return cmd_refuse(cmd, "--root", "%s: not a folder", options.install.root);
    if (options.install.again && strcmp(action, "apply") != 0)
        return cmd_usage(cmd, "--again applies only to apply");
    if (options.install.root && strcmp(options.install.root, "/") == 0)
        options.install.root = NULL;
    options.install.keep = strcmp(action, "uninstall") == 0;
    if (strcmp(action, "list") == 0)
        return recipe_list(cmd, options.json);
    if (strcmp(action, "show") == 0)
        return recipe_show(cmd, first);
    observe(options.json);
    act = (struct act){.cmd = cmd, .options = options, .action = action};
    while (strcmp(action, machine_actions[i].name) != 0)
        i++;
    return machine_actions[i].run == do_status && !first ? run_status(cmd, &act, &machine_actions[i])
                                                         : run(&act, &machine_actions[i], first);
}

const struct cmd command_install = {
    .name = "install",
    .args = "ACTION [RECIPE]",
    .min_args = 1,
    .max_args = 2,
    .arg_choices = actions,
    .summary = "apply a recipe to a machine, or undo it",
    .description =
        "A recipe lists typed steps: packages in given versions, files, options of kernel modules, builds. plan "
        "reports which steps are done, missing, partly done or in a wrong version, and changes nothing. apply applies "
        "the steps that are not done and then runs the recipe's tests; it may be killed, lose power or its journal at "
        "any time and be run again. Where a step needs it, apply reboots the machine, up to the limit in the recipe, "
        "and a systemd unit resumes the installation afterwards. uninstall removes what apply "
        "added, puts back files that it replaced, and reports what it leaves.\n\n"
        "RECIPE is one of 'epkit install list', or a file (with a / or .yaml in its name); show prints a built-in one, to "
        "start a new file from. resume, status, verify and uninstall use the recipe as it was applied; resume "
        "needs no name if only one was applied.\n\n"
        "On a machine with systemd each step runs as a separate unit: it survives the end of the ssh session or the pod "
        "that started epkit, and the next run waits for it. The log of a step is "
        "/var/log/epkit/install/RECIPE/STEP.log.",
    .options = install_table,
    .options_bytes = sizeof(struct install_cmd_options),
    .examples =
        {
            {"epkit install list", "List the recipes."},
            {"epkit install plan debian-tools", "What apply would do, and why."},
            {"epkit install apply debian-tools", "Apply it."},
            {"epkit install status", "Show the progress, while it runs or after a reboot."},
            {"epkit install plan gcp-b200-ubuntu2404 --root /mnt/node --json", "Check the disk of another machine."},
            {"epkit install uninstall debian-tools", "Remove what apply added."},
        },
    .exits =
        {
            {CMD_FINE, "plan, uninstall: nothing to do; else: done"},
            {CMD_FAILED, "a step or a test failed, too many reboots, or another run is installing"},
            {CMD_USAGE,
             "wrong usage, a recipe that is refused, a variable without a value, or a resume of what was not "
             "applied; nothing was changed"},
            {CMD_FINDINGS, "plan, status: some steps are not done; verify: a test fails; apply: a reboot is needed"},
            {CMD_UNSUPPORTED, "the recipe is not for this machine; nothing was changed"},
        },
    .run = cmd_install,
};

/* SPDX-License-Identifier: Apache-2.0 */
/* verbs.c - the verbs there are: one row each, in the order of the help. */
#include "cmd.h"
#include "ending.h"
#include "output.h"

#include <stdarg.h>
#include <string.h>

extern const struct cmd verb_deploy, verb_nics, verb_run, verb_topo, verb_doctor, verb_env, verb_test, verb_bench,
    verb_parse, verb_triangulate, verb_report, verb_install, verb_launch, verb_help, verb_version, verb_completion;

const struct cmd *const verbs[] = {
    &verb_run,    &verb_topo, &verb_nics,    &verb_env,        &verb_doctor, &verb_install,
    &verb_deploy, &verb_test, &verb_bench,   &verb_launch,     &verb_parse,  &verb_triangulate,
    &verb_report, &verb_help, &verb_version, &verb_completion, NULL,
};

#define MAX_VERBS (sizeof(verbs) / sizeof(verbs[0]))

const struct cmd *verb_find(const char *name)
{
    for (size_t i = 0; verbs[i]; i++)
        if (strcmp(verbs[i]->name, name) == 0)
            return verbs[i];
    return NULL;
}

int verb_unknown(const char *name)
{
    const char *names[MAX_VERBS];
    const char *near;
    size_t n = 0;

    if (*name == '-') {
        out_error("unknown option '%s'", name);
        out_hint("options come after the verb, but for --help and --version: 'epkit help' lists the verbs");
        return CMD_USAGE;
    }
    for (size_t i = 0; verbs[i]; i++)
        names[n++] = verbs[i]->name;
    names[n] = NULL;
    near = options_nearest(name, names);
    if (near)
        out_error("unknown verb '%s'; did you mean '%s'?", name, near);
    else
        out_error("unknown verb '%s'", name);
    out_hint("'epkit help' lists the verbs");
    return CMD_USAGE;
}

static int hint_usage(const struct cmd *cmd)
{
    out_hint("'epkit %s --help' explains it", cmd->name);
    return CMD_USAGE;
}

int cmd_usage(const struct cmd *cmd, const char *format, ...)
{
    char text[512];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    ending_dismiss();
    out_error("%s: %s", cmd->name, text);
    return hint_usage(cmd);
}

int cmd_refuse(const struct cmd *cmd, const char *where, const char *format, ...)
{
    char text[512];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (where)
        out_error("%s: %s: %s", cmd->name, where, text);
    else
        out_error("%s: %s", cmd->name, text);
    if (where)
        ending_detail("where", where);
    ending_detail("why", text);
    return hint_usage(cmd);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* commands.c - the table of commands, in the order of the help. */
#include "common/cmd.h"
#include "common/memory.h"
#include "common/output.h"

#include <stdlib.h>
#include <string.h>

extern const struct cmd command_deploy, command_nics, command_run, command_topo, command_doctor, command_env,
    command_test, command_bench, command_parse, command_watch, command_triangulate, command_report, command_install,
    command_launch, command_help, command_version, command_completion;

/* clang-format off */
const struct cmd *const command_table[] = {
    &command_run,
    &command_topo,
    &command_nics,
    &command_env,
    &command_doctor,
    &command_install,
    &command_deploy,
    &command_test,
    &command_bench,
    &command_launch,
    &command_parse,
    &command_watch,
    &command_triangulate,
    &command_report,
    &command_help,
    &command_version,
    &command_completion,
    NULL,
};
/* clang-format on */

#define MAX_COMMANDS (sizeof(command_table) / sizeof(command_table[0]))

const struct cmd *command_find(const char *name)
{
    for (size_t i = 0; command_table[i]; i++)
        if (strcmp(command_table[i]->name, name) == 0)
            return command_table[i];
    return NULL;
}

int command_unknown(const char *name)
{
    const char *names[MAX_COMMANDS];
    const char *near;
    size_t n = 0;

    if (*name == '-') {
        out_error("unknown option '%s'", name);
        out_hint("options other than --help and --version come after the command: 'epkit help' lists the commands");
        return CMD_USAGE;
    }
    for (size_t i = 0; command_table[i]; i++)
        names[n++] = command_table[i]->name;
    names[n] = NULL;
    near = options_nearest(name, names);
    if (near)
        out_error("unknown command '%s'; did you mean '%s'?", name, near);
    else
        out_error("unknown command '%s'", name);
    out_hint("'epkit help' lists the commands");
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

    WITH_ARGS(args, format, vsnprintf(text, sizeof(text), format, args));
    ending_dismiss();
    out_error("%s: %s", cmd->name, text);
    return hint_usage(cmd);
}

int cmd_refuse(const struct cmd *cmd, const char *where, const char *format, ...)
{
    char text[512];

    WITH_ARGS(args, format, vsnprintf(text, sizeof(text), format, args));
    if (where)
        out_error("%s: %s: %s", cmd->name, where, text);
    else
        out_error("%s: %s", cmd->name, text);
    if (where)
        ending_detail("where", where);
    ending_detail("why", text);
    return hint_usage(cmd);
}

/* --- ports from the environment --- */

int port_check_env(const struct cmd *cmd, const char *name, int least)
{
    const char *text = getenv(name);

    if (!text || !*text ||
        (strlen(text) < 6 && strspn(text, "0123456789") == strlen(text) && atoi(text) >= least && atoi(text) < 65536))
        return CMD_FINE;
    return cmd_refuse(cmd, NULL, "the variable %s is '%.40s', not a port from %d to 65535", name, text, least);
}

int port_from_env(const char *name, int otherwise)
{
    const char *text = getenv(name);

    return text && *text ? atoi(text) : otherwise;
}

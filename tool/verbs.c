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

const struct env_text env_texts[] = {
    {"EPKIT_ADDRESS", "host and port of rank 0 for ranks that find each other over TCP, instead of MASTER_ADDR and "
                      "MASTER_PORT"},
    {"EPKIT_BACKEND", "backend of the library when --backend is not given: host or cuda"},
    {"EPKIT_COMMAND", "set by 'epkit install' for the tests of a recipe: the epkit to ask"},
    {"EPKIT_HOST_ISA", "instruction set of the host backend's loops over rows: portable, avx2 or avx512"},
    {"EPKIT_PRELOAD",
     "set by the script of 'epkit env': the library that its function epkit_preload loads into a program"},
    {"EPKIT_SECRET", "what ranks that find each other over TCP must know; 'epkit launch' draws one for its own test"},
    {"EPKIT_SSH", "program that 'epkit doctor --hosts' and 'epkit launch' connect with, and its options; default: ssh"},
    {"EPKIT_SSH_PORT", "port of sshd that 'epkit launch' uses when neither --port nor a node names one; default: 222"},
    {"EPKIT_TCP_INTERFACE", "network interfaces for the connections between ranks: beginnings of names, '=eth0', "
                            "'^docker', or an address"},
    {"EPKIT_TIMEOUT_MS", "deadline of the library's waits where the caller sets none"},
    {"EPKIT_VERBS_DEVICE", "RDMA ports of the network verbs, for the ranks of a node in turn: 'mlx5_0,mlx5_1:2'"},
    {"EPKIT_VERBS_GID_INDEX",
     "address of a RoCE port by its index, for the network verbs; default: RoCE v2, IPv4 first"},
    {"EPKIT_VERBS_SERVICE_LEVEL", "service level of InfiniBand for the network verbs, 0..15"},
    {"EPKIT_VERBS_TRAFFIC_CLASS", "traffic class of RoCE packets for the network verbs, 0..255"},
    {"NO_COLOR", "if not empty, output is never coloured"},
    {NULL, NULL},
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

/* SPDX-License-Identifier: Apache-2.0 */
/* main.c - epkit COMMAND ...: finds the command, parses its options, runs it. */
#include "cmd/launch/agent.h"
#include "common/cmd.h"
#include "common/inherited.h"
#include "common/memory.h"
#include "common/output.h"
#include "common/ranks/ranks_internal.h"

#include <locale.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

static int run_command(const struct cmd *cmd, int argc, char **argv)
{
    char error[512];
    struct cmd_call call;
    bool help;
    int result = options_parse(cmd, argc, argv, &call, &help, error, sizeof(error)), joined = CMD_FINE, first;
    bool is_usage_error = result != CMD_FINE, follows;

    if (result == CMD_FINE && help) {
        help_command(stdout, cmd);
        options_done(&call);
        return result;
    }
    if (!is_usage_error && cmd_given(cmd, &call, "json"))
        ending_expect(cmd->name);
    if (cmd->flags & CMD_RANKS)
        joined = ranks_world_join(cmd, result == CMD_FINE ? &call : NULL);
    follows = ranks_world_rank() > 0;
    /* Only rank 0 writes the document, even if the ranks fail to join. */
    if (follows || (joined != CMD_FINE && ranks_env_is_follower()))
        ending_dismiss();
    if (joined != CMD_FINE)
        result = joined;
    else if (follows)
        /* Even after a usage error: rank 0 has the same command line, and ends the followers when it is done. */
        result = ranks_worse(result, ranks_follow());
    else
        result = result == CMD_FINE ? cmd->run(cmd, &call) : cmd_usage(cmd, "%s", error);
    result = ranks_world_done(result, &first);
    if (follows && is_usage_error && first != CMD_USAGE)
        cmd_usage(cmd, "%s", error);
    progress_stop();
    if (result != CMD_FINE)
        ending_write(result, NULL);
    options_done(&call);
    return result;
}

static int run(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : NULL;
    const struct cmd *cmd;

    if (!name) {
        help_all(stderr);
        return CMD_USAGE;
    }
    if (strcmp(name, AGENT_COMMAND) == 0)
        return agent_main();
    if (strcmp(name, AGENT_RANK) == 0)
        return agent_rank_main();
    if (strcmp(name, JOB_COMMAND) == 0)
        return job_main(argc - 1, argv + 1);
    if (strcmp(name, "-h") == 0 || strcmp(name, "--help") == 0)
        name = "help";
    if (strcmp(name, "-V") == 0 || strcmp(name, "--version") == 0)
        name = "version";
    cmd = command_find(name);
    if (!cmd)
        return command_unknown(name);
    return run_command(cmd, argc - 1, argv + 1);
}

/* Ends by the signal that interrupted the command, so that a calling shell sees it and stops as well. */
static void end_by_signal(int number)
{
    const sigset_t one = SIGNALS(number);

    fputs("epkit: interrupted\n", stderr);
    signal(number, SIG_DFL);
    /* A command that handles signals with signalfd has blocked them. */
    raise(number);
    sigprocmask(SIG_UNBLOCK, &one, NULL);
    /* Still running if this is PID 1. */
}

/* Warnings, which no status tells: a slower path, a rank that is left out. */
static void print_warning(void *unused, ep_log_level level, const char *line)
{
    (void)unused;
    if (level == EP_LOG_WARNING)
        fprintf(stderr, "epkit: %s\n", line);
}

int main(int argc, char **argv)
{
    int result, written;

    inherited_init();
    memory_init(ending_write_memory);
    ep_set_log(print_warning, NULL);
    if (stream_open() != 0)
        return CMD_FAILED;
    /* The terminal's character set; numbers stay in the C locale, for JSON and plots. */
    setlocale(LC_CTYPE, "");
    result = run(argc, argv);
    written = out_finish();

    if (result > 128)
        end_by_signal(result - 128);
    /* Output that could not be written is a failure. */
    return result == CMD_FINE || result == CMD_FINDINGS || result == CMD_UNSUPPORTED ? ranks_worse(result, written)
                                                                                     : result;
}

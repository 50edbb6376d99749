/* SPDX-License-Identifier: Apache-2.0 */
/* main.c - epkit VERB ...: finds the verb, parses its options, runs it. */
#include "cmd.h"
#include "help.h"
#include "launch/agent.h"
#include "output.h"
#include "progress.h"
#include "ranks_internal.h"

#include <fcntl.h>
#include <locale.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int run_verb(const struct cmd *cmd, int argc, char **argv)
{
    char error[512];
    struct cmd_call call;
    bool help;
    int result = options_parse(cmd, argc, argv, &call, &help, error, sizeof(error));

    if (result != CMD_FINE)
        return ranks_world_rank() > 0 ? result : cmd_usage(cmd, "%s", error);
    if (help)
        help_verb(stdout, cmd);
    else if ((cmd->flags & CMD_RANKS) && ranks_world_rank() > 0)
        result = ranks_follow();
    else
        result = cmd->run(cmd, &call);
    if (cmd->flags & CMD_RANKS)
        ranks_world_done();
    progress_stop();
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
    if (strcmp(name, RANKS_VERB) == 0)
        return ranks_main(argc - 1, argv + 1);
    if (strcmp(name, AGENT_VERB) == 0)
        return agent_main();
    if (strcmp(name, AGENT_RANK) == 0)
        return agent_rank_main();
    if (strcmp(name, "-h") == 0 || strcmp(name, "--help") == 0)
        name = "help";
    if (strcmp(name, "-V") == 0 || strcmp(name, "--version") == 0)
        name = "version";
    cmd = verb_find(name);
    if (!cmd)
        return verb_unknown(name);
    return run_verb(cmd, argc - 1, argv + 1);
}

/* A descriptor opened later must not become standard output by accident, where that is closed. */
static void hold_standard_descriptors(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0)
            _exit(CMD_FAILED);
}

int main(int argc, char **argv)
{
    int result, written;

    hold_standard_descriptors();
    /* Characters as the terminal has them; numbers stay those of the C locale, for JSON and gnuplot. */
    setlocale(LC_CTYPE, "");
    result = run(argc, argv);
    written = out_finish();

    if (result > 128) {
        /* Interrupted: end by the same signal, so that a calling shell knows it and stops as well. */
        fputs("epkit: interrupted\n", stderr);
        signal(result - 128, SIG_DFL);
        raise(result - 128);
    }
    return result == CMD_FINE ? written : result;
}

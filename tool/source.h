/* SPDX-License-Identifier: Apache-2.0 */
/*
 * source.h - which machine a verb looks at: the options for it, opening it within a deadline, and what is said when
 * there is nothing on it to look at.
 *
 *     struct topo_options {
 *         struct source_options source;
 *         ...
 *     };
 *     static const struct opt topo_table[] = {
 *         SOURCE_OPTIONS(struct topo_options, source),
 *         ...
 *
 *     result = source_open(cmd, &options->source, &root);
 *     if (result != CMD_FINE)
 *         return result;
 *     ... read everything ...
 *     source_reading_done();
 *     ... print, which may take as long as it likes ...
 */
#ifndef EP_TOOL_SOURCE_H
#define EP_TOOL_SOURCE_H

#include "cmd.h"
#include "hardware/topo.h"
#include "source/root.h"

struct source_options {
    const char *from;
    int64_t pid, timeout;
};

/* Rows of an option table. */
#define SOURCE_OPTIONS(options_type, member)                                                                           \
    {.name = "from",                                                                                                   \
     .arg = "FILE|DIR",                                                                                                \
     .type = OPT_FILE,                                                                                                 \
     .offset = offsetof(options_type, member.from),                                                                    \
     .help = "look at a snapshot that 'epkit topo --save' wrote, or at the machine below a folder, instead of this "   \
             "machine",                                                                                                \
     .heading = "Machine"},                                                                                            \
    {                                                                                                                  \
        .name = "timeout", .arg = "S", .type = OPT_INT, .offset = offsetof(options_type, member.timeout), .min = 1,    \
        .max = 3600, .value = "30", .help = "seconds that reading the machine may take"                                \
    }

/* For verbs that look at the environment. */
#define SOURCE_PID_OPTION(options_type, member)                                                                        \
    {                                                                                                                  \
        .name = "pid", .arg = "N", .type = OPT_INT, .offset = offsetof(options_type, member.pid), .min = 1,            \
        .max = INT32_MAX,                                                                                              \
        .help = "look at the environment, limits and libraries of this process instead of epkit's own"                 \
    }

/*
 * Opens the machine. CMD_FINE, or CMD_USAGE after saying what is wrong with --from or --pid. From now on until
 * source_reading_done() the command ends with CMD_FAILED, naming what was being read, when the time is up: a file of a
 * dead network file system answers never.
 */
int source_open(const struct cmd *cmd, const struct source_options *options, struct root **ret_root);

/* Reading is over. */
void source_reading_done(void);

/* Is there neither a GPU nor a NIC? */
bool source_is_empty(const struct topo *topo);

/*
 * Says in one line on standard output that the verb has nothing to look at, and why. With a document (consumed) that
 * one is printed instead, the line in it as "verdict". Returns CMD_UNSUPPORTED.
 */
int source_report_empty(const struct topo *topo, json_t *document);

#endif

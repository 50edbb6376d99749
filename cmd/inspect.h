/* SPDX-License-Identifier: Apache-2.0 */
/*
 * inspect.h - the machine that a command inspects: its options, opening it within a deadline, and the report when it
 * has neither GPUs nor NICs.
 *
 *     struct topo_options {
 *         struct inspect_options inspect;
 *         ...
 *     };
 *     static const struct opt topo_table[] = {
 *         INSPECT_OPTIONS(struct topo_options, inspect),
 *         ...
 *
 *     result = inspect_open(cmd, &options->inspect, &source);
 *     if (result != CMD_FINE)
 *         return result;
 *     ... read everything ...
 *     inspect_reading_done();
 *     ... print, without a deadline ...
 */
#ifndef EP_INSPECT_H
#define EP_INSPECT_H

#include "common/cmd.h"
#include "machine/hardware/topo.h"
#include "machine/source/source.h"

struct inspect_options {
    const char *from;
    int64_t pid, timeout;
};

/* Rows of an option table. */
#define INSPECT_OPTIONS(options_type, member)                                                                          \
    {.name = "from",                                                                                                   \
     .arg = "FILE|DIR",                                                                                                \
     .type = OPT_FILE,                                                                                                 \
     .offset = offsetof(options_type, member.from),                                                                    \
     .help = "read a snapshot written by 'epkit topo --save', or the machine below a folder, instead of this machine", \
     .heading = "Machine"},                                                                                            \
    {                                                                                                                  \
        .name = "timeout", .arg = "S", .type = OPT_INT, .offset = offsetof(options_type, member.timeout), .min = 1,    \
        .max = 3600, .value = "30", .help = "most seconds for reading the machine"                                     \
    }

/* For commands that read the environment. */
#define INSPECT_PID_OPTION(options_type, member)                                                                       \
    {                                                                                                                  \
        .name = "pid", .arg = "N", .type = OPT_INT, .offset = offsetof(options_type, member.pid), .min = 1,            \
        .max = INT32_MAX, .help = "read the environment, limits and libraries of this process instead of epkit's own"  \
    }

/*
 * Opens the machine. CMD_FINE, or CMD_USAGE or CMD_FAILED after reporting why. From now on until inspect_reading_done()
 * the command ends with CMD_FAILED and the name of the file being read when --timeout expires: reading a file of a dead
 * network file system never returns.
 */
int inspect_open(const struct cmd *cmd, const struct inspect_options *options, struct source **ret_source);

/* Ends the deadline. */
void inspect_reading_done(void);

/* Whether the machine has neither a GPU nor a NIC. */
bool inspect_is_empty(const struct topo *topo);

/*
 * Prints one line on standard output that says why the machine is empty, or the document (consumed) with that line as
 * "verdict". Returns CMD_UNSUPPORTED.
 */
int inspect_report_empty(const struct topo *topo, json_t *document);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#include "topo_view.h"

#include "common/output.h"
#include "common/shell.h"
#include "machine/doctor/stacks.h"
#include "machine/hardware/counters.h"

#include <errno.h>
#include <libgen.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The working folder may have been removed. Sets errno then. */
static bool is_removed(const char *folder)
{
    struct stat info;

    if (stat(folder, &info) == 0 && info.st_nlink > 0)
        return false;
    errno = ENOENT;
    return true;
}

int topo_save_check(const struct cmd *cmd, const char *file)
{
    char *copy = strdup(file), *folder = copy ? dirname(copy) : NULL;
    int result = CMD_FINE;
    struct stat info;

    if (!*file)
        result = cmd_usage(cmd, "--save: the name of the file is empty");
    else if (strcmp(file, "-") == 0)
        result = cmd_refuse(cmd, "--save", "standard output has the machine itself; name a file ('./-' for that name)");
    else if (!*text_base(file) || (stat(file, &info) == 0 && S_ISDIR(info.st_mode)))
        result = cmd_refuse(cmd, "--save", "'%s' is a folder; name a file in it", file);
    /* A snapshot replaces an old file by a new one. */
    else if (folder && (access(folder, W_OK | X_OK) != 0 || is_removed(folder)))
        result = cmd_refuse(cmd, "--save", "nothing can be written in '%s': %s", folder, strerror(errno));
    else if (access(file, W_OK) != 0 && errno != ENOENT)
        result = cmd_refuse(cmd, "--save", "'%s' cannot be written: %s", file, strerror(errno));
    free(copy);
    return result;
}

/* The current counters of ports and interfaces: epkit nics reads them from a snapshot. */
static void read_counters(const struct doctor_machine *machine)
{
    struct source *source = machine->source;
    const struct counter_rows of_ports = counter_rows(true), of_interfaces = counter_rows(false);
    struct source_names interfaces = source_list(source, "/sys/class/net");
    char path[COUNTER_PATH_BYTES];

    for (int i = 0; i < machine->topo->n_nics; i++) {
        const struct topo_nic *nic = &machine->topo->nics[i];

        for (int j = 0; j < nic->n_ports; j++) {
            const char *netdev = nic->ports[j].netdev;
            struct counter_device device = {
                .rdma = true, .nic = nic->name, .port = nic->ports[j].number, .netdev = netdev};

            for (size_t row = 0; row < of_ports.n; row++)
                if (*counter_path(&device, of_ports.at[row].file, path))
                    source_line(source, "%s", path);
            if (*netdev)
                source_query(source, source_printf(source, COUNTER_QUERY_NAME, netdev), ethtool_query, (void *)netdev,
                             COUNTER_DEADLINE_MS);
        }
    }
    for (size_t i = 0; i < interfaces.n && i < TOPO_MAX_NICS; i++)
        for (size_t row = 0; row < of_interfaces.n; row++)
            source_line(source, "/sys/class/net/%s/statistics/%s", interfaces.names[i], of_interfaces.at[row].file);
}

void topo_save_read(const struct doctor_machine *machine)
{
    struct doctor_result result;

    /* Also where the checks need a GPU, and there is none. */
    for (const struct stack *stack = stacks; stack->name; stack++)
        if (stack->source)
            stack_evaluate(machine, stack);
    for (size_t i = 0; doctor_checks[i]; i++)
        doctor_run(machine, doctor_checks[i], &result);
    source_environment(machine->source);
    read_counters(machine);
}

int topo_save_write(const struct doctor_machine *machine, const char *file)
{
    char word[4096];

    if (source_save(machine->source, file) != EP_OK) {
        out_problem("the snapshot could not be written", NULL, ep_last_error(), NULL);
        return CMD_FAILED;
    }
    out_note("saved as %s; serial numbers, UUIDs, GUIDs, host and user names, addresses, tokens and keys were "
             "replaced",
             file);
    out_hint("this shows it, and so do env, nics and doctor: epkit topo --from %s",
             shell_quote(file, word, sizeof(word)));
    return CMD_FINE;
}

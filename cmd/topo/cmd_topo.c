/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_topo.c - epkit topo: shows the GPUs, NICs and the paths between them, or saves a snapshot. */
#include "cmd/inspect.h"
#include "common/memory.h"
#include "common/output.h"
#include "common/shell.h"
#include "machine/hardware/counters.h"
#include "topo_view.h"

#include <errno.h>
#include <libgen.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* --- snapshots --- */

/* The working folder may have been removed. Sets errno then. */
static bool is_removed(const char *folder)
{
    struct stat info;

    if (stat(folder, &info) == 0 && info.st_nlink > 0)
        return false;
    errno = ENOENT;
    return true;
}

/* Whether it can be written there. CMD_FINE, or another result after reporting why not. Changes nothing. */
static int topo_save_check(const struct cmd *cmd, const char *file)
{
    char *copy = memory_printf("%s", file), *folder = dirname(copy);
    int result = CMD_FINE;
    struct stat info;

    if (!*file)
        result = cmd_usage(cmd, "--save: the name of the file is empty");
    else if (strcmp(file, "-") == 0)
        result = cmd_refuse(cmd, "--save", "standard output has the machine itself; name a file ('./-' for that name)");
    else if (!*text_base(file) || (stat(file, &info) == 0 && S_ISDIR(info.st_mode)))
        result = cmd_refuse(cmd, "--save", "'%s' is a folder; name a file in it", file);
    /* A snapshot replaces an old file by a new one. */
    else if (access(folder, W_OK | X_OK) != 0 || is_removed(folder))
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

    FOR_EACH (nic, machine->topo->nics, machine->topo->n_nics) {
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

/* Reads everything that any command would read of the machine. */
static void topo_save_read(const struct doctor_machine *machine)
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

/* Writes the snapshot and reports it on standard error. CMD_FINE, or CMD_FAILED after reporting why not. */
static int topo_save_write(const struct doctor_machine *machine, const char *file)
{
    char word[4096];

    if (source_save(machine->source, file) != EP_OK) {
        out_problem("the snapshot could not be written", NULL, ep_last_error(), NULL);
        return CMD_FAILED;
    }
    out_note("saved as %s; serial numbers, UUIDs, GUIDs, host and user names, addresses, tokens and keys were replaced",
             file);
    out_hint("this shows it, and so do env, nics and doctor: epkit topo --from %s",
             shell_quote(file, word, sizeof(word)));
    return CMD_FINE;
}

/* --- the command --- */

struct topo_options {
    struct inspect_options inspect;
    const char *save;
    struct opt_list only;
    bool json;
};

enum { SECTION_TREE, SECTION_MATRIX, SECTION_MAP, SECTION_NICS };

static const char *const sections[] = {"tree", "matrix", "map", "nics", NULL};

/* clang-format off */
static const struct opt topo_table[] = {
    {"only", 'o', "LIST", OPT_LIST, offsetof(struct topo_options, only), .choices = sections,
     .help = "show only these sections", .heading = "Output"},
    OPT_JSON_ROW(struct topo_options, json),
    INSPECT_OPTIONS(struct topo_options, inspect),
    {"save", 0, "FILE", OPT_FILE, offsetof(struct topo_options, save),
     .help = "also write everything that epkit can read of the machine to this file; what identifies the machine or its users is replaced"},
    {0},
};
/* clang-format on */

/* The data that was read; if `machine` is set, it owns the rest. */
struct reading {
    struct source *source;
    struct doctor_machine *machine;
    struct topo *topo;
    struct map *best, *ibgda, *nvshmem;
};

static void reading_done(struct reading *reading)
{
    map_free(reading->nvshmem);
    if (reading->machine) {
        doctor_machine_free(reading->machine);
        return;
    }
    map_free(reading->ibgda);
    map_free(reading->best);
    source_free(reading->source);
}

static void read_machine(const struct topo_options *options, struct reading *reading)
{
    const struct map_nvshmem how = {.hca_list = "", .hca_prefix = "mlx5"};

    if (options->save) {
        reading->machine = doctor_machine_read(reading->source);
        reading->topo = reading->machine->topo;
        reading->best = reading->machine->map;
        reading->ibgda = reading->machine->ibgda;
        topo_save_read(reading->machine);
    } else {
        reading->topo = topo_read(reading->source);
        reading->best = map_best(reading->topo);
        reading->ibgda = map_ibgda(reading->topo);
    }
    reading->nvshmem = map_nvshmem(reading->topo, &how);
}

static bool wants(const struct topo_options *options, int section)
{
    for (size_t i = 0; i < options->only.n; i++)
        if (options->only.values[i] == section)
            return true;
    return options->only.n == 0;
}

static int show(const struct cmd *cmd, const struct topo_options *options, const struct reading *reading)
{
    struct topo_view view = {
        .topo = reading->topo,
        .best = reading->best,
        .ibgda = reading->ibgda,
        .nvshmem = reading->nvshmem,
        .tree = wants(options, SECTION_TREE),
        .matrix = wants(options, SECTION_MATRIX),
        .map = wants(options, SECTION_MAP),
        .nics = wants(options, SECTION_NICS),
    };
    json_t *document = options->json ? out_document(cmd->name) : NULL;

    if (inspect_is_empty(reading->topo))
        return inspect_report_empty(reading->topo, document);
    if (!document)
        return topo_text(&view) == 0 ? out_finish() : CMD_FAILED;
    topo_json(&view, document);
    return out_json(document) == 0 ? CMD_FINE : CMD_FAILED;
}

static int cmd_topo(const struct cmd *cmd, const struct cmd_call *call)
{
    const struct topo_options *options = call->options;
    struct reading reading = {0};
    int result, saved = CMD_FINE;

    if (options->save)
        CMD_TRY(topo_save_check(cmd, options->save));
    CMD_TRY(inspect_open(cmd, &options->inspect, &reading.source));
    read_machine(options, &reading);
    inspect_reading_done();
    /* Save first: the reader of the output may close it early, as head does. */
    if (options->save)
        saved = topo_save_write(reading.machine, options->save);
    result = show(cmd, options, &reading);
    reading_done(&reading);
    return saved == CMD_FINE ? result : saved;
}

const struct cmd command_topo = {
    .name = "topo",
    .args = "",
    .summary = "show GPUs, NICs and the paths between them, and which GPU should use which NIC",
    .description =
        "Shows the PCI tree as far as GPUs and RDMA NICs are concerned; the matrix of paths between them, in the terms "
        "of 'nvidia-smi topo -m'; the NIC that each GPU should use, with the reason, in the forms that DeepEP, "
        "NVSHMEM, NCCL and UCX read, next to the default choice of NVSHMEM; and the ports of the NICs.\n\n"
        "GPUs are numbered as the NVIDIA driver numbers those of this process: by PCI address, as CUDA does with "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID, and in practice also without it where all GPUs are equal. Each GPU gets a NIC "
        "of its own as long as there are enough, the nearest ones possible. NICs that carry no data are left out with "
        "the reason: ports down, networks for management or storage, virtual functions in addition to their physical one.\n\n"
        "--save writes a snapshot of the machine, which every command reads with --from: to mail it, to compare it, or to inspect it elsewhere. The file contains only what epkit has read. Serial numbers, "
        "UUIDs, GUIDs, names of hosts and users, addresses, tokens and keys are replaced.\n\n"
        "Nothing here needs root. The NVIDIA driver is queried in a separate process, which may hang or crash without harm; without an answer NVLinks and compute capabilities are unknown.",
    .options = topo_table,
    .options_bytes = sizeof(struct topo_options),
    .examples =
        {
            {"epkit topo", "Show the machine."},
            {"epkit topo --only map", "Show only which GPU should use which NIC."},
            {"epkit topo --json --only map | jq -r .forms.DEEP_EP_DEVICE_TO_HCA_MAPPING",
             "Print only the assignment for DeepEP."},
            {"epkit topo --save node.json", "Write a snapshot for somebody else to inspect."},
            {"epkit topo --from node.json", "Show the machine of that snapshot."},
        },
    .exits =
        {
            {CMD_FINE, "the machine was shown, and with --save written"},
            {CMD_FAILED, "the machine could not be read in time, or the snapshot or the output could not be written"},
            {CMD_USAGE, "wrong usage, or --from or --save names a file that cannot be used"},
            {CMD_UNSUPPORTED, "there is neither a GPU nor an RDMA NIC; with --save the snapshot is written even so"},
        },
    .run = cmd_topo,
};

/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_topo.c - epkit topo: GPUs, NICs, the paths between them, and which GPU should use which NIC. */
#include "cmd/inspect.h"
#include "common/cmd.h"
#include "common/output.h"
#include "topo_view.h"

#include <stdio.h>

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
    topo_free(reading->topo);
    source_free(reading->source);
}

static ep_status read_all(struct reading *reading)
{
    ep_status status = doctor_machine_read(reading->source, &reading->machine);

    if (status != EP_OK) {
        reading->source = NULL;
        return status;
    }
    reading->topo = reading->machine->topo;
    reading->best = reading->machine->map;
    reading->ibgda = reading->machine->ibgda;
    topo_save_read(reading->machine);
    return EP_OK;
}

static ep_status read_topology(struct reading *reading)
{
    ep_status status = topo_read(reading->source, &reading->topo);

    if (status == EP_OK)
        status = map_best(reading->topo, &reading->best);
    return status == EP_OK ? map_ibgda(reading->topo, &reading->ibgda) : status;
}

static ep_status read_machine(const struct topo_options *options, struct reading *reading)
{
    const struct map_nvshmem how = {.hca_list = "", .hca_prefix = "mlx5"};
    ep_status status = options->save ? read_all(reading) : read_topology(reading);

    return status == EP_OK ? map_nvshmem(reading->topo, &how, &reading->nvshmem) : status;
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
    int result = CMD_FINE, saved = CMD_FINE;

    if (options->save)
        result = topo_save_check(cmd, options->save);
    if (result == CMD_FINE)
        result = inspect_open(cmd, &options->inspect, &reading.source);
    if (result != CMD_FINE)
        return result;
    if (read_machine(options, &reading) != EP_OK) {
        inspect_reading_done();
        out_problem("the machine could not be read", NULL, ep_last_error(), NULL);
        reading_done(&reading);
        return CMD_FAILED;
    }
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
        (const struct cmd_example[]){
            {"epkit topo", "Show the machine."},
            {"epkit topo --only map", "Show only which GPU should use which NIC."},
            {"epkit topo --json --only map | jq -r .forms.DEEP_EP_DEVICE_TO_HCA_MAPPING",
             "Print only the assignment for DeepEP."},
            {"epkit topo --save node.json", "Write a snapshot for somebody else to inspect."},
            {"epkit topo --from node.json", "Show the machine of that snapshot."},
            {NULL, NULL},
        },
    .exits =
        (const struct cmd_exit_text[]){
            {CMD_FINE, "the machine was shown, and with --save written"},
            {CMD_FAILED, "the machine could not be read in time, or the snapshot or the output could not be written"},
            {CMD_USAGE, "wrong usage, or --from or --save names a file that cannot be used"},
            {CMD_UNSUPPORTED, "there is neither a GPU nor an RDMA NIC; with --save the snapshot is written even so"},
            {0, NULL},
        },
    .run = cmd_topo,
};

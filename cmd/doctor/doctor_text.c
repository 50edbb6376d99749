/* SPDX-License-Identifier: Apache-2.0 */
/* doctor_text.c - a diagnosis as text. */
#include "common/json.h"
#include "common/output.h"
#include "common/text.h"
#include "diagnosis.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* --- what the machine has, in a sentence --- */

#define KINDS_MAX 8 /* so that the sentence fits its line */

static void count_kind(json_t *kinds, const char *name)
{
    if (json_object_size(kinds) == KINDS_MAX && !json_object_get(kinds, name))
        return;
    json_object_set_new(kinds, name, json_integer(json_integer_value(json_object_get(kinds, name)) + 1));
}

/* "H100" of "NVIDIA H100 80GB HBM3", "A100" of "NVIDIA A100-SXM4-80GB": without vendor, memory and form factor. */
static void short_name(const char *name, char *ret_text, size_t bytes)
{
    static const char *const ends[] = {"-SXM", " SXM", "-PCIE", " PCIe", " HBM"};
    char *end;
    size_t n;

    if (strncmp(name, "NVIDIA ", 7) == 0)
        name += 7;
    snprintf(ret_text, bytes, "%s", *name ? name : "GPU");
    for (size_t i = 0; i < COUNT(ends); i++)
        if ((end = strstr(ret_text, ends[i])))
            *end = '\0';
    n = strlen(ret_text);
    if (n > 2 && strcmp(ret_text + n - 2, "GB") == 0 && (end = strrchr(ret_text, ' ')))
        *end = '\0';
}

static const char *network_name(const struct topo *topo, const struct topo_nic *nic, const struct topo_port *port)
{
    if (port->link_layer == TOPO_LINK_INFINIBAND)
        return "InfiniBand";
    if (port->link_layer == TOPO_LINK_ETHERNET)
        return "RoCE";
    return nic->pci >= 0 && topo->pci[nic->pci].vendor == PCI_VENDOR_AMAZON ? "EFA" : "RDMA";
}

static void count_ports(const struct topo *topo, json_t *kinds)
{
    FOR_EACH (nic, topo->nics, topo->n_nics) {
        const char *access = nic->access == TOPO_ACCESS_NO ? " (not accessible)" : "";
        char name[96];

        for (int p = 0; p < nic->n_ports && nic->role == TOPO_ROLE_DATA; p++) {
            if (!nic->ports[p].active)
                continue;
            if (nic->ports[p].rate_gbps > 0)
                snprintf(name, sizeof(name), "%g Gb/s %s%s", nic->ports[p].rate_gbps,
                         network_name(topo, nic, &nic->ports[p]), access);
            else
                snprintf(name, sizeof(name), "%s%s", network_name(topo, nic, &nic->ports[p]), access);
            count_kind(kinds, name);
        }
    }
}

/* Summarises GPUs and data ports, followed by ", ": "8 x H200, 8 x 400 Gb/s RoCE, "; "" if there are none. */
static void diagnosis_inventory(const struct topo *topo, char *ret_text, size_t bytes)
{
    json_t *kinds = json_object();

    *ret_text = '\0';
    for (int i = 0; i < topo->n_gpus; i++) {
        char name[96];

        short_name(topo->gpus[i].name, name, sizeof(name));
        count_kind(kinds, name);
    }
    count_ports(topo, kinds);
    FOR_MEMBERS (kind, n, kinds)
        text_append(ret_text, bytes, "%d x %s, ", (int)json_integer_value(n), kind);
    json_decref(kinds);
}

/* --- the diagnosis --- */

/* The most severe finding, or a check that leaves the verdict open, else one that is unknown; of several the first. */
static const struct doctor_result *first_of(const struct diagnosis *diagnosis, enum doctor_outcome outcome)
{
    const struct doctor_result *first = NULL;

    FOR_EACH (result, diagnosis->results, diagnosis->n)
        if (result->outcome == outcome &&
            (!first || (outcome == DOCTOR_FOUND ? result->severity > first->severity
                                                : doctor_is_inconclusive(result) > doctor_is_inconclusive(first))))
            first = result;
    return first;
}

#define NAMED_MAX 4 /* checks in a sentence */

/* "3 could not be completed without root"; with `is_named` "3 could not be completed (acs, gpu-errors, sxid)" */
static void add_unknown(const struct diagnosis *diagnosis, bool is_named, char *text, size_t bytes)
{
    bool for_root =
        source_is_live(diagnosis->machine->source) && geteuid() != 0 && diagnosis->n_denied == diagnosis->n_unknown;
    int n = 0;

    text_append(text, bytes, "%d could not be completed%s", diagnosis->n_unknown, for_root ? " without root" : "");
    for (int i = 0; i < diagnosis->n && is_named; i++)
        if (diagnosis->results[i].outcome == DOCTOR_UNKNOWN && ++n <= NAMED_MAX)
            text_append(text, bytes, "%s%s", n == 1 ? " (" : ", ", diagnosis->results[i].check->id);
    if (n)
        text_append(text, bytes, "%s)", n > NAMED_MAX ? ", ..." : "");
}

/* Appends the libraries that run here, "; runs here: DeepEP 2 2.1.0"; or says that there is none to look at. */
static void add_stacks(const struct doctor_machine *machine, char *text, size_t bytes)
{
    json_t *rows = diagnosis_stacks(machine, NULL, 0);
    const char *before = "; runs here: ";

    FOR_JSON (row, rows)
        if (strcmp(json_text(row, "state"), "runs") == 0) {
            text_append(text, bytes, "%s%s %s", before, json_text(row, "title"), json_text(row, "version"));
            text[strlen(text) - text_ends(text, " ")] = '\0';
            before = ", ";
        }
    if (json_array_size(rows) == 0 && !*machine->software->stacks.unknown)
        text_append(text, bytes, "; no library for expert parallelism found");
    json_decref(rows);
}

void diagnosis_verdict(const struct diagnosis *diagnosis, char *ret_text, size_t bytes)
{
    const char *name = source_name(diagnosis->machine->source), *unknown = diagnosis->machine->software->stacks.unknown;
    const struct doctor_result *first = first_of(diagnosis, DOCTOR_FOUND);
    int n_applied = diagnosis->n - diagnosis->n_not_applicable;
    char inventory[512];

    diagnosis_inventory(diagnosis->machine->topo, inventory, sizeof(inventory));
    *ret_text = '\0';
    if (first) {
        text_append(ret_text, bytes, "%d finding%s on %s", diagnosis->n_found, diagnosis->n_found == 1 ? "" : "s",
                    name);
        if (diagnosis->n_found == 1)
            text_append(ret_text, bytes, "%s", diagnosis->n_errors ? ", a serious one" : "");
        else if (diagnosis->n_errors)
            text_append(ret_text, bytes, ", %d of them serious", diagnosis->n_errors);
        text_append(ret_text, bytes, ": %s%s", first->text, diagnosis->n_found > 1 ? "; and more." : ".");
    } else if (n_applied == 0) {
        text_append(ret_text, bytes, "Nothing to find on %s: none of the %d checks applies to it.", name, diagnosis->n);
    } else if (diagnosis_exit(diagnosis) == CMD_NOT_KNOWN) {
        first = first_of(diagnosis, DOCTOR_UNKNOWN);
        text_append(ret_text, bytes, "Not known whether %s is healthy: %d check%s found nothing, ", name,
                    diagnosis->n_fine, diagnosis->n_fine == 1 ? "" : "s");
        add_unknown(diagnosis, false, ret_text, bytes);
        text_append(ret_text, bytes, "; %s: %s.", first->check->id, first->text);
    } else {
        /* Where something is installed that nobody looked at, "healthy" would say too much. */
        text_append(ret_text, bytes, *unknown ? "%s%d check%s: no fault found" : "Healthy: %s%d check%s, nothing found",
                    inventory, diagnosis->n_fine, diagnosis->n_fine == 1 ? "" : "s");
        if (diagnosis->n_unknown) {
            text_append(ret_text, bytes, "; ");
            add_unknown(diagnosis, true, ret_text, bytes);
        }
        add_stacks(diagnosis->machine, ret_text, bytes);
        if (*unknown)
            text_append(ret_text, bytes, "; not known: %s", unknown);
        text_append(ret_text, bytes, ".");
    }
}

/* --- text in columns --- */

/* Lines of text behind a label, in a column of this width. */
static void print_column(const char *label, const char *text, size_t room)
{
    while (*text) {
        size_t line = strcspn(text, "\n"), n = line;

        if (n > room) {
            for (n = room; n > 0 && text[n] != ' '; n--)
                continue;
            if (n == 0)
                n = strcspn(text, " \n");
        }
        out_line("  %-10s%.*s", label, (int)n, text);
        label = "";
        text += n;
        text += strspn(text, n < line ? " " : "\n");
    }
}

void diagnosis_print_block(const char *label, const char *text)
{
    print_column(label, text, 88);
}

static void print_finding(const struct doctor_result *result)
{
    enum out_tone tone = result->severity == DOCTOR_ERROR ? OUT_BAD : OUT_WARN;

    out_line("%s", "");
    out_tone(stdout, tone);
    fputs(result->check->id, stdout);
    out_tone(stdout, OUT_PLAIN);
    out_line(" (%s, failure mode %d)", result->check->group, result->check->mode);
    diagnosis_print_block("what", result->text);
    for (int i = 0; i < result->n_evidence; i++) {
        char text[4096];

        snprintf(text, sizeof(text), "%s: %s", result->evidence[i].where, result->evidence[i].what);
        diagnosis_print_block(i == 0 ? "seen" : "", text);
    }
    if (result->n_evidence_left_out)
        out_line("  %-10s(and %d more)", "", result->n_evidence_left_out);
    diagnosis_print_block("why", result->check->cause);
    print_column("run", result->fix, SIZE_MAX); /* commands are pasted, so their lines are not wrapped */
    diagnosis_print_block("costs", result->fix_cost);
    diagnosis_print_block("do", result->advice);
}

/* --- tables --- */

/* In a table and in full, first the serious ones. */
static void print_findings(const struct diagnosis *diagnosis)
{
    static const struct out_column columns[] = {
        {"SEVERITY", "severity", 0, 0}, {"ID", "id", 0, 0}, {"GROUP", "group", 0, 0}, {"WHAT", "text", 0, OUT_TRUNC}};
    const struct doctor_result *found[DOCTOR_CHECKS_MAX];
    json_t *rows = json_array();
    int n = 0;

    for (int severity = DOCTOR_ERROR; severity >= DOCTOR_WARNING; severity--)
        for (int i = 0; i < diagnosis->n; i++)
            if (diagnosis->results[i].outcome == DOCTOR_FOUND && (int)diagnosis->results[i].severity == severity)
                found[n++] = &diagnosis->results[i];
    for (int i = 0; i < n; i++)
        json_array_append_new(rows, diagnosis_row(found[i]));
    out_line("%s", "");
    OUT_PRINT(columns, rows);
    for (int i = 0; i < n; i++)
        print_finding(found[i]);
}

/* Prints what is not known, and what to do about it. */
static void print_unknown(const struct diagnosis *diagnosis)
{
    FOR_EACH (result, diagnosis->results, diagnosis->n) {
        if (result->outcome != DOCTOR_UNKNOWN)
            continue;
        out_line("\n%s (%s): not known", result->check->id, result->check->group);
        diagnosis_print_block("why", result->text);
        diagnosis_print_block("do", doctor_missing_text(result->missing));
    }
}

static void print_all_checks(const struct diagnosis *diagnosis)
{
    static const char *const outcomes[] = {"fine", "found", "not applicable", "not known"};
    static const struct out_column columns[] = {
        {"ID", "id", 0, 0}, {"GROUP", "group", 0, 0}, {"OUTCOME", "outcome", 0, 0}, {"REASON", "text", 0, OUT_TRUNC}};
    json_t *rows = json_array(), *row;

    for (int i = 0; i < diagnosis->n; i++) {
        row = diagnosis_row(&diagnosis->results[i]);
        json_object_set_new(row, "outcome", json_string(outcomes[diagnosis->results[i].outcome]));
        json_array_append_new(rows, row);
    }
    out_line("%s", "");
    OUT_PRINT(columns, rows);
}

void diagnosis_print(const struct diagnosis *diagnosis, bool verbose)
{
    char verdict[4096];

    diagnosis_verdict(diagnosis, verdict, sizeof(verdict));
    out_verdict(diagnosis->n_errors                     ? OUT_BAD
                : diagnosis_exit(diagnosis) == CMD_FINE ? OUT_GOOD
                                                        : OUT_WARN,
                "%s", verdict);
    if (diagnosis->n_found) {
        print_findings(diagnosis);
        if (diagnosis->n_unknown && !verbose) {
            out_line("%s", "");
            out_line("%d check%s could not be completed; --verbose says why.", diagnosis->n_unknown,
                     diagnosis->n_unknown == 1 ? "" : "s");
        }
    }
    if (verbose)
        print_all_checks(diagnosis);
    if (verbose || diagnosis_exit(diagnosis) == CMD_NOT_KNOWN)
        print_unknown(diagnosis);
}

void diagnosis_explain(const struct doctor_check *check)
{
    out_line("%s: %s", check->id, check->title);
    out_line("  %-10s%s, failure mode %d", "group", check->group, check->mode);
    diagnosis_print_block("symptom", check->symptom);
    diagnosis_print_block("cause", check->cause);
    diagnosis_print_block("remedy", check->remedy);
    for (int i = 0; check->links[i]; i++)
        out_line("  %-10s%s", i == 0 ? "see" : "", check->links[i]);
}

/* --- stacks --- */

static int count_stacks(const json_t *rows, const char *state)
{
    return COUNT_OF(i, json_array_size(rows), strcmp(json_text(json_array_get(rows, i), "state"), state) == 0);
}

static void make_verdict(const struct doctor_machine *machine, const json_t *rows, char *text, size_t bytes)
{
    int n = (int)json_array_size(rows), n_run = count_stacks(rows, "runs");
    const json_t *row = json_array_get(rows, 0);
    const char *unknown = machine->software->stacks.unknown;

    *text = '\0';
    if (n == 0)
        text_append(text, bytes, "No known library for expert parallelism is on Python's path");
    else if (n == 1)
        text_append(text, bytes, "%s%s%s%s%s", json_text(row, "title"), *json_text(row, "version") ? " " : "",
                    json_text(row, "version"), n_run ? " " : ": ", json_text(row, "text"));
    else
        text_append(text, bytes, "%d of %d libraries for expert parallelism run%s here", n_run, n,
                    n_run == 1 ? "s" : "");
    text_append(text, bytes, "%s%s.", *unknown ? "; not known: " : "", unknown);
}

static void print_stacks(json_t *rows)
{
    static const struct out_column columns[] = {{"STACK", "name", 0, 0},
                                                {"VERSION", "version", 0, OUT_NONZERO},
                                                {"STATE", "state", 0, 0},
                                                {"WHAT", "text", 0, OUT_TRUNC}};

    out_line("%s", "");
    OUT_PRINT(columns, json_incref(rows));
    FOR_JSON (row, rows) {
        if (strcmp(json_text(row, "state"), "runs") == 0)
            continue;
        out_line("\n%s", json_text(row, "name"));
        diagnosis_print_block("what", json_text(row, "text"));
        print_column("run", json_text(row, "fix"), SIZE_MAX);
        diagnosis_print_block("do", json_text(row, "advice"));
    }
}

int diagnosis_run_stacks(const struct cmd *cmd, const struct inspect_options *inspect, bool json, char *const *names,
                         int n)
{
    struct doctor_machine *machine = NULL;
    int code = diagnosis_read(cmd, inspect, &machine);
    bool is_named = n > 0 && strcmp(names[0], "all") != 0;
    json_t *rows, *asked, *document;
    char verdict[4096];

    if (code != CMD_FINE)
        return code;
    rows = diagnosis_stacks(machine, names, n);
    /* What is wrong with one that nobody has installed or asked for is no finding. */
    asked = is_named ? json_incref(rows) : diagnosis_stacks(machine, NULL, 0);
    inspect_reading_done();
    if (rows) {
        make_verdict(machine, rows, verdict, sizeof(verdict));
        code = count_stacks(asked, "missing") + count_stacks(asked, "not-installed") ? CMD_FINDINGS
               : count_stacks(asked, "not-known")                                    ? CMD_NOT_KNOWN
                                                                                     : CMD_FINE;
    } else {
        code = CMD_UNSUPPORTED;
        snprintf(verdict, sizeof(verdict), "Not known.");
    }
    doctor_machine_free(machine);
    json_decref(asked);
    if (json) {
        document = out_document(cmd->name);
        json_object_update_new(
            document, json_pack("{s:o, s:o}", "verdict", out_text(verdict), "stacks", rows ? rows : json_array()));
        return out_json(document) == 0 ? code : CMD_FAILED;
    }
    if (!rows)
        return code;
    out_verdict(code == CMD_FINE ? OUT_GOOD : OUT_WARN, "%s", verdict);
    if (json_array_size(rows))
        print_stacks(rows);
    json_decref(rows);
    return out_finish() == CMD_FINE ? code : CMD_FAILED;
}

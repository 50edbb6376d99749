/* SPDX-License-Identifier: Apache-2.0 */
/* nics_output.c - the report of `epkit nics`, as a document and as text. */
#include "common/json.h"
#include "common/output.h"
#include "common/text.h"
#include "nics.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static json_t *number(double value)
{
    return value < 9.2e18 ? json_integer((json_int_t)value) : json_real(value);
}

static bool has_period(const struct nics *nics)
{
    return nics->end_ns > nics->begin_ns;
}

static double seconds(const struct nics *nics)
{
    return (double)(nics->end_ns - nics->begin_ns) / 1e9;
}

static double gigabytes_per_second(const struct nics *nics, size_t device, enum counter_kind kind)
{
    return (double)nics_moved(nics, device, kind) / 1e9 / seconds(nics);
}

/* The load of the busier direction as a part of the rate of the port; negative: unknown. */
static double load(const struct nics *nics, size_t device)
{
    double sent = gigabytes_per_second(nics, device, COUNTER_SENT);
    double received = gigabytes_per_second(nics, device, COUNTER_RECEIVED);
    double rate = nics->devices[device].rate_gbps / 8;

    return rate > 0 ? (sent > received ? sent : received) / rate : -1;
}

/* --- notes: problems with the counters themselves --- */

static const char *state_text(enum source_state state)
{
    switch (state) {
    case SOURCE_ABSENT:
        return "there is no such counter";
    case SOURCE_DENIED:
        return "permission denied";
    case SOURCE_NOT_RECORDED:
        return "it is not in the snapshot";
    default:
        return "it is not a number";
    }
}

static void add_row_notes(json_t *notes, const struct nics_device *device, const struct nics_tally *tally)
{
    struct counter_rows rows = counter_rows(device->counter.rdma);

    for (size_t i = 0; i < rows.n; i++) {
        enum source_state state = tally->last.states[i];
        bool is_traffic = rows.at[i].kind <= COUNTER_RECEIVED_PACKETS;

        if (tally->is_reset[i])
            json_array_append_new(notes,
                                  json_sprintf("%s: %s was reset during the period; the change is its value since then",
                                               device->label, rows.at[i].file));
        /* Devices have different error counters, and snapshots different contents. */
        if (state == SOURCE_OK || (!is_traffic && (state == SOURCE_ABSENT || state == SOURCE_NOT_RECORDED)))
            continue;
        json_array_append_new(
            notes, json_sprintf("%s: %s could not be read: %s", device->label, rows.at[i].file, state_text(state)));
    }
}

static json_t *make_notes(const struct nics *nics)
{
    json_t *notes = json_array();

    for (size_t i = 0; i < nics->n; i++) {
        const struct nics_device *device = &nics->devices[i];
        const struct nics_tally *tally = &nics->tallies[i];

        if (tally->was_there && !tally->is_there)
            json_array_append_new(
                notes, json_sprintf("%s has vanished: its counters are those of the last sample", device->label));
        else if (!tally->is_there)
            json_array_append_new(notes, json_sprintf("%s has no counters that could be read", device->label));
        else if (!tally->was_there)
            json_array_append_new(
                notes,
                json_sprintf("%s has appeared during the period: its earlier changes are unknown", device->label));
        if (tally->is_there)
            add_row_notes(notes, device, tally);
    }
    return notes;
}

/* --- the document --- */

static json_t *counters_of(const struct nics *nics, size_t device)
{
    static const char *const kinds[] = {"sent", "received", "sent packets", "received packets", "error", "congestion"};
    const struct nics_tally *tally = &nics->tallies[device];
    struct counter_rows rows = counter_rows(nics->devices[device].counter.rdma);
    json_t *list = json_array();

    for (size_t i = 0; i < rows.n; i++) {
        double total;

        if (!nics_total(nics, device, i, &total))
            continue;
        json_array_append_new(list,
                              json_pack("{s:s, s:s, s:s, s:o, s:o, s:b}", "name", rows.at[i].file, "kind",
                                        kinds[rows.at[i].kind], "text", rows.at[i].text, "total", number(total),
                                        "moved", tally->is_counted[i] ? number((double)tally->moved[i]) : json_null(),
                                        "reset", tally->is_reset[i]));
    }
    return list;
}

static json_t *faults_of(const struct nics_verdict *verdict)
{
    json_t *list = json_array();

    for (int i = 0; i < verdict->n_faults && i < (int)(sizeof(verdict->faults) / sizeof(verdict->faults[0])); i++)
        json_array_append_new(list, out_name(verdict->faults[i]));
    return list;
}

static json_t *rate(const struct nics *nics, size_t device, enum counter_kind kind)
{
    return has_period(nics) ? json_real(gigabytes_per_second(nics, device, kind)) : json_null();
}

static json_t *gpus_of(const struct nics_device *device)
{
    json_t *list = json_array();

    for (int i = 0; i < device->n_gpus; i++)
        json_array_append_new(list, json_integer(device->gpus[i]));
    return list;
}

static json_t *sums(const struct nics *nics, size_t device, bool is_total)
{
    static const char *const names[] = {"sent_bytes",       "received_bytes", "sent_packets",
                                        "received_packets", "errors",         "congestion"};
    json_t *object = json_object();

    for (enum counter_kind kind = COUNTER_SENT; kind <= COUNTER_CONGESTION; kind++)
        json_object_set_new(
            object, names[kind],
            number(is_total ? nics_total_of(nics, device, kind) : (double)nics_moved(nics, device, kind)));
    return object;
}

static json_t *device_document(const struct nics *nics, size_t i)
{
    const struct nics_device *device = &nics->devices[i];

    return json_pack(
        "{s:o, s:o, s:o, s:s, s:o, s:o, s:b, s:o, s:o?, s:o, s:o, s:o?, s:o}", "device", out_name(device->label), "nic",
        out_name(device->nic), "port", device->counter.rdma ? json_integer(device->counter.port) : json_null(), "kind",
        device->counter.rdma ? "rdma" : "interface", "gpus", gpus_of(device), "rate_gbps",
        device->rate_gbps > 0 ? json_real(device->rate_gbps) : json_null(), "present", nics->tallies[i].is_there,
        "total", sums(nics, i, true), "moved", has_period(nics) ? sums(nics, i, false) : NULL, "sent_gbs",
        rate(nics, i, COUNTER_SENT), "received_gbs", rate(nics, i, COUNTER_RECEIVED), "load",
        has_period(nics) && device->rate_gbps > 0 ? json_real(load(nics, i)) : NULL, "counters", counters_of(nics, i));
}

static json_t *command_document(const struct nics_command *command)
{
    json_t *args = json_array();

    for (char **arg = command->args; *arg; arg++) {
        json_array_append_new(args, out_text(*arg));
    }
    return json_pack("{s:o, s:i, s:o}", "args", args, "exit_code", command->code, "signal",
                     command->signal ? json_integer(command->signal) : json_null());
}

json_t *nics_document(const struct nics *nics, const struct nics_command *command, const struct nics_verdict *verdict)
{
    json_t *document = out_document("nics"), *devices = json_array();

    for (size_t i = 0; i < nics->n; i++)
        json_array_append_new(devices, device_document(nics, i));
    json_object_update_new(document, json_pack("{s:s, s:o, s:b, s:o, s:o, s:o, s:o, s:o}", "mode",
                                               command ? "command" : "boot", "verdict", out_name(verdict->text),
                                               "uneven", verdict->is_uneven, "faults", faults_of(verdict), "seconds",
                                               has_period(nics) ? json_real(seconds(nics)) : json_null(), "command",
                                               command ? command_document(command) : json_null(), "devices", devices,
                                               "notes", make_notes(nics)));
    return document;
}

/* --- text --- */

/* "0,1": the GPUs that use the device. */
#define GPUS_BYTES (TOPO_MAX_GPUS * 4)
static void write_gpus(const struct nics_device *device, char ret_text[GPUS_BYTES])
{
    struct text text = text_in(ret_text, GPUS_BYTES);

    for (int i = 0; i < device->n_gpus; i++)
        text_add(&text, "%s%d", i ? "," : "", device->gpus[i]);
}

static void set_bytes(json_t *row, const char *key, const json_t *sums, const char *from)
{
    char room[32];

    nics_bytes_text(json_number(sums, from), room, sizeof(room));
    json_object_set_new(row, key, out_text(room));
}

/* The values are totals since boot, or the changes in the period. */
static json_t *table_row(const struct nics *nics, size_t i, const json_t *device, const char *values)
{
    const json_t *sums = json_object_get(device, values);
    json_t *row = json_copy((json_t *)device);
    char gpus[GPUS_BYTES];

    json_object_update(row, (json_t *)sums);
    write_gpus(&nics->devices[i], gpus);
    json_object_set_new(row, "gpus", out_text(gpus));
    if (json_is_number(json_object_get(device, "load")))
        json_object_set_new(row, "load", json_real(100 * json_number(device, "load")));
    if (nics_counts_bytes(nics, i)) {
        set_bytes(row, "sent", sums, "sent_bytes");
        set_bytes(row, "received", sums, "received_bytes");
    }
    return row;
}

static int print_devices(FILE *stream, const struct nics *nics, const json_t *devices, const char *values)
{
    static const struct out_column columns[] = {
        {"DEVICE", "device", 0, OUT_NONZERO},
        {"GPU", "gpus", 0, OUT_NONZERO},
        {"SENT", "sent", 0, OUT_RIGHT | OUT_NONZERO},
        {"RECEIVED", "received", 0, OUT_RIGHT | OUT_NONZERO},
        {"GB/s OUT", "sent_gbs", 3, OUT_RIGHT | OUT_NONZERO},
        {"GB/s IN", "received_gbs", 3, OUT_RIGHT | OUT_NONZERO},
        {"% OF RATE", "load", 1, OUT_RIGHT | OUT_NONZERO},
        {"PACKETS OUT", "sent_packets", 0, OUT_RIGHT | OUT_NONZERO},
        {"PACKETS IN", "received_packets", 0, OUT_RIGHT | OUT_NONZERO},
        {"ERRORS", "errors", 0, OUT_RIGHT | OUT_NONZERO},
        {"CONGESTION", "congestion", 0, OUT_RIGHT | OUT_NONZERO},
    };
    json_t *rows = json_array(), *device;
    int result;

    for (size_t i = 0; (device = json_array_get(devices, i)); i++)
        json_array_append_new(rows, table_row(nics, i, device, values));
    result = out_table(stream, columns, COUNT(columns), rows, OUT_TABLE);
    json_decref(rows);
    return result;
}

static int print_details(FILE *stream, const json_t *devices, const char *values)
{
    static const struct out_column columns[] = {
        {"DEVICE", "device", 0, OUT_NONZERO},
        {"COUNTER", "name", 0, OUT_NONZERO},
        {"MOVED", "moved", 0, OUT_RIGHT | OUT_NONZERO},
        {"SINCE BOOT", "total", 0, OUT_RIGHT | OUT_NONZERO},
        {"MEANING", "text", 0, OUT_NONZERO},
    };
    json_t *rows = json_array();
    int result = 0;

    FOR_JSON (device, devices) {
        FOR_JSON (counter, json_object_get(device, "counters")) {
            if (!text_is_any(json_text(counter, "kind"), TEXTS("error", "congestion")) ||
                json_number(counter, values) <= 0)
                continue;
            json_object_set(counter, "device", json_object_get(device, "device"));
            if (json_number(counter, "moved") <= 0)
                json_object_del(counter, "moved");
            json_array_append(rows, counter);
        }
    }
    if (json_array_size(rows) > 0) {
        fprintf(stream, "\nErrors and congestion %s:\n", strcmp(values, "total") == 0 ? "since boot" : "meanwhile");
        result = out_table(stream, columns, COUNT(columns), rows, OUT_TABLE);
    }
    json_decref(rows);
    return result;
}

int nics_print(FILE *stream, const struct nics *nics, const json_t *document, const struct nics_verdict *verdict)
{
    const json_t *devices = json_object_get(document, "devices");
    const char *values = strcmp(json_text(document, "mode"), "boot") == 0 ? "total" : "moved";
    json_t *line;
    int result;

    out_tone(stream, nics_is_finding(verdict) ? OUT_BAD : OUT_PLAIN);
    fputs(verdict->text, stream);
    out_tone(stream, OUT_PLAIN);
    fputs("\n\n", stream);
    result = print_devices(stream, nics, devices, values);
    if (result == 0)
        result = print_details(stream, devices, values);
    for (size_t i = 0; (line = json_array_get(json_object_get(document, "notes"), i)); i++)
        fprintf(stream, "%s%s\n", i ? "" : "\n", json_string_value(line));
    if (nics_is_finding(verdict))
        fputs(
            "\n'epkit topo' shows which GPU should use which NIC; 'epkit doctor' looks for what keeps it from that.\n",
            stream);
    return result == 0 && fflush(stream) == 0 && !ferror(stream) ? 0 : -1;
}

/* --- the text format of Prometheus (exposition format 0.0.4): counters since boot --- */

static const char *const traffic_names[] = {"sent_bytes", "received_bytes", "sent_packets", "received_packets"};

/* "hw_counters/np_cnp_sent" becomes np_cnp_sent, which is unique but for the interface of a port. */
static void metric_name(const struct counter_row *row, char *ret_name, size_t bytes)
{
    const char *slash = strrchr(row->file, '/');

    snprintf(ret_name, bytes, "epkit_nic_%s%s_total",
             strncmp(row->file, COUNTER_NET, strlen(COUNTER_NET)) == 0 ? "interface_" : "",
             row->kind <= COUNTER_RECEIVED_PACKETS ? traffic_names[row->kind]
             : slash                               ? slash + 1
                                                   : row->file);
}

static void print_labels(FILE *stream, const struct nics_device *device)
{
    char port[16] = "", gpus[GPUS_BYTES], clean[128], *name;
    json_t *text;

    if (device->counter.rdma)
        snprintf(port, sizeof(port), "%d", device->counter.port);
    write_gpus(device, gpus);
    text_clean(device->nic, clean, sizeof(clean));
    text = json_string(clean);
    /* Escaped as in JSON. */
    name = json_dumps(text, JSON_ENCODE_ANY);
    fprintf(stream, "{device=%s,port=\"%s\",gpu=\"%s\"}", name, port, gpus);
    free(name);
    json_decref(text);
}

/* Integers as long as they fit, so that nothing is lost to rounding. */
static void print_value(FILE *stream, uint64_t value, int scale)
{
    uint64_t scaled;

    if (__builtin_mul_overflow(value, (uint64_t)scale, &scaled))
        fprintf(stream, " %.17g\n", (double)value * scale);
    else
        fprintf(stream, " %" PRIu64 "\n", scaled);
}

/* One counter of all devices of a kind. Returns whether there was any, and so a header. */
static bool print_counter(FILE *stream, const struct nics *nics, bool rdma, size_t row, bool has_header)
{
    struct counter_rows rows = counter_rows(rdma);
    char name[96];

    metric_name(&rows.at[row], name, sizeof(name));
    for (size_t i = 0; i < nics->n; i++) {
        const struct counter_sample *last = &nics->tallies[i].last;

        if (nics->devices[i].counter.rdma != rdma || !last->known[row])
            continue;
        if (!has_header)
            fprintf(stream, "# HELP %s %s\n# TYPE %s counter\n", name, rows.at[row].text, name);
        has_header = true;
        fputs(name, stream);
        print_labels(stream, &nics->devices[i]);
        print_value(stream, last->values[row], rows.at[row].scale);
    }
    return has_header;
}

static void print_rates(FILE *stream, const struct nics *nics)
{
    bool has_header = false;

    for (size_t i = 0; i < nics->n; i++) {
        if (nics->devices[i].rate_gbps <= 0)
            continue;
        if (!has_header)
            fputs("# HELP epkit_nic_rate_bytes_per_second what the link can carry in one direction\n"
                  "# TYPE epkit_nic_rate_bytes_per_second gauge\n",
                  stream);
        has_header = true;
        fputs("epkit_nic_rate_bytes_per_second", stream);
        print_labels(stream, &nics->devices[i]);
        fprintf(stream, " %.17g\n", nics->devices[i].rate_gbps * 1e9 / 8);
    }
}

void nics_print_prometheus(FILE *stream, const struct nics *nics)
{
    const struct counter_rows of_ports = counter_rows(true), of_interfaces = counter_rows(false);

    for (size_t row = 0; row < of_ports.n; row++) {
        bool has_header = print_counter(stream, nics, true, row, false);

        /* The samples of a metric must be consecutive: traffic of interfaces has the metric names of that of ports. */
        if (of_ports.at[row].kind <= COUNTER_RECEIVED_PACKETS)
            (void)print_counter(stream, nics, false, row, has_header);
    }
    for (size_t row = 0; row < of_interfaces.n; row++)
        if (of_interfaces.at[row].kind > COUNTER_RECEIVED_PACKETS)
            (void)print_counter(stream, nics, false, row, false);
    print_rates(stream, nics);
}

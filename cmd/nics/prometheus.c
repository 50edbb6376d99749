/* SPDX-License-Identifier: Apache-2.0 */
/* prometheus.c - counters since boot in the text format of Prometheus (exposition format 0.0.4). */
#include "nics.h"

#include "common/clean.h"

#include <inttypes.h>
#include <string.h>

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

/* A label value: backslash, quote and line feed are escaped; device names are clean otherwise. */
static void print_label(FILE *stream, const char *name, const char *value)
{
    char clean[128];

    text_clean(value, clean, sizeof(clean));
    fprintf(stream, "%s=\"", name);
    for (const char *at = clean; *at; at++) {
        if (*at == '\\' || *at == '"')
            fputc('\\', stream);
        fputc(*at, stream);
    }
    fputc('"', stream);
}

static void print_labels(FILE *stream, const struct nics_device *device)
{
    char port[16] = "", gpus[NICS_GPUS_BYTES];

    if (device->counter.rdma)
        snprintf(port, sizeof(port), "%d", device->counter.port);
    nics_gpus_text(device, gpus);
    fputc('{', stream);
    print_label(stream, "device", device->nic);
    fputc(',', stream);
    print_label(stream, "port", port);
    fputc(',', stream);
    print_label(stream, "gpu", gpus);
    fputc('}', stream);
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

/* SPDX-License-Identifier: Apache-2.0 */
/* nics_verdict.c - whether all NICs carried the traffic, and faults of links. */
#include "nics.h"

#include "common/memory.h"
#include "common/text.h"

#include <stdlib.h>
#include <string.h>

#define NAMED 4 /* devices that a sentence names */
#define EXCLUDED (-1.0)

struct balance {
    size_t n, n_carriers;
    double sum, average;
    size_t busiest;
    double *bytes; /* by device, in both directions; EXCLUDED: not counted */
};

void nics_bytes_text(double bytes, char *ret_text, size_t text_bytes)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB", "ZB"};
    size_t unit = 0;

    /* 999.95 kB would be printed as 1000.0 kB. */
    while (bytes >= (unit ? 999.95 : 1000) && unit + 1 < COUNT(units)) {
        bytes /= 1000;
        unit++;
    }
    snprintf(ret_text, text_bytes, unit ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
}

/* In both directions; EXCLUDED if no counter of bytes can be read, as of devices that count only in their driver. */
static double bytes_of(const struct nics *nics, size_t device, bool since_boot)
{
    if (!nics_counts_bytes(nics, device))
        return EXCLUDED;
    if (since_boot)
        return nics_total_of(nics, device, COUNTER_SENT) + nics_total_of(nics, device, COUNTER_RECEIVED);
    return (double)nics_moved(nics, device, COUNTER_SENT) + (double)nics_moved(nics, device, COUNTER_RECEIVED);
}

#define append(verdict, ...) text_append((verdict)->text, sizeof((verdict)->text), __VA_ARGS__)

static bool carries(const struct balance *balance, size_t device)
{
    return balance->bytes[device] > 0 && balance->bytes[device] >= NICS_CARRIER_SHARE * balance->average;
}

/* Excludes the NICs that no GPU uses, unless they carry traffic. */
static void exclude_idle(const struct nics *nics, struct balance *balance)
{
    double sum = 0;
    size_t n = 0;

    for (size_t i = 0; i < nics->n; i++) {
        sum += nics->devices[i].is_evaluated && balance->bytes[i] > 0 ? balance->bytes[i] : 0;
        n += nics->devices[i].is_evaluated && balance->bytes[i] >= 0;
    }
    for (size_t i = 0; i < nics->n; i++) {
        double least = n ? NICS_CARRIER_SHARE * sum / (double)n : 0;

        if (!nics->devices[i].is_evaluated && (balance->bytes[i] <= 0 || balance->bytes[i] < least))
            balance->bytes[i] = EXCLUDED;
    }
}

/* Computes sum, average and the busiest device from the bytes. */
static void summarize(const struct nics *nics, struct balance *balance)
{
    balance->n = balance->n_carriers = 0;
    balance->sum = 0;
    balance->busiest = 0;
    exclude_idle(nics, balance);
    for (size_t i = 0; i < nics->n; i++) {
        if (balance->bytes[i] < 0)
            continue;
        balance->n++;
        balance->sum += balance->bytes[i];
        if (balance->bytes[i] > balance->bytes[balance->busiest])
            balance->busiest = i;
    }
    balance->average = balance->n ? balance->sum / (double)balance->n : 0;
    for (size_t i = 0; i < nics->n; i++)
        balance->n_carriers += carries(balance, i);
}

static double spread(const struct balance *balance)
{
    return balance->average > 0 ? balance->bytes[balance->busiest] / balance->average : 1;
}

static bool is_uneven(const struct balance *balance)
{
    return balance->n > 1 && balance->sum >= NICS_MIN_BYTES &&
           (balance->n_carriers < balance->n || spread(balance) > NICS_MAX_SPREAD);
}

/* The noun for the devices. */
static const char *noun(const struct nics *nics)
{
    const char *word = "NICs";

    for (size_t i = 0; i < nics->n; i++) {
        if (!nics->devices[i].counter.rdma)
            return "devices";
        if (strcmp(nics->devices[i].label, nics->devices[i].nic) != 0)
            word = "ports";
    }
    return word;
}

/* "mlx5_0 60.1 %, mlx5_3 39.8 %" */
static void append_carriers(const struct nics *nics, const struct balance *balance, struct nics_verdict *verdict)
{
    size_t n = 0;

    for (size_t i = 0; i < nics->n; i++) {
        if (!carries(balance, i))
            continue;
        if (n++ < NAMED)
            append(verdict, "%s%s %.1f %%", n > 1 ? ", " : "", nics->devices[i].label,
                   100 * balance->bytes[i] / balance->sum);
    }
    if (n > NAMED)
        append(verdict, " and %zu more", n - NAMED);
}

static void append_balance(const struct nics *nics, const struct balance *balance, const char *when,
                           struct nics_verdict *verdict)
{
    char bytes[32];

    nics_bytes_text(balance->sum, bytes, sizeof(bytes));
    verdict->is_uneven = is_uneven(balance);
    if (balance->n == 1) {
        append(verdict, "%s carried %s %s.", nics->devices[balance->busiest].label, bytes, when);
    } else if (balance->sum < NICS_MIN_BYTES) {
        append(verdict, "Hardly any traffic %s: %s, too little to judge its balance.", when, bytes);
    } else if (balance->n_carriers < balance->n) {
        append(verdict, "%zu of %zu %s carried the traffic %s (%s): ", balance->n_carriers, balance->n, noun(nics),
               when, bytes);
        append_carriers(nics, balance, verdict);
        append(verdict, ".");
    } else if (verdict->is_uneven) {
        append(verdict, "%zu of %zu %s carried %s %s, unevenly: %s carried %.1f times the average.", balance->n,
               balance->n, noun(nics), bytes, when, nics->devices[balance->busiest].label, spread(balance));
    } else {
        append(verdict, "%zu of %zu %s carried %s %s, evenly (spread %.2f).", balance->n, balance->n, noun(nics), bytes,
               when, spread(balance));
    }
}

static void append_errors(const struct nics *nics, struct nics_verdict *verdict)
{
    size_t n = 0;

    for (size_t i = 0; i < nics->n; i++) {
        if (nics_moved(nics, i, COUNTER_ERROR) == 0)
            continue;
        if (n++ < NAMED)
            append(verdict, "%s%s", n == 1 ? " Errors were counted on " : ", ", nics->devices[i].label);
    }
    if (n > NAMED)
        append(verdict, " and %zu more", n - NAMED);
    if (n)
        append(verdict, ".");
}

/* --- faults of links, and loss --- */

static void __attribute__((format(printf, 3, 4)))
add_fault(const struct nics_device *device, struct nics_verdict *verdict, const char *format, ...)
{
    char text[78];

    WITH_ARGS(args, format, vsnprintf(text, sizeof(text), format, args));
    if (verdict->n_faults++ < (int)(sizeof(verdict->faults) / sizeof(verdict->faults[0])))
        snprintf(verdict->faults[verdict->n_faults - 1], sizeof(verdict->faults[0]), "%s: %s", device->label, text);
}

/* The row of a counter of RDMA ports. */
static size_t row_of(const char *file)
{
    struct counter_rows rows = counter_rows(true);
    size_t i = 0;

    while (i < rows.n && strcmp(rows.at[i].file, file) != 0)
        i++;
    return i;
}

static int64_t total_of(const struct nics *nics, size_t device, size_t row)
{
    double total;

    return nics->devices[device].counter.rdma && nics_total(nics, device, row, &total) && total < 9e18 ? (int64_t)total
                                                                                                       : 0;
}

/* The median of the other ports; 0 without others. */
static int64_t median_of_others(const struct nics *nics, size_t self, size_t row)
{
    int64_t *values = memory_new(nics->n, sizeof(*values)), median;
    size_t n = 0;

    for (size_t i = 0; i < nics->n; i++)
        if (i != self && nics->devices[i].counter.rdma && nics->devices[i].is_evaluated)
            values[n++] = total_of(nics, i, row);
    median = counter_median(values, n);
    free(values);
    return median;
}

static void check_links(const struct nics *nics, size_t device, bool since_boot, const char *when,
                        struct nics_verdict *verdict)
{
    const struct counter_limit *limits;
    size_t n;

    limits = counter_limits(&n);
    for (size_t k = 0; k < n; k++) {
        size_t row = row_of(limits[k].file);
        uint64_t moved = row < COUNTER_ROWS_MAX ? nics->tallies[device].moved[row] : 0;
        int64_t total = total_of(nics, device, row);
        char text[64];

        if (moved >= (uint64_t)limits[k].watched && moved <= INT64_MAX) {
            counter_limit_text(&limits[k], (int64_t)moved, text, sizeof(text));
            add_fault(&nics->devices[device], verdict, "%s %s", text, when);
        } else if (since_boot && counter_is_outlier(&limits[k], total, median_of_others(nics, device, row))) {
            counter_limit_text(&limits[k], total, text, sizeof(text));
            add_fault(&nics->devices[device], verdict, "%s since boot", text);
        }
    }
}

static double counted(const struct nics *nics, size_t device, const char *file, bool since_boot)
{
    size_t row = row_of(file);

    return since_boot ? (double)total_of(nics, device, row) : (double)nics->tallies[device].moved[row];
}

static void check_loss(const struct nics *nics, size_t device, bool since_boot, const char *when,
                       struct nics_verdict *verdict)
{
    double lost =
        counted(nics, device, COUNTER_LOST, since_boot) + counted(nics, device, COUNTER_TIMED_OUT, since_boot);
    double sent = counted(nics, device, "port_xmit_packets", since_boot);
    double least = since_boot ? COUNTER_LOST_LEAST : COUNTER_LOST_LEAST / 100.0;

    if (sent > 0 && lost >= least && lost / sent >= COUNTER_LOST_RATIO)
        add_fault(&nics->devices[device], verdict, "one packet in %.0f was lost %s", sent / lost,
                  since_boot ? "since boot" : when);
}

/* `when` describes the period; `since_boot`: also evaluates the values since boot, compared with the other ports. */
static void check_faults(const struct nics *nics, bool since_boot, const char *when, struct nics_verdict *verdict)
{
    for (size_t i = 0; i < nics->n; i++) {
        if (!nics->devices[i].counter.rdma || !nics->devices[i].is_evaluated)
            continue;
        check_links(nics, i, since_boot, when, verdict);
        check_loss(nics, i, since_boot, when, verdict);
    }
    if (verdict->n_faults == 1)
        append(verdict, "%s%s.", *verdict->text ? " " : "", verdict->faults[0]);
    else if (verdict->n_faults > 1)
        append(verdict, "%s%s; and %d more fault%s.", *verdict->text ? " " : "", verdict->faults[0],
               verdict->n_faults - 1, verdict->n_faults == 2 ? "" : "s");
}

static void evaluate_bytes(const struct nics *nics, bool since_boot, struct balance *balance)
{
    for (size_t i = 0; i < nics->n; i++)
        balance->bytes[i] = bytes_of(nics, i, since_boot);
    summarize(nics, balance);
}

static bool none_counts(const struct nics *nics)
{
    return !ANY_OF(i, nics->n, nics_counts_bytes(nics, i));
}

void nics_evaluate(const struct nics *nics, const struct nics_command *command, struct nics_verdict *ret_verdict)
{
    struct balance balance = {.bytes = memory_new(nics->n, sizeof(double))};
    struct nics_verdict verdict = {.is_uneven = false};
    bool has_period = nics->end_ns > nics->begin_ns;
    char when[48];

    if (nics->end_ns - nics->begin_ns < 100000000)
        snprintf(when, sizeof(when), "within %.1f ms", (double)(nics->end_ns - nics->begin_ns) / 1e6);
    else
        snprintf(when, sizeof(when), "within %.1f s", (double)(nics->end_ns - nics->begin_ns) / 1e9);
    evaluate_bytes(nics, false, &balance);
    if (none_counts(nics)) {
        append(&verdict, "The traffic is not known: no counter of bytes can be read.");
    } else if (has_period && (balance.sum > 0 || command)) {
        if (balance.sum > 0)
            append_balance(nics, &balance, when, &verdict);
        else
            append(&verdict, "No traffic %s.", when);
        append_errors(nics, &verdict);
    } else {
        evaluate_bytes(nics, true, &balance);
        if (has_period)
            append(&verdict, "No traffic %s%s", when, balance.sum > 0 ? ". " : ", nor since boot.");
        else if (balance.sum <= 0)
            append(&verdict, "No traffic since boot.");
        if (balance.sum > 0)
            append_balance(nics, &balance, "since boot", &verdict);
    }
    check_faults(nics, !command, when, &verdict);
    free(balance.bytes);
    *ret_verdict = verdict;
}

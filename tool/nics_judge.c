/* SPDX-License-Identifier: Apache-2.0 */
/* nics_judge.c - did all NICs carry the traffic? */
#include "nics.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define NAMED 4 /* devices that a sentence names */
#define LEFT_OUT (-1.0)

struct balance {
    size_t n, n_carriers;
    double sum, average;
    size_t busiest;
    double *bytes; /* by device, both ways; LEFT_OUT: does not count */
};

void nics_bytes_text(double bytes, char *ret_text, size_t text_bytes)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB", "ZB"};
    size_t unit = 0;

    /* 999.95 kB would be printed as 1000.0 kB. */
    while (bytes >= (unit ? 999.95 : 1000) && unit + 1 < sizeof(units) / sizeof(units[0])) {
        bytes /= 1000;
        unit++;
    }
    snprintf(ret_text, text_bytes, unit ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
}

static void __attribute__((format(printf, 2, 3))) say(struct nics_verdict *verdict, const char *format, ...)
{
    size_t n = strlen(verdict->text);
    va_list args;

    va_start(args, format);
    vsnprintf(verdict->text + n, sizeof(verdict->text) - n, format, args);
    va_end(args);
}

static bool carries(const struct balance *balance, size_t device)
{
    return balance->bytes[device] > 0 && balance->bytes[device] >= NICS_CARRIES * balance->average;
}

/* Leaves out the NICs that no GPU uses, unless they carry traffic all the same. */
static void leave_out(const struct nics *nics, struct balance *balance)
{
    double sum = 0;
    size_t n = 0;

    for (size_t i = 0; i < nics->n; i++) {
        sum += nics->devices[i].is_judged ? balance->bytes[i] : 0;
        n += nics->devices[i].is_judged;
    }
    for (size_t i = 0; i < nics->n; i++) {
        double least = n ? NICS_CARRIES * sum / (double)n : 0;

        if (!nics->devices[i].is_judged && (balance->bytes[i] <= 0 || balance->bytes[i] < least))
            balance->bytes[i] = LEFT_OUT;
    }
}

/* Fills in what follows from the bytes. */
static void weigh(const struct nics *nics, struct balance *balance)
{
    balance->n = balance->n_carriers = 0;
    balance->sum = 0;
    balance->busiest = 0;
    leave_out(nics, balance);
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
    return balance->n > 1 && balance->sum >= NICS_JUDGED_BYTES &&
           (balance->n_carriers < balance->n || spread(balance) > NICS_SPREAD);
}

/* "NICs", or what else is counted. */
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
static void say_carriers(const struct nics *nics, const struct balance *balance, struct nics_verdict *verdict)
{
    size_t n = 0;

    for (size_t i = 0; i < nics->n; i++) {
        if (!carries(balance, i))
            continue;
        if (n++ < NAMED)
            say(verdict, "%s%s %.1f %%", n > 1 ? ", " : "", nics->devices[i].label,
                100 * balance->bytes[i] / balance->sum);
    }
    if (n > NAMED)
        say(verdict, " and %zu more", n - NAMED);
}

static void say_balance(const struct nics *nics, const struct balance *balance, const char *when,
                        struct nics_verdict *verdict)
{
    char bytes[32];

    nics_bytes_text(balance->sum, bytes, sizeof(bytes));
    verdict->is_finding = is_uneven(balance);
    if (balance->n == 1) {
        say(verdict, "%s carried %s %s.", nics->devices[balance->busiest].label, bytes, when);
    } else if (balance->sum < NICS_JUDGED_BYTES) {
        say(verdict, "Hardly any traffic %s: %s, too little to judge its balance.", when, bytes);
    } else if (balance->n_carriers < balance->n) {
        say(verdict, "%zu of %zu %s carried the traffic %s (%s): ", balance->n_carriers, balance->n, noun(nics), when,
            bytes);
        say_carriers(nics, balance, verdict);
        say(verdict, ".");
    } else if (verdict->is_finding) {
        say(verdict, "%zu of %zu %s carried %s %s, unevenly: %s carried %.1f times the average.", balance->n,
            balance->n, noun(nics), bytes, when, nics->devices[balance->busiest].label, spread(balance));
    } else {
        say(verdict, "%zu of %zu %s carried %s %s, evenly (spread %.2f).", balance->n, balance->n, noun(nics), bytes,
            when, spread(balance));
    }
}

static void say_errors(const struct nics *nics, struct nics_verdict *verdict)
{
    size_t n = 0;

    for (size_t i = 0; i < nics->n; i++) {
        if (nics_moved(nics, i, COUNTER_ERROR) == 0)
            continue;
        if (n++ < NAMED)
            say(verdict, "%s%s", n == 1 ? " Errors were counted on " : ", ", nics->devices[i].label);
    }
    if (n > NAMED)
        say(verdict, " and %zu more", n - NAMED);
    if (n)
        say(verdict, ".");
}

static void moved_bytes(const struct nics *nics, struct balance *balance)
{
    for (size_t i = 0; i < nics->n; i++)
        balance->bytes[i] = (double)nics_moved(nics, i, COUNTER_SENT) + (double)nics_moved(nics, i, COUNTER_RECEIVED);
    weigh(nics, balance);
}

void nics_conclude(const struct nics *nics, enum nics_mode mode, struct nics_verdict *ret_verdict)
{
    struct balance balance = {.bytes = calloc(nics->n + 1, sizeof(double))};
    struct nics_verdict verdict = {.is_finding = false};
    bool has_period = nics->end_ns > nics->begin_ns;
    char when[48];

    *ret_verdict = verdict;
    if (!balance.bytes)
        return;
    if (nics->end_ns - nics->begin_ns < 100000000)
        snprintf(when, sizeof(when), "within %.1f ms", (double)(nics->end_ns - nics->begin_ns) / 1e6);
    else
        snprintf(when, sizeof(when), "within %.1f s", (double)(nics->end_ns - nics->begin_ns) / 1e9);
    moved_bytes(nics, &balance);
    if (has_period && (balance.sum > 0 || mode != NICS_BOOT)) {
        if (balance.sum > 0)
            say_balance(nics, &balance, when, &verdict);
        else
            say(&verdict, "No traffic %s.", when);
        say_errors(nics, &verdict);
    } else {
        for (size_t i = 0; i < nics->n; i++)
            balance.bytes[i] = nics_total_of(nics, i, COUNTER_SENT) + nics_total_of(nics, i, COUNTER_RECEIVED);
        weigh(nics, &balance);
        if (has_period)
            say(&verdict, "No traffic %s%s", when, balance.sum > 0 ? ". " : ", nor since boot.");
        else if (balance.sum <= 0)
            say(&verdict, "No traffic since boot.");
        if (balance.sum > 0)
            say_balance(nics, &balance, "since boot", &verdict);
    }
    free(balance.bytes);
    *ret_verdict = verdict;
}

bool nics_was_uneven(const struct nics *nics)
{
    struct balance balance = {.bytes = calloc(nics->n + 1, sizeof(double))};
    bool result;

    if (!balance.bytes)
        return false;
    for (size_t i = 0; i < nics->n; i++)
        balance.bytes[i] = nics->devices[i].carried;
    weigh(nics, &balance);
    result = is_uneven(&balance);
    free(balance.bytes);
    return result;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* nics.h - shared by the files of `epkit nics`: devices, the changes of their counters in a period, and reports. */
#ifndef EP_NICS_NICS_H
#define EP_NICS_NICS_H

#include "common/cmd.h"
#include "counter_sample.h"
#include "machine/hardware/topo.h"

#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <sys/types.h>

/*
 * Thresholds of uneven traffic. A machine that uses all of its NICs stays far below: the all-to-all of expert
 * parallelism distributes its tokens at random, which varies by a few per cent at these amounts.
 */
#define NICS_MIN_BYTES 1000000.0 /* with less over all devices no verdict: background traffic */
#define NICS_CARRIER_SHARE 0.1   /* share of the average from which on a device counts as carrying traffic */
#define NICS_MAX_SPREAD 1.5      /* the maximum of the busiest device, in multiples of the average */

struct nics_device {
    struct counter_device counter;
    char name[80], nic[64], netdev[64]; /* counter.name, counter.nic, counter.netdev */
    char label[80];                     /* "mlx5_0", or "mlx5_0:2" where the NIC has several ports; safe to print */
    double rate_gbps;                   /* 0 unknown */
    int n_gpus, gpus[TOPO_MAX_GPUS];
    bool is_evaluated; /* counts in the verdict about balance */
};

/* Changes of the counters of a device in a period. */
struct nics_tally {
    struct counter_sample last;       /* the last known value of each counter */
    uint64_t moved[COUNTER_ROWS_MAX]; /* bytes for data */
    bool is_counted[COUNTER_ROWS_MAX];
    bool is_reset[COUNTER_ROWS_MAX];
    bool was_there, is_there; /* at the start of the period, at the last sample */
};

struct nics {
    struct source *source;
    size_t n;
    struct nics_device *devices;
    struct nics_tally *tallies;
    int64_t begin_ns, end_ns; /* of the period; equal after only one sample */
};

/* --- devices.c --- */

/*
 * The devices in `list` (comma-separated), or if it is NULL all active ports of NICs that carry data. CMD_FINE with n
 * == 0 if there are none; CMD_USAGE for an unknown name.
 */
int nics_choose(const struct cmd *cmd, const struct topo *topo, const char *list, struct nics *ret_nics);
void nics_done(struct nics *nics);

/* --- sample.c --- */

/* Takes the first sample: a period begins. */
void nics_begin(struct nics *nics);

/* Takes another sample, which extends the period to now. */
void nics_sample(struct nics *nics);

/*
 * Waits until `until_ns` or for a signal in `signals`, which are blocked. Meanwhile it
 * samples counters that may wrap around. Returns the signal with *ret_info, or 0.
 */
int nics_wait(struct nics *nics, int64_t until_ns, const sigset_t *signals, siginfo_t *ret_info);

/* The change in the period, summed over the counters of a kind. */
uint64_t nics_moved(const struct nics *nics, size_t device, enum counter_kind kind);

/* The current value of a counter, in bytes for data, and the sum over a kind. False if it was never read. */
bool nics_total(const struct nics *nics, size_t device, size_t row, double *ret_total);
double nics_total_of(const struct nics *nics, size_t device, enum counter_kind kind);

/* Could a counter of bytes be read? */
bool nics_counts_bytes(const struct nics *nics, size_t device);

struct nics_command {
    char **args; /* ends with NULL */
    int code;    /* as in a shell: exit status, 128 + signal, 126 or 127 if it could not start */
    int signal;  /* that terminated it, or 0 */
    bool has_started;
};

/* Runs the command between two samples. Reports why it could not be started. */
void nics_run_command(struct nics *nics, struct nics_command *command);

/* --- nics_verdict.c --- */

struct nics_verdict {
    char text[768];
    bool is_uneven;
    int n_faults;        /* of links and of the network */
    char faults[8][160]; /* the first ones: "mlx5_3: the link went down 4 times within 1.0 s" */
};

/* `command`: what the period was for; NULL: a look since boot. */
void nics_evaluate(const struct nics *nics, const struct nics_command *command, struct nics_verdict *ret_verdict);

static inline bool nics_is_finding(const struct nics_verdict *verdict)
{
    return verdict->is_uneven || verdict->n_faults > 0;
}

/* "12.3 GB" */
void nics_bytes_text(double bytes, char *ret_text, size_t text_bytes);

/* --- nics_output.c --- */

json_t *nics_document(const struct nics *nics, const struct nics_command *command, const struct nics_verdict *verdict);

/* The document as text. 0, or -1 if it could not be printed. */
int nics_print(FILE *stream, const struct nics *nics, const json_t *document, const struct nics_verdict *verdict);

/* The counters since boot, in the text format of Prometheus. */
void nics_print_prometheus(FILE *stream, const struct nics *nics);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * counters.h - what NICs have sent and received: samples, and what happened between two of them.
 */
#ifndef EP_TOPO_COUNTERS_H
#define EP_TOPO_COUNTERS_H

#include "hardware/topo.h"

/* A device whose counters are read: a port of an RDMA device, or a network interface. */
struct counter_device {
    const char *name; /* "mlx5_0:1", "eth0" */
    bool rdma;
    const char *nic; /* "mlx5_0" or "eth0" */
    int port;
};

enum counter_kind {
    COUNTER_SENT, /* bytes */
    COUNTER_RECEIVED,
    COUNTER_SENT_PACKETS,
    COUNTER_RECEIVED_PACKETS,
    COUNTER_ERROR,     /* something was lost, damaged or refused */
    COUNTER_CONGESTION /* somebody had to wait */
};

struct counter_row {
    const char *file; /* below the device's folder of counters: "port_xmit_data", "hw_counters/np_cnp_sent" */
    enum counter_kind kind;
    int scale; /* bytes per unit: 4 for the data counters of RDMA ports (IB specification: in words of 4 bytes) */
    const char *text; /* what it counts, for people */
};

#define COUNTER_ROWS_MAX 48

/* The counters of RDMA ports, or of network interfaces. */
const struct counter_row *counter_rows(bool rdma, size_t *ret_n);

struct counter_sample {
    int64_t at_ns; /* of the monotonic clock */
    bool known[COUNTER_ROWS_MAX];
    uint64_t values[COUNTER_ROWS_MAX];        /* as the file has it, not scaled */
    enum root_state states[COUNTER_ROWS_MAX]; /* why it is not known; ROOT_UNASKED when it was not read */
};

void counter_read(struct root *root, const struct counter_device *device, struct counter_sample *ret_sample);

/* The same for bytes and packets alone: four files. */
void counter_read_traffic(struct root *root, const struct counter_device *device, struct counter_sample *ret_sample);

/*
 * Could the device's data counters be of 32 bits? True as long as none has passed 2^32. A link of 400 Gbit/s takes such
 * a counter around in 0.34 s, so it has to be read more often than half of that.
 */
bool counter_may_wrap(const struct counter_device *device, const struct counter_sample *sample);

/*
 * What counter `row` moved from `before` to `after`, in units of kind (bytes for data). A counter that went down has
 * wrapped around, at 2^32 if both values are below that and at 2^64 otherwise, if the way across is shorter than the
 * way back; else it was reset: that gives the new value and sets *ret_reset. False when one of the two is not known.
 */
bool counter_moved(const struct counter_device *device, size_t row, const struct counter_sample *before,
                   const struct counter_sample *after, uint64_t *ret_amount, bool *ret_reset);

#endif

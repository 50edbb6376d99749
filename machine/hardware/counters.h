/* SPDX-License-Identifier: Apache-2.0 */
/*
 * counters.h - what NICs have sent and received: samples, and what happened between two of them.
 */
#ifndef EP_TOPO_COUNTERS_H
#define EP_TOPO_COUNTERS_H

#include "hardware/topo.h"

#include <jansson.h>

/* A device whose counters are read: a port of an RDMA device, or a network interface. */
struct counter_device {
    const char *name; /* "mlx5_0:1", "eth0" */
    bool rdma;
    const char *nic; /* "mlx5_0" or "eth0" */
    int port;
    const char *netdev; /* the interface of a port of Ethernet; NULL or "" none */
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
    /*
     * Below the device's folder of counters: "port_xmit_data", "hw_counters/np_cnp_sent". Of the interface of a port:
     * "net/carrier_down_count" in sysfs, "ethtool/rx_discards_phy" by its driver.
     */
    const char *file;
    enum counter_kind kind;
    int scale; /* bytes per unit: 4 for the data counters of RDMA ports (IB specification: in words of 4 bytes) */
    const char *text; /* what it counts, for people */
};

#define COUNTER_ROWS_MAX 72
#define COUNTER_NET "net/"
#define COUNTER_ETHTOOL "ethtool/"
#define COUNTER_PATH_BYTES 320

/* The counters of RDMA ports, or of network interfaces. */
struct counter_rows {
    size_t n;
    const struct counter_row *at;
};
struct counter_rows counter_rows(bool rdma);

/* The file of a counter in sysfs; "" where there is none: no interface, or one that the driver is asked for. */
const char *counter_path(const struct counter_device *device, const char *file, char ret_path[COUNTER_PATH_BYTES]);

/*
 * What the driver of an interface counts: {"rx_prio3_pause": 12, ...}, of COUNTER_ETHTOOL alone; NULL: nothing. A live
 * machine is asked at each look; a snapshot has the answer under the question of this name and the interface's.
 */
#define COUNTER_QUERY_NAME "ethtool:%s"
#define COUNTER_DEADLINE_MS 1000
json_t *ethtool_query(void *interface);

/*
 * Counters that tell of a fault of the link itself. Since boot a port has seen its switch restart, and what all ports
 * have alike is no fault of one: one stands out that has at least `least` and five times what the others have, or
 * `always` whatever they have. While somebody watches, any movement is a fault, but for packets that were dropped at
 * the port: lossy traffic drops a few on healthy networks.
 */
struct counter_limit {
    const char *file, *text; /* a phrase with the place for a number: "the link went down %lld times" */
    int64_t least, always;
    int64_t watched; /* so many are a fault while somebody watches */
};

const struct counter_limit *counter_limits(size_t *ret_n);
/* Of values in any order, which are sorted for it; 0 of none. */
int64_t counter_median(int64_t *values, size_t n);
bool counter_is_outlier(const struct counter_limit *limit, int64_t value, int64_t median_of_others);

/* "the link went down 73 times" */
void counter_limit_text(const struct counter_limit *limit, int64_t value, char *ret_text, size_t bytes);

/*
 * RoCE: packets that a receiver asks for again (COUNTER_LOST), or whose acknowledgement does not come
 * (COUNTER_TIMED_OUT), of those sent. From one in 100000 on the way back to the lost one (go-back-N) costs more than a
 * few per cent. Of those received, COUNTER_OUT_OF_ORDER alone says less, since adaptive routing lets packets overtake
 * each other on healthy networks; they were lost where peers send again (COUNTER_DUPLICATE).
 */
#define COUNTER_LOST "hw_counters/packet_seq_err"
#define COUNTER_TIMED_OUT "hw_counters/local_ack_timeout_err"
#define COUNTER_OUT_OF_ORDER "hw_counters/out_of_sequence"
#define COUNTER_DUPLICATE "hw_counters/duplicate_request"
#define COUNTER_LOST_LEAST 10000
#define COUNTER_LOST_RATIO 1e-5
#define COUNTER_LOST_RATIO_SEVERE 1e-3

struct counter_sample {
    int64_t at_ns; /* of the monotonic clock */
    bool known[COUNTER_ROWS_MAX];
    uint64_t values[COUNTER_ROWS_MAX];          /* as the file has it, not scaled */
    enum source_state states[COUNTER_ROWS_MAX]; /* why it is not known; SOURCE_NOT_RECORDED when it was not read */
};

void counter_read(struct source *source, const struct counter_device *device, struct counter_sample *ret_sample);

/* The same for bytes and packets alone: four files. */
void counter_read_traffic(struct source *source, const struct counter_device *device,
                          struct counter_sample *ret_sample);

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

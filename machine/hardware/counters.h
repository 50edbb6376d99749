/* SPDX-License-Identifier: Apache-2.0 */
/* counters.h - traffic and error counters of NICs. */
#ifndef EP_TOPO_COUNTERS_H
#define EP_TOPO_COUNTERS_H

#include "topo.h"

#include <jansson.h>

/* A device with counters: a port of an RDMA device, or a network interface. */
struct counter_device {
    const char *name; /* "mlx5_0:1", "eth0" */
    bool rdma;
    const char *nic; /* "mlx5_0" or "eth0" */
    int port;
    const char *netdev; /* the interface of an Ethernet port; NULL or "" without one */
};

enum counter_kind {
    COUNTER_SENT, /* bytes */
    COUNTER_RECEIVED,
    COUNTER_SENT_PACKETS,
    COUNTER_RECEIVED_PACKETS,
    COUNTER_ERROR,     /* something was lost, damaged or refused */
    COUNTER_CONGESTION /* a sender had to wait */
};

struct counter_row {
    /*
     * Relative to the folder of counters of the device: "port_xmit_data", "hw_counters/np_cnp_sent". For the interface
     * of a port: "net/carrier_down_count" in sysfs, "ethtool/rx_discards_phy" from its driver.
     */
    const char *file;
    enum counter_kind kind;
    int scale; /* bytes per unit: 4 for the data counters of RDMA ports (IB specification: in words of 4 bytes) */
    const char *text; /* description for users */
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

/* The path of a counter in sysfs; "" without one: no interface, or a counter of the driver. */
const char *counter_path(const struct counter_device *device, const char *file, char ret_path[COUNTER_PATH_BYTES]);

/*
 * The statistics of the driver of an interface, only those of COUNTER_ETHTOOL: {"rx_prio3_pause": 12, ...}; NULL: none.
 * A live machine is queried for each sample; a snapshot has the answer under this query name with the name of the
 * interface.
 */
#define COUNTER_QUERY_NAME "ethtool:%s"
#define COUNTER_DEADLINE_MS 1000
json_t *ethtool_query(void *interface);

/*
 * Counters of faults of the link. Since boot a port has seen its switch restart, and what all ports have is not a fault
 * of one. So a port is an outlier if its value is at least `least` and five times that of the others, or at least
 * `always`. While the counters are watched, any change is a fault, except for packets dropped at the port: lossy
 * traffic drops a few on healthy networks.
 */
struct counter_limit {
    const char *file, *text; /* a phrase with a conversion for the number: "the link went down %lld times" */
    int64_t least, always;
    int64_t watched; /* this many are a fault while the counters are watched */
};

const struct counter_limit *counter_limits(size_t *ret_n);
/* The median; sorts `values`. 0 without values. */
int64_t counter_median(int64_t *values, size_t n);
bool counter_is_outlier(const struct counter_limit *limit, int64_t value, int64_t median_of_others);

/* "the link went down 73 times" */
void counter_limit_text(const struct counter_limit *limit, int64_t value, char *ret_text, size_t bytes);

/*
 * RoCE: packets that a receiver requests again (COUNTER_LOST), or that are not acknowledged (COUNTER_TIMED_OUT), of
 * those sent. From a loss of one in 100000 on, retransmission from the lost packet on (go-back-N) costs more than a few
 * per cent. Of those received, COUNTER_OUT_OF_ORDER alone is weak evidence, since adaptive routing reorders packets on
 * healthy networks; they were lost where peers send again (COUNTER_DUPLICATE).
 */
#define COUNTER_LOST "hw_counters/packet_seq_err"
#define COUNTER_TIMED_OUT "hw_counters/local_ack_timeout_err"
#define COUNTER_OUT_OF_ORDER "hw_counters/out_of_sequence"
#define COUNTER_DUPLICATE "hw_counters/duplicate_request"
#define COUNTER_LOST_LEAST 10000
#define COUNTER_LOST_RATIO 1e-5
#define COUNTER_LOST_RATIO_SEVERE 1e-3

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* counters.c - the counters that the kernel keeps for NICs. */
#include "counters.h"

#include "common/dir.h"
#include "common/memory.h"
#include "common/text.h"

#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

/*
 * Ports of RDMA devices. ports/<n>/counters has those of the InfiniBand specification (PortCounters and
 * PortCountersExtended; data in words of 4 bytes), which RoCE devices provide as well; ports/<n>/hw_counters has those
 * of the driver, here mlx5. Devices may lack some of them.
 */
#define PRIORITY(n)                                                                                                    \
    {COUNTER_ETHTOOL "rx_prio" n "_pause", COUNTER_CONGESTION, 1, "pause frames received for priority " n " (PFC)"},   \
        {COUNTER_ETHTOOL "tx_prio" n "_pause", COUNTER_CONGESTION, 1, "pause frames sent for priority " n " (PFC)"},   \
    {                                                                                                                  \
        COUNTER_ETHTOOL "rx_prio" n "_discards", COUNTER_ERROR, 1,                                                     \
            "packets of priority " n " dropped for lack of buffers"                                                    \
    }

static const struct counter_row rdma_rows[] = {
    {"port_xmit_data", COUNTER_SENT, 4, "bytes sent"},
    {"port_rcv_data", COUNTER_RECEIVED, 4, "bytes received"},
    {"port_xmit_packets", COUNTER_SENT_PACKETS, 1, "packets sent"},
    {"port_rcv_packets", COUNTER_RECEIVED_PACKETS, 1, "packets received"},
    {"symbol_error", COUNTER_ERROR, 1, "symbols damaged on the link: cable or transceiver"},
    {"link_error_recovery", COUNTER_ERROR, 1, "times the link recovered from errors by itself"},
    {"link_downed", COUNTER_ERROR, 1, "times the link went down"},
    {"port_rcv_errors", COUNTER_ERROR, 1, "packets received damaged"},
    {"port_rcv_remote_physical_errors", COUNTER_ERROR, 1, "packets that were marked bad on their way here"},
    {"port_rcv_switch_relay_errors", COUNTER_ERROR, 1, "packets received that could not be forwarded"},
    {"port_xmit_discards", COUNTER_ERROR, 1, "packets discarded instead of sent: port down or congested"},
    {"port_xmit_constraint_errors", COUNTER_ERROR, 1, "packets not sent because of partition or access rules"},
    {"port_rcv_constraint_errors", COUNTER_ERROR, 1, "packets refused because of partition or access rules"},
    {"local_link_integrity_errors", COUNTER_ERROR, 1, "times local errors on the link exceeded the threshold"},
    {"excessive_buffer_overrun_errors", COUNTER_ERROR, 1, "times the receive buffers kept overflowing"},
    {"VL15_dropped", COUNTER_ERROR, 1, "management packets dropped for lack of buffers"},
    {"port_xmit_wait", COUNTER_CONGESTION, 1, "ticks with data to send and no credits from the other side"},
    {"hw_counters/out_of_sequence", COUNTER_ERROR, 1, "packets that arrived out of sequence: lost or overtaken"},
    {"hw_counters/packet_seq_err", COUNTER_ERROR, 1, "sequence errors that the receiver reported (NAK)"},
    {"hw_counters/implied_nak_seq_err", COUNTER_ERROR, 1, "acknowledgements beyond a missing read or atomic response"},
    {"hw_counters/local_ack_timeout_err", COUNTER_ERROR, 1, "acknowledgements that did not come in time"},
    {"hw_counters/duplicate_request", COUNTER_ERROR, 1, "requests received again: the sender missed the answer"},
    {"hw_counters/rnr_nak_retry_err", COUNTER_ERROR, 1, "receiver-not-ready answers beyond the retry limit"},
    {"hw_counters/out_of_buffer", COUNTER_ERROR, 1, "packets dropped because no receive was posted"},
    {"hw_counters/rx_icrc_encapsulated", COUNTER_ERROR, 1, "RoCE packets with a wrong checksum (ICRC)"},
    {"hw_counters/req_remote_access_errors", COUNTER_ERROR, 1, "requests that the peer refused: wrong key or address"},
    {"hw_counters/req_remote_invalid_request", COUNTER_ERROR, 1, "requests that the peer called invalid"},
    {"hw_counters/resp_remote_access_errors", COUNTER_ERROR, 1, "requests of a peer refused: wrong key or address"},
    {"hw_counters/resp_local_length_error", COUNTER_ERROR, 1, "messages received longer than their buffer"},
    {"hw_counters/roce_adp_retrans", COUNTER_ERROR, 1, "adaptive retransmissions"},
    {"hw_counters/roce_adp_retrans_to", COUNTER_ERROR, 1, "adaptive retransmissions that timed out"},
    {"hw_counters/roce_slow_restart", COUNTER_CONGESTION, 1, "slow restarts after loss"},
    {"hw_counters/roce_slow_restart_cnps", COUNTER_CONGESTION, 1, "congestion notices sent by slow restart"},
    {"hw_counters/roce_slow_restart_trans", COUNTER_CONGESTION, 1, "changes of state into slow restart"},
    {"hw_counters/np_cnp_sent", COUNTER_CONGESTION, 1, "congestion notices (CNP) sent to senders"},
    {"hw_counters/np_ecn_marked_roce_packets", COUNTER_CONGESTION, 1, "packets received with a congestion mark (ECN)"},
    {"hw_counters/rp_cnp_handled", COUNTER_CONGESTION, 1, "congestion notices (CNP) obeyed"},
    {"hw_counters/rp_cnp_ignored", COUNTER_CONGESTION, 1, "congestion notices (CNP) ignored"},
    /* Of the interface of an Ethernet port: mlx5 does not count link events at the RDMA device. */
    {COUNTER_NET "carrier_down_count", COUNTER_ERROR, 1, "times the interface lost its carrier"},
    {COUNTER_NET "statistics/rx_crc_errors", COUNTER_ERROR, 1, "frames received with a wrong checksum"},
    /* Names of mlx5 (Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst of Linux). */
    {COUNTER_ETHTOOL "rx_discards_phy", COUNTER_ERROR, 1, "packets dropped at the port for lack of buffers"},
    {COUNTER_ETHTOOL "tx_discards_phy", COUNTER_ERROR, 1, "packets dropped at the port instead of sent"},
    {COUNTER_ETHTOOL "tx_pause_storm_error_events", COUNTER_ERROR, 1, "pause storms: it paused others for too long"},
    PRIORITY("0"),
    PRIORITY("1"),
    PRIORITY("2"),
    PRIORITY("3"),
    PRIORITY("4"),
    PRIORITY("5"),
    PRIORITY("6"),
    PRIORITY("7"),
};

/* Network interfaces: the folder statistics (Documentation/ABI/testing/sysfs-class-net-statistics of Linux). */
static const struct counter_row net_rows[] = {
    {"tx_bytes", COUNTER_SENT, 1, "bytes sent"},
    {"rx_bytes", COUNTER_RECEIVED, 1, "bytes received"},
    {"tx_packets", COUNTER_SENT_PACKETS, 1, "packets sent"},
    {"rx_packets", COUNTER_RECEIVED_PACKETS, 1, "packets received"},
    {"tx_errors", COUNTER_ERROR, 1, "packets that could not be sent"},
    {"rx_errors", COUNTER_ERROR, 1, "packets received damaged"},
    {"tx_dropped", COUNTER_ERROR, 1, "packets dropped instead of sent"},
    {"rx_dropped", COUNTER_ERROR, 1, "packets received and dropped: no buffer, or no receiver"},
    {"rx_crc_errors", COUNTER_ERROR, 1, "packets received with a wrong checksum"},
    {"rx_frame_errors", COUNTER_ERROR, 1, "packets received with a broken frame"},
    {"rx_length_errors", COUNTER_ERROR, 1, "packets received with a wrong length"},
    {"rx_over_errors", COUNTER_ERROR, 1, "packets that overflowed the receive buffers"},
    {"rx_fifo_errors", COUNTER_ERROR, 1, "packets lost in the receive queue of the device"},
    {"rx_missed_errors", COUNTER_ERROR, 1, "packets that the device dropped because the host was slow"},
    {"tx_carrier_errors", COUNTER_ERROR, 1, "packets lost because of a lost carrier"},
    {"tx_fifo_errors", COUNTER_ERROR, 1, "packets lost in the send queue of the device"},
    {"tx_aborted_errors", COUNTER_ERROR, 1, "sends given up"},
    {"collisions", COUNTER_CONGESTION, 1, "collisions while sending"},
};

_Static_assert(COUNT(rdma_rows) <= COUNTER_ROWS_MAX, "samples hold all rows");
_Static_assert(COUNT(net_rows) <= COUNTER_ROWS_MAX, "samples hold all rows");

struct counter_rows counter_rows(bool rdma)
{
    return rdma ? (struct counter_rows){COUNT(rdma_rows), rdma_rows} : (struct counter_rows){COUNT(net_rows), net_rows};
}

static const struct counter_limit limits[] = {
    {"link_downed", "the link went down %lld times", 10, 200, 1},
    {"symbol_error", "%lld symbols were damaged on the link", 1000, 10000000, 1},
    {"link_error_recovery", "the link recovered from errors %lld times", 10, 200, 1},
    {"port_rcv_errors", "%lld packets were received damaged", 1000, 10000000, 1},
    {"local_link_integrity_errors", "errors on the link passed the threshold %lld times", 10, 10000, 1},
    {COUNTER_NET "carrier_down_count", "the link went down %lld times", 10, 200, 1},
    {COUNTER_NET "statistics/rx_crc_errors", "%lld frames were received damaged", 1000, 10000000, 1},
    {COUNTER_ETHTOOL "rx_discards_phy", "%lld packets were dropped at the port", 10000, 100000000, 100},
    {COUNTER_ETHTOOL "tx_pause_storm_error_events", "it paused others for too long %lld times", 1, 100, 1},
};

const struct counter_limit *counter_limits(size_t *ret_n)
{
    *ret_n = COUNT(limits);
    return limits;
}

static int compare_numbers(const void *left, const void *right)
{
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;

    return a < b ? -1 : a > b;
}

int64_t counter_median(int64_t *values, size_t n)
{
    qsort(values, n, sizeof(*values), compare_numbers);
    return n ? values[n / 2] : 0;
}

bool counter_is_outlier(const struct counter_limit *limit, int64_t value, int64_t median_of_others)
{
    return value >= limit->always || (value >= limit->least && value / 5 >= median_of_others);
}

void counter_limit_text(const struct counter_limit *limit, int64_t value, char *ret_text, size_t bytes)
{
    const char *place = strstr(limit->text, "%lld");

    snprintf(ret_text, bytes, "%.*s%lld%s", (int)(place - limit->text), limit->text, (long long)value, place + 4);
}

const char *counter_path(const struct counter_device *device, const char *file, char ret_path[COUNTER_PATH_BYTES])
{
    bool is_net = strncmp(file, COUNTER_NET, strlen(COUNTER_NET)) == 0;

    *ret_path = '\0';
    if (strncmp(file, COUNTER_ETHTOOL, strlen(COUNTER_ETHTOOL)) == 0 ||
        (is_net && (!device->netdev || !*device->netdev)))
        return ret_path;
    if (is_net)
        snprintf(ret_path, COUNTER_PATH_BYTES, "/sys/class/net/%s/%s", device->netdev, file + strlen(COUNTER_NET));
    else if (device->rdma)
        snprintf(ret_path, COUNTER_PATH_BYTES, "/sys/class/infiniband/%s/ports/%d/%s%s", device->nic, device->port,
                 strchr(file, '/') ? "" : "counters/", file);
    else
        snprintf(ret_path, COUNTER_PATH_BYTES, "/sys/class/net/%s/statistics/%s", device->nic, file);
    return ret_path;
}

/*
 * --- the statistics of the driver of an interface, as "ethtool -S" shows them ---
 *
 * Events at the port and for each priority. They are read by ioctl, as sysfs does not have them; only the names that
 * are listed above are used.
 */

#define STATISTICS_MAX 16384 /* mlx5 has some thousands with many queues */

static bool ethtool_request(int fd, const char *interface, void *data)
{
    struct ifreq request = {.ifr_data = data};

    snprintf(request.ifr_name, sizeof(request.ifr_name), "%s", interface);
    return ioctl(fd, SIOCETHTOOL, &request) == 0;
}

static unsigned ethtool_count(int fd, const char *interface)
{
    union {
        struct ethtool_sset_info info;
        char bytes[sizeof(struct ethtool_sset_info) + sizeof(__u32)];
    } sets = {.info = {.cmd = ETHTOOL_GSSET_INFO, .sset_mask = 1ULL << ETH_SS_STATS}};
    __u32 n = 0;

    if (ethtool_request(fd, interface, &sets) && sets.info.sset_mask)
        memcpy(&n, sets.bytes + sizeof(sets.info), sizeof(n));
    return n <= STATISTICS_MAX ? n : 0;
}

static bool is_wanted(const char *name)
{
    struct counter_rows rows = counter_rows(true);

    return ANY_OF(i, rows.n,
                  strncmp(rows.at[i].file, COUNTER_ETHTOOL, strlen(COUNTER_ETHTOOL)) == 0 &&
                      strcmp(rows.at[i].file + strlen(COUNTER_ETHTOOL), name) == 0);
}

json_t *ethtool_query(void *interface)
{
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    unsigned n = fd >= 0 && strlen(interface) < IFNAMSIZ ? ethtool_count(fd, interface) : 0;
    /* The kernel writes as many as there are by then: a driver may have opened queues meanwhile. */
    size_t room = 2 * (size_t)STATISTICS_MAX;
    struct ethtool_gstrings *names = memory_new(1, sizeof(*names) + room * ETH_GSTRING_LEN);
    struct ethtool_stats *values = memory_new(1, sizeof(*values) + room * sizeof(__u64));
    json_t *answer = NULL;

    names->cmd = ETHTOOL_GSTRINGS;
    names->string_set = ETH_SS_STATS;
    names->len = values->n_stats = n;
    values->cmd = ETHTOOL_GSTATS;
    if (n > 0 && ethtool_request(fd, interface, names) && ethtool_request(fd, interface, values))
        answer = json_object();
    for (unsigned i = 0; answer && i < n && i < names->len && i < values->n_stats; i++) {
        char name[ETH_GSTRING_LEN + 1] = "";

        memcpy(name, names->data + (size_t)i * ETH_GSTRING_LEN, ETH_GSTRING_LEN);
        if (is_wanted(name))
            json_object_set_new(answer, name, json_integer((json_int_t)(values->data[i] & INT64_MAX)));
    }
    free(names);
    free(values);
    dir_close(fd);
    return answer;
}

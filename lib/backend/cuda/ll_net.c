/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/ll_impl.h"
#include "group/wait.h"

#include "base/backoff.h"
#include "base/reserve.h"
#include "base/thread.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Size of the streams' rings: several of the largest rows. */
#define RING_BYTES ((size_t)1 << 20)
#define LIVENESS_NS UINT64_C(10000000)
#define DRAIN_NS UINT64_C(100000000) /* all that a dead or departed rank has sent is received within this time */
#define IDLE_NS UINT64_C(20000000)   /* between polls while no call is in progress */
#define SPIN_NS UINT64_C(20000000)   /* since the last progress or launch, before the proxy sleeps */
/*
 * Sleeps between polls for work of the kernels: nothing announces a kernel that was queued before or is launched with a
 * graph. Short while steps follow each other, then growing.
 */
#define MIN_BACKOFF_NS UINT64_C(50000)
#define MAX_BACKOFF_NS UINT64_C(1000000)

#define RANGES 5
/* A segment in pinned memory; only the ranges in use are pinned. */
struct pinned {
    unsigned char *base;
    size_t bytes;
    struct {
        size_t begin, end;
        bool registered;
    } range[RANGES];
    int n_ranges;
};

/* A remote rank. */
struct remote {
    struct pinned out;
    struct ll_sender sender;
    uint64_t drain_since_ns; /* when it was found dead or departed and nothing more arrived; 0: it is connected */
    bool lost;
};

struct cuda_ll_net {
    struct cuda_ll_net *next; /* list of the communicator */
    struct cuda_comm *cuda;
    struct cuda_ll_report *report;
    struct ll_wire wire;
    struct pinned landing;
    uint64_t liveness_ns;
    bool broken; /* used by the proxy only */

    pthread_t thread;
    bool started, unsent;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t launches; /* protected by the lock, with what follows */
    bool stop;
    uint64_t backoff_ns;
    uint64_t limit_ns;
    struct remote remotes[]; /* [rank] */
};

/* Results of make_progress(). */
struct progress {
    bool moved;
    bool more; /* messages that have arrived are not in the landing segment yet */
};

/* Of another node, present or not: it has an outgoing segment, because it may come later. */
static bool has_segment(const struct cuda_ll_net *net, int rank)
{
    return rank < net->cuda->group.first || rank >= cuda_end_of_node(net->cuda);
}

static bool is_remote(const struct cuda_ll_net *net, int rank)
{
    return has_segment(net, rank) && ep_comm_has(net->cuda->group.comm, rank);
}

static struct cuda_ll_segment *segment_of(const struct pinned *pinned)
{
    return (struct cuda_ll_segment *)(void *)pinned->base;
}

/* Is there unsent data for the rank? */
static bool has_unsent(struct cuda_ll_net *net, int rank)
{
    const struct remote *remote = &net->remotes[rank];

    if (remote->lost || ll_mask_has(net->report->mask, rank))
        return false;
    return ll_wire_is_pending(&net->wire, &remote->sender) || !ep_streams_flushed_to(net->wire.streams, rank);
}

/* Records that the rank's new mask has been sent. */
static void note_mask_sent(struct cuda_ll_net *net, int rank)
{
    bool masked = net->remotes[rank].sender.last_words.masked & 1;

    if (masked == ll_mask_has(net->report->mask_sent, rank) || !ep_streams_flushed_to(net->wire.streams, rank))
        return;
    if (masked)
        ll_mask_add(net->report->mask_sent, rank);
    else
        ll_mask_remove(net->report->mask_sent, rank);
}

static ep_status receive_from(struct cuda_ll_net *net, int source, struct progress *progress)
{
    uint64_t finished = __atomic_load_n(&net->report->finished, __ATOMIC_ACQUIRE);
    struct ll_received received;

    if (!ll_wire_receive(&net->wire, source, finished, &received))
        return ep_group_fail_damaged(&net->cuda->group, source, EP_GROUP_LL_RECV, "the length of a low-latency message",
                                     (int64_t)received.damaged_bytes);
    if (received.n)
        net->remotes[source].drain_since_ns = 0;
    progress->moved |= received.n > 0;
    progress->more |= received.more;
    return EP_OK;
}

/* --- the proxy ---------------------------------------------------------------------------------------------------- */

/*
 * A rank that has died or left, or whose connection was cut, counts as lost only when all that it sent is in the
 * landing segment. The kernels decide whether that is enough.
 */
static void check_liveness(struct cuda_ll_net *net)
{
    uint64_t now = ep_now_ns();

    if (now - net->liveness_ns < LIVENESS_NS)
        return;
    net->liveness_ns = now;
    for (int rank = 0; rank < net->wire.nranks; rank++) {
        struct remote *remote = &net->remotes[rank];

        if (!is_remote(net, rank) || remote->lost)
            continue;
        ep_group_net_note_lost(&net->cuda->group, ep_streams_get_net(net->wire.streams), rank);
        if (!ep_group_dead_or_left(&net->cuda->group, rank))
            continue;
        if (!remote->drain_since_ns)
            remote->drain_since_ns = now;
        if (now - remote->drain_since_ns < DRAIN_NS)
            continue;
        remote->lost = true;
        ll_mask_add(net->report->remote_lost, rank);
        ll_wire_add_event(&segment_of(&net->landing)->words, LL_WIRE_EVENT_LOST);
    }
}

/* Sends and receives once with every remote rank. */
static ep_status make_progress(struct cuda_ll_net *net, struct progress *progress)
{
    struct ep_streams *streams = net->wire.streams;

    EP_TRY(ep_group_net_fail(&net->cuda->group, streams, ep_streams_progress(streams, &progress->moved),
                             EP_GROUP_LL_RECV));
    net->unsent = false;
    for (int rank = 0; rank < net->wire.nranks; rank++) {
        if (!is_remote(net, rank))
            continue;
        if (!net->remotes[rank].lost)
            progress->moved |= ll_wire_send(&net->wire, &net->remotes[rank].sender);
        EP_TRY(receive_from(net, rank, progress));
        net->unsent |= has_unsent(net, rank);
        note_mask_sent(net, rank);
    }
    check_liveness(net);
    return EP_OK;
}

/* The group has failed: the kernels end by themselves. */
static bool has_failed(const struct cuda_ll_net *net)
{
    return net->broken || __atomic_load_n(&net->cuda->report->abort, __ATOMIC_ACQUIRE);
}

/*
 * Under the lock. Is nothing left to do before the communicator closes? `was_stopped`: before a pass without progress,
 * so that this pass has seen what the last kernels wrote.
 */
static bool may_end(const struct cuda_ll_net *net, bool was_stopped, bool moved)
{
    return net->stop && (has_failed(net) || ep_now_ns() >= net->limit_ns || (was_stopped && !moved && !net->unsent));
}

/* Under the lock. Sleeps until a launch, a stop or the next poll; the network buffers what arrives. */
static void wait_while_idle(struct cuda_ll_net *net)
{
    bool launched = net->launches && !has_failed(net); /* kernels may have started since */
    struct timespec until = ep_timespec(ep_now_ns() + (launched ? net->backoff_ns : IDLE_NS));

    pthread_cond_timedwait(&net->changed, &net->lock, &until);
    net->backoff_ns = net->backoff_ns * 2 < MAX_BACKOFF_NS ? net->backoff_ns * 2 : MAX_BACKOFF_NS;
}

static void *proxy_main(void *argument)
{
    struct cuda_ll_net *net = argument;
    uint64_t moved_ns = ep_now_ns();
    unsigned tries = 0;

    pthread_mutex_lock(&net->lock);
    for (;;) {
        uint64_t launches = net->launches, requested = __atomic_load_n(&net->report->polls_requested, __ATOMIC_ACQUIRE);
        /* By the clock, not by a CUDA event: a CUDA call may wait for a kernel that waits for this thread. */
        bool idle = tries >= EP_BACKOFF_YIELDS && ep_now_ns() - moved_ns > SPIN_NS;
        bool was_stopped = net->stop, moved;
        struct progress progress = {.moved = false};

        pthread_mutex_unlock(&net->lock);
        if (!has_failed(net) && make_progress(net, &progress) != EP_OK) {
            net->broken = true;
            /* With masking the monitor ignores failures that this rank has set. */
            cuda_stop_kernels(net->cuda);
        }
        /*
         * A rank may be masked because its data is not here at this point, so all that has arrived must be stored
         * first.
         */
        if (!progress.more)
            __atomic_store_n(&net->report->polls_done, requested, __ATOMIC_RELEASE);
        moved = progress.moved;
        tries = moved ? 0 : tries;
        if (!moved && (!idle || net->unsent))
            ep_backoff(&tries);
        pthread_mutex_lock(&net->lock);
        if (may_end(net, was_stopped, moved))
            break;
        if (launches != net->launches || requested != __atomic_load_n(&net->report->polls_requested, __ATOMIC_ACQUIRE))
            tries = 0;
        if (!tries) {
            net->backoff_ns = MIN_BACKOFF_NS;
            moved_ns = ep_now_ns();
        }
        if (has_failed(net) || (idle && tries && !moved && !net->unsent && !net->stop))
            wait_while_idle(net);
    }
    pthread_mutex_unlock(&net->lock);
    return NULL;
}

void cuda_ll_net_launched(struct cuda_ll_net *net)
{
    if (!net)
        return;
    pthread_mutex_lock(&net->lock);
    net->launches++;
    pthread_cond_signal(&net->changed);
    pthread_mutex_unlock(&net->lock);
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* In whole pages, after those of the previous ranges. */
static void add_range(struct pinned *pinned, int64_t begin, int64_t bytes)
{
    size_t from = ep_net_whole_pages((size_t)begin + 1) - ep_net_whole_pages(1),
           end = ep_net_whole_pages((size_t)(begin + bytes));
    size_t last = pinned->n_ranges ? pinned->range[pinned->n_ranges - 1].end : 0;

    pinned->range[pinned->n_ranges].begin = from > last ? from : last;
    pinned->range[pinned->n_ranges++].end = end > last ? end : last;
}

/* The ranges of an outgoing segment that this rank writes. */
static void list_ranges(const struct cuda_ll *device, int me, struct pinned *pinned)
{
    int64_t tokens = device->segment_tokens;

    add_range(pinned, 0, device->slot_flag_at);
    add_range(pinned, device->slot_flag_at + me * tokens * 8, tokens * 8);
    add_range(pinned, device->weight_at + me * tokens * device->segment_topk * 8, tokens * device->segment_topk * 8);
    add_range(pinned, device->slots_at + me * tokens * device->slot_bytes, tokens * device->slot_bytes);
    add_range(pinned, device->rows_at, tokens * device->segment_topk * device->hidden * 2);
}

static size_t range_bytes(const struct pinned *pinned, int i)
{
    return pinned->range[i].end - pinned->range[i].begin;
}

static size_t pinned_bytes(const struct pinned *pinned)
{
    size_t bytes = 0;

    for (int i = 0; i < pinned->n_ranges; i++)
        bytes += range_bytes(pinned, i);
    return bytes;
}

static ep_status pin(struct cuda_comm *cuda, struct pinned *pinned, size_t bytes)
{
    void *base = mmap(NULL, ep_net_whole_pages(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (base == MAP_FAILED)
        return ep_fail_errno(EP_E_MEMORY, errno, "ep_ll_new: mmap of %zu bytes", bytes);
    pinned->base = base;
    pinned->bytes = ep_net_whole_pages(bytes);
    EP_TRY(ep_reserve_check(pinned_bytes(pinned)));
    for (int i = 0; i < pinned->n_ranges; i++) {
        unsigned char *begin = pinned->base + pinned->range[i].begin;
        void *device;

        if (range_bytes(pinned, i) == 0)
            continue;
        CUDA_TRY(cudaHostRegister(begin, range_bytes(pinned, i), cudaHostRegisterMapped | cudaHostRegisterPortable));
        pinned->range[i].registered = true;
        atomic_fetch_add(&cuda->ll_net_bytes, range_bytes(pinned, i));
        CUDA_TRY(cudaHostGetDevicePointer(&device, begin, 0));
        /* Kernels address all ranges relative to one base. */
        if (device != begin)
            return ep_fail(EP_E_UNSUPPORTED, "ep_ll_new: low latency between nodes needs a GPU that can use host "
                                             "addresses of pinned memory, which this one cannot");
    }
    return EP_OK;
}

static void clear(const struct pinned *pinned)
{
    for (int i = 0; i < pinned->n_ranges; i++)
        memset(pinned->base + pinned->range[i].begin, 0, range_bytes(pinned, i));
}

static void unpin(struct cuda_comm *cuda, struct pinned *pinned)
{
    for (int i = 0; i < pinned->n_ranges; i++) {
        if (!pinned->range[i].registered)
            continue;
        cudaHostUnregister(pinned->base + pinned->range[i].begin);
        atomic_fetch_sub(&cuda->ll_net_bytes, range_bytes(pinned, i));
    }
    if (pinned->base)
        munmap(pinned->base, pinned->bytes);
}

size_t cuda_ll_net_bytes(const ep_ll *ll, const struct cuda_ll *device, size_t bytes)
{
    size_t n_remote = (size_t)(ll->comm->nranks - ll->comm->ranks_per_node);
    struct pinned out = {.base = NULL};

    list_ranges(device, ll->comm->rank, &out);
    return n_remote
               ? n_remote * pinned_bytes(&out) + ep_net_whole_pages(bytes) + (size_t)(ll->comm->nranks - 1) * RING_BYTES
               : 0;
}

/* --- opening and closing ------------------------------------------------------------------------------------------ */

ep_status cuda_ll_net_prepare(const ep_ll *ll, struct cuda_ll *device, const struct ll_wire *wire, size_t bytes,
                              struct cuda_ll_report *report, struct cuda_ll_net **ret_net)
{
    struct cuda_comm *cuda = cuda_of(ll->comm);
    struct cuda_ll_net *net = calloc(1, sizeof(*net) + (size_t)ll->comm->nranks * sizeof(net->remotes[0]));

    if (!net)
        return ep_fail(EP_E_MEMORY, "ep_ll_new: no memory");
    *ret_net = net;
    net->cuda = cuda;
    net->report = report;
    net->wire = *wire;
    net->backoff_ns = MIN_BACKOFF_NS;
    pthread_mutex_init(&net->lock, NULL);
    ep_cond_init(&net->changed);
    net->next = cuda->ll_nets;
    cuda->ll_nets = net;
    add_range(&net->landing, 0, (int64_t)bytes);
    EP_TRY(pin(cuda, &net->landing, bytes));
    net->wire.landing = net->landing.base;
    device->landing = segment_of(&net->landing);
    for (int rank = 0; rank < net->wire.nranks; rank++) {
        struct pinned *out = &net->remotes[rank].out;

        if (!has_segment(net, rank))
            continue;
        list_ranges(device, net->wire.me, out);
        EP_TRY(pin(cuda, out, bytes));
        net->remotes[rank].sender = (struct ll_sender){.rank = rank, .segment = out->base};
    }
    return EP_OK;
}

void cuda_ll_net_get_segments(const struct cuda_ll_net *net, struct cuda_ll_segment **ret_segments)
{
    for (int rank = 0; net && rank < net->wire.nranks; rank++)
        if (is_remote(net, rank))
            ret_segments[rank] = segment_of(&net->remotes[rank].out);
}

ep_status cuda_ll_net_open(struct cuda_ll_net *net)
{
    struct ep_group *group = &net->cuda->group;
    ep_boot boot = ep_group_boot(group->comm);
    struct ep_net_provider provider;
    struct ep_net_params params;

    ep_group_net_describe_ranks(group, &boot, &provider, &params);
    params.wake = NULL;
    EP_TRY(ep_streams_open(&provider, &params, RING_BYTES, &net->wire.streams));
    atomic_fetch_add(&net->cuda->ll_net_bytes, ep_streams_bytes(net->wire.streams));
    return ep_thread_begin(&net->thread, &net->started, proxy_main, net, "ep_ll_new: pthread_create");
}

void cuda_ll_net_stop(struct cuda_ll_net *net)
{
    if (!net || !net->started)
        return;
    pthread_mutex_lock(&net->lock);
    net->limit_ns = ep_deadline_ns(net->cuda->group.comm->config.timeout_ms);
    if (atomic_load(&net->cuda->group.comm->failed) || atomic_load(&net->cuda->group.comm->changes))
        net->limit_ns = 0;
    net->stop = true;
    pthread_cond_signal(&net->changed);
    pthread_mutex_unlock(&net->lock);
    pthread_join(net->thread, NULL);
    net->started = net->stop = net->broken = false;
}

static void close_streams(struct cuda_ll_net *net, bool abandons)
{
    if (!net->wire.streams)
        return;
    if (abandons)
        ep_streams_abandon(net->wire.streams);
    atomic_fetch_sub(&net->cuda->ll_net_bytes, ep_streams_bytes(net->wire.streams));
    ep_streams_free(net->wire.streams);
    net->wire.streams = NULL;
}

void cuda_ll_net_leave(struct cuda_ll_net *net)
{
    if (!net)
        return;
    cuda_ll_net_stop(net);
    close_streams(net, true);
    clear(&net->landing);
    for (int rank = 0; rank < net->wire.nranks; rank++) {
        struct remote *remote = &net->remotes[rank];

        clear(&remote->out);
        *remote = (struct remote){.out = remote->out, .sender = {.rank = rank, .segment = remote->out.base}};
    }
}

void cuda_ll_nets_leave(struct cuda_comm *cuda)
{
    for (struct cuda_ll_net *net = cuda->ll_nets; net; net = net->next)
        cuda_ll_net_leave(net);
}

void cuda_ll_nets_stop(struct cuda_comm *cuda)
{
    for (struct cuda_ll_net *net = cuda->ll_nets; net; net = net->next)
        cuda_ll_net_stop(net);
}

void cuda_ll_net_close(struct cuda_ll_net *net)
{
    struct cuda_ll_net **at;

    if (!net)
        return;
    cuda_ll_net_stop(net);
    for (at = &net->cuda->ll_nets; *at != net;)
        at = &(*at)->next;
    *at = net->next;
    close_streams(net, atomic_load(&net->cuda->group.comm->failed));
    unpin(net->cuda, &net->landing);
    for (int rank = 0; rank < net->wire.nranks; rank++)
        unpin(net->cuda, &net->remotes[rank].out);
    pthread_cond_destroy(&net->changed);
    pthread_mutex_destroy(&net->lock);
    free(net);
}

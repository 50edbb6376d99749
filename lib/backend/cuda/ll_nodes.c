/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/ll_nodes.h"

#include "base/backoff.h"
#include "base/reserve.h"
#include "base/thread.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Rings of the streams: several of the largest rows. */
#define RING_BYTES ((size_t)1 << 20)
/* The emulated network holds a wire for each pair of ranks. */
#define EMULATED_RING_BYTES (64u << 10)
#define WEIGHTS_AT_ONCE 4096 /* of a message */
#define MESSAGES_AT_ONCE 64  /* from one rank before the others get their turn */
#define LOOK_NS UINT64_C(10000000)
#define QUIET_NS UINT64_C(100000000) /* what a rank that is gone has sent is here by then */
#define IDLE_NS UINT64_C(20000000)   /* between two looks while no call is under way */

/* What a rank says of itself: see struct cuda_ll_segment. Words only grow, but for `masked`. */
struct words {
    uint64_t completed, ahead, sent, barriers, masked, unused;
};

enum kind { MESSAGE_WORDS = 1, MESSAGE_COUNTS, MESSAGE_SLOT, MESSAGE_EMPTY, MESSAGE_WEIGHTS, MESSAGE_ROW };

/* The head of each message, before a struct words, or payload. */
struct message {
    uint64_t number; /* of the call */
    uint32_t kind;
    uint32_t at, n; /* COUNTS: parity, words. SLOT: token, bytes. EMPTY, WEIGHTS: first, how many. ROW: its place */
    uint32_t max_tokens, parts; /* of the call */
    uint32_t unused;
};

enum task_kind { TASK_NONE, TASK_WEIGHTS, TASK_DISPATCH, TASK_COMBINE };

/* What is being sent of a call. */
struct task {
    enum task_kind kind;
    struct cuda_ll_told told;
    int64_t next;
};

#define RANGES 3
/* Pinned memory: of a segment only what is used. */
struct pinned {
    unsigned char *base;
    size_t bytes;
    struct {
        size_t begin, end;
        bool registered;
    } range[RANGES];
    int n_ranges;
};

/* A rank of another node. */
struct line {
    struct pinned out;
    struct words told; /* as they were last sent */
    uint64_t ahead, sent;
    struct task task;
    uint64_t quiet_ns; /* since when it is gone and nothing comes from it; 0: it is not gone */
    bool lost;
};

struct cuda_ll_net {
    struct cuda_ll_net *next; /* of the communicator */
    struct cuda_comm *cuda;
    const struct cuda_ll *device;
    struct cuda_ll_report *report;
    struct ep_streams *streams;
    struct pinned landing;
    struct line lines[CUDA_MAX_RANKS]; /* [rank] */
    int me, nranks;
    uint64_t looked_ns;
    bool broken; /* the proxy's own */

    cudaEvent_t event; /* behind the last kernel */
    pthread_t thread;
    bool started, unsent;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t launches; /* these under the lock */
    bool stop;
    uint64_t limit_ns;
};

static bool is_far(const struct cuda_ll_net *net, int rank)
{
    return rank < net->cuda->host.first || rank >= cuda_end_of_node(net->cuda);
}

static struct cuda_ll_segment *segment_of(const struct pinned *pinned)
{
    return (struct cuda_ll_segment *)(void *)pinned->base;
}

static uint64_t *words_at(const struct pinned *pinned, int64_t offset)
{
    return (uint64_t *)(void *)(pinned->base + offset);
}

static uint64_t load(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static void store(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static bool is_masked(const struct cuda_ll_net *net, int rank)
{
    return __atomic_load_n(&net->report->mask, __ATOMIC_RELAXED) >> rank & 1;
}

/* --- places: the same in the sender's segment and in the receiver's ------------------------------------------------
 */

static int64_t counts_at(const struct cuda_ll_net *net, int parity, int source)
{
    const struct cuda_ll *ll = net->device;

    return ll->counts_at + ((int64_t)parity * net->nranks + source) * (ll->n_local + 1) * 8;
}

static int64_t slot_at(const struct cuda_ll_net *net, int source, int64_t token)
{
    return net->device->slots_at + ((int64_t)source * net->device->most_tokens + token) * net->device->slot_bytes;
}

static int64_t slot_flag_at(const struct cuda_ll_net *net, int source, int64_t max_tokens, int64_t token)
{
    return net->device->slot_flag_at + (source * max_tokens + token) * 8;
}

static int64_t weight_at(const struct cuda_ll_net *net, int source, int64_t max_tokens, int64_t choice)
{
    return net->device->weight_at + (source * max_tokens * net->device->topk + choice) * 8;
}

static int64_t row_bytes(const struct cuda_ll_net *net)
{
    return (int64_t)net->device->hidden * 2;
}

static int64_t row_flag_at(const struct cuda_ll_net *net, int64_t place, int64_t parts)
{
    return net->device->row_flag_at + place * parts * 8;
}

/* --- sending ------------------------------------------------------------------------------------------------------ */

/* False: not yet. */
static bool send_message(struct cuda_ll_net *net, int rank, const struct task *task, enum kind kind, int64_t at,
                         int64_t n, int64_t offset, int64_t bytes)
{
    const struct ep_piece piece = {net->lines[rank].out.base + offset, (size_t)bytes};
    struct message message = {.number = task->told.number,
                              .kind = kind,
                              .at = (uint32_t)at,
                              .n = (uint32_t)n,
                              .max_tokens = (uint32_t)task->told.max_tokens,
                              .parts = (uint32_t)task->told.parts};

    return ep_stream_send(net->streams, rank, 0, &message, sizeof(message), &piece, bytes ? 1 : 0);
}

/* The words of the choices go as they are: each has the number of its call. */
static bool send_weights(struct cuda_ll_net *net, int rank, struct task *task)
{
    int64_t all = (int64_t)task->told.max_tokens * net->device->topk;

    while (task->next < all) {
        int64_t n = all - task->next < WEIGHTS_AT_ONCE ? all - task->next : WEIGHTS_AT_ONCE;

        if (!send_message(net, rank, task, MESSAGE_WEIGHTS, task->next, n,
                          weight_at(net, net->me, task->told.max_tokens, task->next), n * 8))
            return false;
        task->next += n;
    }
    return true;
}

/* Tokens from `first` on without a row there. */
static int64_t count_empty(const struct task *task, const uint64_t *flags, int64_t first)
{
    int64_t n = 0;

    while (first + n < task->told.max_tokens && load(&flags[first + n]) == task->told.number << 1)
        n++;
    return n;
}

/* The counts first, then the slots. */
static bool send_dispatch(struct cuda_ll_net *net, int rank, struct task *task)
{
    const uint64_t *flags = words_at(&net->lines[rank].out, slot_flag_at(net, net->me, task->told.max_tokens, 0));
    int64_t n = net->device->n_local + 1;

    if (task->next == 0 && !send_message(net, rank, task, MESSAGE_COUNTS, task->told.parity, n,
                                         counts_at(net, task->told.parity, net->me), n * 8))
        return false;
    task->next += task->next == 0;
    while (task->next <= task->told.max_tokens) {
        int64_t token = task->next - 1, empty = count_empty(task, flags, token);
        bool here = load(&flags[token]) == (task->told.number << 1 | 1);

        if (empty && !send_message(net, rank, task, MESSAGE_EMPTY, token, empty, 0, 0))
            return false;
        if (here && !send_message(net, rank, task, MESSAGE_SLOT, token, task->told.image_bytes,
                                  slot_at(net, net->me, token), task->told.image_bytes))
            return false;
        task->next += empty ? empty : 1;
    }
    return true;
}

static bool send_combine(struct cuda_ll_net *net, int rank, struct task *task)
{
    const struct pinned *out = &net->lines[rank].out;

    for (; task->next < (int64_t)task->told.max_tokens * net->device->topk; task->next++)
        if (load(words_at(out, row_flag_at(net, task->next, task->told.parts))) == task->told.number &&
            !send_message(net, rank, task, MESSAGE_ROW, task->next, 0,
                          net->device->rows_at + task->next * row_bytes(net), row_bytes(net)))
            return false;
    return true;
}

/*
 * The next thing to send, if the kernels have written it. A call whose rows the kernels have not told is one in which
 * the rank was masked. Two calls can be told at most: the meeting of each waits until its rank has completed the last
 * one of its kind.
 */
static bool find_task(struct cuda_ll_net *net, struct line *line)
{
    const struct cuda_ll_segment *out = segment_of(&line->out);
    uint64_t ahead = load(&out->ahead[net->me]), sent;

    if (ahead > line->ahead) {
        line->task = (struct task){.kind = TASK_WEIGHTS, .told = out->told[CUDA_LL_TOLD_WEIGHTS]};
        line->task.told.number = ahead;
        return true;
    }
    sent = load(&out->sent[net->me]);
    while (sent > line->sent) {
        uint64_t number = sent - line->sent > 2 ? sent - 1 : line->sent + 1;
        const struct cuda_ll_told *told = &out->told[number & 1];

        if (told->number == number) {
            line->task = (struct task){.kind = told->combine ? TASK_COMBINE : TASK_DISPATCH, .told = *told};
            return true;
        }
        line->sent = number;
    }
    return false;
}

static bool send_task(struct cuda_ll_net *net, int rank, struct line *line)
{
    struct task *task = &line->task;
    bool all = task->kind == TASK_WEIGHTS    ? send_weights(net, rank, task)
               : task->kind == TASK_DISPATCH ? send_dispatch(net, rank, task)
                                             : send_combine(net, rank, task);

    if (!all)
        return false;
    if (task->kind == TASK_WEIGHTS)
        line->ahead = task->told.number;
    else
        line->sent = task->told.number;
    task->kind = TASK_NONE;
    return true;
}

/* As they are to be told now, when what they say is there has been sent. */
static struct words words_for(const struct cuda_ll_net *net, const struct line *line)
{
    const struct cuda_ll_segment *out = segment_of(&line->out);

    return (struct words){.completed = load(&out->completed[net->me]),
                          .ahead = line->ahead,
                          .sent = line->sent,
                          .barriers = load(&out->barriers[net->me]),
                          .masked = __atomic_load_n(&out->masked_by[net->me], __ATOMIC_ACQUIRE)};
}

static bool are_told(const struct line *line, const struct words *words)
{
    return memcmp(words, &line->told, sizeof(*words)) == 0;
}

static bool send_words(struct cuda_ll_net *net, int rank, struct line *line)
{
    struct {
        struct message message;
        struct words words;
    } head = {.message = {.kind = MESSAGE_WORDS}, .words = words_for(net, line)};

    if (are_told(line, &head.words) || !ep_stream_send(net->streams, rank, 0, &head, sizeof(head), NULL, 0))
        return false;
    line->told = head.words;
    return true;
}

/* As far as the network takes it. */
static bool send_line(struct cuda_ll_net *net, int rank, struct line *line)
{
    bool moved = send_words(net, rank, line);

    while (line->task.kind || find_task(net, line)) {
        if (!send_task(net, rank, line))
            return moved;
        send_words(net, rank, line);
        moved = true;
    }
    return send_words(net, rank, line) || moved;
}

/* Something for it has not left. */
static bool holds_back(struct cuda_ll_net *net, int rank)
{
    const struct line *line = &net->lines[rank];
    struct words words;

    if (line->lost || is_masked(net, rank))
        return false;
    words = words_for(net, line);
    return line->task.kind || !are_told(line, &words) || !ep_streams_flushed_to(net->streams, rank);
}

/* --- receiving ---------------------------------------------------------------------------------------------------- */

static void raise_word(uint64_t *word, uint64_t value)
{
    if (*word < value)
        store(word, value);
}

static void take_words(struct cuda_ll_net *net, int source, const struct words *words)
{
    struct cuda_ll_segment *landing = segment_of(&net->landing);

    /* First, so that it is seen before what follows it. */
    __atomic_store_n(&landing->masked_by[source], (uint32_t)words->masked, __ATOMIC_RELEASE);
    raise_word(&landing->completed[source], words->completed);
    raise_word(&landing->ahead[source], words->ahead);
    raise_word(&landing->sent[source], words->sent);
    raise_word(&landing->barriers[source], words->barriers);
}

/* Words that kernels read one by one. */
static void copy_words(uint64_t *to, const uint64_t *from, size_t n)
{
    for (size_t i = 0; i < n; i++)
        store(&to[i], from[i]);
}

static bool is_sound(const struct cuda_ll_net *net, const struct message *m, size_t payload)
{
    const struct cuda_ll *ll = net->device;
    uint64_t choices = (uint64_t)m->max_tokens * (uint64_t)ll->topk;

    if (m->kind == MESSAGE_WORDS)
        return payload == sizeof(struct words);
    if (m->max_tokens < 1 || m->max_tokens > (uint32_t)ll->most_tokens)
        return false;
    switch (m->kind) {
    case MESSAGE_COUNTS:
        return m->at <= 1 && m->n == (uint32_t)ll->n_local + 1 && payload == (size_t)m->n * 8;
    case MESSAGE_SLOT:
        return m->at < m->max_tokens && m->n <= (uint64_t)ll->slot_bytes && payload == m->n;
    case MESSAGE_EMPTY:
        return (uint64_t)m->at + m->n <= m->max_tokens && !payload;
    case MESSAGE_WEIGHTS:
        return (uint64_t)m->at + m->n <= choices && payload == (size_t)m->n * 8;
    case MESSAGE_ROW:
        return m->at < choices && m->parts >= 1 && m->parts <= CUDA_LL_MOST_PARTS && payload == (size_t)row_bytes(net);
    default:
        return false;
    }
}

static void take_payload(struct cuda_ll_net *net, int source, const struct message *m, const void *payload)
{
    struct pinned *landing = &net->landing;
    uint64_t *flags;

    switch (m->kind) {
    case MESSAGE_COUNTS:
        copy_words(words_at(landing, counts_at(net, (int)m->at, source)), payload, m->n);
        return;
    case MESSAGE_WEIGHTS:
        copy_words(words_at(landing, weight_at(net, source, m->max_tokens, m->at)), payload, m->n);
        return;
    case MESSAGE_SLOT:
        memcpy(landing->base + slot_at(net, source, m->at), payload, m->n);
        store(words_at(landing, slot_flag_at(net, source, m->max_tokens, m->at)), m->number << 1 | 1);
        return;
    case MESSAGE_EMPTY:
        flags = words_at(landing, slot_flag_at(net, source, m->max_tokens, m->at));
        for (uint32_t i = 0; i < m->n; i++)
            store(&flags[i], m->number << 1);
        return;
    default: /* a row */
        memcpy(landing->base + net->device->rows_at + m->at * row_bytes(net), payload, (size_t)row_bytes(net));
        flags = words_at(landing, row_flag_at(net, m->at, m->parts));
        for (uint32_t i = 0; i < m->parts; i++)
            store(&flags[i], m->number);
    }
}

/* What comes late of a call that is complete here, because its sender was masked, must not be seen by the next one. */
static ep_status take_message(struct cuda_ll_net *net, int source, const unsigned char *from, size_t bytes)
{
    struct cuda_ll_segment *landing = segment_of(&net->landing);
    struct message message = {.number = 0};

    if (bytes >= sizeof(message))
        memcpy(&message, from, sizeof(message));
    if (bytes < sizeof(message) || !is_sound(net, &message, bytes - sizeof(message)))
        return host_raise_damage(&net->cuda->host, source, HOST_LL_RECV, "a low-latency message",
                                 (int64_t)message.kind);
    if (message.kind == MESSAGE_WORDS)
        take_words(net, source, (const struct words *)(const void *)(from + sizeof(message)));
    else if (message.number > load(&net->report->finished))
        take_payload(net, source, &message, from + sizeof(message));
    store(&landing->moved[source], landing->moved[source] + 1);
    return EP_OK;
}

static ep_status receive_line(struct cuda_ll_net *net, int source, bool *ret_moved)
{
    const void *message;
    size_t bytes;

    for (int i = 0; i < MESSAGES_AT_ONCE && (message = ep_stream_peek(net->streams, source, 0, &bytes)); i++) {
        EP_TRY(take_message(net, source, message, bytes));
        ep_stream_pop(net->streams, source, 0);
        net->lines[source].quiet_ns = 0;
        *ret_moved = true;
    }
    return EP_OK;
}

/* --- the proxy ---------------------------------------------------------------------------------------------------- */

/* It has died or left, or its connection was cut. */
static bool is_gone(struct cuda_ll_net *net, int rank)
{
    struct host_comm *host = &net->cuda->host;
    struct ep_net *endpoint = ep_streams_get_net(net->streams);
    const struct host_control *control = host_control_of(host, rank);

    /* As in lowlatency_net.c: a connection that was cut takes its rank with it. */
    if (endpoint->ops->lost && host->remote && endpoint->ops->lost(endpoint, rank))
        atomic_store(&host->remote[rank].lost, 1);
    return host_peer_dead(host, rank) ||
           (control ? atomic_load(&control->left) : host->remote && atomic_load(&host->remote[rank].left));
}

/* What a rank has sent is put into the landing segment before it is lost: whether that is enough the kernels know. */
static void look_for_lost(struct cuda_ll_net *net)
{
    uint64_t now = ep_now_ns();

    if (now - net->looked_ns < LOOK_NS)
        return;
    net->looked_ns = now;
    for (int rank = 0; rank < net->nranks; rank++) {
        struct line *line = &net->lines[rank];

        if (!is_far(net, rank) || line->lost || !is_gone(net, rank))
            continue;
        if (!line->quiet_ns)
            line->quiet_ns = now;
        if (now - line->quiet_ns < QUIET_NS)
            continue;
        line->lost = true;
        __atomic_fetch_or(&net->report->far_lost, 1u << rank, __ATOMIC_RELEASE);
    }
}

/* One turn of everything. */
static ep_status turn(struct cuda_ll_net *net, bool *ret_moved)
{
    struct host_comm *host = &net->cuda->host;
    ep_status status = ep_streams_progress(net->streams, ret_moved);
    int broken = ep_streams_broken_peer(net->streams);

    if (status != EP_OK)
        return host_raise_own(host, status, broken < 0 ? net->me : broken, HOST_LL_RECV);
    net->unsent = false;
    for (int rank = 0; rank < net->nranks; rank++) {
        if (!is_far(net, rank))
            continue;
        if (!net->lines[rank].lost)
            *ret_moved |= send_line(net, rank, &net->lines[rank]);
        EP_TRY(receive_line(net, rank, ret_moved));
        net->unsent |= holds_back(net, rank);
    }
    look_for_lost(net);
    return EP_OK;
}

/* Has the group failed? Then the kernels end or have ended by themselves. */
static bool has_failed(const struct cuda_ll_net *net)
{
    return net->broken || __atomic_load_n(&net->cuda->report->abort, __ATOMIC_ACQUIRE);
}

/* Under the lock. Nothing more is to be done before the communicator closes. */
static bool may_end(const struct cuda_ll_net *net, bool moved)
{
    return net->stop && (has_failed(net) || ep_now_ns() >= net->limit_ns || (!moved && !net->unsent));
}

/* Under the lock: until something changes or a while has passed. What comes meanwhile the network keeps. */
static void sleep_while_idle(struct cuda_ll_net *net)
{
    uint64_t until_ns = ep_now_ns() + IDLE_NS;
    struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000u), .tv_nsec = (long)(until_ns % 1000000000u)};

    pthread_cond_timedwait(&net->changed, &net->lock, &until);
}

static void *proxy_main(void *argument)
{
    struct cuda_ll_net *net = argument;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    unsigned tries = 0;

    cudaSetDevice(net->cuda->device);
    /* What it does concerns no capture of other threads. */
    cudaThreadExchangeStreamCaptureMode(&mode);
    pthread_mutex_lock(&net->lock);
    for (;;) {
        uint64_t launches = net->launches;
        /* Asked before the turn, which then sees all that the kernels have written. */
        bool idle = tries >= EP_BACKOFF_YIELDS && cudaEventQuery(net->event) != cudaErrorNotReady, moved = false;

        pthread_mutex_unlock(&net->lock);
        if (!has_failed(net) && turn(net, &moved) != EP_OK) {
            net->broken = true;
            /* With masking the monitor does not look at what this rank has raised. */
            cuda_stop_kernels(net->cuda);
        }
        tries = moved ? 0 : tries;
        if (!moved && !idle)
            ep_backoff(&tries);
        pthread_mutex_lock(&net->lock);
        if (may_end(net, moved))
            break;
        if (launches != net->launches)
            tries = 0;
        if (has_failed(net) || (idle && !moved && !net->unsent && launches == net->launches && !net->stop))
            sleep_while_idle(net);
    }
    pthread_mutex_unlock(&net->lock);
    return NULL;
}

ep_status cuda_ll_net_launched(struct cuda_ll_net *net, cudaStream_t stream)
{
    cudaError_t error;

    if (!net)
        return EP_OK;
    pthread_mutex_lock(&net->lock);
    error = cudaEventRecord(net->event, stream);
    net->launches++;
    pthread_cond_signal(&net->changed);
    pthread_mutex_unlock(&net->lock);
    return cuda_status(error, "cudaEventRecord");
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

static size_t whole_pages(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);

    return (bytes + page - 1) / page * page;
}

/* Whole pages, behind those of the ranges before. */
static void add_range(struct pinned *pinned, int64_t begin, int64_t bytes)
{
    size_t from = whole_pages((size_t)begin + 1) - whole_pages(1), end = whole_pages((size_t)(begin + bytes));
    size_t last = pinned->n_ranges ? pinned->range[pinned->n_ranges - 1].end : 0;

    pinned->range[pinned->n_ranges].begin = from > last ? from : last;
    pinned->range[pinned->n_ranges++].end = end > last ? end : last;
}

/* Of the segment that stands for another rank: what this one writes. */
static void list_ranges(const struct cuda_ll *device, int me, struct pinned *pinned)
{
    int64_t tokens = device->most_tokens;

    add_range(pinned, 0, device->slots_at);
    add_range(pinned, device->slots_at + me * tokens * device->slot_bytes, tokens * device->slot_bytes);
    add_range(pinned, device->rows_at, tokens * device->topk * device->hidden * 2);
}

static size_t pinned_bytes(const struct pinned *pinned)
{
    size_t bytes = 0;

    for (int i = 0; i < pinned->n_ranges; i++)
        bytes += pinned->range[i].end - pinned->range[i].begin;
    return bytes;
}

static ep_status pin(struct pinned *pinned, size_t bytes)
{
    void *base =
        mmap(NULL, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (base == MAP_FAILED)
        return ep_fail_errno(EP_E_MEMORY, errno, "ep_ll_new: mmap of %zu bytes", bytes);
    pinned->base = base;
    pinned->bytes = whole_pages(bytes);
    EP_TRY(ep_reserve_check(pinned_bytes(pinned)));
    for (int i = 0; i < pinned->n_ranges; i++) {
        unsigned char *begin = pinned->base + pinned->range[i].begin;
        void *device;

        if (pinned->range[i].end == pinned->range[i].begin)
            continue;
        CUDA_TRY(cudaHostRegister(begin, pinned->range[i].end - pinned->range[i].begin,
                                  cudaHostRegisterMapped | cudaHostRegisterPortable));
        pinned->range[i].registered = true;
        CUDA_TRY(cudaHostGetDevicePointer(&device, begin, 0));
        /* Kernels find all ranges from one address. */
        if (device != begin)
            return ep_fail(EP_E_UNSUPPORTED, "ep_ll_new: low latency between nodes needs GPUs that use addresses of "
                                             "pinned memory as they are, which this one does not");
    }
    return EP_OK;
}

/* `used`: the network may still read it. */
static void unpin(struct pinned *pinned, bool used)
{
    for (int i = 0; i < pinned->n_ranges && !used; i++)
        if (pinned->range[i].registered)
            cudaHostUnregister(pinned->base + pinned->range[i].begin);
    if (pinned->base && !used)
        munmap(pinned->base, pinned->bytes);
}

size_t cuda_ll_net_bytes(const ep_ll *ll, const struct cuda_ll *device, size_t bytes)
{
    size_t far = (size_t)(ll->comm->nranks - ll->comm->ranks_per_node);
    struct pinned out = {.base = NULL};

    list_ranges(device, ll->comm->rank, &out);
    return far ? far * pinned_bytes(&out) + whole_pages(bytes) + (size_t)ll->comm->nranks * RING_BYTES : 0;
}

/* --- opening and closing ------------------------------------------------------------------------------------------ */

static void init_lock(struct cuda_ll_net *net)
{
    pthread_condattr_t attributes;

    pthread_mutex_init(&net->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&net->changed, &attributes);
    pthread_condattr_destroy(&attributes);
}

ep_status cuda_ll_net_prepare(const ep_ll *ll, struct cuda_ll *device, size_t bytes, struct cuda_ll_report *report,
                              struct cuda_ll_net **ret_net)
{
    struct cuda_comm *cuda = cuda_of(ll->comm);
    struct cuda_ll_net *net = calloc(1, sizeof(*net));

    if (!net)
        return ep_fail(EP_E_MEMORY, "ep_ll_new: no memory");
    *ret_net = net;
    net->cuda = cuda;
    net->device = device;
    net->report = report;
    net->me = ll->comm->rank;
    net->nranks = ll->comm->nranks;
    init_lock(net);
    net->next = cuda->ll_nets;
    cuda->ll_nets = net;
    CUDA_TRY(cudaEventCreateWithFlags(&net->event, cudaEventDisableTiming));
    add_range(&net->landing, 0, (int64_t)bytes);
    EP_TRY(pin(&net->landing, bytes));
    device->landing = segment_of(&net->landing);
    for (int rank = 0; rank < net->nranks; rank++) {
        struct pinned *out = &net->lines[rank].out;

        if (!is_far(net, rank))
            continue;
        list_ranges(device, net->me, out);
        EP_TRY(pin(out, bytes));
        device->peer[rank] = segment_of(out);
    }
    return EP_OK;
}

static ep_status allgather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    (void)timeout_ms;
    return host_allgather(context, mine, bytes, ret_all);
}

ep_status cuda_ll_net_open(struct cuda_ll_net *net)
{
    struct host_comm *host = &net->cuda->host;
    ep_boot boot = {
        .size = sizeof(boot), .rank = net->me, .nranks = net->nranks, .allgather = allgather, .context = host->comm};
    struct ep_net_provider provider;
    struct ep_net_params params;
    int error;

    host_net_describe(host, &provider, &params);
    params.boot = &boot;
    params.ranks_per_node = params.channels = 1;
    params.apart = host->nlocal;
    params.tolerant = true;
    params.wake = NULL;
    if (!params.emulation.ring_bytes)
        params.emulation.ring_bytes = EMULATED_RING_BYTES;
    EP_TRY(ep_streams_open(&provider, &params, RING_BYTES, &net->streams));
    error = ep_thread_start(&net->thread, NULL, proxy_main, net);
    if (error)
        return ep_fail_errno(EP_E_SYSTEM, error, "ep_ll_new: pthread_create");
    net->started = true;
    return EP_OK;
}

void cuda_ll_net_stop(struct cuda_ll_net *net)
{
    if (!net || !net->started)
        return;
    pthread_mutex_lock(&net->lock);
    net->limit_ns = ep_deadline_ns(net->cuda->host.comm->config.timeout_ms);
    if (atomic_load(&net->cuda->host.comm->failed))
        net->limit_ns = 0;
    net->stop = true;
    pthread_cond_signal(&net->changed);
    pthread_mutex_unlock(&net->lock);
    pthread_join(net->thread, NULL);
    net->started = false;
}

void cuda_ll_nets_stop(struct cuda_comm *cuda)
{
    for (struct cuda_ll_net *net = cuda->ll_nets; net; net = net->next)
        cuda_ll_net_stop(net);
}

static void unlink_from_comm(struct cuda_ll_net *net)
{
    struct cuda_ll_net **at = &net->cuda->ll_nets;

    while (*at && *at != net)
        at = &(*at)->next;
    if (*at)
        *at = net->next;
}

void cuda_ll_net_close(struct cuda_ll_net *net)
{
    bool used[CUDA_MAX_RANKS] = {false};

    if (!net)
        return;
    cuda_ll_net_stop(net);
    unlink_from_comm(net);
    for (int rank = 0; net->streams && rank < net->nranks; rank++)
        used[rank] = is_far(net, rank) && ep_streams_get_net(net->streams)->ops->keeps_sources &&
                     !ep_streams_flushed_to(net->streams, rank);
    if (atomic_load(&net->cuda->host.comm->failed))
        ep_streams_abandon(net->streams);
    ep_streams_free(net->streams);
    unpin(&net->landing, false);
    for (int rank = 0; rank < net->nranks; rank++)
        unpin(&net->lines[rank].out, used[rank]);
    if (net->event)
        cudaEventDestroy(net->event);
    pthread_cond_destroy(&net->changed);
    pthread_mutex_destroy(&net->lock);
    free(net);
}

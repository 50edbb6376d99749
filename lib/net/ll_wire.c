/* SPDX-License-Identifier: Apache-2.0 */
#include "net/ll_wire.h"

#include <string.h>

#define WEIGHTS_AT_ONCE 4096 /* per message */

enum ll_message_kind { MESSAGE_WORDS = 1, MESSAGE_COUNTS, MESSAGE_SLOT, MESSAGE_EMPTY, MESSAGE_WEIGHTS, MESSAGE_ROW };

/* Header of each message, followed by a struct ll_words or the payload. */
struct ll_message {
    uint64_t number; /* of the call */
    uint32_t kind;
    uint32_t at, n; /* COUNTS: parity, words. SLOT: token, bytes. EMPTY, WEIGHTS: first, number. ROW: its entry */
    uint32_t max_tokens, parts; /* of the call */
    uint32_t detail;            /* WEIGHTS */
};

static const struct ll_wire_segment *segment_of(const struct ll_sender *sender)
{
    return (const struct ll_wire_segment *)(const void *)sender->segment;
}

static const uint64_t *flags_of(const struct ll_sender *sender, int64_t offset)
{
    return (const uint64_t *)(const void *)(sender->segment + offset);
}

static uint64_t *words_at(unsigned char *landing, int64_t offset)
{
    return (uint64_t *)(void *)(landing + offset);
}

static uint64_t load(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static void store(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static int64_t row_bytes(const struct ll_wire *wire)
{
    return (int64_t)wire->hidden * 2;
}

static int64_t carve(int64_t *at, int64_t bytes)
{
    int64_t begin = *at;

    *at += (bytes + 127) / 128 * 128;
    return begin;
}

size_t ll_wire_lay_out(struct ll_wire *wire, size_t head_bytes, int parts)
{
    int64_t n = wire->nranks, m = wire->segment_tokens, k = wire->topk, at = 0;

    carve(&at, (int64_t)head_bytes);
    wire->counts_at = carve(&at, 2 * n * wire->n_counts * 8);
    wire->row_flag_at = carve(&at, m * k * parts * 8);
    wire->slot_flag_at = carve(&at, n * m * 8);
    wire->weight_at = carve(&at, n * m * k * 8);
    wire->slots_at = carve(&at, n * m * wire->slot_bytes);
    wire->rows_at = carve(&at, m * k * row_bytes(wire));
    return (size_t)at;
}

/* --- sending ------------------------------------------------------------------------------------------------------ */

/* Returns false if the network accepts nothing at present. */
static bool send_message(const struct ll_wire *wire, const struct ll_sender *sender, enum ll_message_kind kind,
                         int64_t at, int64_t n, int64_t offset, int64_t bytes)
{
    const struct ll_wire_desc *desc = &sender->task.desc;
    const struct ep_piece piece = {sender->segment + offset, (size_t)bytes};
    struct ll_message message = {.number = desc->number,
                                 .kind = kind,
                                 .at = (uint32_t)at,
                                 .n = (uint32_t)n,
                                 .max_tokens = (uint32_t)desc->max_tokens,
                                 .parts = (uint32_t)desc->parts,
                                 .detail = desc->detail};

    return ep_stream_send(wire->streams, sender->rank, 0, &message, sizeof(message), &piece, bytes ? 1 : 0);
}

/* The words are sent unchanged: each holds the number of its call. */
static bool send_weights(const struct ll_wire *wire, struct ll_sender *sender)
{
    struct ll_task *task = &sender->task;
    int64_t all = (int64_t)task->desc.max_tokens * wire->topk;

    while (task->next < all) {
        int64_t n = all - task->next < WEIGHTS_AT_ONCE ? all - task->next : WEIGHTS_AT_ONCE;

        if (!send_message(wire, sender, MESSAGE_WEIGHTS, task->next, n, ll_wire_weight_at(wire, wire->me, task->next),
                          n * 8))
            return false;
        task->next += n;
    }
    return true;
}

/* Number of tokens from `first` on that have no row there. */
static int64_t count_empty(const struct ll_task *task, const uint64_t *flags, int64_t first)
{
    int64_t n = 0;

    while (first + n < task->desc.max_tokens && load(&flags[first + n]) == task->desc.number << 1)
        n++;
    return n;
}

/* The counts, then the slots. */
static bool send_dispatch(const struct ll_wire *wire, struct ll_sender *sender)
{
    struct ll_task *task = &sender->task;
    const uint64_t *flags = flags_of(sender, ll_wire_slot_flag_at(wire, wire->me, 0));
    int64_t n = wire->n_counts;

    if (task->next == 0 && !send_message(wire, sender, MESSAGE_COUNTS, task->desc.parity, n,
                                         ll_wire_counts_at(wire, task->desc.parity, wire->me), n * 8))
        return false;
    task->next += task->next == 0;
    while (task->next <= task->desc.max_tokens) {
        int64_t token = task->next - 1, empty = count_empty(task, flags, token);
        bool here = load(&flags[token]) == (task->desc.number << 1 | 1);

        if (empty && !send_message(wire, sender, MESSAGE_EMPTY, token, empty, 0, 0))
            return false;
        if (here && !send_message(wire, sender, MESSAGE_SLOT, token, task->desc.image_bytes,
                                  ll_wire_slot_at(wire, wire->me, token), task->desc.image_bytes))
            return false;
        task->next += empty ? empty : 1;
    }
    return true;
}

static bool send_combine(const struct ll_wire *wire, struct ll_sender *sender)
{
    struct ll_task *task = &sender->task;

    for (; task->next < (int64_t)task->desc.max_tokens * wire->topk; task->next++)
        if (load(flags_of(sender, ll_wire_row_flag_at(wire, task->next, task->desc.parts))) == task->desc.number &&
            !send_message(wire, sender, MESSAGE_ROW, task->next, 0, ll_wire_row_at(wire, task->next), row_bytes(wire)))
            return false;
    return true;
}

/*
 * Finds the next task that the kernels have published. If there is no descriptor of a call, the rank was masked in it.
 * At most two calls can be pending: in each, the kernels wait until the rank has completed the previous call of the
 * same kind.
 */
static bool find_task(const struct ll_wire *wire, struct ll_sender *sender)
{
    const struct ll_wire_segment *out = segment_of(sender);
    uint64_t weights = load(&out->weights_ready[wire->me]), sent;

    if (weights > sender->weights_sent) {
        sender->task = (struct ll_task){.kind = LL_TASK_WEIGHTS, .desc = out->desc[LL_WIRE_DESC_WEIGHTS]};
        sender->task.desc.number = weights;
        return true;
    }
    sent = load(&out->rows_ready[wire->me]);
    while (sent > sender->rows_sent) {
        uint64_t number = sent - sender->rows_sent > 2 ? sent - 1 : sender->rows_sent + 1;
        const struct ll_wire_desc *desc = &out->desc[number & 1];

        if (desc->number == number) {
            sender->task = (struct ll_task){.kind = desc->combine ? LL_TASK_COMBINE : LL_TASK_DISPATCH, .desc = *desc};
            return true;
        }
        sender->rows_sent = number;
    }
    return false;
}

static bool send_task(const struct ll_wire *wire, struct ll_sender *sender)
{
    struct ll_task *task = &sender->task;
    bool all = task->kind == LL_TASK_WEIGHTS    ? send_weights(wire, sender)
               : task->kind == LL_TASK_DISPATCH ? send_dispatch(wire, sender)
                                                : send_combine(wire, sender);

    if (!all)
        return false;
    if (task->kind == LL_TASK_WEIGHTS)
        sender->weights_sent = task->desc.number;
    else
        sender->rows_sent = task->desc.number;
    task->kind = LL_TASK_NONE;
    return true;
}

/* The words to publish now: of weights and rows, what has been sent. */
static struct ll_words words_for(const struct ll_wire *wire, const struct ll_sender *sender)
{
    const struct ll_wire_segment *out = segment_of(sender);

    return (struct ll_words){.completed = load(&out->completed[wire->me]),
                             .weights_ready = sender->weights_sent,
                             .rows_ready = sender->rows_sent,
                             .barriers = load(&out->barriers[wire->me]),
                             .masked = __atomic_load_n(&out->masked_by[wire->me], __ATOMIC_ACQUIRE)};
}

static bool are_sent(const struct ll_sender *sender, const struct ll_words *words)
{
    return memcmp(words, &sender->last_words, sizeof(*words)) == 0;
}

static bool send_words(const struct ll_wire *wire, struct ll_sender *sender)
{
    struct {
        struct ll_message message;
        struct ll_words words;
    } head = {.message = {.kind = MESSAGE_WORDS}, .words = words_for(wire, sender)};

    if (are_sent(sender, &head.words) || !ep_stream_send(wire->streams, sender->rank, 0, &head, sizeof(head), NULL, 0))
        return false;
    sender->last_words = head.words;
    return true;
}

bool ll_wire_send(const struct ll_wire *wire, struct ll_sender *sender)
{
    bool moved = send_words(wire, sender);

    while (sender->task.kind || find_task(wire, sender)) {
        if (!send_task(wire, sender))
            return moved;
        send_words(wire, sender);
        moved = true;
    }
    return send_words(wire, sender) || moved;
}

bool ll_wire_is_pending(const struct ll_wire *wire, const struct ll_sender *sender)
{
    struct ll_words words = words_for(wire, sender);

    return sender->task.kind || !are_sent(sender, &words);
}

/* --- receiving ---------------------------------------------------------------------------------------------------- */

static void store_max(uint64_t *word, uint64_t value)
{
    if (*word < value)
        store(word, value);
}

static void apply_words(struct ll_wire_segment *landing, int source, const struct ll_words *words)
{
    /* First, so that it is visible before the words that follow it. */
    __atomic_store_n(&landing->masked_by[source], (uint32_t)words->masked, __ATOMIC_RELEASE);
    store_max(&landing->completed[source], words->completed);
    store_max(&landing->weights_ready[source], words->weights_ready);
    store_max(&landing->rows_ready[source], words->rows_ready);
    store_max(&landing->barriers[source], words->barriers);
}

/* The kernels read each word atomically. */
static void copy_words(uint64_t *to, const uint64_t *from, size_t n)
{
    for (size_t i = 0; i < n; i++)
        store(&to[i], from[i]);
}

static bool is_valid(const struct ll_wire *wire, const struct ll_message *m, size_t payload)
{
    uint64_t choices = (uint64_t)m->max_tokens * (uint64_t)wire->topk;

    if (m->kind == MESSAGE_WORDS)
        return payload == sizeof(struct ll_words);
    if (m->max_tokens < 1 || m->max_tokens > (uint32_t)wire->segment_tokens)
        return false;
    switch (m->kind) {
    case MESSAGE_COUNTS:
        return m->at <= 1 && m->n == (uint32_t)wire->n_counts && payload == (size_t)m->n * 8;
    case MESSAGE_SLOT:
        return m->at < m->max_tokens && m->n <= (uint64_t)wire->slot_bytes && payload == m->n;
    case MESSAGE_EMPTY:
        return (uint64_t)m->at + m->n <= m->max_tokens && !payload;
    case MESSAGE_WEIGHTS:
        return (uint64_t)m->at + m->n <= choices && payload == (size_t)m->n * 8;
    case MESSAGE_ROW:
        return m->at < choices && m->parts >= 1 && m->parts <= LL_WIRE_MAX_PARTS && payload == (size_t)row_bytes(wire);
    default:
        return false;
    }
}

static void store_payload(const struct ll_wire *wire, int source, const struct ll_message *m, const void *payload)
{
    struct ll_wire_segment *segment = (struct ll_wire_segment *)(void *)wire->landing;
    uint64_t *flags;

    switch (m->kind) {
    case MESSAGE_COUNTS:
        copy_words(words_at(wire->landing, ll_wire_counts_at(wire, (int)m->at, source)), payload, m->n);
        return;
    case MESSAGE_WEIGHTS:
        __atomic_store_n(&segment->detail[source], m->detail, __ATOMIC_RELAXED);
        copy_words(words_at(wire->landing, ll_wire_weight_at(wire, source, m->at)), payload, m->n);
        return;
    case MESSAGE_SLOT:
        memcpy(wire->landing + ll_wire_slot_at(wire, source, m->at), payload, m->n);
        store(words_at(wire->landing, ll_wire_slot_flag_at(wire, source, m->at)), m->number << 1 | 1);
        return;
    case MESSAGE_EMPTY:
        flags = words_at(wire->landing, ll_wire_slot_flag_at(wire, source, m->at));
        for (uint32_t i = 0; i < m->n; i++)
            store(&flags[i], m->number << 1);
        return;
    default: /* MESSAGE_ROW */
        memcpy(wire->landing + ll_wire_row_at(wire, m->at), payload, (size_t)row_bytes(wire));
        flags = words_at(wire->landing, ll_wire_row_flag_at(wire, m->at, m->parts));
        for (uint32_t i = 0; i < m->parts; i++)
            store(&flags[i], m->number);
    }
}

void ll_wire_add_event(struct ll_wire_segment *landing, uint32_t lost)
{
    __atomic_store_n(&landing->events, (landing->events + LL_WIRE_EVENT) | lost, __ATOMIC_RELEASE);
}

bool ll_wire_deliver(const struct ll_wire *wire, int source, const void *message, size_t bytes, uint64_t finished)
{
    struct ll_wire_segment *segment = (struct ll_wire_segment *)(void *)wire->landing;
    const void *payload = (const unsigned char *)message + sizeof(struct ll_message);
    struct ll_message head;

    if (bytes < sizeof(head))
        return false;
    memcpy(&head, message, sizeof(head));
    if (!is_valid(wire, &head, bytes - sizeof(head)))
        return false;
    if (head.kind == MESSAGE_WORDS)
        apply_words(segment, source, payload);
    else if (head.number > finished)
        store_payload(wire, source, &head, payload);
    store(&segment->received[source], segment->received[source] + 1);
    ll_wire_add_event(segment, 0);
    return true;
}

bool ll_wire_receive(const struct ll_wire *wire, int source, uint64_t finished, struct ll_received *ret_received)
{
    struct ll_received received = {.n = 0};
    const void *message;
    size_t bytes;

    while ((message = ep_stream_peek(wire->streams, source, 0, &bytes))) {
        if (received.n == LL_WIRE_BATCH) {
            received.more = true;
            break;
        }
        if (!ll_wire_deliver(wire, source, message, bytes, finished)) {
            received.damaged_bytes = bytes;
            *ret_received = received;
            return false;
        }
        ep_stream_pop(wire->streams, source, 0);
        received.n++;
    }
    *ret_received = received;
    return true;
}

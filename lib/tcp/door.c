/* SPDX-License-Identifier: Apache-2.0 */
#include "tcp/door.h"

#include "base/clock.h"

#include <errno.h>
#include <stdio.h>
#include <unistd.h>

/* For the two round trips of a shake. */
#define PROOF_MS 5000
/* When there is no room, who has been here that long makes some: a rank needs two round trips. */
#define PATIENCE_MS 250

void tcp_door_open(struct tcp_door *door, int fd, const struct tcp_key *key)
{
    door->fd = fd;
    door->key = *key;
    door->n = 0;
    door->dropped = 0;
    door->last_drop[0] = '\0';
}

int tcp_door_fill(const struct tcp_door *door, struct pollfd *ret_polls)
{
    int n = 0;

    if (door->fd < 0)
        return 0;
    ret_polls[n++] = (struct pollfd){.fd = door->fd, .events = POLLIN};
    for (int i = 0; i < door->n; i++)
        ret_polls[n++] = (struct pollfd){.fd = door->pending[i].fd, .events = tcp_shake_events(&door->pending[i])};
    return n;
}

static void note_drop(struct tcp_door *door, const struct tcp_shake *shake)
{
    char from[TCP_ADDRESS_TEXT];

    tcp_address_print(&shake->from, from);
    door->dropped++;
    snprintf(door->last_drop, sizeof(door->last_drop), "%s: %s", from, shake->why);
}

static void forget(struct tcp_door *door, int i)
{
    door->pending[i] = door->pending[--door->n];
}

/* The one that has been here longest goes, if that is long enough. */
static bool make_room(struct tcp_door *door)
{
    int oldest = 0;

    if (door->n < TCP_DOOR_PENDING)
        return true;
    for (int i = 1; i < door->n; i++)
        if (door->pending[i].begin_ns < door->pending[oldest].begin_ns)
            oldest = i;
    if (ep_now_ns() - door->pending[oldest].begin_ns < PATIENCE_MS * UINT64_C(1000000))
        return false;
    snprintf(door->pending[oldest].why, TCP_WHY_BYTES, "said nothing while others waited");
    note_drop(door, &door->pending[oldest]);
    tcp_shake_drop(&door->pending[oldest]);
    forget(door, oldest);
    return true;
}

static void accept_all(struct tcp_door *door)
{
    while (make_room(door)) {
        struct tcp_address from;
        struct tcp_shake *shake = &door->pending[door->n];
        int fd = tcp_accept(door->fd, &from);

        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED))
            continue;
        if (fd < 0)
            return; /* also without descriptors: it stays in the queue of the kernel */
        tcp_set_options(fd, 0);
        if (tcp_shake_serve(shake, fd, &door->key, &from, ep_deadline_ns(PROOF_MS)) == EP_OK)
            door->n++;
        else
            close(fd);
    }
}

void tcp_door_step(struct tcp_door *door, tcp_door_judge_fn judge, tcp_door_take_fn take, void *context)
{
    if (door->fd < 0)
        return;
    accept_all(door);
    for (int i = 0; i < door->n;) {
        struct tcp_shake *shake = &door->pending[i];
        enum tcp_shake_result result = tcp_shake_step(shake);

        if (result == TCP_SHAKE_PROVEN) {
            char reason[TCP_REASON_BYTES] = "";
            ep_status status = judge(context, shake, reason, sizeof(reason));

            tcp_shake_welcome(shake, status, reason);
            result = tcp_shake_step(shake);
        }
        if (result == TCP_SHAKE_PENDING) {
            i++;
            continue;
        }
        if (result == TCP_SHAKE_DONE)
            take(context, shake, shake->fd);
        else
            note_drop(door, shake);
        forget(door, i);
    }
}

void tcp_door_close(struct tcp_door *door)
{
    if (door->fd < 0)
        return;
    for (int i = 0; i < door->n; i++)
        tcp_shake_drop(&door->pending[i]);
    door->n = 0;
    close(door->fd);
    door->fd = -1;
}

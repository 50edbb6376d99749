/* SPDX-License-Identifier: Apache-2.0 */
#include "sequence.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NOISE_BYTES = 1 << 14, PAUSE_US = 2000 };

struct noise {
    ep_comm *comm;
    struct random random;
    pthread_t thread;
    atomic_int stop;
    char text[300];
};

/* A communicator that was aborted gives no more memory, but takes back what it has given. */
static bool obtained(struct noise *noise, ep_status status, const char *what)
{
    if (status != EP_OK && status != EP_E_ABORTED)
        snprintf(noise->text, sizeof(noise->text), "%s: %s: %s", what, ep_status_name(status), ep_last_error());
    return status == EP_OK;
}

static void returned(struct noise *noise, ep_status status, const char *what)
{
    if (status != EP_OK)
        snprintf(noise->text, sizeof(noise->text), "%s: %s: %s", what, ep_status_name(status), ep_last_error());
}

static void use_memory(struct noise *noise)
{
    size_t bytes = random_below(&noise->random, NOISE_BYTES);
    void *memory;

    if (!obtained(noise, ep_alloc_local(noise->comm, bytes, &memory), "ep_alloc_local"))
        return;
    memset(memory, GUARD, bytes);
    usleep(random_below(&noise->random, PAUSE_US));
    returned(noise, ep_free_local(noise->comm, memory), "ep_free_local");
}

static void query(struct noise *noise)
{
    for (int i = 0; i < 20; i++)
        (void)obtained(noise, ep_comm_async_error(noise->comm), "ep_comm_async_error");
}

static void *run_noise(void *context)
{
    struct noise *noise = context;

    while (!atomic_load(&noise->stop) && !noise->text[0]) {
        if (random_below(&noise->random, 2))
            use_memory(noise);
        else
            query(noise);
        usleep(random_below(&noise->random, PAUSE_US));
    }
    return NULL;
}

struct noise *noise_start(ep_comm *comm, uint64_t seed)
{
    struct noise *noise = calloc(1, sizeof(*noise));

    if (!noise)
        return NULL;
    noise->comm = comm;
    noise->random.key = seed;
    if (pthread_create(&noise->thread, NULL, run_noise, noise) != 0) {
        free(noise);
        return NULL;
    }
    return noise;
}

bool noise_stop(struct rank_state *state, struct noise *noise)
{
    bool ok;

    if (!noise)
        return true;
    atomic_store(&noise->stop, 1);
    pthread_join(noise->thread, NULL);
    ok = !noise->text[0] || fail(state, "second thread: %s", noise->text);
    free(noise);
    return ok;
}

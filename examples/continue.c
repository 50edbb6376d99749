/* SPDX-License-Identifier: Apache-2.0 */
/*
 * continue.c - a rank dies, and the others go on: they agree who is in the next group, and create its communicator.
 *
 * A key-value store in which a key is set once decides: the first view of the members counts. It is also the bootstrap
 * of the next group. Here it is a folder, in which link() creates a file unless there is one; etcd or the store of an
 * engine is used in the same way (python/continue_training.py: TCPStore). A controller that knows who is in replaces
 * agree().
 */
#define _POSIX_C_SOURCE 200809L
#include "ranks.h"

#include <dirent.h>
#include <epkit/epkit.h>
#include <fcntl.h>
#include <time.h>

enum { RANKS = 4, LAYERS = 8, DIES = 2, IN_LAYER = 3 };

/* A group: its number, and its members by their ranks in the first one. */
struct group {
    int number, nranks, ranks[RANKS], self, gathers; /* self: this rank in the first group */
};

/* Sets a key, unless it is set. */
static void store_set(const char *key, const void *data, size_t bytes)
{
    char own[32];
    int fd;

    snprintf(own, sizeof(own), "by-%d", (int)getpid());
    fd = open(own, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (write(fd, data, bytes) != (ssize_t)bytes)
        perror(key);
    close(fd);
    (void)!link(own, key);
    unlink(own);
}

/* Waits until the key is set. 0: it was not in time. */
static int store_get(const char *key, void *data, size_t bytes, int timeout_ms)
{
    int fd = open(key, O_RDONLY), got;

    for (; fd < 0 && timeout_ms > 0; timeout_ms--, fd = open(key, O_RDONLY))
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    got = fd >= 0 && read(fd, data, bytes) == (ssize_t)bytes;
    close(fd);
    return got;
}

/* The bootstrap of a group: a block is a key. */
static ep_status gather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    struct group *group = context;
    int n = group->gathers++;
    char key[64];

    snprintf(key, sizeof(key), "group%d-gather%d-rank%d", group->number, n, group->self);
    store_set(key, mine, bytes);
    for (int i = 0; i < group->nranks; i++) {
        snprintf(key, sizeof(key), "group%d-gather%d-rank%d", group->number, n, group->ranks[i]);
        if (!store_get(key, (char *)ret_all + (size_t)i * bytes, bytes, timeout_ms))
            return EP_E_TIMEOUT;
    }
    return EP_OK;
}

/* Makes `group` the next one, without the ranks that are known to have failed. Returns this rank in it; -1: none. */
static int agree(struct group *group, const ep_comm *comm)
{
    struct group next = {.number = group->number + 1};
    int self = group->self, rank = -1;
    int32_t failed[RANKS];
    char key[32];

    ep_comm_get_failed(comm, failed);
    for (int i = 0; i < group->nranks; i++)
        if (failed[i] == EP_OK)
            next.ranks[next.nranks++] = group->ranks[i];
    snprintf(key, sizeof(key), "group%d", next.number);
    store_set(key, &next, sizeof(next));
    if (!store_get(key, group, sizeof(*group), 0))
        return -1;
    group->self = self;
    for (int i = 0; i < group->nranks; i++)
        rank = group->ranks[i] == self ? i : rank;
    return rank;
}

/* Layers, until all are done or one fails. A rank may be one ahead of the others: the group begins at the earliest. */
static ep_status work(ep_comm *comm, const struct group *group, int *layer)
{
    int32_t all[RANKS], mine = *layer;
    ep_status status = ep_comm_allgather(comm, &mine, sizeof(mine), all);

    for (int i = 0; status == EP_OK && i < group->nranks; i++)
        *layer = all[i] < *layer ? all[i] : *layer;
    for (; status == EP_OK && *layer < LAYERS; *layer += status == EP_OK) {
        if (group->self == DIES && *layer == IN_LAYER)
            _exit(EXIT_SUCCESS);
        mine = *layer; /* an all-gather in place of a layer with experts (moe_layer.c) */
        status = ep_comm_allgather(comm, &mine, sizeof(mine), all);
        for (int i = 0; status == EP_OK && i < group->nranks; i++)
            if (all[i] != *layer)
                _exit(EXIT_FAILURE);
    }
    return status;
}

static int run_rank(const ep_boot *boot)
{
    struct group group = {.nranks = RANKS, .ranks = {0, 1, 2, 3}, .self = boot->rank};
    ep_boot own = *boot;
    ep_status status = EP_E_PEER_DEAD;
    ep_comm *comm;
    int layer = 0;

    /* If a rank dies in ep_comm_new(), agree again in the same way, without the rank that the error names. */
    while (status != EP_OK && own.rank >= 0 && ep_comm_new(&own, NULL, &comm) == EP_OK) {
        status = work(comm, &group, &layer);
        printf("rank %d, one of %d: %d layers done. %s\n", group.self, group.nranks, layer, ep_comm_last_error(comm));
        if (status != EP_OK) {
            own = (ep_boot){.size = sizeof(own), .rank = agree(&group, comm), .allgather = gather, .context = &group};
            own.nranks = group.nranks;
        }
        ep_comm_free(comm);
    }
    if (status != EP_OK)
        fprintf(stderr, "rank %d does not go on: %s\n", group.self, ep_last_error());
    return status == EP_OK && group.nranks == RANKS - 1 ? EXIT_SUCCESS : EXIT_FAILURE;
}

int main(void)
{
    char folder[] = "/tmp/epkit-continue-XXXXXX";
    int result = EXIT_FAILURE;
    DIR *dir;

    if (!mkdtemp(folder) || chdir(folder) != 0)
        return result;
    result = run_ranks(RANKS, run_rank);
    dir = opendir(".");
    for (struct dirent *entry = dir ? readdir(dir) : NULL; entry; entry = readdir(dir))
        unlink(entry->d_name);
    if (dir)
        closedir(dir);
    rmdir(folder);
    return result;
}

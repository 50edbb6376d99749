/* SPDX-License-Identifier: Apache-2.0 */
/*
 * continue.c - a rank dies, and a spare process takes its place: the others agree on that, and go on with it in the
 * same communicator, with the same numbers of ranks.
 *
 * A key-value store in which a key is set once decides: the first view of the members counts. It is also the bootstrap
 * of each group. Here it is a folder, in which link() creates a file unless there is one; etcd or the store of an
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

/* The members from one change to the next. */
struct group {
    int number, n, slots[RANKS]; /* slots: their numbers in the communicator */
    int fresh;                   /* the slot that the spare process takes; -1: none */
    int slot, gathers;           /* of this process */
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

    snprintf(key, sizeof(key), "group%d-gather%d-rank%d", group->number, n, group->slot);
    store_set(key, mine, bytes);
    for (int i = 0; i < group->n; i++) {
        snprintf(key, sizeof(key), "group%d-gather%d-rank%d", group->number, n, group->slots[i]);
        if (!store_get(key, (char *)ret_all + (size_t)i * bytes, bytes, timeout_ms))
            return EP_E_TIMEOUT;
    }
    return EP_OK;
}

static ep_boot boot_of(struct group *group)
{
    ep_boot boot = {.size = sizeof(boot), .nranks = group->n, .allgather = gather, .context = group};

    while (boot.rank < group->n - 1 && group->slots[boot.rank] != group->slot)
        boot.rank++;
    return boot;
}

/* Makes `group` the next one: those of whom no failure is known, and in the first change the spare process. */
static int agree(struct group *group, const ep_comm *comm)
{
    struct group next = {.number = group->number + 1, .fresh = -1};
    int slot = group->slot, is_in = 0;
    int32_t failed[RANKS];
    char key[32];

    ep_comm_get_failed(comm, failed);
    for (int rank = 0; rank < RANKS; rank++) {
        int replaced = failed[rank] != EP_OK && group->number == 0 && next.fresh < 0;

        next.fresh = replaced ? rank : next.fresh;
        if (failed[rank] == EP_OK || replaced)
            next.slots[next.n++] = rank;
    }
    snprintf(key, sizeof(key), "group%d", next.number);
    store_set(key, &next, sizeof(next));
    if (!store_get(key, group, sizeof(*group), 0))
        return 0;
    group->slot = slot;
    for (int i = 0; i < group->n; i++)
        is_in |= group->slots[i] == slot && group->fresh != slot;
    return is_in;
}

/* Layers, until all are done or one fails. A rank may be one ahead of the others: the group begins at the earliest. */
static ep_status work(ep_comm *comm, const struct group *group, int *layer)
{
    int32_t all[RANKS], mine = *layer;
    ep_status status = ep_comm_allgather(comm, &mine, sizeof(mine), all);

    for (int i = 0; status == EP_OK && i < group->n; i++)
        *layer = all[group->slots[i]] < *layer ? all[group->slots[i]] : *layer;
    for (; status == EP_OK && *layer < LAYERS; *layer += status == EP_OK) {
        if (group->number == 0 && group->slot == DIES && *layer == IN_LAYER)
            _exit(EXIT_SUCCESS);
        mine = *layer; /* an all-gather in place of a layer with experts (moe_layer.c) */
        status = ep_comm_allgather(comm, &mine, sizeof(mine), all);
        for (int i = 0; status == EP_OK && i < group->n; i++)
            if (all[group->slots[i]] != *layer)
                _exit(EXIT_FAILURE);
    }
    return status;
}

static int run_process(const ep_boot *process)
{
    struct group group = {.n = RANKS, .slots = {0, 1, 2, 3}, .fresh = -1, .slot = process->rank};
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_comm *comm;
    ep_boot boot;
    int layer = 0;

    if (process->rank == RANKS) { /* the spare waits until it is needed; the others know the layer */
        if (!store_get("group1", &group, sizeof(group), 30000))
            return EXIT_FAILURE;
        group.slot = group.fresh;
        layer = LAYERS;
    }
    boot = boot_of(&group);
    config.slots = RANKS;
    config.slot = group.slot;
    if (ep_comm_new(&boot, &config, &comm) != EP_OK) {
        fprintf(stderr, "%s\n", ep_last_error());
        return EXIT_FAILURE;
    }
    while (work(comm, &group, &layer) != EP_OK) {
        printf("rank %d: %d layers done. %s\n", group.slot, layer, ep_comm_last_error(comm));
        /* If a member does not come, or dies meanwhile, agree again. Plans are made or renewed afterwards. */
        do {
            if (!agree(&group, comm))
                return EXIT_FAILURE;
            boot = boot_of(&group);
        } while (ep_comm_regroup(comm, &boot) != EP_OK);
    }
    printf("rank %d of %d members: %d layers done\n", group.slot, group.n, layer);
    ep_comm_free(comm);
    return group.number == 1 && group.n == RANKS ? EXIT_SUCCESS : EXIT_FAILURE;
}

int main(void)
{
    char folder[] = "/tmp/epkit-continue-XXXXXX";
    int result = EXIT_FAILURE;
    DIR *dir;

    if (!mkdtemp(folder) || chdir(folder) != 0)
        return result;
    result = run_ranks(RANKS + 1, run_process);
    dir = opendir(".");
    for (struct dirent *entry = dir ? readdir(dir) : NULL; entry; entry = readdir(dir))
        unlink(entry->d_name);
    if (dir)
        closedir(dir);
    rmdir(folder);
    return result;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "boot/rank_ends.h"

#include "base/clock.h"
#include "base/futex.h"
#include "base/process.h"
#include "base/reserve.h"

#include <epkit/boot.h>
#include <errno.h>
#include <stdalign.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

/*
 * One mapping holds everything. Forked children have it at the same address as the parent, so an ep_boot can point into
 * it. An all-gather runs in rounds of one block per rank. A rank writes its block into its own slot, publishes the
 * round and reads the other slots when their ranks have published it. Two blocks per slot suffice without
 * acknowledgements: a rank that publishes round n has read all of round n - 1, so when all have published n, the blocks
 * of n - 1 may be overwritten, and no rank can start n + 1 before that.
 */
#define BLOCK_BYTES 4096
#define LIST_BYTES 160

/* A waiting rank checks for a failed rendezvous and for dead ranks at least this often; posts wake it at once. */
#define POLL_NS 20000000u

/* Per poll interval: a check costs a few system calls. */
#define MAX_CHECKS 32

struct block {
    uint64_t total_bytes; /* per rank of the whole all-gather: to detect ranks in different calls */
    unsigned char data[BLOCK_BYTES];
};

struct slot {
    alignas(64) _Atomic uint32_t posted; /* rounds that the rank has published; futex word; may wrap */
    _Atomic uint32_t joined;
    _Atomic uint32_t known;    /* process is set, by the rank itself */
    _Atomic uint32_t returned; /* the rank's program has returned, in a process that continues */
    _Atomic uint32_t ended;    /* the launcher has reaped its child */
    _Atomic uint64_t started;  /* key of that child */
    struct ep_boot_shm *shm;
    int32_t rank;
    struct ep_process_id process;
    struct block blocks[2];
};

struct ep_boot_shm {
    size_t mapped;
    int32_t nranks;
    _Atomic uint32_t failed; /* FAILED_PACK(): ranks may be in different rounds, so it stays unusable */
    struct slot slots[];
};

/* 9 bits of status, 11 of the rank that gave up + 1, 11 of the rank that caused it + 1; 0: none */
#define FAILED_PACK(status, rank, failed_rank)                                                                         \
    ((uint32_t)(status) << 22 | ((uint32_t)(rank) + 1) << 11 | ((uint32_t)(failed_rank) + 1))
#define FAILED_STATUS(failed) ((ep_status)((failed) >> 22))
#define FAILED_RANK(failed) ((int)((failed) >> 11 & 0x7ff) - 1)
#define FAILED_FOR(failed) ((int)((failed)&0x7ff) - 1)

_Static_assert(EP_MAX_RANKS < 0x7ff && EP_E_EXCLUDED < 0x200, "FAILED_PACK has room for them");

ep_status ep_boot_shm_new(int nranks, ep_boot_shm **ret_shm)
{
    struct ep_boot_shm *shm;
    ep_status status;
    size_t bytes;

    if (!ret_shm)
        return ep_fail(EP_E_ARG, "ep_boot_shm_new: ret_shm is NULL");
    if (nranks < 1 || nranks > EP_MAX_RANKS)
        return ep_fail(EP_E_ARG, "ep_boot_shm_new: nranks is %d, not in 1..%d", nranks, EP_MAX_RANKS);
    bytes = sizeof(*shm) + (size_t)nranks * sizeof(shm->slots[0]);
    shm = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    status = shm == MAP_FAILED ? ep_reserve_fail_map(errno, bytes) : ep_reserve_mapping(shm, bytes);
    if (status != EP_OK && shm != MAP_FAILED)
        munmap(shm, bytes);
    if (status != EP_OK)
        return ep_fail_prefix(status, "ep_boot_shm_new: ");
    shm->mapped = bytes;
    shm->nranks = nranks;
    for (int rank = 0; rank < nranks; rank++) {
        shm->slots[rank].shm = shm;
        shm->slots[rank].rank = rank;
    }
    *ret_shm = shm;
    return EP_OK;
}

void ep_boot_shm_note_start(ep_boot_shm *shm, int rank)
{
    struct ep_process_id self;

    ep_process_get_self(&self);
    atomic_store_explicit(&shm->slots[rank].started, self.key, memory_order_release);
}

void ep_boot_shm_note_end(ep_boot_shm *shm, int rank)
{
    struct slot *slot = &shm->slots[rank];

    atomic_store_explicit(&slot->ended, 1, memory_order_release);
    ep_futex_wake(&slot->posted);
}

void ep_boot_shm_note_return(ep_boot_shm *shm, int rank)
{
    atomic_store_explicit(&shm->slots[rank].returned, 1, memory_order_release);
}

void ep_boot_shm_free(ep_boot_shm *shm)
{
    if (shm)
        munmap(shm, shm->mapped);
}

/* Round counts wrap: only their distance means something, and it is never more than 1. */
static bool has_posted(struct slot *slot, uint32_t round, uint32_t *ret_seen)
{
    *ret_seen = atomic_load_explicit(&slot->posted, memory_order_acquire);
    return (int32_t)(*ret_seen - round) >= 0;
}

/* Why the rank that an all-gather waited for did not take part. */
static const char *loss_text(ep_status status)
{
    switch (status) {
    case EP_E_TIMEOUT:
        return "did not arrive";
    case EP_E_PEER_DEAD:
        return "died before it arrived";
    case EP_E_PEER_LEFT:
        return "has returned from its program before it arrived";
    default:
        return "gathers another size";
    }
}

static ep_status fail_unusable(struct slot *mine, uint32_t failed)
{
    ep_status status = FAILED_STATUS(failed);
    int rank = FAILED_RANK(failed);

    if (!ep_status_is_failure(FAILED_STATUS(failed)))
        return ep_fail(EP_E_MISMATCH, "bootstrap: the rendezvous is damaged: its failure is 0x%08x", failed);
    if (rank == mine->rank)
        return ep_fail(status,
                       "bootstrap: an earlier all-gather of this rank failed: the rendezvous cannot be used any more");
    return ep_fail(status, "bootstrap: rank %d %s, so rank %d gave up: %s", FAILED_FOR(failed), loss_text(status), rank,
                   ep_status_text(status));
}

static ep_status set_failed(struct slot *mine, ep_status status, int failed_rank)
{
    uint32_t none = 0;

    /* All ranks report the first failure. */
    if (!atomic_compare_exchange_strong(&mine->shm->failed, &none, FAILED_PACK(status, mine->rank, failed_rank)))
        return fail_unusable(mine, none);
    for (int rank = 0; rank < mine->shm->nranks; rank++)
        ep_futex_wake(&mine->shm->slots[rank].posted);
    return status;
}

/* Lists the missing ranks: "1, 3, 4 and 12 more". */
static ep_status fail_late(struct slot *mine, uint32_t round, int timeout_ms)
{
    struct ep_boot_shm *shm = mine->shm;
    int missing = 0, shown = 0, first = 0;
    char list[LIST_BYTES] = "";
    size_t used = 0;
    uint32_t seen;

    for (int rank = 0; rank < shm->nranks; rank++) {
        if (has_posted(&shm->slots[rank], round, &seen))
            continue;
        if (!missing++)
            first = rank;
        if (used + 32 < sizeof(list))
            used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%d", shown++ ? ", " : "", rank);
    }
    if (!missing) /* the last one has arrived meanwhile */
        return EP_OK;
    if (missing > shown)
        snprintf(list + used, sizeof(list) - used, " and %d more", missing - shown);
    ep_fail(EP_E_TIMEOUT, "bootstrap: %d of %d ranks did not arrive within %d ms: rank%s %s", missing, shm->nranks,
            timeout_ms, missing == 1 ? "" : "s", list);
    return set_failed(mine, EP_E_TIMEOUT, first);
}

/* EP_OK unless it is certain that the rank will not arrive. */
static ep_status check_rank(const struct slot *slot)
{
    bool known = atomic_load_explicit(&slot->known, memory_order_acquire);

    /* The program may have forked again and take part as the new process. */
    if (atomic_load_explicit(&slot->ended, memory_order_acquire) &&
        (!known || slot->process.key == atomic_load_explicit(&slot->started, memory_order_acquire)))
        return EP_E_PEER_DEAD;
    if (atomic_load_explicit(&slot->returned, memory_order_acquire))
        return EP_E_PEER_LEFT;
    return known && ep_process_probe_once(&slot->process) == EP_PROCESS_DEAD ? EP_E_PEER_DEAD : EP_OK;
}

/* Checks some of the missing ranks, to detect a death before the deadline. */
static ep_status find_lost(struct slot *mine, uint32_t round, int *next)
{
    struct ep_boot_shm *shm = mine->shm;
    int checks = 0;
    uint32_t seen;

    for (int i = 0; i < shm->nranks && checks < MAX_CHECKS; i++) {
        int rank = *next = (*next + 1) % shm->nranks;
        const struct slot *slot = &shm->slots[rank];
        ep_status status;

        if (rank == mine->rank || has_posted(&shm->slots[rank], round, &seen))
            continue;
        checks++;
        status = check_rank(slot);
        /* It may have posted between the first test and its end. */
        if (status == EP_OK || has_posted(&shm->slots[rank], round, &seen))
            continue;
        ep_fail(status, "bootstrap: rank %d %s", rank, loss_text(status));
        return set_failed(mine, status, rank);
    }
    return EP_OK;
}

static ep_status wait_posted(struct slot *mine, int rank, uint32_t round, uint64_t deadline_ns, int timeout_ms)
{
    struct slot *slot = &mine->shm->slots[rank];
    uint64_t now = ep_now_ns(), next_check_ns = now + POLL_NS;
    int next = rank - 1;
    uint32_t seen, failed;

    while (!has_posted(slot, round, &seen)) {
        failed = atomic_load(&mine->shm->failed);
        if (failed)
            return fail_unusable(mine, failed);
        now = ep_now_ns();
        if (now >= deadline_ns)
            return fail_late(mine, round, timeout_ms);
        if (now >= next_check_ns) {
            EP_TRY(find_lost(mine, round, &next));
            next_check_ns = now + POLL_NS;
        }
        ep_futex_wait(&slot->posted, seen, deadline_ns - now < POLL_NS ? deadline_ns - now : POLL_NS);
    }
    return EP_OK;
}

/* One round: the part from `offset` on that fits into a block, of all ranks. */
static ep_status gather_round(struct slot *mine, const unsigned char *block, size_t bytes, size_t offset,
                              uint64_t deadline_ns, int timeout_ms, unsigned char *ret_all)
{
    struct ep_boot_shm *shm = mine->shm;
    uint32_t round = atomic_load_explicit(&mine->posted, memory_order_relaxed) + 1;
    size_t count = bytes - offset < BLOCK_BYTES ? bytes - offset : BLOCK_BYTES;
    struct block *out = &mine->blocks[round & 1];

    out->total_bytes = bytes;
    if (count)
        memcpy(out->data, block + offset, count);
    atomic_store_explicit(&mine->posted, round, memory_order_release);
    ep_futex_wake(&mine->posted);

    for (int rank = 0; rank < shm->nranks; rank++) {
        const struct block *in = &shm->slots[rank].blocks[round & 1];

        EP_TRY(wait_posted(mine, rank, round, deadline_ns, timeout_ms));
        if (in->total_bytes != bytes) {
            ep_fail(EP_E_MISMATCH, "bootstrap: ranks disagree: rank %d gathers %zu bytes and rank %d gathers %zu",
                    mine->rank, bytes, rank, (size_t)in->total_bytes);
            return set_failed(mine, EP_E_MISMATCH, rank);
        }
        if (count)
            memcpy(ret_all + (size_t)rank * bytes + offset, in->data, count);
    }
    return EP_OK;
}

static ep_status allgather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    struct slot *slot = context;
    uint64_t deadline_ns;
    uint32_t failed = atomic_load(&slot->shm->failed);
    size_t offset = 0;

    if ((!mine || !ret_all) && bytes)
        return ep_fail(EP_E_ARG, "bootstrap: all-gather of %zu bytes from or to NULL", bytes);
    if (timeout_ms < 0)
        return ep_fail(EP_E_ARG, "bootstrap: timeout_ms is %d", timeout_ms);
    if (failed)
        return fail_unusable(slot, failed);
    deadline_ns = ep_deadline_ns(timeout_ms);
    if (!atomic_load(&slot->known)) {
        ep_process_get_self(&slot->process);
        atomic_store_explicit(&slot->known, 1, memory_order_release);
    }
    do {
        EP_TRY(gather_round(slot, mine, bytes, offset, deadline_ns, timeout_ms, ret_all));
        offset += BLOCK_BYTES;
    } while (offset < bytes);
    return EP_OK;
}

ep_status ep_boot_shm_join(ep_boot_shm *shm, int rank, ep_boot *ret_boot)
{
    if (!shm || !ret_boot)
        return ep_fail(EP_E_ARG, "ep_boot_shm_join: %s is NULL", shm ? "ret_boot" : "shm");
    if (rank < 0 || rank >= shm->nranks)
        return ep_fail(EP_E_ARG, "ep_boot_shm_join: rank is %d, but the rendezvous is for %d ranks", rank, shm->nranks);
    if (atomic_exchange(&shm->slots[rank].joined, 1))
        return ep_fail(EP_E_STATE, "ep_boot_shm_join: rank %d joined twice", rank);
    *ret_boot = (ep_boot){.size = sizeof(*ret_boot),
                          .rank = rank,
                          .nranks = shm->nranks,
                          .allgather = allgather,
                          .context = &shm->slots[rank]};
    return EP_OK;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * All-gather with a deadline that can name late ranks: each rank sends its block to every other rank and receives
 * theirs. MPI_Iallgather uses the same algorithm for such small blocks (linear in Open MPI's libnbc), but cannot tell
 * whose block is missing, cannot be cancelled, and does not detect ranks that gather different sizes.
 */
#include "mpi/boot.h"

#include "base/backoff.h"
#include "base/clock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIST_BYTES 160
#define FREE_MS 1000
#define CHECK_NS 20000000u /* between liveness checks of the missing ranks */
#define LAST_LOOKS 100     /* in succession without a new block, before a rank is called late */

struct gather {
    struct gather *next;
    int rank, nranks;
    size_t bytes;
    MPI_Request *requests;         /* [2 * nranks], of both: */
    MPI_Request *receives, *sends; /* [nranks] each */
    unsigned char *blocks;         /* [nranks][bytes]; that of this rank is sent */
};

static void gather_free(struct gather *gather)
{
    if (!gather)
        return;
    free(gather->requests);
    free(gather->blocks);
    free(gather);
}

static ep_status gather_new(int rank, int nranks, const void *mine, size_t bytes, struct gather **ret_gather)
{
    struct gather *gather = calloc(1, sizeof(*gather));

    if (!gather)
        goto no_memory;
    *gather = (struct gather){.rank = rank, .nranks = nranks, .bytes = bytes};
    gather->requests = malloc(2 * (size_t)nranks * sizeof(MPI_Request));
    gather->blocks = malloc((size_t)nranks * bytes + 1);
    if (!gather->requests || !gather->blocks)
        goto no_memory;
    for (int i = 0; i < 2 * nranks; i++)
        gather->requests[i] = MPI_REQUEST_NULL;
    gather->receives = gather->requests;
    gather->sends = gather->requests + nranks;
    if (bytes)
        memcpy(gather->blocks + (size_t)rank * bytes, mine, bytes);
    *ret_gather = gather;
    return EP_OK;
no_memory:
    gather_free(gather);
    return ep_fail(EP_E_MEMORY, "bootstrap mpi: no memory for %d blocks of %zu bytes", nranks, bytes);
}

static ep_status gather_start(struct gather *gather, MPI_Comm comm, int tag)
{
    int count = (int)gather->bytes;

    for (int i = 1; i < gather->nranks; i++) {
        int peer = (gather->rank + i) % gather->nranks;

        EP_TRY(EP_MPI(MPI_Irecv, (gather->blocks + (size_t)peer * gather->bytes, count, MPI_BYTE, peer, tag, comm,
                                  &gather->receives[peer])));
    }
    for (int i = 1; i < gather->nranks; i++) {
        int peer = (gather->rank + i) % gather->nranks;

        EP_TRY(EP_MPI(MPI_Isend, (gather->blocks + (size_t)gather->rank * gather->bytes, count, MPI_BYTE, peer, tag,
                                  comm, &gather->sends[peer])));
    }
    return EP_OK;
}

/* Completes the receive of the block of `peer`, if it has arrived. */
static ep_status test_receive(struct gather *gather, int peer, int *ret_done)
{
    MPI_Status info;
    int count = 0;
    ep_status status = EP_MPI(MPI_Test, (&gather->receives[peer], ret_done, &info));

    if (status != EP_OK)
        return ep_fail_prefix(status, "bootstrap mpi: all-gather of %zu bytes, block of rank %d: ", gather->bytes,
                              peer);
    if (!*ret_done)
        return EP_OK;
    EP_TRY(EP_MPI(MPI_Get_count, (&info, MPI_BYTE, &count)));
    if ((size_t)count != gather->bytes)
        return ep_fail(EP_E_MISMATCH, "bootstrap mpi: ranks disagree: rank %d gathers %zu bytes and rank %d gathers %d",
                       gather->rank, gather->bytes, peer, count);
    return EP_OK;
}

/* Counts the peers whose blocks have not arrived, and those to which this rank's block may not have been sent. */
static ep_status gather_test(struct gather *gather, int *ret_missing, int *ret_unsent)
{
    int missing = 0, unsent = 0, done;

    for (int peer = 0; peer < gather->nranks; peer++) {
        if (gather->receives[peer] != MPI_REQUEST_NULL) {
            EP_TRY(test_receive(gather, peer, &done));
            missing += !done;
        }
        if (gather->sends[peer] != MPI_REQUEST_NULL) {
            EP_TRY(EP_MPI(MPI_Test, (&gather->sends[peer], &done, MPI_STATUS_IGNORE)));
            unsent += !done;
        }
    }
    *ret_missing = missing;
    *ret_unsent = unsent;
    return EP_OK;
}

/*
 * At the deadline: takes what has arrived. If this rank was stopped meanwhile, it has hardly called MPI, which may need
 * several calls for messages that have been waiting for it.
 */
static ep_status take_arrived(struct gather *gather, int *missing)
{
    int before = *missing, unsent;

    for (int looks = 0; *missing && looks < LAST_LOOKS; looks++) {
        EP_TRY(gather_test(gather, missing, &unsent));
        if (*missing < before)
            looks = 0;
        before = *missing;
    }
    return EP_OK;
}

static ep_status fail_late(const struct gather *gather, int timeout_ms)
{
    char list[LIST_BYTES] = "";
    size_t used = 0;
    int missing = 0;

    for (int peer = 0; peer < gather->nranks; peer++) {
        if (gather->receives[peer] == MPI_REQUEST_NULL)
            continue;
        missing++;
        if (used + 16 < sizeof(list))
            used += (size_t)snprintf(list + used, sizeof(list) - used, " %d", peer);
    }
    return ep_fail(EP_E_TIMEOUT, "bootstrap mpi: %d of %d ranks did not arrive within %d ms: rank%s%s%s", missing,
                   gather->nranks, timeout_ms, missing == 1 ? "" : "s", list,
                   used + 16 < sizeof(list) ? "" : " and others");
}

/*
 * Detects dead ranks of this host. MPI may detect them as well, and then usually ends all ranks. The state of ranks of
 * other hosts is unknown here.
 */
static ep_status find_dead(const ep_boot_mpi *boot, struct gather *gather)
{
    for (int peer = 0; peer < gather->nranks; peer++) {
        int done = 0;

        if (gather->receives[peer] == MPI_REQUEST_NULL ||
            ep_process_look_once(&boot->ranks[peer].process) != EP_PROCESS_DEAD)
            continue;
        /* Its block may have arrived before its death. */
        EP_TRY(test_receive(gather, peer, &done));
        if (!done)
            return ep_fail(EP_E_PEER_DEAD, "bootstrap mpi: rank %d died before it arrived", peer);
    }
    return EP_OK;
}

static ep_status wait_for_blocks(const ep_boot_mpi *boot, struct gather *gather, uint64_t deadline_ns, int timeout_ms)
{
    uint64_t check_ns = ep_now_ns() + CHECK_NS;
    unsigned tries = 0;
    int missing, unsent;

    for (;;) {
        uint64_t now;

        EP_TRY(gather_test(gather, &missing, &unsent));
        now = ep_now_ns();
        if (missing && now >= deadline_ns)
            EP_TRY(take_arrived(gather, &missing));
        if (!missing)
            return EP_OK;
        if (now < check_ns && now < deadline_ns) {
            ep_backoff(&tries);
            continue;
        }
        /* Also at the deadline: if this rank was stopped meanwhile, this may be its first check. */
        EP_TRY(find_dead(boot, gather));
        if (now >= deadline_ns) {
            /* The missing block may have arrived just now. */
            EP_TRY(gather_test(gather, &missing, &unsent));
            return missing ? fail_late(gather, timeout_ms) : EP_OK;
        }
        check_ns = ep_now_ns() + CHECK_NS;
    }
}

static bool may_be_received(const ep_boot_mpi *boot, const struct gather *gather)
{
    for (int peer = 0; peer < gather->nranks; peer++)
        if (gather->sends[peer] != MPI_REQUEST_NULL &&
            ep_process_look_once(&boot->ranks[peer].process) != EP_PROCESS_DEAD)
            return true;
    return false;
}

/*
 * All blocks have arrived, so all ranks have called the all-gather, and it succeeds. MPI may need calls of this rank to
 * deliver its block, but a peer that was stopped after it had sent its own takes none: it is waited for no longer than
 * half of the deadline, because the others, to which MPI may have delivered sooner, wait for this rank already and must
 * not name it instead of that peer.
 */
static ep_status wait_for_sends(const ep_boot_mpi *boot, struct gather *gather, uint64_t deadline_ns, int timeout_ms)
{
    uint64_t half_ns = ep_deadline_ns(timeout_ms / 2), until_ns = half_ns < deadline_ns ? half_ns : deadline_ns, now;
    uint64_t check_ns = ep_now_ns() + CHECK_NS;
    unsigned tries = 0;
    int missing, unsent;

    for (;;) {
        EP_TRY(gather_test(gather, &missing, &unsent));
        now = ep_now_ns();
        if (!unsent || now >= until_ns || (now >= check_ns && !may_be_received(boot, gather)))
            return EP_OK;
        check_ns = now >= check_ns ? now + CHECK_NS : check_ns;
        ep_backoff(&tries);
    }
}

/* Cancels what MPI still holds, as far as possible. true: no request is left. */
static bool gather_cancel(struct gather *gather)
{
    int done = 0;

    for (int peer = 0; peer < gather->nranks; peer++)
        if (gather->receives[peer] != MPI_REQUEST_NULL)
            (void)EP_MPI(MPI_Cancel, (&gather->receives[peer]));
    for (int i = 0; i < 2 * gather->nranks; i++) {
        if (gather->requests[i] != MPI_REQUEST_NULL)
            (void)EP_MPI(MPI_Test, (&gather->requests[i], &done, MPI_STATUS_IGNORE));
        if (gather->requests[i] != MPI_REQUEST_NULL)
            return false;
    }
    return true;
}

/* Cancels what is left of earlier all-gathers, and frees those whose requests have completed. */
static void free_finished(ep_boot_mpi *boot)
{
    for (struct gather **at = &boot->unfinished; *at;) {
        struct gather *gather = *at;

        if (gather_cancel(gather)) {
            *at = gather->next;
            gather_free(gather);
        } else {
            at = &gather->next;
        }
    }
}

static ep_status allgather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    ep_boot_mpi *boot = context;
    struct gather *gather = NULL;
    uint64_t deadline_ns;
    int tag = (int)(boot->gathers % (uint32_t)boot->first_tag);
    char reason[EP_ERROR_TEXT_BYTES];
    ep_status status;

    if (boot->generation != ep_process_generation())
        return ep_fail(EP_E_STATE, "bootstrap mpi: this process is a forked child of the one that MPI started");
    if ((!mine || !ret_all) && bytes)
        return ep_fail(EP_E_ARG, "bootstrap mpi: all-gather of %zu bytes from or to NULL", bytes);
    if (timeout_ms < 0 || bytes > INT32_MAX)
        return ep_fail(EP_E_ARG, "bootstrap mpi: all-gather of %zu bytes with timeout_ms = %d", bytes, timeout_ms);
    free_finished(boot);
    EP_TRY(gather_new(boot->boot.rank, boot->boot.nranks, mine, bytes, &gather));
    boot->gathers++; /* also on failure, so that all ranks count alike */
    deadline_ns = ep_deadline_ns(timeout_ms);
    status = gather_start(gather, boot->comm, tag);
    if (status == EP_OK)
        status = wait_for_blocks(boot, gather, deadline_ns, timeout_ms);
    if (status == EP_OK)
        status = wait_for_sends(boot, gather, deadline_ns, timeout_ms);
    if (status == EP_OK && bytes)
        memcpy(ret_all, gather->blocks, (size_t)gather->nranks * bytes);
    snprintf(reason, sizeof(reason), "%s", ep_last_error());
    gather->next = boot->unfinished;
    boot->unfinished = gather;
    free_finished(boot);
    ep_fail(status, "%s", reason); /* cancelling may have set another reason */
    return status;
}

static ep_status init_comm(ep_boot_mpi *boot)
{
    int *upper, found = 0;

    EP_TRY(EP_MPI(MPI_Comm_set_errhandler, (boot->comm, MPI_ERRORS_RETURN)));
    EP_TRY(EP_MPI(MPI_Comm_rank, (boot->comm, &boot->boot.rank)));
    EP_TRY(EP_MPI(MPI_Comm_size, (boot->comm, &boot->boot.nranks)));
    EP_TRY(EP_MPI(MPI_Comm_get_attr, (boot->comm, MPI_TAG_UB, &upper, &found)));
    if (found) /* the standard promises at least 32767 */
        boot->first_tag = *upper / 2;
    boot->tag_blocks = (uint32_t)boot->first_tag / EP_NET_MAX_CHANNELS;
    if (boot->boot.nranks > EP_MAX_RANKS)
        return ep_fail(EP_E_ARG, "ep_boot_mpi_new: a communicator of %d ranks, at most %d", boot->boot.nranks,
                       EP_MAX_RANKS);
    return EP_OK;
}

/* MPI_Comm_dup has just synchronised all ranks, so no rank waits long. */
static ep_status exchange_ranks(ep_boot_mpi *boot)
{
    struct ep_mpi_rank mine;

    memset(&mine, 0, sizeof(mine));
    ep_process_get_self(&mine.process);
    ep_locality_get_self(&mine.locality);
    EP_TRY(EP_MPI(MPI_Allgather,
                  (&mine, (int)sizeof(mine), MPI_BYTE, boot->ranks, (int)sizeof(mine), MPI_BYTE, boot->comm)));
    boot->boot.ranks_per_node =
        ep_locality_find_nodes(&boot->ranks[0].locality, sizeof(boot->ranks[0]), boot->boot.nranks, NULL);
    return EP_OK;
}

ep_status ep_boot_mpi_new(MPI_Comm parent, ep_boot_mpi **ret_boot)
{
    struct ep_mpi_rank *ranks;
    ep_boot_mpi *boot;
    int inter = 0, nranks = 0;
    ep_status status;

    if (!ret_boot)
        return ep_fail(EP_E_ARG, "ep_boot_mpi_new: ret_boot is NULL");
    EP_TRY(ep_mpi_check("ep_boot_mpi_new"));
    if (parent == MPI_COMM_NULL)
        return ep_fail(EP_E_ARG, "ep_boot_mpi_new: parent is MPI_COMM_NULL");
    EP_TRY(EP_MPI(MPI_Comm_test_inter, (parent, &inter)));
    if (inter)
        return ep_fail(EP_E_ARG, "ep_boot_mpi_new: parent is an intercommunicator");
    EP_TRY(EP_MPI(MPI_Comm_size, (parent, &nranks)));
    /* After the first collective call nothing may fail on one rank only: the others would wait in the next call. */
    boot = malloc(sizeof(*boot));
    ranks = calloc((size_t)nranks, sizeof(*ranks));
    if (!boot || !ranks) {
        free(boot);
        free(ranks);
        return ep_fail(EP_E_MEMORY, "ep_boot_mpi_new: no memory for %d ranks", nranks);
    }
    *boot = (ep_boot_mpi){
        .boot = {.size = sizeof(boot->boot), .allgather = allgather, .context = boot, .network = &boot->network},
        .network = {.abi = EP_NET_ABI, .name = "mpi", .open = ep_net_mpi_open, .context = boot},
        .comm = MPI_COMM_NULL,
        .generation = ep_process_generation(),
        .ranks = ranks,
        .first_tag = 32767 / 2,
        .unit = MPI_DATATYPE_NULL,
    };
    status = EP_MPI(MPI_Comm_dup, (parent, &boot->comm));
    if (status == EP_OK)
        status = init_comm(boot);
    if (status == EP_OK)
        status = exchange_ranks(boot);
    if (status != EP_OK) {
        ep_boot_mpi_free(boot);
        return status;
    }
    *ret_boot = boot;
    return EP_OK;
}

const ep_boot *ep_boot_mpi_get(const ep_boot_mpi *boot)
{
    return boot ? &boot->boot : NULL;
}

/* Messages to an exited peer never complete: frees the requests; MPI keeps using the memory, which is leaked. */
static void release_requests(struct gather *gather)
{
    for (int i = 0; i < 2 * gather->nranks; i++)
        if (gather->requests[i] != MPI_REQUEST_NULL)
            (void)EP_MPI(MPI_Request_free, (&gather->requests[i]));
}

void ep_boot_mpi_free(ep_boot_mpi *boot)
{
    uint64_t deadline_ns = ep_deadline_ns(FREE_MS);
    unsigned tries = 0;

    if (!boot || boot->generation != ep_process_generation())
        return;
    if (ep_mpi_is_up()) {
        for (free_finished(boot); boot->unfinished && ep_now_ns() < deadline_ns; free_finished(boot))
            ep_backoff(&tries);
        for (struct gather *gather = boot->unfinished; gather; gather = gather->next)
            release_requests(gather);
        if (boot->unit != MPI_DATATYPE_NULL)
            (void)EP_MPI(MPI_Type_free, (&boot->unit));
        if (boot->comm != MPI_COMM_NULL)
            (void)EP_MPI(MPI_Comm_free, (&boot->comm));
    }
    free(boot->ranks);
    free(boot);
}

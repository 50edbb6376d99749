/* SPDX-License-Identifier: Apache-2.0 */
/* The first failure and the last error of a communicator, recorded by calls and workers. */
#include "base/log.h"
#include "core/check.h"

#include <stdio.h>
#include <string.h>

ep_status ep_comm_fail_forked(const char *call)
{
    return ep_fail(EP_E_STATE,
                   "%s: this process is a forked child of the one that created the communicator, and cannot use it: "
                   "create communicators after the fork",
                   call);
}

/* Replaces a fatal status by that of the first failure, with its reason if it has one. */
static ep_status repeat_first(ep_comm *comm, ep_status status)
{
    ep_status first = (ep_status)atomic_load(&comm->failed);

    if (first == EP_OK || first == status || !ep_status_is_fatal(status))
        return status;
    return ep_fail(first, "the communicator has failed before: %s",
                   comm->reason[0] ? comm->reason : ep_status_text(first));
}

ep_status ep_comm_resolve_status(ep_comm *comm, ep_status status)
{
    if (status == EP_OK)
        return status;
    pthread_mutex_lock(&comm->error_lock);
    status = repeat_first(comm, status);
    pthread_mutex_unlock(&comm->error_lock);
    return status;
}

ep_status ep_comm_record(ep_comm *comm, ep_status status)
{
    int none = EP_OK;
    bool fatal, first = false;

    if (status == EP_OK)
        return status;
    pthread_mutex_lock(&comm->error_lock);
    status = repeat_first(comm, status);
    /* A backend may fail the communicator with any status, by setting `failed` itself. */
    fatal = ep_status_is_fatal(status) || (ep_status)atomic_load(&comm->failed) == status;
    snprintf(comm->error, sizeof(comm->error), "%s", ep_last_error());
    if (fatal)
        atomic_compare_exchange_strong(&comm->failed, &none, (int)status);
    /* `failed` may have been set without a reason (ep_comm_abort() in a signal handler). */
    if (fatal && !comm->reason[0] && (ep_status)atomic_load(&comm->failed) == status)
        memcpy(comm->reason, comm->error, sizeof(comm->reason));
    first = fatal && !comm->logged;
    comm->logged |= fatal;
    pthread_mutex_unlock(&comm->error_lock);
    if (first)
        ep_log(EP_LOG_ERROR, "rank %d of %d: the communicator has failed: %s: %s", comm->rank, comm->nranks,
               ep_status_name(status), ep_last_error());
    return status;
}

void ep_comm_set_stats(ep_comm *comm, const ep_stats *stats)
{
    pthread_mutex_lock(&comm->error_lock);
    comm->stats = *stats;
    pthread_mutex_unlock(&comm->error_lock);
}

ep_status ep_comm_usable(ep_comm *comm, const char *call)
{
    ep_status failed = (ep_status)atomic_load(&comm->failed);
    char reason[EP_ERROR_TEXT_BYTES];

    if (failed == EP_OK)
        return EP_OK;
    pthread_mutex_lock(&comm->error_lock);
    memcpy(reason, comm->reason, sizeof(reason));
    pthread_mutex_unlock(&comm->error_lock);
    /* No reason: a signal handler or another thread of this rank has set `failed`, and the backend knows the first
     * failure. */
    if (!reason[0] && ep_comm_poll(comm) == failed)
        snprintf(reason, sizeof(reason), "%s", ep_last_error());
    else if (!reason[0] && failed == EP_E_ABORTED)
        return ep_fail(failed, "%s: rank %d, this one, called ep_comm_abort", call, comm->rank);
    return ep_fail(failed, "%s: the communicator has failed before: %s", call,
                   reason[0] ? reason : ep_status_text(failed));
}

static bool has_reason(ep_comm *comm)
{
    bool has;

    pthread_mutex_lock(&comm->error_lock);
    has = comm->reason[0] != '\0';
    pthread_mutex_unlock(&comm->error_lock);
    return has;
}

ep_status ep_comm_async_error(const ep_comm *comm)
{
    ep_comm *own = (ep_comm *)comm; /* recording a failure is no visible change */
    ep_status status = EP_OK;

    EP_CHECK_OWN(comm, comm);
    /* As the next call would. Also if a signal handler or another thread of this rank has set `failed` without a
     * reason. */
    if (atomic_load(&comm->failed) == EP_OK || !has_reason(own))
        status = ep_comm_record(own, ep_comm_poll(own));
    return status == EP_OK ? (ep_status)atomic_load(&comm->failed) : status;
}

const char *ep_comm_last_error(const ep_comm *comm)
{
    ep_comm *own = (ep_comm *)comm; /* the copy is no visible change */

    if (!comm)
        return "ep_comm_last_error: comm is NULL";
    if (!ep_comm_is_own(comm))
        return "ep_comm_last_error: this process is a forked child of the one that created the communicator";
    pthread_mutex_lock(&own->error_lock);
    memcpy(own->shown, own->error, sizeof(own->shown));
    pthread_mutex_unlock(&own->error_lock);
    return own->shown;
}

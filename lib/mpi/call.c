/* SPDX-License-Identifier: Apache-2.0 */
#include "mpi/call.h"

#include "base/process.h"

#include <pthread.h>
#include <stdatomic.h>

static pthread_mutex_t mpi_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int mpi_is_thread_safe; /* MPI_THREAD_MULTIPLE */
static _Thread_local int locked;       /* the thread level may be set while a call is in progress */

void ep_mpi_call_begin(void)
{
    locked = !atomic_load_explicit(&mpi_is_thread_safe, memory_order_relaxed);
    if (locked)
        pthread_mutex_lock(&mpi_lock);
}

ep_status ep_mpi_call_end(int code, const char *function)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0, kind = MPI_ERR_OTHER;

    if (code != MPI_SUCCESS) {
        MPI_Error_string(code, text, &length);
        MPI_Error_class(code, &kind);
    }
    if (locked)
        pthread_mutex_unlock(&mpi_lock);
    if (code == MPI_SUCCESS)
        return EP_OK;
    /* A message longer than the receiver expects: ranks disagree, MPI works. */
    return ep_fail(kind == MPI_ERR_TRUNCATE ? EP_E_MISMATCH : EP_E_SYSTEM, "%s: %s (error %d)", function, text, code);
}

int ep_mpi_is_up(void)
{
    int initialised = 0, finalised = 0;

    if (EP_MPI(MPI_Initialized, (&initialised)) != EP_OK || EP_MPI(MPI_Finalized, (&finalised)) != EP_OK)
        return 0;
    return initialised && !finalised;
}

ep_status ep_mpi_check(const char *caller)
{
    static _Atomic uint64_t first_generation;
    uint64_t none = 0, generation = ep_process_generation();
    int level;

    /* Before the lock, which another thread may have held when this process was forked. */
    if (!atomic_compare_exchange_strong(&first_generation, &none, generation) && none != generation)
        return ep_fail(EP_E_STATE, "%s: this process is a forked child of the one that used MPI", caller);
    if (!ep_mpi_is_up())
        return ep_fail(EP_E_STATE, "%s: MPI is not initialised, or finalised already", caller);
    EP_TRY(EP_MPI(MPI_Query_thread, (&level)));
    if (level < MPI_THREAD_SERIALIZED)
        return ep_fail(EP_E_UNSUPPORTED,
                       "%s: MPI was initialised for one thread; call MPI_Init_thread with MPI_THREAD_MULTIPLE, or "
                       "MPI_THREAD_SERIALIZED at least",
                       caller);
    if (level == MPI_THREAD_MULTIPLE)
        atomic_store_explicit(&mpi_is_thread_safe, 1, memory_order_relaxed);
    return EP_OK;
}

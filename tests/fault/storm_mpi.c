/* SPDX-License-Identifier: Apache-2.0 */
/*
 * storm_mpi TABLE - a rank of a storm that mpirun starts.
 *
 * MPI_Init and MPI_Finalize wait for mpirun and for the other ranks without a deadline, and the program calls them, not
 * epkit. If mpirun has died meanwhile, that wait may never end: then this rank exits, and records in the table in which
 * of the two it was and with which stack, so that the storm counts it. A wait with epkit on its stack is not one of
 * MPI: it continues, and the storm finds a process that is left.
 */
#include "storm.h"

#include <dlfcn.h>
#include <epkit/mpi.h>
#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

enum {
    LOOK_SECONDS = 1,
    ORPHAN_SECONDS = 10, /* without its launcher: Open MPI's own monitoring of mpirun ends most ranks within one */
    MOST_FRAMES = 24,
    CODE_ORPHAN = 75
};

/* For the handler of SIGALRM, which runs on the main thread. */
static struct {
    struct storm_table *table;
    const char *call; /* NULL: not in MPI */
    int rank, launcher, seconds;
    pid_t thread;
} watch = {.rank = -1};

/* "MPI_Finalize < PMPI_Finalize < ..."; false: epkit is on the stack. */
static bool describe_stack(char *ret_text, size_t bytes)
{
    void *frames[MOST_FRAMES];
    int n = backtrace(frames, MOST_FRAMES);
    size_t used = (size_t)snprintf(ret_text, bytes, "%s of rank %d:", watch.call, watch.rank);
    bool own = false;

    for (int i = 2; i < n; i++) { /* after this function and the handler */
        Dl_info info = {0};

        if (!dladdr(frames[i], &info) || !info.dli_fname)
            continue;
        own = own || strstr(info.dli_fname, "libepkit");
        if (used < bytes)
            used += (size_t)snprintf(ret_text + used, bytes - used, " %s", info.dli_sname ? info.dli_sname : "?");
    }
    return !own;
}

static void on_alarm(int number)
{
    (void)number;
    if ((pid_t)syscall(SYS_gettid) != watch.thread) {
        syscall(SYS_tgkill, getpid(), watch.thread, SIGALRM);
        return;
    }
    watch.seconds = watch.call && getppid() != watch.launcher ? watch.seconds + LOOK_SECONDS : 0;
    if (watch.seconds < ORPHAN_SECONDS)
        return;
    watch.seconds = 0;
    if (!describe_stack(watch.table->orphan_stack, sizeof(watch.table->orphan_stack)))
        return;
    atomic_fetch_add(&watch.table->orphans, 1);
    _exit(CODE_ORPHAN);
}

static void begin_watch(struct storm_table *table)
{
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    const struct itimerval period = {.it_interval.tv_sec = LOOK_SECONDS, .it_value.tv_sec = LOOK_SECONDS};
    void *frame;

    watch.table = table;
    watch.launcher = (int)getppid();
    watch.thread = (pid_t)syscall(SYS_gettid);
    (void)backtrace(&frame, 1); /* loads its library, which a handler may not */
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &period, NULL);
}

static bool start_mpi(int *argc, char ***argv, ep_boot_mpi **ret_boot)
{
    int provided, error;

    watch.call = "MPI_Init_thread";
    error = MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided);
    watch.call = NULL;
    return error == MPI_SUCCESS && ep_boot_mpi_new(MPI_COMM_WORLD, ret_boot) == EP_OK;
}

int main(int argc, char **argv)
{
    struct storm_table *table;
    ep_boot_mpi *boot;
    int fd = argc == 2 ? open(argv[1], O_RDWR | O_CLOEXEC) : -1, rank;

    if (fd < 0) {
        fputs("Usage: storm_mpi TABLE (started by storm)\n", stderr);
        return 2;
    }
    table = mmap(NULL, sizeof(*table), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (table == MAP_FAILED)
        return 1;
    begin_watch(table);
    if (!start_mpi(&argc, &argv, &boot))
        return 1;
    watch.rank = rank = ep_boot_mpi_get(boot)->rank;
    storm_rank(ep_boot_mpi_get(boot), table);
    atomic_store(&table->ranks[rank].call, CALL_FINALIZE);
    ep_boot_mpi_free(boot);
    watch.call = "MPI_Finalize";
    MPI_Finalize();
    watch.call = NULL;
    atomic_store(&table->ranks[rank].call, CALL_NONE);
    return 0;
}

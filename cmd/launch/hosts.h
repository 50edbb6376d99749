/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hosts.h - the hosts that a command runs on: lists, hostfiles, Slurm's ranges, and the environment of schedulers
 * (JobSet, LeaderWorkerSet, Indexed Job, Slurm, MPI).
 *
 * Functions that return ep_status record the reason with ep_fail(); EP_E_ARG is an error in the caller's input.
 */
#ifndef EP_LAUNCH_HOSTS_H
#define EP_LAUNCH_HOSTS_H

#include <epkit/status.h>

#include <stdbool.h>

#define HOSTS_MAX 4096

/* Where the launcher of the GKE testbed stores the hosts of a job: with 8 slots each, and with 1 slot each. */
#define HOSTS_FILE "/etc/job-worker-services.txt"
#define HOSTS_FILE_1_SLOT "/tmp/hostfile-1pernode.txt"

struct host {
    char word[256];   /* as given, printable */
    char target[256]; /* [USER@]HOST, what ssh gets */
    char port[8];     /* "": the default */
    int slots;        /* of its hostfile; 0: not given */
    int line;         /* of the hostfile, 0: none */
};

struct hosts {
    int n, capacity;
    struct host *list;
};

void hosts_done(struct hosts *hosts);

/* HOST of [USER@]HOST. */
const char *host_name(const struct host *host);

/*
 * Adds the hosts of a list, separated by commas or spaces, with ranges as Slurm writes them ("gpu[01-04,7],login").
 * `what` names the list in errors. A duplicate host is an error.
 */
ep_status hosts_add_list(const char *what, const char *list, struct hosts *hosts);

enum hosts_format {
    HOSTS_OPEN_MPI, /* "HOST slots=8"; a duplicate host is an error */
    HOSTS_REPEATED  /* each line is one slot of its host, as in the files of PBS and LSF */
};

/* Adds the hosts of a file: one a line; '#' begins a comment. */
ep_status hosts_add_file(const char *file, enum hosts_format format, struct hosts *hosts);

/* Where the hosts come from, by the environment. */
struct hosts_source {
    char text[160]; /* "Slurm job 17", "JobSet demo", "/etc/job-worker-services.txt" */
    int index;      /* index of this pod or task among those that run the same command; -1: it runs once */
    bool is_pods;   /* pods start one after the other: their names resolve late */
};

/*
 * The hosts that the environment describes, from the first available source: JobSet, LeaderWorkerSet, Indexed Job,
 * Slurm, MPI (hostfiles of Open MPI, PBS, LSF), HOSTS_FILE. EP_E_STATE when there is no source.
 */
ep_status hosts_discover(struct hosts *ret_hosts, struct hosts_source *ret_source);

/*
 * Writes a hostfile atomically: writes a temporary file next to it and renames that. `slots` per host (0: without). A
 * symbolic link at `path` is replaced, not followed.
 */
ep_status hosts_write(const char *path, const struct hosts *hosts, int slots);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* folder.h - reads the folder of a run (docs/run-folder.md). Does not follow links in it, neither to files nor to
 * folders. */
#ifndef EP_REPORT_FOLDER_H
#define EP_REPORT_FOLDER_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

struct folder_file {
    char *path;
    int dir;        /* the folder that it is in, borrowed: it is opened there by its name, text_base(path) */
    char host[128]; /* "coordinator", a host's name, or the name of the file */
};

struct folder {
    char *path;  /* as given */
    char *base;  /* where run.json is, or would be */
    json_t *run; /* run.json; NULL: missing or unreadable (run_error has the reason) */
    char run_error[200];
    struct folder_file *files; /* logs, sorted by name; coordinator.log first. NULL: none */
    size_t n_files;
    int dirs[3]; /* base, its pod-logs, path; -1: not there */
};

/* false: ret_error says why. runfolder_free() accepts NULL. */
bool runfolder_open(const char *path, struct folder **ret_folder, char *ret_error, size_t bytes);
void runfolder_free(struct folder *folder);

/*
 * The NICs of a host of run.json, with the share of each of the mean of the others: {"host", "bytes", "uneven", "nics":
 * [{"device", "tx_bytes", "rx_bytes", "share", "uneven"}]}. *ret_uneven grows by those that carried much less.
 */
json_t *runfolder_balance(const char *host, const json_t *nics, int *ret_uneven);

/* A JSON file of at most 64 MiB in the folder `dir`, or NULL with the reason. */
json_t *runfolder_load_json(int dir, const char *name, char *ret_error, size_t bytes);

#endif

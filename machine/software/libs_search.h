/* SPDX-License-Identifier: Apache-2.0 */
/* libs_search.h - internal to libs*.c: the folders that ld.so searches, in order. */
#ifndef EP_SOFTWARE_LIBS_SEARCH_H
#define EP_SOFTWARE_LIBS_SEARCH_H

#include "libs.h"

#define LIBS_MAX_FOLDERS 256 /* per search; further folders are ignored */

struct libs_folder {
    const char *path, *found_by;
};

/* Without duplicates, and without folders that are known not to exist. */
struct libs_list {
    size_t n;
    struct libs_folder folders[LIBS_MAX_FOLDERS];
};

void libs_list_add(struct source *source, struct libs_list *list, const char *path, const char *found_by);

/*
 * Adds the folders of a list that is separated by any of `separators`, with $ORIGIN expanded;
 * `origin` is NULL if it is not known. Relative folders are left out: they depend on the current folder of the process.
 */
void libs_list_split(struct source *source, struct libs_list *list, const char *text, const char *separators,
                     const char *origin, const char *found_by);

/* Adds the folders of /etc/ld.so.conf, then the default folders. */
void libs_list_system(struct source *source, struct libs_list *list);

/* Adds the folders of /etc/ld.so.conf and of the files that it includes (libs_conf.c). */
void libs_conf_read(struct source *source, struct libs_list *list);

/* Expands $ORIGIN and removes trailing slashes. NULL if $ORIGIN is not known or the result is too long. */
const char *libs_expand(struct source *source, const char *text, size_t n, const char *origin);

/*
 * Is there a library at `path` for `machine` (0: any)? If false, ld.so continues its search. *location is set in both
 * cases: if a snapshot does not contain the file, SOURCE_ABSENT becomes SOURCE_NOT_RECORDED.
 */
bool libs_try(struct source *source, const char *path, int machine, const char *found_by,
              struct lib_location *location);

/* Tries the folders of a list in turn. */
bool libs_try_list(struct source *source, const struct libs_list *list, const char *name, int machine,
                   struct lib_location *location);

/* The location of a library that was not found. */
struct lib_location libs_not_found(void);

/* The next name in LD_PRELOAD, which is separated by spaces and colons. Returns false at the end. */
bool libs_next_preload(struct source *source, const char **at, const char **ret_name);

#endif

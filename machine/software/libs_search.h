/* SPDX-License-Identifier: Apache-2.0 */
/* libs_search.h - inside of libs*.c: the folders that ld.so searches, in their order. */
#ifndef EP_STACK_LIBS_SEARCH_H
#define EP_STACK_LIBS_SEARCH_H

#include "software/libs.h"

#define LIBS_MAX_FOLDERS 256 /* of one search; a machine that names more is cut there */

struct libs_folder {
    const char *path, *found_by;
};

/* Each folder once, and only those that may be there. */
struct libs_list {
    size_t n;
    struct libs_folder folders[LIBS_MAX_FOLDERS];
};

void libs_list_add(struct root *root, struct libs_list *list, const char *path, const char *found_by);

/*
 * Adds the folders of a list in which one of `separators` divides them, with $ORIGIN, $LIB and $PLATFORM expanded;
 * `origin` is NULL where nobody knows it. Folders that are not absolute depend on where a process stands: left out.
 */
void libs_list_split(struct root *root, struct libs_list *list, const char *text, const char *separators,
                     const char *origin, const char *found_by);

/* Adds what /etc/ld.so.conf names, then the default folders. */
void libs_list_system(struct root *root, struct libs_list *list);

/* Adds what /etc/ld.so.conf and the files that it includes name (libs_conf.c). */
void libs_conf_read(struct root *root, struct libs_list *list);

/* A line of ld.so.conf that says something. */
struct libs_conf_line {
    bool is_include;
    const char *text; /* a folder, or the patterns of an include line */
    size_t n;
};

/* The next such line of a text; *at moves behind it. False at the end. */
bool libs_conf_next(const char **at, struct libs_conf_line *ret_line);

/* `text` with $ORIGIN, $LIB, $PLATFORM expanded and no slash at the end; NULL if $ORIGIN is not known or it is too
 * long. */
const char *libs_expand(struct root *root, const char *text, size_t n, const char *origin);

/* The folder that holds `path`. */
const char *libs_folder_of(struct root *root, const char *path);

/*
 * Is there a library at `path` that a program for `machine` (0: any) can take? False: ld.so goes on searching. *place
 * is set in both cases: a snapshot that does not say turns ROOT_ABSENT into ROOT_UNASKED.
 */
bool libs_try(struct root *root, const char *path, int machine, const char *found_by, struct lib_place *place);

/* Tries the folders of a list in turn. */
bool libs_try_list(struct root *root, const struct libs_list *list, const char *name, int machine,
                   struct lib_place *place);

/* A place that is nowhere. */
struct lib_place libs_nowhere(void);

/* The next name in LD_PRELOAD, which spaces and colons divide. False at the end. */
bool libs_next_preload(struct root *root, const char **at, const char **ret_name);

#endif

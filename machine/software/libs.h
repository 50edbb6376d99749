/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libs.h - which file the dynamic linker would take for a library, without loading anything.
 *
 * The order is that of ld.so(8): LD_PRELOAD; then for each NEEDED name the RPATH of those that need it (unless they
 * have a RUNPATH), LD_LIBRARY_PATH, RUNPATH, /etc/ld.so.conf (standing for the cache, which is built from it), and
 * the default folders. $ORIGIN and $LIB are expanded.
 */
#ifndef EP_STACK_LIBS_H
#define EP_STACK_LIBS_H

#include "source/root.h"

/* What a search is made under. Strings are borrowed. */
struct libs_setting {
    const char *library_path; /* LD_LIBRARY_PATH, "" if not set */
    const char *preload;      /* LD_PRELOAD */
};

/* That of the process which the root looks at. */
struct libs_setting libs_setting_of(struct root *root);

struct lib_place {
    enum root_state state; /* ROOT_ABSENT: nowhere. ROOT_FAILED: at `path`, but damaged, which ends ld.so's search.
                              ROOT_UNASKED: a snapshot that does not say */
    const char *path;      /* as found: a folder of the search and the name */
    const char *real;      /* with links followed */
    const char *found_by;  /* "LD_LIBRARY_PATH", "RUNPATH of /opt/x/libfoo.so", "/etc/ld.so.conf", "default folder",
                              "LD_PRELOAD" */
};

/* Where the linker finds `name` when a program without paths of its own needs it or opens it by dlopen(). */
struct lib_place libs_find(struct root *root, const struct libs_setting *setting, const char *name);

/* The folders that are searched, in their order, each once, those that exist. */
struct root_names libs_folders(struct root *root, const struct libs_setting *setting);

struct lib {
    struct lib_place place;
    const char *name; /* as it is needed */
    int needed_by;    /* index of the first that needs it; -1: the start */
};

/* A needed version that the library which was found does not define. */
struct lib_version_gap {
    int user, provider; /* indices */
    const char *version;
};

#define LIBS_MAX 512
#define LIBS_MAX_GAPS 256

/* Everything that loading one file brings along, breadth first as ld.so loads. */
struct libs_closure {
    int n, n_gaps;
    struct lib libs[LIBS_MAX];
    struct lib_version_gap gaps[LIBS_MAX_GAPS];
    int first_missing; /* index of the first that is nowhere, -1 if none */
    bool cut;          /* more than LIBS_MAX libraries */
};

ep_status libs_load(struct root *root, const struct libs_setting *setting, const char *path,
                    struct libs_closure **ret_closure);
void libs_closure_free(struct libs_closure *closure);

/* Index of the library whose file name is `soname` (or soname with ".something"), -1 if it is not among them. */
int libs_closure_find(const struct libs_closure *closure, const char *soname);

/* Files that the process which the root looks at has mapped (/proc/self/maps) with `part` in their base name. */
struct root_names libs_mapped(struct root *root, const char *part);

/* "580.126.09" of "/usr/lib/libcuda.so.580.126.09"; "" of a stub, and of a file that has its soname alone. */
const char *libs_file_version(const char *path);

/*
 * Compares version texts number by number ("3.5.19-1" > "3.5.9", "6.14.0-1021-gcp" > "6.8"): <0, 0, >0.
 */
int libs_version_compare(const char *a, const char *b);

#endif

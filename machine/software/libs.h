/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libs.h - which file the dynamic linker would load for a library, without loading anything.
 *
 * The order is that of ld.so(8): LD_PRELOAD; then for each NEEDED name the RPATH of the libraries that need it (unless
 * they have a RUNPATH), LD_LIBRARY_PATH, RUNPATH, /etc/ld.so.conf (in place of the cache, which is built from it), and
 * the default folders. $ORIGIN is expanded.
 */
#ifndef EP_SOFTWARE_LIBS_H
#define EP_SOFTWARE_LIBS_H

#include "machine/source/source.h"

/* The environment of a search. Strings are borrowed. */
struct libs_env {
    const char *library_path; /* LD_LIBRARY_PATH, "" if not set */
    const char *preload;      /* LD_PRELOAD */
};

/* The environment of the inspected process. */
struct libs_env libs_env_of(struct source *source);

struct lib_location {
    enum source_state state; /* SOURCE_ABSENT: not found. SOURCE_FAILED: found at `path`, but damaged, which ends
                                ld.so's search. SOURCE_NOT_RECORDED: not in the snapshot */
    const char *path;        /* as found: a folder of the search path and the name */
    const char *real;        /* with symbolic links resolved */
    const char *found_by;    /* "LD_LIBRARY_PATH", "RUNPATH of /opt/x/libfoo.so", "/etc/ld.so.conf", "default folder",
                                "LD_PRELOAD" */
};

/* Finds `name` as the linker does for a program without RPATH or RUNPATH that needs it or opens it with dlopen(). */
struct lib_location libs_find(struct source *source, const struct libs_env *env, const char *name);

struct lib {
    struct lib_location location;
    const char *name;   /* as in NEEDED */
    const char *soname; /* "" without one */
    int needed_by;      /* index of the first library that needs it; -1: the file that is loaded */
};

/* A symbol version that is needed and that the library found does not define. */
struct lib_version_gap {
    int user, provider; /* indices */
    const char *version;
};

#define LIBS_MAX 512
#define LIBS_MAX_GAPS 256

/* All libraries that loading one file loads, breadth first as ld.so does. */
struct libs_closure {
    int n, n_gaps;
    struct lib libs[LIBS_MAX];
    struct lib_version_gap gaps[LIBS_MAX_GAPS];
    int first_missing; /* index of the first library that was not found, -1 if all were */
    bool cut;          /* more than LIBS_MAX libraries */
};

struct libs_closure *libs_load(struct source *source, const struct libs_env *env, const char *path);

/* Index of the library with the file name `soname` (or `soname` followed by ".something"), -1 if it is not loaded. */
int libs_closure_find(const struct libs_closure *closure, const char *soname);

/* Where that library is, if loading the file at `path` ("" none) loads it; otherwise `other`. */
struct lib_location libs_loaded_with(struct source *source, struct libs_env env, const char *path, const char *soname,
                                     struct lib_location other);

/* Files with `part` in their base name that the inspected process has mapped (/proc/self/maps). */
struct source_names libs_mapped(struct source *source, const char *part);

/* "580.126.09" of "/usr/lib/libcuda.so.580.126.09"; "" for a stub, and with the ABI number alone. */
const char *libs_file_version(const char *path);

/* The folder that holds `path`. */
const char *libs_folder_of(struct source *source, const char *path);

/* Expands $ORIGIN and removes trailing slashes. NULL if $ORIGIN is not known or the result is too long. */
const char *libs_expand(struct source *source, const char *text, size_t n, const char *origin);

#endif

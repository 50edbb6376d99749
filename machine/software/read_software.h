/* SPDX-License-Identifier: Apache-2.0 */
/* read_software.h - internal to software_read(): a function for each component, in the order of the calls. */
#ifndef EP_MACHINE_SOFTWARE_READ_SOFTWARE_H
#define EP_MACHINE_SOFTWARE_READ_SOFTWARE_H

#include "software.h"

void software_read_driver(struct source *source, const struct topo *topo, struct software_driver *driver);
void software_read_verbs(struct source *source, struct software_verbs *verbs);

/* Python's search path as far as it can be determined from files, then the folders where install scripts put DeepEP. */
#define PYTHON_MAX_FOLDERS 128

struct python_folder {
    const char *path;
    bool on_path;
};

struct python {
    size_t n;
    struct python_folder folders[PYTHON_MAX_FOLDERS];
};

void software_read_python(struct source *source, struct python *python);

void software_read_deepep(struct source *source, const struct python *python, struct software_deepep *deepep);
/* Call after software_read_deepep(): NVSHMEM may be found through DeepEP's extension. */
void software_read_nvshmem(struct source *source, const struct python *python, const struct software_deepep *deepep,
                           struct software_nvshmem *nvshmem);
void software_read_nccl(struct source *source, const struct topo *topo, const struct python *python,
                        struct software_nccl *nccl);

/* Call when everything else of Python is known. */
void software_read_stacks(const struct python *python, struct software *software);

/* Call when `nccl->gib` is set. */
void software_read_gib(struct source *source, struct software_nccl *nccl);

/* The first file `name` (which may contain folders) below a folder of Python's path; "" if there is none. */
const char *python_find(struct source *source, const struct python *python, const char *name);

/* The version of the package `name` (as in its .dist-info or .egg-info) in `folder`; "" if not known. */
const char *python_version(struct source *source, const char *folder, const char *name);

/* `path` without the suffix `end`; "" if it does not end so, or consists of it. */
const char *software_without(struct source *source, const char *path, const char *end);

/* The first name in a folder that begins with `prefix`; "" if there is none. */
const char *software_first_with(struct source *source, const char *folder, const char *prefix);

#endif

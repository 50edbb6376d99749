/* SPDX-License-Identifier: Apache-2.0 */
/* read.h - inside of stack_read(): one function for each subject, in the order in which they are called. */
#ifndef EP_STACK_READ_H
#define EP_STACK_READ_H

#include "software/stack.h"

void stack_read_driver(struct root *root, const struct topo *topo, struct stack_driver *driver);
void stack_read_verbs(struct root *root, struct stack_verbs *verbs);

/* Where Python looks for packages, in its order as far as files tell, then where installers put DeepEP. */
#define PYTHON_MAX_FOLDERS 128

struct python_folder {
    const char *path;
    bool on_path;
};

struct python {
    size_t n;
    struct python_folder folders[PYTHON_MAX_FOLDERS];
};

void stack_read_python(struct root *root, struct python *python);

void stack_read_deepep(struct root *root, const struct python *python, struct stack_deepep *deepep);
/* After DeepEP: its extension may be what leads to NVSHMEM. */
void stack_read_nvshmem(struct root *root, const struct python *python, const struct stack_deepep *deepep,
                        struct stack_nvshmem *nvshmem);
void stack_read_nccl(struct root *root, const struct topo *topo, const struct python *python, struct stack_nccl *nccl);

/* After `gib` is known. */
void stack_read_gib(struct root *root, struct stack_nccl *nccl);

/* The first file `name` (with folders in front) below a folder of Python; "" none. */
const char *python_find(struct root *root, const struct python *python, const char *name);

/* The version of the package `name` (as in its .dist-info or .egg-info) that lies in `folder`; "" not known. */
const char *python_version(struct root *root, const char *folder, const char *name);

/*
 * Version of the library at `path`: "3.5.19" of libx.so.3.5.19, which `real` leads to; "" when its name does not tell.
 */
const char *stack_name_version(struct root *root, const char *real);

/* `path` without this end; "" if it has another one, or nothing else. */
const char *stack_without(struct root *root, const char *path, const char *end);

/* The first name in a folder that begins with `prefix`; "" none. */
const char *stack_first_with(struct root *root, const char *folder, const char *prefix);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * os.h - the operating system around a process, as far as the words of a remedy depend on it.
 *
 * A command that is right on Ubuntu is missing on RHEL, has no lasting effect on Container-Optimized OS, and changes an
 * image instead of the node inside a container. Checks take such commands from here.
 */
#ifndef EP_STACK_OS_H
#define EP_STACK_OS_H

#include "source/root.h"

enum os_family {
    OS_OTHER,
    OS_DEBIAN, /* Debian, Ubuntu and what says ID_LIKE=debian */
    OS_RHEL,   /* RHEL, Fedora, Rocky and what says ID_LIKE=rhel or fedora */
    OS_COS,    /* Container-Optimized OS: the system is read-only, drivers come from its installer */
    OS_SUSE,   /* SLES, openSUSE */
    OS_OSTREE, /* RHEL CoreOS, Fedora CoreOS: the system is an image, the driver comes from a container */
    OS_FAMILIES
};

/* In a container the family is that of the image, which tells nothing about the node below it. */
struct os {
    enum os_family family;
    bool in_container;
};

/* From os-release(5), and from the marks that container runtimes leave. Part of stack_read() as stack->os. */
void os_read(struct root *root, struct os *ret_os);

/* Do programs of users run in containers alone, this one or those that the node is made for? */
bool os_is_for_containers(const struct os *os);

/* What the driver brings along, by the name to call it by: "nvidia-smi". */
const char *os_driver_program(struct root *root, const struct os *os, const char *name);

/* The command that builds the initramfs of the running kernel anew; "" in a container and where there is none. */
const char *os_initramfs(const struct os *os);

/*
 * The command that installs a package, by its names in the two families; "" for other systems, and for an empty name.
 * Also in a container, where it changes the container.
 */
const char *os_install(struct root *root, const struct os *os, const char *debian, const char *rhel);

/* How an argument of the kernel is added or taken away, as a sentence; up to the reboot that brings it into effect. */
const char *os_kernel_argument(struct root *root, const struct os *os, bool add, const char *argument);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * os.h - the operating system of a process, as far as suggested commands depend on it.
 *
 * A command that is right on Ubuntu does not exist on RHEL, has no lasting effect on Container-Optimized OS, and inside
 * a container changes the image instead of the node. Checks get such commands from here.
 */
#ifndef EP_SOFTWARE_OS_H
#define EP_SOFTWARE_OS_H

#include "machine/source/source.h"

enum os_family {
    OS_OTHER,
    OS_DEBIAN, /* Debian, Ubuntu and systems with ID_LIKE=debian */
    OS_RHEL,   /* RHEL, Fedora, Rocky and systems with ID_LIKE=rhel or fedora */
    OS_COS,    /* Container-Optimized OS: the system is read-only, drivers come from its installer */
    OS_SUSE,   /* SLES, openSUSE */
    OS_OSTREE, /* RHEL CoreOS, Fedora CoreOS: the system is an image, the driver comes from a container */
    OS_FAMILIES
};

/* In a container, `family` is that of the image and says nothing about the node. */
struct os {
    enum os_family family;
    bool in_container;
    bool is_netbooted;  /* kernel, initramfs and perhaps the system come from a server at each boot */
    const char *loader; /* where a boot loader other than GRUB has the kernel's arguments; "" GRUB, or not known */
};

/* Reads os-release(5) and the markers of container runtimes. software_read() calls it for software->os. */
void os_read(struct source *source, struct os *ret_os);

/* The command for a program of the driver such as "nvidia-smi", with its path where needed. */
const char *os_driver_program(struct source *source, const struct os *os, const char *name);

/* The command that rebuilds the initramfs of the running kernel; "" in a container and on systems without one. */
const char *os_initramfs(const struct os *os);

/* The command that installs a package, by its names in the two families; "" for other systems or an empty name. */
const char *os_install(struct source *source, const struct os *os, const char *debian, const char *rhel);

/* A sentence that says how to add or remove a kernel argument, up to the reboot that makes it effective. */
const char *os_kernel_argument(struct source *source, const struct os *os, bool add, const char *argument);

#endif

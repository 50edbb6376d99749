/* SPDX-License-Identifier: Apache-2.0 */
#include "base/shm.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/*
 * Segments mapped by their owner in this process. Ranks that are threads of one process share the owner's mapping, for
 * two reasons: half the page tables, and ThreadSanitizer sees accesses of all ranks at one address.
 */
struct local_segment {
    struct local_segment *next;
    uint64_t serial;
    void *base;
    size_t mapped;
    int refs;
};

static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static struct local_segment *registry;
static uint64_t next_serial = 1;

static size_t mapped_bytes(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);

    return bytes ? (bytes + page - 1) / page * page : page;
}

static ep_status map_fd(int fd, size_t mapped, void **ret_base)
{
    void *base = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (base == MAP_FAILED)
        return ep_fail_errno(errno == ENOMEM ? EP_E_MEMORY : EP_E_SYSTEM, errno, "shared memory: mmap of %zu bytes",
                             mapped);
    *ret_base = base;
    return EP_OK;
}

static ep_status register_local(void *base, size_t mapped, uint64_t *ret_serial)
{
    struct local_segment *segment = malloc(sizeof(*segment));

    if (!segment)
        return ep_fail(EP_E_MEMORY, "shared memory: no memory for the registry");
    pthread_mutex_lock(&registry_lock);
    *segment =
        (struct local_segment){.next = registry, .serial = next_serial++, .base = base, .mapped = mapped, .refs = 1};
    registry = segment;
    *ret_serial = segment->serial;
    pthread_mutex_unlock(&registry_lock);
    return EP_OK;
}

ep_status ep_shm_new(size_t bytes, struct ep_shm *ret_shm)
{
    struct ep_shm shm = {.bytes = bytes};
    size_t mapped = mapped_bytes(bytes);
    ep_status status;

    if (mapped < bytes || mapped > (size_t)INT64_MAX)
        return ep_fail(EP_E_OVERFLOW, "shared memory: %zu bytes", bytes);
    shm.fd = memfd_create("epkit", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (shm.fd < 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "shared memory: memfd_create");
    if (ftruncate(shm.fd, (off_t)mapped) != 0) {
        status = ep_fail_errno(EP_E_MEMORY, errno, "shared memory: ftruncate to %zu bytes", mapped);
        goto close_fd;
    }
    /* Peers rely on its size. */
    if (fcntl(shm.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
        status = ep_fail_errno(EP_E_SYSTEM, errno, "shared memory: F_ADD_SEALS");
        goto close_fd;
    }
    status = map_fd(shm.fd, mapped, &shm.base);
    if (status != EP_OK)
        goto close_fd;
    status = register_local(shm.base, mapped, &shm.serial);
    if (status != EP_OK)
        goto unmap;
    *ret_shm = shm;
    return EP_OK;
unmap:
    munmap(shm.base, mapped);
close_fd:
    close(shm.fd);
    return status;
}

ep_status ep_shm_get_name(const struct ep_shm *shm, struct ep_shm_name *ret_name)
{
    struct stat info;

    if (fstat(shm->fd, &info) != 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "shared memory: fstat of descriptor %d", shm->fd);
    memset(ret_name, 0, sizeof(*ret_name));
    ret_name->pid = (int32_t)getpid();
    ret_name->fd = shm->fd;
    ret_name->inode = (uint64_t)info.st_ino;
    ret_name->serial = shm->serial;
    ret_name->bytes = shm->bytes;
    return EP_OK;
}

static int borrow_local(const struct ep_shm_name *name, struct ep_shm *ret_shm)
{
    int found = 0;

    if (name->pid != (int32_t)getpid())
        return 0;
    pthread_mutex_lock(&registry_lock);
    for (struct local_segment *segment = registry; segment; segment = segment->next) {
        if (segment->serial != name->serial || segment->mapped < name->bytes)
            continue;
        segment->refs++;
        *ret_shm = (struct ep_shm){.base = segment->base, .bytes = name->bytes, .serial = segment->serial, .fd = -1};
        found = 1;
        break;
    }
    pthread_mutex_unlock(&registry_lock);
    return found;
}

ep_status ep_shm_attach(const struct ep_shm_name *name, struct ep_shm *ret_shm)
{
    struct ep_shm shm = {.bytes = name->bytes, .fd = -1};
    char path[64];
    struct stat info;
    ep_status status;
    int fd, seals;

    if (borrow_local(name, ret_shm))
        return EP_OK;
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", name->pid, name->fd);
    fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return ep_fail_errno(errno == ENOENT || errno == ESRCH ? EP_E_PEER_DEAD : EP_E_SYSTEM, errno,
                             "shared memory: open %s of a peer (same host, user and PID namespace are needed)", path);
    if (fstat(fd, &info) != 0 || (uint64_t)info.st_ino != name->inode) {
        status =
            ep_fail(EP_E_PEER_DEAD, "shared memory: %s is another file now: process %d ended and its number was reused",
                    path, name->pid);
        goto close_fd;
    }
    /* Memory behind the end of a file, or that its owner may cut off, is SIGBUS for who touches it. */
    seals = fcntl(fd, F_GET_SEALS);
    if (name->bytes > (uint64_t)info.st_size || seals < 0 || !(seals & F_SEAL_SHRINK)) {
        status = ep_fail(EP_E_MISMATCH, "shared memory: %s has %lld bytes%s, but its owner says %llu", path,
                         (long long)info.st_size, seals >= 0 && seals & F_SEAL_SHRINK ? "" : " that may be cut off",
                         (unsigned long long)name->bytes);
        goto close_fd;
    }
    status = map_fd(fd, mapped_bytes(name->bytes), &shm.base);
    if (status == EP_OK)
        *ret_shm = shm;
close_fd:
    close(fd);
    return status;
}

static void release_local(uint64_t serial)
{
    struct local_segment *gone = NULL;

    pthread_mutex_lock(&registry_lock);
    for (struct local_segment **at = &registry; *at; at = &(*at)->next) {
        if ((*at)->serial != serial)
            continue;
        if (--(*at)->refs == 0) {
            gone = *at;
            *at = gone->next;
        }
        break;
    }
    pthread_mutex_unlock(&registry_lock);
    if (gone) {
        munmap(gone->base, gone->mapped);
        free(gone);
    }
}

void ep_shm_done(struct ep_shm *shm)
{
    if (!shm->base)
        return;
    if (shm->serial)
        release_local(shm->serial);
    else
        munmap(shm->base, mapped_bytes(shm->bytes));
    if (shm->fd >= 0)
        close(shm->fd);
    *shm = (struct ep_shm){.fd = -1};
}

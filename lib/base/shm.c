/* SPDX-License-Identifier: Apache-2.0 */
#include "base/shm.h"

#include "base/fd.h"
#include "base/reserve.h"
#include "base/segments.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

static ep_status fail_size(const struct ep_shm_name *name, uint64_t bytes, const char *what)
{
    return ep_fail(EP_E_MISMATCH, "shared memory: the segment of process %d has %llu bytes%s, but its owner says %llu",
                   name->pid, (unsigned long long)bytes, what, (unsigned long long)name->bytes);
}

/* --- new segments ------------------------------------------------------------------------------------------------ */

size_t ep_shm_mapped_bytes(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);

    return bytes ? (bytes + page - 1) / page * page : page;
}

static ep_status map_fd(int fd, size_t mapped, void **ret_base)
{
    void *base = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (base == MAP_FAILED)
        return ep_reserve_fail_map(errno, mapped);
    *ret_base = base;
    return EP_OK;
}

static ep_status new_segment(size_t bytes, bool sparse, struct ep_shm *ret_shm)
{
    struct ep_shm shm = {.bytes = bytes};
    size_t mapped = ep_shm_mapped_bytes(bytes);
    ep_status status;

    if (mapped < bytes || mapped > (size_t)INT64_MAX)
        return ep_fail(EP_E_OVERFLOW, "shared memory: %zu bytes", bytes);
    shm.fd = ep_fd_above_stdio(memfd_create("epkit", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (shm.fd < 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "shared memory: memfd_create");
    status = ep_reserve_resize(shm.fd, mapped);
    if (status != EP_OK)
        goto close_fd;
    /* Peers depend on its size. */
    if (fcntl(shm.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
        status = ep_fail_errno(EP_E_SYSTEM, errno, "shared memory: F_ADD_SEALS");
        goto close_fd;
    }
    status = sparse ? EP_OK : ep_reserve_file(shm.fd, 0, mapped);
    if (status == EP_OK)
        status = map_fd(shm.fd, mapped, &shm.base);
    if (status != EP_OK)
        goto close_fd;
    status = ep_segments_add(shm.base, mapped, &shm.serial);
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

ep_status ep_shm_new(size_t bytes, struct ep_shm *ret_shm)
{
    return new_segment(bytes, false, ret_shm);
}

ep_status ep_shm_new_sparse(size_t bytes, struct ep_shm *ret_shm)
{
    return new_segment(bytes, true, ret_shm);
}

ep_status ep_shm_move(struct ep_shm *shm)
{
    size_t mapped = ep_shm_mapped_bytes(shm->bytes);
    ep_status status = EP_OK;
    struct ep_shm next;
    int fd;

    EP_TRY(ep_shm_new(shm->bytes, &next));
    memcpy(next.base, shm->base, mapped);
    fd = ep_fd_above_stdio(fcntl(next.fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
    if (fd < 0)
        status = ep_fail_errno(EP_E_SYSTEM, errno, "shared memory: a descriptor");
    else if (mmap(shm->base, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
        status = ep_reserve_fail_map(errno, mapped);
    ep_shm_done(&next);
    if (status == EP_OK) {
        ep_fd_close(shm->fd);
        shm->fd = fd;
    } else if (fd >= 0) {
        close(fd);
    }
    return status;
}

ep_status ep_shm_reserve(const struct ep_shm *shm, size_t offset, size_t bytes)
{
    return bytes ? ep_reserve_file(shm->fd, offset, bytes) : EP_OK;
}

ep_status ep_shm_get_name(const struct ep_shm *shm, struct ep_shm_name *ret_name)
{
    struct stat info;

    if (fstat(shm->fd, &info) != 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "shared memory: fstat of descriptor %d", shm->fd);
    *ret_name = (struct ep_shm_name){.process = ep_process_generation(),
                                     .pid = (int32_t)getpid(),
                                     .fd = shm->fd,
                                     .inode = (uint64_t)info.st_ino,
                                     .serial = shm->serial,
                                     .bytes = shm->bytes};
    return EP_OK;
}

/* --- segments of peers ------------------------------------------------------------------------------------------- */

/* Is the descriptor the segment that the name identifies? */
static bool is_segment(int fd, const struct ep_shm_name *name)
{
    struct stat info;

    return fstat(fd, &info) == 0 && (uint64_t)info.st_ino == name->inode && S_ISREG(info.st_mode);
}

/*
 * Checks every descriptor before it is mapped, from whatever source: an access after the end of a file, or to a part
 * that the owner truncates, raises SIGBUS.
 */
static ep_status check_segment(int fd, const struct ep_shm_name *name)
{
    int seals = fcntl(fd, F_GET_SEALS);
    struct stat info;

    if (fstat(fd, &info) != 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "shared memory: fstat of descriptor %d", fd);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return fail_size(name, (uint64_t)info.st_size, " that can be truncated");
    if (name->bytes > (uint64_t)INT64_MAX || (uint64_t)info.st_size < ep_shm_mapped_bytes((size_t)name->bytes))
        return fail_size(name, (uint64_t)info.st_size, "");
    return EP_OK;
}

/* -1 with errno. *ret_released: the owner's descriptors are visible, and this one is not among them. */
static int open_in_proc(const struct ep_shm_name *name, int32_t pid, bool *ret_released)
{
    char path[64];
    int fd, error;

    *ret_released = false;
    errno = ENOENT;
    if (!pid || !ep_process_proc_is_ours())
        return -1;
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, name->fd);
    fd = ep_fd_above_stdio(open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
    error = errno;
    if (fd >= 0 && is_segment(fd, name))
        return fd;
    if (fd < 0 && error == ENOENT)
        snprintf(path, sizeof(path), "/proc/%d/fd/.", pid);
    /* The number may be that of another file by now. */
    *ret_released = fd >= 0 || (error == ENOENT && access(path, X_OK) == 0);
    if (fd >= 0)
        close(fd);
    errno = error;
    return -1;
}

static ep_status get_fd(const struct ep_shm_name *name, int32_t pid, int *ret_fd)
{
    bool released;
    int fd = open_in_proc(name, pid, &released), error = errno;

    if (fd < 0 && released)
        return ep_fail(EP_E_STATE, "shared memory: process %d has released the segment", name->pid);
    if (fd < 0 && (error == EMFILE || error == ENFILE))
        return ep_fail_errno(EP_E_SYSTEM, error, "shared memory of process %d", name->pid);
    if (fd < 0)
        return ep_fail_errno(EP_E_UNSUPPORTED, error,
                             "shared memory of process %d cannot be reached by /proc/%d/fd (hidepid, another user, "
                             "another PID namespace, no /proc, or PR_SET_DUMPABLE)",
                             name->pid, name->pid);
    *ret_fd = fd;
    return EP_OK;
}

/* A segment of this process. */
static ep_status borrow(const struct ep_shm_name *name, struct ep_shm *ret_shm)
{
    size_t mapped = ep_segments_borrow(name->serial, name->bytes, ret_shm);

    if (!mapped)
        return ep_fail(EP_E_STATE, "shared memory: another thread of this process has released the segment");
    return name->bytes <= mapped ? EP_OK : fail_size(name, mapped, "");
}

ep_status ep_shm_attach(const struct ep_shm_name *name, int32_t pid, struct ep_shm *ret_shm)
{
    struct ep_shm shm = {.bytes = name->bytes, .fd = -1};
    ep_status status;
    int fd = -1;

    if (ep_process_generation() == name->process)
        return borrow(name, ret_shm);
    EP_TRY(get_fd(name, pid, &fd));
    status = check_segment(fd, name);
    if (status == EP_OK)
        status = map_fd(fd, ep_shm_mapped_bytes(name->bytes), &shm.base);
    close(fd);
    if (status == EP_OK)
        *ret_shm = shm;
    return status;
}

void ep_shm_done(struct ep_shm *shm)
{
    if (!shm->base)
        return;
    if (shm->serial)
        ep_segments_release(shm->serial);
    else
        munmap(shm->base, ep_shm_mapped_bytes(shm->bytes));
    if (shm->fd >= 0)
        ep_fd_close(shm->fd);
    *shm = (struct ep_shm){.fd = -1};
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A segment of a peer is mapped only if accesses cannot fail: it has the size in its name, and its owner cannot
 * truncate it. The names are of this process with another key, so that its own mapping is not used.
 */
#include "unit.h"

#include "base/shm.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BYTES = 3 * 4096 };

TEST(a_longer_name_than_segment_is_refused)
{
    static const uint64_t too_long[] = {BYTES + 1, INT64_MAX, (uint64_t)INT64_MAX + 1, UINT64_MAX};
    struct ep_shm own, seen = {.fd = -1};
    struct ep_shm_name name;

    assert_int_equal(ep_shm_new(BYTES, &own), EP_OK);
    assert_int_equal(ep_shm_get_name(&own, &name), EP_OK);
    strcpy(own.base, "here");
    for (size_t i = 0; i < sizeof(too_long) / sizeof(too_long[0]); i++) {
        struct ep_shm_name bad = name;

        bad.bytes = too_long[i];
        assert_int_equal(ep_shm_attach(&bad, name.pid, &seen), EP_E_MISMATCH); /* shares the mapping of this process */
    }
    name.process ^= 1;
    for (size_t i = 0; i < sizeof(too_long) / sizeof(too_long[0]); i++) {
        struct ep_shm_name bad = name;

        bad.bytes = too_long[i];
        assert_fails(ep_shm_attach(&bad, name.pid, &seen), EP_E_MISMATCH, "but its owner says");
    }
    assert_int_equal(ep_shm_attach(&name, name.pid, &seen), EP_OK);
    assert_ptr_not_equal(seen.base, own.base);
    assert_string_equal(seen.base, "here");
    ep_shm_done(&seen);
    assert_fails(ep_shm_attach(&name, 0, &seen), EP_E_UNSUPPORTED, "another PID namespace");
    ep_shm_done(&own);
}

TEST(a_segment_that_may_shrink_is_refused)
{
    int fd = memfd_create("epkit", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    struct ep_shm seen = {.fd = -1};
    struct ep_shm_name name = {.process = 1, .pid = (int32_t)getpid(), .fd = fd, .serial = 1, .bytes = BYTES};
    struct stat info;

    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, BYTES), 0);
    assert_int_equal(fstat(fd, &info), 0);
    name.inode = (uint64_t)info.st_ino;
    for (int sealed = 0; sealed < 2; sealed++) {
        assert_int_equal(ep_shm_attach(&name, name.pid, &seen), sealed ? EP_OK : EP_E_MISMATCH);
        if (!sealed)
            assert_non_null(strstr(ep_last_error(), "that can be truncated"));
        ep_shm_done(&seen);
        assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    }
    close(fd);
}

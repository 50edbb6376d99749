/* SPDX-License-Identifier: Apache-2.0 */
/* launcher.h - what the launcher reports to the rendezvous of its ranks, so that no rank waits for one that has ended.
 */
#ifndef EP_BOOT_LAUNCHER_H
#define EP_BOOT_LAUNCHER_H

#include "base/error.h"

#include <epkit/boot.h>

/* Rank `rank` is process `pid`, a child of the caller that has not been waited for. */
EP_PRIVATE_API void ep_boot_shm_note_child(ep_boot_shm *shm, int rank, int32_t pid);

/* In that child, before its program: whose end ep_boot_shm_note_end() means. */
EP_PRIVATE_API void ep_boot_shm_note_start(ep_boot_shm *shm, int rank);

/* That child has ended. Needs neither /proc nor a pidfd. */
EP_PRIVATE_API void ep_boot_shm_note_end(ep_boot_shm *shm, int rank);

/* The program of the rank has returned, in a process that goes on: a thread. */
EP_PRIVATE_API void ep_boot_shm_note_return(ep_boot_shm *shm, int rank);

#endif

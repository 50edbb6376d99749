/* SPDX-License-Identifier: Apache-2.0 */
/* rank_ends.h - reports of a launcher to the rendezvous of its ranks, so that no rank waits for one that has exited. */
#ifndef EP_BOOT_RANK_ENDS_H
#define EP_BOOT_RANK_ENDS_H

#include "base/error.h"

#include <epkit/boot.h>

/* Called in the child that is `rank` before its program: ep_boot_shm_note_end() then refers to this process. */
EP_PRIVATE_API void ep_boot_shm_note_start(ep_boot_shm *shm, int rank);

/* That child has exited. Needs neither /proc nor a pidfd. */
EP_PRIVATE_API void ep_boot_shm_note_end(ep_boot_shm *shm, int rank);

/* The program of the rank has returned, in a process that continues: for ranks that are threads. */
EP_PRIVATE_API void ep_boot_shm_note_return(ep_boot_shm *shm, int rank);

#endif

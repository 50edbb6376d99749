/* SPDX-License-Identifier: Apache-2.0 */
/*
 * frame.h - frames that the agent of a node sends to the launcher on a byte stream, which may begin with the greeting
 * of a login shell. A frame is one line, "\036epkit KIND RANK BYTES\n", and BYTES bytes. KIND is 'J' for a JSON event,
 * 'O' and 'E' for standard output and error of a rank.
 */
#ifndef EP_LAUNCH_FRAME_H
#define EP_LAUNCH_FRAME_H

#include <stddef.h>

#define FRAME_BYTES_MAX (1u << 22) /* of the payload */
#define FRAME_RANKS_MAX 65536      /* ranks on one node */

struct frame {
    char kind; /* 'J', 'O', 'E' */
    int rank;
    const char *data; /* not terminated; valid during the call */
    size_t bytes;
};

struct frame_reader {
    char *buffer;
    size_t used, capacity;
};

/*
 * Consumes `bytes` bytes and calls on_frame for each complete frame. Text before, between and after frames is skipped.
 * 0, or -1 for lack of memory. A frame that claims to be larger than FRAME_BYTES_MAX is treated as text.
 */
int frame_read(struct frame_reader *reader, const char *data, size_t bytes,
               void (*on_frame)(const struct frame *frame, void *context), void *context);
void frame_reader_done(struct frame_reader *reader);

/* Writes the line of a frame to `ret_line`; returns its length. */
size_t frame_head(char kind, int rank, size_t bytes, char ret_line[64]);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/types.h - export macro, version, element types, limits.
 *
 * Notation used by every header of epkit:
 *   R  ranks in the group             N  tokens of this rank
 *   K  experts a token selects        H  elements in a row (hidden size)
 *   E  experts of the whole group     L  local experts, E / R
 *   M  most tokens of a rank (low-latency layout)
 */
#ifndef EPKIT_TYPES_H
#define EPKIT_TYPES_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define EP_API __attribute__((visibility("default")))
#else
#define EP_API
#endif

/* Initial value of an argument struct: its size, all else zero. C++17 has no designated initialisers. */
#ifdef __cplusplus
#define EP_INIT(type)                                                                                                  \
    ([] {                                                                                                              \
        type init_{};                                                                                                  \
        init_.size = sizeof(type);                                                                                     \
        return init_;                                                                                                  \
    }())
#else
#define EP_INIT(type)                                                                                                  \
    {                                                                                                                  \
        .size = sizeof(type)                                                                                           \
    }
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define EP_VERSION_MAJOR 0
#define EP_VERSION_MINOR 1
#define EP_VERSION_PATCH 0

/* "0.1.0": the version of the loaded library, not of the header. */
EP_API const char *ep_version(void);

/* ep_version_number() returns the version as a number: major * 10000 + minor * 100 + patch. */
EP_API int ep_version_number(void);

/* The stream that a call queues its work in: a cudaStream_t, or an ep_queue of the host backend. See epkit/stream.h. */
typedef void *ep_stream;

/* Limits of the library. A larger value is EP_E_ARG. */
#define EP_MAX_RANKS 1024
#define EP_MAX_EXPERTS 4096
#define EP_MAX_TOPK 64
#define EP_MAX_HIDDEN 65536
#define EP_MAX_SCALE_WORDS 16384
#define EP_MAX_ALIGNMENT 65536 /* expert_alignment */

/* One scale covers this many consecutive elements of an fp8 row, as in the block-scaled formats of DeepSeek-V3. */
#define EP_SCALE_BLOCK 128

/* Element types. The numbers are part of the ABI. */
typedef enum ep_dtype {
    EP_BF16 = 1,   /* bfloat16, 2 bytes */
    EP_F8E4M3 = 2, /* fp8 e4m3fn (no infinity, largest 448), 1 byte; H a multiple of EP_SCALE_BLOCK */
    EP_F32 = 3,    /* IEEE single, 4 bytes */
    EP_I32 = 4,    /* int32_t; as a scale type: opaque words of 4 bytes */
    EP_I64 = 5,    /* int64_t */
    EP_UE8M0 = 6, /* power-of-two scales, one byte each (value 2^(b-127)), four packed in an int32, lowest byte first */
    EP_F4E2M1 = 7,  /* fp4 e2m1 (largest 6), two in a byte, the first in the low half: nvfp4 rows */
    EP_UE8M0_32 = 8 /* as EP_UE8M0, one for 32 elements: of mxfp8 rows */
} ep_dtype;

/* Bytes of one element, of two for EP_F4E2M1, 1 for scales of a byte; 0 for a value that is not an ep_dtype. */
EP_API size_t ep_dtype_bytes(ep_dtype type);

/* "bf16", "fp8", "f32", "i32", "i64", "ue8m0", "fp4", "ue8m0 of 32"; "?" for a value that is not an ep_dtype. */
EP_API const char *ep_dtype_name(ep_dtype type);

#ifdef __cplusplus
}
#endif

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* epkit/epkit.h - everything but epkit/cuda.h. */
#ifndef EPKIT_EPKIT_H
#define EPKIT_EPKIT_H

#include <epkit/boot.h>
#include <epkit/comm.h>
#include <epkit/lowlatency.h>
#include <epkit/memory.h>
#include <epkit/numeric.h>
#include <epkit/ops.h>
#include <epkit/plan.h>
#include <epkit/status.h>
#include <epkit/stream.h>
#include <epkit/types.h>

#endif

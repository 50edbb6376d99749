/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvml.h - what the NVIDIA driver answers about its GPUs, as one JSON value.
 *
 * NVML (libnvidia-ml.so.1) is loaded in a child process only: it opens devices, and a sick driver makes it hang. The
 * child turns everything into the JSON below, which source_query() keeps under the name NVML_QUERY_NAME, snapshots
 * save, and a made-up machine holds in its epkit-overlay.json. Who reads it trusts nothing in it.
 *
 *     {
 *       "driver": "570.124.06",
 *       "cc": {"feature": true, "ready": true, "multi_gpu": "none"},
 *       "gpus": [
 *         {
 *           "pci": "0000:0f:00.0",
 *           "name": "NVIDIA B200",
 *           "uuid": "GPU-00000000-0000-0000-0000-000000000001",
 *           "minor": 0,
 *           "cc": [10, 0],
 *           "ecc_uncorrected": 0,
 *           "remap_pending": false,
 *           "remap_failed": false,
 *           "mig": false,
 *           "memory_bytes": 192265846784,
 *           "slowdown": {"hardware": false, "hw_thermal": false, "power_brake": false, "sw_thermal": false},
 *           "nvlinks": ["switch", "switch", "down", "0000:10:00.0", "up"],
 *           "fabric": "ready"
 *         }
 *       ]
 *     }
 *
 * "pci" is required; every other key is left out where the driver does not answer or the board has no such thing.
 *     cc (of the whole) confidential computing: the feature is on, the GPUs take work, and how several of them protect
 *                       each other: "none", "ppcie" (protected PCIe, NVLink in the clear), "nvle" (NVLink encrypted);
 *                       each left out where the driver does not know of it
 *     minor             of /dev/nvidia<minor>
 *     cc                compute capability, major and minor
 *     ecc_uncorrected   uncorrected ECC errors since the driver was loaded (volatile)
 *     remap_*           rows of memory: a remap waits for a reset; a remap has failed
 *     mig               MIG mode is on: the GPU is divided into instances; left out where it has no such mode
 *     memory_bytes      of the whole GPU
 *     slowdown          why the clocks are lowered now: by hardware to half or less, for heat, for the power supply's
 *                       signal (power brake); by the driver for heat
 *     nvlinks           the links of the board in their order: "down"; up and leading to an NVSwitch ("switch"), to the
 *                       GPU at this PCI address, or to what is not known ("up")
 *     fabric            "none" (the board needs no fabric), "starting", "ready", "failed"
 *
 * When NVML is not there or does not start, the answer is {"error": "libnvidia-ml.so.1: cannot open ..."}.
 */
#ifndef EP_TOPO_NVML_H
#define EP_TOPO_NVML_H

#include "hardware/topo.h"

#include <jansson.h>

#define NVML_QUERY_NAME "nvml"
#define NVML_DEADLINE_MS 3000 /* a healthy driver with 8 GPUs answers within 0.5 s, without persistence mode in 2 s */

/* Asks NVML. For source_query(): runs in the child, loads the library, may hang or crash. */
json_t *nvml_query(void *unused);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvml.h - the NVIDIA driver's answer about its GPUs, as one JSON value.
 *
 * NVML (libnvidia-ml.so.1) is loaded only in a child process: it opens devices, and a faulty driver makes it hang. The
 * child converts everything into the JSON below, which source_query() caches under the name NVML_QUERY_NAME. Snapshots
 * contain it, and synthetic machines have it in epkit-overlay.json. Readers validate all of it.
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
 *           "fabric": "ready",
 *           "domain": {"cluster": "00000000-0000-0000-0000-000000000001", "clique": 32766}
 *         }
 *       ]
 *     }
 *
 * "pci" is required; any other key is missing if the driver does not answer or the board has no such feature.
 *     cc (top level)    confidential computing: the feature is on, the GPUs accept work, and the mode of several GPUs:
 *                       "none", "ppcie" (protected PCIe, unencrypted NVLink), "nvle" (encrypted NVLink); each missing
 *                       if the driver does not know it
 *     minor             of /dev/nvidia<minor>
 *     cc                compute capability, major and minor
 *     ecc_uncorrected   uncorrected ECC errors since the driver was loaded (volatile)
 *     remap_*           rows of memory: a remap waits for a reset; a remap has failed
 *     mig               MIG mode is on: the GPU is divided into instances; missing without this mode
 *     memory_bytes      of the whole GPU
 *     slowdown          why the clocks are lowered now: by hardware to half or less, for heat, for the power supply's
 *                       signal (power brake); by the driver for heat
 *     nvlinks           the links of the board in order: "down"; up and connected to an NVSwitch ("switch"), to the GPU
 *                       at this PCI address, or to an unknown device ("up")
 *     fabric            "none" (the board needs no fabric), "starting", "ready", "failed"
 *     domain            of a fabric that is up: the UUID of its cluster, "" if it is zero, and the number of the clique
 *
 * If NVML is missing or does not start, the answer is {"error": "libnvidia-ml.so.1: cannot open ..."}.
 */
#ifndef EP_TOPO_NVML_H
#define EP_TOPO_NVML_H

#include "topo.h"

#include <jansson.h>

#define NVML_QUERY_NAME "nvml"
#define NVML_DEADLINE_MS 3000 /* a healthy driver with 8 GPUs answers within 0.5 s, without persistence mode in 2 s */

/* Queries NVML. For source_query(): runs in the child, loads the library, may hang or crash. */
json_t *nvml_query(void *unused);

#endif

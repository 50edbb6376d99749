/* SPDX-License-Identifier: Apache-2.0 */
/* nvml.h - fields of a GPU from NVML, the driver's management library. */
#ifndef EP_CUDA_NVML_H
#define EP_CUDA_NVML_H

#include <stdbool.h>
#include <stdint.h>

/* As nvml.h of the driver declares it. */
struct cuda_nvml_field {
    unsigned id, scope;
    long long timestamp, latency_us;
    unsigned type;
    int result;
    union {
        double real;
        unsigned number;
        unsigned long long number64;
    } value;
};

/* Reads `n` fields of the GPU with that PCI address. false: there is no NVML, or it does not know the GPU. */
bool cuda_nvml_read(const char *bus_id, struct cuda_nvml_field *fields, int n);

/* false: the driver does not know the field, or it is no unsigned integer. */
bool cuda_nvml_number(const struct cuda_nvml_field *field, uint64_t *ret_number);

/* MB/s of all links of a GPU together, in one direction; 0: none, or unknown. */
uint64_t cuda_link_mbps(const char *bus_id);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The speed of a GPU's links. */
#include "backend/cuda/cuda.h"
#include "backend/cuda/nvml.h"

/* NVML fields: number of links; MB/s of a link in one direction, of link `scope` or common to all links. A driver may
   know only one of the two speeds. */
enum { FIELD_LINK_COUNT = 91, FIELD_LINK_SPEED = 164, FIELD_COMMON_SPEED = 90 };

static uint64_t number_of(const struct cuda_nvml_field *field)
{
    uint64_t number;

    return cuda_nvml_number(field, &number) ? number : 0;
}

uint64_t cuda_link_mbps(const char *bus_id)
{
    struct cuda_nvml_field fields[] = {{.id = FIELD_LINK_COUNT}, {.id = FIELD_LINK_SPEED}, {.id = FIELD_COMMON_SPEED}};
    uint64_t speed;

    if (!cuda_nvml_read(bus_id, fields, sizeof(fields) / sizeof(fields[0])))
        return 0;
    speed = number_of(&fields[1]);
    return number_of(&fields[0]) * (speed ? speed : number_of(&fields[2]));
}

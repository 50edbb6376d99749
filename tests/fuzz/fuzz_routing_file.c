/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a routing: what is accepted must be consistent, what is refused must say why. */
#include "cmd/test/check/routings.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct check_error error = {""};
    struct routing_file file = {0};
    FILE *stream = size ? fmemopen((void *)data, size, "r") : NULL;
    int64_t sum = 0;

    if (!stream)
        return 0;
    if (!routing_file_read(stream, &file, &error)) {
        if (!error.text[0] || file.experts)
            abort();
    } else {
        if (file.n_tables < 1 || file.n_tokens < 1 || file.topk < 1)
            abort();
        /* Reads every number. */
        for (int64_t i = 0; i < (int64_t)file.n_tables * file.n_tokens * file.topk; i++)
            sum += file.experts[i];
        if (sum < INT32_MIN * (int64_t)size)
            abort();
    }
    routing_file_done(&file);
    fclose(stream);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a .npy file: what is accepted must hold together, what is refused must say why. */
#include "cmd/test/check/npy.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct check_error error = {""};
    struct npy_array array = {0};

    if (!npy_parse(data, size, &array, &error)) {
        if (!error.text[0] || array.items)
            abort();
        return 0;
    }
    if (array.n_dims < 2 || array.n_dims > NPY_MAX_DIMS || (array.item_bytes != 4 && array.item_bytes != 8) ||
        array.n_items != array.shape[0] * array.shape[1] * array.shape[2] || array.items < data ||
        array.items + array.n_items * array.item_bytes != data + size)
        abort();
    /* Reads every byte of the items. */
    for (int64_t i = 0; i < array.n_items; i++)
        if (array.item_bytes == 4 && npy_item(&array, i) != (int32_t)npy_item(&array, i))
            abort();
    npy_done(&array);
    return 0;
}

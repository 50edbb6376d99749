/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as an ELF file: what is refused says why, what is not stays within the bounds that callers rely on. */
#include "machine/source/elf.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_list(const json_t *facts, const char *key, size_t most)
{
    const json_t *list = json_object_get(facts, key);

    if ((list && !json_is_array(list)) || json_array_size(list) > most)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char why[256] = "";
    int fd = memfd_create("elf", MFD_CLOEXEC);
    json_t *facts;

    if (fd < 0 || pwrite(fd, data, size, 0) != (ssize_t)size)
        abort();
    facts = elf_describe(fd, why, sizeof(why));
    if (!facts && !why[0])
        abort();
    if (facts) {
        char *text = json_dumps(facts, 0);

        check_list(facts, "needed", ELF_MAX_NEEDED);
        check_list(facts, "needs", ELF_MAX_VERSIONS);
        check_list(facts, "definitions", ELF_MAX_VERSIONS);
        check_list(facts, "archs", ELF_MAX_ARCHS);
        if (!text)
            abort(); /* a name that JSON cannot hold */
        free(text);
    }
    json_decref(facts);
    facts = elf_undefined(fd);
    json_array_append_new(facts, json_string("ncclGetVersion"));
    elf_remove_defined(fd, facts);
    json_decref(facts);
    close(fd);
    return 0;
}

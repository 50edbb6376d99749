/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any text as one of those that a machine keeps about its software; the first byte says which. Pieces must lie within
 * the text, and every reader must come to its end.
 */
#include "machine/software/read_software.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct input {
    const char *begin;
    size_t bytes;
};

/* An empty piece may lie anywhere. */
static void check(struct input text, struct piece piece)
{
    if (piece.n &&
        (piece.text < text.begin || piece.n > text.bytes || (size_t)(piece.text - text.begin) > text.bytes - piece.n))
        abort();
}

static void read_modprobe(struct input text)
{
    struct parse_modprobe state = {.at = text.begin};
    struct parse_option option;
    struct piece value;
    size_t n = 0;

    while (parse_modprobe_next(&state, "nvidia", &option)) {
        check(text, option.name);
        check(text, option.value);
        if (parse_dword(option.value, "PeerMappingOverride", &value))
            check(text, value);
        if (++n > text.bytes)
            abort();
    }
}

static void read_cmdline(struct input text)
{
    struct parse_option option;
    const char *at = text.begin;
    size_t n = 0;

    while (parse_cmdline_next(&at, "nvidia", &option)) {
        check(text, option.name);
        check(text, option.value);
        if (++n > text.bytes)
            abort();
    }
}

static void read_packages(struct input text)
{
    struct parse_package package;
    const char *at = text.begin;
    size_t n = 0;

    while (parse_package_next(&at, &package)) {
        check(text, package.name);
        check(text, package.version);
        if (package.name.n == 0 || ++n > text.bytes)
            abort();
    }
}

static void read_small(struct input text)
{
    check(text, parse_field(text.begin, "Version", ':'));
    check(text, parse_define(text.begin, "NVSHMEM_VENDOR_MAJOR_VERSION"));
}

static void read_buffer(struct input text)
{
    struct parse_buffer facts = parse_buffer_py(text.begin);

    if (facts.decorator_stolen && !facts.defines_mapping)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const readers[])(struct input) = {read_modprobe, read_cmdline, read_packages, read_small,
                                                    read_buffer};
    char *copy;

    if (size == 0)
        return 0;
    copy = malloc(size);
    if (!copy)
        abort();
    memcpy(copy, data + 1, size - 1);
    copy[size - 1] = '\0';
    readers[data[0] % 8 % (sizeof(readers) / sizeof(readers[0]))]((struct input){.begin = copy, .bytes = strlen(copy)});
    free(copy);
    return 0;
}

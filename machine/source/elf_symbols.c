/* SPDX-License-Identifier: Apache-2.0 */
/*
 * elf_symbols.c - which symbols a library needs, and whether others define them, by their tables for ld.so.
 *
 * A library of PyTorch has hundreds of thousands of names. As in ld.so, its hash table leads to the few bytes that
 * answer for one name, and only these are read.
 */
#include "machine/source/elf.h"

#include <string.h>

#define UNDEFINED_MAX 65536 /* symbols before the hashed ones; extensions of PyTorch have some hundred */
#define CHAIN_MAX 65536     /* entries of a bucket; damaged files may have loops */
#define SEGMENTS_MAX 64     /* each read looks through them; libraries have about ten */

static bool open_symbols(int fd, struct elf_image *image)
{
    return elf_open(fd, image) && image->header.e_phnum <= SEGMENTS_MAX && image->tags[ELF_STRINGS] &&
           image->tags[ELF_SYMBOLS];
}

static bool read_whole(const struct elf_image *image, uint64_t address, void *to, size_t n)
{
    return elf_read(image, address, to, n) == n;
}

static bool read_symbol(const struct elf_image *image, uint32_t index, Elf64_Sym *ret_symbol)
{
    return read_whole(image, image->tags[ELF_SYMBOLS] + (uint64_t)index * sizeof(*ret_symbol), ret_symbol,
                      sizeof(*ret_symbol));
}

/* --- needed --- */

/* The number of symbols that may be undefined. The GNU table holds defined symbols only, which are the last ones. */
static uint32_t count_candidates(const struct elf_image *image)
{
    uint32_t words[2] = {0};

    if (image->tags[ELF_GNU_HASH]
            ? !read_whole(image, image->tags[ELF_GNU_HASH], words, sizeof(words))
            : !image->tags[ELF_HASH] || !read_whole(image, image->tags[ELF_HASH], words, sizeof(words)))
        return 0;
    return words[1] < UNDEFINED_MAX ? words[1] : UNDEFINED_MAX;
}

/* A symbol with a version is one of the versions that elf_describe() gives. */
static bool has_version(const struct elf_image *image, uint32_t index)
{
    uint16_t version = 0;

    return image->tags[ELF_VERSIONS] &&
           read_whole(image, image->tags[ELF_VERSIONS] + 2ULL * index, &version, sizeof(version)) &&
           (version & 0x7fff) > VER_NDX_GLOBAL;
}

json_t *elf_undefined(int fd)
{
    json_t *names = json_array();
    struct elf_image image;
    uint32_t n = open_symbols(fd, &image) ? count_candidates(&image) : 0;

    for (uint32_t i = 1; i < n; i++) {
        char name[ELF_MAX_STRING];
        Elf64_Sym symbol;
        size_t bytes;

        if (!read_symbol(&image, i, &symbol))
            break;
        if (symbol.st_shndx != SHN_UNDEF || ELF64_ST_BIND(symbol.st_info) != STB_GLOBAL || has_version(&image, i))
            continue;
        bytes = elf_read(&image, image.tags[ELF_STRINGS] + symbol.st_name, name, sizeof(name));
        /* Python's own are in its program. */
        if (memchr(name, '\0', bytes) && name[0] && strncmp(name, "Py", 2) != 0 && strncmp(name, "_Py", 3) != 0)
            json_array_append_new(names, json_string(name)); /* a name that is no UTF-8 is left out */
    }
    elf_close(&image);
    return names;
}

/* --- defined --- */

static bool is_definition(const struct elf_image *image, uint32_t index, const char *name, size_t bytes)
{
    char found[ELF_MAX_STRING];
    Elf64_Sym symbol;

    return read_symbol(image, index, &symbol) && symbol.st_shndx != SHN_UNDEF &&
           elf_read(image, image->tags[ELF_STRINGS] + symbol.st_name, found, bytes) == bytes &&
           memcmp(found, name, bytes) == 0;
}

/* Numbers of buckets, of the first symbol, of words of the Bloom filter, its shift; filter, buckets, chains. */
static bool find_gnu(const struct elf_image *image, const char *name, size_t bytes)
{
    uint32_t hash = 5381, head[4], index, chain;
    uint64_t filter, buckets;

    for (size_t i = 0; i + 1 < bytes; i++)
        hash = hash * 33 + (unsigned char)name[i];
    if (!read_whole(image, image->tags[ELF_GNU_HASH], head, sizeof(head)) || head[0] == 0 || head[2] == 0 ||
        !read_whole(image, image->tags[ELF_GNU_HASH] + 16 + 8ULL * (hash / 64 % head[2]), &filter, sizeof(filter)) ||
        !(filter >> (hash % 64) & filter >> ((hash >> (head[3] % 32)) % 64) & 1))
        return false;
    buckets = image->tags[ELF_GNU_HASH] + 16 + 8ULL * head[2];
    if (!read_whole(image, buckets + 4ULL * (hash % head[0]), &index, sizeof(index)) || index < head[1])
        return false;
    for (int n = 0; n < CHAIN_MAX; n++, index++) {
        if (!read_whole(image, buckets + 4ULL * head[0] + 4ULL * (index - head[1]), &chain, sizeof(chain)))
            return false;
        if ((chain | 1) == (hash | 1) && is_definition(image, index, name, bytes))
            return true;
        if (chain & 1)
            return false;
    }
    return false;
}

/* The older table: numbers of buckets and of chains; buckets, chains. */
static bool find_sysv(const struct elf_image *image, const char *name, size_t bytes)
{
    uint32_t hash = 0, head[2], index;

    for (size_t i = 0; i + 1 < bytes; i++) {
        hash = (hash << 4) + (unsigned char)name[i];
        hash = (hash ^ (hash & 0xf0000000) >> 24) & 0x0fffffff;
    }
    if (!read_whole(image, image->tags[ELF_HASH], head, sizeof(head)) || head[0] == 0 ||
        !read_whole(image, image->tags[ELF_HASH] + 8 + 4ULL * (hash % head[0]), &index, sizeof(index)))
        return false;
    for (int n = 0; n < CHAIN_MAX && index != STN_UNDEF; n++) {
        if (is_definition(image, index, name, bytes))
            return true;
        if (!read_whole(image, image->tags[ELF_HASH] + 8 + 4ULL * head[0] + 4ULL * index, &index, sizeof(index)))
            return false;
    }
    return false;
}

void elf_remove_defined(int fd, json_t *names)
{
    struct elf_image image;

    for (size_t i = open_symbols(fd, &image) ? json_array_size(names) : 0; i-- > 0;) {
        const char *name = json_string_value(json_array_get(names, i));
        size_t bytes = strlen(name) + 1;

        if (image.tags[ELF_GNU_HASH] ? find_gnu(&image, name, bytes)
                                     : image.tags[ELF_HASH] && find_sysv(&image, name, bytes))
            json_array_remove(names, i);
    }
    elf_close(&image);
}

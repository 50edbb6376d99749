/* SPDX-License-Identifier: Apache-2.0 */
/*
 * elf_symbols.c - which symbols a library needs, and whether others define them, by their tables for ld.so.
 *
 * A library of PyTorch has hundreds of thousands of names. As in ld.so, its hash table leads to the few bytes that
 * answer for one name, and only these are read.
 */
#include "machine/source/elf.h"

#include <elf.h>
#include <string.h>
#include <unistd.h>

#define SEGMENTS_MAX 64
#define UNDEFINED_MAX 65536 /* symbols before the hashed ones; extensions of PyTorch have some hundred */
#define CHAIN_MAX 65536     /* entries of a bucket; damaged files may have loops */
#define TAGS_MAX 1024

struct symbols {
    int fd, n_segments;
    Elf64_Phdr segments[SEGMENTS_MAX];
    uint64_t names, table, versions, gnu_hash, hash; /* addresses, 0 without one */
};

static bool read_at(int fd, uint64_t offset, void *to, size_t n)
{
    return offset < INT64_MAX && pread(fd, to, n, (off_t)offset) == (ssize_t)n;
}

/* Reads what the loaded file has at `address`; of a text, as much of `n` bytes as there is. Returns the bytes. */
static size_t read_memory(const struct symbols *symbols, uint64_t address, void *to, size_t n)
{
    for (int i = 0; i < symbols->n_segments; i++) {
        const Elf64_Phdr *segment = &symbols->segments[i];
        uint64_t skip = address - segment->p_vaddr;
        ssize_t got;

        if (segment->p_type != PT_LOAD || address < segment->p_vaddr || skip >= segment->p_filesz ||
            segment->p_offset > INT64_MAX - skip)
            continue;
        if (n > segment->p_filesz - skip)
            n = segment->p_filesz - skip;
        got = pread(symbols->fd, to, n, (off_t)(segment->p_offset + skip));
        return got > 0 ? (size_t)got : 0;
    }
    return 0;
}

static bool read_whole(const struct symbols *symbols, uint64_t address, void *to, size_t n)
{
    return read_memory(symbols, address, to, n) == n;
}

static void read_tags(struct symbols *symbols, const Elf64_Phdr *dynamic)
{
    Elf64_Dyn tag;

    for (uint64_t i = 0; i < TAGS_MAX && i < dynamic->p_filesz / sizeof(tag); i++) {
        if (!read_at(symbols->fd, dynamic->p_offset + i * sizeof(tag), &tag, sizeof(tag)) || tag.d_tag == DT_NULL)
            return;
        switch (tag.d_tag) {
        case DT_STRTAB:
            symbols->names = tag.d_un.d_ptr;
            break;
        case DT_SYMTAB:
            symbols->table = tag.d_un.d_ptr;
            break;
        case DT_VERSYM:
            symbols->versions = tag.d_un.d_ptr;
            break;
        case DT_GNU_HASH:
            symbols->gnu_hash = tag.d_un.d_ptr;
            break;
        case DT_HASH:
            symbols->hash = tag.d_un.d_ptr;
            break;
        default:
            break;
        }
    }
}

static bool open_symbols(int fd, struct symbols *symbols)
{
    Elf64_Ehdr header;

    *symbols = (struct symbols){.fd = fd};
    if (!read_at(fd, 0, &header, sizeof(header)) || memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
        header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_ident[EI_DATA] != ELFDATA2LSB ||
        header.e_phnum > SEGMENTS_MAX || header.e_phentsize != sizeof(Elf64_Phdr) ||
        !read_at(fd, header.e_phoff, symbols->segments, header.e_phnum * sizeof(Elf64_Phdr)))
        return false;
    symbols->n_segments = header.e_phnum;
    for (int i = 0; i < symbols->n_segments; i++)
        if (symbols->segments[i].p_type == PT_DYNAMIC)
            read_tags(symbols, &symbols->segments[i]);
    return symbols->names && symbols->table;
}

static bool read_symbol(const struct symbols *symbols, uint32_t index, Elf64_Sym *ret_symbol)
{
    return read_whole(symbols, symbols->table + (uint64_t)index * sizeof(*ret_symbol), ret_symbol, sizeof(*ret_symbol));
}

/* --- needed --- */

/* The number of symbols that may be undefined. The GNU table holds defined symbols only, which are the last ones. */
static uint32_t count_candidates(const struct symbols *symbols)
{
    uint32_t words[2] = {0};

    if (symbols->gnu_hash ? !read_whole(symbols, symbols->gnu_hash, words, sizeof(words))
                          : !symbols->hash || !read_whole(symbols, symbols->hash, words, sizeof(words)))
        return 0;
    return words[1] < UNDEFINED_MAX ? words[1] : UNDEFINED_MAX;
}

/* A symbol with a version is one of the versions that elf_describe() gives. */
static bool has_version(const struct symbols *symbols, uint32_t index)
{
    uint16_t version = 0;

    return symbols->versions && read_whole(symbols, symbols->versions + 2ULL * index, &version, sizeof(version)) &&
           (version & 0x7fff) > VER_NDX_GLOBAL;
}

json_t *elf_undefined(int fd)
{
    json_t *names = json_array();
    struct symbols symbols;
    uint32_t n = open_symbols(fd, &symbols) ? count_candidates(&symbols) : 0;

    for (uint32_t i = 1; i < n; i++) {
        char name[ELF_MAX_STRING];
        Elf64_Sym symbol;
        size_t bytes;

        if (!read_symbol(&symbols, i, &symbol))
            break;
        if (symbol.st_shndx != SHN_UNDEF || ELF64_ST_BIND(symbol.st_info) != STB_GLOBAL || has_version(&symbols, i))
            continue;
        bytes = read_memory(&symbols, symbols.names + symbol.st_name, name, sizeof(name));
        /* Python's own are in its program. */
        if (memchr(name, '\0', bytes) && name[0] && strncmp(name, "Py", 2) != 0 && strncmp(name, "_Py", 3) != 0)
            json_array_append_new(names, json_string(name)); /* a name that is no UTF-8 is left out */
    }
    return names;
}

/* --- defined --- */

static bool is_definition(const struct symbols *symbols, uint32_t index, const char *name, size_t bytes)
{
    char found[ELF_MAX_STRING];
    Elf64_Sym symbol;

    return read_symbol(symbols, index, &symbol) && symbol.st_shndx != SHN_UNDEF &&
           read_memory(symbols, symbols->names + symbol.st_name, found, bytes) == bytes &&
           memcmp(found, name, bytes) == 0;
}

/* Numbers of buckets, of the first symbol, of words of the Bloom filter, its shift; filter, buckets, chains. */
static bool find_gnu(const struct symbols *symbols, const char *name, size_t bytes)
{
    uint32_t hash = 5381, head[4], index, chain;
    uint64_t filter, buckets;

    for (size_t i = 0; i + 1 < bytes; i++)
        hash = hash * 33 + (unsigned char)name[i];
    if (!read_whole(symbols, symbols->gnu_hash, head, sizeof(head)) || head[0] == 0 || head[2] == 0 ||
        !read_whole(symbols, symbols->gnu_hash + 16 + 8ULL * (hash / 64 % head[2]), &filter, sizeof(filter)) ||
        !(filter >> (hash % 64) & filter >> ((hash >> (head[3] % 32)) % 64) & 1))
        return false;
    buckets = symbols->gnu_hash + 16 + 8ULL * head[2];
    if (!read_whole(symbols, buckets + 4ULL * (hash % head[0]), &index, sizeof(index)) || index < head[1])
        return false;
    for (int n = 0; n < CHAIN_MAX; n++, index++) {
        if (!read_whole(symbols, buckets + 4ULL * head[0] + 4ULL * (index - head[1]), &chain, sizeof(chain)))
            return false;
        if ((chain | 1) == (hash | 1) && is_definition(symbols, index, name, bytes))
            return true;
        if (chain & 1)
            return false;
    }
    return false;
}

/* The older table: numbers of buckets and of chains; buckets, chains. */
static bool find_sysv(const struct symbols *symbols, const char *name, size_t bytes)
{
    uint32_t hash = 0, head[2], index;

    for (size_t i = 0; i + 1 < bytes; i++) {
        hash = (hash << 4) + (unsigned char)name[i];
        hash = (hash ^ (hash & 0xf0000000) >> 24) & 0x0fffffff;
    }
    if (!read_whole(symbols, symbols->hash, head, sizeof(head)) || head[0] == 0 ||
        !read_whole(symbols, symbols->hash + 8 + 4ULL * (hash % head[0]), &index, sizeof(index)))
        return false;
    for (int n = 0; n < CHAIN_MAX && index != STN_UNDEF; n++) {
        if (is_definition(symbols, index, name, bytes))
            return true;
        if (!read_whole(symbols, symbols->hash + 8 + 4ULL * head[0] + 4ULL * index, &index, sizeof(index)))
            return false;
    }
    return false;
}

void elf_remove_defined(int fd, json_t *names)
{
    struct symbols symbols;

    if (!open_symbols(fd, &symbols))
        return;
    for (size_t i = json_array_size(names); i-- > 0;) {
        const char *name = json_string_value(json_array_get(names, i));
        size_t bytes = strlen(name) + 1;

        if (symbols.gnu_hash ? find_gnu(&symbols, name, bytes) : symbols.hash && find_sysv(&symbols, name, bytes))
            json_array_remove(names, i);
    }
}

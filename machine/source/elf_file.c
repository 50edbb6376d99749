/* SPDX-License-Identifier: Apache-2.0 */
/*
 * elf_file.c - the headers of an ELF file.
 *
 * Everything is found through the program headers, as ld.so does, so section headers are needed only for GPU code.
 * libelf would find the same, but not one symbol among hundreds of thousands without reading them all (elf_symbols.c).
 */
#include "common/memory.h"
#include "common/text.h"
#include "machine/source/elf.h"
#include "source.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define DYNAMIC_MAX (1u << 20)     /* bytes of a dynamic section; libraries have some hundred */
#define VERSIONS_MAX (1u << 18)    /* bytes of a version section */
#define SEGMENTS_MAX 4096          /* program headers; libraries have about ten */
#define SECTIONS_MAX SHN_LORESERVE /* more are counted in section 0, which no library needs */
#define FATBIN_HEADERS_MAX 65536   /* libcublasLt of CUDA 13 has about 8000 */

static bool __attribute__((format(printf, 2, 3))) elf_refuse(struct elf_image *image, const char *format, ...)
{
    WITH_ARGS(args, format, vsnprintf(image->why, sizeof(image->why), format, args));
    return false;
}

/* --- the image --- */

/* The bytes at `offset`, for free(); NULL if the file ends before them. */
static void *read_part(const struct elf_image *image, uint64_t offset, size_t n)
{
    void *bytes = offset <= image->size && n <= image->size - offset ? memory_new(1, n) : NULL;

    if (!bytes || pread(image->fd, bytes, n, (off_t)offset) == (ssize_t)n)
        return bytes;
    free(bytes);
    return NULL;
}

static bool check_header(struct elf_image *image)
{
    const Elf64_Ehdr *header = &image->header;
    ssize_t n = pread(image->fd, &image->header, sizeof(*header), 0);

    if (n < EI_NIDENT || memcmp(header->e_ident, ELFMAG, SELFMAG) != 0)
        return elf_refuse(image, "not an ELF file");
    if (header->e_ident[EI_CLASS] != ELFCLASS64)
        return elf_refuse(image, ELF_FOREIGN ": 32 bits");
    if (header->e_ident[EI_DATA] != ELFDATA2LSB)
        return elf_refuse(image, ELF_FOREIGN ": big-endian");
    if (n < (ssize_t)sizeof(*header))
        return elf_refuse(image, "cut off in its header");
    if (header->e_ident[EI_VERSION] != EV_CURRENT)
        return elf_refuse(image, "damaged: ELF version %u", header->e_ident[EI_VERSION]);
    if (header->e_phnum > SEGMENTS_MAX)
        return elf_refuse(image, "damaged: claims %u program headers", header->e_phnum);
    if (header->e_phnum && header->e_phentsize != sizeof(Elf64_Phdr))
        return elf_refuse(image, "damaged: program headers of %u bytes", header->e_phentsize);
    /* The number of sections is in section 0, where it could be 2^64. */
    if (header->e_shoff && (header->e_shnum == 0 || header->e_shnum >= SECTIONS_MAX))
        return elf_refuse(image, "damaged: claims %u section headers", header->e_shnum);
    if (header->e_shnum && header->e_shentsize != sizeof(Elf64_Shdr))
        return elf_refuse(image, "damaged: section headers of %u bytes", header->e_shentsize);
    image->segments = read_part(image, header->e_phoff, header->e_phnum * sizeof(*image->segments));
    return image->segments || elf_refuse(image, "damaged or cut off: its program headers are not in the file");
}

/* The file offset of an address of the loaded file, and how many bytes follow it. False: in no segment. */
static bool find_address(const struct elf_image *image, uint64_t address, uint64_t *ret_offset, uint64_t *ret_left)
{
    for (size_t i = 0; i < image->header.e_phnum; i++) {
        const Elf64_Phdr *segment = &image->segments[i];
        uint64_t skip = address - segment->p_vaddr;

        if (segment->p_type != PT_LOAD || address < segment->p_vaddr || skip >= segment->p_filesz)
            continue;
        if (segment->p_offset > image->size || skip >= image->size - segment->p_offset)
            return false;
        *ret_offset = segment->p_offset + skip;
        *ret_left = image->size - *ret_offset;
        if (segment->p_filesz - skip < *ret_left)
            *ret_left = segment->p_filesz - skip;
        return true;
    }
    return false;
}

size_t elf_read(const struct elf_image *image, uint64_t address, void *to, size_t n)
{
    uint64_t offset, left;
    ssize_t got = 0;

    if (find_address(image, address, &offset, &left))
        got = pread(image->fd, to, n < left ? n : left, (off_t)offset);
    return got > 0 ? (size_t)got : 0;
}

static bool read_dynamic(struct elf_image *image, const Elf64_Phdr *segment)
{
    static const int64_t numbers[ELF_TAGS] = {DT_STRTAB,    DT_STRSZ,  DT_VERNEED, DT_VERNEEDNUM, DT_VERDEF,
                                              DT_VERDEFNUM, DT_SYMTAB, DT_VERSYM,  DT_GNU_HASH,   DT_HASH};

    if (segment->p_filesz > DYNAMIC_MAX)
        return elf_refuse(image, "damaged: a dynamic section of %" PRIu64 " bytes", segment->p_filesz);
    if (segment->p_filesz < sizeof(Elf64_Dyn))
        return true; /* as in a file of debug information */
    image->dynamic = read_part(image, segment->p_offset, segment->p_filesz);
    if (!image->dynamic)
        return elf_refuse(image, "damaged or cut off: its dynamic section ends beyond the end of the file");
    for (; image->n_dynamic < segment->p_filesz / sizeof(Elf64_Dyn); image->n_dynamic++) {
        const Elf64_Dyn *entry = &image->dynamic[image->n_dynamic];

        if (entry->d_tag == DT_NULL)
            break;
        for (int i = 0; i < ELF_TAGS; i++)
            if (entry->d_tag == numbers[i])
                image->tags[i] = entry->d_un.d_val;
    }
    return true;
}

bool elf_open(int fd, struct elf_image *image)
{
    struct stat info;

    *image = (struct elf_image){.fd = fd};
    if (fstat(fd, &info) < 0 || !S_ISREG(info.st_mode))
        return elf_refuse(image, "not a regular file");
    image->size = (uint64_t)info.st_size;
    if (!check_header(image))
        return false;
    for (size_t i = 0; i < image->header.e_phnum && !image->has_dynamic; i++) {
        image->has_dynamic = image->segments[i].p_type == PT_DYNAMIC;
        if (image->has_dynamic && !read_dynamic(image, &image->segments[i]))
            return false;
    }
    return true;
}

void elf_close(struct elf_image *image)
{
    free(image->segments);
    free(image->dynamic);
}

/* --- dynamic section --- */

struct reader {
    struct elf_image image;
    uint64_t strings, n_strings; /* offset and bytes of the string table in the file */
    json_t *facts;
};

/* The string at `index` of the string table, safe to print; a new value. NULL with the reason. */
static json_t *get_string(struct reader *reader, uint64_t index)
{
    char raw[ELF_MAX_STRING], text[ELF_MAX_STRING];
    uint64_t left = index < reader->n_strings ? reader->n_strings - index : 0;
    ssize_t n = pread(reader->image.fd, raw, left < sizeof(raw) ? left : sizeof(raw), (off_t)(reader->strings + index));

    if (n <= 0 || !memchr(raw, '\0', (size_t)n)) {
        elf_refuse(&reader->image, "damaged: a name at %" PRIu64 " of %" PRIu64 " bytes of names", index,
                   reader->n_strings);
        return NULL;
    }
    text_clean(raw, text, sizeof(text));
    return json_string(text);
}

static bool append_string(struct reader *reader, json_t *list, uint64_t index)
{
    return json_array_append_new(list, get_string(reader, index)) == 0;
}

static bool read_names(struct reader *reader)
{
    struct elf_image *image = &reader->image;
    json_t *needed = json_array();

    json_object_set_new(reader->facts, "needed", needed);
    if (image->tags[ELF_STRINGS] &&
        !find_address(image, image->tags[ELF_STRINGS], &reader->strings, &reader->n_strings))
        return elf_refuse(image, "damaged or cut off: its names are not in the file");
    if (image->tags[ELF_N_STRINGS] < reader->n_strings)
        reader->n_strings = image->tags[ELF_N_STRINGS];
    for (size_t i = 0; i < image->n_dynamic; i++) {
        const Elf64_Dyn *entry = &image->dynamic[i];
        const char *key = entry->d_tag == DT_SONAME    ? "soname"
                          : entry->d_tag == DT_RPATH   ? "rpath"
                          : entry->d_tag == DT_RUNPATH ? "runpath"
                                                       : NULL;

        if (key && json_object_set_new(reader->facts, key, get_string(reader, entry->d_un.d_val)) < 0)
            return false;
        if (entry->d_tag == DT_NEEDED && json_array_size(needed) == ELF_MAX_NEEDED)
            return elf_refuse(image, "damaged: needs more than %d libraries", ELF_MAX_NEEDED);
        if (entry->d_tag == DT_NEEDED && !append_string(reader, needed, entry->d_un.d_val))
            return false;
    }
    return true;
}

/* --- versions of symbols --- */

/* Reads a part of a section of versions, whose lists lead only forward. */
static bool take(const struct elf_image *image, uint64_t address, uint64_t at, void *to, size_t n)
{
    return at < VERSIONS_MAX && elf_read(image, address + at, to, n) == n;
}

/* The versions needed of one library, each bounded even if lists overlap. */
static bool read_needs_of(struct reader *reader, uint64_t address, uint64_t at, const Elf64_Verneed *need, json_t *list)
{
    json_t *file = get_string(reader, need->vn_file), *pair;
    bool good = file;

    at += need->vn_aux;
    for (unsigned i = 0; good && i < need->vn_cnt; i++) {
        Elf64_Vernaux version;

        good = take(&reader->image, address, at, &version, sizeof(version)) ||
               elf_refuse(&reader->image, "damaged: a needed version lies outside of its section");
        /* ld.so does not require a weak version. */
        if (good && !(version.vna_flags & VER_FLG_WEAK)) {
            pair = json_pack("[O]", file);
            good = (json_array_size(list) < ELF_MAX_VERSIONS ||
                    elf_refuse(&reader->image, "damaged: needs more than %d versions", ELF_MAX_VERSIONS)) &&
                   append_string(reader, pair, version.vna_name);
            json_array_append_new(list, pair);
        }
        if (!good || version.vna_next == 0)
            break;
        at += version.vna_next;
    }
    json_decref(file);
    return good;
}

static bool read_needs(struct reader *reader, uint64_t address, uint64_t n, json_t *list)
{
    Elf64_Verneed need;

    for (uint64_t i = 0, at = 0; i < n; i++, at += need.vn_next) {
        if (!take(&reader->image, address, at, &need, sizeof(need)))
            return elf_refuse(&reader->image, "damaged: needed versions lie outside of their section");
        if (!read_needs_of(reader, address, at, &need, list))
            return false;
        if (need.vn_next == 0)
            break;
    }
    return true;
}

static bool read_definitions(struct reader *reader, uint64_t address, uint64_t n, json_t *list)
{
    Elf64_Verdef definition;
    Elf64_Verdaux name;

    for (uint64_t i = 0, at = 0; i < n; i++, at += definition.vd_next) {
        if (!take(&reader->image, address, at, &definition, sizeof(definition)))
            return elf_refuse(&reader->image, "damaged: defined versions lie outside of their section");
        /* The base version is the file itself and has its name. */
        if (!(definition.vd_flags & VER_FLG_BASE)) {
            if (!take(&reader->image, address, at + definition.vd_aux, &name, sizeof(name)))
                return elf_refuse(&reader->image, "damaged: the name of a version lies outside of its section");
            if (!append_string(reader, list, name.vda_name))
                return false;
        }
        if (definition.vd_next == 0)
            break;
    }
    return true;
}

static bool read_versions(struct reader *reader, bool is_need)
{
    struct elf_image *image = &reader->image;
    uint64_t n = image->tags[is_need ? ELF_N_NEEDS : ELF_N_DEFINITIONS], offset, left;
    uint64_t address = image->tags[is_need ? ELF_NEEDS : ELF_DEFINITIONS];
    json_t *list = json_array();

    json_object_set_new(reader->facts, is_need ? "needs" : "definitions", list);
    if (n == 0)
        return true;
    if (n > (is_need ? ELF_MAX_NEEDED : ELF_MAX_VERSIONS))
        return elf_refuse(
            image,
            is_need ? "damaged: needs versions of %" PRIu64 " libraries" : "damaged: defines %" PRIu64 " versions", n);
    if (!find_address(image, address, &offset, &left))
        return elf_refuse(image, "damaged or cut off: %s are not in the file",
                          is_need ? "its needed versions" : "the versions that it defines");
    return (is_need ? read_needs : read_definitions)(reader, address, n, list);
}

/* --- GPU code --- */

/*
 * NVIDIA documents no layout. This one is what nvcc 13.5 writes (compiled for sm_90, 90a, 100, 100a, 100f with PTX, and
 * read back), and agrees with what the Cricket project and others have published for CUDA 9 to 13. A section holds
 * consecutive containers, padded with zeros:
 *
 *     container  u32 magic 0xBA55ED50, u16 version 1, u16 bytes of this header (16), u64 bytes of the entries
 *     entry      u16 kind, u16 version, u32 bytes of this header (64, 80, 112, 120: by generation),
 *                u64 bytes of the payload after it, u32 ..., u32 ..., u16 minor, u16 major,
 *                u32 architecture (90), u32 ..., u32 ..., u64 flags, ...
 *
 * Only headers are read; payloads are skipped.
 */

#define CONTAINER_MAGIC 0xba55ed50u
#define ENTRY_HEADER_MAX 4096 /* 120 so far */

enum { KIND_PTX = 1, KIND_CUBIN = 2, KIND_MERCURY = 16 };

/* Found by comparing the headers of sm_90 with sm_90a, and of sm_100 with sm_100a and sm_100f. */
#define FLAG_EXACT (UINT64_C(1) << 20)
#define FLAG_FAMILY (UINT64_C(1) << 21)

struct fatbin {
    int n;
    int archs[ELF_MAX_ARCHS]; /* as in struct elf_facts, each once, not sorted */
    bool known;               /* false: part of it is in an unknown format */
    int budget;               /* headers that may still be read */
};

struct window {
    int fd;
    int64_t at, end;
};

/* As in a file; like all of ELF here, little-endian. */
struct container {
    uint32_t magic;
    uint16_t version, header;
    uint64_t entries;
};

struct entry {
    uint16_t kind, version;
    uint32_t header;
    uint64_t payload;
    uint32_t unknown[2];
    uint16_t minor, major;
    uint32_t arch, others[2];
    uint64_t flags, more[2];
};

static void add_arch(struct fatbin *fatbin, int arch)
{
    for (int i = 0; i < fatbin->n; i++)
        if (fatbin->archs[i] == arch)
            return;
    if (fatbin->n == ELF_MAX_ARCHS)
        fatbin->known = false;
    else
        fatbin->archs[fatbin->n++] = arch;
}

/* Reads a header at the beginning of the window. False: it does not fit, or no more headers may be read. */
static bool read_fatbin_header(const struct window *window, struct fatbin *fatbin, void *ret_header, int64_t bytes)
{
    return window->end - window->at >= bytes && fatbin->budget-- > 0 &&
           pread(window->fd, ret_header, (size_t)bytes, window->at) == bytes;
}

static void note_entry(struct fatbin *fatbin, const struct entry *entry)
{
    int arch = (int)entry->arch;

    if (entry->kind != KIND_PTX && entry->kind != KIND_CUBIN && entry->kind != KIND_MERCURY)
        return; /* an intermediate form for linking, which no GPU runs */
    if (entry->arch == 0 || entry->arch >= ELF_ARCH_EXACT) {
        fatbin->known = false;
        return;
    }
    if (entry->flags & FLAG_EXACT)
        arch += ELF_ARCH_EXACT;
    else if (entry->flags & FLAG_FAMILY)
        arch += ELF_ARCH_FAMILY;
    add_arch(fatbin, entry->kind == KIND_PTX ? -arch : arch);
}

static bool read_container(struct window window, struct fatbin *fatbin)
{
    struct entry entry;

    while (window.at < window.end) {
        uint64_t left = (uint64_t)(window.end - window.at);

        if (!read_fatbin_header(&window, fatbin, &entry, sizeof(entry)) || entry.header < sizeof(entry) ||
            entry.header > ENTRY_HEADER_MAX || entry.header > left || entry.payload > left - entry.header)
            return false;
        note_entry(fatbin, &entry);
        window.at += (int64_t)(entry.header + entry.payload);
    }
    return true;
}

/* Adds the GPU code in `size` bytes at `offset` of a file, a section of fat binaries. */
static void read_fatbin(int fd, int64_t offset, int64_t size, struct fatbin *fatbin)
{
    struct window window = {.fd = fd, .at = offset, .end = offset + size};
    struct container container;

    /* A rest shorter than a header is padding after the last container. */
    while (window.end - window.at >= (int64_t)sizeof(container)) {
        uint64_t left = (uint64_t)(window.end - window.at);
        bool is_read = read_fatbin_header(&window, fatbin, &container, sizeof(container));

        if (is_read && container.magic == 0) {
            window.at += 8; /* containers are aligned to 8 bytes */
            continue;
        }
        if (!is_read || container.magic != CONTAINER_MAGIC || container.header < sizeof(container) ||
            container.header > left || container.entries > left - container.header ||
            !read_container((struct window){fd, window.at + container.header,
                                            window.at + container.header + (int64_t)container.entries},
                            fatbin)) {
            fatbin->known = false;
            return;
        }
        window.at += container.header + (int64_t)container.entries;
        window.at += -(window.at - offset) & 7;
    }
}

/* Is it a section of fat binaries, by its name? The second name is that of relocatable device code. */
static bool holds_fatbin(const struct elf_image *image, const Elf64_Shdr *names, const Elf64_Shdr *section)
{
    char name[sizeof("__nv_relfatbin")];
    ssize_t n;

    if (section->sh_type != SHT_PROGBITS || section->sh_name >= names->sh_size || names->sh_offset > image->size)
        return false;
    n = pread(image->fd, name, sizeof(name), (off_t)(names->sh_offset + section->sh_name));
    return n > 0 && memchr(name, '\0', (size_t)n) &&
           (strcmp(name, ".nv_fatbin") == 0 || strcmp(name, "__nv_relfatbin") == 0);
}

static int compare_archs(const void *a, const void *b)
{
    int left = *(const int *)a, right = *(const int *)b;

    return (left > right) - (left < right);
}

/* A damaged section table leaves only the GPU code unknown: ld.so does not read it either. */
static void read_sections(const struct elf_image *image, struct fatbin *fatbin)
{
    size_t n = image->header.e_shnum, i_names = image->header.e_shstrndx;
    Elf64_Shdr *sections = n ? read_part(image, image->header.e_shoff, n * sizeof(*sections)) : NULL;

    bool has_names = sections && i_names != SHN_UNDEF && i_names < n;

    fatbin->known = has_names;
    for (size_t i = 1; has_names && i < n; i++) {
        const Elf64_Shdr *section = &sections[i];

        if (!holds_fatbin(image, &sections[i_names], section))
            continue;
        if (section->sh_offset > image->size || section->sh_size > image->size - section->sh_offset)
            fatbin->known = false;
        else
            read_fatbin(image->fd, (int64_t)section->sh_offset, (int64_t)section->sh_size, fatbin);
    }
    free(sections);
}

static void read_gpu_code(struct reader *reader)
{
    struct fatbin fatbin = {.budget = FATBIN_HEADERS_MAX};
    json_t *archs = json_array();

    read_sections(&reader->image, &fatbin);
    qsort(fatbin.archs, (size_t)fatbin.n, sizeof(fatbin.archs[0]), compare_archs);
    for (int i = 0; i < fatbin.n; i++)
        json_array_append_new(archs, json_integer(fatbin.archs[i]));
    json_object_set_new(reader->facts, "archs", archs);
    json_object_set_new(reader->facts, "archs_known", json_boolean(fatbin.known));
}

json_t *elf_describe(int fd, char *ret_why, size_t bytes)
{
    struct reader reader = {.n_strings = 0};
    bool good = elf_open(fd, &reader.image);

    reader.facts = json_pack("{s:i}", "machine", reader.image.header.e_machine);
    good = good && (!reader.image.has_dynamic || read_names(&reader)) && read_versions(&reader, true) &&
           read_versions(&reader, false);
    if (good)
        read_gpu_code(&reader);
    elf_close(&reader.image);
    snprintf(ret_why, bytes, "%s", reader.image.why);
    if (good)
        return reader.facts;
    json_decref(reader.facts);
    return NULL;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * elf_file.c - the headers of an ELF file.
 *
 * Everything is found through the program headers, as ld.so does, so section headers are needed only for GPU code.
 * libelf reads with ELF_C_READ: pread() into memory of its own. Sizes in the file are checked before libelf allocates
 * by them.
 */
#include "common/text.h"
#include "machine/source/elf.h"
#include "source.h"

#include <elf.h>
#include <gelf.h>
#include <inttypes.h>
#include <libelf.h>
#include <stdarg.h>
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

struct reader {
    int fd;
    int64_t size;
    Elf *elf;
    size_t n_segments;
    uint64_t strings; /* offset of the string table in the file */
    uint64_t n_strings;
    json_t *facts;
    char *why;
    size_t why_bytes;
};

/* The useful entries of the dynamic section: addresses and offsets in the string table. */
struct dynamic {
    bool has_strings;
    uint64_t strings, n_strings, needs, n_needs, definitions, n_definitions;
};

static bool __attribute__((format(printf, 2, 3))) elf_refuse(struct reader *reader, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(reader->why, reader->why_bytes, format, args);
    va_end(args);
    return false;
}

static bool refuse_memory(struct reader *reader)
{
    return elf_refuse(reader, "out of memory");
}

/* Consumes `value`. */
static bool elf_set(struct reader *reader, const char *key, json_t *value)
{
    return json_object_set_new(reader->facts, key, value) == 0 || refuse_memory(reader);
}

/* May libelf open the file? Checks only the first bytes. */
static bool check_header(struct reader *reader)
{
    Elf64_Ehdr header;
    ssize_t n = pread(reader->fd, &header, sizeof(header), 0);

    if (n < EI_NIDENT || memcmp(header.e_ident, ELFMAG, SELFMAG) != 0)
        return elf_refuse(reader, "not an ELF file");
    if (header.e_ident[EI_CLASS] != ELFCLASS64)
        return elf_refuse(reader, ELF_FOREIGN ": 32 bits");
    if (header.e_ident[EI_DATA] != ELFDATA2LSB)
        return elf_refuse(reader, ELF_FOREIGN ": big-endian");
    if (n < (ssize_t)sizeof(header))
        return elf_refuse(reader, "cut off in its header");
    if (header.e_phnum > SEGMENTS_MAX)
        return elf_refuse(reader, "damaged: claims %u program headers", header.e_phnum);
    if (header.e_phnum && header.e_phentsize != sizeof(Elf64_Phdr))
        return elf_refuse(reader, "damaged: program headers of %u bytes", header.e_phentsize);
    /* The number of sections is in section 0, where it could be 2^64. */
    if (header.e_shoff && (header.e_shnum == 0 || header.e_shnum >= SECTIONS_MAX))
        return elf_refuse(reader, "damaged: claims %u section headers", header.e_shnum);
    if (header.e_shnum && header.e_shentsize != sizeof(Elf64_Shdr))
        return elf_refuse(reader, "damaged: section headers of %u bytes", header.e_shentsize);
    return elf_set(reader, "machine", json_integer(header.e_machine));
}

/* The file offset of an address of the loaded file, and how many bytes follow it. False: in no segment. */
static bool find_address(struct reader *reader, uint64_t address, uint64_t *ret_offset, uint64_t *ret_left)
{
    for (size_t i = 0; i < reader->n_segments; i++) {
        GElf_Phdr segment;
        uint64_t skip;

        if (!gelf_getphdr(reader->elf, (int)i, &segment))
            return false;
        skip = address - segment.p_vaddr;
        if (segment.p_type != PT_LOAD || address < segment.p_vaddr || skip >= segment.p_filesz)
            continue;
        if (segment.p_offset > (uint64_t)reader->size || skip >= (uint64_t)reader->size - segment.p_offset)
            return false;
        *ret_offset = segment.p_offset + skip;
        *ret_left = (uint64_t)reader->size - *ret_offset;
        if (segment.p_filesz - skip < *ret_left)
            *ret_left = segment.p_filesz - skip;
        return true;
    }
    return false;
}

/* The string at `index` of the string table, safe to print. NULL with the reason. */
static const char *get_string(struct reader *reader, uint64_t index, char ret_text[ELF_MAX_STRING])
{
    char raw[ELF_MAX_STRING];
    uint64_t left = index < reader->n_strings ? reader->n_strings - index : 0;
    ssize_t n = pread(reader->fd, raw, left < sizeof(raw) ? left : sizeof(raw), (off_t)(reader->strings + index));

    if (n <= 0 || !memchr(raw, '\0', (size_t)n)) {
        elf_refuse(reader, "damaged: a name at %" PRIu64 " of %" PRIu64 " bytes of names", index, reader->n_strings);
        return NULL;
    }
    text_clean(raw, ret_text, ELF_MAX_STRING);
    return ret_text;
}

static bool set_string(struct reader *reader, const char *key, uint64_t index)
{
    char text[ELF_MAX_STRING];

    return get_string(reader, index, text) && elf_set(reader, key, json_string(text));
}

/* The bytes from `offset` on, at most `left` and `most` of them, as libelf presents them. */
static Elf_Data *get_chunk(struct reader *reader, uint64_t offset, uint64_t left, uint64_t most, Elf_Type type,
                           const char *what)
{
    Elf_Data *data;

    if (offset > (uint64_t)reader->size || left > (uint64_t)reader->size - offset) {
        elf_refuse(reader, "damaged or cut off: its %s ends beyond the end of the file", what);
        return NULL;
    }
    data = elf_getdata_rawchunk(reader->elf, (int64_t)offset, left < most ? left : most, type);
    if (!data)
        elf_refuse(reader, "its %s: %s", what, elf_errmsg(-1));
    return data;
}

/* --- dynamic section --- */

static bool find_strings(struct reader *reader, const struct dynamic *dynamic)
{
    uint64_t left;

    if (!dynamic->has_strings)
        return true;
    if (!find_address(reader, dynamic->strings, &reader->strings, &left))
        return elf_refuse(reader, "damaged or cut off: its names are not in the file");
    reader->n_strings = dynamic->n_strings < left ? dynamic->n_strings : left;
    return true;
}

static bool read_dynamic_entry(struct reader *reader, const GElf_Dyn *entry, json_t *needed)
{
    char name[ELF_MAX_STRING];

    switch (entry->d_tag) {
    case DT_SONAME:
        return set_string(reader, "soname", entry->d_un.d_val);
    case DT_RPATH:
        return set_string(reader, "rpath", entry->d_un.d_val);
    case DT_RUNPATH:
        return set_string(reader, "runpath", entry->d_un.d_val);
    case DT_NEEDED:
        if (json_array_size(needed) == ELF_MAX_NEEDED)
            return elf_refuse(reader, "damaged: needs more than %d libraries", ELF_MAX_NEEDED);
        return get_string(reader, entry->d_un.d_val, name) &&
               (json_array_append_new(needed, json_string(name)) == 0 || refuse_memory(reader));
    default:
        return true;
    }
}

static void read_dynamic_address(struct dynamic *dynamic, const GElf_Dyn *entry)
{
    switch (entry->d_tag) {
    case DT_STRTAB:
        dynamic->strings = entry->d_un.d_ptr;
        dynamic->has_strings = true;
        break;
    case DT_STRSZ:
        dynamic->n_strings = entry->d_un.d_val;
        break;
    case DT_VERNEED:
        dynamic->needs = entry->d_un.d_ptr;
        break;
    case DT_VERNEEDNUM:
        dynamic->n_needs = entry->d_un.d_val;
        break;
    case DT_VERDEF:
        dynamic->definitions = entry->d_un.d_ptr;
        break;
    case DT_VERDEFNUM:
        dynamic->n_definitions = entry->d_un.d_val;
        break;
    default:
        break;
    }
}

static bool read_dynamic(struct reader *reader, const GElf_Phdr *segment, struct dynamic *dynamic)
{
    json_t *needed = json_array();
    Elf_Data *data;
    GElf_Dyn entry;

    if (!needed || json_object_set_new(reader->facts, "needed", needed) < 0)
        return refuse_memory(reader);
    if (segment->p_filesz > DYNAMIC_MAX)
        return elf_refuse(reader, "damaged: a dynamic section of %" PRIu64 " bytes", segment->p_filesz);
    if (segment->p_filesz < sizeof(Elf64_Dyn))
        return true; /* as in a file of debug information */
    data = get_chunk(reader, segment->p_offset, segment->p_filesz, DYNAMIC_MAX, ELF_T_DYN, "dynamic section");
    if (!data)
        return false;
    for (int i = 0; gelf_getdyn(data, i, &entry) && entry.d_tag != DT_NULL; i++)
        read_dynamic_address(dynamic, &entry);
    if (!find_strings(reader, dynamic))
        return false;
    for (int i = 0; gelf_getdyn(data, i, &entry) && entry.d_tag != DT_NULL; i++)
        if (!read_dynamic_entry(reader, &entry, needed))
            return false;
    return true;
}

/* --- versions of symbols --- */

static bool append_need(struct reader *reader, json_t *list, const char *file, uint64_t name)
{
    char text[ELF_MAX_STRING];

    if (json_array_size(list) == ELF_MAX_VERSIONS)
        return elf_refuse(reader, "damaged: needs more than %d versions", ELF_MAX_VERSIONS);
    return get_string(reader, name, text) &&
           (json_array_append_new(list, json_pack("[ss]", file, text)) == 0 || refuse_memory(reader));
}

/* The versions needed of one library. Lists only lead forward, and each is bounded even if they overlap. */
static bool read_needs_of(struct reader *reader, Elf_Data *data, uint64_t at, const GElf_Verneed *need, json_t *list)
{
    char file[ELF_MAX_STRING];
    GElf_Vernaux version;

    if (!get_string(reader, need->vn_file, file))
        return false;
    at += need->vn_aux;
    for (unsigned i = 0; i < need->vn_cnt; i++) {
        if (at >= data->d_size || !gelf_getvernaux(data, (int)at, &version))
            return elf_refuse(reader, "damaged: a needed version lies outside of its section");
        /* ld.so does not require a weak version. */
        if (!(version.vna_flags & VER_FLG_WEAK) && !append_need(reader, list, file, version.vna_name))
            return false;
        if (version.vna_next == 0)
            break;
        at += version.vna_next;
    }
    return true;
}

/* The section at `address` with the versions that go into a new list under `key`; *ret_data is NULL where `n` is 0. */
static bool begin_versions(struct reader *reader, const char *key, uint64_t address, uint64_t n, Elf_Type type,
                           json_t **ret_list, Elf_Data **ret_data)
{
    bool is_need = type == ELF_T_VNEED;
    uint64_t offset, left;

    *ret_data = NULL;
    *ret_list = json_array();
    if (!*ret_list || json_object_set_new(reader->facts, key, *ret_list) < 0)
        return refuse_memory(reader);
    if (n == 0)
        return true;
    if (n > (is_need ? ELF_MAX_NEEDED : ELF_MAX_VERSIONS))
        return elf_refuse(
            reader,
            is_need ? "damaged: needs versions of %" PRIu64 " libraries" : "damaged: defines %" PRIu64 " versions", n);
    if (!find_address(reader, address, &offset, &left))
        return elf_refuse(reader, "damaged or cut off: %s are not in the file",
                          is_need ? "its needed versions" : "the versions that it defines");
    *ret_data = get_chunk(reader, offset, left, VERSIONS_MAX, type, is_need ? "needed versions" : "defined versions");
    return *ret_data;
}

static bool read_needs(struct reader *reader, const struct dynamic *dynamic)
{
    uint64_t at = 0;
    Elf_Data *data;
    json_t *list;
    GElf_Verneed need;

    if (!begin_versions(reader, "needs", dynamic->needs, dynamic->n_needs, ELF_T_VNEED, &list, &data))
        return false;
    for (uint64_t i = 0; data && i < dynamic->n_needs; i++) {
        if (at >= data->d_size || !gelf_getverneed(data, (int)at, &need))
            return elf_refuse(reader, "damaged: needed versions lie outside of their section");
        if (!read_needs_of(reader, data, at, &need, list))
            return false;
        if (need.vn_next == 0)
            break;
        at += need.vn_next;
    }
    return true;
}

static bool append_definition(struct reader *reader, Elf_Data *data, uint64_t at, json_t *list)
{
    char text[ELF_MAX_STRING];
    GElf_Verdaux name;

    if (at >= data->d_size || !gelf_getverdaux(data, (int)at, &name))
        return elf_refuse(reader, "damaged: the name of a version lies outside of its section");
    return get_string(reader, name.vda_name, text) &&
           (json_array_append_new(list, json_string(text)) == 0 || refuse_memory(reader));
}

static bool read_definitions(struct reader *reader, const struct dynamic *dynamic)
{
    uint64_t at = 0;
    Elf_Data *data;
    json_t *list;
    GElf_Verdef definition;

    if (!begin_versions(reader, "definitions", dynamic->definitions, dynamic->n_definitions, ELF_T_VDEF, &list, &data))
        return false;
    for (uint64_t i = 0; data && i < dynamic->n_definitions; i++) {
        if (at >= data->d_size || !gelf_getverdef(data, (int)at, &definition))
            return elf_refuse(reader, "damaged: defined versions lie outside of their section");
        /* The base version is the file itself and has its name. */
        if (!(definition.vd_flags & VER_FLG_BASE) && !append_definition(reader, data, at + definition.vd_aux, list))
            return false;
        if (definition.vd_next == 0)
            break;
        at += definition.vd_next;
    }
    return true;
}

/* --- GPU code --- */

/* Is it a section of fat binaries, by its name? The second name is that of relocatable device code. */
static bool holds_fatbin(const struct reader *reader, const GElf_Shdr *names, const GElf_Shdr *section)
{
    char name[sizeof("__nv_relfatbin")];
    ssize_t n;

    if (section->sh_type != SHT_PROGBITS || section->sh_name >= names->sh_size ||
        names->sh_offset > (uint64_t)reader->size)
        return false;
    n = pread(reader->fd, name, sizeof(name), (off_t)(names->sh_offset + section->sh_name));
    return n > 0 && memchr(name, '\0', (size_t)n) &&
           (strcmp(name, ".nv_fatbin") == 0 || strcmp(name, "__nv_relfatbin") == 0);
}

static int compare_archs(const void *a, const void *b)
{
    int left = *(const int *)a, right = *(const int *)b;

    return (left > right) - (left < right);
}

/* A damaged section table leaves only the GPU code unknown: ld.so does not read it either. */
static void read_sections(struct reader *reader, struct fatbin *fatbin)
{
    GElf_Shdr names, section;
    size_t i_names;
    Elf_Scn *at = NULL;

    if (elf_getshdrstrndx(reader->elf, &i_names) < 0 || !gelf_getshdr(elf_getscn(reader->elf, i_names), &names) ||
        i_names == SHN_UNDEF)
        return;
    fatbin->known = true;
    while ((at = elf_nextscn(reader->elf, at))) {
        if (!gelf_getshdr(at, &section)) {
            fatbin->known = false;
            return;
        }
        if (!holds_fatbin(reader, &names, &section))
            continue;
        if (section.sh_offset > (uint64_t)reader->size || section.sh_size > (uint64_t)reader->size - section.sh_offset)
            fatbin->known = false;
        else
            fatbin_read(reader->fd, (int64_t)section.sh_offset, (int64_t)section.sh_size, fatbin);
    }
}

static bool read_gpu_code(struct reader *reader)
{
    struct fatbin fatbin = {.budget = FATBIN_HEADERS_MAX};
    json_t *archs = json_array();

    if (!archs || json_object_set_new(reader->facts, "archs", archs) < 0)
        return refuse_memory(reader);
    read_sections(reader, &fatbin);
    qsort(fatbin.archs, (size_t)fatbin.n, sizeof(fatbin.archs[0]), compare_archs);
    for (int i = 0; i < fatbin.n; i++)
        if (json_array_append_new(archs, json_integer(fatbin.archs[i])) < 0)
            return refuse_memory(reader);
    return elf_set(reader, "archs_known", json_boolean(fatbin.known));
}

/* --- the whole file --- */

static bool read_elf(struct reader *reader)
{
    struct dynamic dynamic = {0};

    if (elf_getphdrnum(reader->elf, &reader->n_segments) < 0)
        return elf_refuse(reader, "its program headers: %s", elf_errmsg(-1));
    for (size_t i = 0; i < reader->n_segments; i++) {
        GElf_Phdr segment;

        if (!gelf_getphdr(reader->elf, (int)i, &segment))
            return elf_refuse(reader, "its program headers: %s", elf_errmsg(-1));
        if (segment.p_type != PT_DYNAMIC)
            continue;
        if (!read_dynamic(reader, &segment, &dynamic))
            return false;
        break;
    }
    return read_needs(reader, &dynamic) && read_definitions(reader, &dynamic) && read_gpu_code(reader);
}

json_t *elf_describe(int fd, char *ret_why, size_t bytes)
{
    struct reader reader = {.fd = fd, .why = ret_why, .why_bytes = bytes};
    struct stat info;
    bool ok = false;

    reader.facts = json_object();
    if (!reader.facts)
        refuse_memory(&reader);
    else if (fstat(fd, &info) < 0 || !S_ISREG(info.st_mode))
        elf_refuse(&reader, "not a regular file");
    else if (check_header(&reader)) {
        reader.size = info.st_size;
        elf_version(EV_CURRENT);
        reader.elf = elf_begin(fd, ELF_C_READ, NULL);
        ok = reader.elf ? read_elf(&reader) : elf_refuse(&reader, "%s", elf_errmsg(-1));
    }
    elf_end(reader.elf);
    if (ok)
        return reader.facts;
    json_decref(reader.facts);
    return NULL;
}

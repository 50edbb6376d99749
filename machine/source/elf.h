/* SPDX-License-Identifier: Apache-2.0 */
/*
 * elf.h - inside source_elf(): the headers of an open file, in the form of a snapshot.
 *
 *     {"machine": 62, "soname": "...", "rpath": "...", "runpath": "...", "needed": ["libc.so.6"],
 *      "needs": [["libc.so.6", "GLIBC_2.34"]], "definitions": ["EPKIT_0"], "archs": [90, -90], "archs_known": true}
 *
 * An empty key may be missing; "archs_known" is then true. A damaged file may contain anything: every size and count is
 * bounded before it is used. Nothing is mapped, because a file may shrink while it is read.
 */
#ifndef EP_MACHINE_SOURCE_ELF_H
#define EP_MACHINE_SOURCE_ELF_H

#include <elf.h>
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ELF_MAX_STRING 4096   /* bytes of a name or a path, as PATH_MAX */
#define ELF_MAX_NEEDED 1024   /* DT_NEEDED entries of a file */
#define ELF_MAX_VERSIONS 4096 /* versions that a file needs or defines */
#define ELF_MAX_ARCHS 64      /* different GPU architectures in one file; nvcc 13 knows 20 */

/* NULL with the reason in ret_why, `bytes` large: not an ELF file of 64 bits and little-endian, or damaged. */
json_t *elf_describe(int fd, char *ret_why, size_t bytes);

/*
 * The names of symbols that the file needs from others, without those of a version, weak ones, and those of the program
 * Python; a new array. Then elf_remove_defined() removes those that another file defines.
 */
json_t *elf_undefined(int fd);
void elf_remove_defined(int fd, json_t *names);

/* Addresses and numbers of the dynamic section; 0 without one. */
enum elf_tag {
    ELF_STRINGS,
    ELF_N_STRINGS,
    ELF_NEEDS,
    ELF_N_NEEDS,
    ELF_DEFINITIONS,
    ELF_N_DEFINITIONS,
    ELF_SYMBOLS,
    ELF_VERSIONS,
    ELF_GNU_HASH,
    ELF_HASH,
    ELF_TAGS
};

/* An open file. */
struct elf_image {
    int fd;
    uint64_t size;
    Elf64_Ehdr header;
    Elf64_Phdr *segments;
    bool has_dynamic;
    Elf64_Dyn *dynamic; /* its entries up to DT_NULL */
    size_t n_dynamic;
    uint64_t tags[ELF_TAGS];
    char why[256]; /* of a refusal */
};

/* False with the reason; elf_close() is needed in both cases. */
bool elf_open(int fd, struct elf_image *ret_image);
void elf_close(struct elf_image *image);

/* Reads what the loaded file has at an address, as much of `n` bytes as there is. Returns the bytes. */
size_t elf_read(const struct elf_image *image, uint64_t address, void *to, size_t n);

#endif

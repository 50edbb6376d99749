/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ELF files: facts of libraries with known link options (CMakeLists.txt), and damaged files, which are refused with a
 * reason or give consistent facts, whatever byte is wrong.
 */
#include "machine/source/elf.h"
#include "machine/source/source.h"
#include "tree.h"

#include <elf.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sys/mman.h>

#define SAMPLE(name) SAMPLES "/libsample_" name ".so"

struct image {
    unsigned char *bytes;
    size_t size;
};

static struct image load(const char *path)
{
    struct image image = {0};
    FILE *file = fopen(path, "rb");
    long size;

    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    size = ftell(file);
    assert_true(size > 0);
    rewind(file);
    image.size = (size_t)size;
    image.bytes = malloc(image.size);
    assert_non_null(image.bytes);
    assert_int_equal(fread(image.bytes, 1, image.size, file), image.size);
    fclose(file);
    return image;
}

static int as_file(const unsigned char *bytes, size_t size)
{
    int fd = memfd_create("elf", MFD_CLOEXEC);

    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, bytes, size, 0), (ssize_t)size);
    return fd;
}

/* Describes an open file. A refusal has a reason, a success keys of the right kinds. */
static json_t *describe(int fd, char why[256])
{
    json_t *facts;

    why[0] = '\0';
    facts = elf_describe(fd, why, 256);
    if (!facts) {
        assert_true(why[0]);
        return NULL;
    }
    assert_true(json_is_integer(json_object_get(facts, "machine")));
    assert_true(json_is_array(json_object_get(facts, "archs")));
    assert_true(json_is_boolean(json_object_get(facts, "archs_known")));
    assert_in_range(json_array_size(json_object_get(facts, "needed")), 0, ELF_MAX_NEEDED);
    assert_in_range(json_array_size(json_object_get(facts, "needs")), 0, ELF_MAX_VERSIONS);
    assert_in_range(json_array_size(json_object_get(facts, "definitions")), 0, ELF_MAX_VERSIONS);
    assert_in_range(json_array_size(json_object_get(facts, "archs")), 0, ELF_MAX_ARCHS);
    return facts;
}

/* The reason why these bytes are refused; they must be. */
static void assert_refused(const struct image *image, const char *expected)
{
    char why[256];
    int fd = as_file(image->bytes, image->size);
    json_t *facts = describe(fd, why);

    close(fd);
    if (facts)
        fail_msg("not refused; expected: %s", expected);
    if (!strstr(why, expected))
        fail_msg("'%s' does not say '%s'", why, expected);
}

static Elf64_Ehdr *header_of(const struct image *image)
{
    return (Elf64_Ehdr *)image->bytes;
}

static Elf64_Phdr *segment_of(const struct image *image, uint32_t type)
{
    Elf64_Phdr *segments = (Elf64_Phdr *)(image->bytes + header_of(image)->e_phoff);

    for (int i = 0; i < header_of(image)->e_phnum; i++)
        if (segments[i].p_type == type)
            return &segments[i];
    fail_msg("no segment of type %u", type);
    return NULL;
}

static Elf64_Dyn *entry_of(const struct image *image, int64_t tag)
{
    Elf64_Dyn *entry = (Elf64_Dyn *)(image->bytes + segment_of(image, PT_DYNAMIC)->p_offset);

    for (; entry->d_tag != DT_NULL; entry++)
        if (entry->d_tag == tag)
            return entry;
    fail_msg("no entry with tag %" PRId64, tag);
    return NULL;
}

/* --- facts --- */

static struct source *open_root(void)
{
    struct source *source;

    assert_int_equal(source_open(NULL, &source), EP_OK);
    return source;
}

static bool has_need(const struct elf_facts *facts, const char *file, const char *name)
{
    for (size_t i = 0; i < facts->n_needs; i++)
        if (strcmp(facts->needs[i].file, file) == 0 && strcmp(facts->needs[i].name, name) == 0)
            return true;
    return false;
}

static bool has_needed(const struct elf_facts *facts, const char *name)
{
    for (size_t i = 0; i < facts->n_needed; i++)
        if (strcmp(facts->needed[i], name) == 0)
            return true;
    return false;
}

TEST(runpath_and_soname)
{
    struct source *source = open_root();
    struct elf_facts facts = source_elf(source, SAMPLE("%s"), "plain");
    struct image image = load(SAMPLE("plain"));

    assert_int_equal(facts.state, SOURCE_OK);
    assert_string_equal(facts.soname, "libsample_plain.so.7");
    assert_string_equal(facts.runpath, "$ORIGIN/../lib:/opt/sample/lib");
    assert_string_equal(facts.rpath, "");
    assert_true(has_needed(&facts, "libc.so.6"));
    assert_int_equal(facts.n_definitions, 0);
    assert_int_equal(facts.n_archs, 0);
    assert_true(facts.archs_known);
    assert_int_equal(facts.machine, header_of(&image)->e_machine);
    free(image.bytes);
    /* The second answer comes from the cache, with the same arrays. */
    assert_ptr_equal(source_elf(source, SAMPLE("plain")).needed, facts.needed);
    source_free(source);
}

TEST(rpath)
{
    struct source *source = open_root();
    struct elf_facts facts = source_elf(source, SAMPLE("rpath"));

    assert_int_equal(facts.state, SOURCE_OK);
    assert_string_equal(facts.rpath, "/opt/old/lib");
    assert_string_equal(facts.runpath, "");
    source_free(source);
}

TEST(versions)
{
    struct source *source = open_root();
    struct elf_facts provider = source_elf(source, SAMPLE("versions"));
    struct elf_facts user = source_elf(source, SAMPLE("user"));

    assert_int_equal(provider.state, SOURCE_OK);
    /* Without the base version, which is the library itself. */
    assert_int_equal(provider.n_definitions, 2);
    assert_string_equal(provider.definitions[0].name, "EPKIT_SAMPLE_1");
    assert_string_equal(provider.definitions[1].name, "EPKIT_SAMPLE_2");
    assert_string_equal(provider.definitions[0].file, "");
    assert_int_equal(user.state, SOURCE_OK);
    assert_true(has_needed(&user, "libsample_versions.so.1"));
    assert_true(has_need(&user, "libsample_versions.so.1", "EPKIT_SAMPLE_2"));
    assert_false(has_need(&user, "libsample_versions.so.1", "EPKIT_SAMPLE_1"));
    source_free(source);
}

TEST(gpu_code)
{
    struct source *source = open_root();
    struct elf_facts facts = source_elf(source, SAMPLE("gpu"));
    static const int expected[] = {-90, 90 + ELF_ARCH_EXACT, 100 + ELF_ARCH_FAMILY};

    assert_int_equal(facts.state, SOURCE_OK);
    assert_true(facts.archs_known);
    assert_int_equal(facts.n_archs, 3);
    assert_memory_equal(facts.archs, expected, sizeof(expected));
    source_free(source);
}

TEST(other_files)
{
    struct source *source = open_root();
    struct elf_facts facts = source_elf(source, "/etc/passwd");

    assert_int_equal(facts.state, SOURCE_FAILED);
    assert_string_equal(facts.why, "not an ELF file");
    assert_int_equal(source_elf(source, SAMPLES "/not-there.so").state, SOURCE_ABSENT);
    assert_int_equal(source_elf(source, "not/absolute.so").state, SOURCE_FAILED);
    assert_int_equal(source_elf(source, SAMPLES).state, SOURCE_FAILED);
    source_free(source);
}

/* Without section headers the same library gives the same facts, except for GPU code, which only sections name. */
TEST(without_sections)
{
    struct image image = load(SAMPLE("user"));
    char why[256];
    int fd = as_file(image.bytes, image.size);
    json_t *before = describe(fd, why), *after;

    close(fd);
    header_of(&image)->e_shoff = 0;
    header_of(&image)->e_shnum = header_of(&image)->e_shstrndx = 0;
    fd = as_file(image.bytes, image.size);
    after = describe(fd, why);
    close(fd);
    assert_non_null(before);
    assert_non_null(after);
    assert_true(json_is_true(json_object_get(before, "archs_known")));
    assert_true(json_is_false(json_object_get(after, "archs_known")));
    json_object_del(before, "archs_known");
    json_object_del(after, "archs_known");
    assert_true(json_equal(before, after));
    json_decref(before);
    json_decref(after);
    free(image.bytes);
}

/* --- damaged files --- */

TEST(other_machines)
{
    struct image image = load(SAMPLE("plain"));

    image.bytes[EI_CLASS] = ELFCLASS32;
    assert_refused(&image, ELF_FOREIGN);
    image.bytes[EI_CLASS] = ELFCLASS64;
    image.bytes[EI_DATA] = ELFDATA2MSB;
    assert_refused(&image, ELF_FOREIGN);
    free(image.bytes);
}

/* Numbers that would make a reader allocate, loop or read elsewhere. */
TEST(claims)
{
    struct image image = load(SAMPLE("user"));
    unsigned char *good = malloc(image.size);

    assert_non_null(good);
    memcpy(good, image.bytes, image.size);
    header_of(&image)->e_phnum = PN_XNUM;
    assert_refused(&image, "program headers");
    memcpy(image.bytes, good, image.size);
    header_of(&image)->e_shnum = 0; /* the number is then taken from section 0 */
    assert_refused(&image, "section headers");
    memcpy(image.bytes, good, image.size);
    segment_of(&image, PT_DYNAMIC)->p_filesz = UINT64_C(1) << 40;
    assert_refused(&image, "dynamic section");
    memcpy(image.bytes, good, image.size);
    segment_of(&image, PT_DYNAMIC)->p_offset = UINT64_MAX - 7;
    assert_refused(&image, "dynamic section");
    memcpy(image.bytes, good, image.size);
    entry_of(&image, DT_STRTAB)->d_un.d_ptr = UINT64_MAX;
    assert_refused(&image, "names");
    memcpy(image.bytes, good, image.size);
    entry_of(&image, DT_NEEDED)->d_un.d_val = UINT64_C(1) << 33;
    assert_refused(&image, "a name at");
    memcpy(image.bytes, good, image.size);
    entry_of(&image, DT_VERNEEDNUM)->d_un.d_val = UINT64_MAX;
    assert_refused(&image, "needs versions of");
    memcpy(image.bytes, good, image.size);
    entry_of(&image, DT_VERNEED)->d_un.d_ptr = UINT64_MAX - 3;
    assert_refused(&image, "needed versions");
    free(good);
    free(image.bytes);
}

/* A name that runs to the end of the file without a NUL. */
TEST(endless_name)
{
    struct image image = load(SAMPLE("plain"));
    Elf64_Dyn *entry = entry_of(&image, DT_SONAME);

    segment_of(&image, PT_LOAD)->p_filesz = image.size;
    entry_of(&image, DT_STRSZ)->d_un.d_val = image.size;
    entry->d_un.d_val = image.size - entry_of(&image, DT_STRTAB)->d_un.d_ptr - 1;
    image.bytes[image.size - 1] = 'x';
    assert_refused(&image, "a name at");
    free(image.bytes);
}

/* A header of GPU code that exceeds its section leaves only the architectures unknown. */
TEST(damaged_gpu_code)
{
    static const unsigned char magic[] = {0x50, 0xed, 0x55, 0xba};
    struct image image = load(SAMPLE("gpu"));
    unsigned char *container = memmem(image.bytes, image.size, magic, sizeof(magic));
    static const size_t places[] = {6, 8, 16 + 4, 16 + 8, 16 + 28};

    assert_non_null(container);
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        unsigned char kept[2] = {container[places[i]], container[places[i] + 1]};
        json_t *facts;
        char why[256];
        int fd;

        container[places[i]] = container[places[i] + 1] = 0xff;
        fd = as_file(image.bytes, image.size);
        facts = describe(fd, why);
        close(fd);
        assert_non_null(facts);
        assert_true(json_is_false(json_object_get(facts, "archs_known")));
        json_decref(facts);
        memcpy(container + places[i], kept, sizeof(kept));
    }
    free(image.bytes);
}

TEST(every_length)
{
    struct image image = load(SAMPLE("user"));
    int fd = as_file(image.bytes, image.size), n_refused = 0;

    for (size_t size = image.size; size-- > 0;) {
        char why[256];
        json_t *facts;

        assert_int_equal(ftruncate(fd, (off_t)size), 0);
        facts = describe(fd, why);
        n_refused += facts == NULL;
        json_decref(facts);
    }
    /* Not the same reason for all: a truncated section table is the smallest loss. */
    assert_in_range(n_refused, 1, image.size - 1);
    close(fd);
    free(image.bytes);
}

TEST(random_bytes)
{
    struct image image = load(SAMPLE("user"));
    unsigned char *bytes = malloc(image.size);
    uint64_t random = 1;
    int n_refused = 0, fd = as_file(image.bytes, image.size);

    assert_non_null(bytes);
    for (int i = 0; i < 20000; i++) {
        char why[256];
        json_t *facts;

        memcpy(bytes, image.bytes, image.size);
        for (int k = 0; k <= i % 4; k++) {
            size_t at;

            random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            /* Three of four are in the headers and the dynamic section, where they matter. */
            at = random >> 33;
            if (i % 4 == 0)
                at %= image.size;
            else if (i % 4 < 3)
                at %= 1024;
            else
                at = segment_of(&image, PT_DYNAMIC)->p_offset + at % segment_of(&image, PT_DYNAMIC)->p_filesz;
            bytes[at] ^= (unsigned char)(random >> 20 | 1);
        }
        assert_int_equal(pwrite(fd, bytes, image.size, 0), (ssize_t)image.size);
        facts = describe(fd, why);
        n_refused += facts == NULL;
        json_decref(facts);
    }
    assert_in_range(n_refused, 100, 19900);
    close(fd);
    free(bytes);
    free(image.bytes);
}

/* In the hash table that the linker made. */
TEST(symbols)
{
    json_t *names = json_pack("[s, s, s]", "sample_one", "sample_none", "sample_two");
    int fd = open(SAMPLE("versions"), O_RDONLY | O_CLOEXEC);

    assert_true(fd >= 0);
    elf_remove_defined(fd, names);
    assert_int_equal(json_array_size(names), 1);
    assert_string_equal(json_string_value(json_array_get(names, 0)), "sample_none");
    json_decref(names);
    close(fd);
    /* Its only undefined symbol has a version, which elf_describe() gives. */
    fd = open(SAMPLE("user"), O_RDONLY | O_CLOEXEC);
    names = elf_undefined(fd);
    assert_int_equal(json_array_size(names), 0);
    json_decref(names);
    close(fd);
}

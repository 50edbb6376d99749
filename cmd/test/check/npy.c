/* SPDX-License-Identifier: Apache-2.0 */
#include "npy.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const unsigned char npy_magic[6] = {0x93, 'N', 'U', 'M', 'P', 'Y'};

/* The header text, a Python dictionary of literals. `at` never passes `end`. */
struct header {
    const unsigned char *begin, *at, *end;
    size_t offset; /* of `begin` in the file, for messages */
    struct check_error *error;
};

enum { HAVE_DESCR = 1, HAVE_ORDER = 2, HAVE_SHAPE = 4, HAVE_ALL = 7 };

struct fields {
    unsigned have;
    bool fortran_order;
    struct npy_array *array;
};

static size_t header_offset(const struct header *header)
{
    return header->offset + (size_t)(header->at - header->begin);
}

/* "byte 23: expected ':', found 'x'". */
static bool header_expected(const struct header *header, const char *what)
{
    if (header->at == header->end)
        return check_fail(header->error, "byte %zu: expected %s, found the end of the header", header_offset(header),
                          what);
    if (*header->at < 0x20 || *header->at > 0x7e)
        return check_fail(header->error, "byte %zu: expected %s, found byte 0x%02x", header_offset(header), what,
                          *header->at);
    return check_fail(header->error, "byte %zu: expected %s, found '%c'", header_offset(header), what, *header->at);
}

static void skip_space(struct header *header)
{
    while (header->at < header->end && (*header->at == ' ' || *header->at == '\n' || *header->at == '\t'))
        header->at++;
}

static bool peek(struct header *header, char c)
{
    skip_space(header);
    return header->at < header->end && *header->at == (unsigned char)c;
}

static bool take(struct header *header, char c)
{
    if (!peek(header, c))
        return false;
    header->at++;
    return true;
}

/* A quoted string without escapes, for a descr or a key. */
static bool parse_string(struct header *header, const char *what, char *ret_text, size_t text_bytes)
{
    size_t n = 0;
    unsigned char quote;

    if (!peek(header, '\'') && !peek(header, '"'))
        return header_expected(header, what);
    quote = *header->at++;
    while (header->at < header->end && *header->at != quote) {
        if (*header->at < 0x20 || *header->at > 0x7e || *header->at == '\\')
            return header_expected(header, "a plain character within the quotes");
        if (n + 1 == text_bytes)
            return check_fail(header->error, "byte %zu: string of more than %zu characters", header_offset(header),
                              text_bytes - 1);
        ret_text[n++] = (char)*header->at++;
    }
    if (header->at == header->end)
        return header_expected(header, "the closing quote");
    header->at++;
    ret_text[n] = '\0';
    return true;
}

static bool parse_descr(struct header *header, struct npy_array *array)
{
    char descr[32];
    size_t where;

    if (peek(header, '['))
        return check_fail(header->error, "byte %zu: descr is a structured type; int32 or int64 is needed",
                          header_offset(header));
    where = header_offset(header);
    if (!parse_string(header, "a type in quotes", descr, sizeof(descr)))
        return false;
    if (!strcmp(descr, "<i4"))
        array->item_bytes = 4;
    else if (!strcmp(descr, "<i8"))
        array->item_bytes = 8;
    else if (descr[0] == '>')
        return check_fail(header->error, "byte %zu: descr '%s' is big endian; '<i4' or '<i8' is needed", where, descr);
    else
        return check_fail(header->error, "byte %zu: descr '%s' is no int32 or int64 ('<i4', '<i8')", where, descr);
    return true;
}

static bool take_word(struct header *header, const char *word)
{
    size_t n = strlen(word);

    skip_space(header);
    if ((size_t)(header->end - header->at) < n || memcmp(header->at, word, n) != 0)
        return false;
    header->at += n;
    return true;
}

static bool parse_bool(struct header *header, bool *ret_value)
{
    *ret_value = take_word(header, "True");
    return *ret_value || take_word(header, "False") || header_expected(header, "True or False");
}

static bool parse_number(struct header *header, int64_t *ret_value)
{
    const unsigned char *first;
    int64_t value = 0;

    skip_space(header);
    first = header->at;
    while (header->at < header->end && *header->at >= '0' && *header->at <= '9') {
        if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, *header->at - '0', &value))
            return check_fail(header->error, "byte %zu: a dimension beyond 2^63", header_offset(header));
        header->at++;
    }
    if (header->at == first)
        return header_expected(header, "a dimension");
    if (header->at < header->end && *header->at == 'L') /* long integers of Python 2 */
        header->at++;
    *ret_value = value;
    return true;
}

static bool parse_shape(struct header *header, struct npy_array *array)
{
    bool comma = true;

    for (int i = 0; i < NPY_MAX_DIMS; i++)
        array->shape[i] = 1;
    array->n_dims = 0;
    if (!take(header, '('))
        return header_expected(header, "a tuple of dimensions");
    while (!peek(header, ')')) {
        if (!comma)
            return header_expected(header, "',' or ')'");
        if (array->n_dims == NPY_MAX_DIMS)
            return check_fail(header->error, "byte %zu: more than %d dimensions; [N,K] or [R,N,K] is needed",
                              header_offset(header), NPY_MAX_DIMS);
        if (!parse_number(header, &array->shape[array->n_dims]))
            return false;
        array->n_dims++;
        comma = take(header, ',');
    }
    header->at++;
    if (array->n_dims < 2)
        return check_fail(header->error, "byte %zu: %d dimension%s; [N,K] or [R,N,K] is needed", header_offset(header),
                          array->n_dims, array->n_dims == 1 ? "" : "s");
    return true;
}

static bool parse_entry(struct header *header, struct fields *fields)
{
    char key[32];
    unsigned bit;
    size_t where;

    skip_space(header);
    where = header_offset(header);
    if (!parse_string(header, "a key in quotes", key, sizeof(key)))
        return false;
    bit = !strcmp(key, "descr")           ? HAVE_DESCR
          : !strcmp(key, "fortran_order") ? HAVE_ORDER
          : !strcmp(key, "shape")         ? HAVE_SHAPE
                                          : 0;
    if (!bit)
        return check_fail(header->error, "byte %zu: unknown key '%s'", where, key);
    if (fields->have & bit)
        return check_fail(header->error, "byte %zu: key '%s' for the second time", where, key);
    fields->have |= bit;
    if (!take(header, ':'))
        return header_expected(header, "':'");
    if (bit == HAVE_DESCR)
        return parse_descr(header, fields->array);
    if (bit == HAVE_ORDER)
        return parse_bool(header, &fields->fortran_order);
    return parse_shape(header, fields->array);
}

static bool parse_header(struct header *header, struct npy_array *array)
{
    struct fields fields = {.array = array};
    bool comma = true;

    if (!take(header, '{'))
        return header_expected(header, "'{'");
    while (!peek(header, '}')) {
        if (!comma)
            return header_expected(header, "',' or '}'");
        if (!parse_entry(header, &fields))
            return false;
        comma = take(header, ',');
    }
    header->at++;
    skip_space(header);
    if (header->at != header->end)
        return header_expected(header, "nothing but spaces after the '}'");
    if (fields.have != HAVE_ALL)
        return check_fail(header->error, "the header has no key '%s'",
                          !(fields.have & HAVE_DESCR)   ? "descr"
                          : !(fields.have & HAVE_ORDER) ? "fortran_order"
                                                        : "shape");
    if (fields.fortran_order)
        return check_fail(header->error, "Fortran order; save numpy.ascontiguousarray(routing)");
    return true;
}

/* Finds the header text after magic, version and length. */
static bool find_header(const unsigned char *bytes, size_t size, struct header *ret_header)
{
    struct check_error *error = ret_header->error;
    size_t prefix, header_bytes;

    if (size < sizeof(npy_magic) + 2 || memcmp(bytes, npy_magic, sizeof(npy_magic)) != 0)
        return check_fail(error, "no .npy file: it does not begin with \\x93NUMPY and a version");
    if (bytes[6] < 1 || bytes[6] > 3 || bytes[7] != 0)
        return check_fail(error, "byte 6: format version %d.%d; 1.0, 2.0 and 3.0 are known", bytes[6], bytes[7]);
    prefix = bytes[6] == 1 ? 10 : 12;
    if (size < prefix)
        return check_fail(error, "byte 8: the file ends within the length of the header");
    header_bytes = bytes[8] | (size_t)bytes[9] << 8;
    if (prefix == 12)
        header_bytes |= (size_t)bytes[10] << 16 | (size_t)bytes[11] << 24;
    if (header_bytes > NPY_MAX_HEADER_BYTES)
        return check_fail(error, "byte 8: header of %zu bytes; at most %d are accepted", header_bytes,
                          NPY_MAX_HEADER_BYTES);
    if (header_bytes > size - prefix)
        return check_fail(error, "byte 8: header of %zu bytes, but the file ends after %zu", header_bytes,
                          size - prefix);
    ret_header->begin = ret_header->at = bytes + prefix;
    ret_header->end = bytes + prefix + header_bytes;
    ret_header->offset = prefix;
    return true;
}

bool npy_parse(const void *data, size_t size, struct npy_array *ret_array, struct check_error *error)
{
    struct header header = {.error = error};
    struct npy_array array = {0};
    size_t data_bytes;
    int64_t bytes;

    if (!find_header(data, size, &header) || !parse_header(&header, &array))
        return false;
    bytes = array.item_bytes;
    array.n_items = 1;
    for (int i = 0; i < array.n_dims; i++)
        if (__builtin_mul_overflow(array.n_items, array.shape[i], &array.n_items) ||
            __builtin_mul_overflow(bytes, array.shape[i], &bytes))
            return check_fail(error, "the dimensions multiply to more than 2^63 bytes");
    data_bytes = size - (size_t)(header.end - (const unsigned char *)data);
    if ((uint64_t)bytes != data_bytes)
        return check_fail(error, "the dimensions make %" PRId64 " bytes of data, but the file holds %zu", bytes,
                          data_bytes);
    array.items = header.end;
    *ret_array = array;
    return true;
}

/* Reads a regular file of an accepted size. Does not block, as opening a pipe without a writer would. */
static unsigned char *read_file(int fd, const char *path, size_t *ret_size, struct check_error *error)
{
    unsigned char *bytes = NULL;
    struct stat info;
    size_t size, n = 0;
    ssize_t got = 1;

    if (fd < 0 || fstat(fd, &info) < 0) {
        check_fail(error, "%s: %s", path, strerror(errno));
        return NULL;
    }
    if (!S_ISREG(info.st_mode)) {
        check_fail(error, "%s: not a regular file", path);
        return NULL;
    }
    if (info.st_size > NPY_MAX_FILE_BYTES) {
        check_fail(error, "%s: %jd bytes; at most %jd are accepted", path, (intmax_t)info.st_size,
                   (intmax_t)NPY_MAX_FILE_BYTES);
        return NULL;
    }
    size = (size_t)info.st_size;
    bytes = malloc(size ? size : 1);
    if (!bytes) {
        check_fail(error, "%s: no memory for its %zu bytes", path, size);
        return NULL;
    }
    while (n < size && (got = read(fd, bytes + n, size - n)) > 0)
        n += (size_t)got;
    if (n < size) {
        check_fail(error, "%s: %s", path, got < 0 ? strerror(errno) : "shorter than its size says");
        free(bytes);
        return NULL;
    }
    *ret_size = size;
    return bytes;
}

bool npy_load(const char *path, struct npy_array *ret_array, struct check_error *error)
{
    struct check_error reason = {""};
    size_t size = 0;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    unsigned char *bytes = read_file(fd, path, &size, error);

    if (fd >= 0)
        close(fd);
    if (!bytes)
        return false;
    if (!npy_parse(bytes, size, ret_array, &reason)) {
        free(bytes);
        return check_fail(error, "%s: %s", path, reason.text);
    }
    ret_array->owned = bytes;
    return true;
}

void npy_done(struct npy_array *array)
{
    if (!array)
        return;
    free(array->owned);
    *array = (struct npy_array){0};
}

int64_t npy_item(const struct npy_array *array, int64_t i)
{
    const unsigned char *item = array->items + i * array->item_bytes;
    uint64_t value = 0;

    for (int byte = 0; byte < array->item_bytes; byte++)
        value |= (uint64_t)item[byte] << (8 * byte);
    return array->item_bytes == 4 ? (int32_t)(uint32_t)value : (int64_t)value;
}

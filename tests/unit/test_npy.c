/* SPDX-License-Identifier: Apache-2.0 */
/* The .npy reader: what numpy writes is read, and every malformed byte gives a text that says what stands where. */
#include "cmd/test/check/npy.h"
#include "temp.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#define GOOD "{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), }"

struct file {
    unsigned char bytes[512];
    size_t size;
};

/* A file of this format version with the header text as given, and n_items items of item_bytes: 10, 11, 12, ... */
static struct file make_file(int version, const char *header, int n_items, int item_bytes)
{
    struct file file = {.bytes = {0x93, 'N', 'U', 'M', 'P', 'Y'}};
    size_t length = strlen(header), at = 8;

    file.bytes[6] = (unsigned char)version;
    for (int i = 0; i < (version == 1 ? 2 : 4); i++)
        file.bytes[at++] = (unsigned char)(length >> 8 * i);
    memcpy(file.bytes + at, header, length);
    at += length;
    for (int i = 0; i < n_items; i++) {
        file.bytes[at] = (unsigned char)(10 + i);
        at += (size_t)item_bytes;
    }
    assert_true(at <= sizeof(file.bytes));
    file.size = at;
    return file;
}

/* Parses a copy of exactly the file's size, so that a sanitizer sees a read behind it. */
static bool parse(const struct file *file, struct npy_array *ret_array, struct check_error *error)
{
    unsigned char *copy = malloc(file->size ? file->size : 1);
    bool ok;

    assert_non_null(copy);
    memcpy(copy, file->bytes, file->size);
    memset(ret_array, 0, sizeof(*ret_array));
    error->text[0] = '\0';
    ok = npy_parse(copy, file->size, ret_array, error);
    if (ok)
        assert_ptr_equal(ret_array->items + ret_array->n_items * ret_array->item_bytes, copy + file->size);
    free(copy);
    return ok;
}

static void assert_refused(const struct file *file, const char *text)
{
    struct npy_array array;
    struct check_error error;

    if (parse(file, &array, &error))
        fail_msg("accepted; expected \"%s\"", text);
    if (!strstr(error.text, text))
        fail_msg("expected \"%s\", got \"%s\"", text, error.text);
    assert_null(array.items); /* the output is not touched */
}

static void test_reads_all_versions(void **state)
{
    (void)state;
    for (int version = 1; version <= 3; version++) {
        struct file file = make_file(version, GOOD, 6, 4);
        struct npy_array array;
        struct check_error error;

        assert_true(npy_parse(file.bytes, file.size, &array, &error));
        assert_int_equal(array.n_dims, 2);
        assert_int_equal(array.shape[0], 2);
        assert_int_equal(array.shape[1], 3);
        assert_int_equal(array.n_items, 6);
        assert_int_equal(array.item_bytes, 4);
        assert_int_equal(npy_item(&array, 0), 10);
        assert_int_equal(npy_item(&array, 5), 15);
        npy_done(&array);
    }
}

static void test_reads_spellings(void **state)
{
    /* Other key orders, quotes, spaces, no last comma, and Python 2's long integers. */
    static const char *const headers[] = {
        "{\"shape\":(2,3),\"descr\":\"<i4\",\"fortran_order\":False}",
        " { 'fortran_order' :\tFalse , 'shape' : ( 2L , 3L , ) , 'descr' : '<i4' }  \n\n",
        "{'descr': '<i4', 'fortran_order': False, 'shape': (1, 2, 3), }                  \n",
    };

    (void)state;
    for (size_t i = 0; i < sizeof(headers) / sizeof(headers[0]); i++) {
        struct file file = make_file(1, headers[i], 6, 4);
        struct npy_array array;
        struct check_error error;

        if (!npy_parse(file.bytes, file.size, &array, &error))
            fail_msg("%s: %s", headers[i], error.text);
        assert_int_equal(array.n_items, 6);
        assert_int_equal(array.shape[array.n_dims - 1], 3);
    }
}

static void test_reads_negative_and_wide(void **state)
{
    static const char header[] = "{'descr': '<i8', 'fortran_order': False, 'shape': (2, 1, 1), }";
    struct file file = make_file(2, header, 0, 8);
    struct file narrow = make_file(1, "{'descr': '<i4', 'fortran_order': False, 'shape': (1, 1), }", 0, 4);
    static const unsigned char minus_one[8] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
    static const unsigned char wide[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    struct npy_array array;
    struct check_error error;

    (void)state;
    memcpy(file.bytes + file.size, minus_one, 8);
    memcpy(file.bytes + file.size + 8, wide, 8);
    file.size += 16;
    assert_true(npy_parse(file.bytes, file.size, &array, &error));
    assert_int_equal(array.n_dims, 3);
    assert_int_equal(array.shape[0], 2);
    assert_int_equal(npy_item(&array, 0), -1);
    assert_true(npy_item(&array, 1) == INT64_C(0x0807060504030201));

    memcpy(narrow.bytes + narrow.size, minus_one, 4);
    narrow.size += 4;
    assert_true(npy_parse(narrow.bytes, narrow.size, &array, &error));
    assert_int_equal(npy_item(&array, 0), -1);
}

static void test_reads_no_tokens(void **state)
{
    struct file file = make_file(1, "{'descr': '<i4', 'fortran_order': False, 'shape': (0, 8), }", 0, 4);
    struct npy_array array;
    struct check_error error;

    (void)state;
    assert_true(parse(&file, &array, &error));
    assert_int_equal(array.n_items, 0);
    assert_int_equal(array.shape[1], 8);
}

static void test_refuses_headers(void **state)
{
    static const struct {
        const char *header, *text;
    } cases[] = {
        {"", "byte 10: expected '{', found the end of the header"},
        {"x", "byte 10: expected '{', found 'x'"},
        {"\x01", "byte 10: expected '{', found byte 0x01"},
        {"{", "byte 11: expected a key in quotes, found the end"},
        {"{}", "no key 'descr'"},
        {"{'descr': '<i4'}", "no key 'fortran_order'"},
        {"{'descr': '<i4', 'fortran_order': False}", "no key 'shape'"},
        {"{'descr' '<i4'}", "byte 19: expected ':', found '''"},
        {"{'descr': '<i4' 'shape': (1, 1)}", "expected ',' or '}', found '''"},
        {"{'descr': '<i4', 'descr': '<i4'}", "key 'descr' for the second time"},
        {"{'weights': 1}", "byte 11: unknown key 'weights'"},
        {"{'descr': <i4}", "byte 20: expected a type in quotes, found '<'"},
        {"{'descr': '<i4}", "expected the closing quote, found the end of the header"},
        {"{'descr': '<i\\x34'}", "expected a plain character within the quotes, found '\\'"},
        {"{'descr': '0123456789012345678901234567890123456789'}", "string of more than 31 characters"},
        {"{'descr': '>i4'}", "byte 20: descr '>i4' is big endian"},
        {"{'descr': '<f4'}", "descr '<f4' is no int32 or int64"},
        {"{'descr': '<u4'}", "descr '<u4' is no int32 or int64"},
        {"{'descr': '<i2'}", "descr '<i2' is no int32 or int64"},
        {"{'descr': '|i1'}", "descr '|i1' is no int32 or int64"},
        {"{'descr': ''}", "descr '' is no int32 or int64"},
        {"{'descr': [('a', '<i4')]}", "byte 20: descr is a structured type"},
        {"{'fortran_order': false}", "expected True or False, found 'f'"},
        {"{'fortran_order': Fals", "expected True or False, found 'F'"},
        {"{'fortran_order': 0}", "expected True or False, found '0'"},
        {"{'descr': '<i4', 'fortran_order': True, 'shape': (2, 3), }", "Fortran order"},
        {"{'shape': 6}", "expected a tuple of dimensions, found '6'"},
        {"{'shape': ()}", "0 dimensions; [N,K] or [R,N,K] is needed"},
        {"{'shape': (6,)}", "1 dimension; [N,K] or [R,N,K] is needed"},
        {"{'shape': (1, 1, 2, 3)}", "more than 3 dimensions"},
        {"{'shape': (2 3)}", "expected ',' or ')', found '3'"},
        {"{'shape': (2, 3", "expected ',' or ')', found the end"},
        {"{'shape': (-2, 3)}", "expected a dimension, found '-'"},
        {"{'shape': (, 3)}", "expected a dimension, found ','"},
        {"{'shape': (9223372036854775808, 3)}", "a dimension beyond 2^63"},
        {"{'descr': '<i4', 'fortran_order': False, 'shape': (9223372036854775807, 3), }", "more than 2^63 bytes"},
        {"{'descr': '<i8', 'fortran_order': False, 'shape': (1152921504606846976, 1), }", "more than 2^63 bytes"},
        {GOOD "}", "expected nothing but spaces after the '}', found '}'"},
        {"{'descr': '<i4', 'fortran_order': False, 'shape': (2, 4), }", "make 32 bytes of data, but the file holds 24"},
        {"{'descr': '<i4', 'fortran_order': False, 'shape': (2, 2), }", "make 16 bytes of data, but the file holds 24"},
        {"{'descr': '<i8', 'fortran_order': False, 'shape': (2, 3), }", "make 48 bytes of data, but the file holds 24"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct file file = make_file(1, cases[i].header, 6, 4);

        assert_refused(&file, cases[i].text);
    }
}

static void test_refuses_prefixes(void **state)
{
    struct file file = make_file(1, GOOD, 6, 4), broken;

    (void)state;
    broken = file;
    broken.bytes[0] = 'X';
    assert_refused(&broken, "no .npy file");
    broken = file;
    broken.bytes[6] = 4;
    assert_refused(&broken, "byte 6: format version 4.0");
    broken = file;
    broken.bytes[6] = 0;
    assert_refused(&broken, "byte 6: format version 0.0");
    broken = file;
    broken.bytes[7] = 1;
    assert_refused(&broken, "byte 6: format version 1.1");
    broken = file;
    broken.bytes[9] = 0xff;
    assert_refused(&broken, "byte 8: header of");
    broken = make_file(2, GOOD, 6, 4);
    broken.bytes[11] = 0xff;
    assert_refused(&broken, "at most 65536 are accepted");
}

/* Every shorter file is refused, and none is read past its end. */
static void test_refuses_every_truncation(void **state)
{
    (void)state;
    for (int version = 1; version <= 3; version++) {
        struct file file = make_file(version, GOOD, 6, 4);

        for (size_t size = 0; size < file.size; size++) {
            struct file cut = file;

            cut.size = size;
            assert_refused(&cut, "");
        }
        file.size++;
        assert_refused(&file, "but the file holds 25");
    }
}

/* Any single byte may be anything: accepted or refused, but always within the file's bounds and with a text. */
static void test_survives_every_byte(void **state)
{
    struct file file = make_file(1, GOOD, 6, 4);

    (void)state;
    for (size_t at = 0; at < file.size; at++)
        for (int value = 0; value < 256; value++) {
            struct file changed = file;
            struct npy_array array;
            struct check_error error;

            changed.bytes[at] = (unsigned char)value;
            if (!parse(&changed, &array, &error))
                assert_true(error.text[0] != '\0');
        }
}

static void test_load_names_the_path(void **state)
{
    struct npy_array array;
    struct check_error error;

    (void)state;
    assert_false(npy_load("/nonexistent/routing.npy", &array, &error));
    assert_string_equal(error.text, "/nonexistent/routing.npy: No such file or directory");
    assert_false(npy_load("/", &array, &error));
    assert_string_equal(error.text, "/: not a regular file");
    assert_false(npy_load("/dev/null", &array, &error));
    assert_string_equal(error.text, "/dev/null: not a regular file");
}

/* Opening a pipe that nobody writes to waits for ever, unless it is told not to. */
static void test_load_refuses_a_pipe_at_once(void **state)
{
    char folder[PATH_MAX], path[PATH_MAX + 8];
    struct npy_array array;
    struct check_error error;

    (void)state;
    temp_template("pipe", folder);
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof(path), "%s/pipe", folder);
    assert_int_equal(mkfifo(path, 0600), 0);
    alarm(10); /* ends this program if the next line hangs */
    assert_false(npy_load(path, &array, &error));
    alarm(0);
    assert_non_null(strstr(error.text, "/pipe: not a regular file"));
    unlink(path);
    rmdir(folder);
}

/* What numpy itself writes, where there is one. */
static void test_reads_numpy(void **state)
{
    static const struct {
        const char *expression;
        int n_dims, item_bytes;
    } cases[] = {
        {"numpy.arange(24, dtype='<i4').reshape(6, 4)", 2, 4},
        {"numpy.arange(24, dtype='<i8').reshape(2, 3, 4)", 3, 8},
    };
    char path[PATH_MAX], command[PATH_MAX + 512];
    int fd;

    (void)state;
    temp_template("npy", path);
    fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct npy_array array;
        struct check_error error;

        /* The python3 of the system is the one that has the packaged numpy, if another comes first in the path. */
        snprintf(command, sizeof(command),
                 "for python in python3 /usr/bin/python3; do $python -c \"import numpy; "
                 "numpy.save(open('%s', 'wb'), %s)\" 2>/dev/null && exit 0; done; exit 1",
                 path, cases[i].expression);
        if (system(command) != 0) {
            unlink(path);
            skip();
        }
        if (!npy_load(path, &array, &error))
            fail_msg("%s", error.text);
        assert_int_equal(array.n_dims, cases[i].n_dims);
        assert_int_equal(array.item_bytes, cases[i].item_bytes);
        for (int64_t item = 0; item < 24; item++)
            assert_int_equal(npy_item(&array, item), item);
        npy_done(&array);
        assert_null(array.owned);
    }
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads_all_versions),
        cmocka_unit_test(test_reads_spellings),
        cmocka_unit_test(test_reads_negative_and_wide),
        cmocka_unit_test(test_reads_no_tokens),
        cmocka_unit_test(test_refuses_headers),
        cmocka_unit_test(test_refuses_prefixes),
        cmocka_unit_test(test_refuses_every_truncation),
        cmocka_unit_test(test_survives_every_byte),
        cmocka_unit_test(test_load_names_the_path),
        cmocka_unit_test(test_load_refuses_a_pipe_at_once),
        cmocka_unit_test(test_reads_numpy),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

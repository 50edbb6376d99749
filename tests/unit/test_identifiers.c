/* SPDX-License-Identifier: Apache-2.0 */
/* What identifies a machine or a person in a text, and what is secret; and what only looks like it. */
#include "common/redact.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* The identifiers of `kinds` in a text, in brackets. */
static void mark(const char *text, unsigned kinds, char *ret_marked, size_t room)
{
    size_t bytes = strlen(text), used = 0;
    struct identifier found;

    for (size_t at = 0; at < bytes && used + 1 < room;) {
        if (!identifier_at(text, bytes, at, kinds, &found)) {
            ret_marked[used++] = text[at++];
            continue;
        }
        assert_true(found.before + found.bytes > 0 && at + found.before + found.bytes <= bytes);
        used += (size_t)snprintf(ret_marked + used, room - used, "%.*s%s%.*s%s", (int)found.before, text + at,
                                 found.bytes ? "[" : "", (int)found.bytes, text + at + found.before,
                                 found.bytes ? "]" : "");
        at += found.before + found.bytes;
    }
    ret_marked[used < room ? used : room - 1] = '\0';
}

static void secrets_are_found_in_every_form(void **state)
{
    static const char *const marked[] = {
        "[hf_ExampleExampleExample0042]",
        "a [sk-exampleExample0123456789] b",
        "TOKEN=[ghp_exampleExampleExample0123456789abcd]",
        "[github_pat_11EXAMPLE0_exampleExample0123456789]",
        "key [AKIAEXAMPLEEXAMPLE42]",
        "[eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJlLWV4YW1wbGU]",
        "[xoxb-132452100178-exampleExample0123]",
        "[xoxa-2-exampleExample0123]",
        "[glpat-exampleExample0123456]",
        "https://[me:word]@host.example/x",
        "--password [hunter2] --next",
        "--password=[hunter2]",
        "--api-token [abc]",
        "password: \"[hunter2]\"",
        "DB_PASSWORD='[hunter2]'",
        "[-----BEGIN RSA PRIVATE KEY-----\nMIIEexample]",
        /* These are none. */
        "https://host.example/me:word@x",
        "sk-short",
        "password",
        "--tokens 128",
        "the token is 5",
        "NCCL_IB_HCA=mlx5_0:1,mlx5_1:1",
        "10.1.2.3 fe80::1234:5678 1654321000042",
    };
    char text[256], got[512];

    (void)state;
    for (size_t i = 0; i < sizeof(marked) / sizeof(marked[0]); i++) {
        size_t n = 0;

        for (const char *c = marked[i]; *c; c++)
            if (*c != '[' && *c != ']')
                text[n++] = *c;
        text[n] = '\0';
        mark(text, IDENTIFIERS_SECRET, got, sizeof(got));
        assert_string_equal(got, marked[i]);
    }
}

static void identifiers_are_found_in_every_form(void **state)
{
    static const struct {
        const char *marked;
        unsigned kinds;
    } cases[] = {
        {"x [10.1.2.3]:80 [10.1.2.0]/24 127.0.0.1 255.255.255.0 1.2.3", IDENTIFIERS_ALL},
        {"v12.8.3.14 x-12.8.3.14 at [12.8.3.14]", IDENTIFIERS_ALL | IDENTIFIERS_VERSIONS},
        {"ip-[10-1-2-3] enx[00005e0053fa]", IDENTIFIERS_ALL},
        {"[fe80::1234:5678]%eth0 (2001:db8 ::1 1::2 ff02::1", IDENTIFIERS_ALL},
        {"[aa:bb:cc:dd:ee:ff] [AA-BB-CC-DD-EE-FF] [1070.fd31.829e] 00:00:00:00:00:00", IDENTIFIERS_ALL},
        {"[0200:5eff:fe00:53fa] 0000:0000:0000:0000 0000:0f:00.0", IDENTIFIERS_ALL},
        {"GPU-[0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9] GPU-[8932f937] GPU-0", IDENTIFIERS_ALL},
        {"[0x02005efffe0053fa] [1654321000042] 0xffffffffffffffff 123456", IDENTIFIERS_ALL},
        {"Serial Number: [MT42X]", IDENTIFIERS_ALL},
        {"[a@b.c] at [node7.rack.internal]", IDENTIFIERS_ALL},
        {"_ZN3c1017RegisterOperatorsD1Ev", IDENTIFIERS_ALL},
        {"node7.rack.internal [10.1.2.3] a@b.c", IDENTIFIER_IPV4},
    };
    char text[256], got[512];

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t n = 0;

        for (const char *c = cases[i].marked; *c; c++)
            if (*c != '[' && *c != ']')
                text[n++] = *c;
        text[n] = '\0';
        mark(text, cases[i].kinds, got, sizeof(got));
        assert_string_equal(got, cases[i].marked);
    }
}

/* The list is shared by snapshots, reports and the record of a run. */
static void secrets_have_names(void **state)
{
    static const char *const secrets[] = {"HF_TOKEN",     "AWS_SECRET_ACCESS_KEY", "MYSQL_PWD", "GITHUB_PAT",
                                          "PGPASSWORD",   "wandb_api_key",         "DB_PASS",   "SSH_AUTH_SOCK",
                                          "SLURM_COOKIE", "ssh_passphrase",        "PASS",      "NCCL_IB_PRIVATE"};
    static const char *const plain[] = {
        "NCCL_DEBUG", "NVSHMEM_IB_ENABLE_IBGDA", "KEYBOARD", "NCCL_BYPASS", "PATH", "COMPASS", "EP_KEYS"};

    (void)state;
    for (size_t i = 0; i < sizeof(secrets) / sizeof(secrets[0]); i++)
        if (!identifier_is_secret_name(secrets[i]))
            fail_msg("%s is a secret", secrets[i]);
    for (size_t i = 0; i < sizeof(plain) / sizeof(plain[0]); i++)
        if (identifier_is_secret_name(plain[i]))
            fail_msg("%s is none", plain[i]);
    assert_true(identifier_has_password("http://proxy:3128,https://me:word@proxy:3128/"));
    assert_false(identifier_has_password("http://proxy:3128/a@b"));
    assert_false(identifier_has_password("https://me@proxy"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(secrets_are_found_in_every_form),
                                       cmocka_unit_test(identifiers_are_found_in_every_form),
                                       cmocka_unit_test(secrets_have_names)};

    return cmocka_run_group_tests_name("identifiers", tests, NULL, NULL);
}

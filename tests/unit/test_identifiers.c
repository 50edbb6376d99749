/* SPDX-License-Identifier: Apache-2.0 */
/* What identifies a machine in a text and what only looks like it; which variables are secret. */
#include "common/redact.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

/* The identifiers of a text, in brackets. */
static void mark(const char *text, bool has_versions, char *ret_marked, size_t room)
{
    size_t bytes = strlen(text), used = 0;
    struct identifier found;

    for (size_t at = 0; at < bytes && used + 1 < room;) {
        if (!identifier_at(text, bytes, at, has_versions, &found)) {
            ret_marked[used++] = text[at++];
            continue;
        }
        assert_true(found.bytes > 0 && at + found.before + found.bytes <= bytes);
        used += (size_t)snprintf(ret_marked + used, room - used, "%.*s[%.*s]", (int)found.before, text + at,
                                 (int)found.bytes, text + at + found.before);
        at += found.before + found.bytes;
    }
    ret_marked[used < room ? used : room - 1] = '\0';
}

static void identifiers_are_found_in_every_form(void **state)
{
    static const struct {
        const char *marked;
        bool has_versions;
    } cases[] = {
        {"x [10.1.2.3]:80 [10.1.2.0]/24 127.0.0.1 255.255.255.0 1.2.3", false},
        {"v12.8.3.14 x-12.8.3.14 at [12.8.3.14]", true},
        {"ip-[10-1-2-3] enx[00005e0053fa]", false},
        {"[fe80::1234:5678]%eth0 (2001:db8 ::1 1::2 ff02::1", false},
        {"[aa:bb:cc:dd:ee:ff] [AA-BB-CC-DD-EE-FF] [1070.fd31.829e] 00:00:00:00:00:00", false},
        {"[0200:5eff:fe00:53fa] 0000:0000:0000:0000 0000:0f:00.0", false},
        {"GPU-[0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9] GPU-[8932f937] GPU-0", false},
        {"hf_"
         "short --token [x7] --token --tokens 4096 password=[it's] NUM_TOKENS=12 MAX_TOKEN=12",
         false},
        {"authorization=[abc123]", false},
        {"Authorization: [deny12]\nrank 3 failed {\"Authorization\":\"[abc123]\"}", false},
        {"fmhaSm100aKernel_QkvE4m3OBfloat16H128PagedKvDenseP32VarSeqQ128Kv128StaticContext", false},
        {"St6vectorIN2at6TensorESaIS1_EE SHA256:nThbg6kXUpJWGl7E1IGOCspRomTxdCARLviKw6E5SY8", false},
        {"/data/[aB3dE5fG7hJ9kL2mN4pQ6rS8t]/logs/rank0.log", false},
        {"'DB_PASSWORD=[a b]' {\"token\": \"[a b]\"} Authorization: Basic [dTpw] token: see token=(left out)", false},
        {"https://[u:p@ss]@proxy/ https://me@proxy/a@b http://proxy:3128/a@b bearer of news", false},
        {"--password [-x1] --password\t[--x] --token --x --user=[me:pw] -u [me:pw] -u 1000:1000 --pwd [xy]", false},
        {"{\\\"api_key\\\":\\\"[x7]\\\"} {\"pass\":\"[a\\\"b]\"} Cookie: [a=x; b=y]\nnext", false},
        {"postgres://[me:hun#ter]@host X-Api-Key: [abcdefghijklmnop]", false},
        {"https://hooks.slack.com/[services/T0123/B0123/abcdefgh] sk-learn-pipelines-version-1x token=12.5", false},
        {"https://[a1b2c3d4e5f6a1b2c3d4]@host PRIVATE-TOKEN: [abcdef]\n", false},
        {"mysql -h h -p[x7] -p x; sshpass -p [x7] ssh -p 22222 h; login -p 2222 curl -u[me:x7] -us", false},
        {"password = [x7], token : [x7] <pass>[x7]</pass> setenv HF_TOKEN [x7] token == x7 token = f(x7)", false},
        {"name: HF_TOKEN\n  value: [x7]\nname: NUM_TOKENS\n  value: 7\nname: HF_TOKEN\nx: 7", false},
        {"--private-key /a/b.key TOKEN=$HF_TOKEN AUTH=${X} --user root:root SECRET_NAME=x secret: {name: x}", false},
        {"USE_AUTH=1 AUTHOR=me [AKIA"
         "IOSFODNN7EXAMPLE]",
         false},
    };
    char text[256], got[512];

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t n = 0;

        for (const char *c = cases[i].marked; *c; c++)
            if (*c != '[' && *c != ']')
                text[n++] = *c;
        text[n] = '\0';
        mark(text, cases[i].has_versions, got, sizeof(got));
        assert_string_equal(got, cases[i].marked);
    }
}

/* The list is shared by snapshots, reports and the record of a run. */
static void secrets_have_names(void **state)
{
    static const char *const secrets[] = {"HF_TOKEN",     "AWS_SECRET_ACCESS_KEY",
                                          "MYSQL_PWD",    "GITHUB_PAT",
                                          "PGPASSWORD",   "wandb_api_key",
                                          "DB_PASS",      "proxy_auth",
                                          "SLURM_COOKIE", "ssh_passphrase",
                                          "PASS",         "NCCL_IB_PRIVATE",
                                          "API_TOKENS",   "authToken",
                                          "API_KEY_2",    "OPENAI_KEY",
                                          "pwd"};
    static const char *const plain[] = {"NCCL_DEBUG",
                                        "NVSHMEM_IB_ENABLE_IBGDA",
                                        "KEYBOARD",
                                        "NCCL_BYPASS",
                                        "PATH",
                                        "COMPASS",
                                        "EP_KEYS",
                                        "NUM_TOKENS",
                                        "TOKENIZERS_PARALLELISM",
                                        "BYTES_PER_TOKEN",
                                        "AUTHOR",
                                        "PWD",
                                        "TOKEN_FILE",
                                        "moe_token_dispatcher_type",
                                        "prompt_key",
                                        "sort_key",
                                        "pad_token",
                                        "private_network",
                                        "magic_number",
                                        "AUTHORITY_MODE",
                                        "DATA_KEY",
                                        "SSH_AUTH_SOCK",
                                        "KEY"};

    (void)state;
    for (size_t i = 0; i < sizeof(secrets) / sizeof(secrets[0]); i++)
        if (!identifier_is_secret_name(secrets[i]))
            fail_msg("%s is a secret", secrets[i]);
    for (size_t i = 0; i < sizeof(plain) / sizeof(plain[0]); i++)
        if (identifier_is_secret_name(plain[i]))
            fail_msg("%s is none", plain[i]);
}

/* Of each form 200 kB; quadratic, one takes a minute. */
static void any_text_takes_linear_time(void **state)
{
    static const char *const parts[] = {"a-",
                                        "a=",
                                        "a_",
                                        "sk-",
                                        "eyJ",
                                        "token=",
                                        "token:a ",
                                        "--password ",
                                        "-u=",
                                        "token=[",
                                        "-u=a:/",
                                        "://a:b#",
                                        "bearer ",
                                        "-----BEGIN ",
                                        "--token ",
                                        "\"a\\\"",
                                        "a/a+",
                                        "a\\",
                                        "hooks.slack.com/",
                                        "token=1 ",
                                        "hf_-",
                                        "-----a",
                                        "bearer aaaaaaaaaaaa ",
                                        "mysql -p ",
                                        "mysql -px'",
                                        "token ",
                                        "token  = ",
                                        "name: token",
                                        "name:\n",
                                        "<token>",
                                        "setenv x "};
    size_t bytes = 200000;
    char *text = malloc(bytes + 1);

    (void)state;
    assert_non_null(text);
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        clock_t began;
        char *shown;

        for (size_t k = 0; k < bytes; k++)
            text[k] = parts[i][k % strlen(parts[i])];
        text[bytes] = '\0';
        began = clock();
        shown = redact_text(text);
        assert_non_null(shown);
        free(shown);
        if (clock() - began > 20 * CLOCKS_PER_SEC)
            fail_msg("\"%s\" takes more than 20 s", parts[i]);
    }
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(identifiers_are_found_in_every_form),
                                       cmocka_unit_test(secrets_have_names),
                                       cmocka_unit_test(any_text_takes_linear_time)};

    return cmocka_run_group_tests_name("identifiers", tests, NULL, NULL);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* secret_tokens.c - secrets that have a form of their own. */
#include "secrets.h"

#include "text.h"

#include <limits.h>
#include <stdint.h>

/* How far a token is read before it is one, and a password for the '@' behind it. */
#define DECIDES 96
#define PASSWORD_BYTES 256
#define RANDOM_BYTES 24 /* shorter ones may be a name */

/*
 * Tokens whose beginning says what they are for, as their issuers document them: '?' in it is any letter; then at least
 * `least` letters, digits and `others`. The last one is "-----BEGIN " in base64, as in a kubeconfig.
 */
static const struct {
    size_t least; /* at most DECIDES */
    const char *others, *beginnings;
} tokens[] = {
    {10, ".-%", "xox?- xox?. xapp-"},
    {16, "", "AKIA ASIA ABIA ACCA LTAI ALTAK AKID AKLT ?k_live_ ?k_test_ ?k_prod_ AVNS_ sm_pat_ sm_aat_ sm_sat_"},
    {16, "_.-", "glpat- gldt- glrt- glcbt- glptt- gloas- glimt- glagent- glft- glsoat- glffct- glrtr- glwt-"},
    {16, "_-", "pypi-AgE"},
    {16, "-/", "bce-v3/"},
    {17, "_.-+/=", "eyJ"},
    {20, "", "hf_ api_org_ lin_api_ NRAK- as- ak-"},
    {20, "_", "github_pat_ glsa_ wandb_v1_ pcsk_ sgp_ CCIP?T_ CCIP?J_"},
    {20, "_-", "sk- GOCSPX- nvapi- dckr_?at_ hv?. figd_ sq0?tp- sq0?sp- sb_secret_ GR1348941 tskey- tvly-"},
    {20, "_.-", "gh?_ ya29. hf_oauth_ hf_jwt_"},
    {20, "_-=", "ATATT3 ATCTT3 duffel_live_"},
    {20, "+/=", "whsec_ bedrock-api-key-"},
    {22, "", "fw_ s. rnd_"},
    {30, "", "npm_ shp??_ gsk_ r8_ pplx- xai- sbp_ rubygems_ ntn_ dp.?t. AGE-SECRET-KEY-1 rpa_ KGAT_ pnu_ bkua_ nfp_"},
    {30, "", "ddp_ pul- jina_ sq?_ vc?_ shippo_live_ do?_v1_ ATBB csk- ph?_ key- oy2 cio e2b_ secret_"},
    {30, "", "napi_ sess- xau_ fc- SK sk_ p8e- slk_ lin_oauth_ ls__ zpka_ shpss_ dose NRRA- ATTA pat_ key_"},
    {30, "-", "ms- pat-na1- pat-eu1- access-production- access-sandbox- access-development- amzn.mws. SWMTKN-1-"},
    {30, "_-", "AIza tgp_v1_ AQ.Ab AQVN PMAK- dapi 1//0 sha256~ fo1_ CFPAT- cf?t_ lsv2_ vercel_blob_rw_"},
    {30, "_.-", "pscale_ dp.st. tfp_"},
    {30, "_+/=", "sntry?_"},
    {40, "_-", "pa-"},
    {40, ":+/=", "K10 MUNGE:"},
    {40, "_.-", "amzn1.oa2-cs.v1. SG. HRKU-AA xkeysib- dt0?01."},
    {50, "", "GOOG1E CLOJARS_ EZ?K AKCp cmVmdGtu rdme_ EAACEdEose0cBA"},
    {60, "_-", "sl."},
    {60, "_-+/=", "ops_eyJ fm2_ ABSK glc_ gAAAAAB LS0tLS1CRUdJTi"},
};

/* Does the text begin so? The length, or 0. */
static size_t begins_as(const struct scan *scan, size_t at, struct piece beginning)
{
    for (size_t i = 0; i < beginning.n; i++)
        if (beginning.text[i] == '?' ? !isalpha((unsigned char)byte_at(scan, at + i))
                                     : byte_at(scan, at + i) != beginning.text[i])
            return 0;
    return beginning.n;
}

/* Of random letters and digits one in six is a digit and many are capital; words that begin so have few. */
static bool is_random(const struct scan *scan, size_t at, size_t n, size_t head)
{
    size_t digits = 0, upper = 0;

    for (size_t i = at; i < at + n; i++) {
        digits += is_digit(scan->text[i]);
        upper += scan->text[i] >= 'A' && scan->text[i] <= 'Z';
    }
    if (has_text(scan, at - head, "sk-"))
        return digits > 0 && (digits + upper) * 5 >= n;
    return head > 3 || digits > 0;
}

/* The bytes of a token with this beginning, 0 without one. */
static size_t token_bytes(const struct scan *scan, size_t at, size_t head, size_t least, const char *others)
{
    size_t n = run(scan, at + head, others, DECIDES);

    if (n < least || !is_random(scan, at + head, n, head))
        return 0;
    n += run(scan, at + head + n, others, n < DECIDES ? 0 : scan->bytes);
    while (n > 0 && is_one_of(scan->text[at + head + n - 1], ".,"))
        n--;
    return n < least ? 0 : head + n;
}

/* The rows with a token that begins with this byte, a bit for each: every word of every text is compared with them. */
static uint32_t rows_with(char first)
{
    static uint32_t rows[UCHAR_MAX + 1];
    static bool is_made;
    _Static_assert(COUNT(tokens) <= 32, "a row has a bit");

    for (size_t i = 0; i < COUNT(tokens) && !is_made; i++)
        for (const char *left = tokens[i].beginnings; *left;)
            rows[(unsigned char)*text_take(&left, " ").text] |= 1u << i;
    is_made = true;
    return rows[(unsigned char)first];
}

size_t match_token(const struct scan *scan, size_t at, size_t *ret_before)
{
    uint32_t rows;

    (void)ret_before;
    if (!begins_word(scan, at, "_"))
        return 0;
    rows = rows_with(scan->text[at]);
    for (size_t i = 0; i < COUNT(tokens); i++) {
        for (const char *left = rows >> i & 1 ? tokens[i].beginnings : ""; *left;) {
            size_t head = begins_as(scan, at, text_take(&left, " "));
            size_t n = head ? token_bytes(scan, at, head, tokens[i].least, tokens[i].others) : 0;

            if (n > 0)
                return n;
        }
    }
    return 0;
}

/* Who knows the rest of the address may write there; what else is followed by a token without a form. */
static const char *const *const beginnings =
    TEXTS("bearer ", "sctapi.ftqq.com/", "api.day.app/", "hooks.slack.com/", "discord.com/api/", "discordapp.com/api/",
          "webhook.office.com/", "api.telegram.org/bot", "open.feishu.cn/open-apis/bot/",
          "open.larksuite.com/open-apis/bot/", "qyapi.weixin.qq.com/cgi-bin/webhook/send?key=", "conda.anaconda.org/t/",
          "wandb.login(key='", "wandb.login(key=\"");

size_t match_webhook(const struct scan *scan, size_t at, size_t *ret_before)
{
    for (size_t i = 0; !is_alnum(byte_before(scan, at)) && beginnings[i]; i++) {
        size_t head, n;

        if (!has_text(scan, at, beginnings[i]))
            continue;
        head = strlen(beginnings[i]);
        n = run(scan, at + head, i ? "_-/@:" : "_.~+/=-", scan->bytes);
        if (n < (i ? 20 : 12))
            continue;
        *ret_before = head;
        return n;
    }
    return 0;
}

/* Hardly a word, or a name of several, changes so often between digits, capitals and small letters. */
static bool is_mixed(const char *text, size_t n, size_t digits)
{
    enum { DIGIT, UPPER, LOWER, OTHER };
    size_t of[OTHER + 1] = {0}, changes = 0;
    int last = OTHER;

    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text[i];
        int kind = isdigit(c) ? DIGIT : isupper(c) ? UPPER : islower(c) ? LOWER : OTHER;

        of[kind]++;
        changes += i > 0 && kind != last;
        last = kind;
    }
    return of[DIGIT] >= digits && of[UPPER] > 2 && of[LOWER] > 2 && changes * 5 >= (n - 1) * 2;
}

/* Is the word mixed for another reason: is it a digest in base64, or the name of a kernel, a type or a product? */
static bool is_public(const struct scan *scan, size_t at, size_t n)
{
    const char *const *digests = TEXTS("SHA256:", "sha256-", "sha384-", "sha512-", "h1:");
    const char *const *names = TEXTS("Kernel", "Tensor", "loat16", "loat32", "E4m3", "e4m3", "E5m2", "FP8", "Fp8",
                                     "Hook", "vector", "torch", "ConnectX");

    for (; *digests; digests++)
        if (at >= strlen(*digests) && has_text(scan, at - strlen(*digests), *digests))
            return true;
    for (; *names; names++)
        if (memmem(scan->text + at, n, *names, strlen(*names)))
            return true;
    return false;
}

/*
 * What somebody drew at random, of letters in both cases and digits, whoever issued it: 40 bytes of base64 as a secret
 * access key, or 24 without another byte, with all of its word, in a path up to the next folder.
 */
size_t match_random(const struct scan *scan, size_t at, size_t *ret_before)
{
    bool is_secret = false;
    size_t end = at;

    (void)ret_before;
    if (!begins_word(scan, at, "_-"))
        return 0;
    if (begins_word(scan, at, "_+/.-") && run(scan, at, "+/", 41) == 40 && !is_one_of(byte_at(scan, at + 40), "=_-.") &&
        is_mixed(scan->text + at, 40, 1))
        return 40;
    while (is_alnum(byte_at(scan, end)) || is_one_of(byte_at(scan, end), "_-")) {
        size_t n = run(scan, end, "", scan->bytes);

        is_secret |= n >= RANDOM_BYTES && is_mixed(scan->text + end, n, 2) && !is_public(scan, end, n);
        end += n ? n : 1;
    }
    end += is_secret ? run(scan, end, byte_before(scan, at) == '/' ? "_-+=.~" : "_-+/=.~", scan->bytes) : 0;
    while (is_secret && is_one_of(scan->text[end - 1], "."))
        end--;
    return is_secret ? end - at : 0;
}

/* To the line that ends it, or to the end of the text. */
size_t match_private_key(const struct scan *scan, size_t at, size_t *ret_before)
{
    const char *text = scan->text + at, *end, *head;

    (void)ret_before;
    if (*text != '-' || !has_text(scan, at, "-----BEGIN "))
        return 0;
    head = memmem(text + 11, scan->bytes - at - 11, "-----", 5);
    if (!head || !(memmem(text, (size_t)(head - text), "PRIVATE KEY", 11) ||
                   memmem(text, (size_t)(head - text), "Static key", 10)))
        return 0;
    end = memmem(head + 5, scan->bytes - at - (size_t)(head + 5 - text), "-----END ", 9);
    end = end ? memmem(end + 9, scan->bytes - at - (size_t)(end + 9 - text), "-----", 5) : NULL;
    return end ? (size_t)(end + 5 - text) : scan->bytes - at;
}

/* User and password of a URL. With '/', '?' or '#' in the password no port is before them, and a host behind '@'. */
size_t match_user(const struct scan *scan, size_t at, size_t *ret_before)
{
    size_t n = 0, colon = 0, sign = 0, digits = 0, scheme;

    if (has_text(scan, at, "://"))
        scheme = 3;
    else if (has_text(scan, at, "//") && !is_one_of(byte_before(scan, at), ":/") && !is_alnum(byte_before(scan, at)))
        scheme = 2;
    else
        return 0;
    at += scheme;
    for (; at + n < scan->bytes && !is_one_of(scan->text[at + n], "/?# \t\r\n\"'<>`)"); n++) {
        char c = scan->text[at + n];

        colon = c == ':' && colon == 0 ? n + 1 : colon;
        sign = c == '@' ? n : sign;
    }
    *ret_before = scheme;
    /* Without a password, a long user with a digit is a token. */
    if (sign &&
        (colon ? colon < sign : sign >= 20 && is_random(scan, at, sign, 0) && run(scan, at, "_-", sign) == sign))
        return sign;
    while (colon && is_digit(byte_at(scan, at + colon + digits)))
        digits++;
    if (colon > 1 && sign == 0 && scan->text[at] != '[' && colon + digits < n &&
        is_one_of(byte_at(scan, at + n), "/?#"))
        for (; n < PASSWORD_BYTES && at + n < scan->bytes && !is_one_of(scan->text[at + n], " \t\r\n\"'<>`"); n++)
            sign = scan->text[at + n] == '@' && is_alnum(byte_at(scan, at + n + 1)) ? n : sign;
    else
        sign = 0;
    *ret_before = sign ? scheme : 0;
    return sign;
}

/* "me:S3cret@host.example" or "@host:1" without a scheme; "image:tag@sha256:x" and "rank:12ab@host" are others. */
size_t match_login(const struct scan *scan, size_t at, size_t *ret_before)
{
    size_t user = begins_word(scan, at, "_.+%-/@:") ? run(scan, at, "_.-", 64) : 0, start = at + user + 1, n, end;

    if (user == 0 || byte_at(scan, start - 1) != ':')
        return 0;
    n = run(scan, start, "_-.!#$%^&*+~", PASSWORD_BYTES);
    end = start + n + 1 + run(scan, start + n + 1, "_-", 64);
    if (n < 6 || byte_at(scan, start + n) != '@' || end < start + n + 2 || !is_one_of(byte_at(scan, end), ".:/(") ||
        has_text(scan, start + n, "@sha") || !is_random(scan, start, n, 0) ||
        (is_digit(scan->text[start]) && is_digit(scan->text[start + n - 1])))
        return 0;
    *ret_before = user + 1;
    return n;
}

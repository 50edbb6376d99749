/* SPDX-License-Identifier: Apache-2.0 */
/* secret_programs.c - passwords that other programs get, as an option, a word or from standard input. */
#include "json.h"
#include "redact.h"
#include "secrets.h"
#include "text.h"

#define COMMAND_BYTES 256 /* how far the words of one command are looked for */

/*
 * Programs with a password in the same word as an option, or in the `nth` one after it, words of Windows for a share
 * not counted; `mark`: only if that is in it, as in "user%password". A word that is no option may also stand in a
 * sentence: what follows has to look random.
 */
static const struct program {
    const char *programs, *options;
    bool same;
    size_t nth;
    char mark;
} programs_with_options[] = {
    {"mysql mysqldump mysqladmin mysqlimport mariadb mariadb-dump 7z 7za rar unrar", "-p -hp", true, 0, 0},
    {"sshpass login mongo mongosh mongodump cqlsh racadm twine useradd usermod", "-p", true, 1, 0},
    {"ipmipower ipmi-power ipmiconsole ipmi-sensors bmc-config redfishtool rdesktop nvdebug", "-p", true, 1, 0},
    {"ipmitool", "password", false, 2, 0},
    {"gh glab doctl anaconda", "-b --body -t", true, 1, 0},
    {"poetry composer", "config", false, 2, 0},
    {"poetry composer", "config", false, 3, 0},
    {"bw", "unlock", false, 1, 0},
    {"bw", "login", false, 2, 0},
    {"zip unzip ipmitool mosquitto_pub mosquitto_sub sqlcmd bcp", "-P", true, 1, 0},
    {"ldapsearch ldapadd ldapmodify ldapwhoami ldappasswd kadmin", "-w", true, 1, 0},
    {"ldappasswd coscmd", "-s", true, 1, 0},
    {"redis-cli valkey-cli", "-a AUTH auth", false, 1, 0},
    {"redis-cli valkey-cli", "AUTH auth", false, 2, 0},
    {"openssl", "-k -K -5 -6 -apr1", false, 1, 0},
    {"mc", "set add user", false, 4, 0},
    {"curl", "-u -U", true, 1, ':'},
    {"curl", "-E --cert", true, 1, ':'},
    {"curl", "-b", true, 1, '='},
    {"curl", "--oauth2-bearer", false, 1, 0},
    {"http https", "-a", true, 1, ':'},
    {"smbclient smbget rpcclient net", "-U --user=", true, 1, '%'},
    {"lftp open", "-u", true, 1, ','},
    {"plink pscp psftp", "-pw", false, 1, 0},
    {"keytool jarsigner", "-storepass -keypass", false, 1, 0},
    {"snmpget snmpset snmpwalk snmpbulkwalk", "-A -X -c", true, 1, 0},
    {"xfreerdp xfreerdp3 wlfreerdp", "/p:", true, 0, 0},
    {"vault bao", "login -no-print -method=token unwrap unseal renew revoke lookup", false, 1, 0},
    {"vault bao", "put write", false, 2, '='},
    {"wandb", "login --relogin --cloud --verify", false, 1, 0},
    {"wandb", "--host login", false, 2, 0},
    {"net", "use", false, 1, 0},
    {"net", "user", false, 2, 0},
    {"nmcli", "password wifi-sec.psk 802-11-wireless-security.psk", false, 1, 0},
    {"aws", "aws_secret_access_key aws_session_token", false, 1, 0},
    {"aws gcloud", "SecureString activate-refresh-token", false, 2, 0},
    {"pulumi", "set", false, 3, 0},
    {"ossutil ossutil64 obsutil swanlab gem nuget", "-k= -k", true, 1, 0},
    {"ssh-keygen", "-N -P", true, 1, 0},
    {"rclone", "obscure pass secret_access_key client_secret", false, 1, 0},
    {"ngrok pro ansible-vault", "authtoken add-authtoken attach encrypt_string", false, 1, 0},
    {"cargo vastai conda", "login api-key token", false, 1, 0},
    {"rabbitmqctl", "add_user change_password", false, 2, 0},
    {"htpasswd", "-b -bc -cb -Bb -Bbc -bB -cBb", false, 3, 0},
    {"htpasswd", "-nb -bn -nbB -Bbn -nBb", false, 2, 0},
};

/* Programs that read a password from standard input, with a word that says so. */
static const struct {
    const char *programs, *words;
} readers[] = {
    {"sudo", "-S"},
    {"docker podman nerdctl skopeo buildah helm oras crane passwd", "--password-stdin --stdin"},
    {"gh glab", "--with-token --stdin"},
    {"gpg", "--passphrase-fd"},
    {"vault", "-"},
    {"chpasswd kinit cryptsetup su wandb ecryptfs-add-passphrase", ""},
};

static bool is_among(const char *names, struct piece word)
{
    const char *slash = memrchr(word.text, '/', word.n);

    if (slash)
        word = (struct piece){.text = slash + 1, .n = word.n - (size_t)(slash + 1 - word.text)};
    FOR_PIECES (name, names, " ")
        if (name.n == word.n && memcmp(name.text, word.text, name.n) == 0)
            return true;
    return false;
}

bool secret_has_short_option(const char *word)
{
    return ANY_OF(i, COUNT(programs_with_options),
                  is_among(programs_with_options[i].programs, (struct piece){.text = word, .n = strlen(word)}));
}

bool secret_looks_random(const struct scan *scan, size_t at)
{
    size_t n = run(scan, at, "_-.!@#$%^&*+=", 64), digits = 0;

    for (size_t i = at; i < at + n; i++)
        digits += is_digit(scan->text[i]);
    return n >= 6 && digits > 0 && digits < n;
}

/* A port, a path, another option, or nothing */
static bool is_no_password(const struct program *row, char option, struct piece word)
{
    const struct scan scan = {.text = word.text, .bytes = word.n};
    size_t digits = 0;

    while (digits < word.n && (is_digit(word.text[digits]) || word.text[digits] == row->mark))
        digits++;
    return word.n == 0 || (word.n == digits && (word.n < 6 || row->mark)) || is_one_of(*word.text, "-/.") ||
           (row->mark && !memchr(word.text, row->mark, word.n)) || (is_alnum(option) && !secret_looks_random(&scan, 0));
}

/* "Z:", "\\host\share", "/user:me" */
static bool is_skipped(struct piece word)
{
    return word.n > 0 && (*word.text == '\\' || (word.n == 2 && word.text[1] == ':') ||
                          (word.n > 6 && strncasecmp(word.text, "/user:", 6) == 0));
}

static struct piece word_of(const json_t *words, size_t i)
{
    const char *word = json_text_at(words, i);

    return (struct piece){.text = word, .n = strlen(word)};
}

/* The bytes of the option at `at`, also as the last of several letters: "-sSLu" */
static size_t option_bytes(const struct scan *scan, size_t at, struct piece option)
{
    size_t n = 1;

    if (option.n <= scan->bytes - at && memcmp(scan->text + at, option.text, option.n) == 0)
        return option.n;
    if (option.n != 2 || *option.text != '-' || byte_at(scan, at) != '-')
        return 0;
    while (n < 10 && isalpha((unsigned char)byte_at(scan, at + n)))
        n++;
    return scan->text[at + n - 1] == option.text[1] && (at + n == scan->bytes || is_one_of(scan->text[at + n], " \t"))
               ? n
               : 0;
}

static bool is_option(const char *options, struct piece word)
{
    const struct scan scan = {.text = word.text, .bytes = word.n};

    for (const char *left = options; *left;)
        if (option_bytes(&scan, 0, text_take(&left, " ")) == word.n)
            return true;
    return false;
}

int secret_after_option(const json_t *words, size_t program, size_t at)
{
    const struct piece name = word_of(words, program), word = word_of(words, at);

    FOR_EACH (row, programs_with_options, COUNT(programs_with_options)) {
        size_t option = at;
        bool is_certain;

        if (!is_among(row->programs, name))
            continue;
        for (const char *left = row->options; row->same && *left;) {
            struct piece part = text_take(&left, " ");

            if (word.n > part.n && memcmp(word.text, part.text, part.n) == 0 &&
                !is_no_password(row, *part.text, (struct piece){.text = word.text + part.n, .n = word.n - part.n}))
                return (int)part.n;
        }
        for (size_t n = 0; n < row->nth && option > program; n++)
            do
                option--;
            while (option > program && is_skipped(word_of(words, option)));
        /* Words right after the program are no sentence. */
        is_certain = option == program + 1 && !memchr(word.text, ' ', word.n);
        if (row->nth && option > program && is_option(row->options, word_of(words, option)) && !is_skipped(word) &&
            !is_no_password(row, is_certain ? '-' : *word_of(words, option).text, word))
            return 0;
    }
    return -1;
}

/* Is one of the programs in front of `at`, in the same command? */
static bool runs(const struct scan *scan, size_t at, const char *programs)
{
    size_t end = at, start;

    while (end > 0 && at - end < COMMAND_BYTES) {
        for (start = end; start > 0 && !is_one_of(scan->text[start - 1], " \t\"'`(;|&\r\n"); start--)
            if (at - start >= COMMAND_BYTES)
                return false;
        if (is_among(programs, (struct piece){.text = scan->text + start, .n = end - start}))
            return true;
        if (start == 0 || is_one_of(scan->text[start - 1], "`(;|&\r\n"))
            return false;
        end = start - 1;
    }
    return false;
}

/* The word after the blanks at `*at`, without its quotes; where it begins. */
static struct piece read_word(const struct scan *scan, size_t *at, char *ret_quote)
{
    size_t n = 0;
    char quote;

    while (is_one_of(byte_at(scan, *at), " \t"))
        ++*at;
    quote = is_one_of(byte_at(scan, *at), "\"'") ? scan->text[(*at)++] : '\0';
    while (*at + n < scan->bytes &&
           (quote ? scan->text[*at + n] != quote : !is_one_of(scan->text[*at + n], " \t\r\n\"'`;|&")))
        n++;
    *ret_quote = quote;
    return (struct piece){.text = scan->text + *at, .n = n};
}

/* The password of this row after the option at `at`, which it reads. */
static size_t match_option(const struct scan *scan, const struct program *row, struct piece option, size_t at,
                           size_t *ret_start)
{
    size_t n_option = option_bytes(scan, at, option), start = at + n_option;
    size_t nth = is_one_of(byte_at(scan, start), " \t") ? row->nth : row->same;
    struct piece word = {0};
    char quote = '\0';

    if (n_option == 0 || nth == 0 || !runs(scan, at - 1, row->programs))
        return 0;
    for (size_t n = 0, last = start + COMMAND_BYTES; n < nth && start < last; n += !is_skipped(word)) {
        start += word.n + (quote != '\0');
        word = read_word(scan, &start, &quote);
        if (word.n == 0)
            return 0;
    }
    /* In 'mysql -p' the quote is not that of a value. */
    if ((quote && is_one_of(byte_at(scan, start), " \t")) || is_skipped(word) ||
        is_no_password(row, *option.text, word) || has_text(scan, start, REDACTED))
        return 0;
    *ret_start = start;
    return word.n;
}

size_t match_short_option(const struct scan *scan, size_t at, size_t *ret_before)
{
    if (!is_one_of(byte_before(scan, at), " \t\"'"))
        return 0;
    for (size_t i = 0; i < COUNT(programs_with_options); i++) {
        const char *options = programs_with_options[i].options;

        for (const char *left = is_one_of(byte_at(scan, at), options) ? options : ""; *left;) {
            size_t start, n = match_option(scan, &programs_with_options[i], text_take(&left, " "), at, &start);

            *ret_before = n ? start - at : 0;
            if (n)
                return n;
        }
    }
    return 0;
}

/* Does a program in the text read a password from its input? */
static bool reads_password(struct piece text)
{
    for (size_t i = 0; i < COUNT(readers); i++) {
        bool is_program = false, is_told = !*readers[i].words;

        for (size_t at = 0, n; at < text.n; at += n + 1) {
            struct piece word = {.text = text.text + at};

            for (n = 0; at + n < text.n && !is_one_of(text.text[at + n], " \t\"'"); n++)
                ;
            /* A sentence may go on behind the command. */
            for (word.n = n; word.n > 0 && is_one_of(word.text[word.n - 1], ".,:;)");)
                word.n--;
            is_program |= is_among(readers[i].programs, word);
            is_told |= is_among(readers[i].words, word);
        }
        if (is_program && is_told)
            return true;
    }
    return false;
}

/* "echo x | sudo -S", "printf '%s' x | docker login --password-stdin", "sudo -S <<< x" */
size_t match_input(const struct scan *scan, size_t at, size_t *ret_before)
{
    static const char *const writers[] = {"echo -n ", "echo -e ", "echo ", "printf "};
    size_t last = scan->bytes - at < COMMAND_BYTES ? scan->bytes : at + COMMAND_BYTES, start = 0, end, n_quotes;
    char quote;

    if (has_text(scan, at, "<<<")) {
        const struct scan near = {.text = scan->text, .bytes = last};
        size_t from = at;

        start = at + 3;
        end = read_word(&near, &start, &quote).n;
        end += start;
        while (from > 0 && at - from < COMMAND_BYTES && !is_one_of(scan->text[from - 1], "\r\n;|&`("))
            from--;
        if (!reads_password((struct piece){.text = scan->text + from, .n = at - from}))
            return 0;
    } else {
        const char *pipe;
        size_t to;

        for (size_t i = 0; i < COUNT(writers) && start == 0; i++)
            if (has_text(scan, at, writers[i]) && !is_alnum(byte_before(scan, at)))
                start = at + strlen(writers[i]);
        pipe = start && start < last ? memchr(scan->text + start, '|', last - start) : NULL;
        if (!pipe || byte_at(scan, (size_t)(pipe - scan->text) + 1) == '|' ||
            memchr(scan->text + start, '\n', (size_t)(pipe - scan->text) - start))
            return 0;
        end = (size_t)(pipe - scan->text);
        for (to = end + 1; to < last && !is_one_of(scan->text[to], "\r\n;|&`)");)
            to++;
        if (!reads_password((struct piece){.text = pipe + 1, .n = to - end - 1}))
            return 0;
        while (end > start && is_one_of(scan->text[end - 1], " \t"))
            end--;
    }
    n_quotes = is_one_of(byte_at(scan, start), "\"'");
    if (end <= start + n_quotes || has_text(scan, start, REDACTED) ||
        secret_is_reference(scan->text + start + n_quotes, end - start - n_quotes))
        return 0;
    *ret_before = start - at;
    return end - start;
}

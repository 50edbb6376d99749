/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every rule of a snapshot against identifiers of every type: files that contain nothing but identifiers, in the forms
 * of all kinds of files, are scrubbed, and no identifier is left. A new rule is tested automatically, with the paths of
 * its pattern.
 */
#include "unit.h"

#include "machine/source/scrub.c"

/* All are invented, and none looks like a replacement. */
static const char *const identifiers[] = {
    /* Machines and their parts: serial numbers, asset tags, identifiers of the makers. */
    "1654321000043", "132452100178", "4567890123456789012", "MT2312X01234", "PN1324A00721", "S5XXNX0R512345",
    "7XK2QR3Z", "naa.5000c500a1b2c3d4", "0x5000c500a1b2c3d4", "eui.00253851b1c2d3e4", "akme-asset-004711",
    /* Hardware addresses. */
    "10:70:fd:31:82:9e", "10-70-fd-31-82-9e", "1070fd31829e", "1070.fd31.829e", "10:70:FD:31:82:9E",
    "10:70:fd:ff:fe:31:82:9e", "10-70-fd-ff-fe-31-82-9e", "1070:fdff:fe31:829e", "1070fdfffe31829e",
    "0x1070fdfffe31829e", "80:00:02:08:fe:80:00:00:00:00:00:00:10:70:fd:ff:fe:31:82:9e",
    /* Network addresses. */
    "10.77.88.99", "10.77.88.99/20", "10.77.88.99:29500", "63584D0A", "ip-10-77-88-99", "fe80::1270:fdff:fe31:829e",
    "fe80::1270:fdff:fe31:829e%bond0", "2603:10a6:20b:1c2::17", "2603:10A6:20B:1C2::17", "[2603:10a6:20b:1c2::17]:8080",
    "2603:10a6:020b:01c2:0000:0000:0000:0017", "::ffff:10.77.88.99", "fd77:8899:aabb::/48",
    /* UUIDs. */
    "9f8e7d6c-5b4a-3928-1706-f5e4d3c2b1a0", "9F8E7D6C-5B4A-3928-1706-F5E4D3C2B1A0", "9f8e7d6c5b4a39281706f5e4d3c2b1a0",
    "{9f8e7d6c-5b4a-3928-1706-f5e4d3c2b1a0}", "GPU-9f8e7d6c-5b4a-3928-1706-f5e4d3c2b1a0",
    "MIG-9f8e7d6c-5b4a-3928-1706-f5e4d3c2b1a0",
    /* People, hosts and projects. */
    "e.muster+gpu@akme.example", "ops@akmedc.internal", "node-17.akmedc.example.net", "gke-akme-pool-1a2b3c4d-x9z8",
    "akmegpu0017", "akmefirma", "Akmefirma", "trainer-7d9f8b6c5d-x2x4z", "akme-prod-123456",
    "/home/erikamuster/train.py", "/lustre/proj-akme99/run7", "https://erikamuster:akmepw1@git.akmedc.example/x",
    /* Of clouds. */
    "i-0abcd1234ef567890", "arn:aws:iam::132452100178:role/akme-train", "projects/akme-prod-123456/zones/x",
    "/subscriptions/9f8e7d6c-5b4a-3928-1706-f5e4d3c2b1a0/resourceGroups/akme-rg",
    "ocid1.instance.oc1.iad.anuwcljt5rg7akmeq3zy4w5x6v7u2t3s4r5q",
    /* Secrets. */
    "hf_AkmeAkmeAkmeAkmeAkmeAkmeAkme0042", "ghp_akmeAkmeAkmeAkmeAkme0123456789abcd",
    "github_pat_11AKMEAKME0_akmeAkmeAkme0123456789", "glpat-akmeAkmeAkme0123456x", "xoxb-132452100178-akmeAkmeAkme0123",
    "sk-akmeAkmeAkmeAkmeAkme0123456789", "nvapi-akmeAkmeAkmeAkme0123456789_abc", "AKIAAKMEAKMEAKME0042",
    "eyJhbGciOiJIUzI1NiJ9.eyJha21lIjoiMTIzNCJ9.c2lnbmF0dXJlLWFrbWU", "4f1e9ca7b8c9d0a7b8c9d0a7b8c9d0a7b8c9d0a1",
    "AAAAB3NzaC1yc2EAAAADAQABAAABgQCakme"};

/* Parts of identifiers, if a rule recognised only their end or their beginning: none of these may be left either. */
static const char *const parts[] = {"akme",     "erikamuster", "1654321000", "1324521001", "45678901234", "MT2312X0",
                                    "PN1324A0", "S5XXNX0R",    "7XK2QR3",    "c500a1b2",   "51b1c2d3",    "fd31829e",
                                    "fd:31:82", "fd-31-82",    "fe31:829e",  "fe31829e",   "10.77.88",    "10-77-88",
                                    "10a6:20b", "10a6:020b",   "8899:aabb",  "9f8e7d6c",   "5b4a3928",    "x2x4z",
                                    "x9z8",     "0abcd1234",   "anuwcljt",   "eyJha21l",   "7b8c9d0",     "AAAAB3Nz"};

/* Lines of the formats that are read, and of no format. The first is alone in a file of one line. */
static const char *const forms[] = {
    "%s", "NVIDIA %s", "%s: 1", "# %s", "NAME=%s", "NAME=\"%s\"", "key: %s", "\"key\": \"%s\",", "a %s b", "a (%s) b",
    /* Of modprobe.d, dpkg, mounts, maps, modules, ld.so.conf, the driver, Python, the kernel. */
    "options nvidia NVreg_X=%s", "options nvidia NVreg_RegistryDwords=\"PeerMappingOverride=%s;\"", "blacklist %s",
    "alias nvidia %s", "install nvidia %s", "softdep nvidia pre: %s", "Package: libnccl2\nVersion: %s\n",
    "Package: %s\nVersion: 1\n", "tmpfs /dev/shm tmpfs rw,size=%s 0 0", "none /%s tmpfs rw 0 0", "x / %s rw 0 0",
    "0-1 r-xp 0 00:00 0 /usr/lib/%s/libx.so.1", "0-1 r-xp 0 00:00 0 /usr/lib/lib%s.so.1", "%s 65536 1 - Live 0x0",
    "nvidia 65536 1 %s, Live 0x0", "/usr/lib/%s", "include /etc/%s/*.conf", "driver %s", "Model: %s",
    "GPU UUID: GPU-%s", "Bus Location: %s", "NVRM version: NVIDIA %s", "RegistryDwords: \"%s\"", "MemTotal: %s kB",
    "Name: %s", "Version: %s", "iommu=%s", "export NCCL_X=%s", "__version__ = '%s'", "#define NAME %s", "ID=%s",
    "kernel: NVRM: Xid (PCI:0000:0f:00): 79, pid=1, name=%s", "%s kernel: NVRM: Xid (PCI:0000:0f:00): 79, x",
    "[ 1.0] NVRM: loading NVIDIA %s", "Fabric Manager version %s", "x Installed: nvidia-fabric-manager-%s",
    "{\"event\": \"begin\", \"boot\": \"%s\", \"step\": \"%s\"}", "updates/dkms/%s.ko: kernel/%s.ko", "[%s] NVRM: x",
    "[%s]", "%sT00:00:00", "2026-01-01T00:00:00%s", "eth0\t%s\t00000000\t0003\t0\t0\t0\t00000000",
    "Max open files %s %s files", "Cpus_allowed_list:\t%s"};

/* A path that the pattern matches. */
static void path_of(const char *pattern, char *ret_path)
{
    for (; *pattern; pattern++) {
        bool deep = pattern[0] == '*' && pattern[1] == '*';

        *ret_path = *pattern == '#' ? '1' : 'x';
        if (*pattern == '*' && deep)
            ret_path += sprintf(ret_path, pattern[2] == '/' ? "/x" : "x");
        else if (*pattern == '*' || *pattern == '#')
            ret_path++;
        else
            *ret_path++ = *pattern;
        pattern += deep;
    }
    *ret_path = '\0';
}

/* Lines with an identifier, one of the forms in front. */
static size_t write_text(const char *identifier, size_t first, char *text, size_t bytes)
{
    const size_t n = sizeof(forms) / sizeof(forms[0]);
    size_t used = 0;

    for (size_t i = 0; i < n; i++) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        used += (size_t)snprintf(text + used, bytes - used, forms[(first + i) % n], identifier, identifier);
#pragma GCC diagnostic pop
        used += (size_t)snprintf(text + used, bytes - used, "\n");
    }
    return used;
}

/* The rows of a kind; *ret_n: how many. */
static const struct scrub_row *rows_of(int kind, size_t *ret_n)
{
    *ret_n = kind == CACHE_FILES ? COUNT(file_rows) : COUNT(fact_rows);
    return kind == CACHE_FILES ? file_rows : kind == CACHE_FACTS ? fact_rows : NULL;
}

static bool holds_numbers(const char *pattern)
{
    return strstr(pattern, "counters/") || strstr(pattern, "statistics/") || strstr(pattern, "meminfo") ||
           strstr(pattern, "limits");
}

/* Every path with a rule, filled with one identifier, except the environment, from which host names are learned. */
static void fill_files(json_t *kept[CACHE_KINDS], const char *identifier, size_t first)
{
    static char text[65536];
    char path[PATH_MAX];
    size_t bytes = write_text(identifier, first, text, sizeof(text));

    assert_true(bytes + 1 < sizeof(text));
    for (int kind = 0; kind < CACHE_KINDS; kind++) {
        size_t n;
        const struct scrub_row *rows = rows_of(kind, &n);

        kept[kind] = json_object();
        for (size_t i = 0; rows && i < n; i++) {
            const char *pattern = rows[i].pattern;

            /* Counters and limits may be any number. */
            if (holds_numbers(pattern) && identifier[strspn(identifier, "0123456789")] == '\0')
                continue;
            if (kind == CACHE_FACTS) {
                snprintf(path, sizeof(path), "/x\t%s", pattern);
                json_object_set_new(kept[kind], path, json_pack("{s:{s:s}}", "value", "NCCL_X", identifier));
                snprintf(path, sizeof(path), "/y\t%s", pattern);
                json_object_set_new(kept[kind], path, json_pack("{s:s}", "value", identifier));
                continue;
            }
            path_of(pattern, path);
            assert_true(scrub_match(pattern, path));
            json_object_set_new(kept[kind], path, json_stringn_nocheck(text, bytes));
        }
    }
    /* A fact without a row for its text. */
    json_object_set_new(kept[CACHE_FACTS], "/z\tx", json_pack("{s:[s], s:s}", "value", identifier, "x", identifier));
}

/* Variables with a known name or prefix. */
static void fill_environment(json_t *kept[CACHE_KINDS], const char *identifier)
{
    static const char *const variables[] = {"NCCL_X",
                                            "NVSHMEM_X",
                                            "NVSHMEM_SYMMETRIC_SIZE",
                                            "CUDA_X",
                                            "DEEP_EP_X",
                                            "UCX_NET",
                                            "OMPI_COMM_WORLD_X",
                                            "RANK",
                                            "WORLD_SIZE",
                                            "SLURM_PROCID",
                                            "LD_LIBRARY_PATH",
                                            "LD_PRELOAD",
                                            "PYTHONPATH",
                                            "PATH",
                                            "HOME",
                                            "VIRTUAL_ENV",
                                            "MASTER_ADDR",
                                            "NCCL_HOSTID",
                                            "NCCL_COMM_ID",
                                            "EPKIT_X",
                                            "CONDA_PREFIX",
                                            "NCCL_API_TOKEN",
                                            "SLURM_JOB_ACCOUNT",
                                            "USER_X"};
    json_t *values = json_object();

    for (int kind = 0; kind < CACHE_KINDS; kind++)
        kept[kind] = json_object();
    for (size_t i = 0; i < sizeof(variables) / sizeof(variables[0]); i++)
        json_object_set_new(values, variables[i], json_string(identifier));
    json_object_set_new(kept[CACHE_FACTS], CACHE_ENVIRONMENT "\t" CACHE_ENVIRONMENT_FACT,
                        json_pack("{s:o}", "value", values));
}

static const char *left_in(const char *text, const char *identifier)
{
    if (strcasestr(text, identifier))
        return identifier;
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++)
        if (strcasestr(text, parts[i]))
            return parts[i];
    return NULL;
}

/* How many occurrences a snapshot has. Consumes the cache. */
static int count_left(json_t *kept[CACHE_KINDS], const char *identifier, size_t least)
{
    json_t *all = scrub_snapshot(kept, false);
    size_t n = 0;
    int n_left = 0;

    assert_non_null(all);
    FOR_MEMBERS (kind, entries, all) {
        FOR_MEMBERS (path, entry, entries) {
            char *text = json_dumps(entry, JSON_ENCODE_ANY | JSON_ENSURE_ASCII);
            const char *left = left_in(text, identifier);

            if (left) {
                const char *at = strcasestr(text, left);

                print_message("%s: of %s is left: ...%.80s\n", path, identifier, at > text + 40 ? at - 40 : text);
                n_left++;
            }
            free(text);
            n++;
        }
    }
    assert_true(n >= least);
    json_decref(all);
    for (int i = 0; i < CACHE_KINDS; i++)
        json_decref(kept[i]);
    return n_left;
}

TEST(no_rule_leaves_an_identifier)
{
    json_t *kept[CACHE_KINDS];
    int n_left = 0;

    for (size_t i = 0; i < sizeof(identifiers) / sizeof(identifiers[0]); i++) {
        for (size_t first = 0; first < 9; first += 1 + i % 8) {
            fill_files(kept, identifiers[i], first);
            n_left += count_left(kept, identifiers[i], 50);
        }
        fill_environment(kept, identifiers[i]);
        n_left += count_left(kept, identifiers[i], 1);
    }
    assert_int_equal(n_left, 0);
}

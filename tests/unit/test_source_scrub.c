/* SPDX-License-Identifier: Apache-2.0 */
/* Scrubbing of texts and paths. Whole machines full of identifiers: tests/machines/planted.py. */
#include "machine/source/scrub.h"
#include "machine/source/state.h"
#include "tree.h"
#include "unit.h"

#define UUID "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"
#define UUID_DISK "5f0c1e2d-3b4a-5968-7786-95a4b3c2d1e0"
#define GUID "0200:5eff:fe00:53fa"

static char *pass(struct scrub *scrub, const char *text, unsigned flags, const char *words)
{
    size_t bytes;
    char *out;
    FILE *file = open_memstream(&out, &bytes);

    scrub_text(scrub, text, strlen(text), flags, words, file);
    fclose(file);
    return out;
}

TEST(the_general_pass_knows_identifiers)
{
    static const struct {
        const char *text, *wanted;
        unsigned flags;
        const char *words;
    } cases[] = {
        {"", "", 0, NULL},
        {"plain words, 1 and 2", "plain words, 1 and 2", 0, NULL},
        {"x" UUID "y", "x00000000-0000-0000-0000-000000000001y", 0, NULL},
        {"GPU-" UUID " GPU-" UUID_DISK " gpu-" UUID,
         "GPU-00000000-0000-0000-0000-000000000001 GPU-00000000-0000-0000-0000-000000000002 "
         "gpu-00000000-0000-0000-0000-000000000001",
         0, NULL},
        {"0A1B2C3D-4E5F-6071-8293-A4B5C6D7E8F9 0a1b2c3d_4e5f_6071_8293_a4b5c6d7e8f9",
         "00000000-0000-0000-0000-000000000001 00000000_0000_0000_0000_000000000001", 0, NULL},
        {"GPU-12345", "GPU-00000000-0000-0000-0000-000000000001", 0, NULL},
        {"GPU-0 GPU-x", "GPU-0 GPU-x", 0, NULL},
        {"GPU-" UUID ",GPU-0a1b", "GPU-00000000-0000-0000-0000-000000000001,GPU-00000000-0000-0000-0000-000000000001",
         0, NULL},
        {"10.1.2.3:80 10.1.2.4 10.1.2.3", "192.0.2.1:80 192.0.2.2 192.0.2.1", 0, NULL},
        {"0.0.0.0 127.0.0.1 255.255.255.0 224.0.0.1", "0.0.0.0 127.0.0.1 255.255.255.0 224.0.0.1", 0, NULL},
        {"1.2.3 1.2.3.4.5 1.2.3.256 1.2.3.1234", "1.2.3 1.2.3.4.5 1.2.3.256 1.2.3.1234", 0, NULL},
        {"v12.8.3.14 x-12.8.3.14 libx.so.12.8.3.14 12.8.3.14-1", "v12.8.3.14 x-12.8.3.14 libx.so.12.8.3.14 12.8.3.14-1",
         SCRUB_VERSIONS, NULL},
        {"host 12.8.3.14", "host 192.0.2.1", SCRUB_VERSIONS, NULL},
        {"v12.8.3.14", "v192.0.2.1", 0, NULL},
        {"ip-10-1-2-3 x 10.1.2.3", "ip-192-0-2-1 x 192.0.2.1", 0, NULL},
        {"fe80::1234:5678, [2001:db8:1::42]:80.", "fe80::1, [2001:db8::2]:80.", 0, NULL},
        {"::ffff:10.1.2.3 10.1.2.3", "::ffff:192.0.2.1 192.0.2.1", 0, NULL},
        {"::1 :: 1::2 ff02::1 std::string a::b abc:def", "::1 :: 1::2 ff02::1 std::string a::b abc:def", 0, NULL},
        {"0:1:2:3:4:5:6:7", "0:1:2:3:4:5:6:7", 0, NULL},
        {"aa:bb:cc:dd:ee:ff AA-BB-CC-DD-EE-FF 00:00:00:00:00:00",
         "00:00:5e:00:53:01 00-00-5e-00-53-02 00:00:00:00:00:00", 0, NULL},
        {"80:00:00:48:fe:80:00:00:00:00:00:00:02:00:5e:ff:fe:00:53:fa", "00:00:5e:00:53:01", 0, NULL},
        {"10:20:30 0000:0f:00.0 0000:0f:00", "10:20:30 0000:0f:00.0 0000:0f:00", 0, NULL},
        {GUID " 0000:0000:0000:0000", "0000:0000:0000:0001 0000:0000:0000:0000", 0, NULL},
        {"see /home/me/x and '/usr/lib/libx.so.1', /acme/lib",
         "see /home/dir1/dir2 and '/usr/lib/libx.so.1', /dir3/lib", 0, NULL},
        {"a/b and/or", "a/b and/or", 0, NULL},
        {"ERIKA on node-7", "user1 on host1", 0, NULL},
        {"fd00:1234:5678::/48 ::/0 10.1.2.0/24 x:/48/a", "2001:db8::1/48 ::/0 192.0.2.1/24 x:/dir1/dir2", 0, NULL},
        {"NET=n1,xn1 n1_0", "NET=n1,xn1 n1_0", 0, NULL},
        {"auto n1,10.1 mlx5_0:1 rocep145s0f1 -1 acme acme_0", "auto word1,10.1 mlx5_0:1 rocep145s0f1 -1 word2 word2_0",
         0, "auto"},
        {"erikas node-77 xerika", "user1s host17 xuser1", 0, NULL},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct scrub scrub;
        char *got;

        scrub_init(&scrub);
        scrub_learn_name(&scrub, SCRUB_USER, "Erika");
        scrub_learn_name(&scrub, SCRUB_HOST, "node-7");
        scrub_learn_name(&scrub, SCRUB_USER, "root");
        scrub_learn_name(&scrub, SCRUB_HOST, "n1");
        scrub_learn_uuids(&scrub, cases[i].text, strlen(cases[i].text));
        got = pass(&scrub, cases[i].text, cases[i].flags, cases[i].words);
        assert_string_equal(got, cases[i].wanted);
        free(got);
        scrub_done(&scrub);
    }
}

/* Those of an overlay, as objects. */
TEST(answers_lose_what_identifies)
{
    struct source *source;
    struct tree tree;
    char *text;

    tree_init(&tree);
    tree_put(
        &tree, "/" SOURCE_OVERLAY,
        "{\"epkit_snapshot\": 1, \"answers\": {\"nvml\": {\"value\": {\"driver\": \"570.124.06\", \"gpus\": [{\"pci\": "
        "\"0000:0f:00.0\", \"uuid\": \"GPU-" UUID "\", \"serial\": \"1654321000042\", \"board_serial\": 1654321000042, "
        "\"minor\": 7, \"name\": \"NVIDIA B200\"}]}}, \"unknown\": {\"value\": \"gpu-node-0042\"}}}");
    assert_int_equal(source_open(tree.place, &source), EP_OK);
    text = snapshot_text(source);
    assert_null(strstr(text, "0042"));
    assert_null(strstr(text, UUID));
    assert_non_null(strstr(text, "NVIDIA B200"));
    assert_non_null(strstr(text, "minor"));
    assert_non_null(strstr(text, "570.124.06"));
    free(text);
    source_free(source);
    tree_done(&tree);
}

/* A key is one word up to its end, or to the end of the text. */
TEST(private_keys_are_replaced)
{
    static const char *const keys[] = {"-----BEGIN RSA PRIVATE KEY-----\nMIIEexample\n-----END RSA PRIVATE KEY-----\nx",
                                       "-----BEGIN RSA PRIVATE KEY-----\nMIIEexample\n"};

    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        struct scrub scrub;
        char *got;

        scrub_init(&scrub);
        got = pass(&scrub, keys[i], 0, NULL);
        assert_null(strstr(got, "MIIE"));
        free(got);
        scrub_done(&scrub);
    }
}

/* More values than the first range of replacements holds: none is used twice. */
TEST(replacements_differ)
{
    struct scrub scrub;
    json_t *seen = json_object();
    char text[64], *got;

    scrub_init(&scrub);
    for (int i = 0; i < 3000; i++) {
        snprintf(text, sizeof(text), "10.1.%d.%d", i >> 8, i & 255);
        got = pass(&scrub, text, 0, NULL);
        assert_null(json_object_get(seen, got));
        json_object_set_new(seen, got, json_true());
        free(got);
        snprintf(text, sizeof(text), "0a:0b:0c:0d:%02x:%02x", i >> 8, i & 255);
        got = pass(&scrub, text, 0, NULL);
        assert_int_equal(strlen(got), 17);
        assert_null(json_object_get(seen, got));
        json_object_set_new(seen, got, json_true());
        free(got);
    }
    json_decref(seen);
    scrub_done(&scrub);
}

TEST(names_of_common_software_stay)
{
    static const struct {
        const char *path, *wanted;
    } cases[] = {
        {"/", "/"},
        {"/sys/bus/pci/devices/0000:0f:00.0/config", "/sys/bus/pci/devices/0000:0f:00.0/config"},
        {"/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.56.0", "/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.56.0"},
        {"/lib/modules/6.8.0-1021-acme/updates/dkms/mlx5_core.ko.zst",
         "/lib/modules/6.8.0-1021-word1/updates/dkms/mlx5_core.ko.zst"},
        {"/lib/modules/5.14.0-427.13.1.el9_4.x86_64/extra", "/lib/modules/5.14.0-427.13.1.el9_4.x86_64/extra"},
        {"/lib/modules/6.6.72+", "/lib/modules/6.6.72+"},
        {"/etc/modprobe.d/acme-secret.conf", "/etc/modprobe.d/dir1"},
        {"/etc/modprobe.d/nvidia-ibgda.conf", "/etc/modprobe.d/nvidia-ibgda.conf"},
        {"/opt/acme.conf", "/opt/dir1"},
        {"/usr/local/lib/python3.12/dist-packages/nvidia_nvshmem_cu12-3.3.20.dist-info",
         "/usr/local/lib/python3.12/dist-packages/nvidia_nvshmem_cu12-3.3.20.dist-info"},
        {"/opt/deepep/nvshmem/lib/libnvshmem_host.so.3", "/opt/deepep/nvshmem/lib/libnvshmem_host.so.3"},
        {"/home/kubernetes/bin/nvidia/lib64", "/home/kubernetes/bin/nvidia/lib64"},
        {"/home/nvidia/lib", "/home/dir1/lib"},
        {"/data/users/cuda/lib", "/data/users/dir1/lib"},
        {"/lustre/acme/acme/venv/lib/python3.12/site-packages", "/dir1/dir2/dir2/venv/lib/python3.12/site-packages"},
        {"/usr/local/cuda-12.8-acme/lib64", "/usr/local/dir1/lib64"},
        {"/opt/python3-acme", "/opt/dir1"},
        {"/a/../lib", "/dir1/../lib"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct scrub scrub;
        size_t bytes;
        char *got;
        FILE *file = open_memstream(&got, &bytes);

        scrub_init(&scrub);
        scrub_path(&scrub, cases[i].path, strlen(cases[i].path), file);
        fclose(file);
        assert_string_equal(got, cases[i].wanted);
        free(got);
        scrub_done(&scrub);
    }
}

TEST(patterns_match)
{
    static const struct {
        const char *pattern, *text;
        bool matches;
    } cases[] = {{"a*b", "ab", true},
                 {"a*b", "axxb", true},
                 {"a*b", "a/b", false},
                 {"a**b", "a/x/b", true},
                 {"**/x", "/x", true},
                 {"**/x", "/a/b/x", true},
                 {"**/x", "x", false},
                 {"a#", "a", false},
                 {"a#", "a12.8", true},
                 {"a#b", "a1.2b", true},
                 {"a#", "a1x", false},
                 {"#.x", "1.x", true},
                 {"a", "ab", false},
                 {"", "", true},
                 {"*", "", true},
                 {"a", "", false},
                 {"lib*.so.*", "libx.so.1", true},
                 {"*", "a/b", false},
                 {"#", "", false}};

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        if (scrub_match(cases[i].pattern, cases[i].text) != cases[i].matches)
            fail_msg("%s against %s", cases[i].pattern, cases[i].text);
}

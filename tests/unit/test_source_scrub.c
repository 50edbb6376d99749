/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scrubbing: a machine full of identifiers, none of which may be in its snapshot, while the conclusions from it stay
 * the same. For a new file, add it to `places` with everything that may identify a machine in such a file.
 */
#include "machine/source/scrub.h"
#include "machine/source/state.h"
#include "tree.h"
#include "unit.h"

/* --- a machine full of identifiers --- */

#define HOST "gpu-node-0042"
#define DOMAIN "rack7.cluster.example.com"
#define USER "erika.mustermann"
#define MAIL "erika.mustermann@example.org"
#define PROJECT "projekt-geheim"
#define TOKEN "hf_ExampleExampleExampleExample0042"
#define AWS_ID "AKIAEXAMPLEEXAMPLE42"
#define AWS_SECRET "wJalrXUtnFEMIexampleK7MDENGexampleKEY42"
#define PASSWORD "hunter2-example"
#define PRIVATE "MIIEexampleexampleexampleexample0042"
#define IPV4 "198.51.100.42"
#define IPV4_DASHED "198-51-100-42"
#define IPV4_GID "c633:642a"
#define IPV4_ROUTE "2A6433C6"
#define IPV6 "2001:db8:42:0:5054:ff:fe12:3442"
#define IPV6_GID "2001:0db8:0042:0000:5054:00ff:fe12:3442"
#define MAC "00:00:5e:00:53:fa"
#define MAC_SHORT "00005e0053fa"
#define GUID "0200:5eff:fe00:53fa"
#define GUID_HEX "02005efffe0053fa"
#define LINK_LOCAL "fe80:0000:0000:0000:0200:5eff:fe00:53fa"
#define UUID "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"
#define UUID_DISK "5f0c1e2d-3b4a-5968-7786-95a4b3c2d1e0"
#define UUID_PLAIN "0a1b2c3d4e5f60718293a4b5c6d7e8f9"
#define SERIAL "1654321000042"
#define PROCESS "geheimprogramm"
#define COMPANY "akmefirma" /* in user-chosen names */
#define RAIL "akmerail"     /* hosts RAIL01 to RAIL64 */

static const char *const marks[] = {
    HOST,       DOMAIN,     "rack7",     USER,         MAIL,     PROJECT,    TOKEN,      AWS_ID,   AWS_SECRET,
    PASSWORD,   PRIVATE,    IPV4,        IPV4_DASHED,  IPV4_GID, IPV4_ROUTE, IPV6,       IPV6_GID, MAC,
    MAC_SHORT,  GUID,       GUID_HEX,    LINK_LOCAL,   UUID,     UUID_DISK,  UUID_PLAIN, SERIAL,   PROCESS,
    "0a1b2c3d", "5e0053fa", "fe00:53fa", "mustermann", "geheim", "0042",     COMPANY,    RAIL,     "vm7"};

#define NIC "/sys/class/infiniband/mlx5_0/"
#define GPU "/proc/driver/nvidia/gpus/0000:0f:00.0/"

/* The files that are read, each with everything in it that may identify somebody. */
static const struct place {
    const char *path, *text;
} places[] = {
    {NIC "node_guid", GUID "\n"},
    {NIC "sys_image_guid", GUID "\n"},
    {NIC "node_desc", HOST " mlx5_0\n"},
    {NIC "hca_type", "MT4129\n"},
    {NIC "ports/1/gids/0", LINK_LOCAL "\n"},
    {NIC "ports/1/gids/3", "0000:0000:0000:0000:0000:ffff:" IPV4_GID "\n"},
    {NIC "ports/1/gids/4", IPV6_GID "\n"},
    {NIC "ports/1/gids/5", "0000:0000:0000:0000:0000:0000:0000:0000\n"},
    {NIC "ports/1/gid_attrs/ndevs/0", "enx" MAC_SHORT "\n"},
    {NIC "device/net/eth0/address", MAC "\n"},
    {"/sys/class/net/enx" MAC_SHORT "/address", MAC "\n"},
    {"/sys/class/dmi/id/product_serial", SERIAL "\n"},
    {"/sys/class/dmi/id/product_uuid", UUID "\n"},
    {"/sys/class/dmi/id/product_name", "a4-highgpu-8g\n"},
    {"/sys/module/nvidia/parameters/NVreg_Note", MAIL " " TOKEN "\n"},
    {GPU "information", "Model: \t\t NVIDIA B200\nGPU UUID: \t GPU-" UUID "\nSerial Number: \t " SERIAL
                        "\nDevice Minor: \t 0\nBus Location: \t 0000:0f:00.0\n"},
    {"/proc/driver/nvidia/version",
     "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build "
     "(root@" HOST "." DOMAIN ")\n"},
    {"/proc/driver/nvidia/params", "RegistryDwords: \"PeerMappingOverride=1;\"\nNote: \"" HOST "\"\n"},
    {"/proc/version", "Linux version 6.8.0-1021-gcp (" USER "@" HOST ") (gcc 13.3.0) #1 SMP\n"},
    {"/proc/cmdline", "BOOT_IMAGE=/boot/vmlinuz root=UUID=" UUID_DISK " ip=" IPV4 "::192.0.2.1 hostname=" HOST
                      " token=" TOKEN " iommu=pt systemd.machine_id=" UUID_PLAIN " console=ttyS0\n"},
    {"/proc/sys/kernel/osrelease", "6.8.0-1041-" COMPANY "-llm-" PROCESS "\n"},
    {"/lib/modules/6.8.0-1041-" COMPANY "-llm-" PROCESS "/modules.dep", "updates/dkms/mlx5_core.ko:\n"},
    {"/proc/sys/kernel/hostname", HOST "\n"},
    {"/proc/sys/kernel/domainname", DOMAIN "\n"},
    {"/proc/sys/kernel/random/boot_id", UUID "\n"},
    {"/etc/hostname", HOST "." DOMAIN "\n"},
    {"/etc/hosts", IPV4 " " HOST "." DOMAIN "\n"},
    {"/etc/machine-id", UUID_PLAIN "\n"},
    {"/etc/passwd", USER ":x:1000:1000:" MAIL ":/home/" USER ":/bin/sh\n"},
    {"/etc/nccl.conf", "NCCL_SOCKET_IFNAME=" COMPANY "0\nNCCL_COMM_ID=" IPV4 ":1\nNCCL_DEBUG_FILE=/home/" USER "/x\n"},
    {"/etc/resolv.conf", "search " DOMAIN "\nnameserver " IPV4 "\n"},
    {"/home/" USER "/.ssh/id_rsa", "-----BEGIN RSA PRIVATE KEY-----\n" PRIVATE "\n-----END RSA PRIVATE KEY-----\n"},
    {"/proc/self/mounts",
     IPV4 ":/home/" USER " /home/" USER " nfs rw,addr=" IPV4 ",clientaddr=" IPV6 " 0 0\n//" HOST "." DOMAIN
          "/share /mnt/" PROJECT " cifs rw,username=" USER ",password=" PASSWORD
          " 0 0\ntmpfs /dev/shm tmpfs rw,nosuid,size=65536k 0 0\noverlay / overlay rw,lowerdir=/var/"
          "lib/" UUID_PLAIN " 0 0\n"},
    {"/proc/self/status", "Name:\t" PROCESS "\nCpus_allowed_list:\t0-55\nPid:\t42\nCpus_allowed:\tffffffff,ffffffff\n"},
    {"/proc/self/maps", "55d0aa000042-55d0ab000000 r-xp 00000000 fd:00 424242 /home/" USER "/" PROJECT "/bin/" PROCESS
                        "\n7f0000420000-7f0000430000 r-xp 00000000 fd:00 4242 /home/" USER
                        "/lib/libnccl.so.2.25.1\n7f0000420000-7f0000430000 rw-p 0 00:00 0 [heap]\n"},
    {"/proc/self/cgroup", "0::/kubepods/pod" UUID "/" UUID_PLAIN "\n"},
    {"/proc/net/route", "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\neth0\t"
                        "00000000\t" IPV4_ROUTE "\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"},
    {"/proc/modules", "nvidia 65536 1 - Live 0xffffffffc0042000 (OE)\n"},
    {"/etc/modprobe.d/nvidia.conf", "# " MAIL " on " HOST ", " SERIAL "\noptions nvidia NVreg_RegistryDwords="
                                    "\"PeerMappingOverride=1;\" # " USER "\ninstall foo curl -u " USER ":" PASSWORD
                                    " http://" IPV4 "/\noptions geheim key=" TOKEN "\nblacklist nouveau\n"},
    {"/etc/modprobe.d/" COMPANY "-secret.conf",
     "options nvidia NVreg_RegistryDwords=\"PeerMappingOverride=1;" COMPANY "=1;RMNvLinkDisableLinks=0x0\" "
     "NVreg_Note=" COMPANY " NVreg_EnableGpuFirmware=1 # set by " COMPANY "\nblacklist " COMPANY "\nalias x " COMPANY
     "\nsoftdep nvidia pre: " COMPANY " post: nvidia-uvm\noptions nvidia \\\n " COMPANY
     "=1 \\\n NVreg_RestrictProfilingToAdminUsers=0\n"},
    {"/etc/ld.so.conf.d/" COMPANY ".conf", "/usr/local/cuda/lib64\n"},
    {"/etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf # " MAIL "\n/opt/" PROJECT "/lib\n/usr/local/cuda/lib64\n"},
    {"/var/lib/dpkg/status",
     "Package: geheim\nVersion: 1\nMaintainer: " MAIL "\n\nPackage: libnccl2\nStatus: install "
     "ok installed\nMaintainer: " MAIL "\nVersion: 2.25.1-1+cuda12.8\nDescription: at " HOST "\n\n"},
    {"/opt/deepep/python/deep_ep/buffer.py",
     "# " MAIL ": " TOKEN "\nimport os  # " HOST "\nKEY = '" TOKEN "'\nURL = 'https://" HOST "." DOMAIN
     "/x'\nclass Buffer:\n    \"\"\"\n    " USER " " PROJECT "\n    \"\"\"\n    @staticmethod\n    def f(x):\n"
     "        return x[1::2] @ '" IPV4 "'\n" COMPANY "_TOKEN = \"" COMPANY "\"\ndef " COMPANY "(a=\"" COMPANY
     "\"):\n    return " COMPANY "\n@" COMPANY ".wrap\nclass " COMPANY ":\n    async def __init__(self, " COMPANY
     "): self._setup_device_hca_mapping()\n"},
    {"/opt/deepep/python/deep_ep/__init__.py",
     "from ." COMPANY " import x\n__version__ = '1.2.1'\nKEY = '" COMPANY "'\n"},
    {"/opt/deepep/python/deep_ep/" COMPANY ".py", COMPANY " = 1\n"},
    {"/opt/deepep/python/setup.py", "author = '" COMPANY "'\n"},
    {"/opt/deepep/python/deep_ep-1.2.1.dist-info/METADATA",
     "Metadata-Version: 2.1\nName: deep_ep\nVersion: 1.2.1+29d31c0\nAuthor-email: " MAIL "\n\nVersion: " HOST "\n"},
    {"/usr/local/cuda/version.json", "{\"cuda\": {\"version\": \"12.8.1\", \"note\": \"" HOST " " IPV4 "\"}}\n"},
    {"/opt/" PROJECT "/nvshmem_version.h", "/* " MAIL " */\n#define NVSHMEM_VENDOR_MAJOR_VERSION 3 // " HOST "\n"},
    {"/var/log/kern.log",
     "1970-01-01T00:10:00+00:00 " HOST " kernel: NVRM: Xid (PCI:0000:c4:00): 79, pid=4242, name="
     "/home/" USER "/" PROCESS ", GPU " UUID " serial " SERIAL " lost\n1970-01-01 " HOST
     " kernel: NVRM: GPU Board Serial Number: " SERIAL
     "\n[   12.345678] NVRM: Xid (PCI:0000:c4:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset "
     "Required) " USER "\nNov 21 12:00:00 " HOST
     " kernel: NVRM: Xid (PCI:0000:c4:00): 154, GPU recovery action changed "
     "from 0x0 (" USER ") to 0x1 (None)\n" COMPANY "T " HOST " NVRM: Xid (PCI:0000:c4:00): 31, pid=1\n"},
    {"/home/" USER "/" PROJECT "/lib/libx.so.1", "no ELF file"},
};

static const char *const variables[] = {"HOME=/home/" USER,
                                        "USER=" USER,
                                        "LOGNAME=" USER,
                                        "HOSTNAME=" HOST,
                                        "PYTHONPATH=/opt/deepep/python:/home/" USER "/" PROJECT ":" PROJECT "/src",
                                        "LD_LIBRARY_PATH=/usr/local/cuda/lib64:/home/" USER "/lib:$ORIGIN/" PROJECT,
                                        "LD_PRELOAD=/home/" USER "/" PROJECT "/lib/libx.so.1 libfoo.so",
                                        "HF_TOKEN=" TOKEN,
                                        "AWS_ACCESS_KEY_ID=" AWS_ID,
                                        "AWS_SECRET_ACCESS_KEY=" AWS_SECRET,
                                        "PASSWORD=" PASSWORD,
                                        "SSH_PRIVATE_KEY=-----BEGIN RSA PRIVATE KEY-----\n" PRIVATE "\n",
                                        "http_proxy=http://" USER ":" PASSWORD "@" HOST "." DOMAIN ":3128",
                                        "MASTER_ADDR=" HOST "." DOMAIN,
                                        "NCCL_COMM_ID=" IPV4 ":29500",
                                        "NCCL_HOSTID=" HOST,
                                        "NCCL_DEBUG_FILE=/home/" USER "/nccl." HOST ".log",
                                        "NCCL_SOCKET_IFNAME==enx" MAC_SHORT,
                                        "NCCL_PSK=" TOKEN,
                                        "NCCL_IB_HCA=mlx5_0:1,mlx5_1:1",
                                        "NCCL_NOTE=ask " MAIL " at ip-" IPV4_DASHED ".ec2.internal",
                                        "NCCL_API=token=" PASSWORD,
                                        "NCCL_KEY=" AWS_ID " " AWS_SECRET,
                                        "NCCL_URL=https://" USER ":" PASSWORD "@" HOST ":80/" PROJECT,
                                        "NVSHMEM_SYMMETRIC_SIZE=137438953472",
                                        "CUDA_VISIBLE_DEVICES=GPU-" UUID ",GPU-0a1b",
                                        "SSH_CONNECTION=" IPV6 " 50000 " IPV4 " 22",
                                        "INVOCATION_ID=" UUID_PLAIN,
                                        "DEEP_EP_DEVICE_TO_HCA_MAPPING=0:mlx5_0:1,1:mlx5_1:1",
                                        "DEEP_EP_X=" COMPANY "017",
                                        "NCCL_IB_TC=" COMPANY,
                                        "NVSHMEM_HCA_LIST=mlx5_0:1," COMPANY "_0:1,mlx5",
                                        "NCCL_NET=vm7",
                                        "NCCL_SOCKET_FAMILY=ens-" COMPANY,
                                        "NVSHMEM_DEBUG_FILE=" COMPANY "log.%h",
                                        "NVSHMEM_IB_ADDR_RANGE=fd00:1234:5678::/48",
                                        "NCCL_IB_ADDR_RANGE=::/0",
                                        "NVSHMEM_DEBUG=INFO",
                                        "NCCL_NET_GDR_LEVEL=PIX",
                                        "NCCL_DEBUG_SUBSYS=" RAIL "17-ib.x," RAIL "33",
                                        "NCCL_DEBUG_NOWARN=n3",
                                        "SLURM_JOB_NODELIST=" RAIL "[01-32,33-64]-ib,vm7,n3",
                                        "geheim=1"};

static void make_overlay(const struct tree *tree)
{
    tree_put(tree, "/" SOURCE_OVERLAY,
             "{\"epkit_snapshot\": 1, \"answers\": {"
             "\"nvml\": {\"value\": {\"driver\": \"570.124.06\", \"gpus\": [{\"pci\": \"0000:0f:00.0\", \"uuid\": "
             "\"GPU-" UUID "\", \"serial\": \"" SERIAL "\", \"board_serial\": " SERIAL
             ", \"name\": \"NVIDIA B200\"}]}},"
             "\"load:/home/" USER "/lib/libx.so\": {\"value\": {\"ok\": false, \"error\": \"/home/" USER "/" PROJECT
             "/libx.so: undefined symbol: _ZN3c1017RegisterOperatorsD1Ev\"}},"
             "\"unknown\": {\"value\": \"" HOST "\"}},"
             "\"elf\": {\"/home/" USER "/" PROJECT "/libx.so\": {\"soname\": \"libx.so\", \"needed\": [\"libc.so.6\"],"
             " \"runpath\": \"$ORIGIN/../lib:/opt/" PROJECT "/lib\"}},"
             "\"links\": {\"/proc/self/cwd\": \"/scratch/" PROJECT "/" USER "\"},"
             "\"stats\": {\"/dev/nvidia0\": {\"kind\": \"char\", \"bytes\": 0, \"access\": \"rw-\"}}}");
}

static void make_machine(struct tree *tree)
{
    char environ_text[8192];
    size_t used = 0;

    tree_init(tree);
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++)
        tree_put(tree, places[i].path, places[i].text);
    for (size_t i = 0; i < sizeof(variables) / sizeof(variables[0]); i++) {
        memcpy(environ_text + used, variables[i], strlen(variables[i]) + 1);
        used += strlen(variables[i]) + 1;
    }
    tree_put_bytes(tree, "/proc/self/environ", environ_text, used);
    make_overlay(tree);
}

/* The longest possible fact: the whole text. */
static json_t *read_all(const char *text, size_t bytes)
{
    return json_pack("{s:o, s:i}", "text", json_stringn_nocheck(text, bytes), "bytes", (int)bytes);
}

/* The fact of read_all() in a snapshot. */
static const char *text_of(struct source *source, const char *name, const char *path)
{
    return json_string_value(json_object_get(source_fact(source, name, read_all, "%s", path).value, "text"));
}

/* All queries about a path and the folders above it. */
static void ask_about(struct source *source, const char *path)
{
    char folder[PATH_MAX];

    source_read(source, "%s", path);
    source_lines(source, "", "%s", path);
    source_fact(source, "version", read_all, "%s", path);
    source_fact(source, "gib-settings", read_all, "%s", path);
    source_fact(source, "nccl-conf", read_all, "%s", path);
    source_fact(source, "host-name", read_all, "%s", path);
    source_fact(source, "loopback-names", read_all, "%s", path);
    source_fact(source, "shared-subnets", read_all, "%s", path);
    source_fact(source, "equal-routes", read_all, "%s", path);
    source_fact(source, "editable", read_all, "%s", path);
    source_log_fact(source, "dropped-connections", read_all, "", "%s", path);
    source_log_fact(source, "Link down", read_all, "", "%s", path);
    source_log_fact(source, "Link is Down", read_all, "", "%s", path);
    source_fact(source, "gpu-inits", read_all, "%s", path);
    source_fact(source, "packages", read_all, "%s", path);
    source_fact(source, "nvidia-dwords", read_all, "%s", path);
    source_log_fact(source, "xids", read_all, "", "%s", path);
    source_fact(source, "all", read_all, "%s", path);
    source_elf(source, "%s", path);
    snprintf(folder, sizeof(folder), "%s", path);
    for (char *slash; (slash = strrchr(folder, '/'));) {
        source_stat(source, "%s", folder);
        source_resolve(source, "%s", folder);
        *slash = '\0';
        source_list(source, "%s", folder[0] ? folder : "/");
    }
}

static struct source *look(const struct tree *tree)
{
    struct source *source = NULL;

    assert_int_equal(source_open(tree->place, &source), EP_OK);
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++)
        ask_about(source, places[i].path);
    source_environment(source);
    return source;
}

/* Saves the snapshot and reads it again. */
static struct source *mail(struct source *source, char **ret_text)
{
    struct source *again = NULL;
    size_t bytes;

    assert_int_equal(snapshot_text(source, ret_text, &bytes), EP_OK);
    if (source_from_json("mailed", *ret_text, bytes, &again) != EP_OK)
        fail_msg("%s", ep_last_error());
    return again;
}

TEST(no_identifier_leaks)
{
    struct source *source, *mailed;
    struct tree tree;
    char *text;

    make_machine(&tree);
    source = look(&tree);
    mailed = mail(source, &text);
    for (size_t i = 0; i < sizeof(marks) / sizeof(marks[0]); i++) {
        const char *found = strcasestr(text, marks[i]);

        if (found)
            fail_msg("%s: ...%.200s", marks[i], found - text > 60 ? found - 60 : text);
    }
    source_free(source);
    source_free(mailed);
    free(text);
    tree_done(&tree);
}

TEST(what_matters_stays)
{
    struct source *source, *mailed;
    const json_t *gpu;
    struct tree tree;
    char *text;
    struct source_answer fact;
    const char *kept;
    char list[128], release[128];

    make_machine(&tree);
    source = look(&tree);
    source_query(source, "nvml", NULL, NULL, 0);
    mailed = mail(source, &text);

    /* An address of some kind stays one of that kind; an empty one stays empty. */
    assert_string_equal(source_line(mailed, NIC "ports/1/gids/0").text, "fe80:0000:0000:0000:0000:0000:0000:0001");
    assert_int_equal(
        strncmp(source_line(mailed, NIC "ports/1/gids/3").text, "0000:0000:0000:0000:0000:ffff:c000:02", 36), 0);
    assert_int_equal(strncmp(source_line(mailed, NIC "ports/1/gids/4").text, "2001:0db8:0000:", 15), 0);
    assert_string_equal(source_line(mailed, NIC "ports/1/gids/5").text, "0000:0000:0000:0000:0000:0000:0000:0000");

    /* The GPU has the same UUID in the answer of the driver, in /proc and in the environment, in full or shortened. */
    gpu = json_array_get(json_object_get(source_query(mailed, "nvml", NULL, NULL, 0).value, "gpus"), 0);
    assert_string_equal(json_string_value(json_object_get(gpu, "uuid")), "GPU-00000000-0000-0000-0000-000000000001");
    assert_string_equal(json_string_value(json_object_get(gpu, "pci")), "0000:0f:00.0");
    assert_null(json_object_get(gpu, "serial"));
    assert_non_null(
        strstr(source_read(mailed, GPU "information").text, "GPU UUID: \t GPU-00000000-0000-0000-0000-000000000001\n"));
    assert_string_equal(source_env(mailed, "CUDA_VISIBLE_DEVICES"),
                        "GPU-00000000-0000-0000-0000-000000000001,GPU-00000000-0000-0000-0000-000000000001");

    assert_string_equal(source_env(mailed, "NCCL_IB_HCA"), "mlx5_0:1,mlx5_1:1");
    assert_string_equal(source_env(mailed, "DEEP_EP_DEVICE_TO_HCA_MAPPING"), "0:mlx5_0:1,1:mlx5_1:1");
    assert_string_equal(source_env(mailed, "NVSHMEM_SYMMETRIC_SIZE"), "137438953472");
    assert_string_equal(source_line(mailed, "/proc/cmdline").text, "iommu=pt");
    assert_int_equal(source_read(mailed, "/proc/self/mounts").state, SOURCE_NOT_RECORDED);
    assert_non_null(strstr(source_read(mailed, "/proc/self/status").text, "Cpus_allowed_list:\t0-55\n"));
    assert_int_equal(source_read(mailed, "/proc/self/maps").state, SOURCE_NOT_RECORDED);
    assert_int_equal(source_lines(mailed, "", "/var/log/kern.log").state, SOURCE_NOT_RECORDED);
    assert_string_equal(text_of(mailed, "xids", "/var/log/kern.log"), "");
    /* No text of files of administrators; of the driver's options only known keys. */
    assert_int_equal(source_read(mailed, "/etc/modprobe.d/nvidia.conf").state, SOURCE_NOT_RECORDED);
    assert_int_equal(source_read(mailed, "/var/lib/dpkg/status").state, SOURCE_NOT_RECORDED);
    kept = text_of(mailed, "nvidia-dwords", "/etc/modprobe.d/nvidia.conf");
    assert_non_null(strstr(kept, "\"PeerMappingOverride=1;\""));
    assert_null(strstr(kept, "foo"));
    /* A foreign name sorts as before: before nvidia.conf. */
    kept = text_of(mailed, "nvidia-dwords", "/etc/modprobe.d/000001.conf");
    assert_non_null(strstr(kept, "\"PeerMappingOverride=1;;RMNvLinkDisableLinks=0x0\""));
    assert_string_equal(text_of(mailed, "packages", "/var/lib/dpkg/status"), "\n");
    snprintf(release, sizeof(release), "%s", source_line(mailed, "/proc/sys/kernel/osrelease").text);
    assert_true(scrub_match("6.8.0-1041-word#-word#-word#", release));
    assert_string_equal(source_read(mailed, "/etc/passwd").why, "the snapshot does not say");

    /* Plain words of variables stay, and prefix lengths of networks. */
    snprintf(list, sizeof(list), "%s", source_env(mailed, "NVSHMEM_HCA_LIST"));
    assert_int_equal(strncmp(list, "mlx5_0:1,word", 13), 0);
    assert_string_equal(list + strlen(list) - 7, ":1,mlx5");
    assert_int_equal(strncmp(source_env(mailed, "DEEP_EP_X"), "word", 4), 0);
    assert_string_equal(source_env(mailed, "NVSHMEM_DEBUG"), "INFO");
    assert_string_equal(source_env(mailed, "NCCL_NET_GDR_LEVEL"), "PIX");
    assert_int_equal(strncmp(source_env(mailed, "NVSHMEM_IB_ADDR_RANGE"), "2001:db8::", 10), 0);
    assert_string_equal(strchr(source_env(mailed, "NVSHMEM_IB_ADDR_RANGE"), '/'), "/48");
    assert_string_equal(source_env(mailed, "NCCL_IB_ADDR_RANGE"), "::/0");
    assert_int_equal(strncmp(source_env(mailed, "NCCL_DEBUG_NOWARN"), "word", 4), 0);
    assert_int_equal(strncmp(source_env(mailed, "NCCL_NET"), "word", 4), 0);

    /* No text of a program; of facts only booleans and numbers without a row. */
    assert_int_equal(source_read(mailed, "/opt/deepep/python/deep_ep/buffer.py").state, SOURCE_NOT_RECORDED);
    fact = source_fact(mailed, "all", read_all, "/opt/deepep/python/deep_ep/buffer.py");
    assert_int_equal(fact.state, SOURCE_OK);
    assert_true(json_is_null(json_object_get(fact.value, "text")));
    assert_int_equal(json_integer_value(json_object_get(fact.value, "bytes")),
                     json_integer_value(json_object_get(
                         source_fact(source, "all", read_all, "/opt/deepep/python/deep_ep/buffer.py").value, "bytes")));
    assert_int_equal(source_fact(mailed, "all", read_all, "/opt/deepep/python/deep_ep/nothing.py").state,
                     SOURCE_NOT_RECORDED);
    free(text);
    source_free(source);
    /* A snapshot of a snapshot is equal. */
    source = mailed;
    mailed = mail(source, &text);
    assert_string_equal(source_env(mailed, "NVSHMEM_HCA_LIST"), list);
    assert_string_equal(source_line(mailed, "/proc/sys/kernel/osrelease").text, release);
    source_free(source);
    source_free(mailed);
    free(text);
    tree_done(&tree);
}

/* --- the general pass --- */

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
        got = pass(&scrub, cases[i].text, cases[i].flags, cases[i].words);
        assert_string_equal(got, cases[i].wanted);
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

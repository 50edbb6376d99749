/* SPDX-License-Identifier: Apache-2.0 */
/* Parsers for text files of a machine. */
#include "machine/software/read_software.h"
#include "unit.h"
#include "world.h"

static void assert_piece(struct piece piece, const char *expected)
{
    if (!piece_is(piece, expected))
        fail_msg("'%.*s' is not '%s'", (int)piece.n, piece.text, expected);
}

/* --- modprobe.d --- */

static void assert_options(const char *text, const char *expected)
{
    struct parse_modprobe state = {.at = text};
    struct parse_option option;
    char all[1024] = "";
    size_t used = 0;

    while (parse_modprobe_next(&state, "nvidia", &option))
        used += (size_t)snprintf(all + used, sizeof(all) - used, "%.*s(%.*s)", (int)option.name.n, option.name.text,
                                 (int)option.value.n, option.value.text);
    assert_string_equal(all, expected);
    assert_false(parse_modprobe_next(&state, "nvidia", &option));
}

TEST(modprobe)
{
    assert_options("", "");
    assert_options("options nvidia NVreg_A=1 NVreg_B=\"x=1;y=2\"\n", "NVreg_A(1)NVreg_B(x=1;y=2)");
    assert_options("  options\tnvidia  A=1   B=2", "A(1)B(2)");
    assert_options("options nvidia A=\"with blank\" B=\"\"\n", "A(with blank)B()");
    /* Other modules and commands, comments, names with a common prefix. */
    assert_options("options nvidia_drm modeset=1\noptions nvidia-uvm A=1\n# options nvidia A=1\nalias nvidia A=1\n"
                   "softdep nvidia pre: A=1\noptionsnvidia A=1\noptions\noptions nvidia\noptions nvidia flag\n",
                   "");
    assert_options("options nvidia A=1 \\\n    B=2 \\\n\noptions nvidia C=3\n", "A(1)B(2)C(3)");
    assert_options("options nvidia A=1\\", "A(1\\)");
    assert_options("options nvidia A=\"never closed B=1\noptions nvidia C=1\n", "A(\"never closed B=1)C(1)");
}

TEST(command_line)
{
    const char *at = "root=/dev/sda1 nvidia.A=1 nvidia_drm.B=1 ro nvidia.C=\"x y\" nvidia. nvidia.flag nvidia.D=4\n";
    struct parse_option option;

    assert_true(parse_cmdline_next(&at, "nvidia", &option));
    assert_piece(option.name, "A");
    assert_true(parse_cmdline_next(&at, "nvidia", &option));
    assert_piece(option.value, "x y");
    assert_true(parse_cmdline_next(&at, "nvidia", &option));
    assert_piece(option.name, "D");
    assert_piece(option.value, "4");
    assert_false(parse_cmdline_next(&at, "nvidia", &option));
    assert_false(parse_cmdline_next(&at, "nvidia", &option));
}

static struct piece all_of(const char *text)
{
    return (struct piece){.text = text, .n = strlen(text)};
}

TEST(dwords)
{
    struct piece value;

    assert_true(parse_dword(all_of("PeerMappingOverride=1;"), "PeerMappingOverride", &value));
    assert_piece(value, "1");
    assert_true(parse_dword(all_of("A=2; PeerMappingOverride = 0x1 ;B"), "PeerMappingOverride", &value));
    assert_piece(value, "0x1");
    assert_true(parse_dword(all_of("A=1;A=2"), "A", &value));
    assert_piece(value, "2");
    assert_false(parse_dword(all_of("XPeerMappingOverride=1;PeerMappingOverrideX=1"), "PeerMappingOverride", &value));
    assert_false(parse_dword(all_of(";;=;A"), "A", &value));
    assert_false(parse_dword(all_of(""), "A", &value));
}

/* A setting is added to a line without changing the others. */
TEST(dwords_merged)
{
    struct world world;
    struct source *source;
    char many[9000];
    const char *merged;

    world_init(&world);
    source = world_open(&world);
    assert_string_equal(parse_dwords_with(source, all_of(""), "A=1"), "A=1;");
    assert_string_equal(parse_dwords_with(source, all_of("RMx=0x0"), "A=1"), "RMx=0x0;A=1;");
    assert_string_equal(parse_dwords_with(source, all_of("A=0; RMx = 0x0;;noise;AA=2;A=3;"), "A=1"),
                        "RMx=0x0;AA=2;A=1;");
    for (size_t i = 0; i < sizeof(many); i++)
        many[i] = "k=v;"[i % 4];
    merged = parse_dwords_with(source, (struct piece){.text = many, .n = sizeof(many)}, "A=1");
    assert_in_range(strlen(merged), 1000, 4200);
    assert_string_equal(merged + strlen(merged) - 4, "A=1;");
    world_done(&world);
}

/* --- dpkg --- */

TEST(packages)
{
    const char *at =
        "Package: doca-ofed\nStatus: install ok installed\nDescription: long\n Version: 9\nVersion: 3.2.1-1\n\n"
        "\n\nPackage: gone\nStatus: deinstall ok config-files\nVersion: 1\n\n"
        "Version: 2\n\nPackage:\nVersion: 3\n\nPackage: held\nVersion: 4\nStatus: hold ok installed";
    struct parse_package package;

    assert_true(parse_package_next(&at, &package));
    assert_piece(package.name, "doca-ofed");
    assert_piece(package.version, "3.2.1-1");
    assert_true(package.installed);
    assert_true(parse_package_next(&at, &package));
    assert_piece(package.name, "gone");
    assert_false(package.installed);
    assert_true(parse_package_next(&at, &package));
    assert_piece(package.name, "held");
    assert_true(package.installed);
    assert_false(parse_package_next(&at, &package));
}

/* --- other --- */

TEST(fields)
{
    assert_piece(parse_field("Name: x\nVersion:  1.2.1+29d31c0 \n", "Version", ':'), "1.2.1+29d31c0");
    assert_piece(parse_field("__version__ = \"1.2.1\"\n", "__version__", '='), "\"1.2.1\"");
    assert_piece(parse_field("VersionX: 1\nVersion 2\n", "Version", ':'), "");
    assert_piece(parse_field("", "Version", ':'), "");
    assert_piece(parse_define("#define A_B 1\n #define  A\t35 /* x */\n", "A"), "35");
    assert_piece(parse_define("#define A x35\n#define A\n#undef A 3\n", "A"), "");
}

/* --- buffer.py --- */

#define CLASS "class Buffer:\n    num_sms: int = 20\n\n"
#define INIT                                                                                                           \
    "    def __init__(self, group,\n                 low_latency_mode: bool = False,\n    ) -> None:\n"                \
    "        \"\"\"Words.\n        \"\"\"\n        self.rank = 0\n"
#define CALL "        self._setup_device_hca_mapping()\n"
#define METHOD "    def _setup_device_hca_mapping(self):\n        pass\n\n"
#define STATIC "    @staticmethod\n"
#define OTHER "    def get_dispatch_config(num_ranks: int) -> Config:\n        return None\n"

static void assert_buffer(const char *text, bool defines, bool calls, bool stolen)
{
    struct parse_buffer facts = parse_buffer_py(text);

    if (facts.defines_mapping != defines || facts.calls_mapping != calls || facts.decorator_stolen != stolen)
        fail_msg("%d %d %d of:\n%s", facts.defines_mapping, facts.calls_mapping, facts.decorator_stolen, text);
}

TEST(mapping)
{
    assert_buffer(CLASS INIT CALL "\n" METHOD STATIC OTHER, true, true, false);
    assert_buffer(CLASS METHOD INIT CALL STATIC OTHER, true, true, false);
    assert_buffer(CLASS INIT STATIC OTHER, false, false, false);
    assert_buffer(CLASS INIT METHOD STATIC OTHER, true, false, false);
    assert_buffer(CLASS INIT CALL STATIC OTHER, false, true, false);
    assert_buffer("", false, false, false);
}

/* The result of the patch script in circulation: the decorator, an empty line, the method, its neighbour. */
TEST(stolen_decorator)
{
    assert_buffer(CLASS INIT STATIC "\n" METHOD "\n" OTHER, true, false, true);
    assert_buffer(CLASS INIT CALL STATIC "    # words\n\n" METHOD OTHER, true, true, true);
    assert_buffer(CLASS INIT CALL "    @property\n" METHOD OTHER, true, true, true);
    assert_buffer(CLASS INIT CALL STATIC "    @other\n" METHOD OTHER, true, true, true);
    /* One in the right place. */
    assert_buffer(CLASS STATIC OTHER INIT CALL METHOD, true, true, false);
    /* A decorator for methods, and one for a method without self. */
    assert_buffer(CLASS INIT CALL "    @torch.no_grad()\n" METHOD OTHER, true, true, false);
    assert_buffer(CLASS INIT CALL STATIC "    def _setup_device_hca_mapping(device):\n        pass\n", true, true,
                  false);
}

/* A name in text or in another context is neither a definition nor a call. */
TEST(only_named)
{
    assert_buffer(CLASS INIT "        # self._setup_device_hca_mapping()\n", false, false, false);
    assert_buffer(CLASS INIT "        x = 'self._setup_device_hca_mapping()'\n", false, false, false);
    assert_buffer(CLASS INIT "        self._setup_device_hca_mapping\n", false, false, false);
    assert_buffer(CLASS INIT "        self._setup_device_hca_mapping_old()\n", false, false, false);
    assert_buffer(CLASS INIT "        myself._setup_device_hca_mapping()\n", false, false, false);
}

TEST(calls)
{
    assert_buffer(CLASS INIT "        if x:\n            self._setup_device_hca_mapping()  # words\n", false, true,
                  false);
    assert_buffer(CLASS INIT "        def inner():\n            pass\n" CALL, false, true, false);
}

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write golden machines as file trees that epkit reads with --from.

usage: machines.py --list                     names of the machines, one a line
       machines.py --field                    names of the healthy machines as the field has them
       machines.py --rules                    changes that one check finds, and their neighbours, as --variants
       machines.py --variants [NAME]          variants with the findings expected of them: NAME/VARIANT ID...
       machines.py --hostile                  variants that no kernel would make: damaged, endless, circular
       machines.py --identifiers              what a4/identifiers holds and no snapshot may: a text a line
       machines.py [--share] NAME[/VARIANT] DIR ...
                                              write machines; DIR is made. With --share equal files are one file:
                                              faster, for those who do not write into them
"""
import sys

sys.dont_write_bytecode = not sys.pycache_prefix  # nothing beside the sources

import details  # noqa: E402
import field  # noqa: E402
import golden  # noqa: E402
import hostile  # noqa: E402
import identifiers  # noqa: E402
import kinds  # noqa: E402,F401
import nodes  # noqa: E402
import platforms  # noqa: E402
import public  # noqa: E402
import reports  # noqa: E402
import stacks  # noqa: E402
import trials  # noqa: E402
import rules  # noqa: E402
import sites  # noqa: E402
import variants  # noqa: E402


variants.register("a4/identifiers", identifiers.mark)


def build(name):
    machine, _, variant = name.partition("/")
    known = {**golden.MACHINES, **field.machines, **sites.machines, **nodes.machines, **details.machines,
             **platforms.machines, **platforms.others}
    if machine not in known:
        sys.exit(f"machines.py: no machine '{machine}'; --list and --field name them")
    tree = known[machine]()
    if variant:
        if name not in variants.by_name:
            sys.exit(f"machines.py: no variant '{name}'; --variants names them")
        variants.by_name[name].change(tree)
    return tree


def main(arguments):
    shared = None
    if arguments[:1] == ["--share"]:
        shared = {}
        arguments = arguments[1:]
    if arguments == ["--list"]:
        print("\n".join(golden.MACHINES))
    elif arguments == ["--field"]:
        print("\n".join(field.machines))
    elif arguments == ["--rules"]:
        for variant in rules.changes + reports.changes + stacks.changes + public.changes + trials.changes:
            print(variant.name, *variant.findings)
    elif arguments and arguments[0] in ("--variants", "--hostile") and len(arguments) <= 2:
        wanted = hostile.hostile if arguments[0] == "--hostile" else variants.faults
        for variant in wanted:
            if len(arguments) == 1 or variant.machine == arguments[1]:
                print(variant.name, *variant.findings)
    elif arguments == ["--identifiers"]:
        print("\n".join(identifiers.MARKS.values()))
    elif arguments and len(arguments) % 2 == 0 and not arguments[0].startswith("-"):
        for name, folder in zip(arguments[::2], arguments[1::2]):
            try:
                build(name).write(folder, shared)
            except FileExistsError:
                sys.exit(f"machines.py: {folder} is already there")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])

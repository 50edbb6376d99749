#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""names.py WHEELS TORCH: every order of installing and removing epkit and other distributions with a package of the same name, by pip.

WHEELS: folder with what scripts/wheel.sh makes. TORCH: a site-packages with torch, for a Python environment that is made here.
The others have the files of DeepEP V1, of sgl-deep-ep, of sgl-deep-ep-v25 and of nixl, and nothing in them. Every state of the
environment is reached once, by whichever order comes first, and judged: imports are of one distribution, and hide another one
only with a warning.
"""
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pip

here = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(here.parent.parent / "python"))

import wheels  # noqa: E402

SUFFIX = f"cpython-{sys.version_info[0]}{sys.version_info[1]}-x86_64-linux-gnu.so"
OTHERS = {
    "deep-ep": ("1.2.1", ["__init__", "buffer", "utils"], [f"deep_ep_cpp.{SUFFIX}"]),
    "sgl-deep-ep": ("0.1.2.post1", ["__init__", "buffers/__init__", "buffers/elastic", "buffers/legacy", "envs", "utils/__init__"],
                    [f"deep_ep/_C.{SUFFIX}", "deep_ep/include/deep_ep/api.cuh"]),
}
# The other names, and another distribution with each.
MORE = {"deep_ep_v25": "sgl-deep-ep-v25", "nixl_ep": "nixl"}
OTHERS_MORE = {"sgl-deep-ep-v25": ("0.1.0rc0", ["__init__", "ep", "utils/__init__"], [f"deep_ep_v25/_C.{SUFFIX}"]),
               "nixl": ("1.5.1", ["__init__", "buffer"], [f"nixl_ep_cu13/nixl_ep_cpp.{SUFFIX}"])}
OWN = ("epkit", "epkit-deep-ep")

# What a program finds: the distribution of each module, and the warnings; what "epkit.selftest --who" says of it.
PROBE = """
import contextlib, importlib, importlib.util, io, json, runpy, sys, warnings
found, said = {}, io.StringIO()
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for name in sys.argv[1:]:
        try:
            module = importlib.import_module(name)
            own = "/epkit/" in (module.__file__ or "") or hasattr(module, "Buffer") and module.Buffer.__module__.startswith("epkit.")
            found[name] = getattr(module, "owner", "epkit" if own else "nobody")
        except ImportError as error:
            found[name] = None
if importlib.util.find_spec("epkit"):
    import epkit.compat.deep_ep
    assert epkit.compat.deep_ep.Buffer.__module__.startswith("epkit.")
    for name in [name for name in sys.modules if name.split(".")[0] in sys.argv[1:]]:
        del sys.modules[name]
    sys.argv = ["selftest", "--who"]
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        runpy.run_module("epkit.selftest", run_name="__main__")
print(json.dumps([found, [str(one.message) for one in seen if "epkit" in str(one.message)], said.getvalue()]))
"""
# Runs PROBE in a child for each line of names. Torch, which takes longer to import than all else, is there before; the
# files that Python reads at its start are read again.
PROBES = """
import importlib, json, os, site, sys, torch
_, folder, probe = sys.argv
for line in sys.stdin:
    child = os.fork()
    if not child:
        importlib.invalidate_caches()
        site.addsitedir(folder)
        sys.argv = ["probe", *json.loads(line)]
        exec(probe, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print("null", flush=True)
"""
# pip as `pip --python` runs it, in the Python of the environment, but imported once: a child for each line of arguments.
PIP = """
import importlib, json, os, sys
sys.path.insert(0, sys.argv[1])
import pip._internal.commands.install, pip._internal.commands.uninstall
from pip._internal.cli.main import main
del sys.path[0]
print(0, flush=True)
for line in sys.stdin:
    child = os.fork()
    if not child:
        os.dup2(2, 1)
        importlib.invalidate_caches()
        os._exit(main(json.loads(line)))
    print(os.waitpid(child, 0)[1], flush=True)
"""
MODULES = ("deep_ep", "deep_ep.utils", "deep_ep._C", "deep_ep.buffers.legacy", "deep_ep_cpp")


class Environment:
    """A Python environment without pip; pip is that of this Python."""

    def __init__(self, folder, torch):
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.python = folder / "venv/bin/python"
        self.site = next((folder / "venv/lib").glob("python*/site-packages"))
        (self.site / "torch.pth").write_text(f"{torch}\n")
        self.wheels = {}
        self.probes = self.start(PROBES, self.site, PROBE, cwd=self.folder, EPKIT_BACKEND="host", PYTHONDONTWRITEBYTECODE="1", PYTHONPATH="")
        self.pips = self.start(PIP, pathlib.Path(pip.__file__).parent.parent, PIP_DISABLE_PIP_VERSION_CHECK="1",
                               PIP_ROOT_USER_ACTION="ignore")
        self.pips.stdout.readline()  # a Python that starts while site-packages is removed never searches it

    def start(self, program, *words, cwd=None, **variables):
        return subprocess.Popen([self.python, "-c", program, *words], cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                env={**os.environ, **variables})

    def pip(self, *words):
        status = self.ask(self.pips, ["--quiet", *map(str, words)])
        assert status == 0, f"pip {words} ends with {status}; the reason is above"

    def install(self, *names):
        again = ["--force-reinstall"] if set(names) & {*OTHERS, *OTHERS_MORE} else []
        self.pip("install", "--no-deps", "--no-index", "--no-compile", *again, *(self.wheels[name] for name in names))

    @staticmethod
    def ask(program, words):
        """The answer of a program that reads lines of words, or None if it gives none."""
        program.stdin.write(json.dumps(words) + "\n")
        program.stdin.flush()
        return json.loads(program.stdout.readline() or "null")

    def probe(self, *names):
        found = self.ask(self.probes, names)
        assert found, f"looking for {names} failed; the reason is above"
        return found

    def close(self):
        for program in (self.probes, self.pips):
            program.stdin.close()
            program.wait()

    def state(self):
        """What is in site-packages: names, and the contents of files that several distributions have."""
        return tuple((str(path.relative_to(self.site)), path.read_bytes() if path.parent.name == "deep_ep" else b"")
                     for path in sorted(self.site.rglob("*")) if path.is_file())


def other_wheel(folder, name, package_name="deep_ep"):
    version, modules, binaries = {**OTHERS, **OTHERS_MORE}[name]
    package = f"{name.replace('-', '_')}-{version}"
    info = f"{package}.dist-info"
    files = [(f"{package_name}/{module}.py", f"owner = {name!r}\n".encode()) for module in modules]
    files += [(path, b"not a library") for path in binaries]
    files += [(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()),
              (f"{info}/WHEEL", b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")]
    path = folder / f"{package}-py3-none-any.whl"
    wheels.write(path, info, files)
    return path


def judge(environment, installed):
    """`installed`: names in the order of their installation."""
    found, warnings, said = environment.probe(*MODULES)
    others = [name for name in installed if name in OTHERS]
    what = f"{installed}: {found}, {warnings}"
    if set(OWN) <= set(installed):
        assert set(found.values()) == {"epkit"}, what
        # Where the other ones have removed each other's files nothing is hidden.
        hidden = (environment.site / "deep_ep/__init__.py").exists()
        assert len(warnings) == hidden, what
        if hidden:
            assert "pip uninstall epkit-deep-ep" in warnings[0] and any(other in warnings[0] for other in others), what
    else:
        assert "epkit" not in found.values() and not warnings, what
        if others and "epkit-deep-ep" not in installed:
            assert found["deep_ep"] in (*others, "nobody", None), what  # theirs alone, whole or not
        elif others:
            assert found["deep_ep"] is None, what  # epkit-deep-ep without epkit: an error
    if "epkit" in installed:
        expected = "epkit's, by" if "epkit-deep-ep" in installed else \
            "not epkit's, but" if found["deep_ep"] not in (None, "nobody") else "not installed"
        assert said.startswith(f"deep_ep: {expected}"), said
        if len(others) > 1 and "not epkit's" in expected:
            assert "Remove all of them" in said, said


def orders(environment):
    """Installs in every order, and removes in every order."""
    seen, kept = {}, environment.folder / "kept"
    groups = (OWN, ("deep-ep",), ("sgl-deep-ep",))

    def step(installed, state, names, remove):
        """The state behind a step: of an earlier one from the same state, or of pip."""
        key = (state, names, remove)
        if key not in seen:
            shutil.rmtree(environment.site)
            shutil.copytree(kept / str(state), environment.site, symlinks=True)
            if remove:
                environment.pip("uninstall", "--yes", *names)
            else:
                environment.install(*names)
            content = environment.state()
            if content not in seen:
                seen[content] = len([one for one in seen.values() if isinstance(one, int)])
                shutil.copytree(environment.site, kept / str(seen[content]), symlinks=True)
                judge(environment, installed)
            seen[key] = (seen[content],)
        return seen[key][0]

    seen[environment.state()] = 0
    shutil.copytree(environment.site, kept / "0", symlinks=True)
    for first in itertools.permutations(groups):
        # In the long tier every order of removal; else the two in which most goes wrong.
        for last in itertools.permutations(groups) if os.environ.get("EPKIT_TEST_LONG") else (first, first[::-1]):
            state, installed = 0, []
            for names in first:
                installed = [*installed, *names]
                state = step(installed, state, names, False)
            for names in last:
                installed = [name for name in installed if name not in names]
                state = step(installed, state, names, True)
            assert not state, "something is left"
    shutil.rmtree(environment.site)
    shutil.copytree(kept / "0", environment.site, symlinks=True)
    return len([one for one in seen.values() if isinstance(one, int)])


def whole(environment):
    """What epkit-deep-ep hides stays whole: its removal leaves the other as it was."""
    environment.install("sgl-deep-ep")
    before = environment.state()
    environment.install(*OWN)
    environment.install("sgl-deep-ep")  # an upgrade
    judge(environment, ["epkit", "epkit-deep-ep", "sgl-deep-ep"])
    environment.pip("uninstall", "--yes", *OWN)
    assert environment.state() == before
    environment.pip("uninstall", "--yes", "sgl-deep-ep")


def alone(environment):
    """epkit-deep-ep without epkit says what is missing, also where another deep_ep is installed."""
    for name in ("sgl-deep-ep", "epkit-deep-ep"):
        environment.install(name)
    judge(environment, ["sgl-deep-ep", "epkit-deep-ep"])
    environment.pip("uninstall", "--yes", "sgl-deep-ep", "epkit-deep-ep")


def empty(environment):
    """A wheel without files satisfies what pins the other distribution, in its place, and brings the name."""
    made = environment.folder / "empty"
    made.mkdir()
    pins = ("sgl-deep-ep==0.1.2.post1", "deep_ep==1.2.1", "tokenspeed-deepep==2.1.0.post20260810")
    wheels.main(made, *pins)
    environment.install("sgl-deep-ep")
    environment.pip("install", "--no-index", "--find-links", environment.folder.parent / "own", "--find-links", made,
                    *(f"{pin}+epkit" for pin in pins))
    judge(environment, list(OWN))
    environment.pip("install", "--no-index", *pins)  # satisfied
    judge(environment, list(OWN))
    for wrong in ("torch==2.0", "nixl==1.5.1", "sgl-deep-ep", "sgl-deep-ep>=1", "deep_ep==1.2.1+29d31c0"):
        try:
            wheels.main(made, wrong)
        except SystemExit as error:
            assert "without a local part" in str(error), error
        else:
            raise AssertionError(wrong)
    environment.pip("uninstall", "--yes", "sgl-deep-ep", "deep-ep", "tokenspeed-deepep", *OWN)


def more(environment):
    """The names deep_ep_v25 and nixl_ep are epkit's where they are installed, in every order, and leave the others whole."""
    for name, other in MORE.items():
        of_name = f"epkit-{name.replace('_', '-')}"
        own = ("epkit", of_name)
        some = ((own, own), ((other,), (other,)))
        for first, last in itertools.product((own, (other,)), repeat=2) if os.environ.get("EPKIT_TEST_LONG") else some:
            environment.install(*first)
            environment.install(*((other,) if first == own else own))
            owner, warned, said = environment.probe(name)
            assert owner[name] == "epkit" and len(warned) == 1 and f"pip uninstall {of_name}" in warned[0] and other in warned[0], warned
            # Nothing may take the place of nixl, nor should it be removed: it has more than this package.
            assert ("wheel.sh --for" in warned[0]) == (f"pip uninstall {other}" in warned[0]) == (name != "nixl_ep"), warned
            assert f"{name}: epkit's, by" in said, said
            environment.pip("uninstall", "--yes", *last)
            left = other if last == own else "epkit"
            assert environment.probe(name)[:2] == [{name: left}, []], (first, last)
            environment.pip("uninstall", "--yes", *((other,) if last == own else own))


def empty_v25(environment):
    """A wheel without files is there for deep_ep_v25, and for nixl_ep, whose distributions have more, there is none."""
    other, made = MORE["deep_ep_v25"], environment.folder / "v25"
    made.mkdir()
    wheels.main(made, f"{other}==0.1.0rc0")
    environment.pip("install", "--no-index", "--find-links", environment.folder.parent / "own", "--find-links", made,
                    f"{other}==0.1.0rc0+epkit")
    assert environment.probe("deep_ep_v25")[:2] == [{"deep_ep_v25": "epkit"}, []]
    environment.pip("install", "--no-index", f"{other}==0.1.0rc0")  # satisfied
    environment.pip("uninstall", "--yes", other, "epkit", "epkit-deep-ep-v25")


def main(own, torch):
    wheels.print = lambda *_: None  # which would not be TAP
    folder = pathlib.Path(tempfile.mkdtemp(prefix="epkit-names-"))
    (folder / "own").symlink_to(pathlib.Path(own).resolve())
    (folder / "work").mkdir()
    environment = Environment(folder / "work", torch)
    try:
        environment.wheels = {name: other_wheel(folder, name) for name in OTHERS}
        environment.wheels.update({other: other_wheel(folder, other, name) for name, other in MORE.items()})
        for name in (*OWN, *(f"epkit-{name.replace('_', '-')}" for name in MORE)):
            environment.wheels[name] = next((folder / "own").glob(f"{name.replace('-', '_')}-*.whl"))
        clean = environment.state()
        print("1..6", flush=True)
        failed = 0
        for number, test in enumerate((orders, whole, alone, empty, more, empty_v25), 1):
            try:
                count = test(environment)
                assert environment.state() == clean, "something is left"
                print(f"ok {number} names: {test.__doc__.split('.')[0].split(':')[0]}" + (f", {count} states" if count else ""), flush=True)
            except Exception as error:  # noqa: BLE001 - a failed test is a line
                failed = 1
                print(f"# {error}\nnot ok {number} names: {test.__name__}", flush=True)
        return failed
    finally:
        environment.close()
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

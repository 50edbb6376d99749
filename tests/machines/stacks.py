# SPDX-License-Identifier: Apache-2.0
"""Libraries for expert parallelism as their wheels and builds install them: complete, in part, and for another version.

File names are those of the wheels sgl-deep-ep 0.1.2.post1, sgl-deep-ep-v25 0.1.0rc0, nccl-extensions 0.1.0, nixl-cu13
1.5.1 and flashinfer-python 0.7.4; faults are those of deepseek-ai/DeepEP#211, #309, #629, #710 and sgl-project/sglang#40671.
"""
import contextlib
import io
import os
import sys
import tempfile
import zipfile

import reports
import software
import variants
from software import PYTHON, X86_64

PACKAGES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../python")
sys.path.append(PACKAGES)
import wheels  # noqa: E402

changes = []
change = variants.changes_into(changes)

TAG = "cpython-312-x86_64-linux-gnu.so"
STREAM, OTHER_STREAM = "_Z14THPStream_WrapRKN3c106StreamE", "_Z14THPStream_WrapRKN3c106StreamEi"
NEEDED = ["libc10.so", "libtorch.so", "libtorch_python.so", "libc10_cuda.so", "libtorch_cuda.so", "libnccl.so.2",
          "libstdc++.so.6", "libc.so.6"]


def versions(torch="2.10.0+cu129", nccl="2.32.3", nvcc="12.9"):
    """PyTorch, NCCL and the toolkit, all of one CUDA; the libraries export what the extensions below need."""
    def change_versions(tree):
        cuda = 13 if "+cu13" in torch else 12
        software.cuda(tree, X86_64)
        software.torch(tree, X86_64)
        for path in [path for path in tree.entries if path.startswith((f"{PYTHON}/torch-", f"{PYTHON}/nvidia_nccl_cu"))]:
            tree.remove(path)
        software.wheel(tree, "torch", torch)
        software.wheel(tree, f"nvidia-nccl-cu{cuda}", nccl)
        runtime = f"libcudart.so.{cuda}"
        tree.library(f"{PYTHON}/torch/lib/libtorch_cuda.so", soname="libtorch_cuda.so", machine=X86_64.machine,
                     archs=[90, 100], needed=["libc10_cuda.so", "libnccl.so.2", runtime, "libc.so.6"],
                     runpath="$ORIGIN/../../nvidia/nccl/lib:$ORIGIN/../../nvidia/cuda_runtime/lib:$ORIGIN")
        tree.library(f"{PYTHON}/torch/lib/libc10_cuda.so", soname="libc10_cuda.so", machine=X86_64.machine,
                     needed=["libc10.so", runtime, "libc.so.6"])
        tree.library(f"{PYTHON}/nvidia/cuda_runtime/lib/{runtime}", soname=runtime, machine=X86_64.machine,
                     needed=["libc.so.6"])
        tree.library(f"{PYTHON}/torch/lib/libtorch_python.so", soname="libtorch_python.so", machine=X86_64.machine,
                     needed=["libc.so.6"], exports=["THPVariable_Wrap", "THPDtypeType", STREAM, "THPUtils_checkLong"])
        device = ["ncclGetLsaDevicePointer", "ncclCommQueryProperties"] if nccl >= "2.30" else []
        tree.library(f"{PYTHON}/nvidia/nccl/lib/libnccl.so.2", soname="libnccl.so.2", machine=X86_64.machine,
                     needed=["libc.so.6"], exports=["ncclGetVersion", "ncclCommInitRank", *device])
        tree.put("/usr/local/cuda-12.9/version.json", f'{{"cuda": {{"name": "CUDA SDK", "version": "{nvcc}.1"}}}}\n')
    return change_versions


def extension(path, cuda=12, python="312", undefined=(STREAM, "ncclGetLsaDevicePointer", "THPVariable_Wrap"), **facts):
    return lambda tree: tree.library(
        f"{PYTHON}/{path}{TAG.replace('312', python)}", machine=X86_64.machine, archs=[90, 100],
        needed=[*NEEDED, f"libcudart.so.{cuda}"], undefined=undefined, **facts)


def files(*names):
    return lambda tree: [tree.put(f"{PYTHON}/{name}", "") for name in names]


def dist(name, version, *packages):
    def add(tree):
        software.wheel(tree, name, version)
        tree.put(f"{PYTHON}/{name.replace('-', '_')}-{version}.dist-info/RECORD",
                 "".join(f"{package}/__init__.py,sha256=made-up,7\n" for package in packages))
    return add


def env(**variables):
    return lambda tree: tree.environment.update(variables)


def gone(*paths):
    return lambda tree: [tree.remove(path) for path in paths]


def epkit(*requirements, name=True):
    """epkit, and what python/wheels.py makes: the name deep_ep, and for `requirements` wheels without files."""
    def add(tree):
        for folder, _, names in os.walk(f"{PACKAGES}/epkit"):
            for path in (f"{folder}/{name}" for name in names if name.endswith((".py", ".pyi"))):
                tree.put(f"{PYTHON}/{os.path.relpath(path, PACKAGES)}", "")
        with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
            wheels.main(out, *requirements)
            for wheel in sorted(os.listdir(out)) if name else ():
                with zipfile.ZipFile(f"{out}/{wheel}") as archive:
                    tree.put_all(PYTHON, {entry: archive.read(entry) for entry in archive.namelist()})
        dist("epkit", "0.1.0", "epkit")(tree)
    return add


def epkit_extension(tree):
    tree.library(f"{PYTHON}/epkit/_C.abi3.so", machine=X86_64.machine, needed=["libc.so.6"])


def v1_extension(tree):
    tree.library(f"{PYTHON}/deep_ep_cpp.{TAG}", machine=X86_64.machine, archs=[90, 100],
                 needed=[name for name in NEEDED if "nccl" not in name])


V2 = files("deep_ep/__init__.py", "deep_ep/envs.py", "deep_ep/buffers/elastic.py", "deep_ep/buffers/legacy.py")
V2_DIST = dist("deep_ep", "2.1.0", "deep_ep")
SGL = (V2, files("deep_ep/prerequisites.py"), dist("sgl-deep-ep", "0.1.2.post1", "deep_ep"))
V25 = files("deep_ep/__init__.py", "deep_ep/buffers/ep.py", "deep_ep/buffers/allocator.py")
SGL_V25 = (files("deep_ep_v25/__init__.py", "deep_ep_v25/buffers/ep.py"), dist("sgl-deep-ep-v25", "0.1.0rc0", "deep_ep_v25"))
V1 = files("deep_ep/__init__.py", "deep_ep/buffer.py", "deep_ep/utils.py")
V1_DIST = dist("deep_ep", "1.2.1+9af0e0d", "deep_ep")
NCCL = f"{PYTHON}/nvidia/nccl/lib/libnccl.so.2"
NCCL_DIST = f"{PYTHON}/nvidia_nccl_cu12-2.32.3.dist-info"
TORCH_DIST = f"{PYTHON}/torch-2.10.0+cu129.dist-info"
CUDA_13 = versions(torch="2.14.1+cu130", nvcc="13.1")

variants.set_up(change, (
    # DeepEP 2
    ("dgx-b200/deepep-v2", "", "What is right: complete.", versions(), V2, V2_DIST, extension("deep_ep/_C.")),
    ("dgx-b200/deepep-v2-part", "stack-needs", "Built without its extension.", versions(), V2, V2_DIST),
    ("dgx-b200/deepep-v2-nccl", "stack-needs", "PyTorch was installed again, and NCCL with it (#710).",
     versions(nccl="2.28.9"), V2, V2_DIST, extension("deep_ep/_C.")),
    ("dgx-b200/deepep-v2-torch", "stack-needs", "Older PyTorch.", versions(torch="2.9.1+cu129"), V2, V2_DIST,
     extension("deep_ep/_C.")),
    ("dgx-b200/deepep-v2-cuda", "cuda-major", "For another CUDA.", versions(), V2, V2_DIST, extension("deep_ep/_C.", 13)),
    ("dgx-b200/deepep-v2-python", "import-python", "For another Python.", versions(), V2, V2_DIST,
     extension("deep_ep/_C.", python="311")),
    ("dgx-b200/deepep-v2-library", "import-libraries", "A library of the build image.", versions(), V2, V2_DIST,
     lambda tree: tree.library(f"{PYTHON}/deep_ep/_C.{TAG}", machine=X86_64.machine, archs=[90, 100],
                               needed=[*NEEDED, "libcudart.so.12", "libgomp-custom.so.1"])),
    ("dgx-b200/deepep-v2-arch", "gpu-arch", "For other GPUs.", versions(), V2, V2_DIST,
     lambda tree: tree.library(f"{PYTHON}/deep_ep/_C.{TAG}", machine=X86_64.machine, archs=[90],
                               needed=[*NEEDED, "libcudart.so.12"])),
    ("dgx-b200/deepep-v2-symbol", "import-symbols", "Built for another PyTorch (#309).", versions(), V2, V2_DIST,
     extension("deep_ep/_C.", undefined=[OTHER_STREAM])),
    ("dgx-b200/deepep-v2-nccl-symbol", "import-symbols", "Built for a later NCCL.", versions(nccl="2.30.4"), V2, V2_DIST,
     extension("deep_ep/_C.", undefined=["ncclGetVersion", "ncclDevCommCreateLater"])),
    ("dgx-b200/deepep-v2-nvcc", "stack-needs", "An image without the compiler.", versions(), V2, V2_DIST,
     extension("deep_ep/_C."), gone("/usr/local/cuda-12.9/bin/nvcc")),
    ("dgx-b200/deepep-v2-cuda-home", "stack-needs", "CUDA_HOME of another image.", versions(), V2, V2_DIST,
     extension("deep_ep/_C."), env(CUDA_HOME="/opt/cuda"),
     lambda tree: tree.put("/opt/cuda/include/cuda.h", "")),
    ("dgx-b200/deepep-v2-root", "stack-needs", "EP_NCCL_ROOT_DIR of the build.", versions(), V2, V2_DIST,
     extension("deep_ep/_C."), env(EP_NCCL_ROOT_DIR="/opt/nccl")),
    ("dgx-b200/deepep-v2-gone", "stack-needs", "Its package was removed by hand.", versions(), V2_DIST),
    ("dgx-b200/deepep-v2-empty-nccl", "import-libraries", "A disk was full when NCCL was installed.", versions(), V2, V2_DIST,
     extension("deep_ep/_C."), lambda tree: tree.put(NCCL, "")),
    ("dgx-b200/deepep-v2-no-nccl-dist", "stack-needs", "NCCL was copied without its metadata, by which the import finds it.",
     versions(), V2, V2_DIST, extension("deep_ep/_C."), gone(NCCL_DIST)),
    ("dgx-b200/deepep-v2-nccl-not-told", "?stack-needs", "The same with EP_NCCL_ROOT_DIR: its version is not known.",
     versions(), V2, V2_DIST, extension("deep_ep/_C."), gone(NCCL_DIST), env(EP_NCCL_ROOT_DIR=f"{PYTHON}/nvidia/nccl")),
    ("dgx-b200/deepep-v2-torch-not-told", "?stack-needs", "PyTorch without metadata.", versions(), V2, V2_DIST,
     extension("deep_ep/_C."), gone(TORCH_DIST)),
    # DeepEP 1
    ("dgx-b200/deepep-v1", "", "What is right: complete.", versions(nccl="2.27.5"), V1, V1_DIST, v1_extension),
    ("dgx-b200/deepep-v1-part", "stack-needs", "Built without its extension.", versions(), V1, V1_DIST),
    ("dgx-b200/deepep-v1-gone", "stack-needs", "Its package was removed by hand.", versions(), V1_DIST),
    ("dgx-b200/deepep-v1-no-torch", "stack-needs", "Of an environment that had PyTorch.", V1, V1_DIST,
     v1_extension),
    ("dgx-b200/deepep-v1-no-nccl", "import-libraries", "The wheel of NCCL was removed: PyTorch cannot be imported.", versions(),
     V1, V1_DIST, v1_extension, gone(NCCL, NCCL_DIST)),
    ("docker-host-network/lost-gpus-deepep", "gpu-access", "A container whose GPUs are gone, and DeepEP, which is complete.",
     versions(), V1, V1_DIST, v1_extension, reports.lose_gpus),
    # sgl-deep-ep
    ("dgx-b200/sgl", "", "What is right: complete.", CUDA_13, *SGL, extension("deep_ep/_C.", 13)),
    ("dgx-b200/sgl-part", "stack-needs", "Without its extension.", CUDA_13, *SGL),
    ("dgx-b200/sgl-gone", "stack-needs", "Another distribution was removed, and its files with it.", CUDA_13, SGL[2]),
    ("dgx-b200/sgl-owners", "stack-owners", "Over a build of DeepEP.", CUDA_13, *SGL, V2_DIST,
     extension("deep_ep/_C.", 13)),
    ("dgx-b200/deepep-owners", "stack-owners", "DeepEP 1 over sgl-deep-ep.", versions(), V1, SGL[2],
     dist("deep_ep", "1.2.1", "deep_ep"), extension("deep_ep_cpp.", undefined=())),
    ("dgx-b200/sgl-cuda", "cuda-major", "The wheel is for CUDA 13.", versions(), *SGL, extension("deep_ep/_C.", 13)),
    # DeepEP 2.5
    ("dgx-b200/deepep-v25", "", "What is right: complete.", CUDA_13, V25, dist("deep_ep", "2.5.0", "deep_ep"),
     extension("deep_ep/_C.", 13)),
    ("dgx-b200/deepep-v25-nvcc", "stack-needs", "An older compiler.", versions("2.14.1+cu130", nvcc="13.0"), V25,
     dist("deep_ep", "2.5.0", "deep_ep"), extension("deep_ep/_C.", 13)),
    ("dgx-b200/deepep-v25-nvcc-not-told", "?stack-needs", "A compiler whose version no file tells.", CUDA_13, V25,
     dist("deep_ep", "2.5.0", "deep_ep"), extension("deep_ep/_C.", 13), env(CUDA_HOME="/opt/cuda"),
     lambda tree: tree.put_all("/opt/cuda", {"bin/nvcc": "#!/bin/sh\n", "include/cuda.h": "#define CUDA_VERSION 13010\n"})),
    ("dgx-b200/deepep-v25-gone", "stack-needs", "Its package was removed by hand.", CUDA_13, dist("deep_ep", "2.5.0", "deep_ep")),
    ("dgx-b200/sgl-v25", "", "What is right: complete, beside sgl-deep-ep.", CUDA_13, *SGL, *SGL_V25,
     extension("deep_ep/_C.", 13), extension("deep_ep_v25/_C.", 13)),
    ("dgx-b200/sgl-v25-part", "stack-needs", "Without its extension.", CUDA_13, *SGL_V25),
    ("dgx-b200/sgl-v25-nccl", "stack-needs", "Older NCCL.", versions("2.14.1+cu130", "2.30.4", "13.1"), *SGL_V25,
     extension("deep_ep_v25/_C.", 13)),
    # HybridEP, epkit
    ("dgx-b200/hybrid-ep", "", "What is right: complete.", versions(), V1, files("deep_ep/hybrid_ep_buffer.py"),
     extension("hybrid_ep_cpp.", undefined=())),
    ("dgx-b200/hybrid-ep-part", "stack-needs", "Without its extension.", versions(), V1,
     files("deep_ep/hybrid_ep_buffer.py")),
    ("dgx-b200/epkit", "", "What is right: epkit with the name deep_ep.", versions(nccl="2.27.5"), epkit(), epkit_extension),
    ("dgx-b200/epkit-alone", "", "What is right: beside DeepEP, without the name.", versions(), epkit(name=False),
     epkit_extension, V2, V2_DIST, extension("deep_ep/_C.")),
    ("dgx-b200/epkit-sgl", "", "What is right: what the name hides is not imported.", versions(nccl="2.27.5"), epkit(),
     epkit_extension, *SGL),
    ("dgx-b200/epkit-for-sgl", "", "What is right: in the place of sgl-deep-ep.", versions(),
     epkit("sgl-deep-ep==0.1.2.post1"), epkit_extension),
    ("dgx-b200/epkit-part", "stack-needs", "Without its extension.", versions(), epkit()),
    # parts of other packages: what they lack is no finding
    ("dgx-b200/nixl", "", "What is right: complete.", CUDA_13, files("nixl_ep_cu13/__init__.py"),
     dist("nixl-cu13", "1.5.1", "nixl_ep_cu13"), extension("nixl_ep_cu13/nixl_ep_cpp_torch214.", 13, undefined=())),
    ("dgx-b200/nixl-torch", "", "What is right: NIXL without an extension for this PyTorch serves its other users.",
     versions("2.15.0+cu130"), files("nixl_ep_cu13/__init__.py"), dist("nixl-cu13", "1.5.1", "nixl_ep_cu13"),
     extension("nixl_ep_cu13/nixl_ep_cpp_torch214.", 13, undefined=())),
    ("dgx-b200/nccl-ep", "", "What is right: complete.", CUDA_13, files("nccl/ep/__init__.py"),
     dist("nccl-extensions", "0.1.0"), extension("nccl/_extensions/bindings/nccl_ep.", 13, undefined=())),
    ("dgx-b200/nixl-part", "", "Without an extension: of NIXL the other users are served.", CUDA_13,
     files("nixl_ep_cu13/__init__.py"), dist("nixl-cu13", "1.5.1", "nixl_ep_cu13")),
    ("dgx-b200/nccl-ep-part", "", "The same.", CUDA_13, files("nccl/ep/__init__.py"), dist("nccl-extensions", "0.1.0")),
    ("dgx-b200/flashinfer", "", "What is right: flashinfer for its attention.", versions(nccl="2.27.5"),
     files("flashinfer/__init__.py", "flashinfer/moe_ep/__init__.py"), dist("flashinfer-python", "0.7.4")),
    ("dgx-b200/flashinfer-nvcc", "", "NVIDIA-NeMo/Gym#1405: neither a compiler nor its caches.", versions(nccl="2.27.5"),
     files("flashinfer/__init__.py", "flashinfer/moe_ep/__init__.py"), dist("flashinfer-python", "0.7.4", "flashinfer"),
     gone("/usr/local/cuda-12.9/bin/nvcc")),
    # folders of .pth files
    ("dgx-b200/egg", "import-symbols", "An egg of setup.py install.", versions(), dist("nothing", "1"),
     lambda tree: tree.put(f"{PYTHON}/easy-install.pth", "./deep_ep-1.2.1+309785a-py3.12-linux-x86_64.egg\n"),
     files("deep_ep-1.2.1+309785a-py3.12-linux-x86_64.egg/deep_ep/__init__.py",
           "deep_ep-1.2.1+309785a-py3.12-linux-x86_64.egg/deep_ep/buffer.py"),
     extension("deep_ep-1.2.1+309785a-py3.12-linux-x86_64.egg/deep_ep_cpp.", undefined=[OTHER_STREAM])),
    ("dgx-b200/editable", "import-symbols", "An editable installation.", versions(),
     lambda tree: tree.put(f"{PYTHON}/__editable__.deep_ep-1.2.1.pth", "/workspace/DeepEP\n"),
     lambda tree: tree.put("/workspace/DeepEP/deep_ep/__init__.py", ""),
     lambda tree: tree.library(f"/workspace/DeepEP/deep_ep_cpp.{TAG}", machine=X86_64.machine, archs=[90, 100],
                               needed=[*NEEDED, "libcudart.so.12"], undefined=[OTHER_STREAM])),
    ("dgx-b200/editable-finder", "import-symbols", "The same with the finder that setuptools writes for a flat layout.",
     versions(), lambda tree: tree.put(f"{PYTHON}/__editable__.deep_ep-1.2.1.pth", "import __editable___deep_ep_1_2_1_finder\n"),
     lambda tree: tree.put(f"{PYTHON}/__editable___deep_ep_1_2_1_finder.py", "from __future__ import annotations\n"
                           "MAPPING: dict[str, str] = {'deep_ep': '/workspace/DeepEP/deep_ep'}\nNAMESPACES: dict = {}\n"),
     lambda tree: tree.put("/workspace/DeepEP/deep_ep/__init__.py", ""),
     lambda tree: tree.library(f"/workspace/DeepEP/deep_ep_cpp.{TAG}", machine=X86_64.machine, archs=[90, 100],
                               needed=[*NEEDED, "libcudart.so.12"], undefined=[OTHER_STREAM])),
))

# Of a name that a snapshot may not hold: what is said of it differs in this name alone, so it is in no list.
variants.register("dgx-b200/sgl-owner-of-a-site", lambda tree: [step(tree) for step in (
    CUDA_13, *SGL, dist("acme-deep-ep", "1.0", "deep_ep"), extension("deep_ep/_C.", 13))])

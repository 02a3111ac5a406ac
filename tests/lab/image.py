"""The guests' disk image: Debian by mmdebstrap, tfglm's dependencies in a virtual environment, a Spark's oddities.
Built once for what goes into it, and kept."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import sys
import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

from host import CACHE, ROOT, LabError, Skip, run
from packaging.requirements import Requirement
from wiring import address

DEBIAN = (
    *(
        "systemd",
        "systemd-sysv",
        "dbus",
        "udev",
        "libpam-systemd",
        "openssh-server",
        "sudo",
        "kmod",
        "procps",
        "netbase",
    ),
    *("python3", "python3-venv", "iproute2", "iputils-ping", "ethtool", "netplan.io", "ca-certificates"),
    *("nfs-kernel-server", "nfs-common", "docker.io", "iptables", "earlyoom"),
)
FILES = Path(__file__).parent / "guest"
"""What a guest has beside Debian; setup.sh is run in its root."""
VENV = "opt/tfglm/venv"
CUDA = ("nvidia-", "cuda-", "triton")
"""What only a build of torch for GPUs needs; it would make guests several times as large."""
NETWORK = re.compile(
    "Failed to fetch|failed to download|Could not (resolve|connect)|Unable to connect|Temporary failure|"
    "Cannot initiate|[Cc]onnection (refused|reset|timed out|failed)|took longer than"
)
"""What apt and mmdebstrap say when it is the network's fault."""
UNUSED = ("torch/include/", "torch/test/", "torch/lib/libtorch_test")
SPARE = 2 << 30
"""Bytes of a guest's disk that are free."""


def image() -> Path:
    """The image, made where it is not there yet."""
    CACHE.mkdir(parents=True, exist_ok=True)
    if not (CACHE / "key").exists():
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", CACHE / "key"], 30)
    system = _made("rootfs", [_suite(), DEBIAN], ".tar", _system)
    packages = _dependencies()
    pinned = [f"{package.name}=={package.version}" for package in packages]
    kernel = [path.name for path in sorted(Path("/usr/lib/uml/modules").iterdir())]
    own = [path.read_text() for path in sorted(FILES.iterdir())]
    made_of = [system.name, pinned, kernel, own, SPARE, (CACHE / "key.pub").read_text()]
    return _made("image", made_of, ".ext4", lambda target: _image(system, packages, target))


def _made(name: str, made_of: object, suffix: str, make: object) -> Path:
    """The file in the cache for `made_of`; older ones of the name go."""
    digest = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]
    target = CACHE / f"{name}-{digest}{suffix}"
    if not target.exists():
        print(f"lab: making the {name} of the guests; this takes minutes", flush=True)
        for old in CACHE.glob(f"{name}-*"):
            old.unlink()
        partial = target.with_name(f"{name}-partial")
        make(partial)  # type: ignore[operator]
        partial.rename(target)
    return target


def _suite() -> str:
    return platform.freedesktop_os_release()["VERSION_CODENAME"]


def _system(target: Path) -> None:
    """The root filesystem, from the package sources that this machine itself uses."""
    sources = [
        path
        for path in (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list"))
        if path.exists()
    ]
    if not sources:
        raise LabError("neither /etc/apt/sources.list.d/debian.sources nor /etc/apt/sources.list is there")
    left_out = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("man", "doc", "locale")]
    options = ['Acquire::Languages "none"', 'APT::Install-Recommends "false"', 'Acquire::Check-Valid-Until "false"']
    work = CACHE / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    # In a namespace, so that what it has started and mounted ends with it.
    command = [
        *("unshare", "--mount", "--pid", "--fork", "--kill-child"),
        *("mmdebstrap", "--variant=minbase", "--format=tar", f"--include={','.join(DEBIAN)}"),
        *(f"--aptopt={option}" for option in options),
        *left_out,
        *(_suite(), target, sources[0]),
    ]
    try:
        run(command, 3000, env={"TMPDIR": str(work)})
    except LabError as problem:
        why = next((line for line in str(problem).splitlines() if NETWORK.search(line)), "")
        if not why:
            raise
        raise Skip(f"the mirror that {sources[0]} names does not give the guests' packages: {why.strip()}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"])


def _dependencies() -> list[Distribution]:
    """What tfglm needs, and what that needs, as this very environment has it."""
    found: dict[str, Distribution] = {}
    cpu = for_cpus(distribution("torch"))
    waiting = list(_project()["dependencies"])
    while waiting:
        wanted = Requirement(waiting.pop())
        if wanted.name.startswith(CUDA) and not cpu:
            continue  # guests get another build of torch
        if wanted.name not in found and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            found[wanted.name] = distribution(wanted.name)
            waiting += found[wanted.name].requires or []
    return [found[name] for name in sorted(found)]


def for_cpus(torch: Distribution) -> bool:
    return not any(Requirement(line).name.startswith(CUDA) for line in torch.requires or [])


def _image(system: Path, packages: list[Distribution], target: Path) -> None:
    tree = CACHE / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    try:
        run(["tar", "-C", tree, "-xpf", system, "--numeric-owner"], 600)
        _kernel_modules(tree)
        _environment(tree, packages)
        shutil.copytree(FILES, tree / "lab")
        shutil.copy(CACHE / "key.pub", tree / "lab/authorized_keys")
        hosts = "".join(f"{address(guest)} spark{guest}\n" for guest in range(3))
        (tree / "etc/hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        run(["chroot", tree, "sh", "-eu", "/lab/setup.sh"], 300)
        target.unlink(missing_ok=True)
        used = sum(path.lstat().st_blocks * 512 for path in tree.rglob("*"))
        run(["truncate", "-s", str((used * 11 // 10 + SPARE) >> 12 << 12), target], 10)
        run(["mke2fs", "-q", "-t", "ext4", "-m", "0", "-d", tree, target], 900)
    finally:
        shutil.rmtree(tree, ignore_errors=True)


def _kernel_modules(tree: Path) -> None:
    for modules in Path("/usr/lib/uml/modules").iterdir():
        shutil.copytree(modules, tree / "lib/modules" / modules.name, symlinks=True)
        run(["chroot", tree, "depmod", modules.name], 120)


def _environment(tree: Path, packages: list[Distribution]) -> None:
    """What tfglm needs, in the environment that the playbook will find complete: guests cannot reach an index. tfglm
    itself is left to the playbook."""
    run(["chroot", tree, "python3", "-m", "venv", f"/{VENV}"], 300)
    library = next((tree / VENV / "lib").iterdir())
    own = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if library.name != own:
        raise LabError(f"guests have {library.name}, and take their packages from this environment, which has {own}")
    for own_of_venv in [*library.glob("site-packages/setuptools*"), library / "site-packages/pkg_resources"]:
        shutil.rmtree(own_of_venv)  # else there are two versions of it
    for package in packages:
        if package.name == "torch" and not for_cpus(package):
            _torch_for_cpus(library / "site-packages")
            continue
        for file in package.files or []:
            source = Path(str(package.locate_file(file)))
            if ".." not in file.parts and not str(file).startswith(UNUSED) and source.exists():
                target = library / "site-packages" / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)


def _torch_for_cpus(target: Path) -> None:
    """Where this environment has torch for GPUs, guests take a wheel for CPUs out of the folders that pip is
    configured to find links in. Raises Skip where there is none."""
    wanted = next(line for line in _project()["dependencies"] if Requirement(line).name == "torch")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    try:
        run([*command, "--target", target, wanted], 600)
    except LabError as problem:
        raise Skip(
            "torch is a build for GPUs here, too large for guests, and pip finds none for CPUs without an index; "
            "PIP_FIND_LINKS names a folder with one"
        ) from problem

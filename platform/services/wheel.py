"""The project as a wheel to ship to a cluster, built from the running source files.

It declares no requirements: the machines of a cluster have them installed, and Ray would otherwise
install gigabytes for every job.
"""

import base64
import hashlib
import importlib
import zipfile
from pathlib import Path

SHIPPED = ("platform", "models", "jobs", "ui", "infra")
SUFFIXES = (".py", ".yaml", ".json", ".css")


def build(folder: Path) -> Path:
    """Write the wheel into a folder.

    Its version is a hash of its contents, so that the same code is shipped once.
    """
    contents = {
        f"attune/{part}/{path.relative_to(root)}": path.read_bytes()
        for part in SHIPPED
        for root in [Path(next(iter(importlib.import_module(f"attune.{part}").__path__)))]
        for path in sorted(root.rglob("*"))
        if path.suffix in SUFFIXES
    }
    digest = hashlib.sha256()
    for name, content in contents.items():
        digest.update(name.encode() + content)
    version = f"0+{digest.hexdigest()[:12]}"
    info = f"attune-{version}.dist-info"
    contents[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: attune\nVersion: {version}\n".encode()
    )
    contents[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: attune\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = "".join(
        f"{name},{_hash_content(content)},{len(content)}\n" for name, content in contents.items()
    )
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = folder / f"attune-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in contents.items():
            # A fixed date, so that the same files give the same bytes.
            file.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content)
    return wheel


def _hash_content(content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return "sha256=" + digest.rstrip(b"=").decode()

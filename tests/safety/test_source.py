"""The source of the package: no pickle, no code from data, no shell, no listening socket."""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

NEVER = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "compile": "makes code of text",
    "__import__": "imports what a text names",
    "os.system": "asks a shell",
    "os.popen": "asks a shell",
    "tempfile.mktemp": "gives a name that another may take first",
    "yaml.load": "makes objects of tags",
    "yaml.unsafe_load": "makes objects of tags",
    "yaml.full_load": "makes objects of tags",
    "socket.socket": "opens a connection",
    "tarfile.extractall": "writes where members say",
    "broadcast_object_list": "pickles between processes",
    "gather_object": "pickles between processes",
    "shutil.unpack_archive": "writes where members say",
}
MODULES = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "webdataset", "http.server",
    "socketserver", "xmlrpc", "requests", "urllib.request", "huggingface_hub", "ftplib", "telnetlib", "xml",
}  # fmt: skip
# The only module that makes requests, and the one that explains what a hub refuses.
ASK_THE_HUB = {f"lora_trainer/run/bases/{name}.py" for name in ("hub_refusals", "hub_requests")}
NEEDS = {  # by the name of a call: a required keyword and its value
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}
METHODS_NEVER = {"extractall", "extract", "set_start_method", "run_module"}
FORBIDDEN_KEYWORDS = {"shell", "trust_remote_code", "allow_pickle"}
# A file without any of these names has no fault, and is not parsed.
NAMES = re.compile(
    "|".join(
        re.escape(name.rpartition(".")[2])
        for name in {*NEVER, *MODULES, *NEEDS, *METHODS_NEVER, *FORBIDDEN_KEYWORDS, "from_pretrained"}
    )
)


def sources(checkout: Path) -> list[Path]:
    return [path for folder in ("lora_trainer", "scripts") for path in sorted((checkout / folder).rglob("*.py"))]


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a call; the last name alone where it is called on a value."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def keywords_of(call: ast.Call) -> dict[str, object]:
    return {each.arg: each.value.value for each in call.keywords if each.arg and isinstance(each.value, ast.Constant)}


def faults(text: str) -> Iterator[str]:
    if not NAMES.search(unicodedata.normalize("NFKC", text)):  # Python reads names so
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            yield from (f"imports {name}" for name in names if name in MODULES or name.partition(".")[0] in MODULES)
        if not isinstance(node, ast.Call):
            continue
        name, keywords = dotted(node.func), keywords_of(node)
        if name in NEVER:
            yield f"{name} {NEVER[name]}"
        if name in NEEDS and keywords.get(NEEDS[name][0]) is not NEEDS[name][1]:
            yield f"{name} without {NEEDS[name][0]}={NEEDS[name][1]}"
        if any(keywords.get(each) is True for each in FORBIDDEN_KEYWORDS):
            yield f"{name} with shell, trust_remote_code or allow_pickle"
        if name.endswith(".from_pretrained") and "local_files_only" not in keywords and not _spreads(node):
            yield f"{name} without local_files_only"
        if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS_NEVER:
            yield f".{node.func.attr}()"


def _spreads(call: ast.Call) -> bool:
    """It has `**LOCAL`, which sets local_files_only and trust_remote_code."""
    return any(
        each.arg is None and isinstance(each.value, ast.Name) and each.value.id == "LOCAL" for each in call.keywords
    )


def test_the_source_never_executes_what_it_reads(checkout: Path) -> None:
    found = [
        f"{path.relative_to(checkout)}: {fault}"
        for path in sources(checkout)
        for fault in faults(path.read_text(encoding="utf-8"))
        if not (path.relative_to(checkout).as_posix() in ASK_THE_HUB and fault.startswith("imports huggingface_hub"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from joblib import load",
        "eval(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "yaml.load(text)",
        "subprocess.run(text, shell=True)",
        "AutoModel.from_pretrained(name)",
        "AutoModel.from_pretrained(name, local_files_only=True, trust_remote_code=True)",
        "tar.extractall(folder)",
        "import urllib.request",
    ],
)
def test_this_test_detects_violations(text: str) -> None:
    assert list(faults(text))

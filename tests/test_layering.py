"""The import directions of docs/architecture.md: who may import whom, and which third-party packages."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = {"wire", "kernels", "kvtransfer", "model", "prefill", "decode", "router", "scripts", "tests"}

# package -> (what of ours, what of others); a dotted entry allows that module only
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "wire": (set(), {"msgpack", "zmq"}),
    "kernels": (set(), {"torch", "triton"}),
    "kvtransfer": ({"wire", "kernels.spans"}, {"torch", "zmq", "numpy", "xxhash", "msgpack", "cryptography"}),
    "model": ({"kernels", "kvtransfer.layout", "kvtransfer.arena"}, {"torch"}),
    "prefill": ({"wire", "kvtransfer", "model"}, {"torch", "zmq"}),
    "decode": (
        {"wire", "kvtransfer", "model"}
        | {f"kernels.{name}" for name in ("ahead", "sample", "sequences", "streams", "workspace", "launch", "trail")},
        {"torch", "zmq", "numpy"},
    ),
    "router": ({"wire"}, {"aiohttp", "uvloop", "tokenizers", "zmq"}),
}
TORCH_IN_KVTRANSFER = {"kvtransfer/arena.py", "kvtransfer/transports"}


def imports(path: Path) -> list[str]:
    """Every module named by an import statement of a file, at any depth."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            names.append(node.module or "")
    return names


def violations(path: Path, package: str) -> list[str]:
    ours, others = ALLOWED[package]
    bad = []
    for name in imports(path):
        root = name.split(".")[0]
        allowed = {package, *ours} if root in OURS else others | set(sys.stdlib_module_names)
        if root not in allowed and name not in allowed:
            bad.append(f"{path.relative_to(ROOT)} imports {name}")
    return bad


def test_every_package_imports_only_downwards() -> None:
    bad = [line for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py")) for line in violations(path, package)]
    assert not bad, "\n".join(bad)


def test_torch_in_kvtransfer_stays_in_the_arena_and_the_transports() -> None:
    for path in sorted((ROOT / "kvtransfer").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if not any(name.startswith(allowed) for allowed in TORCH_IN_KVTRANSFER):
            assert "torch" not in {module.split(".")[0] for module in imports(path)}, name


def test_no_process_of_ours_imports_transformers_or_pickle() -> None:
    for package in ALLOWED:
        for path in (ROOT / package).rglob("*.py"):
            roots = {module.split(".")[0] for module in imports(path)}
            assert not roots & {"transformers", "pickle", "dill", "cloudpickle"}, path


def test_every_file_has_a_room() -> None:
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).parts
        if not parts[0].startswith((".", "build")):
            assert parts[0] in OURS, f"{path}: no such room"


def test_kernels_is_our_folder() -> None:
    import kernels

    assert Path(str(kernels.__file__)).parent == ROOT / "kernels"
    assert not hasattr(kernels, "__version__")

"""kvpass is importable under one name only, installs completely, and leaves everybody else's imports alone."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from transformers.utils import is_kernels_available

import kvpass.eval
import kvpass.graphs
import kvpass.kernels

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = "kvpass/builtin/model.safetensors"
LINKED = ["kernels", "graphs", "eval"]

in_a_checkout = pytest.mark.skipif(
    not (ROOT / "kvpass" / "kernels").is_symlink(), reason="an sdist has kernels, graphs and eval inside kvpass only"
)

ASK_FOR_KERNELS = "from transformers.utils import is_kernels_available; print(is_kernels_available())"


def run_python(code: str, cwd: Path, *, safe_path: bool = True) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter whose path holds nothing of this checkout unless the working folder does."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    if safe_path:
        env["PYTHONSAFEPATH"] = "1"
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True)


def printed(result: subprocess.CompletedProcess[str]) -> str:
    """What a program printed that must have ended well."""
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def kernels_without_us(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What transformers says of the Hugging Face package `kernels` where kvpass is nowhere near."""
    return printed(run_python(ASK_FOR_KERNELS, tmp_path_factory.mktemp("elsewhere")))


@in_a_checkout
def test_a_bare_import_from_the_checkout_is_refused_and_no_kernel_can_be_imported_under_a_bare_name():
    assert (ROOT / "kernels" / "cpu.py").exists()
    statements = ("import kernels.cpu", "from kernels import cpu", "import graphs", "import eval")
    tries = [f"try: {statement}\nexcept ImportError as error: print('refused', error)" for statement in statements]
    result = run_python("\n".join(tries), ROOT, safe_path=False)
    assert result.stdout.count("refused") == 4, result.stderr
    for name in ("graphs", "eval"):
        assert f"this is kvpass.{name}, found as '{name}'" in result.stdout


@pytest.mark.skipif(importlib.util.find_spec("kernels") is not None, reason="the checkout would shadow the real one")
@pytest.mark.exhaustive
def test_transformers_works_in_the_checkout_without_a_safe_path(kernels_without_us):
    ask = "from transformers import LlamaForCausalLM; import kvpass; kvpass.compile; " + ASK_FOR_KERNELS
    assert printed(run_python(ask, ROOT, safe_path=False)) == kernels_without_us


@in_a_checkout
def test_the_linked_folders_are_one_module_each():
    files = {other: getattr(loaded, "__file__", None) for other, loaded in sys.modules.items()}
    for name in LINKED:
        assert getattr(kvpass, name) is sys.modules[f"kvpass.{name}"]
        own = ROOT / name / "__init__.py"
        assert [other for other, file in files.items() if file and Path(file).resolve() == own] == [f"kvpass.{name}"]


def test_hugging_face_kernels_are_as_available_with_us_as_without_us(kernels_without_us):
    """Asked here, where tests/conftest.py has imported kvpass without the checkout on the path."""
    assert f"{is_kernels_available()}\n" == kernels_without_us
    assert str(ROOT) not in [str(Path(entry).resolve()) for entry in sys.path]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build from, so that no build folder is left here."""
    copy = tmp_path_factory.mktemp("checkout") / "kvpass"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "shared")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    return copy


def built(what: str, source: Path, folder: Path) -> Path:
    """Have the build backend make a sdist or wheel."""
    printed(run_python(f"import hatchling.build as backend; backend.build_{what}({str(folder)!r})", source))
    (path,) = folder.glob("kvpass-*.*[lz]")
    return path


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    path = built("sdist", checkout, folder)
    with tarfile.open(path) as packed:
        assert [member.name for member in packed if not (member.isreg() or member.isdir())] == []  # no links
        packed.extractall(folder, filter="data")
    return folder / path.name.removesuffix(".tar.gz")


def files_in(folder: Path) -> set[str]:
    """Every file below, also behind links, but what tools leave."""
    return {
        (Path(inside).relative_to(folder) / file).as_posix()
        for inside, _, files in os.walk(folder, followlinks=True)
        for file in files
        if "__pycache__" not in inside
    }


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(built("wheel", checkout, tmp_path_factory.mktemp("wheel")))


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel, checkout):
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == {f"kvpass/{name}" for name in files_in(checkout / "kvpass")} | {"kvpass_autoload.py"}
    assert {f"kvpass/{name}/__init__.py" for name in LINKED} | {WEIGHTS} <= packed


@pytest.mark.slow
def test_the_wheel_works_without_checkout_and_triton_and_importing_it_imports_no_torch(wheel, tmp_path):
    """transformers imports Triton where it is installed, so its absence has to be made."""
    wheel.extractall(tmp_path)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
sys.modules["triton"] = None
import kvpass
print([name for name in ("torch", "transformers", "rich") if name in sys.modules])
print(dir(kvpass) == sorted(kvpass.__all__))
for name in kvpass.__all__:
    getattr(kvpass, name)
print([name for name in sys.modules if name.startswith(("kvpass.kernels", "kvpass.vllm", "vllm"))])
import kvpass.kernels, kvpass.graphs, kvpass.eval, kvpass.builtin
model, tokenizer = kvpass.builtin.load()
print(kvpass.builtin.__file__, model.num_parameters())
"""
    said = printed(run_python(code, tmp_path)).split()
    assert said == ["[]", "True", "[]", str(tmp_path / "kvpass/builtin/__init__.py"), "3444736"]


@in_a_checkout
def test_an_editable_install_is_found_beside_the_clone_and_puts_no_kernels_on_the_path(tmp_path):
    """Python looks in the working folder first, where the clone's own folder is a package without files."""
    backend = f"import hatchling.build as backend; print(backend.build_editable({str(tmp_path)!r}))"
    wheel = printed(run_python(backend, ROOT)).strip()
    zipfile.ZipFile(tmp_path / wheel).extractall(tmp_path / "site")
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "kvpass").symlink_to(ROOT)
    code = f"""
import site, sys
sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry]
site.addsitedir({str(tmp_path / "site")!r})
import importlib.util, kvpass, kvpass_autoload
print(kvpass.__file__, [name for name in {LINKED} if importlib.util.find_spec(name)])
"""
    said = printed(run_python(code, tmp_path / "beside", safe_path=False))
    assert said == f"{ROOT / '.editable' / 'kvpass' / '__init__.py'} []\n"


@pytest.mark.slow
def test_the_sdist_holds_the_package_its_tests_and_its_documentation(sdist, checkout):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    expected = files_in(checkout) if tracked.returncode else set(tracked.stdout.split())
    linked = {name for name in expected if name.split("/")[0] in LINKED}  # in kvpass/ only
    left_out = {name for name in expected if name.startswith(".")} | {f"kvpass/{name}" for name in LINKED} | linked
    inside = files_in(sdist)
    assert (expected - left_out) | {f"kvpass/{name}" for name in linked} == inside - {"PKG-INFO"}


@pytest.mark.slow
def test_a_wheel_made_from_the_sdist_is_the_wheel_made_from_the_checkout(sdist, wheel, tmp_path):
    again = zipfile.ZipFile(built("wheel", sdist, tmp_path))
    contents = [{name: made.read(name) for name in made.namelist()} for made in (again, wheel)]
    for content in contents:
        record = next(name for name in content if name.endswith("RECORD"))
        content[record] = b"".join(sorted(content[record].splitlines(keepends=True)))
    assert contents[0] == contents[1]


@pytest.mark.exhaustive
def test_the_tests_of_the_sdist_run(sdist):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_pairwise.py"]
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    printed(subprocess.run(command, cwd=sdist, env=env, capture_output=True, text=True))

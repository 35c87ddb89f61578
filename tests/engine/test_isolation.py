"""Loading and running an engine must fit into a host's environment: it needs none of the libraries that built it."""

import importlib.util
import subprocess
import sys

import pytest

from tests.engine.small import child_environment

BLOCKED = ("diffusers", "transformers", "onnxscript", "peft")

CHILD = f"""
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocked())
importlib.import_module(sys.argv[1])
assert not [name for name in sys.modules if name.split(".")[0] in {BLOCKED!r}]
print("imported")
"""


def run(module: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", CHILD, module], env=child_environment(), capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "module",
    [
        "sdaccel",
        "sdaccel.engine.manifest",
        "sdaccel.engine.store",
        "sdaccel.engine.weights",
        "sdaccel.runtime",
        "sdaccel.backends.onnxruntime",
    ],
)
def test_it_imports_without_the_libraries_that_build(module):
    if importlib.util.find_spec(module) is None:
        pytest.xfail(f"{module} is not written yet")
    finished = run(module)
    assert finished.stdout == "imported\n", finished.stderr


def test_the_block_is_real():
    assert "diffusers is blocked" in run("diffusers").stderr

"""Run by A1111 and Forge when they start: installs sdaccel beside the host's packages, and changes none of them.

Only what running engines needs comes along, and of that what the host lacks; what building needs is put aside by the
first build (`sdaccel.ui.builder_python`). pip says first what it would do: if it would change a package that the host
has, nothing is installed. What to do then is printed and kept in problem.txt, which the tab shows. With sdaccel
installed nothing is asked of the network.
"""

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROBLEM = HERE / "problem.txt"
PIP = [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]

TORCH = (2, 10)
RUNNING = ("filelock", "numpy", "pillow", "platformdirs", "psutil", "rich", "safetensors")
ON_A_GPU = {
    "12": ("cuda-bindings>=12.8,<13", "nvidia-cuda-nvrtc-cu12", "nvidia-cudnn-frontend<1.29"),
    "13": ("cuda-bindings>=13,<14", "nvidia-cuda-nvrtc<14", "nvidia-cudnn-frontend<1.29"),
}
"""By torch's CUDA version. Later frontends of cuDNN bring a compiler of their own, with requirements to match."""
ON_A_CPU = ("onnxruntime>=1.22",)


def source():
    """What pip is asked for: the checkout that this folder belongs to, else the package."""
    checkout = HERE.parent
    return str(checkout) if (checkout / "sdaccel" / "__init__.py").is_file() else "sdaccel"


def installed():
    """Name -> version; of a package that is there twice, the one that Python imports."""
    found = {}
    for item in metadata.distributions():
        if item.metadata["Name"]:
            found.setdefault(_plain(item.metadata["Name"]), item.version)
    return found


def missing(have, cuda):
    """What running engines needs and the host lacks. cuda: torch's CUDA version, empty where it finds no GPU."""
    wanted = RUNNING + ON_A_GPU.get(cuda.split(".")[0], ON_A_CPU)
    there = {"onnxruntime" if name.startswith("onnxruntime-") else name for name in have}  # -gpu, say: the same module
    return [name for name in wanted if _plain(re.split("[<>=]", name)[0]) not in there]


def cuda_of_torch():
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.version.cuda if torch.cuda.is_available() else '')"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 and done.stdout.strip() else ""


def plan(arguments):
    """(name, version) of everything that pip would install. Raises RuntimeError with pip's words if it cannot tell."""
    done = _pip("--dry-run", "--quiet", "--report", "-", *arguments)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:] or f"pip ended with {done.returncode}")
    try:
        items = json.loads(done.stdout)["install"]
        return [(item["metadata"]["name"], item["metadata"]["version"]) for item in items]
    except (ValueError, KeyError, TypeError):
        raise RuntimeError(f"this pip gives no report. Run: {_quoted(sys.executable)} -m pip install -U pip") from None


def changes(planned, have):
    """What of ``planned`` would replace a package that is there, as "name old -> new"."""
    return [
        f"{name} {have[_plain(name)]} -> {version}"
        for name, version in planned
        if have.get(_plain(name), version) != version
    ]


def _pip(*arguments):
    return subprocess.run([*PIP, *arguments], capture_output=True, text=True, encoding="utf-8", errors="replace")


def _plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def _quoted(text):
    return f'"{text}"'


def old_torch(have):
    """What to do about a torch that is too old; empty if it is not."""
    version = have.get("torch", "0")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= TORCH:
        return ""
    return "\n".join(
        [
            f"sdaccel needs torch {'.'.join(map(str, TORCH))} or newer; this web UI has {version}.",
            "The web UI installs another one itself. In webui-user.bat (webui-user.sh: export instead of set):",
            "  set TORCH_COMMAND=pip install torch torchvision --index-url https://download.pytorch.org/whl/cu128",
            "and start it once with --reinstall-torch in COMMANDLINE_ARGS. xformers, if it is used, has to fit the new",
            "torch; without it leave --xformers out.",
        ]
    )


def refusal(reasons, requirement):
    return "\n".join(
        [
            "sdaccel was not installed, because that would change packages of this web UI:",
            *(f"  {reason}" for reason in reasons),
            "",
            "Keep the web UI as it is, and use sdaccel in an environment of its own:",
            "  python -m venv sdaccel-env",
            f'  sdaccel-env/bin/pip install "{requirement}[ui]"     (Windows: sdaccel-env\\Scripts\\pip)',
            "  sdaccel-env/bin/sdaccel ui",
        ]
    )


def install():
    """Installs sdaccel. Returns what stands in the way, empty if nothing does."""
    have = installed()
    problem = old_torch(have)
    if problem:
        return problem
    requirement = source()
    wanted = missing(have, cuda_of_torch())
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "kept.txt"
        kept.write_text("".join(f"{name}=={have[name]}\n" for name in have if _VERSION.fullmatch(have[name])), "utf-8")
        steps = [["-c", str(kept), *wanted]] if wanted else []
        reasons = changes(plan(steps[0]), have) if steps else []
        if reasons:
            return refusal(reasons, requirement)
        print("Installing sdaccel")
        for arguments in (*steps, ["--no-deps", requirement]):
            done = _pip(*arguments)
            if done.returncode:
                return f"pip could not install sdaccel:\n{done.stderr.strip()[-2000:]}"
    return ""


_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9.]+)?")
"""what pip takes for a version; a few packages have others"""


def main():
    if importlib.util.find_spec("sdaccel") is not None:
        PROBLEM.unlink(missing_ok=True)
        return
    try:
        problem = install()
    except (OSError, RuntimeError) as error:
        command = f"{_quoted(sys.executable)} {_quoted(Path(__file__).resolve())}"
        problem = f"sdaccel is not installed, and pip cannot install it: {error}\nWith a network, run: {command}"
    if problem:
        print(problem)
        PROBLEM.write_text(problem, encoding="utf-8")
    else:
        PROBLEM.unlink(missing_ok=True)


if __name__ == "__main__":
    main()

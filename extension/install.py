"""Run by A1111 and Forge when they start: installs sdaccel beside the host's packages, and changes none of them.

pip says first what it would do. If it would change a package that the host has, nothing is installed; what to do
instead is printed and kept in problem.txt, which the tab shows. With sdaccel installed nothing is asked of the network.
"""

import importlib.util
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROBLEM = HERE / "problem.txt"
PIP = [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]


def source():
    """What pip is asked for: the checkout that this folder belongs to, else the package."""
    checkout = HERE.parent
    return str(checkout) if (checkout / "sdaccel" / "__init__.py").is_file() else "sdaccel"


def plan(requirement):
    """(name, version) of everything that pip would install. Raises RuntimeError with pip's words if it cannot tell."""
    command = [*PIP, "--dry-run", "--quiet", "--report", "-", requirement]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace")
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:] or f"pip ended with {done.returncode}")
    try:
        items = json.loads(done.stdout)["install"]
        return [(item["metadata"]["name"], item["metadata"]["version"]) for item in items]
    except (ValueError, KeyError, TypeError):
        raise RuntimeError(f"this pip gives no report. Run: {_quoted(sys.executable)} -m pip install -U pip") from None


def changes(planned, installed):
    """What of ``planned`` would replace a package that is there, as "name old -> new"."""
    have = {_plain(name): version for name, version in installed.items()}
    return [
        f"{name} {have[_plain(name)]} -> {version}"
        for name, version in planned
        if have.get(_plain(name), version) != version
    ]


def installed():
    """Name -> version; of a package that is there twice, the one that Python imports."""
    found = {}
    for item in metadata.distributions():
        if item.metadata["Name"]:
            found.setdefault(item.metadata["Name"], item.version)
    return found


def _plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def _quoted(text):
    return f'"{text}"'


def refusal(reasons, requirement):
    python, what = _quoted(sys.executable), _quoted(requirement)
    return "\n".join(
        [
            "sdaccel was not installed, because that would change packages of this web UI:",
            *(f"  {reason}" for reason in reasons),
            "",
            "Either let it, if you know that the web UI bears these versions:",
            f"  {python} -m pip install {what}",
            "or keep the web UI as it is, and use sdaccel in an environment of its own:",
            "  python -m venv sdaccel-env",
            f'  sdaccel-env/bin/pip install "{requirement}[ui]"     (Windows: sdaccel-env\\Scripts\\pip)',
            "  sdaccel-env/bin/sdaccel ui",
        ]
    )


def main():
    if importlib.util.find_spec("sdaccel") is not None:
        PROBLEM.unlink(missing_ok=True)
        return
    requirement = source()
    command = f"{_quoted(sys.executable)} -m pip install {_quoted(requirement)}"
    try:
        planned = plan(requirement)
        reasons = changes(planned, installed())
        problem = refusal(reasons, requirement) if reasons else ""
        if not problem:
            print("Installing sdaccel")
            done = subprocess.run(
                [*PIP, requirement], capture_output=True, text=True, encoding="utf-8", errors="replace"
            )
            problem = f"pip could not install sdaccel:\n{done.stderr.strip()[-2000:]}" if done.returncode else ""
    except (OSError, RuntimeError) as error:
        problem = f"sdaccel is not installed, and pip cannot install it: {error}\nWith a network, run: {command}"
    if problem:
        print(problem)
        PROBLEM.write_text(problem, encoding="utf-8")
    else:
        PROBLEM.unlink(missing_ok=True)


if __name__ == "__main__":
    main()

"""``python -m sdaccel``: the command line; without its dependencies still the doctor."""

from __future__ import annotations

import sys


def main() -> int:
    try:
        from sdaccel import cli
    except ModuleNotFoundError as missing:
        from sdaccel import doctor

        return doctor.without_cli(sys.argv[1:], missing)
    cli.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())

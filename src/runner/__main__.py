"""The program: `python -m runner`, or `runner`."""

import gc
import sys


def main() -> int:
    """Run one command; Ctrl-C while its modules are imported ends it with a word, too."""
    try:
        from runner import cli

        return cli.main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        if "torch" not in sys.modules:
            gc.freeze()  # at exit Python would look for garbage, and a mistake be reported a quarter later


if __name__ == "__main__":
    sys.exit(main())

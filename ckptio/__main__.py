"""``python -m ckptio``: the `ckptio` command."""

from ckptio.cli import main

if __name__ == "__main__":
    main()

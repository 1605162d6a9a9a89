"""`python -m mkernel` is the command line."""

from mkernel.cli import main

if __name__ == "__main__":
    main(prog_name="mkernel")

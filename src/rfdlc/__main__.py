"""`python -m rfdlc` is the command line."""

from rfdlc.cli import main

if __name__ == "__main__":
    main()

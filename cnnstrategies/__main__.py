"""``python -m cnnstrategies``: the command line where no script is installed, as in jobs and under launchers."""

from cnnstrategies.cli import main

if __name__ == "__main__":
    main()

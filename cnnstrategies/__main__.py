"""``python -m cnnstrategies``: the command line without an installed script, for jobs and launchers."""

from cnnstrategies.cli import main

if __name__ == "__main__":
    main()

"""Entry point of ``python -m cnnstrategies``, for jobs and launchers where the script is not on the search path."""

from cnnstrategies.cli import main

if __name__ == "__main__":
    main()

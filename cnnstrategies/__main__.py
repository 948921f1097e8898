"""Entry point of ``python -m cnnstrategies``, for jobs and launchers where ``cnnstrategies`` is not on the PATH."""

from cnnstrategies.cli import main

if __name__ == "__main__":
    main()

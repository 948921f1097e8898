"""Sizes in words."""


def format_bytes(size: float) -> str:
    """A size with a unit, in 8 characters at most up to a terabyte: 1.5 MiB, 224 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.1f} {unit}" if size < 10 and unit != "B" else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB" if size < 10 else f"{size:.0f} GiB"

"""``python -m tierfs``."""

from tierfs.cli import main

if __name__ == "__main__":
    main()

"""tierfs: an S3 bucket as a POSIX directory, with RAM and NVMe tiers in front of it."""

__version__ = "0.1.0"

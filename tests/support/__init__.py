"""What several test modules share: real mounts, a fake S3 server, system calls, workloads."""

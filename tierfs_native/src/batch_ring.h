/*
 * Many system calls at once, through io_uring, or one after the other where there is no io_uring (kernels before
 * 5.6, containers whose seccomp profile forbids it).
 *
 * A ring belongs to one process (a child must not touch its parent's), and to one caller at a time.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tierfs_ring;

enum tierfs_call_kind {
    TIERFS_CALL_READ, /* pread of length bytes at offset from descriptor to buffer */
    TIERFS_CALL_OPEN, /* openat of path, read only, beside the directory descriptor; no symbolic link */
};

struct tierfs_call {
    enum tierfs_call_kind kind;
    int descriptor;
    union {
        void *buffer;
        const char *path;
    };
    uint32_t length;
    uint64_t offset;
    int result; /* what the system call returned, or -errno */
};

/* 0 or -ENOMEM: without io_uring a ring works too, only slower. in_turn: as if there were none. */
int tierfs_ring_open(bool in_turn, struct tierfs_ring **ring);
void tierfs_ring_close(struct tierfs_ring *ring);

/* Whether calls overlap. */
bool tierfs_ring_is_real(const struct tierfs_ring *ring);

/* Carries all calls out and sets their results; returns when the last is done. */
void tierfs_ring_run(struct tierfs_ring *ring, struct tierfs_call *calls, size_t count);

/*
 * Where a request came from, and so where its answer goes: a descriptor of /dev/fuse, or an entry of a ring.
 *
 * Whoever makes an origin keeps it for as long as the process lives, since an answer may come at any time.
 */
#pragma once

#include <stddef.h>

struct tierfs_origin {
    /*
     * Gives the kernel its answer: struct fuse_out_header and its body, bytes in all. Any thread, once for each
     * request. 0 or -errno; -ENOENT: the request was given up and nobody waits; -ENODEV: the mount is gone.
     */
    int (*answer)(const struct tierfs_origin *origin, const void *message, size_t bytes);
};

static inline int tierfs_origin_answer(const struct tierfs_origin *origin, const void *message, size_t bytes)
{
    return origin->answer(origin, message, bytes);
}

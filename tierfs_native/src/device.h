/* /dev/fuse: the mount, and the threads that read requests from it. */
#pragma once

#include "origin.h"

#include <stddef.h>
#include <stdint.h>

#define TIERFS_REQUEST_MAX_BYTES (1024u * 1024u + 64u * 1024u)

struct tierfs_device;

struct tierfs_device_links {
    /* One request, in a buffer of the calling thread with room for an answer of that size behind it. worker: its number. */
    void (*handle)(void *context, unsigned worker, void *message, size_t bytes,
                   const struct tierfs_origin *origin, void *answer);
    void *context;
    int gone; /* eventfd: written to when the kernel has let go of the mount */
};

/* mount(2) with those flags and options. 0 or -errno. Nothing is read until tierfs_device_start. */
int tierfs_device_mount(const struct tierfs_device_links *links, const char *mountpoint, const char *name,
                        const char *options, unsigned long flags, struct tierfs_device **device);

/* The descriptor of /dev/fuse. */
int tierfs_device_descriptor(const struct tierfs_device *device);

int tierfs_device_start(struct tierfs_device *device, unsigned workers); /* 0 or -errno */

/* umount2(2); 0 or -errno. */
int tierfs_device_unmount(struct tierfs_device *device, int flags);

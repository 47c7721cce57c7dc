/*
 * Reads for which a device has to be waited for, by a thread of their own: those who read requests go on, and the
 * device has many reads at a time. Through io_uring, or one after the other where there is no io_uring (then the
 * device is told of each at once, and the thread waits in turn).
 *
 * What is read is checked as reading.h says. Bounded in number and so in memory.
 */
#pragma once

#include "origin.h"
#include "reading.h"

#include <stdbool.h>
#include <stddef.h>

#define TIERFS_DISK_DEPTH 64u

struct tierfs_disk;

struct tierfs_disk_links {
    /* The engine has to answer that request. In the thread of the disk. */
    void (*relay)(void *context, const void *message, size_t bytes, const struct tierfs_origin *origin);
    void *context;
};

/* reading: owned by the caller, complete, and kept. in_turn: as if there were no io_uring. 0 or -errno. */
int tierfs_disk_create(const struct tierfs_disk_links *links, const struct tierfs_reading *reading,
                       bool in_turn, struct tierfs_disk **disk);

/*
 * Takes over a READ, with message (header and body, copied) and descriptor. false: it does not, since there is too much
 * to do already. Any thread.
 */
bool tierfs_disk_read(struct tierfs_disk *disk, const struct tierfs_device_read *read, const void *message,
                      size_t bytes, const struct tierfs_origin *origin);

/* Whether it is done through io_uring. */
bool tierfs_disk_has_ring(const struct tierfs_disk *disk);

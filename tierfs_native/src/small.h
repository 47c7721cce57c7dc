/*
 * Opens and reads of small clean files, without the engine: a file that is opened here has no state at all but in
 * backing.h, so that nothing is lost when the engine dies.
 *
 * Its handle is TIERFS_FH_FRONT and the inode number. A read that cannot be answered from a tier goes to the
 * engine, which knows such handles. What is large, or passed through already, or being written, is opened there.
 */
#pragma once

#include "abi.h"
#include "backing.h"
#include "disk.h"
#include "origin.h"
#include "reading.h"
#include "view.h"

#include <stddef.h>
#include <stdint.h>

#define TIERFS_SMALL_TOUCHED 4096

struct tierfs_small;

/*
 * workers: how many threads will ask; may_wait: how many of them may wait for the device at a time, if there is a disk.
 * reading: owned by the caller, and complete. 0 or -errno.
 */
int tierfs_small_create(struct tierfs_backing *backing, const struct tierfs_reading *reading,
                        unsigned workers, unsigned may_wait, struct tierfs_small **small);

/* Before the first request. What the workers do not wait for is read there. */
void tierfs_small_set_disk(struct tierfs_small *small, struct tierfs_disk *disk);

/* Not for these functions: ask tierfs_answer. */
#define TIERFS_NOT_SMALL (-100003L)

/* As tierfs_answer, for the worker of that number. The body follows its header. */
long tierfs_small_answer(struct tierfs_small *small, unsigned worker, struct tierfs_reader *reader,
                         const struct fuse_in_header *header, const void *body, size_t body_bytes,
                         const struct tierfs_origin *origin, void *out, size_t out_capacity);

/* A read that was to be answered here goes to the engine. */
void tierfs_small_missed(struct tierfs_small *small);

/*
 * Inodes that were read here since the last call, in order; not all of them if there were many. inos:
 * TIERFS_SMALL_TOUCHED. One caller at a time.
 */
size_t tierfs_small_touched(struct tierfs_small *small, uint64_t *inos);

/* Called by a worker before a read goes to the engine, which should know by then what was read before. */
void tierfs_small_on_miss(struct tierfs_small *small, void (*on_miss)(void *context), void *context);

/* Opens, reads from the tiers, and reads that the engine had to answer. */
void tierfs_small_counts(struct tierfs_small *small, uint64_t *opens, uint64_t *reads, uint64_t *missed);

/*
 * Which inodes are open, and how: through the kernel's page cache, or passed through to a file of a tier.
 *
 * The kernel's rules (fs/fuse/iomode.c of Linux 6.18; what breaks them reaches the application as EIO at open):
 * all opens of one inode are of one kind while any is open, and all that pass through use one backing id. So the
 * first open decides, and later ones follow. While another open for writing is on its way to the engine, which does
 * not expect it to write behind its back, no open of that inode begins to pass through.
 *
 * Called from every thread; one lock, never held across a system call but the two ioctls.
 */
#pragma once

#include "channel.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tierfs_backing;

/* device: of /dev/fuse, for the ioctls; set when it is open. */
int tierfs_backing_create(struct tierfs_backing **backing);
void tierfs_backing_destroy(struct tierfs_backing *backing);
void tierfs_backing_set_device(struct tierfs_backing *backing, int device);

/*
 * An open of ino is about to be relayed. 1: the inode is passed through, so this open will be as well. 0: it is not.
 * -ENOSYS: opens are not asked for any more.
 */
int tierfs_backing_open_begins(struct tierfs_backing *backing, uint64_t ino, bool writes);

/*
 * The engine has lent a file with all bytes of ino, for the next open that may pass through. Takes the descriptor.
 * A file that is being created is lent before its open is known here.
 */
void tierfs_backing_lend(struct tierfs_backing *backing, uint64_t ino, int descriptor);

/*
 * The open has been answered. wanted: the engine says that the inode may be passed through. Returns the backing id,
 * or 0: through the page cache.
 */
int32_t tierfs_backing_open_ends(struct tierfs_backing *backing, uint64_t ino, bool writes, bool wanted);

/* An open that began has failed. */
void tierfs_backing_open_failed(struct tierfs_backing *backing, uint64_t ino, bool writes);

/* A file is open without an open request of its own (create). wanted and the result: as in open_ends. */
int32_t tierfs_backing_created(struct tierfs_backing *backing, uint64_t ino, bool wanted);

/* Which inodes are passed through to which files, to be freed. 0 or -ENOMEM. */
int tierfs_backing_list_passed(struct tierfs_backing *backing, struct tierfs_passed_file **files,
                               size_t *count);

/* While ino is passed through, each close(2) of it is a matter of the engine. */
void tierfs_backing_tell_close(struct tierfs_backing *backing, uint64_t ino);
bool tierfs_backing_tells_close(struct tierfs_backing *backing, uint64_t ino);

/* Whether opens of ino are passed through now. */
bool tierfs_backing_is_passed(struct tierfs_backing *backing, uint64_t ino);

/* The engine is gone: what it has lent for opens that it did not answer, nobody asks for any more. */
void tierfs_backing_drop_unasked(struct tierfs_backing *backing);

/*
 * An open that the front answers by itself, through the page cache. False: the inode is passed through, or opens are
 * not asked for any more; then it goes on to tierfs_backing_open_begins. Its end: tierfs_backing_released_here.
 */
bool tierfs_backing_open_here(struct tierfs_backing *backing, uint64_t ino);
void tierfs_backing_released_here(struct tierfs_backing *backing, uint64_t ino);

/* How many opens of this kind there are now. */
uint64_t tierfs_backing_count_here(struct tierfs_backing *backing);

/* The inodes that are open like this, to be freed. 0 or -ENOMEM. */
int tierfs_backing_list_here(struct tierfs_backing *backing, uint64_t **inos, size_t *count);

/* One open of ino is over. */
void tierfs_backing_released(struct tierfs_backing *backing, uint64_t ino);

/*
 * From now on opens are not asked for, and nothing is passed through; of what is open the kernel will not tell the
 * end. False, and nothing has changed: an inode is passed through or opened by the engine at the moment, or about to
 * be.
 */
bool tierfs_backing_stop_opens(struct tierfs_backing *backing);

/* Opens that passed through, and the errno with which the kernel refuses to (0: it does not). */
uint64_t tierfs_backing_opens(struct tierfs_backing *backing, int *refusal);

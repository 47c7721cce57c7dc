/*
 * Notifications of the engine for the kernel: what it has to drop of an inode or of a name.
 *
 * Writing one may wait for an inode lock that a request in progress holds: never in a thread that answers. So they are
 * queued, up to a bound above which they are refused, and a thread of their own writes them, in order. Any thread may
 * call these functions; they take a lock of their own, for a moment, and never wait for the kernel.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct tierfs_notifications;

/*
 * on_unknown: the kernel does not know the inode of a message that says that its attributes or bytes have changed; in
 * the thread that writes, without the lock. 0 or -errno.
 */
int tierfs_notifications_create(void (*on_unknown)(void *context, uint64_t ino), void *context,
                                struct tierfs_notifications **notifications);

/* Where they go: a descriptor of /dev/fuse. */
void tierfs_notifications_set_device(struct tierfs_notifications *notifications, int device);

/* A message with a struct fuse_out_header; a copy is made. Where there is no memory or no room it is dropped. */
void tierfs_notifications_queue(struct tierfs_notifications *notifications, const void *message,
                                size_t bytes);

/* written: taken by the kernel. refused: by the kernel, which had forgotten the inode or entry, or for lack of room. */
void tierfs_notifications_counts(struct tierfs_notifications *notifications, uint64_t *written,
                                 uint64_t *refused);

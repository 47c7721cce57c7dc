/* Notifications: written in order by a thread that may wait, an inode that is not known, and too many of them. */
#define _GNU_SOURCE
#include "notifications.h"

#include "abi.h"

#include <assert.h>
#include <errno.h>
#include <semaphore.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define DEVICE 100001 /* a descriptor that only this file knows */
#define UNKNOWN_INO 77u
#define TOO_MANY 100100u

struct message {
    struct fuse_out_header header;
    uint64_t ino;
};

static sem_t write_begins, write_ends, told;
static struct message seen;
static uint64_t unknown;

/* Waits until it is let go. The kernel knows all inodes but one. */
ssize_t write(int descriptor, const void *data, size_t bytes)
{
    if (descriptor != DEVICE)
        return syscall(SYS_write, descriptor, data, bytes);
    assert(bytes == sizeof seen);
    memcpy(&seen, data, bytes);
    sem_post(&write_begins);
    sem_wait(&write_ends);
    if (seen.ino != UNKNOWN_INO)
        return (ssize_t)bytes;
    errno = ENOENT;
    return -1;
}

static void on_unknown(void *context, uint64_t ino)
{
    assert(context == &unknown);
    unknown = ino;
    sem_post(&told);
}

static void queue(struct tierfs_notifications *notifications, uint64_t ino, int what)
{
    const struct message message = {.header = {.len = sizeof message, .error = what}, .ino = ino};

    tierfs_notifications_queue(notifications, &message, sizeof message);
}

/* The inode of the message that is being written; it is let go. */
static uint64_t next_written(void)
{
    sem_wait(&write_begins);
    uint64_t ino = seen.ino;
    sem_post(&write_ends);
    return ino;
}

int main(void)
{
    static struct tierfs_notifications *notifications; /* its thread is there until the process ends */
    uint64_t written, refused;

    assert(sem_init(&write_begins, 0, 0) == 0 && sem_init(&write_ends, 0, 0) == 0);
    assert(sem_init(&told, 0, 0) == 0);
    assert(tierfs_notifications_create(on_unknown, &unknown, &notifications) == 0);
    tierfs_notifications_set_device(notifications, DEVICE);

    for (uint64_t ino = 1; ino <= 3; ino++)
        queue(notifications, ino, FUSE_NOTIFY_INVAL_INODE);
    for (uint64_t ino = 1; ino <= 3; ino++)
        assert(next_written() == ino);

    /* Only of a message about an inode the number is one. */
    queue(notifications, UNKNOWN_INO, FUSE_NOTIFY_INVAL_ENTRY);
    assert(next_written() == UNKNOWN_INO);
    queue(notifications, UNKNOWN_INO, FUSE_NOTIFY_INVAL_INODE);
    assert(next_written() == UNKNOWN_INO);
    sem_wait(&told);
    assert(unknown == UNKNOWN_INO);

    /* While one waits, so many are kept; what has been written before is counted by now. */
    queue(notifications, 4, FUSE_NOTIFY_INVAL_INODE);
    sem_wait(&write_begins);
    assert(sem_trywait(&told) < 0);
    tierfs_notifications_counts(notifications, &written, &refused);
    assert(written == 3 && refused == 2);
    for (uint64_t i = 0; i < TOO_MANY; i++)
        queue(notifications, 5, FUSE_NOTIFY_INVAL_INODE);
    tierfs_notifications_counts(notifications, &written, &refused);
    assert(written == 3 && refused == 2 + 100);
    return 0;
}

#define _GNU_SOURCE
#include "notifications.h"

#include "abi.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NOTICES_MAX 100000u

struct notice {
    struct notice *next;
    size_t bytes;
    char message[];
};

struct tierfs_notifications {
    void (*on_unknown)(void *context, uint64_t ino);
    void *context;
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t added;
    int device;
    struct notice *notices, **notices_end;
    uint32_t notice_count;
    uint64_t written, refused;
};

void tierfs_notifications_queue(struct tierfs_notifications *notifications, const void *message, size_t bytes)
{
    struct notice *notice = malloc(sizeof *notice + bytes);

    if (notice == NULL)
        return;
    notice->next = NULL;
    notice->bytes = bytes;
    memcpy(notice->message, message, bytes);
    pthread_mutex_lock(&notifications->lock);
    if (notifications->notice_count < NOTICES_MAX) {
        *notifications->notices_end = notice;
        notifications->notices_end = &notice->next;
        notifications->notice_count++;
        notice = NULL;
        pthread_cond_signal(&notifications->added);
    } else {
        notifications->refused++;
    }
    pthread_mutex_unlock(&notifications->lock);
    free(notice);
}

/* The inode of a message that says that its attributes or bytes have changed; 0 of any other. */
static uint64_t inode_of_notice(const struct notice *notice)
{
    struct {
        struct fuse_out_header header;
        uint64_t ino;
    } start;

    if (notice->bytes < sizeof start)
        return 0;
    memcpy(&start, notice->message, sizeof start);
    return start.header.error == FUSE_NOTIFY_INVAL_INODE ? start.ino : 0;
}

static void *write_notices(void *context)
{
    struct tierfs_notifications *notifications = context;

    pthread_mutex_lock(&notifications->lock);
    for (;;) {
        while (notifications->notices == NULL)
            pthread_cond_wait(&notifications->added, &notifications->lock);
        struct notice *notice = notifications->notices;
        int device = notifications->device;
        notifications->notices = notice->next;
        if (notifications->notices == NULL)
            notifications->notices_end = &notifications->notices;
        notifications->notice_count--;
        pthread_mutex_unlock(&notifications->lock);
        ssize_t written = write(device, notice->message, notice->bytes);
        uint64_t unknown = written < 0 && errno == ENOENT ? inode_of_notice(notice) : 0;
        free(notice);
        if (unknown != 0)
            notifications->on_unknown(notifications->context, unknown);
        pthread_mutex_lock(&notifications->lock);
        if (written < 0)
            notifications->refused++;
        else
            notifications->written++;
    }
    return NULL;
}

int tierfs_notifications_create(void (*on_unknown)(void *context, uint64_t ino), void *context,
                                struct tierfs_notifications **notifications)
{
    struct tierfs_notifications *made = calloc(1, sizeof *made);
    pthread_t thread;

    if (made == NULL)
        return -ENOMEM;
    made->on_unknown = on_unknown;
    made->context = context;
    made->device = -1;
    made->notices_end = &made->notices;
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->added, NULL);
    int error = pthread_create(&thread, NULL, write_notices, made);
    if (error != 0) {
        free(made);
        return -error;
    }
    pthread_detach(thread);
    *notifications = made;
    return 0;
}

void tierfs_notifications_set_device(struct tierfs_notifications *notifications, int device)
{
    pthread_mutex_lock(&notifications->lock);
    notifications->device = device;
    pthread_mutex_unlock(&notifications->lock);
}

void tierfs_notifications_counts(struct tierfs_notifications *notifications, uint64_t *written,
                                 uint64_t *refused)
{
    pthread_mutex_lock(&notifications->lock);
    *written = notifications->written;
    *refused = notifications->refused;
    pthread_mutex_unlock(&notifications->lock);
}

#define _GNU_SOURCE
#include "disk.h"

#include "abi.h"
#include "batch_queues.h"
#include "log.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define MESSAGE_BYTES (sizeof(struct fuse_in_header) + sizeof(struct fuse_read_in))
#define HEADER_PLACE_BYTES 4096u /* before the blocks, which begin on a page */
#define POLL_MULTISHOT (UINT32_C(1) << 0)
#define MORE_TO_COME (UINT32_C(1) << 1)

/* One read that is under way, or none. Slots and their memory are kept: the last that became free is used next. */
struct slot {
    struct slot *next; /* free, or waiting to be submitted */
    struct tierfs_device_read read;
    const struct tierfs_origin *origin;
    int descriptor; /* its own */
    size_t got;
    char *memory;
    _Alignas(8) char message[MESSAGE_BYTES];
};

struct tierfs_disk {
    struct tierfs_disk_links links;
    struct tierfs_reading_lane *lane; /* of the thread, as the queues */
    struct tierfs_queues queues; /* descriptor -1: there is no io_uring */
    unsigned unsubmitted;
    int woken; /* an eventfd: there is something to be submitted */
    pthread_mutex_t lock; /* guards the lists */
    struct slot *free, *asked, **asked_end;
    struct slot slots[TIERFS_DISK_DEPTH];
};

/* -- for the threads that ask -- */

static struct slot *take_slot(struct tierfs_disk *disk)
{
    pthread_mutex_lock(&disk->lock);
    struct slot *slot = disk->free;
    if (slot != NULL)
        disk->free = slot->next;
    pthread_mutex_unlock(&disk->lock);
    return slot;
}

static void give_slot(struct tierfs_disk *disk, struct slot *slot)
{
    pthread_mutex_lock(&disk->lock);
    slot->next = disk->free;
    disk->free = slot;
    pthread_mutex_unlock(&disk->lock);
}

/* The lane's descriptor may mean another file as soon as the lane reads again. */
static bool fill_slot(struct slot *slot, const struct tierfs_device_read *read, const void *message,
                      size_t bytes, const struct tierfs_origin *origin)
{
    if (slot->memory == NULL)
        slot->memory = aligned_alloc(4096, HEADER_PLACE_BYTES + TIERFS_READING_BLOCKS_BYTES);
    if (slot->memory == NULL)
        return false;
    slot->descriptor = read->is_own ? read->descriptor : fcntl(read->descriptor, F_DUPFD_CLOEXEC, 0);
    if (slot->descriptor < 0)
        return false;
    slot->read = *read;
    slot->origin = origin;
    slot->got = 0;
    memcpy(slot->message, message, bytes);
    return true;
}

bool tierfs_disk_read(struct tierfs_disk *disk, const struct tierfs_device_read *read, const void *message,
                      size_t bytes, const struct tierfs_origin *origin)
{
    const uint64_t one = 1;
    struct slot *slot;

    if (bytes != MESSAGE_BYTES || read->bytes > TIERFS_READING_BLOCKS_BYTES)
        return false;
    slot = take_slot(disk);
    if (slot == NULL)
        return false;
    if (!fill_slot(slot, read, message, bytes, origin)) {
        give_slot(disk, slot);
        return false;
    }
    if (disk->queues.descriptor < 0)
        (void)posix_fadvise(slot->descriptor, (off_t)read->place, (off_t)read->bytes, POSIX_FADV_WILLNEED);
    pthread_mutex_lock(&disk->lock);
    bool is_first = disk->asked == NULL;
    slot->next = NULL;
    *disk->asked_end = slot;
    disk->asked_end = &slot->next;
    pthread_mutex_unlock(&disk->lock);
    if (is_first && write(disk->woken, &one, sizeof one) < 0)
        tierfs_warning("an event was lost  reason=\"%s\"", strerror(errno));
    return true;
}

/* -- the thread -- */

/* What has been asked for since the last call. */
static struct slot *take_asked(struct tierfs_disk *disk)
{
    pthread_mutex_lock(&disk->lock);
    struct slot *asked = disk->asked;
    disk->asked = NULL;
    disk->asked_end = &disk->asked;
    pthread_mutex_unlock(&disk->lock);
    return asked;
}

static void answer(const struct slot *slot, const void *message, size_t bytes)
{
    int taken = tierfs_origin_answer(slot->origin, message, bytes);

    /* ENOENT: the request was interrupted and nobody waits. */
    if (taken < 0 && taken != -ENOENT && taken != -ENODEV)
        tierfs_warning("an answer was not taken  reason=\"%s\"", strerror(-taken));
}

/* All of it has come, or will not: result is that of the last read. */
static void finish(struct tierfs_disk *disk, struct slot *slot, ssize_t result)
{
    const struct tierfs_device_read *read = &slot->read;
    char *blocks = slot->memory + HEADER_PLACE_BYTES;
    const struct fuse_in_header *asked = (const void *)slot->message;

    close(slot->descriptor);
    if (tierfs_reading_check(disk->lane, read, blocks, result < 0 ? result : (ssize_t)slot->got)) {
        /* Right before the bytes, where others have been checked, or nothing was. */
        const struct fuse_out_header header = {.len = (uint32_t)(sizeof header + read->piece.length),
                                               .unique = asked->unique};
        char *place = blocks + read->skip - sizeof header;

        memcpy(place, &header, sizeof header);
        answer(slot, place, header.len);
    } else {
        disk->links.relay(disk->links.context, slot->message, MESSAGE_BYTES, slot->origin);
    }
    give_slot(disk, slot);
}

/* One after the other. */
static void read_in_turn(struct tierfs_disk *disk, struct slot *slot)
{
    ssize_t count;

    do {
        count = tierfs_read_at(slot->descriptor, slot->memory + HEADER_PLACE_BYTES + slot->got,
                               slot->read.bytes - slot->got, slot->read.place + slot->got, 0);
        if (count > 0)
            slot->got += (size_t)count;
    } while (count > 0 && slot->got < slot->read.bytes);
    finish(disk, slot, count);
}

static void submit(struct tierfs_disk *disk, struct slot *slot)
{
    struct io_uring_sqe *entry = tierfs_queues_next(&disk->queues);

    disk->unsubmitted++;
    entry->opcode = IORING_OP_READ;
    entry->fd = slot->descriptor;
    entry->addr = (uint64_t)(uintptr_t)(slot->memory + HEADER_PLACE_BYTES + slot->got);
    entry->len = (uint32_t)(slot->read.bytes - slot->got);
    entry->off = slot->read.place + slot->got;
    entry->user_data = (uint64_t)(uintptr_t)slot;
}

/* Completes whenever woken can be read. */
static void poll_woken(struct tierfs_disk *disk)
{
    struct io_uring_sqe *entry = tierfs_queues_next(&disk->queues);

    disk->unsubmitted++;
    entry->opcode = IORING_OP_POLL_ADD;
    entry->fd = disk->woken;
    entry->poll32_events = POLLIN;
    entry->len = POLL_MULTISHOT;
}

/* Some of it has come, an error, or nothing: the file ends there. */
static void take_part(struct tierfs_disk *disk, struct slot *slot, int result)
{
    if (result > 0)
        slot->got += (size_t)result;
    if ((result > 0 && slot->got < slot->read.bytes) || result == -EINTR)
        submit(disk, slot);
    else if (result == -EAGAIN || result == -ECANCELED)
        read_in_turn(disk, slot); /* no memory for it in the kernel, just now */
    else
        finish(disk, slot, result);
}

static void take_completions(struct tierfs_disk *disk)
{
    const struct tierfs_queues *queues = &disk->queues;
    unsigned head = atomic_load_explicit(queues->done_head, memory_order_relaxed);
    const unsigned tail = atomic_load_explicit(queues->done_tail, memory_order_acquire);
    uint64_t count;

    for (; head != tail; head++) {
        const struct io_uring_cqe completion = queues->done[head & queues->done_mask];
        struct slot *slot = (void *)(uintptr_t)completion.user_data;
        if (slot != NULL) {
            take_part(disk, slot, completion.res);
            continue;
        }
        if (read(disk->woken, &count, sizeof count) < 0 && errno != EAGAIN)
            tierfs_warning("an event cannot be read  reason=\"%s\"", strerror(errno));
        if ((completion.flags & MORE_TO_COME) == 0)
            poll_woken(disk);
    }
    atomic_store_explicit(queues->done_head, head, memory_order_release);
}

/* That should not be, and would not pass by itself. */
static void pause_after(int result)
{
    const struct timespec pause = {.tv_nsec = 100000000};

    tierfs_error("io_uring does not go on  reason=\"%s\"", strerror(-result));
    (void)nanosleep(&pause, NULL);
}

static void run_ring(struct tierfs_disk *disk)
{
    poll_woken(disk);
    for (;;) {
        int result = tierfs_queues_enter(&disk->queues, disk->unsubmitted, 1);
        if (result > 0)
            disk->unsubmitted -= (unsigned)result;
        else if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY)
            pause_after(result);
        take_completions(disk);
        struct slot *next;
        for (struct slot *slot = take_asked(disk); slot != NULL; slot = next) {
            next = slot->next;
            submit(disk, slot);
        }
    }
}

static void run_in_turn(struct tierfs_disk *disk)
{
    struct pollfd waiting = {.fd = disk->woken, .events = POLLIN};
    uint64_t count;

    for (;;) {
        struct slot *next;
        (void)poll(&waiting, 1, -1);
        (void)!read(disk->woken, &count, sizeof count);
        for (struct slot *slot = take_asked(disk); slot != NULL; slot = next) {
            next = slot->next;
            read_in_turn(disk, slot);
        }
    }
}

static void *work(void *context)
{
    struct tierfs_disk *disk = context;

    if (disk->queues.descriptor >= 0)
        run_ring(disk);
    else
        run_in_turn(disk);
    return NULL;
}

int tierfs_disk_create(const struct tierfs_disk_links *links, const struct tierfs_reading *reading,
                       bool in_turn, struct tierfs_disk **disk)
{
    struct tierfs_disk *made = calloc(1, sizeof *made);
    pthread_t thread;
    int result = made != NULL ? 0 : -ENOMEM;

    if (result < 0)
        return result;
    made->links = *links;
    made->asked_end = &made->asked;
    made->queues.descriptor = -1;
    for (size_t i = TIERFS_DISK_DEPTH; i-- > 0;) {
        made->slots[i].next = made->free;
        made->free = &made->slots[i];
    }
    pthread_mutex_init(&made->lock, NULL);
    made->woken = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (made->woken < 0)
        result = -errno;
    if (result == 0)
        result = tierfs_reading_lane_open(reading, &made->lane);
    if (result == 0) {
        /* Refused by a seccomp profile, kernel.io_uring_disabled or an old kernel: it goes without. */
        int refused =
            in_turn ? 0 : tierfs_queues_open(&made->queues, TIERFS_DISK_DEPTH + 2, TIERFS_SETUP_COOP_TASKRUN);
        if (refused < 0)
            tierfs_info("reads from the device without io_uring  reason=\"%s\"", strerror(-refused));
        result = -pthread_create(&thread, NULL, work, made);
    }
    if (result == 0) {
        pthread_detach(thread);
        *disk = made;
        return 0;
    }
    /* The lane, if there is one, is kept: this happens once, at the start. */
    if (made->woken >= 0)
        close(made->woken);
    pthread_mutex_destroy(&made->lock);
    free(made);
    return result;
}

bool tierfs_disk_has_ring(const struct tierfs_disk *disk)
{
    return disk->queues.descriptor >= 0;
}

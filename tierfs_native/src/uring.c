#define _GNU_SOURCE
#include "uring.h"

#include "answer.h"
#include "batch_queues.h"
#include "log.h"
#include "uring_message.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE_BYTES 4096u
#define SMALL_BYTES 8192u /* messages up to here are copied, so that the answer can be written over them */
#define SPARE_ENTRIES 2u  /* for the eventfd */
#define URING_CMD 46u     /* IORING_OP_URING_CMD */
#define POLL_MULTISHOT (UINT32_C(1) << 0)
#define MORE_TO_COME (UINT32_C(1) << 1) /* IORING_CQE_F_MORE */

/* One request at a time: the kernel's, ours while it is being answered, the kernel's again. */
struct entry {
    struct tierfs_origin origin; /* first: tierfs_origin.answer gets it */
    struct thread *thread;
    struct fuse_uring_req_header
        *header; /* at the start of a page; the end of that page is room for a message's head */
    char *payload;                        /* the pages behind it */
    struct iovec parts[2];
    uint16_t queue;
    uint64_t commit_id;
    uint64_t unique;
    struct entry *next_done;
};

struct thread {
    struct tierfs_uring *uring;
    unsigned number;
    pthread_t handle;
    struct tierfs_queues queues;
    unsigned unsubmitted;
    struct entry *entries;
    size_t entry_count;
    char *memory;
    size_t memory_bytes;
    int woken; /* eventfd: something is in done */
    pthread_mutex_t lock;
    struct entry *done; /* answered by other threads */
    char *message;      /* SMALL_BYTES */
    char *scratch;      /* SMALL_BYTES: for the answer to a message that lies in the payload */
};

struct tierfs_uring {
    struct tierfs_uring_links links;
    int device;
    size_t payload_bytes;
    unsigned queue_count, thread_count, depth;
    pthread_mutex_t lock; /* guards what follows up to the threads */
    pthread_cond_t changed;
    unsigned prepared; /* threads that are ready, or have failed */
    int failure;
    enum {
        WAITING,
        BEGUN,
        GIVEN_UP
    } phase;
    atomic_int state; /* see tierfs_uring_state */
    atomic_uint_fast64_t requests;
    struct thread threads[TIERFS_URING_MAX_THREADS];
};

/* -- how many ------------------------------------------------------------------------------------------------------ */

unsigned tierfs_uring_depth(unsigned queues, size_t payload_bytes)
{
    uint64_t depth;

    if (queues == 0 || payload_bytes == 0)
        return 0;
    depth = TIERFS_URING_MEMORY_BYTES / queues / (payload_bytes + PAGE_BYTES);
    return depth > TIERFS_URING_MAX_DEPTH ? TIERFS_URING_MAX_DEPTH : (unsigned)depth;
}

unsigned tierfs_uring_count_cpus(const char *possible)
{
    unsigned long count = 0;

    for (;;) {
        char *end;
        unsigned long first = strtoul(possible, &end, 10);
        unsigned long last = first;
        if (end == possible || first > UINT16_MAX)
            return 0;
        if (*end == '-') {
            possible = end + 1;
            last = strtoul(possible, &end, 10);
            if (end == possible || last < first || last > UINT16_MAX)
                return 0;
        }
        count += last - first + 1;
        if (*end == '\0' || *end == '\n')
            return count <= UINT16_MAX ? (unsigned)count : 0;
        if (*end != ',')
            return 0;
        possible = end + 1;
    }
}

static unsigned possible_cpus(void)
{
    char text[1024];
    int descriptor = open("/sys/devices/system/cpu/possible", O_RDONLY | O_CLOEXEC);
    ssize_t bytes = descriptor >= 0 ? read(descriptor, text, sizeof text - 1) : -1;

    if (descriptor >= 0)
        close(descriptor);
    if (bytes <= 0)
        return 0;
    text[bytes] = '\0';
    return tierfs_uring_count_cpus(text);
}

/* -- what is submitted --------------------------------------------------------------------------------------------- */

/* The layout of an entry of 128 bytes; older headers do not name the end of it. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "cmd_op is the lower half of off");
static void command(struct entry *entry, uint32_t operation)
{
    struct thread *thread = entry->thread;
    struct io_uring_sqe *submission = tierfs_queues_next(&thread->queues);
    const struct fuse_uring_cmd_req request = {.commit_id = entry->commit_id, .qid = entry->queue};

    thread->unsubmitted++;
    submission->opcode = URING_CMD;
    submission->fd = thread->uring->device;
    submission->off = operation; /* cmd_op: the lower half, on little-endian machines */
    submission->user_data = (uint64_t)(uintptr_t)entry;
    if (operation == FUSE_IO_URING_CMD_REGISTER) {
        submission->addr = (uint64_t)(uintptr_t)entry->parts;
        submission->len = 2;
    }
    memcpy((char *)submission + 48, &request, sizeof request);
}

/* Completes whenever woken can be read. */
static void poll_woken(struct thread *thread)
{
    struct io_uring_sqe *submission = tierfs_queues_next(&thread->queues);

    thread->unsubmitted++;
    submission->opcode = IORING_OP_POLL_ADD;
    submission->fd = thread->woken;
    submission->poll32_events = POLLIN;
    submission->len = POLL_MULTISHOT;
}

static void commit(struct entry *entry, long result)
{
    tierfs_uring_answer_header(entry->header, entry->unique, result);
    command(entry, FUSE_IO_URING_CMD_COMMIT_AND_FETCH);
}

/* -- answers of other threads -------------------------------------------------------------------------------------- */

static int answer_entry(const struct tierfs_origin *origin, const void *message, size_t bytes)
{
    struct entry *entry = (void *)(uintptr_t)origin;
    struct thread *thread = entry->thread;
    struct fuse_out_header head;
    const uint64_t one = 1;

    if (bytes < sizeof head || bytes - sizeof head > thread->uring->payload_bytes)
        return -EINVAL;
    memcpy(&head, message, sizeof head);
    if (head.unique != entry->unique || head.error > 0)
        return -EINVAL;
    if (head.error == 0)
        memcpy(entry->payload, (const char *)message + sizeof head, bytes - sizeof head);
    tierfs_uring_answer_header(entry->header, entry->unique,
                               head.error < 0 ? head.error : (long)(bytes - sizeof head));
    pthread_mutex_lock(&thread->lock);
    bool first = thread->done == NULL;
    entry->next_done = thread->done;
    thread->done = entry;
    pthread_mutex_unlock(&thread->lock);
    if (first && write(thread->woken, &one, sizeof one) < 0)
        return -errno;
    return 0;
}

static void commit_done(struct thread *thread)
{
    pthread_mutex_lock(&thread->lock);
    struct entry *entry = thread->done;
    thread->done = NULL;
    pthread_mutex_unlock(&thread->lock);
    for (struct entry *next; entry != NULL; entry = next) {
        next = entry->next_done;
        command(entry, FUSE_IO_URING_CMD_COMMIT_AND_FETCH);
    }
}

/* -- a thread ------------------------------------------------------------------------------------------------------ */

static void serve(struct thread *thread, struct entry *entry)
{
    struct tierfs_uring *uring = thread->uring;
    struct fuse_in_header head;
    char *message;
    long result = -EIO;

    memcpy(&head, entry->header->in_out, sizeof head);
    entry->unique = head.unique;
    entry->commit_id = entry->header->ring_ent_in_out.commit_id;
    atomic_fetch_add_explicit(&uring->requests, 1, memory_order_relaxed);
    size_t bytes = tierfs_uring_message(entry->header, entry->payload, uring->payload_bytes, thread->message,
                                        SMALL_BYTES, &message);
    if (bytes == 0 || head.opcode == FUSE_FORGET || head.opcode == FUSE_BATCH_FORGET ||
        head.opcode == FUSE_INTERRUPT) {
        tierfs_error("a request from a ring is not understood  opcode=%u len=%u payload=%u", head.opcode,
                     head.len, entry->header->ring_ent_in_out.payload_sz);
    } else {
        bool is_copy = message == thread->message;
        result = uring->links.answer(uring->links.context, thread->number, message, bytes, &entry->origin,
                                     is_copy ? entry->payload : thread->scratch,
                                     is_copy ? uring->payload_bytes : SMALL_BYTES);
        if (result == TIERFS_NO_REPLY)
            return; /* answer_entry has been called, or will be */
        if (!is_copy && result > 0)
            memcpy(entry->payload, thread->scratch, (size_t)result);
    }
    commit(entry, result);
}

/* The entry is out of use. */
static void note_failure(struct tierfs_uring *uring, int result)
{
    int known = 0;

    if (result == -ENOTCONN || result == -ECONNABORTED)
        return; /* the mount is gone */
    if (atomic_compare_exchange_strong(&uring->state, &known, result) || known == 1) {
        atomic_store(&uring->state, result);
        tierfs_error("the kernel does not take a queue of requests  reason=\"%s\"", strerror(-result));
    }
}

static void take_completions(struct thread *thread)
{
    struct tierfs_queues *queues = &thread->queues;
    unsigned head = atomic_load_explicit(queues->done_head, memory_order_relaxed);
    const unsigned tail = atomic_load_explicit(queues->done_tail, memory_order_acquire);

    for (; head != tail; head++) {
        const struct io_uring_cqe completion = queues->done[head & queues->done_mask];
        struct entry *entry = (void *)(uintptr_t)completion.user_data;
        uint64_t count;
        if (entry == NULL) {
            if (read(thread->woken, &count, sizeof count) < 0 && errno != EAGAIN)
                tierfs_warning("an event cannot be read  reason=\"%s\"", strerror(errno));
            if ((completion.flags & MORE_TO_COME) == 0)
                poll_woken(thread);
        } else if (completion.res < 0) {
            note_failure(thread->uring, completion.res);
        } else {
            serve(thread, entry);
        }
    }
    atomic_store_explicit(queues->done_head, head, memory_order_release);
}

static void run(struct thread *thread)
{
    for (size_t i = 0; i < thread->entry_count; i++)
        command(&thread->entries[i], FUSE_IO_URING_CMD_REGISTER);
    poll_woken(thread);
    for (;;) {
        int result = tierfs_queues_enter(&thread->queues, thread->unsubmitted, 1);
        if (result > 0)
            thread->unsubmitted -= (unsigned)result;
        if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY) {
            note_failure(thread->uring, result);
            return;
        }
        take_completions(thread);
        commit_done(thread);
    }
}

/* A thread for each CPU: what is asked there is answered there. */
static void stay_on_cpu(unsigned number)
{
    cpu_set_t cpus;

    CPU_ZERO(&cpus);
    CPU_SET(number, &cpus);
    (void)sched_setaffinity(0, sizeof cpus, &cpus); /* that CPU may be offline, or not ours */
}

static int prepare_entries(struct thread *thread)
{
    const struct tierfs_uring *uring = thread->uring;
    const size_t entry_bytes = PAGE_BYTES + (uring->payload_bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    size_t made = 0;

    for (unsigned queue = thread->number; queue < uring->queue_count; queue += uring->thread_count)
        thread->entry_count += uring->depth;
    thread->entries = calloc(thread->entry_count, sizeof *thread->entries);
    thread->memory_bytes = thread->entry_count * entry_bytes;
    thread->memory =
        mmap(NULL, thread->memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (thread->memory == MAP_FAILED)
        thread->memory = NULL;
    thread->message = aligned_alloc(64, SMALL_BYTES);
    thread->scratch = aligned_alloc(64, SMALL_BYTES);
    if (thread->entries == NULL || thread->memory == NULL || thread->message == NULL ||
        thread->scratch == NULL)
        return -ENOMEM;
    for (unsigned queue = thread->number; queue < uring->queue_count; queue += uring->thread_count)
        for (unsigned i = 0; i < uring->depth; i++, made++) {
            struct entry *entry = &thread->entries[made];
            char *memory = thread->memory + made * entry_bytes;
            entry->origin.answer = answer_entry;
            entry->thread = thread;
            entry->queue = (uint16_t)queue;
            entry->header = (void *)memory;
            entry->payload = memory + PAGE_BYTES;
            entry->parts[0] = (struct iovec){entry->header, sizeof *entry->header};
            entry->parts[1] = (struct iovec){entry->payload, uring->payload_bytes};
        }
    return 0;
}

static int prepare(struct thread *thread)
{
    int result = prepare_entries(thread);

    thread->queues.descriptor = -1;
    thread->woken = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (result == 0 && thread->woken < 0)
        result = -errno;
    if (result == 0) /* by the thread that submits: SINGLE_ISSUER */
        result =
            tierfs_queues_open(&thread->queues, (unsigned)thread->entry_count + SPARE_ENTRIES,
                               TIERFS_SETUP_SQE128 | TIERFS_SETUP_SINGLE_ISSUER | TIERFS_SETUP_DEFER_TASKRUN);
    return result;
}

static void discard(struct thread *thread)
{
    tierfs_queues_close(&thread->queues);
    if (thread->woken >= 0)
        close(thread->woken);
    if (thread->memory != NULL)
        munmap(thread->memory, thread->memory_bytes);
    free(thread->entries);
    free(thread->message);
    free(thread->scratch);
}

static void *work(void *context)
{
    struct thread *thread = context;
    struct tierfs_uring *uring = thread->uring;

    if (uring->thread_count == uring->queue_count)
        stay_on_cpu(thread->number);
    int result = prepare(thread);
    pthread_mutex_lock(&uring->lock);
    if (result < 0)
        uring->failure = result;
    uring->prepared++;
    pthread_cond_broadcast(&uring->changed);
    while (uring->phase == WAITING)
        pthread_cond_wait(&uring->changed, &uring->lock);
    bool begun = uring->phase == BEGUN;
    pthread_mutex_unlock(&uring->lock);
    if (begun) {
        run(thread);
        return NULL; /* others may still answer into its entries */
    }
    discard(thread);
    return NULL;
}

/* -- for the owner ------------------------------------------------------------------------------------------------- */

static void destroy(struct tierfs_uring *uring)
{
    for (unsigned i = 0; i < TIERFS_URING_MAX_THREADS; i++)
        pthread_mutex_destroy(&uring->threads[i].lock);
    pthread_cond_destroy(&uring->changed);
    pthread_mutex_destroy(&uring->lock);
    free(uring);
}

/* Starts the threads and waits until each is ready. How many there are afterwards: all, or none and -errno. */
static int start_threads(struct tierfs_uring *uring)
{
    unsigned started = 0;
    int result = 0;

    while (started < uring->thread_count && result == 0) {
        result = -pthread_create(&uring->threads[started].handle, NULL, work, &uring->threads[started]);
        started += result == 0;
    }
    pthread_mutex_lock(&uring->lock);
    while (uring->prepared < started)
        pthread_cond_wait(&uring->changed, &uring->lock);
    if (result == 0)
        result = uring->failure;
    if (result < 0) {
        uring->phase = GIVEN_UP;
        pthread_cond_broadcast(&uring->changed);
    }
    pthread_mutex_unlock(&uring->lock);
    for (unsigned i = 0; i < started && result < 0; i++)
        (void)pthread_join(uring->threads[i].handle, NULL);
    return result;
}

int tierfs_uring_create(const struct tierfs_uring_links *links, int device, size_t payload_bytes,
                        struct tierfs_uring **uring)
{
    struct tierfs_uring *made;
    unsigned queue_count = possible_cpus();
    int result;

    if (queue_count == 0)
        return -ENOSYS;
    made = calloc(1, sizeof *made);
    if (made == NULL)
        return -ENOMEM;
    made->links = *links;
    made->device = device;
    made->payload_bytes = payload_bytes;
    made->queue_count = queue_count;
    made->thread_count = queue_count < TIERFS_URING_MAX_THREADS ? queue_count : TIERFS_URING_MAX_THREADS;
    made->depth = tierfs_uring_depth(queue_count, payload_bytes);
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->changed, NULL);
    for (unsigned i = 0; i < TIERFS_URING_MAX_THREADS; i++) {
        made->threads[i].uring = made;
        made->threads[i].number = i;
        pthread_mutex_init(&made->threads[i].lock, NULL);
    }
    result = made->depth != 0 ? start_threads(made) : -E2BIG;
    if (result < 0) {
        destroy(made);
        return result;
    }
    *uring = made;
    return 0;
}

void tierfs_uring_begin(struct tierfs_uring *uring)
{
    int waiting = 0;

    (void)atomic_compare_exchange_strong(&uring->state, &waiting, 1);
    pthread_mutex_lock(&uring->lock);
    uring->phase = BEGUN;
    pthread_cond_broadcast(&uring->changed);
    pthread_mutex_unlock(&uring->lock);
    for (unsigned i = 0; i < uring->thread_count; i++)
        (void)pthread_detach(uring->threads[i].handle);
}

int tierfs_uring_state(const struct tierfs_uring *uring)
{
    return atomic_load(&uring->state);
}

uint64_t tierfs_uring_requests(const struct tierfs_uring *uring)
{
    return atomic_load(&uring->requests);
}

unsigned tierfs_uring_depth_of(const struct tierfs_uring *uring)
{
    return uring->depth;
}

/* Threads, rings and memory: made before INIT is answered, and kept from then on. */
#define _GNU_SOURCE
#include "uring.h"

#include "uring_queue.h"
#include "uring_state.h"

#include <errno.h>
#include <sched.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#define SPARE_ENTRIES 2u  /* for the eventfd */

/* -- a thread ------------------------------------------------------------------------------------------------------ */

/* A thread for each CPU: what is asked there is answered there. */
static void stay_on_cpu(unsigned number)
{
    cpu_set_t cpus;

    CPU_ZERO(&cpus);
    CPU_SET(number, &cpus);
    (void)sched_setaffinity(0, sizeof cpus, &cpus); /* that CPU may be offline, or not ours */
}

static int prepare_entries(struct tierfs_uring_thread *thread)
{
    const struct tierfs_uring *uring = thread->uring;
    const size_t entry_bytes =
        TIERFS_URING_PAGE_BYTES + (uring->payload_bytes + TIERFS_URING_PAGE_BYTES - 1) /
                                      TIERFS_URING_PAGE_BYTES * TIERFS_URING_PAGE_BYTES;
    size_t made = 0;

    for (unsigned queue = thread->number; queue < uring->queue_count; queue += uring->thread_count)
        thread->entry_count += uring->depth;
    thread->entries = calloc(thread->entry_count, sizeof *thread->entries);
    thread->memory_bytes = thread->entry_count * entry_bytes;
    thread->memory =
        mmap(NULL, thread->memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (thread->memory == MAP_FAILED)
        thread->memory = NULL;
    thread->message = aligned_alloc(64, TIERFS_URING_SMALL_BYTES);
    thread->scratch = aligned_alloc(64, TIERFS_URING_SMALL_BYTES);
    if (thread->entries == NULL || thread->memory == NULL || thread->message == NULL ||
        thread->scratch == NULL)
        return -ENOMEM;
    for (unsigned queue = thread->number; queue < uring->queue_count; queue += uring->thread_count)
        for (unsigned i = 0; i < uring->depth; i++, made++) {
            struct tierfs_uring_entry *entry = &thread->entries[made];
            char *memory = thread->memory + made * entry_bytes;
            entry->origin.answer = tierfs_uring_answer_entry;
            entry->thread = thread;
            entry->queue = (uint16_t)queue;
            entry->header = (void *)memory;
            entry->payload = memory + TIERFS_URING_PAGE_BYTES;
            entry->parts[0] = (struct iovec){entry->header, sizeof *entry->header};
            entry->parts[1] = (struct iovec){entry->payload, uring->payload_bytes};
        }
    return 0;
}

static int prepare(struct tierfs_uring_thread *thread)
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

static void discard(struct tierfs_uring_thread *thread)
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
    struct tierfs_uring_thread *thread = context;
    struct tierfs_uring *uring = thread->uring;

    if (uring->thread_count == uring->queue_count)
        stay_on_cpu(thread->number);
    int result = prepare(thread);
    pthread_mutex_lock(&uring->lock);
    if (result < 0)
        uring->failure = result;
    uring->prepared++;
    pthread_cond_broadcast(&uring->changed);
    while (uring->phase == TIERFS_URING_WAITING)
        pthread_cond_wait(&uring->changed, &uring->lock);
    bool begun = uring->phase == TIERFS_URING_BEGUN;
    pthread_mutex_unlock(&uring->lock);
    if (begun) {
        tierfs_uring_run(thread);
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
        uring->phase = TIERFS_URING_GIVEN_UP;
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
    unsigned queue_count = tierfs_uring_possible_cpus();
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
    uring->phase = TIERFS_URING_BEGUN;
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

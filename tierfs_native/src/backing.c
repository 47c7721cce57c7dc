#define _GNU_SOURCE
#include "backing.h"

#include "abi.h"
#include "log.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#define BUCKETS 16384u

struct inode_state {
    struct inode_state *next;
    uint64_t ino;
    uint32_t opening;         /* requests on their way to the engine */
    uint32_t opening_writers; /* of those, for writing */
    uint32_t cached;          /* open through the page cache */
    uint32_t here;   /* of those, opened by the front itself */
    uint32_t passed;          /* open and passed through */
    int32_t backing_id;       /* while passed > 0 */
    uint64_t file_device, file_ino; /* likewise */
    bool tells_close;               /* likewise */
    int lent;                 /* descriptor from the engine, or -1 */
};

struct tierfs_backing {
    pthread_mutex_t lock;
    int device;
    int refusal;
    bool stopped; /* opens are not asked for any more */
    uint64_t opens;
    uint64_t here; /* opens that the front answered, and that are not over */
    struct inode_state *buckets[BUCKETS];
};

int tierfs_backing_create(struct tierfs_backing **backing)
{
    struct tierfs_backing *made = calloc(1, sizeof *made);

    if (made == NULL)
        return -ENOMEM;
    made->device = -1;
    pthread_mutex_init(&made->lock, NULL);
    *backing = made;
    return 0;
}

void tierfs_backing_destroy(struct tierfs_backing *backing)
{
    if (backing == NULL)
        return;
    for (uint32_t i = 0; i < BUCKETS; i++) {
        struct inode_state *state = backing->buckets[i];
        while (state != NULL) {
            struct inode_state *next = state->next;
            if (state->lent >= 0)
                close(state->lent);
            free(state);
            state = next;
        }
    }
    pthread_mutex_destroy(&backing->lock);
    free(backing);
}

void tierfs_backing_set_device(struct tierfs_backing *backing, int device)
{
    pthread_mutex_lock(&backing->lock);
    backing->device = device;
    pthread_mutex_unlock(&backing->lock);
}

static struct inode_state **find(struct tierfs_backing *backing, uint64_t ino)
{
    struct inode_state **link = &backing->buckets[(ino * 0x9E3779B97F4A7C15u >> 32) % BUCKETS];

    while (*link != NULL && (*link)->ino != ino)
        link = &(*link)->next;
    return link;
}

/* The state of ino, made if need be. NULL: no memory; then the inode is opened through the page cache, unseen. */
static struct inode_state *get(struct tierfs_backing *backing, uint64_t ino)
{
    struct inode_state **link = find(backing, ino);

    if (*link == NULL) {
        *link = calloc(1, sizeof **link);
        if (*link != NULL) {
            (*link)->ino = ino;
            (*link)->lent = -1;
        }
    }
    return *link;
}

static void drop_if_unused(struct tierfs_backing *backing, uint64_t ino)
{
    struct inode_state **link = find(backing, ino);
    struct inode_state *state = *link;

    if (state == NULL || state->opening != 0 || state->cached != 0 || state->passed != 0)
        return;
    *link = state->next;
    if (state->lent >= 0)
        close(state->lent);
    free(state);
}

int tierfs_backing_open_begins(struct tierfs_backing *backing, uint64_t ino, bool writes)
{
    int passed = 0;

    pthread_mutex_lock(&backing->lock);
    struct inode_state *state = backing->stopped ? NULL : get(backing, ino);
    if (backing->stopped) {
        passed = -ENOSYS;
    } else if (state != NULL) {
        state->opening++;
        state->opening_writers += writes ? 1u : 0u;
        passed = state->passed != 0;
    }
    pthread_mutex_unlock(&backing->lock);
    return passed;
}

void tierfs_backing_lend(struct tierfs_backing *backing, uint64_t ino, int descriptor)
{
    pthread_mutex_lock(&backing->lock);
    struct inode_state *state = backing->stopped ? NULL : get(backing, ino);
    if (state != NULL) {
        /* The newest counts: what an engine has lent that is dead, nobody keeps in place any more. */
        int older = state->lent;
        state->lent = descriptor;
        descriptor = older;
    }
    pthread_mutex_unlock(&backing->lock);
    if (descriptor >= 0)
        close(descriptor);
}

static void register_file(struct tierfs_backing *backing, struct inode_state *state)
{
    struct fuse_backing_map map = {.fd = state->lent};

    if (backing->device < 0 || state->lent < 0)
        return;
    int id = ioctl(backing->device, FUSE_DEV_IOC_BACKING_OPEN, &map);
    if (id > 0) {
        struct stat found;
        if (fstat(state->lent, &found) < 0)
            memset(&found, 0, sizeof found);
        state->backing_id = id;
        state->tells_close = false;
        state->file_device = found.st_dev;
        state->file_ino = found.st_ino;
        return;
    }
    if (backing->refusal == 0) {
        backing->refusal = id < 0 ? errno : EINVAL;
        tierfs_warning("the kernel refuses passthrough  reason=\"%s\"", strerror(backing->refusal));
    }
}

/* Under the lock. One more open, of the kind that the others are, or of the kind that is wanted. The backing id, or 0. */
static int32_t count_open(struct tierfs_backing *backing, struct inode_state *state, bool wanted)
{
    if (state->passed == 0 && state->cached == 0 && state->opening_writers == 0 && wanted)
        register_file(backing, state);
    if (state->lent >= 0 && state->opening == 0) {
        /* The kernel has its own reference to a registered file. */
        close(state->lent);
        state->lent = -1;
    }
    if (state->backing_id != 0) {
        state->passed++;
        backing->opens++;
    } else {
        state->cached++;
    }
    return state->backing_id;
}

int32_t tierfs_backing_open_ends(struct tierfs_backing *backing, uint64_t ino, bool writes, bool wanted)
{
    int32_t id = 0;

    pthread_mutex_lock(&backing->lock);
    struct inode_state *state = get(backing, ino);
    if (state != NULL) {
        if (state->opening > 0)
            state->opening--;
        if (writes && state->opening_writers > 0)
            state->opening_writers--;
        id = count_open(backing, state, wanted);
    }
    pthread_mutex_unlock(&backing->lock);
    return id;
}

void tierfs_backing_open_failed(struct tierfs_backing *backing, uint64_t ino, bool writes)
{
    pthread_mutex_lock(&backing->lock);
    struct inode_state *state = *find(backing, ino);
    if (state != NULL) {
        if (state->opening > 0)
            state->opening--;
        if (writes && state->opening_writers > 0)
            state->opening_writers--;
        drop_if_unused(backing, ino);
    }
    pthread_mutex_unlock(&backing->lock);
}

int32_t tierfs_backing_created(struct tierfs_backing *backing, uint64_t ino, bool wanted)
{
    int32_t id = 0;

    pthread_mutex_lock(&backing->lock);
    struct inode_state *state = get(backing, ino);
    if (state != NULL)
        id = count_open(backing, state, wanted);
    pthread_mutex_unlock(&backing->lock);
    return id;
}

int tierfs_backing_list_passed(struct tierfs_backing *backing, struct tierfs_passed_file **files,
                               size_t *count)
{
    size_t capacity = 0;

    *count = 0;
    pthread_mutex_lock(&backing->lock);
    for (uint32_t i = 0; i < BUCKETS; i++)
        for (const struct inode_state *state = backing->buckets[i]; state != NULL; state = state->next)
            capacity += state->passed != 0;
    *files = calloc(capacity + 1, sizeof **files);
    for (uint32_t i = 0; *files != NULL && i < BUCKETS; i++)
        for (const struct inode_state *state = backing->buckets[i]; state != NULL; state = state->next)
            if (state->passed != 0)
                (*files)[(*count)++] = (struct tierfs_passed_file){
                    .ino = state->ino, .file_device = state->file_device, .file_ino = state->file_ino};
    pthread_mutex_unlock(&backing->lock);
    return *files != NULL ? 0 : -ENOMEM;
}

void tierfs_backing_tell_close(struct tierfs_backing *backing, uint64_t ino)
{
    pthread_mutex_lock(&backing->lock);
    struct inode_state *state = *find(backing, ino);
    if (state != NULL)
        state->tells_close = true;
    pthread_mutex_unlock(&backing->lock);
}

bool tierfs_backing_tells_close(struct tierfs_backing *backing, uint64_t ino)
{
    pthread_mutex_lock(&backing->lock);
    const struct inode_state *state = *find(backing, ino);
    bool tells = state != NULL && state->passed != 0 && state->tells_close;
    pthread_mutex_unlock(&backing->lock);
    return tells;
}

bool tierfs_backing_is_passed(struct tierfs_backing *backing, uint64_t ino)
{
    pthread_mutex_lock(&backing->lock);
    const struct inode_state *state = *find(backing, ino);
    bool passed = state != NULL && state->passed != 0;
    pthread_mutex_unlock(&backing->lock);
    return passed;
}

void tierfs_backing_drop_unasked(struct tierfs_backing *backing)
{
    pthread_mutex_lock(&backing->lock);
    for (uint32_t i = 0; i < BUCKETS; i++)
        for (struct inode_state *state = backing->buckets[i], *next; state != NULL; state = next) {
            next = state->next;
            drop_if_unused(backing, state->ino);
        }
    pthread_mutex_unlock(&backing->lock);
}

bool tierfs_backing_open_here(struct tierfs_backing *backing, uint64_t ino)
{
    bool opened = false;

    pthread_mutex_lock(&backing->lock);
    struct inode_state *state = backing->stopped ? NULL : get(backing, ino);
    if (state != NULL && state->passed == 0) {
        state->cached++;
        state->here++;
        backing->here++;
        opened = true;
    }
    pthread_mutex_unlock(&backing->lock);
    return opened;
}

void tierfs_backing_released_here(struct tierfs_backing *backing, uint64_t ino)
{
    pthread_mutex_lock(&backing->lock);
    struct inode_state *state = *find(backing, ino);
    if (state != NULL && state->here > 0) {
        state->here--;
        backing->here--;
        state->cached--;
        drop_if_unused(backing, ino);
    }
    pthread_mutex_unlock(&backing->lock);
}

uint64_t tierfs_backing_count_here(struct tierfs_backing *backing)
{
    pthread_mutex_lock(&backing->lock);
    uint64_t count = backing->here;
    pthread_mutex_unlock(&backing->lock);
    return count;
}

int tierfs_backing_list_here(struct tierfs_backing *backing, uint64_t **inos, size_t *count)
{
    size_t capacity = 0;

    *count = 0;
    pthread_mutex_lock(&backing->lock);
    for (uint32_t i = 0; i < BUCKETS; i++)
        for (const struct inode_state *state = backing->buckets[i]; state != NULL; state = state->next)
            capacity += state->here != 0;
    *inos = calloc(capacity + 1, sizeof **inos);
    for (uint32_t i = 0; *inos != NULL && i < BUCKETS; i++)
        for (const struct inode_state *state = backing->buckets[i]; state != NULL; state = state->next)
            if (state->here != 0)
                (*inos)[(*count)++] = state->ino;
    pthread_mutex_unlock(&backing->lock);
    return *inos != NULL ? 0 : -ENOMEM;
}

void tierfs_backing_released(struct tierfs_backing *backing, uint64_t ino)
{
    pthread_mutex_lock(&backing->lock);
    struct inode_state *state = *find(backing, ino);
    if (state != NULL) {
        if (state->passed > 0) {
            if (--state->passed == 0) {
                uint32_t id = (uint32_t)state->backing_id;
                state->backing_id = 0;
                /* Nobody keeps a file in place any more that was lent before now. */
                if (state->lent >= 0)
                    close(state->lent);
                state->lent = -1;
                if (ioctl(backing->device, FUSE_DEV_IOC_BACKING_CLOSE, &id) < 0)
                    tierfs_warning("a backing file was not closed  reason=\"%s\"", strerror(errno));
            }
        } else if (state->cached > 0) {
            state->cached--;
        }
        drop_if_unused(backing, ino);
    }
    pthread_mutex_unlock(&backing->lock);
}

/* Under the lock. Every open that there is was answered by the front itself, which keeps nothing for it. */
static bool has_only_own_opens(const struct tierfs_backing *backing)
{
    for (uint32_t i = 0; i < BUCKETS; i++)
        for (const struct inode_state *state = backing->buckets[i]; state != NULL; state = state->next)
            if (state->opening != 0 || state->passed != 0 || state->cached != state->here)
                return false;
    return true;
}

bool tierfs_backing_stop_opens(struct tierfs_backing *backing)
{
    pthread_mutex_lock(&backing->lock);
    if (!backing->stopped && has_only_own_opens(backing)) {
        backing->stopped = true;
        backing->here = 0;
        for (uint32_t i = 0; i < BUCKETS; i++)
            for (struct inode_state *state; (state = backing->buckets[i]) != NULL;) {
                backing->buckets[i] = state->next;
                if (state->lent >= 0)
                    close(state->lent);
                free(state);
            }
    }
    bool stopped = backing->stopped;
    pthread_mutex_unlock(&backing->lock);
    return stopped;
}

uint64_t tierfs_backing_opens(struct tierfs_backing *backing, int *refusal)
{
    pthread_mutex_lock(&backing->lock);
    uint64_t opens = backing->opens;
    *refusal = backing->refusal;
    pthread_mutex_unlock(&backing->lock);
    return opens;
}

#include "handles.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

/*
 * Open addressing with linear probing; fh 0 is no handle. Sizes are powers of two, at most half full, so that a
 * probe ends soon. Removal moves later entries of the same run back: no tombstones.
 */
struct tierfs_handles {
    pthread_mutex_t lock;
    struct tierfs_handle *slots;
    size_t capacity;
    size_t count;
};

static size_t slot_of(uint64_t fh, size_t capacity)
{
    return (size_t)((fh * 0x9E3779B97F4A7C15u) >> 17) & (capacity - 1);
}

int tierfs_handles_create(struct tierfs_handles **handles)
{
    struct tierfs_handles *made = calloc(1, sizeof *made);

    if (made == NULL)
        return -ENOMEM;
    made->capacity = 1024;
    made->slots = calloc(made->capacity, sizeof *made->slots);
    if (made->slots == NULL) {
        free(made);
        return -ENOMEM;
    }
    pthread_mutex_init(&made->lock, NULL);
    *handles = made;
    return 0;
}

void tierfs_handles_destroy(struct tierfs_handles *handles)
{
    if (handles == NULL)
        return;
    pthread_mutex_destroy(&handles->lock);
    free(handles->slots);
    free(handles);
}

static void place(struct tierfs_handle *slots, size_t capacity, const struct tierfs_handle *handle)
{
    size_t slot = slot_of(handle->fh, capacity);

    while (slots[slot].fh != 0 && slots[slot].fh != handle->fh)
        slot = (slot + 1) & (capacity - 1);
    slots[slot] = *handle;
}

static int grow(struct tierfs_handles *handles)
{
    size_t capacity = handles->capacity * 2;
    struct tierfs_handle *slots = calloc(capacity, sizeof *slots);

    if (slots == NULL)
        return -ENOMEM;
    for (size_t i = 0; i < handles->capacity; i++)
        if (handles->slots[i].fh != 0)
            place(slots, capacity, &handles->slots[i]);
    free(handles->slots);
    handles->slots = slots;
    handles->capacity = capacity;
    return 0;
}

int tierfs_handles_add(struct tierfs_handles *handles, const struct tierfs_handle *handle)
{
    int result = 0;

    if (handle->fh == 0)
        return -EINVAL;
    pthread_mutex_lock(&handles->lock);
    if (2 * (handles->count + 1) > handles->capacity)
        result = grow(handles);
    if (result == 0) {
        place(handles->slots, handles->capacity, handle);
        handles->count++;
    }
    pthread_mutex_unlock(&handles->lock);
    return result;
}

int tierfs_handles_remove(struct tierfs_handles *handles, uint64_t fh)
{
    int found = 0;

    if (fh == 0)
        return 0;
    pthread_mutex_lock(&handles->lock);
    size_t mask = handles->capacity - 1;
    size_t hole = slot_of(fh, handles->capacity);
    while (handles->slots[hole].fh != 0 && handles->slots[hole].fh != fh)
        hole = (hole + 1) & mask;
    if (handles->slots[hole].fh == fh) {
        found = 1;
        handles->count--;
        for (size_t next = (hole + 1) & mask; handles->slots[next].fh != 0; next = (next + 1) & mask) {
            size_t wanted = slot_of(handles->slots[next].fh, handles->capacity);
            /* It may move into the hole only if that lies between where it wants to be and where it is. */
            if (((next - wanted) & mask) >= ((next - hole) & mask)) {
                handles->slots[hole] = handles->slots[next];
                hole = next;
            }
        }
        handles->slots[hole].fh = 0;
    }
    pthread_mutex_unlock(&handles->lock);
    return found;
}

int tierfs_handles_copy(struct tierfs_handles *handles, struct tierfs_handle **copy, size_t *count)
{
    pthread_mutex_lock(&handles->lock);
    *count = 0;
    *copy = calloc(handles->count + 1, sizeof **copy);
    for (size_t i = 0; *copy != NULL && i < handles->capacity; i++)
        if (handles->slots[i].fh != 0)
            (*copy)[(*count)++] = handles->slots[i];
    pthread_mutex_unlock(&handles->lock);
    return *copy != NULL ? 0 : -ENOMEM;
}

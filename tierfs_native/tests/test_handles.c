/* The table of open handles, against a plain array: growth, collisions, removal within a run of the hash table. */
#include "handles.h"

#include <assert.h>
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define NUMBERS 6000u

static uint64_t state = 88172645463325252u;

static uint64_t next_random(void) /* xorshift64 */
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static void check_all(struct tierfs_handles *handles, const bool *open)
{
    static bool seen[NUMBERS + 1];
    struct tierfs_handle *copy;
    size_t count;
    size_t expected = 0;

    memset(seen, 0, sizeof seen);
    assert(tierfs_handles_copy(handles, &copy, &count) == 0);
    for (size_t i = 0; i < count; i++) {
        assert(copy[i].fh >= 1 && copy[i].fh <= NUMBERS && open[copy[i].fh] && !seen[copy[i].fh]);
        assert(copy[i].ino == copy[i].fh * 3 && copy[i].open_flags == (uint32_t)copy[i].fh);
        seen[copy[i].fh] = true;
    }
    for (size_t fh = 1; fh <= NUMBERS; fh++)
        expected += open[fh];
    assert(count == expected);
    free(copy);
}

int main(void)
{
    static bool open[NUMBERS + 1];
    struct tierfs_handles *handles;
    struct tierfs_handle none = {.fh = 0};

    assert(tierfs_handles_create(&handles) == 0);
    assert(tierfs_handles_add(handles, &none) == -EINVAL);
    assert(tierfs_handles_remove(handles, 0) == 0);
    check_all(handles, open);
    for (unsigned step = 0; step < 200000; step++) {
        uint64_t fh = 1 + next_random() % NUMBERS;
        /* Waves: mostly opened, then mostly closed. */
        bool wants_open = next_random() % 10 < ((step / 20000) % 2 == 0 ? 8u : 2u);

        if (wants_open && !open[fh]) {
            struct tierfs_handle handle = {.fh = fh, .ino = fh * 3, .open_flags = (uint32_t)fh};
            assert(tierfs_handles_add(handles, &handle) == 0);
            open[fh] = true;
        } else if (!wants_open) {
            assert(tierfs_handles_remove(handles, fh) == open[fh]);
            open[fh] = false;
        }
        if (step % 10000 == 0)
            check_all(handles, open);
    }
    check_all(handles, open);
    /* The same number twice is one handle. */
    struct tierfs_handle twice = {.fh = 1, .ino = 3, .open_flags = 1};
    assert(tierfs_handles_add(handles, &twice) == 0);
    open[1] = true;
    assert(tierfs_handles_add(handles, &twice) == 0);
    check_all(handles, open);
    assert(tierfs_handles_remove(handles, 1) == 1);
    assert(tierfs_handles_remove(handles, 1) == 0);
    tierfs_handles_destroy(handles);
    tierfs_handles_destroy(NULL);
    return 0;
}

#define _GNU_SOURCE
#include "front_handover.h"

#include "front_channel.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Those have no handle that an engine could restore; but the inodes have to live on without a name. */
static int tell_opened_here(struct tierfs_front *front)
{
    struct tierfs_handle handles[TIERFS_HANDLES_PER_MESSAGE];
    uint64_t *inos;
    size_t count;
    int result = tierfs_backing_list_here(front->backing, &inos, &count);

    for (size_t i = 0; result == 0 && i < count;) {
        size_t some = 0;
        for (; some < TIERFS_HANDLES_PER_MESSAGE && i < count; some++, i++)
            handles[some] = (struct tierfs_handle){
                .fh = TIERFS_FH_FRONT | inos[i], .ino = inos[i], .kind = TIERFS_HANDLE_FRONT};
        tierfs_front_tell(front, TIERFS_HANDLES, 0, handles, some * sizeof handles[0]);
    }
    free(inos);
    return result;
}

/* The same content may lie in several tiers: which file the kernel reads, only this process knows. */
static int tell_passed(struct tierfs_front *front)
{
    struct tierfs_passed_file *files;
    size_t count;
    int result = tierfs_backing_list_passed(front->backing, &files, &count);

    for (size_t i = 0; result == 0 && i < count; i += TIERFS_HANDLES_PER_MESSAGE) {
        size_t some = count - i < TIERFS_HANDLES_PER_MESSAGE ? count - i : TIERFS_HANDLES_PER_MESSAGE;
        tierfs_front_tell(front, TIERFS_PASSED, 0, files + i, some * sizeof *files);
    }
    free(files);
    return result;
}

int tierfs_front_hand_over(struct tierfs_front *front)
{
    struct tierfs_hello hello = {.front_pid = (uint32_t)getpid(), .engine_starts = front->engine_starts};
    struct tierfs_handle *handles;
    size_t count;

    memcpy(hello.place_mark, front->place_mark, sizeof hello.place_mark);
    int result = tierfs_handles_copy(front->handles, &handles, &count);

    if (result < 0)
        return result;
    uint64_t said = front->mounted ? TIERFS_HELLO_REATTACHED : 0;
    if (front->noopen != NULL && tierfs_noopen_has_begun(front->noopen))
        said |= TIERFS_HELLO_UNTOLD;
    tierfs_front_tell(front, TIERFS_HELLO, said, &hello, sizeof hello);
    for (size_t i = 0; i < count; i += TIERFS_HANDLES_PER_MESSAGE) {
        size_t some = count - i < TIERFS_HANDLES_PER_MESSAGE ? count - i : TIERFS_HANDLES_PER_MESSAGE;
        tierfs_front_tell(front, TIERFS_HANDLES, 0, handles + i, some * sizeof *handles);
    }
    free(handles);
    result = tell_passed(front);
    if (result == 0)
        result = tell_opened_here(front);
    tierfs_front_tell(front, TIERFS_HELLO_END, 0, NULL, 0);
    return result;
}
